//! One block: a piece of a segment.
//!
//! Blocks are named by slot and generation. The generation grows when the caller gives the block
//! back, so an old id is refused, not misread (until one slot has been reused 2^32 times).

use crate::size::PoolKind;

/// A place in the slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Slot(pub u32);

impl Slot {
    /// No place.
    pub(crate) const NONE: Self = Self(u32::MAX);

    /// Whether it is no place.
    #[inline]
    #[must_use]
    pub(crate) const fn is_none(self) -> bool {
        self.0 == u32::MAX
    }
}

/// Names one life of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct BlockId {
    /// Where it is.
    pub(crate) slot: Slot,
    /// Which life of that place it is.
    pub(crate) generation: u32,
}

/// Where a block is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlockState {
    /// No block: the slot waits for reuse.
    Vacant,
    /// In the caller's hands.
    Live,
    /// In the index of its kind.
    Free,
    /// Given back by the caller, but other streams' events must pass before it is free.
    Draining,
    /// Address space without memory; mapped before use.
    Unmapped,
}

/// Half of the 128 bytes a block may cost; one cache line.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub(super) struct Block {
    pub(super) address: u64,
    pub(super) size_bytes: u64,
    /// What the last holder asked for. A free block keeps it, as PyTorch's does.
    pub(super) requested_bytes: u64,
    /// Its place among free blocks of its size. See `order`.
    pub(super) key: u64,
    /// Neighbours in the segment by address.
    pub(super) previous: Slot,
    pub(super) next: Slot,
    /// Free: children in the bin's tree. Live: the first heads the list of other streams. Draining:
    /// the first holds the number of events. Vacant: the first is the next vacant slot.
    pub(super) links: [Slot; 2],
    /// Free: the block above it in the bin's tree. Live: the next live block in the same bucket of the
    /// index of starts.
    pub(super) over: Slot,
    pub(super) generation: u32,
    /// The slot's priority in trees: fixed, so it is computed once.
    pub(super) priority: u32,
    /// The reservation it is part of, or [`FIXED`].
    pub(super) reservation: u16,
    pub(super) kind: PoolKind,
    pub(super) state: BlockState,
}

/// The reservation of blocks of fixed segments: none.
pub(super) const FIXED: u16 = u16::MAX;

const _: () = assert!(size_of::<Block>() == 64);

impl Block {
    pub(super) const VACANT: Self = Self {
        address: 0,
        size_bytes: 0,
        requested_bytes: 0,
        key: 0,
        previous: Slot::NONE,
        next: Slot::NONE,
        links: [Slot::NONE; 2],
        over: Slot::NONE,
        generation: 0,
        priority: 0,
        reservation: FIXED,
        kind: PoolKind::Small,
        state: BlockState::Vacant,
    };

    /// Whether the block is part of an expandable segment.
    #[inline]
    pub(super) const fn is_expandable(&self) -> bool {
        self.reservation != FIXED
    }

    /// Whether the block is only a part of its segment.
    #[inline]
    pub(super) const fn is_split(&self) -> bool {
        // Both are no place: one comparison.
        self.previous.0 & self.next.0 != Slot::NONE.0
    }

    /// Makes the block ready for the index, which it is not in.
    #[inline]
    pub(super) const fn unlink(&mut self) {
        self.links = [Slot::NONE; 2];
        self.over = Slot::NONE;
    }

    pub(super) const fn view(&self, birth: u64) -> BlockView {
        BlockView {
            address: self.address,
            size_bytes: self.size_bytes,
            requested_bytes: self.requested_bytes,
            birth,
            kind: self.kind,
            state: self.state,
            is_split: self.is_split(),
            is_expandable: self.is_expandable(),
        }
    }
}

/// A block as it is at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockView {
    /// Where it starts.
    pub(crate) address: u64,
    /// Its size.
    pub(crate) size_bytes: u64,
    /// What its last holder asked for.
    pub(crate) requested_bytes: u64,
    /// The clock when it became free.
    pub(crate) birth: u64,
    /// Its pool.
    pub(crate) kind: PoolKind,
    /// Its state.
    pub(crate) state: BlockState,
    /// Whether it is only a part of its segment.
    pub(crate) is_split: bool,
    /// Whether it is part of an expandable segment.
    pub(crate) is_expandable: bool,
}
