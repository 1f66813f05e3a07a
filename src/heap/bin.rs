//! The free blocks of a bin of several sizes, in (size, key) order: a list while they are few, then a tree.
//!
//! Most bins hold one or two blocks, for which a list is the cheapest order. A list of [`LIST_MAX`] blocks
//! that gets another one becomes a `tree`. It stays one until a single block is left.

use super::at::{block_at, block_at_mut};
use super::block::{Block, Slot};
use super::slab::SLOTS_MAX;
use super::tree::{Tree, key_of};

/// The most blocks in a list. Few in unit tests, so that they reach trees.
const LIST_MAX: u32 = if cfg!(test) { 4 } else { 32 };

/// The root of a bin that is a list is this number plus the number of blocks. No slot has such a number. The
/// links of these blocks are the blocks before and behind.
const LIST: u32 = SLOTS_MAX;

/// One block at most, which needs no links; a list of several; or a tree of several. A bin of one size is a
/// `pairing` heap instead: it uses only the first block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bin(Tree);

impl Bin {
    pub(super) const EMPTY: Self = Self(Tree::EMPTY);

    /// Returns the first block, or `Slot::NONE`.
    #[inline(always)]
    pub(super) const fn first(self) -> Slot {
        self.0.first
    }

    /// As [`first`](Self::first), for changes: by `pairing` in a bin of one size, and in other bins only
    /// while there is at most one block.
    #[inline(always)]
    pub(super) const fn first_mut(&mut self) -> &mut Slot {
        &mut self.0.first
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

    /// Inserts a block that is in no bin. The bin must not be empty.
    #[inline(never)]
    pub(super) fn insert(&mut self, blocks: &mut [Block], new: Slot) {
        if self.is_single() {
            block_at_mut(blocks, self.0.first).links = [Slot::NONE; 2];
            self.0.root = Slot(LIST + 1);
        } else if !(LIST..LIST + LIST_MAX).contains(&self.0.root.0) {
            return self.insert_in_many(blocks, new);
        }
        self.0.root.0 += 1;
        let own = key_of(block_at(blocks, new));
        let mut before = self.0.first;
        if key_of(block_at(blocks, before)) >= own {
            self.0.first = new;
            block_at_mut(blocks, new).links = [Slot::NONE, before];
            block_at_mut(blocks, before).links[0] = new;
            return;
        }
        let behind = loop {
            let behind = block_at(blocks, before).links[1];
            if behind.is_none() || key_of(block_at(blocks, behind)) >= own {
                break behind;
            }
            before = behind;
        };
        block_at_mut(blocks, new).links = [before, behind];
        block_at_mut(blocks, before).links[1] = new;
        block_at_mut(blocks, behind).links[0] = new;
    }

    /// Inserts a block into a tree, or into a full list, which becomes a tree.
    #[inline(never)]
    fn insert_in_many(&mut self, blocks: &mut [Block], new: Slot) {
        if self.list_len() != 0 {
            let mut at = std::mem::replace(&mut self.0, Tree::EMPTY).first;
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

    #[inline(never)]
    fn remove_from_tree(&mut self, blocks: &mut [Block], old: Slot) {
        self.0.remove(blocks, old);
        if block_at(blocks, self.0.root).links == [Slot::NONE; 2] {
            self.0.root = Slot::NONE;
        }
    }

    /// Returns the first block with at least `size_bytes`. This is the bin for that size.
    pub(super) fn first_at_least(self, blocks: &[Block], size_bytes: u64) -> Option<Slot> {
        if !self.is_single() && self.list_len() == 0 {
            return self.0.lower_bound(blocks, u128::from(size_bytes) << 64);
        }
        let mut at = Some(self.0.first).filter(|first| !first.is_none());
        while let Some(slot) = at.filter(|slot| block_at(blocks, *slot).size_bytes < size_bytes) {
            at = self.next_after(blocks, slot);
        }
        at
    }

    /// Returns the block behind `slot`, which is in this bin.
    pub(super) fn next_after(self, blocks: &[Block], slot: Slot) -> Option<Slot> {
        if self.is_single() {
            return None;
        }
        match self.list_len() {
            0 => self.0.next_after(blocks, slot),
            _ => Some(block_at(blocks, slot).links[1]).filter(|next| !next.is_none()),
        }
    }

    /// Returns all blocks in order.
    pub(super) fn in_order(self, blocks: &[Block]) -> Vec<Slot> {
        let first = Some(self.0.first).filter(|first| !first.is_none());
        std::iter::successors(first, |slot| self.next_after(blocks, *slot)).collect()
    }

    /// Returns true if all links and the first block are consistent. For checks.
    pub(super) fn is_sound(self, blocks: &[Block]) -> bool {
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
