//! Who holds the live bytes at a moment: by recorded stack, by size and by age.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::recording::Recording;
use crate::history::Action;
use crate::ids::StreamId;
use crate::replay::{StackId, Trace};

/// A block that lives.
#[derive(Clone, Copy, Debug)]
pub(super) struct LiveBlock {
    /// Its number in the workload.
    pub(super) id: u32,
    pub(super) requested_bytes: u64,
    pub(super) stream: StreamId,
    /// How many requests came after it.
    pub(super) age_requests: u32,
}

/// Blocks that were asked for in one place.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holder {
    /// The recorded stack, in [`Trace::stacks`]; none where the recording has none.
    pub stack: Option<StackId>,
    /// How many blocks.
    pub blocks: u64,
    /// What they asked for, in bytes.
    pub requested_bytes: u64,
    /// How many requests came after the oldest of them.
    pub oldest_requests: u32,
    /// How many requests came after the newest of them.
    pub newest_requests: u32,
}

/// Blocks of one size on one stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SizeClass {
    /// What each asked for, in bytes.
    pub each_bytes: u64,
    /// The stream.
    pub stream: StreamId,
    /// How many blocks.
    pub blocks: u64,
    /// What they asked for together, in bytes.
    pub requested_bytes: u64,
}

/// Blocks of about one age.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AgeClass {
    /// At most this many requests came after each; none for the oldest class.
    pub up_to_requests: Option<u32>,
    /// How many blocks.
    pub blocks: u64,
    /// What they asked for, in bytes.
    pub requested_bytes: u64,
}

/// Who holds the live bytes at a moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holders {
    /// How many blocks live.
    pub blocks: u64,
    /// What they asked for, in bytes.
    pub requested_bytes: u64,
    /// The stacks that hold most, at most [`Holders::LARGEST`], largest first. Blocks without a stack are
    /// one of them.
    pub by_stack: Vec<Holder>,
    /// The sizes that hold most, at most [`Holders::LARGEST`], largest first.
    pub by_size: Vec<SizeClass>,
    /// All blocks by age, youngest first; classes without blocks are left out.
    pub by_age: Vec<AgeClass>,
}

/// Ends of the classes of age, in requests.
const AGES: [u32; 4] = [10, 100, 1_000, 10_000];

impl Holders {
    /// How many of each kind are told.
    pub const LARGEST: usize = 10;

    pub(super) fn of(recording: &Recording, live: &[LiveBlock]) -> Self {
        let stacks = StacksOfBlocks::of(&recording.trace, recording.workload.seeded);
        let mut holders = Self::default();
        let mut by_stack: BTreeMap<Option<StackId>, Holder> = BTreeMap::new();
        let mut by_size: BTreeMap<(u64, StreamId), u64> = BTreeMap::new();
        let mut by_age = [AgeClass::default(); AGES.len() + 1];
        for block in live {
            let LiveBlock { id, requested_bytes, stream, age_requests } = *block;
            holders.blocks += 1;
            holders.requested_bytes += requested_bytes;
            let stack = stacks.of_block(id);
            let unseen = || Holder { stack, newest_requests: u32::MAX, ..Holder::default() };
            let holder = by_stack.entry(stack).or_insert_with(unseen);
            holder.blocks += 1;
            holder.requested_bytes += requested_bytes;
            holder.oldest_requests = holder.oldest_requests.max(age_requests);
            holder.newest_requests = holder.newest_requests.min(age_requests);
            *by_size.entry((requested_bytes, stream)).or_default() += 1;
            let class = AGES.partition_point(|&end| end < age_requests);
            by_age[class].blocks += 1;
            by_age[class].requested_bytes += requested_bytes;
        }
        holders.by_stack = by_stack.into_values().collect();
        holders.by_stack.sort_by_key(|holder| Reverse(holder.requested_bytes));
        holders.by_stack.truncate(Self::LARGEST);
        let sized = by_size.into_iter().map(|((each_bytes, stream), blocks)| {
            let requested_bytes = each_bytes.saturating_mul(blocks);
            SizeClass { each_bytes, stream, blocks, requested_bytes }
        });
        holders.by_size = sized.collect();
        holders.by_size.sort_by_key(|class| Reverse(class.requested_bytes));
        holders.by_size.truncate(Self::LARGEST);
        let ends = AGES.into_iter().map(Some).chain([None]);
        let aged = by_age.into_iter().zip(ends);
        let aged = aged.map(|(class, up_to_requests)| AgeClass { up_to_requests, ..class });
        holders.by_age = aged.filter(|class| class.blocks > 0).collect();
        holders
    }
}

/// The stack of each block of a workload: blocks are numbered in the order of the requests, behind those
/// that lived before.
struct StacksOfBlocks {
    seeded: u32,
    of_requests: Vec<Option<StackId>>,
}

impl StacksOfBlocks {
    fn of(trace: &Trace, seeded: u32) -> Self {
        let is_request = |action| matches!(action, Action::Alloc | Action::OutOfMemory);
        let of_requests = match trace.stacks.is_empty() {
            true => Vec::new(),
            false => {
                let requests = trace.events.iter().filter(|event| is_request(event.action));
                requests.map(|event| event.stack).collect()
            }
        };
        Self { seeded, of_requests }
    }

    fn of_block(&self, id: u32) -> Option<StackId> {
        *self.of_requests.get(id.checked_sub(self.seeded)? as usize)?
    }
}
