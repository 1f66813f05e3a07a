//! Graphs: memory that belongs to them, frees that must not prevent a capture from ending, and deferred
//! frees.

use std::collections::HashSet;

use stratalloc::driver::{MemoryPools, NodeId};

use super::{Bed, note, sim};
use crate::common::prelude::*;
use crate::common::racing::Before;

impl Bed {
    /// Returns all graph nodes before the next node of a captured stream.
    fn behind(&self, stream: StreamId) -> HashSet<NodeId> {
        let mut seen = HashSet::new();
        let mut todo = self.device.frontier(stream).expect("it is captured");
        while let Some(node) = todo.pop() {
            if seen.insert(node) {
                todo.extend(self.device.dependencies(node).expect("it is known"));
            }
        }
        seen
    }
}

#[test]
fn a_graph_reuses_what_was_freed_before_on_the_same_stream() {
    let bed = sim(256);
    let stream = bed.stream();
    let scope = bed.capture(stream, PoolId::next_capture());
    let addresses: Vec<u64> = (0..4)
        .map(|_| {
            let block = bed.take_on(8 * MIB, stream);
            let address = block.address();
            bed.give(block);
            address
        })
        .collect();
    assert!(addresses.iter().all(|address| *address == addresses[0]), "{addresses:x?}");
    let driver = &bed.device;
    assert_eq!(driver.usage(driver.default_pool().unwrap()).unwrap().reserved_bytes, 0);
    assert_eq!(bed.statistics().reserved_bytes.all.current, 32 << 20);
    bed.end_capture(stream);
    drop(scope);
    bed.empty_cache();
    assert_eq!(bed.statistics().reserved_bytes.all.current, 0);
}

#[test]
fn a_block_may_be_freed_after_its_stream_was_joined() {
    let bed = sim(256);
    let (main, side) = (bed.stream(), bed.stream());
    let scope = bed.capture(main, PoolId::next_capture());
    bed.join(main, side);
    let block = bed.take_on(8 * MIB, side);
    bed.join(side, main);
    // The side stream is already joined. A free submitted to it now would be an unjoined node.
    bed.give(block);
    bed.give(bed.take_on(8 * MIB, main));
    bed.end_capture(main);
    drop(scope);
    assert_eq!(bed.allocated(), (0, 0, 0));
}

#[test]
fn a_free_inside_comes_after_every_stream_that_uses_the_block() {
    let bed = sim(256);
    let (main, side) = (bed.stream(), bed.stream());
    let scope = bed.capture(main, PoolId::next_capture());
    let block = bed.take_on(8 * MIB, main);
    let address = block.address();
    bed.join(main, side);
    bed.device.fill(address, 1, 8 * MIB, side).unwrap();
    let used_in = bed.device.frontier(side).unwrap();
    bed.record_stream(&block, side).unwrap();
    bed.give(block);
    // The main stream is unchanged; only its next block is ordered after the use on the side stream.
    assert!(!bed.device.frontier(main).unwrap().contains(&used_in[0]));
    let again = bed.take_on(8 * MIB, main);
    assert_eq!(again.address(), address);
    assert!(bed.behind(main).contains(&used_in[0]));
    bed.give(again);
    bed.join(side, main);
    bed.end_capture(main);
    drop(scope);
}

#[test]
fn a_block_from_outside_is_freed_when_the_capture_has_ended() {
    let bed = sim(256);
    let stream = bed.stream();
    let outside = bed.take_on(8 * MIB, stream);
    let scope = bed.capture(stream, PoolId::next_capture());
    bed.give(outside);
    assert_eq!(bed.allocated(), (0, 0, 8 << 20));
    assert_eq!(note(&bed, "deferred_frees"), 1);
    bed.give(bed.take_on(MIB, stream));
    bed.end_capture(stream);
    drop(scope);
    assert_eq!(bed.allocated(), (0, 0, 0));
    let driver = &bed.device;
    assert_eq!(driver.usage(driver.default_pool().unwrap()).unwrap().used_bytes, 0);
}

#[test]
fn a_free_in_a_capture_that_nobody_told_of_waits_too() {
    let bed = sim(256);
    let stream = bed.stream();
    let outside = bed.take_on(8 * MIB, stream);
    Capture::begin(&*bed.device, stream).unwrap();
    bed.give(outside);
    assert_eq!(bed.allocated(), (0, 0, 8 << 20));
    bed.end_capture(stream);
    let next = bed.take_on(MIB, stream);
    assert_eq!(bed.allocated(), (1, 1 << 20, 1 << 20));
    bed.give(next);
}

#[test]
fn a_use_from_outside_captures_is_waited_for_after_the_capture() {
    let bed = sim(256);
    let (stream, side) = (bed.stream(), bed.stream());
    let block = bed.take_on(32 * MIB, stream);
    let address = block.address();
    bed.record_stream(&block, side).unwrap();
    let scope = bed.capture(stream, PoolId::next_capture());
    bed.give(block);
    assert_eq!(bed.allocated(), (0, 0, 32 << 20));
    bed.end_capture(stream);
    drop(scope);
    assert_eq!(bed.allocated(), (0, 0, 0));
    let other = bed.take_on(32 * MIB, stream);
    assert_ne!(other.address(), address, "side has not finished");
    bed.give(other);
}

#[test]
fn a_graphs_block_that_is_freed_later_is_noted() {
    let bed = sim(256);
    let stream = bed.stream();
    let scope = bed.capture(stream, PoolId::next_capture());
    let result = bed.take_on(8 * MIB, stream);
    bed.end_capture(stream);
    let graph = scope.finish();
    assert_eq!(bed.private_pools().live_addresses(graph.pool()).unwrap(), [result.address()]);
    bed.give(result);
    assert_eq!(note(&bed, "frees_after_capture"), 1);
    assert_eq!(bed.allocated(), (0, 0, 0));
}

#[test]
fn a_failed_request_inside_a_capture_leaves_the_capture_sound() {
    let bed = sim(64);
    let stream = bed.stream();
    let scope = bed.capture(stream, PoolId::next_capture());
    bed.give(bed.take_on(8 * MIB, stream));
    assert!(bed.ask(100 * MIB, stream).is_err());
    bed.give(bed.take_on(8 * MIB, stream));
    bed.end_capture(stream);
    drop(scope);
    let Bed { device, allocator } = bed;
    drop(allocator);
    assert_eq!(device.used_bytes(), 0);
}

#[test]
fn work_that_is_submitted_while_another_thread_frees_keeps_its_order() {
    const REQUESTS: usize = 500;
    let bed = sim(1024);
    let stream = bed.stream();
    let scope = bed.capture(stream, PoolId::next_capture());
    let target = bed.take_on(MIB, stream);
    let blocks: Vec<_> = (0..REQUESTS).map(|_| bed.take_on(512, stream)).collect();
    let (started, freed) = (Barrier::new(2), AtomicBool::new(false));
    let mut kernels = 0;
    std::thread::scope(|threads| {
        threads.spawn(|| {
            started.wait();
            blocks.into_iter().for_each(|block| bed.give(block));
            freed.store(true, Ordering::Release);
        });
        started.wait();
        while !freed.load(Ordering::Acquire) {
            // Only this thread submits work to the stream.
            bed.device.fill(target.address(), 1, 64, stream).unwrap();
            kernels += 1;
        }
    });
    // One node for each request and each kernel, in one sequence.
    let nodes = bed.behind(stream).len();
    assert_eq!(nodes, 1 + REQUESTS + kernels, "{kernels} kernels were submitted");
    bed.give(target);
    bed.end_capture(stream);
    drop(scope);
    assert_eq!(bed.allocated(), (0, 0, 0));
}

#[test]
fn what_was_freed_is_found_again_after_a_request_that_failed() {
    let bed = sim(128);
    let stream = bed.stream();
    let scope = bed.capture(stream, PoolId::next_capture());
    let (kept, block) = (bed.take_on(MIB, stream), bed.take_on(48 * MIB, stream));
    let address = block.address();
    bed.give(block);
    assert!(bed.ask(100 * MIB, stream).is_err());
    let again = bed.take_on(48 * MIB, stream);
    assert_eq!(again.address(), address);
    bed.give(again);
    bed.give(kept);
    bed.end_capture(stream);
    drop(scope);
}

#[test]
fn a_shortage_elsewhere_does_not_break_a_capture() {
    let bed = sim(128);
    let (stream, gone) = (bed.stream(), bed.stream());
    let pool = PoolId::next_capture();
    for told in [true, false] {
        let orphan = bed.take_on(MIB, gone);
        // Either the scope names the capture, or a request inside it shows it.
        let scope = if told {
            bed.capture(stream, pool)
        } else {
            Capture::begin(&*bed.device, stream).unwrap();
            PoolScope::open(&*bed, pool, ScopeFilter::Stream(stream)).unwrap()
        };
        let inside = bed.take_on(MIB, stream);
        let kept = bed.take(64 * MIB);
        bed.fail(64 * MIB, HOME);
        bed.empty_cache();
        if !told {
            // The block's stream is destroyed, so its free would wait for all work. During the capture
            // that is not allowed.
            bed.device.destroy_stream(gone).unwrap();
        }
        let deferred = note(&bed, "deferred_frees");
        bed.give(orphan);
        assert_eq!(note(&bed, "deferred_frees") - deferred, i64::from(!told));
        bed.give(inside);
        bed.give(kept);
        bed.end_capture(stream);
        drop(scope);
        assert_eq!(bed.allocated(), (0, 0, 0), "told: {told}");
    }
}

#[test]
fn an_allocator_that_goes_inside_a_capture_leaves_the_capture_sound() {
    let bed = sim(256);
    let (stream, side) = (bed.stream(), bed.stream());
    let outside = bed.take_on(8 * MIB, stream);
    bed.record_stream(&outside, side).unwrap();
    let scope = bed.capture(stream, PoolId::next_capture());
    let inside = bed.take_on(8 * MIB, stream);
    drop(scope);
    let Bed { device, allocator } = bed;
    drop(allocator);
    assert_eq!((outside.size_bytes(), inside.size_bytes()), (8 * MIB, 8 * MIB));
    Capture::end(&*device, stream).unwrap();
}

#[test]
fn an_allocator_that_goes_unused_breaks_no_capture_of_others() {
    let bed = sim(256);
    let stream = bed.stream();
    let scope = bed.capture(stream, PoolId::next_capture());
    drop(MallocAsyncAllocator::new(bed.device.clone(), &Settings::default()).unwrap());
    bed.give(bed.take_on(8 * MIB, stream));
    drop(scope);
    bed.end_capture(stream);
}

#[test]
fn a_block_of_a_graph_that_never_ran_can_be_freed() {
    let bed = sim(256);
    let stream = bed.stream();
    let scope = bed.capture(stream, PoolId::next_capture());
    let (first, second) = (bed.take_on(8 * MIB, stream), bed.take_on(8 * MIB, stream));
    bed.end_capture(stream);
    // The graph and its memory are gone: the driver has no such block.
    assert!(bed.device.free_async(first.address(), stream).is_err());
    bed.give(first);
    drop(scope);
    bed.give(second);
    assert_eq!(bed.allocated(), (0, 0, 0));
    bed.set_limit_bytes(Some(MIB));
    bed.give(bed.take_on(MIB, stream));
}

#[test]
fn a_free_that_comes_to_wait_is_charged_all_the_time() {
    // With a scope for the capture, and without one: then the free itself detects the capture.
    for told in [true, false] {
        let machine = SimMachine::new(256 * MIB);
        let sim = &machine.0;
        let driver = Arc::new(Intercepted::with(Arc::clone(sim), Before::default()));
        let dyn_driver: Arc<dyn Driver> = driver.clone();
        let allocator =
            Arc::new(MallocAsyncAllocator::new(dyn_driver, &Settings::default()).unwrap());
        allocator.set_limit_bytes(Some(2 * MIB));
        let [side, other] = [(); 2].map(|()| sim.create_stream().unwrap());
        let block = allocator.take_on(MIB, side);
        let id = Capture::begin(&**sim, side).unwrap();
        let scope = told.then(|| {
            let pool = PoolId::next_capture();
            PoolScope::open(&*allocator, pool, ScopeFilter::Capture(id)).unwrap()
        });
        let (asks, tried) = (Arc::clone(&allocator), Arc::new(Mutex::new(None)));
        let result = Arc::clone(&tried);
        driver.interceptor().next("capture_status", move || {
            *result.lock() = Some(asks.ask(2 * MIB, other).is_ok());
        });
        allocator.give(block);
        assert_eq!(*tried.lock(), Some(false), "told: {told}");
        Capture::end(&**sim, side).unwrap();
        drop(scope);
        allocator.process_events().unwrap();
        allocator.give(allocator.take_on(2 * MIB, other));
    }
}

#[test]
fn a_request_inside_a_capture_costs_the_same_however_many_frees_wait() {
    let bed = sim(256);
    let stream = bed.stream();
    let outside: Vec<_> = (0..500).map(|_| bed.take_on(512, stream)).collect();
    let scope = bed.capture(stream, PoolId::next_capture());
    outside.into_iter().for_each(|block| bed.give(block));
    let asked = bed.device.calls("capture_status");
    let inside: Vec<_> = (0..20).map(|_| bed.take_on(512, stream)).collect();
    let asked = bed.device.calls("capture_status") - asked;
    assert!(asked <= 3 * 20, "{asked} questions for 20 requests");
    inside.into_iter().for_each(|block| bed.give(block));
    bed.end_capture(stream);
    // The next request finds the first deferred free complete, and so checks all of them.
    let next = bed.take(512);
    assert_eq!(bed.allocated(), (1, 512, 512));
    bed.give(next);
    drop(scope);
}

#[test]
fn a_block_whose_graph_is_gone_leaves_when_its_address_comes_back() {
    let bed = sim(256);
    let (stream, side) = (bed.stream(), bed.stream());
    let pool = PoolId::next_capture();
    let scope = bed.capture(stream, pool);
    let old = bed.take_on(8 * MIB, stream);
    let waiting = bed.take_on(8 * MIB, stream);
    let address = waiting.address();
    // Work outside the capture uses the block, so its free is deferred.
    bed.record_stream(&waiting, side).unwrap();
    bed.give(waiting);
    bed.end_capture(stream);
    let again = Capture::begin(&*bed.device, stream).unwrap();
    let _other = PoolScope::open(&*bed, PoolId::next_capture(), ScopeFilter::Capture(again));
    let first = bed.take_on(8 * MIB, stream);
    assert_eq!(first.address(), old.address());
    assert_eq!(bed.free(old).unwrap_err().reason, {
        stratalloc::error::HandleError::Stale { address: first.address() }
    });
    let second = bed.take_on(8 * MIB, stream);
    assert_eq!(second.address(), address);
    drop(scope);
    assert_eq!(bed.allocated(), (2, 16 << 20, 16 << 20));
    assert_eq!(bed.device.held().pool_ranges, 2, "nobody else's block was freed");
    bed.give(first);
    bed.give(second);
    bed.end_capture(stream);
}

#[test]
fn every_call_inside_a_capture_may_fail_and_nothing_is_lost() {
    let kinds = [DriverErrorKind::Other, DriverErrorKind::OutOfMemory];
    let mut failed = 0;
    for (at, kind) in (0..60).flat_map(|at| kinds.map(|kind| (at, kind))) {
        let machine = SimMachine::new(256 * MIB);
        let sim = Arc::clone(&machine.0);
        let faulty = Arc::new(Faulty::new(Arc::clone(&sim)));
        let allocator = MallocAsyncAllocator::new(faulty.clone(), &Settings::default()).unwrap();
        let (main, side) = (sim.create_stream().unwrap(), sim.create_stream().unwrap());
        let take = |stream, held: &mut Vec<_>| {
            held.extend(allocator.ask(MIB, stream).ok());
        };
        let mut held = Vec::new();
        (0..4).for_each(|n| take([main, side][n % 2], &mut held));
        held.iter().for_each(|block| allocator.record_stream(block, side).unwrap());
        faulty.arm(FaultPlan { at, kind, repeat: false, only: None });
        let capture = Capture::begin(&*sim, main).unwrap();
        let pool = PoolId::next_capture();
        let opened = allocator.open_scope(pool, ScopeFilter::Capture(capture)).is_ok();
        for _ in 0..3 {
            (0..2).for_each(|_| take(main, &mut held));
            // One block from outside the capture, one from inside.
            for block in [held.remove(0), held.pop().expect("one is left")] {
                held.extend(allocator.free(block).err().map(|refused| refused.allocation));
            }
        }
        Capture::end(&*sim, main).expect("a failed call breaks no capture");
        if opened {
            // A failure of the deferred frees is returned, and the scope is closed anyway.
            let _ = allocator.close_scope(pool);
            while allocator.pool_users(pool).is_some_and(|users| users > 0) {
                let _ = allocator.release_pool(pool);
            }
        }
        let _ = allocator.process_events();
        failed += faulty.failed_calls();
        faulty.disarm();
        allocator.process_events().unwrap();
        let bytes = allocator.statistics().active_bytes.all.current.unsigned_abs();
        assert_eq!(bytes, held.len() as u64 * MIB, "call {at}, {kind:?}");
        held.into_iter().for_each(|block| allocator.give(block));
        assert_eq!(allocator.statistics().active.all.current, 0, "call {at}, {kind:?}");
        allocator.set_limit_bytes(Some(MIB));
        allocator.give(allocator.take_on(MIB, side));
        drop(allocator);
        [main, side].into_iter().for_each(|stream| sim.destroy_stream(stream).unwrap());
        assert!(machine.held().is_nothing(), "call {at}, {kind:?}: {:?}", machine.held());
    }
    assert!(failed > 80, "only {failed} calls were made to fail");
}

/// The capture runs on another thread and has no scope yet.
#[test]
fn memory_that_is_given_back_breaks_no_capture_before_its_scope() {
    let bed = sim(64);
    let [captured, side] = [bed.stream(), bed.stream()];
    bed.give(bed.take_on(40 * MIB, side));
    let driver = &bed.device;
    let begun = elsewhere(|| Capture::begin(&**driver, captured));
    bed.empty_cache();
    assert_eq!(bed.statistics().reserved_bytes.all.current, 0);
    let [first, second] = [30, 30].map(|mib| bed.take_on(mib * MIB, side));
    bed.give(first);
    bed.give(second);
    // No free range is that large, so idle memory is released first.
    let large = bed.take(60 * MIB);
    let status = driver.capture_status(captured).unwrap();
    assert_eq!(status, CaptureStatus::Active { capture: begun.unwrap() });
    bed.give(large);
    elsewhere(|| bed.end_capture(captured));
}
