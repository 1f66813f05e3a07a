//! Free blocks in (size, key) order: a treap threaded through the blocks.
//!
//! Priorities are hashes of the slots, so the tree needs no rebalancing and no extra memory. Blocks
//! point to their parent and a tree to its first block. So the cost of removing and reinserting the
//! first block does not depend on the number of blocks.

use super::at::{block_at, block_at_mut};
use super::block::{Block, Slot};

#[derive(Clone, Copy, Debug)]
pub(super) struct Tree {
    pub(super) root: Slot,
    /// The block with the least key.
    pub(super) first: Slot,
}

impl Tree {
    pub(super) const EMPTY: Self = Self { root: Slot::NONE, first: Slot::NONE };

    #[inline]
    pub(super) const fn is_empty(self) -> bool {
        self.root.is_none()
    }

    /// Returns the first block whose key is at least `key`.
    pub(super) fn lower_bound(self, blocks: &[Block], key: u128) -> Option<Slot> {
        let (mut at, mut best) = (self.root, Slot::NONE);
        while !at.is_none() {
            let block = block_at(blocks, at);
            let small = key_of(block) < key;
            best = if small { best } else { at };
            at = block.links[usize::from(small)];
        }
        (!best.is_none()).then_some(best)
    }

    /// Returns the block behind `slot`, which is in this tree.
    pub(super) fn next_after(self, blocks: &[Block], slot: Slot) -> Option<Slot> {
        let block = block_at(blocks, slot);
        if !block.links[1].is_none() {
            return Some(leftmost(blocks, block.links[1]));
        }
        let (mut at, mut over) = (slot, block.over);
        while !over.is_none() {
            let above = block_at(blocks, over);
            if above.links[0] == at {
                return Some(over);
            }
            (at, over) = (over, above.over);
        }
        None
    }

    /// Inserts a block that is in no tree.
    pub(super) fn insert(&mut self, blocks: &mut [Block], new: Slot) {
        block_at_mut(blocks, new).unlink();
        let key = key_of(block_at(blocks, new));
        if self.is_empty() || key < key_of(block_at(blocks, self.first)) {
            self.insert_first(blocks, new);
            return;
        }
        // Descend to the level of its priority.
        let priority = block_at(blocks, new).priority;
        let (mut above, mut side, mut below) = (Slot::NONE, 0, self.root);
        while !below.is_none() {
            let block = block_at(blocks, below);
            if block.priority < priority {
                break;
            }
            (above, side) = (below, usize::from(key > key_of(block)));
            below = block.links[side];
        }
        hang(blocks, &mut self.root, above, side, new);
        split(blocks, below, new, key);
    }

    /// Inserts a block that comes before all others. All blocks below it in the tree come after it.
    fn insert_first(&mut self, blocks: &mut [Block], new: Slot) {
        let priority = block_at(blocks, new).priority;
        let (mut above, mut below) = (self.first, Slot::NONE);
        self.first = new;
        while !above.is_none() && block_at(blocks, above).priority < priority {
            (above, below) = (block_at(blocks, above).over, above);
        }
        hang(blocks, &mut self.root, above, 0, new);
        block_at_mut(blocks, new).links[1] = below;
        if !below.is_none() {
            block_at_mut(blocks, below).over = new;
        }
    }

    /// Removes a block that is not the only one.
    pub(super) fn remove(&mut self, blocks: &mut [Block], old: Slot) {
        let Block { mut links, over: above, .. } = *block_at(blocks, old);
        if self.first == old {
            // The first block has no left child: the next one is in its right subtree, or is its parent.
            self.first = if links[1].is_none() { above } else { leftmost(blocks, links[1]) };
        }
        // Merge the two subtrees from the top down: two steps on average.
        let (mut over, mut side) = (Slot::NONE, 0);
        let mut top = Slot::NONE;
        while !links[0].is_none() && !links[1].is_none() {
            let higher = block_at(blocks, links[0]).priority < block_at(blocks, links[1]).priority;
            let pick = usize::from(higher);
            let taken = links[pick];
            hang(blocks, &mut top, over, side, taken);
            (over, side) = (taken, 1 - pick);
            links[pick] = block_at(blocks, taken).links[1 - pick];
        }
        let rest = if links[0].is_none() { links[1] } else { links[0] };
        hang(blocks, &mut top, over, side, rest);
        self.replace(blocks, above, old, top);
    }

    /// Replaces the child `old` of `above` by `new`, which may be `NONE`. Without a parent, `new`
    /// becomes the root.
    #[inline]
    fn replace(&mut self, blocks: &mut [Block], above: Slot, old: Slot, new: Slot) {
        if above.is_none() {
            self.root = new;
        } else {
            let links = &mut block_at_mut(blocks, above).links;
            let side = usize::from(links[1] == old);
            links[side] = new;
        }
        if !new.is_none() {
            block_at_mut(blocks, new).over = above;
        }
    }

    /// Returns true if all parent links, priorities and the first block are consistent.
    pub(super) fn is_sound(self, blocks: &[Block]) -> bool {
        if self.is_empty() || self.first.is_none() {
            return self.is_empty() && self.first.is_none();
        }
        leftmost(blocks, self.root) == self.first
            && block_at(blocks, self.root).over.is_none()
            && hangs_right(blocks, self.root)
    }
}

/// Makes `new`, which may be `NONE`, a child of `over`. Without a parent, `new` becomes the top.
#[inline]
fn hang(blocks: &mut [Block], top: &mut Slot, over: Slot, side: usize, new: Slot) {
    if over.is_none() {
        *top = new;
    } else {
        block_at_mut(blocks, over).links[side] = new;
    }
    if !new.is_none() {
        block_at_mut(blocks, new).over = over;
    }
}

/// Splits the tree `below` by `key` into the two children of `new`: lesser blocks left and greater ones
/// right. `new` has no children yet. Takes two steps on average, whatever the size of the tree.
#[inline]
fn split(blocks: &mut [Block], below: Slot, new: Slot, key: u128) {
    let mut at = below;
    // The places where the next lesser and the next greater block are attached.
    let mut ends = [(new, 0), (new, 1)];
    while !at.is_none() {
        let block = block_at_mut(blocks, at);
        let greater = usize::from(key_of(block) > key);
        let (over, side) = ends[greater];
        block.over = over;
        let next = block.links[1 - greater];
        block_at_mut(blocks, over).links[side] = at;
        ends[greater] = (at, 1 - greater);
        at = next;
    }
    for (over, side) in ends {
        block_at_mut(blocks, over).links[side] = Slot::NONE;
    }
}

#[inline]
fn leftmost(blocks: &[Block], below: Slot) -> Slot {
    let mut at = below;
    while !block_at(blocks, at).links[0].is_none() {
        at = block_at(blocks, at).links[0];
    }
    at
}

/// Returns true if every block below `root` points to its parent and has the lower priority.
fn hangs_right(blocks: &[Block], root: Slot) -> bool {
    let mut todo = vec![root];
    while let Some(at) = todo.pop() {
        let block = block_at(blocks, at);
        for below in block.links.into_iter().filter(|below| !below.is_none()) {
            let child = block_at(blocks, below);
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
