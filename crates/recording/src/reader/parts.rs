//! Assembles the parts of a snapshot into a [`Trace`] of one device.
//!
//! In a file, segments precede the events, but the events decide which device is chosen. So the segments of
//! all devices are kept until then.

use std::collections::HashMap;

use serde::Deserialize;

use super::Limits;
use super::budget::{Budget, OverBudget};
use super::fields::ListedSegment;
use super::ignored::remove_ignored;
use crate::host::HOLDER_BYTES;
use crate::{
    Annotation, HostMemory, Mark, MissingEntries, Owner, Trace, TraceEvent, UnknownEntries,
};
use stratalloc::history::SegmentLayout;

/// The parts of a snapshot that were read.
#[derive(Default)]
pub(super) struct Parts {
    /// The parts that need no choice of a device, and the events of the chosen one.
    pub(super) trace: Trace,
    /// The segments of all devices.
    pub(super) segments: Vec<ListedSegment>,
    /// The chosen device, once it is known.
    pub(super) device: Option<u32>,
    /// The segments of pinned host memory.
    pub(super) host_segments: Vec<ListedSegment>,
    pub(super) host_events: Vec<TraceEvent>,
    /// The rows of the accounts of all devices.
    pub(super) account: Vec<ListedOwner>,
}

/// A row of an account, and its device.
#[derive(Deserialize)]
pub(super) struct ListedOwner {
    device: u32,
    owner: String,
    kind: String,
    bytes: i64,
    found_by: String,
}

/// Entries of a list that are not events.
#[derive(Default)]
pub(super) struct Beside {
    /// The number of events before the current entry.
    pub(super) events: u32,
    pub(super) unknown: UnknownEntries,
    pub(super) annotations: Vec<Annotation>,
    /// The moments at which the metadata of requests changed.
    pub(super) marks: Vec<Mark>,
    /// The metadata of the last request; empty if it had none.
    metadata: String,
}

impl Beside {
    /// Adds a mark before the current request if its metadata differs from that of the request before.
    pub(super) fn see(&mut self, metadata: &str, budget: &mut Budget) -> Result<(), OverBudget> {
        if metadata == self.metadata {
            return Ok(());
        }
        metadata.clone_into(&mut self.metadata);
        if !metadata.is_empty() {
            budget.charge(metadata.len() as u64)?;
            budget.reserve(&mut self.marks, 1)?;
            let (events_before, text) = (self.events, metadata.to_owned());
            self.marks.push(Mark { events_before, text });
        }
        Ok(())
    }
}

impl Parts {
    /// Returns the trace. Its segments are those of the chosen device and those without a recorded device,
    /// in address order.
    ///
    /// Without events, chooses the requested device, or else the one with the most reserved bytes. Adds
    /// entries of frees that the file does not contain, and charges their memory to the budget.
    pub(super) fn into_trace(
        self,
        limits: &Limits,
        budget: &mut Budget,
    ) -> Result<Trace, OverBudget> {
        let Self { mut trace, mut segments, device, host_segments, host_events, account } = self;
        let compared = trace.devices.first().map(|first| first.device);
        let only = || segments.iter().filter_map(|segment| segment.device).min();
        let device = limits.device.or(device).or(compared).or_else(only).unwrap_or_default();
        trace.device = device;
        let is_own = |s: &ListedSegment| s.device.is_none_or(|number| number == device);
        segments.retain(is_own);
        let with_stack = segments.iter().map(|segment| segment.stacks.len()).sum();
        // Without memory for the stacks of blocks, the recording is read without them.
        if let Ok(stacks) = budget.vec_of(with_stack) {
            trace.block_stacks = stacks;
            segments.iter_mut().for_each(|s| trace.block_stacks.append(&mut s.stacks));
            trace.block_stacks.sort_unstable_by_key(|block| block.address);
        }
        trace.segments = segments.into_iter().map(|segment| segment.layout).collect();
        SegmentLayout::sort(&mut trace.segments);
        trace.add_stacks_of_blocks(|bytes| budget.charge(bytes));
        let of_device = account.into_iter().filter(|listed| listed.device == device);
        let owner = |listed: ListedOwner| {
            let ListedOwner { owner, kind, bytes, found_by, .. } = listed;
            Owner { owner, kind, bytes, found_by }
        };
        trace.account = of_device.map(owner).collect();
        let blocks: usize = host_segments.iter().map(|s| s.layout.blocks.len()).sum();
        let room_bytes = HOLDER_BYTES.saturating_mul((blocks + host_events.len()) as u64);
        // Without memory for its holders, only the sums are computed.
        let has_room = budget.charge(room_bytes).is_ok();
        let mut stacks = HashMap::new();
        if has_room {
            let all = host_segments.iter().flat_map(|segment| &segment.stacks);
            stacks.extend(all.map(|block| (block.address, block.stack)));
        }
        let host: Vec<_> = host_segments.into_iter().map(|segment| segment.layout).collect();
        trace.host = HostMemory::of(&host, &host_events, &stacks, has_room);
        budget.release(if has_room { room_bytes } else { 0 });
        remove_ignored(&mut trace);
        MissingEntries::add_frees(&mut trace, |bytes| budget.charge(bytes))?;
        Ok(trace)
    }
}
