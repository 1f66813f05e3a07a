//! Blocks that other streams use.

use super::rules;
use crate::common::prelude::*;

// PyTorch records the event at the free, so work submitted later does not matter.
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

// PyTorch: `EventPool::empty_cache`.
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

// PyTorch: a hundred frees of 160 MiB delayed by a slow stream do not run out of memory, because
// memory pressure waits for their events.
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
