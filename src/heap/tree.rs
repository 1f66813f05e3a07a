//! Free blocks in (size, key) order: a treap threaded through the blocks.
//!
//! Priorities are hashes of the slots, so the tree needs no rebalancing and no extra memory. Blocks
//! point to their parent and a tree to its first block. So the cost of removing and reinserting the
//! first block does not depend on the number of blocks.

use super::block::{Block, Slot};
use super::slab::Slab;

#[derive(Clone, Copy, Debug)]
pub(super) struct Tree {
    root: Slot,
    /// The block with the least key.
    pub(super) first: Slot,
}

impl Tree {
    pub(super) const EMPTY: Self = Self { root: Slot::NONE, first: Slot::NONE };

    /// Returns the tree of a single block.
    #[inline]
    pub(super) const fn of(only: Slot) -> Self {
        Self { root: only, first: only }
    }

    /// Returns true if the block at `slot`, which is in this tree, is the only one. `block` is a copy of
    /// it.
    #[inline]
    pub(super) fn is_only(self, slot: Slot, block: &Block) -> bool {
        self.root == slot && block.links[0] == Slot::NONE && block.links[1] == Slot::NONE
    }

    #[inline]
    pub(super) const fn is_empty(self) -> bool {
        self.root.is_none()
    }

    /// Returns the first block whose key is at least `key`.
    pub(super) fn lower_bound(self, slab: &Slab, key: u128) -> Option<Slot> {
        let (mut at, mut best) = (self.root, Slot::NONE);
        while !at.is_none() {
            let block = slab.get(at);
            let small = key_of(block) < key;
            best = if small { best } else { at };
            at = block.links[usize::from(small)];
        }
        (!best.is_none()).then_some(best)
    }

    /// Returns the first block whose key is greater than `key`, or `Slot::NONE`.
    pub(super) fn first_behind(self, slab: &Slab, key: u128) -> Slot {
        if self.is_empty() || key_of(slab.get(self.first)) > key {
            return self.first;
        }
        self.lower_bound(slab, key + 1).unwrap_or(Slot::NONE)
    }

    /// Returns the block behind `slot`, which is in this tree.
    pub(super) fn next_after(self, slab: &Slab, slot: Slot) -> Option<Slot> {
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
        None
    }

    /// Inserts a block that is unlinked and in no tree. The tree must not be empty.
    #[inline(never)]
    pub(super) fn insert(&mut self, slab: &mut Slab, new: Slot) {
        let key = key_of(slab.get(new));
        if key < key_of(slab.get(self.first)) {
            self.insert_first(slab, new);
            return;
        }
        // Descend to the level of its priority.
        let priority = slab.get(new).priority;
        let (mut above, mut side, mut below) = (Slot::NONE, 0, self.root);
        while !below.is_none() {
            let block = slab.get(below);
            if block.priority < priority {
                break;
            }
            (above, side) = (below, usize::from(key > key_of(block)));
            below = block.links[side];
        }
        hang(slab, &mut self.root, above, side, new);
        split(slab, below, new, key);
    }

    /// Inserts a block that comes before all others. All blocks below it in the tree come after it.
    fn insert_first(&mut self, slab: &mut Slab, new: Slot) {
        let priority = slab.get(new).priority;
        let (mut above, mut below) = (self.first, Slot::NONE);
        self.first = new;
        while !above.is_none() && slab.get(above).priority < priority {
            (above, below) = (slab.get(above).over, above);
        }
        hang(slab, &mut self.root, above, 0, new);
        slab.get_mut(new).links[1] = below;
        if !below.is_none() {
            slab.get_mut(below).over = new;
        }
    }

    /// Removes a block that is not the only one; `links` are its children and `above` its parent.
    #[inline(never)]
    pub(super) fn remove(&mut self, slab: &mut Slab, old: Slot, mut links: [Slot; 2], above: Slot) {
        if self.first == old {
            // The first block has no left child: the next one is in its right subtree, or is its parent.
            self.first = if links[1].is_none() { above } else { leftmost(slab, links[1]) };
        }
        // Merge the two subtrees from the top down: two steps on average.
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
        self.replace(slab, above, old, top);
    }

    /// Replaces the child `old` of `above` by `new`, which may be `NONE`. Without a parent, `new`
    /// becomes the root.
    #[inline]
    fn replace(&mut self, slab: &mut Slab, above: Slot, old: Slot, new: Slot) {
        if above.is_none() {
            self.root = new;
        } else {
            let links = &mut slab.get_mut(above).links;
            let side = usize::from(links[1] == old);
            links[side] = new;
        }
        if !new.is_none() {
            slab.get_mut(new).over = above;
        }
    }

    /// Returns true if all parent links, priorities and the first block are consistent.
    pub(super) fn is_sound(self, slab: &Slab) -> bool {
        if self.is_empty() || self.first.is_none() {
            return self.is_empty() && self.first.is_none();
        }
        leftmost(slab, self.root) == self.first
            && slab.get(self.root).over.is_none()
            && hangs_right(slab, self.root)
    }
}

/// Makes `new`, which may be `NONE`, a child of `over`. Without a parent, `new` becomes the top.
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

/// Splits the tree `below` by `key` into the two children of `new`: lesser blocks left and greater ones
/// right. `new` has no children yet. Takes two steps on average, whatever the size of the tree.
#[inline]
fn split(slab: &mut Slab, below: Slot, new: Slot, key: u128) {
    let mut at = below;
    // The places where the next lesser and the next greater block are attached.
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

/// Returns true if every block below `root` points to its parent and has the lower priority.
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

/// Returns size and key as one number. Comparing pairs would need a branch, which is unpredictable here.
#[inline]
pub(super) fn key_of(block: &Block) -> u128 {
    u128::from(block.size_bytes) << 64 | u128::from(block.key)
}
