//! The bookkeeping of the blocks of ONE stream of ONE pool: find, split, coalesce.
//!
//! A heap knows only addresses and sizes. It never calls a driver, takes no lock, enforces no limit, and
//! allocates no memory in the steady state. Its owner protects it with a lock.
//!
//! Invariants (checked by [`Heap::check`]):
//! - I1 the blocks of a segment tile it: in address order, no gap, no overlap.
//! - I2 no two neighbours are both free, or both unmapped: they would have coalesced.
//! - I3 a block is in exactly one index, that of its kind, if and only if it is free.
//! - I4 the index is ordered by (size, key), and its bitmaps name the bins that are not empty.
//! - I5 a draining block waits for at least one event.
//! - I6 sizes are multiples of 512 B and at least 512 B.
//! - I7 the requested bytes of a live block are at most its size.
//! - I8 the table of starts (live blocks by address), if there is one, holds exactly the live blocks.
//! - I9 the map of gaps of a kind holds exactly its unmapped blocks.
//! - I10 keys follow the tie rule, and no two blocks have the same key.
//!
//! Read in this order: `block`, `slab` (and `at`), `order`, `index` (and `bins`, `bin`, `pairing`, `tree`),
//! `edit`, `expand`, `check`.

mod at;
mod bin;
mod bins;
mod block;
mod check;
mod edit;
mod expand;
mod index;
mod order;
mod pairing;
mod segment_range;
mod slab;
mod splits;
mod starts;
mod tree;
mod uses;

#[cfg(test)]
mod tests;

use block::Block;
pub(crate) use block::{BlockId, BlockState, BlockView, Slot};
pub use check::Broken;
pub(crate) use edit::{AllocatedBlock, Completed, FitRules};
pub(crate) use expand::{Growing, PageRun, Reservation};
pub(crate) use order::TieRule;
pub(crate) use segment_range::SegmentRange;
pub(crate) use splits::{CountParts, SplitChange};

use crate::size::PoolKind;
use at::block_at;
use expand::Expandable;
use index::FreeIndex;
use order::Order;
use slab::Slab;
use starts::Starts;
pub(crate) use uses::StreamUse;
use uses::Uses;

/// The blocks of one stream of one pool, of both kinds.
#[derive(Debug)]
pub(crate) struct Heap {
    slab: Slab,
    free: [FreeIndex; 2],
    order: Order,
    uses: Uses,
    expandable: Expandable,
    starts: Starts,
}

impl Heap {
    /// Returns an empty heap. With `raw_addresses`, live blocks can be found by address.
    #[must_use]
    pub(crate) fn new(raw_addresses: bool, ties: TieRule) -> Self {
        Self {
            slab: Slab::default(),
            free: [FreeIndex::default(), FreeIndex::default()],
            order: Order::of(ties),
            uses: Uses::default(),
            expandable: Expandable::default(),
            starts: Starts::new(raw_addresses),
        }
    }

    /// Returns a copy of the state of a block.
    #[must_use]
    pub(crate) fn view(&self, slot: Slot) -> BlockView {
        self.slab.get(slot).view(self.order.birth_of(slot))
    }

    /// Returns true if hits must update keys or birth times: then [`take`](Self::take) and
    /// [`put_back`](Self::put_back) cannot serve.
    #[must_use]
    pub(crate) fn order_has_extras(&self) -> bool {
        self.order.updates_on_hit()
    }

    /// Returns the id and the address of the live block at `slot`, which this heap returned.
    #[inline(always)]
    #[must_use]
    pub(crate) fn name_of(&self, slot: Slot) -> (BlockId, u64) {
        let Block { generation, address, .. } = *block_at(self.slab.blocks(), slot);
        (BlockId { index: slot.index(), generation }, address)
    }

    /// Returns the requested bytes of a live block.
    #[inline]
    #[must_use]
    pub(crate) fn requested_bytes(&self, slot: Slot) -> u64 {
        self.slab.get(slot).requested_bytes
    }

    /// Returns the free block at `slot` and those of its kind behind it, in (size, key) order.
    fn free_from(&self, slot: Slot) -> impl Iterator<Item = Slot> + '_ {
        self.free[self.slab.get(slot).kind.index()].in_order_from(self.slab.blocks(), slot)
    }

    /// Returns all free blocks of a kind in (size, key) order.
    pub(crate) fn free_blocks(
        &self,
        kind: PoolKind,
    ) -> impl Iterator<Item = (Slot, BlockView)> + '_ {
        let slots = self.free[kind.index()].in_order(self.slab.blocks());
        slots.map(|slot| (slot, self.view(slot)))
    }

    /// Returns the first block of every segment, in no particular order. Each mapped range of a
    /// reservation counts as a segment.
    pub(crate) fn segment_heads(&self) -> impl Iterator<Item = Slot> + '_ {
        self.slab.occupied().filter(|&slot| {
            let block = self.slab.get(slot);
            let starts = block.previous.is_none()
                || self.slab.get(block.previous).state == BlockState::Unmapped;
            starts && block.state != BlockState::Unmapped
        })
    }

    /// Returns the first block of every chain of neighbours, mapped or not.
    pub(super) fn chain_heads(&self) -> impl Iterator<Item = Slot> + '_ {
        self.slab.occupied().filter(|&slot| self.slab.get(slot).previous.is_none())
    }

    /// Returns the chain of neighbours that starts with `head`, mapped or not, in address order.
    pub(super) fn chain(&self, head: Slot) -> impl Iterator<Item = (Slot, BlockView)> + '_ {
        let first = Some(head).filter(|slot| !slot.is_none());
        std::iter::successors(first, |&slot| {
            Some(self.slab.get(slot).next).filter(|next| !next.is_none())
        })
        .map(|slot| (slot, self.view(slot)))
    }

    /// Returns the blocks of the segment that starts with `head`, in address order.
    pub(crate) fn segment_blocks(&self, head: Slot) -> impl Iterator<Item = BlockView> + '_ {
        let blocks = self.chain(head).map(|(_, block)| block);
        blocks.take_while(|block| block.state != BlockState::Unmapped)
    }

    /// Returns the slot of the live block with this id and address, or `None` if the id is stale.
    #[inline]
    #[must_use]
    pub(crate) fn live(&self, id: BlockId, address: u64) -> Option<Slot> {
        let slot = self.slab.slot_at(id.index)?;
        let block = block_at(self.slab.blocks(), slot);
        let same = block.generation == id.generation
            && block.state == BlockState::Live
            && block.address == address;
        same.then_some(slot)
    }

    /// Returns the live block that starts at `address`. `None` also if the heap keeps no table of
    /// starts.
    #[inline]
    #[must_use]
    pub(crate) fn live_at(&self, address: u64) -> Option<Slot> {
        self.starts.find(self.slab.blocks(), address)
    }

    /// Returns the next block of the segment behind `slot`, if it is free.
    #[must_use]
    pub(crate) fn free_behind(&self, slot: Slot) -> Option<Slot> {
        let next = self.slab.get(slot).next;
        (self.slab.get(next).state == BlockState::Free).then_some(next)
    }

    /// Returns all live blocks, in no particular order.
    #[must_use]
    pub(crate) fn live_blocks(&self) -> Vec<Slot> {
        let live = |slot: &Slot| self.slab.get(*slot).state == BlockState::Live;
        self.slab.occupied().filter(live).collect()
    }

    /// Returns the free block of a kind that contains `size_bytes` at `address`. Searches all free
    /// blocks.
    #[must_use]
    pub(crate) fn free_at(&self, kind: PoolKind, address: u64, size_bytes: u64) -> Option<Slot> {
        let end = address.checked_add(size_bytes)?;
        let holds =
            |block: &BlockView| block.address <= address && end <= block.address + block.size_bytes;
        self.free_blocks(kind).find(|(_, block)| holds(block)).map(|(slot, _)| slot)
    }

    /// Returns true if the block at `slot` contains `size_bytes` at `address`.
    #[must_use]
    pub(crate) fn contains(&self, slot: Slot, address: u64, size_bytes: u64) -> bool {
        let block = self.view(slot);
        let end = address.checked_add(size_bytes);
        block.address <= address && end.is_some_and(|end| end <= block.address + block.size_bytes)
    }

    /// Returns the bytes of metadata of this heap, for tests of memory use.
    #[must_use]
    pub(crate) fn metadata_bytes(&self) -> usize {
        self.slab.bytes()
            + self.free.iter().map(FreeIndex::bytes).sum::<usize>()
            + self.order.bytes()
            + self.uses.bytes()
            + self.starts.bytes()
    }

    /// Returns the number of unmapped blocks.
    #[must_use]
    pub(crate) fn unmapped_count(&self) -> usize {
        self.expandable.gaps.iter().map(|gaps| gaps.len()).sum()
    }

    /// Returns the number of blocks, including free and unmapped ones.
    #[must_use]
    pub(crate) fn block_count(&self) -> usize {
        self.slab.len()
    }
}
