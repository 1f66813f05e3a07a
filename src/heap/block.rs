//! One block: a piece of a segment.
//!
//! A block is identified by slot and generation. The generation grows when the block is freed, so a
//! stale id is rejected (until one slot has been reused 2^32 times).

use crate::size::PoolKind;

/// The place of a block in the slab, in units of 8 bytes: its index times [`Slot::STEP`]. An access can
/// multiply by 8 at no cost, but not by the size of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Slot(pub u32);

impl Slot {
    /// The distance of two slots.
    pub(super) const STEP: u32 = 8;

    /// Returns the slot of the block with this index, which is below 2^28.
    pub(super) const fn at(index: u32) -> Self {
        Self(index * Self::STEP)
    }

    /// Returns the index of its block.
    #[inline(always)]
    pub(super) const fn index(self) -> u32 {
        self.0 / Self::STEP
    }

    /// Returns the distance of its block from the first one, in bytes.
    #[inline(always)]
    pub(super) const fn byte_offset(self) -> usize {
        self.0 as usize * 8
    }

    /// The value that refers to no block. The slab keeps an unused block in this slot, so that code may
    /// read the state of a neighbour, or store its link, without checking that there is one. Its state is
    /// always `Vacant`, its size 0 and its key the highest number; its links and neighbours are overwritten
    /// and mean nothing.
    pub(crate) const NONE: Self = Self(0);

    /// Returns true if this refers to no block.
    #[inline]
    #[must_use]
    pub(crate) const fn is_none(self) -> bool {
        self.0 == 0
    }
}

/// Identifies one allocation of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct BlockId {
    /// The index of the block in the slab.
    pub(crate) index: u32,
    /// Which allocation of that slot it is.
    pub(crate) generation: u32,
}

/// The state of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlockState {
    /// No block: the slot is available.
    Vacant,
    /// Allocated to a caller.
    Live,
    /// Free, and in the index of its kind.
    Free,
    /// Freed by the caller, but events of other streams must pass first.
    Draining,
    /// Address space without memory; must be mapped before use.
    Unmapped,
}

/// One cache line, which is half of the 128 bytes a block may cost.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub(super) struct Block {
    pub(super) address: u64,
    pub(super) size_bytes: u64,
    /// The bytes requested by the last caller. A free block keeps the value, as in PyTorch.
    pub(super) requested_bytes: u64,
    /// Its rank among free blocks of the same size. See `order`.
    pub(super) key: u64,
    /// The neighbours by address in the segment.
    pub(super) previous: Slot,
    pub(super) next: Slot,
    /// Free: as in `pairing`, or the neighbours in the bin's list, or the children in its tree; not set if it
    /// is alone in a bin of several sizes. Live: the first is the head of the list of other streams.
    /// Draining: the first holds the number of events. Vacant: the first is the next vacant slot.
    pub(super) links: [Slot; 2],
    /// Free: as in `pairing`, or the parent in the bin's tree, otherwise not set. Live: the next block in the
    /// same bucket of the table of starts.
    pub(super) over: Slot,
    pub(super) generation: u32,
    /// The priority of the slot in trees: constant, so it is computed once.
    pub(super) priority: u32,
    /// The reservation that the block belongs to, or [`FIXED`].
    pub(super) reservation: u16,
    pub(super) kind: PoolKind,
    pub(super) state: BlockState,
}

/// Marks blocks of fixed segments, which belong to no reservation.
pub(super) const FIXED: u16 = u16::MAX;

const _: () = assert!(size_of::<Block>() == 64 && Slot::at(1).byte_offset() == 64);

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

    /// Returns true if the block belongs to an expandable segment.
    #[inline]
    pub(super) const fn is_expandable(&self) -> bool {
        self.reservation != FIXED
    }

    /// Returns true if the block is only a part of its segment.
    #[inline]
    pub(super) const fn is_split(&self) -> bool {
        self.previous.0 | self.next.0 != 0
    }

    /// Clears the links of a block that is in no index, before it is inserted.
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

/// A copy of the state of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockView {
    pub(crate) address: u64,
    pub(crate) size_bytes: u64,
    /// The bytes requested by the last caller.
    pub(crate) requested_bytes: u64,
    /// The clock when it became free.
    pub(crate) birth: u64,
    pub(crate) kind: PoolKind,
    pub(crate) state: BlockState,
    /// True if it is only a part of its segment.
    pub(crate) is_split: bool,
    /// True if it belongs to an expandable segment.
    pub(crate) is_expandable: bool,
}
