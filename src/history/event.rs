//! One entry of the history, and one segment of the layout, with the names PyTorch uses.

use super::clock::Moment;
use super::context::Context;
use crate::ids::{PoolId, StreamId};
use crate::size::PoolKind;

/// What an allocator did.
///
/// Source of the names: PyTorch's memory snapshots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// A block was handed out; the size is what was requested.
    Alloc,
    /// The caller freed a block.
    FreeRequested,
    /// The block is free: at once, or when other streams had finished.
    FreeCompleted,
    /// A segment came from the driver.
    SegmentAlloc,
    /// A segment went back to the driver.
    SegmentFree,
    /// Pages were mapped.
    SegmentMap,
    /// Pages were unmapped.
    SegmentUnmap,
    /// A snapshot was taken; the size is the active bytes of all segments and the address is 0.
    Snapshot,
    /// A request failed; the size is the rounded request and the address the device's free bytes.
    OutOfMemory,
}

impl Action {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::Alloc,
        Self::FreeRequested,
        Self::FreeCompleted,
        Self::SegmentAlloc,
        Self::SegmentFree,
        Self::SegmentMap,
        Self::SegmentUnmap,
        Self::Snapshot,
        Self::OutOfMemory,
    ];

    /// The word that PyTorch writes.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Alloc => "alloc",
            Self::FreeRequested => "free_requested",
            Self::FreeCompleted => "free_completed",
            Self::SegmentAlloc => "segment_alloc",
            Self::SegmentFree => "segment_free",
            Self::SegmentMap => "segment_map",
            Self::SegmentUnmap => "segment_unmap",
            Self::Snapshot => "snapshot",
            Self::OutOfMemory => "oom",
        }
    }

    /// The action that PyTorch writes as `name`.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|action| action.name() == name)
    }

    /// Whether memory goes back, to the allocator or to the driver.
    #[must_use]
    pub const fn gives_back(self) -> bool {
        matches!(
            self,
            Self::FreeRequested | Self::FreeCompleted | Self::SegmentFree | Self::SegmentUnmap
        )
    }

    /// Whether memory was taken from the driver or given back.
    #[must_use]
    pub const fn is_segment(self) -> bool {
        matches!(
            self,
            Self::SegmentAlloc | Self::SegmentFree | Self::SegmentMap | Self::SegmentUnmap
        )
    }
}

/// One thing that happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// What.
    pub action: Action,
    /// Where; free bytes of the device for [`Action::OutOfMemory`].
    pub address: u64,
    /// How many bytes.
    pub size_bytes: u64,
    /// The stream of the block.
    pub stream: StreamId,
    /// The pool of the block.
    pub pool: PoolId,
}

/// An event, when it happened and who asked.
#[derive(Clone, Debug)]
pub struct Entry {
    /// What happened.
    pub event: Event,
    pub(super) moment: Moment,
    /// Who asked, where that is recorded.
    pub context: Option<Context>,
}

impl Entry {
    /// When, in microseconds since 1970.
    #[must_use]
    pub fn time_us(&self) -> u64 {
        self.moment.unix_us()
    }
}

// A ring of ten million entries is as many times this.
const _: () = assert!(size_of::<Entry>() <= 72);

/// One segment with all its blocks, as a snapshot lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentLayout {
    /// Where it starts.
    pub address: u64,
    /// Its size: the sum of its blocks.
    pub size_bytes: u64,
    /// The stream whose requests it serves.
    pub stream: StreamId,
    /// Small or large.
    pub kind: PoolKind,
    /// Its pool.
    pub pool: PoolId,
    /// Whether it is made of mapped pages.
    pub expandable: bool,
    /// In address order, without gaps.
    pub blocks: Vec<BlockLayout>,
}

impl SegmentLayout {
    /// A segment that is one block.
    pub(crate) fn of_block(block: BlockLayout, stream: StreamId, pool: PoolId) -> Self {
        Self {
            address: block.address,
            size_bytes: block.size_bytes,
            stream,
            kind: PoolKind::of(block.size_bytes),
            pool,
            expandable: false,
            blocks: vec![block],
        }
    }

    /// Bytes of blocks in one of the `states`.
    pub fn bytes_in(&self, states: &[BlockStateName]) -> u64 {
        self.blocks.iter().filter(|b| states.contains(&b.state)).map(|b| b.size_bytes).sum()
    }

    /// Puts segments in address order. Which of two at one address comes first is not said.
    pub(crate) fn sort(segments: &mut [Self]) {
        segments.sort_unstable_by_key(|segment| segment.address);
    }
}

/// State of a block, with PyTorch's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockStateName {
    /// In the caller's hands.
    ActiveAllocated,
    /// Freed, and waiting for other streams.
    ActivePendingFree,
    /// Free.
    Inactive,
}

impl BlockStateName {
    /// The word that PyTorch writes.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::ActiveAllocated => "active_allocated",
            Self::ActivePendingFree => "active_pending_free",
            Self::Inactive => "inactive",
        }
    }

    /// The state that PyTorch writes as `name`; older versions wrote `active_awaiting_free`.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "active_allocated" => Some(Self::ActiveAllocated),
            "active_pending_free" | "active_awaiting_free" => Some(Self::ActivePendingFree),
            "inactive" => Some(Self::Inactive),
            _ => None,
        }
    }
}

/// One block of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockLayout {
    /// Where it starts.
    pub address: u64,
    /// Its size.
    pub size_bytes: u64,
    /// What its last holder asked for; free blocks keep the last value, as PyTorch's do.
    pub requested_bytes: u64,
    /// Its state.
    pub state: BlockStateName,
}
