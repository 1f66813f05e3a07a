//! Access to blocks without a check of bounds: the only `unsafe` of a heap.
//!
//! A slot in a block's links, in a bin, in a chain of starts or in the list of vacant slots was returned by
//! the slab of the same heap, and a slab never shrinks. The compiler cannot see that, and a check costs two
//! instructions at each of a dozen accesses of a request and its free. Slots that come from outside of the
//! heap are checked where they enter it, by `Slab::get` or `Heap::live`. Debug builds check all.
#![allow(unsafe_code, reason = "see above")]

use super::block::{Block, Slot};

/// Returns the block at a slot that this heap has stored, or that was checked.
#[inline(always)]
pub(super) fn block_at(blocks: &[Block], slot: Slot) -> &Block {
    debug_assert!((slot.0 as usize) < blocks.len(), "slots are those of the slab");
    // SAFETY: the slab returned the slot and never shrinks, so it is an index of its array.
    unsafe { blocks.get_unchecked(slot.0 as usize) }
}

/// As [`block_at`], for changes.
#[inline(always)]
pub(super) fn block_at_mut(blocks: &mut [Block], slot: Slot) -> &mut Block {
    debug_assert!((slot.0 as usize) < blocks.len(), "slots are those of the slab");
    // SAFETY: as in `block_at`.
    unsafe { blocks.get_unchecked_mut(slot.0 as usize) }
}
