//! Graphs: memory that belongs to a graph, frees that must not make a capture fail at its end, and
//! deferred frees.

use std::collections::HashSet;

use stratalloc::driver::{MemoryPools, NodeId};

use super::{Fixture, note, sim};
use crate::common::prelude::*;
use crate::common::racing::Before;

impl Fixture {
    /// Returns all graph nodes that the next node of a captured stream will depend on, directly or
    /// indirectly.
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
    let fixture = sim(256);
    let stream = fixture.stream();
    let scope = fixture.capture(stream, PoolId::next_capture());
    let addresses: Vec<u64> = (0..4)
        .map(|_| {
            let block = fixture.take_on(8 * MIB, stream);
            let address = block.address();
            fixture.give(block);
            address
        })
        .collect();
    assert!(addresses.iter().all(|address| *address == addresses[0]), "{addresses:x?}");
    let driver = &fixture.device;
    assert_eq!(driver.usage(driver.default_pool().unwrap()).unwrap().reserved_bytes, 0);
    assert_eq!(fixture.statistics().reserved_bytes.all.current, 32 << 20);
    fixture.end_capture(stream);
    drop(scope);
    fixture.empty_cache();
    assert_eq!(fixture.statistics().reserved_bytes.all.current, 0);
}

#[test]
fn a_block_may_be_freed_after_its_stream_was_joined() {
    let fixture = sim(256);
    let (main, side) = (fixture.stream(), fixture.stream());
    let scope = fixture.capture(main, PoolId::next_capture());
    fixture.join(main, side);
    let block = fixture.take_on(8 * MIB, side);
    fixture.join(side, main);
    // The side stream was joined already. A free submitted to it now would be unjoined work.
    fixture.give(block);
    fixture.give(fixture.take_on(8 * MIB, main));
    fixture.end_capture(main);
    drop(scope);
    assert_eq!(fixture.allocated(), (0, 0, 0));
}

#[test]
fn a_free_inside_comes_after_every_stream_that_uses_the_block() {
    let fixture = sim(256);
    let (main, side) = (fixture.stream(), fixture.stream());
    let scope = fixture.capture(main, PoolId::next_capture());
    let block = fixture.take_on(8 * MIB, main);
    let address = block.address();
    fixture.join(main, side);
    fixture.device.fill(address, 1, 8 * MIB, side).unwrap();
    let used_in = fixture.device.frontier(side).unwrap();
    fixture.record_stream(&block, side).unwrap();
    fixture.give(block);
    // The last node of the main stream is unchanged. Only the next block on it is ordered after the use
    // on the side stream.
    assert!(!fixture.device.frontier(main).unwrap().contains(&used_in[0]));
    let again = fixture.take_on(8 * MIB, main);
    assert_eq!(again.address(), address);
    assert!(fixture.behind(main).contains(&used_in[0]));
    fixture.give(again);
    fixture.join(side, main);
    fixture.end_capture(main);
    drop(scope);
}

#[test]
fn a_block_from_outside_is_freed_when_the_capture_has_ended() {
    let fixture = sim(256);
    let stream = fixture.stream();
    let outside = fixture.take_on(8 * MIB, stream);
    let scope = fixture.capture(stream, PoolId::next_capture());
    fixture.give(outside);
    assert_eq!(fixture.allocated(), (0, 0, 8 << 20));
    assert_eq!(note(&fixture, "deferred_frees"), 1);
    fixture.give(fixture.take_on(MIB, stream));
    fixture.end_capture(stream);
    drop(scope);
    assert_eq!(fixture.allocated(), (0, 0, 0));
    let driver = &fixture.device;
    assert_eq!(driver.usage(driver.default_pool().unwrap()).unwrap().used_bytes, 0);
}

#[test]
fn a_free_in_an_unannounced_capture_waits_too() {
    let fixture = sim(256);
    let stream = fixture.stream();
    let outside = fixture.take_on(8 * MIB, stream);
    Capture::begin(&*fixture.device, stream).unwrap();
    fixture.give(outside);
    assert_eq!(fixture.allocated(), (0, 0, 8 << 20));
    fixture.end_capture(stream);
    let next = fixture.take_on(MIB, stream);
    assert_eq!(fixture.allocated(), (1, 1 << 20, 1 << 20));
    fixture.give(next);
}

#[test]
fn a_use_from_outside_captures_is_waited_for_after_the_capture() {
    let fixture = sim(256);
    let (stream, side) = (fixture.stream(), fixture.stream());
    let block = fixture.take_on(32 * MIB, stream);
    let address = block.address();
    fixture.record_stream(&block, side).unwrap();
    let scope = fixture.capture(stream, PoolId::next_capture());
    fixture.give(block);
    assert_eq!(fixture.allocated(), (0, 0, 32 << 20));
    fixture.end_capture(stream);
    drop(scope);
    assert_eq!(fixture.allocated(), (0, 0, 0));
    let other = fixture.take_on(32 * MIB, stream);
    assert_ne!(other.address(), address, "side has not finished");
    fixture.give(other);
}

#[test]
fn a_graphs_block_that_is_freed_later_is_noted() {
    let fixture = sim(256);
    let stream = fixture.stream();
    let scope = fixture.capture(stream, PoolId::next_capture());
    let result = fixture.take_on(8 * MIB, stream);
    fixture.end_capture(stream);
    let graph = scope.finish();
    assert_eq!(fixture.private_pools().live_addresses(graph.pool()).unwrap(), [result.address()]);
    fixture.give(result);
    assert_eq!(note(&fixture, "frees_after_capture"), 1);
    assert_eq!(fixture.allocated(), (0, 0, 0));
}

#[test]
fn a_failed_request_inside_a_capture_leaves_the_capture_sound() {
    let fixture = sim(64);
    let stream = fixture.stream();
    let scope = fixture.capture(stream, PoolId::next_capture());
    fixture.give(fixture.take_on(8 * MIB, stream));
    assert!(fixture.try_allocate(100 * MIB, stream).is_err());
    fixture.give(fixture.take_on(8 * MIB, stream));
    fixture.end_capture(stream);
    drop(scope);
    let Fixture { device, allocator } = fixture;
    drop(allocator);
    assert_eq!(device.used_bytes(), 0);
}

#[test]
fn work_that_is_submitted_while_another_thread_frees_keeps_its_order() {
    const REQUESTS: usize = 500;
    let fixture = sim(1024);
    let stream = fixture.stream();
    let scope = fixture.capture(stream, PoolId::next_capture());
    let target = fixture.take_on(MIB, stream);
    let blocks: Vec<_> = (0..REQUESTS).map(|_| fixture.take_on(512, stream)).collect();
    let (started, freed) = (Barrier::new(2), AtomicBool::new(false));
    let mut kernels = 0;
    std::thread::scope(|threads| {
        threads.spawn(|| {
            started.wait();
            blocks.into_iter().for_each(|block| fixture.give(block));
            freed.store(true, Ordering::Release);
        });
        started.wait();
        while !freed.load(Ordering::Acquire) {
            // No other thread submits work to this stream.
            fixture.device.fill(target.address(), 1, 64, stream).unwrap();
            kernels += 1;
        }
    });
    // The stream's last node depends on all others: one for each request and each kernel.
    let nodes = fixture.behind(stream).len();
    assert_eq!(nodes, 1 + REQUESTS + kernels, "{kernels} kernels were submitted");
    fixture.give(target);
    fixture.end_capture(stream);
    drop(scope);
    assert_eq!(fixture.allocated(), (0, 0, 0));
}

#[test]
fn what_was_freed_is_found_again_after_a_request_that_failed() {
    let fixture = sim(128);
    let stream = fixture.stream();
    let scope = fixture.capture(stream, PoolId::next_capture());
    let (kept, block) = (fixture.take_on(MIB, stream), fixture.take_on(48 * MIB, stream));
    let address = block.address();
    fixture.give(block);
    assert!(fixture.try_allocate(100 * MIB, stream).is_err());
    let again = fixture.take_on(48 * MIB, stream);
    assert_eq!(again.address(), address);
    fixture.give(again);
    fixture.give(kept);
    fixture.end_capture(stream);
    drop(scope);
}

#[test]
fn a_shortage_elsewhere_does_not_break_a_capture() {
    let fixture = sim(128);
    let (stream, gone) = (fixture.stream(), fixture.stream());
    let pool = PoolId::next_capture();
    for announced in [true, false] {
        let orphan = fixture.take_on(MIB, gone);
        // The scope is for the capture, or only for its stream. In the second case only the request inside
        // reveals the capture.
        let scope = if announced {
            fixture.capture(stream, pool)
        } else {
            Capture::begin(&*fixture.device, stream).unwrap();
            PoolScope::open(&*fixture, pool, ScopeFilter::Stream(stream)).unwrap()
        };
        let inside = fixture.take_on(MIB, stream);
        let kept = fixture.take(64 * MIB);
        fixture.fail(64 * MIB, HOME);
        fixture.empty_cache();
        if !announced {
            // The stream of the block is destroyed, so freeing the block would wait for all work. That
            // is not allowed during a capture.
            fixture.device.destroy_stream(gone).unwrap();
        }
        let deferred = note(&fixture, "deferred_frees");
        fixture.give(orphan);
        assert_eq!(note(&fixture, "deferred_frees") - deferred, i64::from(!announced));
        fixture.give(inside);
        fixture.give(kept);
        fixture.end_capture(stream);
        drop(scope);
        assert_eq!(fixture.allocated(), (0, 0, 0), "announced: {announced}");
    }
}

#[test]
fn an_allocator_that_goes_inside_a_capture_leaves_the_capture_sound() {
    let fixture = sim(256);
    let (stream, side) = (fixture.stream(), fixture.stream());
    let outside = fixture.take_on(8 * MIB, stream);
    fixture.record_stream(&outside, side).unwrap();
    let scope = fixture.capture(stream, PoolId::next_capture());
    let inside = fixture.take_on(8 * MIB, stream);
    drop(scope);
    let Fixture { device, allocator } = fixture;
    drop(allocator);
    assert_eq!((outside.size_bytes(), inside.size_bytes()), (8 * MIB, 8 * MIB));
    Capture::end(&*device, stream).unwrap();
}

#[test]
fn an_allocator_that_goes_unused_breaks_no_capture_of_others() {
    let fixture = sim(256);
    let stream = fixture.stream();
    let scope = fixture.capture(stream, PoolId::next_capture());
    drop(MallocAsyncAllocator::new(fixture.device.clone(), &Settings::default()).unwrap());
    fixture.give(fixture.take_on(8 * MIB, stream));
    drop(scope);
    fixture.end_capture(stream);
}

#[test]
fn a_block_of_a_graph_that_never_ran_can_be_freed() {
    let fixture = sim(256);
    let stream = fixture.stream();
    let scope = fixture.capture(stream, PoolId::next_capture());
    let (first, second) = (fixture.take_on(8 * MIB, stream), fixture.take_on(8 * MIB, stream));
    fixture.end_capture(stream);
    // The graph was destroyed together with its memory, so the driver does not know the block.
    assert!(fixture.device.free_async(first.address(), stream).is_err());
    fixture.give(first);
    drop(scope);
    fixture.give(second);
    assert_eq!(fixture.allocated(), (0, 0, 0));
    fixture.set_limit_bytes(Some(MIB));
    fixture.give(fixture.take_on(MIB, stream));
}

#[test]
fn a_free_that_comes_to_wait_is_charged_all_the_time() {
    // With a scope for the capture, and without one. In the second case the free itself detects the
    // capture.
    for announced in [true, false] {
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
        let scope = announced.then(|| {
            let pool = PoolId::next_capture();
            PoolScope::open(&*allocator, pool, ScopeFilter::Capture(id)).unwrap()
        });
        let (requesting, tried) = (Arc::clone(&allocator), Arc::new(Mutex::new(None)));
        let result = Arc::clone(&tried);
        driver.interceptor().next("capture_status", move || {
            *result.lock() = Some(requesting.try_allocate(2 * MIB, other).is_ok());
        });
        allocator.give(block);
        assert_eq!(*tried.lock(), Some(false), "announced: {announced}");
        Capture::end(&**sim, side).unwrap();
        drop(scope);
        allocator.process_events().unwrap();
        allocator.give(allocator.take_on(2 * MIB, other));
    }
}

#[test]
fn a_request_inside_a_capture_costs_the_same_however_many_frees_wait() {
    let fixture = sim(256);
    let stream = fixture.stream();
    let outside: Vec<_> = (0..500).map(|_| fixture.take_on(512, stream)).collect();
    let scope = fixture.capture(stream, PoolId::next_capture());
    outside.into_iter().for_each(|block| fixture.give(block));
    let queries = fixture.device.calls("capture_status");
    let inside: Vec<_> = (0..20).map(|_| fixture.take_on(512, stream)).collect();
    let queries = fixture.device.calls("capture_status") - queries;
    assert!(queries <= 3 * 20, "{queries} questions for 20 requests");
    inside.into_iter().for_each(|block| fixture.give(block));
    fixture.end_capture(stream);
    // The next request frees the first deferred block, because its capture has ended, and then checks all
    // others.
    let next = fixture.take(512);
    assert_eq!(fixture.allocated(), (1, 512, 512));
    fixture.give(next);
    drop(scope);
}

#[test]
fn a_block_whose_graph_is_gone_leaves_when_its_address_comes_back() {
    let fixture = sim(256);
    let (stream, side) = (fixture.stream(), fixture.stream());
    let pool = PoolId::next_capture();
    let scope = fixture.capture(stream, pool);
    let old = fixture.take_on(8 * MIB, stream);
    let waiting = fixture.take_on(8 * MIB, stream);
    let address = waiting.address();
    // Work outside the capture uses the block, so the free must be deferred.
    fixture.record_stream(&waiting, side).unwrap();
    fixture.give(waiting);
    fixture.end_capture(stream);
    let again = Capture::begin(&*fixture.device, stream).unwrap();
    let _other = PoolScope::open(&*fixture, PoolId::next_capture(), ScopeFilter::Capture(again));
    let first = fixture.take_on(8 * MIB, stream);
    assert_eq!(first.address(), old.address());
    assert_eq!(fixture.free(old).unwrap_err().reason, {
        stratalloc::error::HandleError::Stale { address: first.address() }
    });
    let second = fixture.take_on(8 * MIB, stream);
    assert_eq!(second.address(), address);
    drop(scope);
    assert_eq!(fixture.allocated(), (2, 16 << 20, 16 << 20));
    assert_eq!(fixture.device.held().pool_ranges, 2, "no other block was freed");
    fixture.give(first);
    fixture.give(second);
    fixture.end_capture(stream);
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
            held.extend(allocator.try_allocate(MIB, stream).ok());
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
            // Frees one block that was allocated outside the capture, and one that was allocated inside.
            for block in [held.remove(0), held.pop().expect("one is left")] {
                held.extend(allocator.free(block).err().map(|refused| refused.allocation));
            }
        }
        Capture::end(&*sim, main).expect("a failed call breaks no capture");
        if opened {
            // If freeing deferred blocks fails, the error is returned, but the scope is closed.
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
    let fixture = sim(64);
    let [captured, side] = [fixture.stream(), fixture.stream()];
    fixture.give(fixture.take_on(40 * MIB, side));
    let driver = &fixture.device;
    let begun = on_new_thread(|| Capture::begin(&**driver, captured));
    fixture.empty_cache();
    assert_eq!(fixture.statistics().reserved_bytes.all.current, 0);
    let [first, second] = [30, 30].map(|mib| fixture.take_on(mib * MIB, side));
    fixture.give(first);
    fixture.give(second);
    // No free range is large enough, so free memory is released first.
    let large = fixture.take(60 * MIB);
    let status = driver.capture_status(captured).unwrap();
    assert_eq!(status, CaptureStatus::Active { capture: begun.unwrap() });
    fixture.give(large);
    on_new_thread(|| fixture.end_capture(captured));
}
