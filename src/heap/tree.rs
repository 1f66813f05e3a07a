//! Free blocks in (size, key) order: a treap threaded through the blocks.
//!
//! Priorities are hashes of the slots, so the shape needs no rebalancing and no memory. Blocks know who is
//! above them, and a tree knows its first block, so taking the first and putting it back cost the same
//! among few blocks and among thousands.

use super::block::{Block, Slot};
use super::slab::Slab;

#[derive(Clone, Copy, Debug)]
pub(super) struct Tree {
    root: Slot,
    /// The least of its blocks.
    pub(super) first: Slot,
}

impl Tree {
    pub(super) const EMPTY: Self = Self { root: Slot::NONE, first: Slot::NONE };

    /// The tree of one block.
    #[inline]
    pub(super) const fn of(only: Slot) -> Self {
        Self { root: only, first: only }
    }

    /// Whether the block at `slot`, which is in this tree, is the only one; `block` is a copy of it.
    #[inline]
    pub(super) fn is_only(self, slot: Slot, block: &Block) -> bool {
        self.root == slot && block.links[0] == Slot::NONE && block.links[1] == Slot::NONE
    }

    #[inline]
    pub(super) const fn is_empty(self) -> bool {
        self.root.is_none()
    }

    /// The first block whose key is at least `key`.
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

    /// The first block whose key is greater than `key`; no place if there is none.
    pub(super) fn first_behind(self, slab: &Slab, key: u128) -> Slot {
        if self.is_empty() || key_of(slab.get(self.first)) > key {
            return self.first;
        }
        self.lower_bound(slab, key + 1).unwrap_or(Slot::NONE)
    }

    /// The block behind `slot`, which is in this tree.
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

    /// Adds a block that is in no tree and unlinked. The tree is not empty.
    #[inline(never)]
    pub(super) fn insert(&mut self, slab: &mut Slab, new: Slot) {
        let key = key_of(slab.get(new));
        if key < key_of(slab.get(self.first)) {
            self.insert_first(slab, new);
            return;
        }
        // Down to where its priority belongs.
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

    /// Adds a block that comes before all others: everything it goes above comes after it.
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

    /// Takes a block out that is not the only one, with these links and that block above it.
    #[inline(never)]
    pub(super) fn remove(&mut self, slab: &mut Slab, old: Slot, mut links: [Slot; 2], above: Slot) {
        if self.first == old {
            // The first has nothing before it: what follows is right below or right above.
            self.first = if links[1].is_none() { above } else { leftmost(slab, links[1]) };
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
        self.replace(slab, above, old, top);
    }

    /// Hangs `new`, if it is any, where `old` hangs below `above`, or makes it the root.
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

    /// Whether every block knows who is above it and has the lower priority, and the first is known.
    pub(super) fn is_sound(self, slab: &Slab) -> bool {
        if self.is_empty() || self.first.is_none() {
            return self.is_empty() && self.first.is_none();
        }
        leftmost(slab, self.root) == self.first
            && slab.get(self.root).over.is_none()
            && hangs_right(slab, self.root)
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

/// Returns size, then key, as one number: the result of a comparison is unpredictable, and comparing pairs
/// would branch on it.
#[inline]
pub(super) fn key_of(block: &Block) -> u128 {
    u128::from(block.size_bytes) << 64 | u128::from(block.key)
}
