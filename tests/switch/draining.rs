//! Blocks from before a switch.

use std::cell::RefCell;

use super::{ALL, ASYNC, Bed, EXPANDABLE, NATIVE};
use crate::common::prelude::*;

/// cudaMallocAsync with a memory pool of its own.
const OWN: &str = "backend:cudaMallocAsync,malloc_async_own_pool:True";

/// Allocates and frees when its thread ends.
struct LastWords(Arc<Bed>);

impl Drop for LastWords {
    fn drop(&mut self) {
        self.0.give(self.0.take(64 * MIB));
    }
}

#[test]
fn a_threads_last_destructor_may_take_memory() {
    thread_local! {
        static LAST: RefCell<Option<LastWords>> = const { RefCell::new(None) };
    }
    let bed = Arc::new(Bed::new(8 * GIB, NATIVE));
    let own = Arc::clone(&bed);
    let ended = std::thread::spawn(move || {
        LAST.set(Some(LastWords(Arc::clone(&own))));
        // A miss. Thread-local data that it creates is destroyed before data created earlier.
        own.give(own.take(32 * MIB));
    });
    ended.join().expect("no destructor panics");
    assert_eq!(bed.stats().misses, 2);
}

#[test]
fn old_blocks_go_back_to_the_allocator_that_made_them() {
    for from in ALL {
        for to in ALL {
            let bed = Bed::new(8 * GIB, from);
            let old: Vec<_> = (1..20).map(|n| bed.take(n * 100_000)).collect();
            let owner = old[0].owner();
            bed.switch(to);
            let new: Vec<_> = (1..20).map(|n| bed.take(n * 100_000)).collect();
            assert!(new.iter().all(|block| block.owner() != owner), "{from} to {to}");
            let overlaps = old.iter().any(|o| new.iter().any(|n| o.address() == n.address()));
            assert!(!overlaps, "{from} to {to}");
            assert_eq!(bed.retired(), 1, "{from} to {to}");
            old.into_iter().for_each(|block| bed.give(block));
            assert_eq!(bed.retired(), 0, "{from} to {to}");
            new.into_iter().for_each(|block| bed.give(block));
        }
    }
}

#[test]
fn a_switch_gives_idle_memory_back_at_once_and_the_rest_with_the_last_block() {
    for to in ALL {
        let bed = Bed::new(8 * GIB, NATIVE);
        let (idle, live) = (bed.take(64 * MIB), bed.take(32 * MIB));
        bed.give(idle);
        assert_eq!(bed.used_bytes(), 96 * MIB);
        bed.switch(to);
        assert_eq!(bed.used_bytes(), 32 * MIB, "{to}");
        bed.give(live);
        assert_eq!((bed.used_bytes(), bed.retired()), (0, 0), "{to}");
    }
}

#[test]
fn an_allocator_without_blocks_goes_at_the_switch() {
    let bed = Bed::new(8 * GIB, NATIVE);
    bed.give(bed.take(MIB));
    bed.switch(EXPANDABLE);
    assert_eq!((bed.retired(), bed.used_bytes()), (0, 0));
    assert_eq!(bed.name(), "native");
}

#[test]
fn a_block_is_freed_once_whoever_made_it() {
    let bed = Bed::new(8 * GIB, NATIVE);
    let (first, keeps) = (bed.take(MIB), bed.take(MIB));
    let twin = |block: &stratalloc::allocator::Allocation| {
        let (address, size) = (block.address(), block.size_bytes());
        stratalloc::allocator::Allocation::new(address, size, block.owner(), block.token())
    };
    let (again, late) = (twin(&first), twin(&keeps));
    bed.switch(EXPANDABLE);
    bed.give(first);
    let refused = bed.free(again).expect_err("it was freed");
    assert!(matches!(refused.reason, HandleError::Stale { .. }), "{refused}");
    bed.give(keeps);
    let refused = bed.free(late).expect_err("its allocator has gone");
    assert!(matches!(refused.reason, HandleError::Foreign { .. }), "{refused}");
    assert_eq!(bed.retired(), 0);
}

#[test]
fn many_old_allocators_drain_in_any_order() {
    let bed = Bed::new(8 * GIB, NATIVE);
    let mut blocks = Vec::new();
    for round in 0..40 {
        blocks.extend((0..5).map(|n| bed.take(1000 + n * 300_000)));
        bed.switch(ALL[round % ALL.len()]);
    }
    assert_eq!(bed.retired(), 40);
    while !blocks.is_empty() {
        let at = blocks.len() * 7 / 11;
        bed.give(blocks.swap_remove(at));
    }
    assert_eq!((bed.retired(), bed.used_bytes()), (0, 0));
}

/// A drop would leak the memory that the driver refused.
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
        let sim = Arc::clone(&Bed::new(8 * GIB, NATIVE).device);
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

/// During a stream capture no call may wait for the allocator's pages, and no scope announced this
/// capture.
#[test]
fn a_retired_allocator_waits_for_the_end_of_a_capture_that_it_does_not_know() {
    let bed = Bed::new(8 * GIB, EXPANDABLE);
    let captured = bed.device.create_stream().unwrap();
    let last = bed.take(64 * MIB);
    bed.switch(NATIVE);
    Capture::begin(&*bed.device, captured).unwrap();
    bed.give(last);
    let _ = Capture::end(&*bed.device, captured);
    bed.cross_stream().process_events().unwrap();
    assert_eq!((bed.retired(), bed.used_bytes()), (0, 0));
}

/// A retired allocator has no record of the current one's scopes. If a stream is gone, it waits for the
/// device.
#[test]
fn a_free_of_an_old_block_breaks_no_capture_that_only_the_new_allocator_knows() {
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
        let bed = Bed::new(8 * GIB, from);
        let [home, side, captured] = std::array::from_fn(|_| bed.device.create_stream().unwrap());
        let block = bed.take_on(MIB, home);
        bed.record(&block, side);
        bed.switch(NATIVE);
        bed.device.destroy_stream(if own_is_gone { home } else { side }).unwrap();
        let scope = bed.capture(captured, PoolId::next_capture());
        bed.give(block);
        let status = bed.device.capture_status(captured).unwrap();
        assert!(matches!(status, CaptureStatus::Active { .. }), "{from}: {status:?}");
        Capture::end(&*bed.device, captured).unwrap();
        drop(scope);
        bed.cross_stream().process_events().unwrap();
        assert_eq!((bed.retired(), bed.used_bytes()), (0, 0), "{from}");
    }
}
