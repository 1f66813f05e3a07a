//! Blocks that were allocated before a switch.

use std::cell::RefCell;

use super::{ALL, ASYNC, EXPANDABLE, Fixture, NATIVE};
use crate::common::prelude::*;

/// `cudaMallocAsync` with a memory pool of its own.
const OWN: &str = "backend:cudaMallocAsync,malloc_async_own_pool:True";

/// A thread-local value that allocates and frees when its thread ends.
struct AllocateOnDrop(Arc<Fixture>);

impl Drop for AllocateOnDrop {
    fn drop(&mut self) {
        self.0.give(self.0.take(64 * MIB));
    }
}

#[test]
fn a_threads_last_destructor_may_take_memory() {
    thread_local! {
        static LAST: RefCell<Option<AllocateOnDrop>> = const { RefCell::new(None) };
    }
    let fixture = Arc::new(Fixture::new(8 * GIB, NATIVE));
    let own = Arc::clone(&fixture);
    let ended = std::thread::spawn(move || {
        LAST.set(Some(AllocateOnDrop(Arc::clone(&own))));
        // Causes a miss. Thread-local data that the miss creates is destroyed before data that was
        // created earlier.
        own.give(own.take(32 * MIB));
    });
    ended.join().expect("no destructor panics");
    assert_eq!(fixture.stats().misses, 2);
}

#[test]
fn old_blocks_go_back_to_the_allocator_that_made_them() {
    for from in ALL {
        for to in ALL {
            let fixture = Fixture::new(8 * GIB, from);
            let old: Vec<_> = (1..20).map(|n| fixture.take(n * 100_000)).collect();
            let owner = old[0].owner();
            fixture.switch(to);
            let new: Vec<_> = (1..20).map(|n| fixture.take(n * 100_000)).collect();
            assert!(new.iter().all(|block| block.owner() != owner), "{from} to {to}");
            let overlaps = old.iter().any(|o| new.iter().any(|n| o.address() == n.address()));
            assert!(!overlaps, "{from} to {to}");
            assert_eq!(fixture.retired(), 1, "{from} to {to}");
            old.into_iter().for_each(|block| fixture.give(block));
            assert_eq!(fixture.retired(), 0, "{from} to {to}");
            new.into_iter().for_each(|block| fixture.give(block));
        }
    }
}

#[test]
fn a_switch_gives_idle_memory_back_at_once_and_the_rest_with_the_last_block() {
    for to in ALL {
        let fixture = Fixture::new(8 * GIB, NATIVE);
        let (idle, live) = (fixture.take(64 * MIB), fixture.take(32 * MIB));
        fixture.give(idle);
        assert_eq!(fixture.used_bytes(), 96 * MIB);
        fixture.switch(to);
        assert_eq!(fixture.used_bytes(), 32 * MIB, "{to}");
        fixture.give(live);
        assert_eq!((fixture.used_bytes(), fixture.retired()), (0, 0), "{to}");
    }
}

#[test]
fn an_allocator_without_blocks_goes_at_the_switch() {
    let fixture = Fixture::new(8 * GIB, NATIVE);
    fixture.give(fixture.take(MIB));
    fixture.switch(EXPANDABLE);
    assert_eq!((fixture.retired(), fixture.used_bytes()), (0, 0));
    assert_eq!(fixture.name(), "native");
}

#[test]
fn a_block_is_freed_once_by_any_allocator() {
    let fixture = Fixture::new(8 * GIB, NATIVE);
    let (first, keeps) = (fixture.take(MIB), fixture.take(MIB));
    let twin = |block: &stratalloc::allocator::Allocation| {
        let (address, size) = (block.address(), block.size_bytes());
        stratalloc::allocator::Allocation::new(address, size, block.owner(), block.token())
    };
    let (again, late) = (twin(&first), twin(&keeps));
    fixture.switch(EXPANDABLE);
    fixture.give(first);
    let refused = fixture.free(again).expect_err("it was freed");
    assert!(matches!(refused.reason, HandleError::Stale { .. }), "{refused}");
    fixture.give(keeps);
    let refused = fixture.free(late).expect_err("its allocator was dropped");
    assert!(matches!(refused.reason, HandleError::Foreign { .. }), "{refused}");
    assert_eq!(fixture.retired(), 0);
}

#[test]
fn many_old_allocators_drain_in_any_order() {
    let fixture = Fixture::new(8 * GIB, NATIVE);
    let mut blocks = Vec::new();
    for round in 0..40 {
        blocks.extend((0..5).map(|n| fixture.take(1000 + n * 300_000)));
        fixture.switch(ALL[round % ALL.len()]);
    }
    assert_eq!(fixture.retired(), 40);
    while !blocks.is_empty() {
        let at = blocks.len() * 7 / 11;
        fixture.give(blocks.swap_remove(at));
    }
    assert_eq!((fixture.retired(), fixture.used_bytes()), (0, 0));
}

/// Dropping the retired allocator would leak the memory that the driver failed to free. So it stays until a
/// later attempt succeeds.
#[test]
fn a_retired_allocator_waits_for_a_driver_that_refuses_its_memory() {
    for (from, call) in [
        (NATIVE, "free"),
        (EXPANDABLE, "synchronize_stream"),
        (EXPANDABLE, "unmap"),
        (EXPANDABLE, "release"),
        (ASYNC, "synchronize_stream"),
        (ASYNC, "trim"),
        (OWN, "synchronize_stream"),
        (OWN, "trim"),
    ] {
        let sim = Arc::clone(&Fixture::new(8 * GIB, NATIVE).device);
        let device = Arc::new(Faulty::new(Arc::clone(&sim)));
        let config = config(from);
        let switchable =
            Switchable::build(&config, device.clone(), BuildOptions::default()).unwrap();
        let last = switchable.take(64 * MIB);
        switchable.switch(NATIVE).expect("a good string");
        device.fail_call(0, Some(call));
        switchable.give(last);
        assert_eq!(device.failed_calls(), 1, "{from}: {call}");
        device.disarm();
        assert_eq!(switchable.retired(), 1, "{from}: {call}");
        switchable.cross_stream().process_events().unwrap();
        let info = sim.memory_info().unwrap();
        let used = info.total_bytes - info.free_bytes;
        assert_eq!((switchable.retired(), used), (0, 0), "{from}: {call}");
    }
}

/// The capture has no scope, so the allocator does not know of it. During the capture no call may wait for
/// the work on the allocator's pages.
#[test]
fn a_retired_allocator_waits_for_the_end_of_an_unknown_capture() {
    let fixture = Fixture::new(8 * GIB, EXPANDABLE);
    let captured = fixture.device.create_stream().unwrap();
    let last = fixture.take(64 * MIB);
    fixture.switch(NATIVE);
    Capture::begin(&*fixture.device, captured).unwrap();
    fixture.give(last);
    let _ = Capture::end(&*fixture.device, captured);
    fixture.cross_stream().process_events().unwrap();
    assert_eq!((fixture.retired(), fixture.used_bytes()), (0, 0));
}

/// A retired allocator does not know of the current allocator's scopes. If a stream that used a block no
/// longer exists, the retired allocator waits for the device, which could break a capture.
#[test]
fn a_free_of_an_old_block_breaks_no_capture_of_the_new_allocator() {
    let layered = |conf: &str| format!("{conf},layers:[statistics]");
    for (from, own_is_gone) in [
        (NATIVE.to_owned(), false),
        (EXPANDABLE.to_owned(), false),
        (ASYNC.to_owned(), false),
        (ASYNC.to_owned(), true),
        (OWN.to_owned(), true),
        (layered(NATIVE), false),
        (layered(EXPANDABLE), false),
        (layered(ASYNC), false),
        (layered(OWN), true),
    ] {
        let from = from.as_str();
        let fixture = Fixture::new(8 * GIB, from);
        let [home, side, captured] =
            std::array::from_fn(|_| fixture.device.create_stream().unwrap());
        let block = fixture.take_on(MIB, home);
        fixture.record(&block, side);
        fixture.switch(NATIVE);
        fixture.device.destroy_stream(if own_is_gone { home } else { side }).unwrap();
        let scope = fixture.capture(captured, PoolId::next_capture());
        fixture.give(block);
        let status = fixture.device.capture_status(captured).unwrap();
        assert!(matches!(status, CaptureStatus::Active { .. }), "{from}: {status:?}");
        Capture::end(&*fixture.device, captured).unwrap();
        drop(scope);
        fixture.cross_stream().process_events().unwrap();
        assert_eq!((fixture.retired(), fixture.used_bytes()), (0, 0), "{from}");
    }
}

/// The memory is back after the last free, whichever threads free. The allocators themselves may wait
/// for the next call that drops them.
#[test]
fn threads_that_free_the_last_blocks_together_leave_no_memory_held() {
    for round in 0..100 {
        let fixture = Fixture::new(8 * GIB, NATIVE);
        let mut last = Vec::new();
        for next in [EXPANDABLE, ASYNC, OWN] {
            last.extend((0..2).map(|_| fixture.take(32 * MIB)));
            fixture.switch(next);
        }
        let together = Barrier::new(last.len() + 1);
        thread::scope(|scope| {
            for block in last {
                let (fixture, together) = (&fixture, &together);
                scope.spawn(move || {
                    together.wait();
                    fixture.give(block);
                });
            }
            together.wait();
            for _ in 0..round % 5 {
                fixture.stats();
                fixture.caching().layout();
            }
        });
        assert_eq!(fixture.used_bytes(), 0);
        fixture.cross_stream().process_events().expect("it works");
        assert_eq!(fixture.retired(), 0);
    }
}
