//! Assembles the parts of a snapshot into a [`Trace`] of one device.
//!
//! In a file, segments precede the traces. So the device to keep is known only after both are read.

use std::collections::BTreeSet;

use super::Limits;
use super::fields::ListedSegment;
use crate::replay::{Annotation, HostMemory, MadeHere, Stacks, Trace, TraceEvent, UnknownEntries};
use stratalloc::config::TorchVersion;
use stratalloc::history::SegmentLayout;

/// The parts of a snapshot that were read.
#[derive(Default)]
pub(super) struct Parts {
    pub(super) segments: Vec<ListedSegment>,
    /// The events of the chosen device.
    pub(super) events: Vec<TraceEvent>,
    /// The chosen device, once it is known.
    pub(super) device: Option<u32>,
    /// The number of other devices that have entries.
    pub(super) other_devices: u32,
    pub(super) conf: String,
    pub(super) made_here: Option<MadeHere>,
    /// The oldest version of PyTorch whose snapshots have the keys that were found.
    pub(super) torch: Option<TorchVersion>,
    pub(super) stacks: Stacks,
    /// Entries of the chosen device that are not events.
    pub(super) beside: Beside,
    /// Segments and entries of host memory.
    pub(super) host_segments: Vec<ListedSegment>,
    pub(super) host_events: Vec<TraceEvent>,
}

/// Entries of a list that are not events.
#[derive(Default)]
pub(super) struct Beside {
    /// The number of events before the current entry.
    pub(super) events: u32,
    pub(super) unknown: UnknownEntries,
    pub(super) annotations: Vec<Annotation>,
}

impl Parts {
    /// Returns the trace. It contains the segments of the chosen device only, in address order.
    ///
    /// For a recording without events, chooses the first device that has segments.
    pub(super) fn into_trace(self, limits: &Limits) -> Trace {
        let first = || self.segments.iter().filter_map(|s| s.device).min();
        let device = limits.device.or(self.device).or_else(first).unwrap_or_default();
        let mut other_devices = self.other_devices;
        if self.events.is_empty() && other_devices == 0 {
            // Without events, the other devices are those with segments.
            let numbers: BTreeSet<u32> = self.segments.iter().filter_map(|s| s.device).collect();
            let others = numbers.into_iter().filter(|number| *number != device).count();
            other_devices = u32::try_from(others).unwrap_or(u32::MAX);
        }
        let mut segments: Vec<SegmentLayout> = self
            .segments
            .into_iter()
            .filter(|s| s.device.is_none_or(|d| d == device))
            .map(|s| s.layout)
            .collect();
        SegmentLayout::sort(&mut segments);
        let host: Vec<_> = self.host_segments.into_iter().map(|segment| segment.layout).collect();
        Trace {
            events: self.events,
            segments,
            conf: self.conf,
            made_here: self.made_here,
            torch: self.torch,
            device,
            other_devices,
            requests_only: false,
            stacks: self.stacks,
            unknown: self.beside.unknown,
            annotations: self.beside.annotations,
            host: HostMemory::of(&host, &self.host_events),
        }
    }
}
