//! Free blocks of one size in the order of their keys: a pairing heap threaded through the blocks.
//!
//! An insertion compares two keys, whatever the number of blocks. The removal of a block compares none unless
//! there are blocks below it. Most free blocks of a small size join a neighbour before a request takes them,
//! so nothing else puts them in order. The cost of removing the first block is logarithmic on average.
//!
//! The first block is the root. The links of a block are the first block below it and the next block beside
//! it; `over` is the block before it on its side, or the one above it if there is none.
//!
//! Source: M. Fredman and others, "The Pairing Heap", Algorithmica 1986.

use super::at::{block_at, block_at_mut};
use super::block::{Block, Slot};

const BELOW: usize = 0;
const BESIDE: usize = 1;

/// Inserts the block at `new`, which is in no bin, into the heap with this first block. Returns the first
/// block.
#[inline(always)]
pub(super) fn insert(blocks: &mut [Block], first: Slot, new: Slot) -> Slot {
    block_at_mut(blocks, new).links = [Slot::NONE; 2];
    meld(blocks, first, new)
}

/// Makes a heap of a list in the order of keys, linked by the blocks before and behind: all others are below
/// the first.
pub(super) fn from_list(blocks: &mut [Block], first: Slot) {
    let links = &mut block_at_mut(blocks, first).links;
    let mut at = links[1];
    *links = [at, Slot::NONE];
    while !at.is_none() {
        let block = block_at_mut(blocks, at);
        block.over = std::mem::replace(&mut block.links[BELOW], Slot::NONE);
        at = block.links[BESIDE];
    }
}

/// Returns true if there are blocks below the one at `slot`. If not, it is the only one or not the first.
#[inline(always)]
pub(super) fn has_below(blocks: &[Block], slot: Slot) -> bool {
    !block_at(blocks, slot).links[BELOW].is_none()
}

/// Removes a block that has blocks below it from the heap with this first block.
#[inline(always)]
pub(super) fn remove(blocks: &mut [Block], first: &mut Slot, old: Slot) {
    if old != *first {
        cut(blocks, old);
    }
    let rest = meld_all(blocks, block_at(blocks, old).links[BELOW]);
    if old == *first {
        *first = rest;
    } else {
        put_below(blocks, *first, rest);
    }
}

/// Removes a block that is not the first, and those below it, from its side.
#[inline(always)]
pub(super) fn cut(blocks: &mut [Block], old: Slot) {
    let Block { links: [_, beside], over, .. } = *block_at(blocks, old);
    let links = &mut block_at_mut(blocks, over).links;
    links[usize::from(links[BELOW] != old)] = beside;
    block_at_mut(blocks, beside).over = over;
}

/// Joins two heaps with these first blocks. Returns the first block of both.
#[inline(always)]
fn meld(blocks: &mut [Block], one: Slot, other: Slot) -> Slot {
    let is_other = block_at(blocks, other).key < block_at(blocks, one).key;
    let (first, second) = if is_other { (other, one) } else { (one, other) };
    put_below(blocks, first, second);
    first
}

/// Puts the heap with the first block `second` directly below `first`, which has a lower key.
#[inline(always)]
fn put_below(blocks: &mut [Block], first: Slot, second: Slot) {
    let beside = std::mem::replace(&mut block_at_mut(blocks, first).links[BELOW], second);
    block_at_mut(blocks, beside).over = second;
    let block = block_at_mut(blocks, second);
    (block.links[BESIDE], block.over) = (beside, first);
}

/// Joins the heaps whose first blocks are `at` and those beside it: in pairs, then each pair with the
/// pairs behind it. Returns the first block of all.
#[inline(always)]
fn meld_all(blocks: &mut [Block], mut at: Slot) -> Slot {
    // The pairs, last one first, as a list through the same links.
    let mut pairs = Slot::NONE;
    while !at.is_none() {
        let beside = block_at(blocks, at).links[BESIDE];
        let (pair, next) = match beside.is_none() {
            true => (at, beside),
            false => {
                let next = block_at(blocks, beside).links[BESIDE];
                (meld(blocks, at, beside), next)
            }
        };
        block_at_mut(blocks, pair).links[BESIDE] = pairs;
        (pairs, at) = (pair, next);
    }
    let mut all = pairs;
    let mut next = block_at(blocks, all).links[BESIDE];
    while !next.is_none() {
        let pair = next;
        next = block_at(blocks, pair).links[BESIDE];
        all = meld(blocks, all, pair);
    }
    block_at_mut(blocks, all).links[BESIDE] = Slot::NONE;
    all
}

/// Returns all blocks of the heap with this first block, each before those below it. Leaves out the blocks
/// below one for which `enters` is false.
pub(super) fn walk(
    blocks: &[Block],
    first: Slot,
    enters: impl Fn(&Block) -> bool,
) -> impl Iterator<Item = Slot> {
    std::iter::successors(Some(first), move |&slot| {
        let block = block_at(blocks, slot);
        let below = block.links[BELOW];
        if !below.is_none() && enters(block) {
            return Some(below);
        }
        let mut at = slot;
        while at != first {
            let Block { links: [_, beside], over, .. } = *block_at(blocks, at);
            if !beside.is_none() {
                return Some(beside);
            }
            // Back along the side to its first block, and up from there.
            let mut start = at;
            let mut up = over;
            while block_at(blocks, up).links[BELOW] != start {
                (start, up) = (up, block_at(blocks, up).over);
            }
            at = up;
        }
        None
    })
}

/// Returns true if every block has a higher key than the one above it, and all links agree. For checks.
pub(super) fn is_sound(blocks: &[Block], first: Slot) -> bool {
    walk(blocks, first, |_| true).all(|slot| {
        let Block { links: [mut below, _], key, .. } = *block_at(blocks, slot);
        let mut before = slot;
        while !below.is_none() {
            let Block { links: [_, beside], over, key: own, .. } = *block_at(blocks, below);
            if over != before || own <= key {
                return false;
            }
            (before, below) = (below, beside);
        }
        true
    })
}
