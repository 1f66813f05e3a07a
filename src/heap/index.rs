//! The free blocks of one kind in (size, key) order; `order` defines the keys.
//!
//! Each bin has a tree; most bins hold one block, which is then the whole tree. Small sizes have several
//! bins (lanes), chosen by key, because they collect hundreds of remainders and inserting into a tree
//! costs its height. The first block of such a size is the minimum over its lanes. The only allocation
//! is the array of trees, once.

use super::bins::{BINS, BinSet, EXACT_BINS, LANED_BINS, LANES, bin_of, first_bin_of};
use super::block::{Block, Slot};
use super::slab::Slab;
use super::tree::{Tree, key_of};

#[derive(Debug, Default)]
pub(super) struct FreeIndex {
    /// One tree for each bin. Empty until the first block is inserted.
    trees: Vec<Tree>,
    filled: BinSet,
}

impl FreeIndex {
    /// Returns the first block with at least `size_bytes`, which must be at least 512.
    #[inline(always)]
    pub(super) fn first_at_least(&self, slab: &Slab, size_bytes: u64) -> Option<Slot> {
        let bin = first_bin_of(size_bytes);
        let found = self.filled.first_from(bin)?;
        // All blocks of an exact bin have one size, and the blocks of later bins are all larger.
        if found < EXACT_BINS || found != bin {
            return self.first_of(slab, found);
        }
        self.first_of_a_wide_bin(slab, bin, size_bytes)
    }

    #[inline(never)]
    fn first_of_a_wide_bin(&self, slab: &Slab, bin: usize, size_bytes: u64) -> Option<Slot> {
        let here = self.trees[bin].lower_bound(slab, u128::from(size_bytes) << 64);
        here.or_else(|| self.first_of(slab, self.filled.first_from(bin + 1)?))
    }

    /// Returns the first block of a non-empty bin. If the bin is the first non-empty lane of a size,
    /// returns the first of all its lanes.
    #[inline(always)]
    fn first_of(&self, slab: &Slab, bin: usize) -> Option<Slot> {
        if bin < LANED_BINS && self.filled.has_more_lanes(bin) {
            return self.first_among_lanes(slab, bin);
        }
        self.trees.get(bin).map(|tree| tree.first)
    }

    #[inline(never)]
    fn first_among_lanes(&self, slab: &Slab, bin: usize) -> Option<Slot> {
        let firsts = self.filled.lanes_from(bin).filter_map(|bin| self.trees.get(bin));
        firsts.map(|tree| tree.first).min_by_key(|first| slab.get(*first).key)
    }

    /// Returns `slot`, which is in this index, and all blocks behind it, in order.
    pub(super) fn in_order_from<'a>(&'a self, slab: &'a Slab, slot: Slot) -> InOrder<'a> {
        InOrder { index: self, slab, next: Some(Next::This(slot)), lanes: None }
    }

    /// Returns the bins of the same size as `bin`.
    fn bins_beside(bin: usize) -> std::ops::Range<usize> {
        if bin < LANED_BINS {
            bin / LANES * LANES..bin / LANES * LANES + LANES
        } else {
            bin..bin + 1
        }
    }

    /// Inserts a block of this size and key. It must be unlinked and in no index.
    #[inline(always)]
    pub(super) fn insert(&mut self, slab: &mut Slab, new: Slot, size_bytes: u64, key: u64) {
        let bin = bin_of(size_bytes, key);
        match self.trees.get_mut(bin) {
            Some(tree) if tree.is_empty() => {
                *tree = Tree::of(new);
                self.filled.insert(bin);
            }
            Some(tree) => tree.insert(slab, new),
            None => self.add_trees(bin, new),
        }
    }

    #[cold]
    fn add_trees(&mut self, bin: usize, new: Slot) {
        self.trees = vec![Tree::EMPTY; BINS];
        self.trees[bin] = Tree::of(new);
        self.filled.insert(bin);
    }

    /// Removes a block of this index; `block` is a copy of it.
    #[inline(always)]
    pub(super) fn remove(&mut self, slab: &mut Slab, old: Slot, block: &Block) {
        let bin = bin_of(block.size_bytes, block.key);
        match self.trees.get_mut(bin) {
            Some(tree) if tree.is_only(old, block) => {
                *tree = Tree::EMPTY;
                self.filled.remove(bin);
            }
            Some(tree) => tree.remove(slab, old, block.links, block.over),
            None => debug_assert!(false, "I3: a free block is in its index"),
        }
    }

    /// Returns true if the bitmap and the trees agree. For checks.
    pub(super) fn is_sound(&self, slab: &Slab) -> bool {
        self.trees
            .iter()
            .enumerate()
            .all(|(bin, tree)| tree.is_sound(slab) && self.filled.contains(bin) != tree.is_empty())
    }

    pub(super) fn bytes(&self) -> usize {
        self.trees.capacity() * size_of::<Tree>() + size_of::<BinSet>()
    }
}

/// An iterator over free blocks in order. It looks up each block only when it is needed.
pub(super) struct InOrder<'a> {
    index: &'a FreeIndex,
    slab: &'a Slab,
    next: Option<Next>,
    /// The next block in each lane of a size, while the iterator is at that size.
    lanes: Option<[Slot; LANES]>,
}

/// The next step of the iterator.
#[derive(Clone, Copy)]
enum Next {
    This(Slot),
    Behind(Slot),
}

impl InOrder<'_> {
    fn behind(&mut self, slot: Slot) -> Option<Slot> {
        let block = self.slab.get(slot);
        let bin = bin_of(block.size_bytes, block.key);
        let beside = FreeIndex::bins_beside(bin);
        let next = if bin < LANED_BINS {
            self.behind_among_lanes(slot, beside.start, bin - beside.start)
        } else {
            self.index.trees[bin].next_after(self.slab, slot)
        };
        next.or_else(|| {
            self.lanes = None;
            self.index.first_of(self.slab, self.index.filled.first_from(beside.end)?)
        })
    }

    fn behind_among_lanes(&mut self, slot: Slot, first_bin: usize, lane: usize) -> Option<Slot> {
        let (slab, trees) = (self.slab, &self.index.trees[first_bin..first_bin + LANES]);
        let lanes = self.lanes.get_or_insert_with(|| {
            let key = key_of(slab.get(slot));
            std::array::from_fn(|lane| trees[lane].first_behind(slab, key))
        });
        lanes[lane] = trees[lane].next_after(slab, slot).unwrap_or(Slot::NONE);
        let ahead = lanes.iter().copied().filter(|slot| !slot.is_none());
        ahead.min_by_key(|slot| slab.get(*slot).key)
    }
}

impl Iterator for InOrder<'_> {
    type Item = Slot;

    #[inline]
    fn next(&mut self) -> Option<Slot> {
        let slot = match self.next? {
            Next::This(slot) => Some(slot),
            Next::Behind(slot) => self.behind(slot),
        };
        self.next = slot.map(Next::Behind);
        slot
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::size::{KIB, MIB};

    /// Sizes around every border of the bins.
    const SIZES: [u64; 12] = [
        512,
        1024,
        1536,
        32 * KIB - 512,
        32 * KIB,
        32 * KIB + 512,
        2 * MIB - 512,
        2 * MIB,
        2 * MIB + 512,
        4 * MIB,
        1 << 63,
        u64::MAX - 511,
    ];

    /// The index, and an ordered map from (size, key) as its model.
    #[derive(Default)]
    struct Both {
        slab: Slab,
        index: FreeIndex,
        model: BTreeMap<(u64, u64), Slot>,
    }

    impl Both {
        fn toggle(&mut self, size_bytes: u64, key: u64) {
            if let Some(slot) = self.model.remove(&(size_bytes, key)) {
                let block = self.slab.vacate(slot);
                self.index.remove(&mut self.slab, slot, &block);
                return;
            }
            let (slot, block) = self.slab.occupy();
            (block.key, block.size_bytes) = (key, size_bytes);
            block.state = crate::heap::BlockState::Free;
            block.unlink();
            self.index.insert(&mut self.slab, slot, size_bytes, key);
            self.model.insert((size_bytes, key), slot);
        }

        fn agree(&self) -> bool {
            let first_of = |size: &u64| {
                let expected = self.model.range((*size, 0)..).next().map(|(_, slot)| *slot);
                self.index.first_at_least(&self.slab, *size) == expected
            };
            let in_order_from = |(key, slot): (&(u64, u64), &Slot)| {
                let expected = self.model.range(*key..).map(|(_, slot)| *slot);
                self.index.in_order_from(&self.slab, *slot).eq(expected)
            };
            self.index.is_sound(&self.slab)
                && SIZES.iter().all(first_of)
                && self.model.iter().all(in_order_from)
        }
    }

    quickcheck::quickcheck! {
        fn blocks_are_in_the_order_of_an_ordered_map(changes: Vec<(u8, u8)>) -> bool {
            let mut both = Both::default();
            // Keys in every lane, several in each.
            changes.into_iter().all(|(size, at)| {
                let key = u64::from(at % 40) * 12 * KIB;
                both.toggle(SIZES[usize::from(size) % SIZES.len()], key);
                both.agree()
            })
        }
    }
}
