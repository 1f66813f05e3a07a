//! The free blocks of one bin in (size, key) order: a list while they are few, then a heap or a tree.
//!
//! Most bins hold one or two blocks, for which a list is the cheapest order. A list in which an insertion
//! or a search passes more than [`LIST_MAX`] blocks becomes a `pairing` heap if its blocks have one size,
//! otherwise a `tree`. It stays one until a single block is left. In a bin of one size, the first block ends
//! each search, so a list that grows at the front only, because its blocks were freed from the last to the
//! first, has any length.

use super::at::{block_at, block_at_mut};
use super::bins::EXACT_MAX_BYTES;
use super::block::{Block, Slot};
use super::pairing;
use super::tree::{Tree, key_of};

/// The most blocks in a list. Few in unit tests, so that they reach heaps and trees.
const LIST_MAX: u32 = if cfg!(test) { 4 } else { 32 };

/// The root of a bin that is a pairing heap: a number that no slot has.
const PAIRING: Slot = Slot(super::slab::SLOTS_MAX);

/// The root of a bin that is a list is this number plus the number of blocks. The links of these blocks are
/// the blocks before and behind.
const LIST: u32 = PAIRING.0;

/// One block at most, which needs no links; a list of several; or a pairing heap or tree of several.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bin(Tree);

impl Bin {
    pub(super) const EMPTY: Self = Self(Tree::EMPTY);

    /// Returns the first block, or `Slot::NONE`.
    #[inline(always)]
    pub(super) const fn first(self) -> Slot {
        self.0.first
    }

    /// Returns true if it has no block and no root.
    pub(super) const fn is_empty(self) -> bool {
        self.0.first.is_none() && self.is_single()
    }

    /// Returns true if there is at most one block.
    #[inline(always)]
    pub(super) const fn is_single(self) -> bool {
        self.0.root.is_none()
    }

    /// Returns the number of blocks if this is a list, otherwise 0.
    #[inline(always)]
    pub(super) const fn list_len(self) -> u32 {
        self.0.root.0.saturating_sub(LIST)
    }

    fn is_tree(self) -> bool {
        !self.is_single() && self.0.root.0 < LIST
    }

    /// Makes the block at `new` the only one of an empty bin.
    #[inline(always)]
    pub(super) const fn set_only(&mut self, new: Slot) {
        self.0.first = new;
    }

    /// Empties a bin of one block.
    #[inline(always)]
    pub(super) const fn clear(&mut self) {
        self.0.first = Slot::NONE;
    }

    /// Inserts a block that is in no bin. The bin must not be empty.
    #[inline(never)]
    pub(super) fn insert(&mut self, blocks: &mut [Block], new: Slot) {
        if self.0.root == PAIRING {
            return self.insert_in_heap(blocks, new);
        }
        if self.is_single() {
            block_at_mut(blocks, self.0.first).links = [Slot::NONE; 2];
            self.0.root = Slot(LIST + 1);
        } else if self.list_len() == 0 {
            self.0.insert(blocks, new);
            return;
        }
        let key = key_of(block_at(blocks, new));
        let (mut before, mut behind) = (Slot::NONE, self.0.first);
        let mut steps = 0;
        while !behind.is_none() && key_of(block_at(blocks, behind)) < key {
            (before, behind) = (behind, block_at(blocks, behind).links[1]);
            steps += 1;
        }
        block_at_mut(blocks, new).links = [before, behind];
        if before.is_none() {
            self.0.first = new;
        } else {
            block_at_mut(blocks, before).links[1] = new;
        }
        block_at_mut(blocks, behind).links[0] = new;
        self.0.root.0 += 1;
        // A search among several sizes may pass the whole list.
        let has_one_size = block_at(blocks, new).size_bytes <= EXACT_MAX_BYTES;
        if steps > LIST_MAX || self.list_len() > LIST_MAX && !has_one_size {
            self.restructure(blocks, has_one_size);
        }
    }

    /// Turns a list into a pairing heap or a tree.
    #[cold]
    fn restructure(&mut self, blocks: &mut [Block], has_one_size: bool) {
        let mut at = self.0.first;
        self.0 = Tree::EMPTY;
        if has_one_size {
            self.0 = Tree { root: PAIRING, first: at };
            at = std::mem::replace(&mut block_at_mut(blocks, at).links, [Slot::NONE; 2])[1];
        }
        while !at.is_none() {
            let next = block_at(blocks, at).links[1];
            match has_one_size {
                true => self.0.first = pairing::insert(blocks, self.0.first, at),
                false => self.0.insert(blocks, at),
            }
            at = next;
        }
    }

    /// Not inlined, as `remove_from_many`, so that lists need no registers to be saved.
    #[inline(never)]
    fn insert_in_heap(&mut self, blocks: &mut [Block], new: Slot) {
        self.0.first = pairing::insert(blocks, self.0.first, new);
    }

    /// Removes a block from a pairing heap or a tree of several.
    #[inline(never)]
    fn remove_from_many(&mut self, blocks: &mut [Block], old: Slot) {
        if self.0.root == PAIRING {
            self.0.first = pairing::remove(blocks, self.0.first, old);
            if block_at(blocks, self.0.first).links[0].is_none() {
                self.0.root = Slot::NONE;
            }
        } else {
            self.0.remove(blocks, old);
            if block_at(blocks, self.0.root).links == [Slot::NONE; 2] {
                self.0.root = Slot::NONE;
            }
        }
    }

    /// Removes a block that is not the only one.
    #[inline(never)]
    pub(super) fn remove(&mut self, blocks: &mut [Block], old: Slot) {
        if self.list_len() == 0 {
            return self.remove_from_many(blocks, old);
        }
        let [before, behind] = block_at(blocks, old).links;
        if before.is_none() {
            self.0.first = behind;
        } else {
            block_at_mut(blocks, before).links[1] = behind;
        }
        block_at_mut(blocks, behind).links[0] = before;
        self.0.root.0 -= 1;
        if self.list_len() == 1 {
            self.0.root = Slot::NONE;
        }
    }

    /// Returns the first block with at least `size_bytes`. This is the bin for that size.
    pub(super) fn first_at_least(self, blocks: &[Block], size_bytes: u64) -> Option<Slot> {
        if self.is_tree() {
            return self.0.lower_bound(blocks, u128::from(size_bytes) << 64);
        }
        // Only a list has several sizes.
        let mut at = Some(self.0.first).filter(|first| !first.is_none());
        while let Some(slot) = at.filter(|slot| block_at(blocks, *slot).size_bytes < size_bytes) {
            at = self.next_after(blocks, slot);
        }
        at
    }

    /// Returns the block behind `slot`, which is in this bin. Visits all blocks of a pairing heap.
    pub(super) fn next_after(self, blocks: &[Block], slot: Slot) -> Option<Slot> {
        if self.is_single() {
            return None;
        }
        if self.0.root == PAIRING {
            let key = |slot: &Slot| block_at(blocks, *slot).key;
            let behind =
                pairing::walk(blocks, self.0.first).filter(|other| key(other) > key(&slot));
            return behind.min_by_key(key);
        }
        match self.list_len() {
            0 => self.0.next_after(blocks, slot),
            _ => Some(block_at(blocks, slot).links[1]).filter(|next| !next.is_none()),
        }
    }

    /// Returns all blocks in order.
    pub(super) fn in_order(self, blocks: &[Block]) -> Vec<Slot> {
        if self.0.root == PAIRING {
            let mut slots: Vec<Slot> = pairing::walk(blocks, self.0.first).collect();
            slots.sort_unstable_by_key(|slot| block_at(blocks, *slot).key);
            return slots;
        }
        let first = Some(self.0.first).filter(|first| !first.is_none());
        std::iter::successors(first, |slot| self.next_after(blocks, *slot)).collect()
    }

    /// Returns true if all links and the first block are consistent. For checks.
    pub(super) fn is_sound(self, blocks: &[Block]) -> bool {
        if self.0.root == PAIRING {
            let is_alone = block_at(blocks, self.0.first).links[0].is_none();
            return !is_alone && pairing::is_sound(blocks, self.0.first);
        }
        if self.list_len() == 0 {
            return self.is_single() || self.0.is_sound(blocks);
        }
        let (mut before, mut at, mut count) = (Slot::NONE, self.0.first, 0);
        while !at.is_none() {
            if block_at(blocks, at).links[0] != before {
                return false;
            }
            (before, at, count) = (at, block_at(blocks, at).links[1], count + 1);
        }
        count > 1 && count == self.list_len()
    }
}
