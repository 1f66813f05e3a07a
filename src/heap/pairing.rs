//! Free blocks of one size in the order of their keys: a pairing heap threaded through the blocks.
//!
//! An insertion compares two keys, whatever the number of blocks. The removal of a block compares none unless
//! there are blocks below it. Most free blocks of a small size join a neighbour before a request takes them,
//! so nothing else puts them in order. The amortised cost of removing the first block is logarithmic.
//!
//! The first block is the root. The links of a block are the first block below it and the next block beside
//! it; `over` is the block before it on its side, or the one above it if there is none. The first block has
//! none beside, before or above it.
//!
//! Whether a heap is empty and which of two keys is lower is random in programs with blocks of many sizes. A
//! wrong prediction of such a branch costs as much as 60 instructions, so there are few branches here. If a
//! block is absent, the unused one at `Slot::NONE` is read and written instead. Its key is the highest.
//!
//! Source: M. Fredman and others, "The Pairing Heap", Algorithmica 1986.

use std::hint::select_unpredictable;

use super::at::{block_at, block_at_mut};
use super::block::{Block, Slot};

const BELOW: usize = 0;
const BESIDE: usize = 1;

/// Inserts the block at `new`, which is in no bin, into the heap with this first block. An empty heap has
/// `NONE`.
#[inline(always)]
pub(super) fn insert(blocks: &mut [Block], first: &mut Slot, new: Slot) {
    block_at_mut(blocks, new).unlink();
    *first = meld(blocks, *first, new);
}

/// As [`remove`], for the first block.
#[inline(always)]
pub(super) fn remove_first(blocks: &mut [Block], first: &mut Slot) {
    let below = block_at(blocks, *first).links[BELOW];
    *first = if below.is_none() { below } else { meld_all(blocks, below, Slot::NONE) };
    block_at_mut(blocks, *first).over = Slot::NONE;
}

/// Removes a block from the heap with this first block. The blocks below it take its place.
#[inline(always)]
pub(super) fn remove(blocks: &mut [Block], first: &mut Slot, old: Slot) {
    let Block { links: [below, beside], over, .. } = *block_at(blocks, old);
    let rest = if below.is_none() { beside } else { meld_all(blocks, below, beside) };
    let links = &mut block_at_mut(blocks, over).links;
    links[usize::from(links[BELOW] != old)] = rest;
    block_at_mut(blocks, rest).over = over;
    *first = select_unpredictable(old == *first, rest, *first);
}

/// Joins two heaps with these first blocks. Returns the first block of both.
#[inline(always)]
fn meld(blocks: &mut [Block], one: Slot, other: Slot) -> Slot {
    let is_other = block_at(blocks, other).key < block_at(blocks, one).key;
    let first = select_unpredictable(is_other, other, one);
    let second = select_unpredictable(is_other, one, other);
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
/// pairs behind it. Puts the result before `behind`, if that is a block. Returns its first block.
#[inline(never)]
fn meld_all(blocks: &mut [Block], mut at: Slot, behind: Slot) -> Slot {
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
    block_at_mut(blocks, all).links[BESIDE] = behind;
    block_at_mut(blocks, behind).over = all;
    all
}

/// Returns all blocks of the heap with this first block, in order.
pub(super) fn in_order(blocks: &[Block], first: Slot) -> Vec<Slot> {
    let mut slots: Vec<Slot> = walk(blocks, first, |_| true).collect();
    slots.sort_unstable_by_key(|slot| block_at(blocks, *slot).key);
    slots
}

/// Returns the block behind `slot`, which is in the heap with this first block. Visits all blocks up to it
/// and those directly below them.
pub(super) fn next_after(blocks: &[Block], first: Slot, slot: Slot) -> Option<Slot> {
    let key = |slot: &Slot| block_at(blocks, *slot).key;
    // All blocks below one that is behind `slot` are behind that one.
    let own = key(&slot);
    let blocks = walk(blocks, first, |block| block.key <= own);
    blocks.filter(|other| key(other) > own).min_by_key(key)
}

/// Returns all blocks of the heap with this first block, each before those below it. Leaves out the blocks
/// below one for which `enters` is false.
fn walk(
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
    let Block { links: [_, beside], over, .. } = *block_at(blocks, first);
    if !beside.is_none() || !over.is_none() {
        return false;
    }
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
