//! The free blocks of one kind in (size, address) order.
//!
//! One tree a bin, threaded through the blocks themselves: a treap whose priorities are hashes of
//! the slots, so its shape needs no rebalancing and no memory. Blocks know who is above them, and each
//! bin knows its first block, so taking the first and putting it back cost the same among one hole and
//! among thousands. Most bins hold one block, and then the tree is that block. Nothing is allocated
//! except the array of bins, once.

use super::bins::{BINS, BinSet, EXACT_BINS, bin_of};
use super::block::{Block, Slot};
use super::slab::Slab;

#[derive(Debug, Default)]
pub(super) struct FreeIndex {
    /// Empty until the first block comes.
    bins: Vec<Bin>,
    filled: BinSet,
}

/// The tree of one bin.
#[derive(Clone, Copy, Debug)]
struct Bin {
    root: Slot,
    /// The least of its blocks.
    first: Slot,
}

impl Bin {
    const EMPTY: Self = Self { root: Slot::NONE, first: Slot::NONE };
}

impl FreeIndex {
    /// The first block with at least `size_bytes`, which are at least 512.
    #[inline(always)]
    pub(super) fn first_at_least(&self, slab: &Slab, size_bytes: u64) -> Option<Slot> {
        let bin = bin_of(size_bytes);
        let found = self.filled.first_from(bin)?;
        // Blocks of an exact bin have one size, and a later bin's blocks are all larger.
        if found < EXACT_BINS || found != bin {
            return self.bins.get(found).map(|bin| bin.first);
        }
        self.first_of_a_wide_bin(slab, bin, size_bytes)
    }

    #[inline(never)]
    fn first_of_a_wide_bin(&self, slab: &Slab, bin: usize, size_bytes: u64) -> Option<Slot> {
        let at_least = lower_bound(slab, self.bins[bin].root, size_bytes);
        if at_least.is_some() {
            return at_least;
        }
        let found = self.filled.first_from(bin + 1)?;
        Some(self.bins[found].first)
    }

    /// The block behind `slot`, which is in this index.
    pub(super) fn next_after(&self, slab: &Slab, slot: Slot) -> Option<Slot> {
        let block = slab.get(slot);
        if !block.links[1].is_none() {
            return Some(leftmost(slab, block.links[1]));
        }
        let (mut at, mut over) = (slot, block.over);
        while !over.is_none() {
            let above = slab.get(over);
            if above.links[0] == at {
                return Some(over);
            }
            (at, over) = (over, above.over);
        }
        let found = self.filled.first_from(bin_of(block.size_bytes) + 1)?;
        Some(self.bins[found].first)
    }

    pub(super) fn last(&self, slab: &Slab) -> Option<Slot> {
        let mut at = self.bins[self.filled.last()?].root;
        while !slab.get(at).links[1].is_none() {
            at = slab.get(at).links[1];
        }
        Some(at)
    }

    /// Adds a block of `size_bytes` that is in no index and unlinked.
    #[inline(always)]
    pub(super) fn insert(&mut self, slab: &mut Slab, new: Slot, size_bytes: u64) {
        let bin = bin_of(size_bytes);
        match self.bins.get_mut(bin) {
            Some(tree) if tree.root.is_none() => {
                *tree = Bin { root: new, first: new };
                self.filled.insert(bin);
            }
            Some(_) => self.insert_in_tree(slab, bin, new),
            None => self.add_bins(bin, new),
        }
    }

    #[cold]
    fn add_bins(&mut self, bin: usize, new: Slot) {
        self.bins = vec![Bin::EMPTY; BINS];
        self.bins[bin] = Bin { root: new, first: new };
        self.filled.insert(bin);
    }

    #[inline(never)]
    fn insert_in_tree(&mut self, slab: &mut Slab, bin: usize, new: Slot) {
        let key = key_of(slab.get(new));
        let Bin { root, first } = self.bins[bin];
        if key < key_of(slab.get(first)) {
            self.insert_first(slab, bin, new);
            return;
        }
        // Down to where its priority belongs.
        let priority = slab.get(new).priority;
        let (mut above, mut side, mut below) = (Slot::NONE, 0, root);
        while !below.is_none() {
            let block = slab.get(below);
            if block.priority < priority {
                break;
            }
            (above, side) = (below, usize::from(key > key_of(block)));
            below = block.links[side];
        }
        hang(slab, &mut self.bins[bin].root, above, side, new);
        split(slab, below, new, key);
    }

    /// Adds a block that comes before all others of its bin: everything it goes above comes after it.
    fn insert_first(&mut self, slab: &mut Slab, bin: usize, new: Slot) {
        let priority = slab.get(new).priority;
        let tree = &mut self.bins[bin];
        let (mut above, mut below) = (tree.first, Slot::NONE);
        tree.first = new;
        while !above.is_none() && slab.get(above).priority < priority {
            (above, below) = (slab.get(above).over, above);
        }
        hang(slab, &mut tree.root, above, 0, new);
        slab.get_mut(new).links[1] = below;
        if !below.is_none() {
            slab.get_mut(below).over = new;
        }
    }

    /// Hangs `new`, if it is any, where `old` hangs below `above`, or makes it the root.
    #[inline]
    fn replace(&mut self, slab: &mut Slab, bin: usize, above: Slot, old: Slot, new: Slot) {
        if above.is_none() {
            self.bins[bin].root = new;
        } else {
            let links = &mut slab.get_mut(above).links;
            let side = usize::from(links[1] == old);
            links[side] = new;
        }
        if !new.is_none() {
            slab.get_mut(new).over = above;
        }
    }

    /// Takes a block out that is in this index; `block` is a copy of it.
    #[inline(always)]
    pub(super) fn remove(&mut self, slab: &mut Slab, old: Slot, block: &Block) {
        let Block { size_bytes, links, over, .. } = *block;
        let bin = bin_of(size_bytes);
        match self.bins.get_mut(bin) {
            Some(tree) if tree.root == old && links == [Slot::NONE; 2] => {
                *tree = Bin::EMPTY;
                self.filled.remove(bin);
            }
            _ => self.remove_from_tree(slab, bin, old, links, over),
        }
    }

    #[inline(never)]
    fn remove_from_tree(
        &mut self,
        slab: &mut Slab,
        bin: usize,
        old: Slot,
        mut links: [Slot; 2],
        above: Slot,
    ) {
        if self.bins[bin].first == old {
            // The first has nothing before it: what follows is right below or right above.
            let next = if links[1].is_none() { above } else { leftmost(slab, links[1]) };
            self.bins[bin].first = next;
        }
        // The two subtrees become one, from the top down: two steps on average.
        let (mut over, mut side) = (Slot::NONE, 0);
        let mut top = Slot::NONE;
        while !links[0].is_none() && !links[1].is_none() {
            let higher = slab.get(links[0]).priority < slab.get(links[1]).priority;
            let pick = usize::from(higher);
            let taken = links[pick];
            hang(slab, &mut top, over, side, taken);
            (over, side) = (taken, 1 - pick);
            links[pick] = slab.get(taken).links[1 - pick];
        }
        let rest = if links[0].is_none() { links[1] } else { links[0] };
        hang(slab, &mut top, over, side, rest);
        self.replace(slab, bin, above, old, top);
    }

    /// Whether the bitmap, the bins and their trees agree, for checks.
    pub(super) fn is_sound(&self, slab: &Slab) -> bool {
        let sound = |(at, bin): (usize, &Bin)| {
            let filled = self.filled.contains(at);
            let Bin { root, first } = *bin;
            match (root.is_none(), first.is_none()) {
                (true, true) => !filled,
                (false, false) => {
                    filled
                        && leftmost(slab, root) == first
                        && slab.get(root).over.is_none()
                        && hangs_right(slab, root)
                }
                _ => false,
            }
        };
        self.bins.iter().enumerate().all(sound)
    }

    pub(super) fn bytes(&self) -> usize {
        self.bins.capacity() * size_of::<Bin>() + size_of::<BinSet>()
    }
}

/// Hangs `new`, if it is any, below `over`, or makes it the top.
#[inline]
fn hang(slab: &mut Slab, top: &mut Slot, over: Slot, side: usize, new: Slot) {
    if over.is_none() {
        *top = new;
    } else {
        slab.get_mut(over).links[side] = new;
    }
    if !new.is_none() {
        slab.get_mut(new).over = over;
    }
}

/// Hangs what is in the tree `below` under `new`, which has no children and whose key is `key`: lesser
/// blocks left and greater ones right. Two steps on average, in trees of any size.
#[inline]
fn split(slab: &mut Slab, below: Slot, new: Slot, key: u128) {
    let mut at = below;
    // Where the next lesser and the next greater block hang.
    let mut ends = [(new, 0), (new, 1)];
    while !at.is_none() {
        let block = slab.get_mut(at);
        let greater = usize::from(key_of(block) > key);
        let (over, side) = ends[greater];
        block.over = over;
        let next = block.links[1 - greater];
        slab.get_mut(over).links[side] = at;
        ends[greater] = (at, 1 - greater);
        at = next;
    }
    for (over, side) in ends {
        slab.get_mut(over).links[side] = Slot::NONE;
    }
}

#[inline]
fn leftmost(slab: &Slab, below: Slot) -> Slot {
    let mut at = below;
    while !slab.get(at).links[0].is_none() {
        at = slab.get(at).links[0];
    }
    at
}

/// Whether every block below `root` knows who is above it, and has the lower priority.
fn hangs_right(slab: &Slab, root: Slot) -> bool {
    let mut todo = vec![root];
    while let Some(at) = todo.pop() {
        let block = slab.get(at);
        for below in block.links.into_iter().filter(|below| !below.is_none()) {
            let child = slab.get(below);
            if child.over != at || child.priority > block.priority {
                return false;
            }
            todo.push(below);
        }
    }
    true
}

/// The first block below `root` with at least `size_bytes`.
#[inline]
fn lower_bound(slab: &Slab, root: Slot, size_bytes: u64) -> Option<Slot> {
    let (mut at, mut best) = (root, Slot::NONE);
    while !at.is_none() {
        let block = slab.get(at);
        let small = block.size_bytes < size_bytes;
        best = if small { best } else { at };
        at = block.links[usize::from(small)];
    }
    (!best.is_none()).then_some(best)
}

/// Size, then address, as one number: which side of a block another goes is a coin's toss, and
/// comparing pairs would branch on it.
#[inline]
fn key_of(block: &Block) -> u128 {
    u128::from(block.size_bytes) << 64 | u128::from(block.address)
}
