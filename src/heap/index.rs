//! The free blocks of one kind in (size, address) order.
//!
//! One tree a bin. Most bins hold one block, and then the tree is that block. Small sizes have several bins,
//! by address, because rests of them gather by the hundreds and a block's way into a tree is as long as the
//! tree is high; the first of such a size is the first of its bins' firsts. Nothing is allocated except the
//! array of trees, once.

use super::bins::{BINS, BinSet, EXACT_BINS, LANED_BINS, LANES, bin_of, first_bin_of};
use super::block::{Block, Slot};
use super::slab::Slab;
use super::tree::{Tree, key_of};

#[derive(Debug, Default)]
pub(super) struct FreeIndex {
    /// One a bin. Empty until the first block comes.
    trees: Vec<Tree>,
    filled: BinSet,
}

impl FreeIndex {
    /// The first block with at least `size_bytes`, which are at least 512.
    #[inline(always)]
    pub(super) fn first_at_least(&self, slab: &Slab, size_bytes: u64) -> Option<Slot> {
        let bin = first_bin_of(size_bytes);
        let found = self.filled.first_from(bin)?;
        // Blocks of an exact bin have one size, and a later bin's blocks are all larger.
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

    /// The first block of the size whose first bin that holds any is `bin`.
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
        firsts.map(|tree| tree.first).min_by_key(|first| slab.get(*first).address)
    }

    /// The bins of the size that `bin` is of.
    fn bins_beside(bin: usize) -> std::ops::Range<usize> {
        if bin < LANED_BINS {
            bin / LANES * LANES..bin / LANES * LANES + LANES
        } else {
            bin..bin + 1
        }
    }

    /// The block behind `slot`, which is in this index.
    pub(super) fn next_after(&self, slab: &Slab, slot: Slot) -> Option<Slot> {
        let key = key_of(slab.get(slot));
        let beside = Self::bins_beside(first_bin_of(slab.get(slot).size_bytes));
        let later = beside.end;
        let behind = self.trees[beside].iter().filter_map(|tree| tree.lower_bound(slab, key + 1));
        let next = behind.min_by_key(|slot| key_of(slab.get(*slot)));
        next.or_else(|| self.first_of(slab, self.filled.first_from(later)?))
    }

    pub(super) fn last(&self, slab: &Slab) -> Option<Slot> {
        let trees = self.trees[Self::bins_beside(self.filled.last()?)].iter();
        trees.filter_map(|tree| tree.last(slab)).max_by_key(|slot| key_of(slab.get(*slot)))
    }

    /// Adds a block of `size_bytes` at `address` that is in no index and unlinked.
    #[inline(always)]
    pub(super) fn insert(&mut self, slab: &mut Slab, new: Slot, size_bytes: u64, address: u64) {
        let bin = bin_of(size_bytes, address);
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

    /// Takes a block out that is in this index; `block` is a copy of it.
    #[inline(always)]
    pub(super) fn remove(&mut self, slab: &mut Slab, old: Slot, block: &Block) {
        let bin = bin_of(block.size_bytes, block.address);
        match self.trees.get_mut(bin) {
            Some(tree) if tree.is_only(old, block) => {
                *tree = Tree::EMPTY;
                self.filled.remove(bin);
            }
            Some(tree) => tree.remove(slab, old, block.links, block.over),
            None => {}
        }
    }

    /// Whether the bitmap and the trees agree, for checks.
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
