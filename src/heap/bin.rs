//! The free blocks of one bin in (size, key) order: a list while they are few, then a heap or a tree.
//!
//! Most bins hold one or two blocks, for which a list is the cheapest order. A list of [`LIST_MAX`] blocks
//! that gets another one becomes a `pairing` heap if its blocks have one size, otherwise a `tree`. It stays
//! one until a single block is left.

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

/// Returns true if all blocks in the bin of this one have its size.
#[inline(always)]
fn has_one_size(blocks: &[Block], slot: Slot) -> bool {
    block_at(blocks, slot).size_bytes <= EXACT_MAX_BYTES
}

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
        if self.is_single() {
            block_at_mut(blocks, self.0.first).links = [Slot::NONE; 2];
            self.0.root = Slot(LIST + 1);
        } else if self.0.root == PAIRING {
            self.0.first = pairing::insert(blocks, self.0.first, new);
            return;
        } else if !(LIST..LIST + LIST_MAX).contains(&self.0.root.0) {
            return self.insert_in_many(blocks, new);
        }
        if has_one_size(blocks, new) {
            self.insert_in_list(blocks, new, |block| block.key);
        } else {
            self.insert_among_sizes(blocks, new);
        }
    }

    /// Not inlined, so that blocks of one size need no registers to be saved.
    #[inline(never)]
    fn insert_among_sizes(&mut self, blocks: &mut [Block], new: Slot) {
        self.insert_in_list(blocks, new, key_of);
    }

    /// Inserts a block into a list in the order of `key`.
    #[inline(always)]
    fn insert_in_list<K: Ord>(
        &mut self,
        blocks: &mut [Block],
        new: Slot,
        key: impl Fn(&Block) -> K,
    ) {
        self.0.root.0 += 1;
        let own = key(block_at(blocks, new));
        let mut before = self.0.first;
        if key(block_at(blocks, before)) >= own {
            self.0.first = new;
            block_at_mut(blocks, new).links = [Slot::NONE, before];
            block_at_mut(blocks, before).links[0] = new;
            return;
        }
        let behind = loop {
            let behind = block_at(blocks, before).links[1];
            if behind.is_none() || key(block_at(blocks, behind)) >= own {
                break behind;
            }
            before = behind;
        };
        block_at_mut(blocks, new).links = [before, behind];
        block_at_mut(blocks, before).links[1] = new;
        block_at_mut(blocks, behind).links[0] = new;
    }

    /// Inserts a block into a tree, or into a full list, which becomes a heap or a tree.
    #[inline(never)]
    fn insert_in_many(&mut self, blocks: &mut [Block], new: Slot) {
        if self.list_len() != 0 {
            let mut at = std::mem::replace(&mut self.0, Tree::EMPTY).first;
            if has_one_size(blocks, new) {
                pairing::from_list(blocks, at);
                self.0 = Tree { root: PAIRING, first: pairing::insert(blocks, at, new) };
                return;
            }
            while !at.is_none() {
                let next = block_at(blocks, at).links[1];
                self.0.insert(blocks, at);
                at = next;
            }
        }
        self.0.insert(blocks, new);
    }

    /// Removes a block that is not the only one.
    #[inline(never)]
    pub(super) fn remove(&mut self, blocks: &mut [Block], old: Slot) {
        if self.0.root == PAIRING {
            if pairing::has_below(blocks, old) {
                return self.remove_from_above(blocks, old);
            }
            pairing::cut(blocks, old);
            return self.mark_if_single(blocks);
        }
        if self.list_len() == 0 {
            return self.remove_from_tree(blocks, old);
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

    /// Removes a block of a pairing heap that has blocks below it.
    #[inline(never)]
    fn remove_from_above(&mut self, blocks: &mut [Block], old: Slot) {
        pairing::remove(blocks, &mut self.0.first, old);
        self.mark_if_single(blocks);
    }

    /// Marks this bin as one of a single block if its pairing heap has no other block left.
    #[inline(always)]
    fn mark_if_single(&mut self, blocks: &[Block]) {
        if !pairing::has_below(blocks, self.0.first) {
            self.0.root = Slot::NONE;
        }
    }

    #[inline(never)]
    fn remove_from_tree(&mut self, blocks: &mut [Block], old: Slot) {
        self.0.remove(blocks, old);
        if block_at(blocks, self.0.root).links == [Slot::NONE; 2] {
            self.0.root = Slot::NONE;
        }
    }

    /// Returns the first block with at least `size_bytes`. This is the bin for that size.
    pub(super) fn first_at_least(self, blocks: &[Block], size_bytes: u64) -> Option<Slot> {
        if self.is_tree() {
            return self.0.lower_bound(blocks, u128::from(size_bytes) << 64);
        }
        // A pairing heap has one size, so its first block ends the search.
        let mut at = Some(self.0.first).filter(|first| !first.is_none());
        while let Some(slot) = at.filter(|slot| block_at(blocks, *slot).size_bytes < size_bytes) {
            at = self.next_after(blocks, slot);
        }
        at
    }

    /// Returns the block behind `slot`, which is in this bin. In a pairing heap, visits all blocks up to it
    /// and those directly below them.
    pub(super) fn next_after(self, blocks: &[Block], slot: Slot) -> Option<Slot> {
        if self.is_single() {
            return None;
        }
        if self.0.root == PAIRING {
            let key = |slot: &Slot| block_at(blocks, *slot).key;
            // All blocks below one that is behind `slot` are behind that one.
            let (own, first) = (key(&slot), self.0.first);
            let blocks = pairing::walk(blocks, first, |block| block.key <= own);
            return blocks.filter(|other| key(other) > own).min_by_key(key);
        }
        match self.list_len() {
            0 => self.0.next_after(blocks, slot),
            _ => Some(block_at(blocks, slot).links[1]).filter(|next| !next.is_none()),
        }
    }

    /// Returns all blocks in order.
    pub(super) fn in_order(self, blocks: &[Block]) -> Vec<Slot> {
        if self.0.root == PAIRING {
            let mut slots: Vec<Slot> = pairing::walk(blocks, self.0.first, |_| true).collect();
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
