//! The entries of the history and the segments of the layout, with the names that PyTorch uses.

use super::clock::Moment;
use super::context::Context;
use crate::ids::{PoolId, StreamId};
use crate::size::PoolKind;

/// The action that an entry records.
///
/// Source of the names: PyTorch's memory snapshots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// A block was allocated. The size is the requested size.
    Alloc,
    /// The caller freed a block.
    FreeRequested,
    /// The block became free: at once, or after other streams had finished using it.
    FreeCompleted,
    /// A segment was allocated from the driver.
    SegmentAlloc,
    /// A segment was released to the driver.
    SegmentFree,
    /// Pages were mapped.
    SegmentMap,
    /// Pages were unmapped.
    SegmentUnmap,
    /// A snapshot was taken. The size is the active bytes of all segments, and the address is 0.
    Snapshot,
    /// A request failed. The size is that of the request (`native` rounds it), and the address is the
    /// device's free bytes.
    OutOfMemory,
    /// A pause of a tag released the memory of a range of pages. Its blocks keep their addresses.
    TagPause,
    /// A resume of a tag mapped the range again.
    TagResume,
}

impl Action {
    /// All actions.
    pub const ALL: [Self; 11] = [
        Self::Alloc,
        Self::FreeRequested,
        Self::FreeCompleted,
        Self::SegmentAlloc,
        Self::SegmentFree,
        Self::SegmentMap,
        Self::SegmentUnmap,
        Self::Snapshot,
        Self::OutOfMemory,
        Self::TagPause,
        Self::TagResume,
    ];

    /// Returns the name that PyTorch writes. PyTorch has no tags; their names are of the same form.
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
            Self::TagPause => "tag_pause",
            Self::TagResume => "tag_resume",
            Self::Snapshot => "snapshot",
            Self::OutOfMemory => "oom",
        }
    }

    /// Returns the action that PyTorch writes as `name`.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|action| action.name() == name)
    }

    /// Returns true for a free, and for memory that is released to the driver or unmapped.
    #[must_use]
    pub const fn is_release(self) -> bool {
        matches!(
            self,
            Self::FreeRequested | Self::FreeCompleted | Self::SegmentFree | Self::SegmentUnmap
        )
    }

    /// Returns true for the actions on driver memory: it is allocated, released, mapped or unmapped.
    #[must_use]
    pub const fn is_segment(self) -> bool {
        matches!(
            self,
            Self::SegmentAlloc | Self::SegmentFree | Self::SegmentMap | Self::SegmentUnmap
        )
    }
}

/// One recorded event, without its time and context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// The action.
    pub action: Action,
    /// The address. The free bytes of the device for [`Action::OutOfMemory`].
    pub address: u64,
    /// The size in bytes.
    pub size_bytes: u64,
    /// The stream of the block.
    pub stream: StreamId,
    /// The pool of the block.
    pub pool: PoolId,
}

/// An event with its time and context.
#[derive(Clone, Debug)]
pub struct Entry {
    /// The event.
    pub event: Event,
    pub(super) moment: Moment,
    /// The context of the request or free. `None` if it was not recorded.
    pub context: Option<Context>,
}

impl Entry {
    /// Returns the time in microseconds since 1970.
    #[must_use]
    pub fn time_us(&self) -> u64 {
        self.moment.unix_us()
    }
}

// A history may have ten million entries, so their size is limited.
const _: () = assert!(size_of::<Entry>() <= 72);

/// One segment with all its blocks, as a snapshot lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentLayout {
    /// The start address of the segment.
    pub address: u64,
    /// The size in bytes: the sum of the blocks.
    pub size_bytes: u64,
    /// The stream whose requests the segment serves.
    pub stream: StreamId,
    /// Small or large.
    pub kind: PoolKind,
    /// The pool of the segment.
    pub pool: PoolId,
    /// Whether the segment consists of mapped pages.
    pub expandable: bool,
    /// Whether the segment belongs to a tag that is not awake. A pause releases its memory and keeps its
    /// addresses and blocks.
    pub asleep: bool,
    /// The blocks in address order, without gaps.
    pub blocks: Vec<BlockLayout>,
}

impl SegmentLayout {
    /// Returns a segment that consists of one block.
    pub(crate) fn of_block(block: BlockLayout, stream: StreamId, pool: PoolId) -> Self {
        Self {
            address: block.address,
            size_bytes: block.size_bytes,
            stream,
            kind: PoolKind::of(block.size_bytes),
            pool,
            expandable: false,
            asleep: false,
            blocks: vec![block],
        }
    }

    /// Returns the sum of the sizes of the blocks whose state is one of `states`.
    pub fn bytes_in(&self, states: &[BlockStateName]) -> u64 {
        self.blocks.iter().filter(|b| states.contains(&b.state)).map(|b| b.size_bytes).sum()
    }

    /// Sorts segments by address. The order of two segments at one address is unspecified.
    #[doc(hidden)]
    pub fn sort(segments: &mut [Self]) {
        segments.sort_unstable_by_key(|segment| segment.address);
    }
}

/// The state of a block, with PyTorch's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockStateName {
    /// In use by the caller.
    ActiveAllocated,
    /// Freed by the caller, and waiting for other streams.
    ActivePendingFree,
    /// Free.
    Inactive,
}

impl BlockStateName {
    /// The states of blocks whose memory is in use.
    pub const ACTIVE: [Self; 2] = [Self::ActiveAllocated, Self::ActivePendingFree];

    /// Returns the name that PyTorch writes.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::ActiveAllocated => "active_allocated",
            Self::ActivePendingFree => "active_pending_free",
            Self::Inactive => "inactive",
        }
    }

    /// Returns the state that PyTorch writes as `name`. Older versions wrote `active_awaiting_free`.
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
    /// The start address of the block.
    pub address: u64,
    /// The size in bytes.
    pub size_bytes: u64,
    /// The size of the last request that the block served. A free block keeps the value, as in PyTorch.
    pub requested_bytes: u64,
    /// The state of the block.
    pub state: BlockStateName,
}
