//! Blocks that other streams use.

use super::rules;
use crate::common::prelude::*;

// As in PyTorch, the event is recorded at the free, so work that is submitted later does not matter.
#[test]
fn work_that_the_other_stream_gets_after_the_free_is_not_waited_for() {
    let fixture = Fixture::new(GIB, "");
    let (first, second) = (fixture.take(20 * MIB), fixture.take(30 * MIB));
    let address = first.address();
    fixture.record(&first, SIDE);
    fixture.record(&second, SIDE);
    fixture.give(first);
    let moment = fixture.device.submitted();
    fixture.give(second);
    fixture.device.complete_until(SIDE, moment);
    let reused = fixture.take(20 * MIB);
    assert_eq!(reused.address(), address);
    assert_eq!(fixture.stats().active.all.current, 2, "the second one still drains");
    fixture.give(reused);
    fixture.check();
}

// Corresponds to PyTorch's `EventPool::empty_cache`.
#[test]
fn empty_cache_destroys_the_events_that_are_kept() {
    let fixture = Fixture::new(GIB, "");
    for _ in 0..3 {
        let blocks = [fixture.take(MIB), fixture.take(MIB)];
        for block in blocks {
            fixture.record(&block, SIDE);
            fixture.give(block);
        }
        fixture.device.complete_all();
        fixture.cross_stream().process_events().unwrap();
    }
    assert_eq!(
        (fixture.device.calls("create_event"), fixture.device.calls("destroy_event")),
        (2, 0)
    );
    fixture.caching().empty_cache().unwrap();
    assert_eq!(
        (fixture.device.calls("create_event"), fixture.device.calls("destroy_event")),
        (2, 2)
    );
}

// From PyTorch's tests: a hundred frees of 160 MiB, delayed by a slow stream, do not run out of memory,
// because memory pressure waits for their events.
#[test]
fn a_hundred_delayed_frees_do_not_run_out_of_memory() {
    for compat in [Compat::Default, Compat::PyTorch] {
        let fixture = Fixture::with(GIB, rules(compat));
        for _ in 0..100 {
            let block = fixture.take(160 * MIB);
            fixture.record(&block, SIDE);
            fixture.give(block);
        }
        let now = fixture.stats();
        assert_eq!(now.num_ooms, 0, "{compat:?}");
        assert!(now.num_sync_all_streams > 0);
        fixture.check();
    }
}
