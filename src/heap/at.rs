//! Access to blocks without a check of bounds: the only `unsafe` of a heap.
//!
//! A slot that is a neighbour, in a bin, in a chain of starts or in the list of vacant slots was returned by
//! the slab of the same heap, and a slab never shrinks. The compiler cannot see that, and a check costs two
//! instructions at each of a dozen accesses of a request and its free. Debug builds check all.
//!
//! A slot that comes from outside of the heap is checked where it enters, by `Slab::get` or `Heap::live`. The
//! bounds do not suffice: the links of live and draining blocks hold other numbers (see `Block::links`), so
//! a block in the wrong state would bring one of them here. Therefore operations that enter or leave the
//! state *free*, or write such a number, check the state, too. `Heap::free`, `Heap::name_of` and
//! `Heap::is_used_by_other_streams` alone trust their callers: the slot is a result of `live` or `take`.
#![allow(unsafe_code, reason = "see above")]

use super::block::{Block, Slot};

/// Returns the block at a slot that this heap has stored, or that was checked.
#[inline(always)]
pub(super) fn block_at(blocks: &[Block], slot: Slot) -> &Block {
    debug_assert!(is_slot_of(blocks, slot), "slots are those of the slab");
    // SAFETY: the slab returned the slot and never shrinks, so a block of its array lies there. What the
    // links of free and vacant blocks hold are slots, by the checks of states named above.
    let block = unsafe { blocks.as_ptr().byte_add(slot.byte_offset()) };
    // SAFETY: as above; the array is borrowed as long as the block.
    unsafe { &*block }
}

/// As [`block_at`], for changes.
#[inline(always)]
pub(super) fn block_at_mut(blocks: &mut [Block], slot: Slot) -> &mut Block {
    debug_assert!(is_slot_of(blocks, slot), "slots are those of the slab");
    // SAFETY: as in `block_at`.
    let block = unsafe { blocks.as_mut_ptr().byte_add(slot.byte_offset()) };
    // SAFETY: as in `block_at`.
    unsafe { &mut *block }
}

fn is_slot_of(blocks: &[Block], slot: Slot) -> bool {
    slot.0.is_multiple_of(Slot::STEP) && (slot.index() as usize) < blocks.len()
}
