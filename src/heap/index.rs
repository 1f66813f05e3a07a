//! The free blocks of one kind in (size, address) order.
//!
//! One tree a bin, threaded through the blocks themselves: a treap whose priorities are hashes of
//! the slots, so its shape needs no rebalancing and no memory. Most bins hold one block, and then
//! the tree is that block. Nothing is allocated except the array of roots, once.

use super::bins::{BINS, BinSet, bin_of};
use super::block::{Block, Slot};
use super::slab::Slab;

#[derive(Debug, Default)]
pub(super) struct FreeIndex {
    /// Root of each bin's tree. Empty until the first block comes.
    roots: Vec<Slot>,
    filled: BinSet,
}

/// Where a subtree hangs: below a block, or at the root of the bin.
#[derive(Clone, Copy)]
enum Link {
    Root,
    Left(Slot),
    Right(Slot),
}

impl FreeIndex {
    #[inline(always)]
    pub(super) fn first_at_least(&self, slab: &Slab, size_bytes: u64) -> Option<Slot> {
        let bin = bin_of(size_bytes.max(crate::size::MIN_BLOCK_BYTES));
        self.first_from(slab, bin, (size_bytes, 0))
    }

    pub(super) fn next_after(&self, slab: &Slab, size_bytes: u64, address: u64) -> Option<Slot> {
        self.first_from(slab, bin_of(size_bytes), (size_bytes, address + 1))
    }

    #[inline(always)]
    fn first_from(&self, slab: &Slab, bin: usize, key: (u64, u64)) -> Option<Slot> {
        let found = self.filled.first_from(bin)?;
        if found != bin {
            return Some(self.leftmost(slab, found));
        }
        let at_least = self.lower_bound(slab, bin, key);
        if at_least.is_some() {
            return at_least;
        }
        let found = self.filled.first_from(bin + 1)?;
        Some(self.leftmost(slab, found))
    }

    pub(super) fn last(&self, slab: &Slab) -> Option<Slot> {
        let mut at = self.roots[self.filled.last()?];
        while !slab.get(at).right.is_none() {
            at = slab.get(at).right;
        }
        Some(at)
    }

    #[inline]
    fn leftmost(&self, slab: &Slab, bin: usize) -> Slot {
        let mut at = self.roots[bin];
        loop {
            let left = slab.get(at).left;
            if left.is_none() {
                return at;
            }
            at = left;
        }
    }

    #[inline]
    fn lower_bound(&self, slab: &Slab, bin: usize, key: (u64, u64)) -> Option<Slot> {
        let (mut at, mut best) = (self.roots[bin], Slot::NONE);
        while !at.is_none() {
            let block = slab.get(at);
            if key_of(block) >= key {
                best = at;
                at = block.left;
            } else {
                at = block.right;
            }
        }
        (!best.is_none()).then_some(best)
    }

    /// Adds a block that is in no index.
    #[inline(always)]
    pub(super) fn insert(&mut self, slab: &mut Slab, new: Slot) {
        if self.roots.is_empty() {
            self.roots = vec![Slot::NONE; BINS];
        }
        let block = slab.get_mut(new);
        block.left = Slot::NONE;
        block.right = Slot::NONE;
        let bin = bin_of(block.size_bytes);
        if self.roots[bin].is_none() {
            self.roots[bin] = new;
            self.filled.insert(bin);
        } else {
            self.insert_in_tree(slab, bin, new);
        }
    }

    #[inline(never)]
    fn insert_in_tree(&mut self, slab: &mut Slab, bin: usize, new: Slot) {
        let block = slab.get(new);
        let (key, priority) = (key_of(block), block.priority);
        let (mut link, mut at) = (Link::Root, self.roots[bin]);
        while !at.is_none() {
            let block = slab.get(at);
            if block.priority < priority {
                break;
            }
            (link, at) = if key < key_of(block) {
                (Link::Left(at), block.left)
            } else {
                (Link::Right(at), block.right)
            };
        }
        self.hang(slab, bin, link, new);
        // The new block takes the place of the subtree at `at`, which is cut in two by its key.
        let (mut below, mut above) = (Link::Left(new), Link::Right(new));
        while !at.is_none() {
            let block = slab.get(at);
            if key_of(block) < key {
                let rest = block.right;
                self.hang(slab, bin, below, at);
                (below, at) = (Link::Right(at), rest);
            } else {
                let rest = block.left;
                self.hang(slab, bin, above, at);
                (above, at) = (Link::Left(at), rest);
            }
        }
        self.hang(slab, bin, below, Slot::NONE);
        self.hang(slab, bin, above, Slot::NONE);
    }

    /// Takes a block out that is in this index.
    #[inline(always)]
    pub(super) fn remove(&mut self, slab: &mut Slab, old: Slot) {
        let block = slab.get(old);
        let bin = bin_of(block.size_bytes);
        if self.roots[bin] == old && block.left.is_none() && block.right.is_none() {
            self.roots[bin] = Slot::NONE;
            self.filled.remove(bin);
        } else {
            self.remove_from_tree(slab, bin, old);
        }
    }

    #[inline(never)]
    fn remove_from_tree(&mut self, slab: &mut Slab, bin: usize, old: Slot) {
        let key = key_of(slab.get(old));
        let (mut link, mut at) = (Link::Root, self.roots[bin]);
        while at != old {
            let block = slab.get(at);
            (link, at) = if key < key_of(block) {
                (Link::Left(at), block.left)
            } else {
                (Link::Right(at), block.right)
            };
        }
        let block = slab.get(old);
        let (mut low, mut high) = (block.left, block.right);
        loop {
            if low.is_none() {
                return self.hang(slab, bin, link, high);
            }
            if high.is_none() {
                return self.hang(slab, bin, link, low);
            }
            if slab.get(low).priority > slab.get(high).priority {
                self.hang(slab, bin, link, low);
                (link, low) = (Link::Right(low), slab.get(low).right);
            } else {
                self.hang(slab, bin, link, high);
                (link, high) = (Link::Left(high), slab.get(high).left);
            }
        }
    }

    #[inline]
    fn hang(&mut self, slab: &mut Slab, bin: usize, link: Link, subtree: Slot) {
        match link {
            Link::Root => self.roots[bin] = subtree,
            Link::Left(slot) => slab.get_mut(slot).left = subtree,
            Link::Right(slot) => slab.get_mut(slot).right = subtree,
        }
    }

    /// Whether the bitmap and the roots agree, for checks.
    pub(super) fn bitmap_is_right(&self) -> bool {
        self.roots.iter().enumerate().all(|(bin, root)| self.filled.contains(bin) != root.is_none())
    }

    pub(super) fn bytes(&self) -> usize {
        self.roots.capacity() * size_of::<Slot>() + size_of::<BinSet>()
    }
}

#[inline]
fn key_of(block: &Block) -> (u64, u64) {
    (block.size_bytes, block.address)
}
