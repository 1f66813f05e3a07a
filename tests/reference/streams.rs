//! Blocks that other streams use.

use super::{rules, signed};
use crate::common::prelude::*;

// The reference: a block that a delayed copy on another stream reads is not reused before the copy
// has finished, and is reused by its own stream afterwards.
#[test]
fn a_block_is_reused_only_when_the_other_stream_has_finished() {
    let bed = Bed::new(GIB, "");
    let block = bed.take(20 * MIB);
    let address = block.address();
    bed.record(&block, SIDE);
    bed.give(block);
    let now = bed.stats();
    assert_eq!(now.memory_allocated(), 0);
    assert_eq!(now.active_bytes.all.current, signed(20 * MIB), "it drains");
    assert_eq!(bed.layout()[0].blocks[0].state, BlockStateName::ActivePendingFree);
    bed.check();

    let other = bed.take(20 * MIB);
    assert_ne!(other.address(), address, "the copy may still read it");
    bed.device.complete_stream(SIDE);
    let reused = bed.take(20 * MIB);
    assert_eq!(reused.address(), address);
    bed.give(reused);
    bed.give(other);
    bed.check();
}

// The reference ignores the block's own stream: its order is enough.
#[test]
fn recording_the_blocks_own_stream_changes_nothing() {
    let bed = Bed::new(GIB, "");
    let block = bed.take(20 * MIB);
    let address = block.address();
    bed.record(&block, HOME);
    bed.give(block);
    assert_eq!(bed.device.calls("record_event"), 0);
    let again = bed.take(20 * MIB);
    assert_eq!(again.address(), address);
    bed.give(again);
}

// The reference keeps a set of streams per block: each counts once, and all must finish.
#[test]
fn a_block_waits_for_each_stream_once_and_for_all_of_them() {
    let bed = Bed::new(GIB, "");
    let block = bed.take(20 * MIB);
    for stream in [SIDE, FAR, SIDE, HOME, FAR] {
        bed.record(&block, stream);
    }
    bed.give(block);
    assert_eq!(bed.device.pending_events().len(), 2);
    bed.device.complete_stream(SIDE);
    bed.cross_stream().process_events().unwrap();
    assert_eq!(bed.stats().active.all.current, 1);
    bed.device.complete_stream(FAR);
    bed.cross_stream().process_events().unwrap();
    assert_eq!(bed.stats().active.all.current, 0);
    bed.check();
}

// The reference records at the free, so work that is submitted later does not matter.
#[test]
fn work_that_the_other_stream_gets_after_the_free_is_not_waited_for() {
    let bed = Bed::new(GIB, "");
    let (first, second) = (bed.take(20 * MIB), bed.take(30 * MIB));
    let address = first.address();
    bed.record(&first, SIDE);
    bed.record(&second, SIDE);
    bed.give(first);
    let moment = bed.device.submitted();
    bed.give(second);
    bed.device.complete_until(SIDE, moment);
    let reused = bed.take(20 * MIB);
    assert_eq!(reused.address(), address);
    assert_eq!(bed.stats().active.all.current, 2, "the second one still drains");
    bed.give(reused);
    bed.check();
}

// The reference forgets a block's streams with its free: the next holder starts anew.
#[test]
fn the_next_holder_of_a_block_does_not_inherit_its_streams() {
    let bed = Bed::new(GIB, "");
    let block = bed.take(20 * MIB);
    bed.record(&block, SIDE);
    bed.give(block);
    bed.device.complete_all();
    let next = bed.take(20 * MIB);
    let recorded = bed.device.calls("record_event");
    bed.give(next);
    assert_eq!(bed.device.calls("record_event"), recorded);
    assert_eq!(bed.stats().active.all.current, 0);
}

// The reference: `EventPool::empty_cache`.
#[test]
fn empty_cache_destroys_the_events_that_are_kept() {
    let bed = Bed::new(GIB, "");
    for _ in 0..3 {
        let blocks = [bed.take(MIB), bed.take(MIB)];
        for block in blocks {
            bed.record(&block, SIDE);
            bed.give(block);
        }
        bed.device.complete_all();
        bed.cross_stream().process_events().unwrap();
    }
    assert_eq!((bed.device.calls("create_event"), bed.device.calls("destroy_event")), (2, 0));
    bed.caching().empty_cache().unwrap();
    assert_eq!((bed.device.calls("create_event"), bed.device.calls("destroy_event")), (2, 2));
}

// The reference: a stream's pool is its own.
#[test]
fn a_free_block_serves_only_the_stream_it_was_made_for() {
    let bed = Bed::new(GIB, "");
    let block = bed.take_on(20 * MIB, SIDE);
    let address = block.address();
    bed.give(block);
    let here = bed.take_on(20 * MIB, HOME);
    assert_ne!(here.address(), address);
    let there = bed.take_on(20 * MIB, SIDE);
    assert_eq!(there.address(), address);
    bed.give(here);
    bed.give(there);
}

// The reference: a hundred frees of 160 MiB that a slow stream holds up are not out of memory: under
// pressure their events are waited for.
#[test]
fn a_hundred_delayed_frees_do_not_run_out_of_memory() {
    for compat in [Compat::Default, Compat::PyTorch] {
        let bed = Bed::with(GIB, rules(compat));
        for _ in 0..100 {
            let block = bed.take(160 * MIB);
            bed.record(&block, SIDE);
            bed.give(block);
        }
        let now = bed.stats();
        assert_eq!(now.num_ooms, 0, "{compat:?}");
        assert!(now.num_sync_all_streams > 0);
        bed.check();
    }
}

#[test]
fn raw_addresses_follow_the_same_stream_rules() {
    let bed = Bed::new(GIB, "");
    let raw = &bed;
    let request = stratalloc::allocator::Request::new(20 * MIB, HOME);
    let address = bed.allocate(request).map(|b| b.address()).unwrap();
    raw.record_stream_raw(address, SIDE).unwrap();
    raw.free_raw(address).unwrap();
    let other = bed.allocate(request).map(|b| b.address()).unwrap();
    assert_ne!(other, address);
    bed.device.complete_stream(SIDE);
    assert_eq!(bed.allocate(request).map(|b| b.address()).unwrap(), address);
    bed.check();
}
