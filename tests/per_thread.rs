//! The per-thread default stream: another thread may reuse a block only after the work of the thread that
//! freed it has finished.
//!
//! `common::threaded` is a simulated device with such a stream. Most tests run on fixed and on expandable
//! segments. The first thread is the test's own, and it waits while other threads run.

mod captures;

use stratalloc::registry::build;
use stratalloc_sim::RecordedAddresses;

use crate::common::prelude::*;
use crate::common::threaded::{OWN, Threaded, threaded};

type Fixture = FixtureOn<Threaded>;

impl Fixture {
    /// Allocates a block and submits work on it to `stream`.
    #[track_caller]
    fn take(&self, bytes: u64, stream: StreamId) -> Allocation {
        self.worked(self.take_on(bytes, stream), stream)
    }

    fn worked(&self, block: Allocation, stream: StreamId) -> Allocation {
        self.device.fill(block.address(), 1, block.size_bytes(), stream).expect("it takes work");
        block
    }

    /// Makes a stream wait for an event. If the event was recorded in a capture, the stream becomes part
    /// of the capture.
    fn behind(&self, stream: StreamId, event: EventId) {
        self.device.wait_event(stream, event).expect("it takes work");
    }

    /// Allocates a block, submits work on it, frees it, and returns its address.
    #[track_caller]
    fn probe(&self, bytes: u64, stream: StreamId) -> u64 {
        let block = self.take(bytes, stream);
        let address = block.address();
        self.give(block);
        address
    }

    /// Returns the bytes of live blocks and of freed blocks that still wait.
    fn live_and_draining(&self) -> (i64, i64) {
        let statistics = self.stats();
        let live = statistics.allocated_bytes.all.current;
        (live, statistics.active_bytes.all.current - live)
    }
}

#[test]
fn a_block_changes_threads_only_when_the_freeing_threads_work_is_done() {
    for conf in BOTH {
        for bytes in [512, 3 * MIB] {
            let fixture = Fixture::new(ROOMY, conf);
            let address = fixture.probe(bytes, OWN);
            let size = i64::try_from(bytes).unwrap();
            assert_eq!(fixture.live_and_draining(), (0, size), "{conf}: it waits");
            let other = on_new_thread(|| fixture.take(bytes, OWN));
            assert_ne!(other.address(), address, "{conf}: work runs on it still");
            assert_eq!(fixture.live_and_draining(), (size, size));
            fixture.device.interceptor().finish_own();
            let third = on_new_thread(|| fixture.take(bytes, OWN));
            assert_eq!(third.address(), address, "{conf}: no work uses it any more");
            fixture.check();
            fixture.give(other);
            fixture.give(third);
            fixture.device.inner().complete_all();
            fixture.empty_cache();
            assert_eq!(fixture.live_and_draining(), (0, 0));
            fixture.check();
        }
    }
}

#[test]
fn a_free_waits_for_the_stream_of_the_thread_that_frees() {
    for conf in BOTH {
        let fixture = Fixture::new(ROOMY, conf);
        let block = fixture.take(MIB, OWN);
        let address = block.address();
        // The first thread's work is finished, as if it had synchronized and then passed the block to
        // the other thread.
        fixture.device.interceptor().finish_own();
        let finish = on_new_thread(|| {
            fixture.give(fixture.worked(block, OWN));
            fixture.device.interceptor().stream(OWN).unwrap()
        });
        fixture.device.interceptor().finish_own();
        assert_ne!(fixture.probe(MIB, OWN), address, "{conf}: the second thread's work runs still");
        fixture.device.inner().complete_stream(finish);
        assert_eq!(fixture.probe(MIB, OWN), address, "{conf}");
        fixture.check();
    }
}

#[test]
fn one_threads_work_does_not_hold_back_what_another_freed_later() {
    let fixture = Fixture::new(ROOMY, "");
    let first = fixture.probe(MIB, OWN);
    let second = on_new_thread(|| {
        let second = fixture.probe(MIB, OWN);
        fixture.device.interceptor().finish_own();
        second
    });
    assert_ne!(first, second);
    assert_eq!(fixture.probe(MIB, OWN), second, "its own work is done");
    fixture.check();
}

#[test]
fn a_request_that_needs_the_memory_waits_for_the_other_threads_work() {
    for conf in BOTH {
        let fixture = Fixture::new(20 * MIB, conf);
        let address = fixture.probe(20 * MIB, OWN);
        let other = on_new_thread(|| fixture.take(20 * MIB, OWN));
        assert_eq!(other.address(), address, "{conf}");
        assert_eq!(fixture.device.inner().calls("synchronize_event"), 1, "{conf}");
        fixture.give(other);
        // A request on another stream can get the memory only after it was released to the device.
        let stream = fixture.device.create_stream().unwrap();
        on_new_thread(|| fixture.probe(20 * MIB, stream));
        fixture.check();
    }
}

#[test]
fn blocks_that_are_found_by_address_and_blocks_at_an_address_obey_too() {
    for conf in BOTH {
        let fixture = Fixture::new(ROOMY, conf);
        let raw = &fixture;
        let address = fixture.try_allocate(MIB, OWN).map(|b| b.address()).unwrap();
        fixture.device.fill(address, 1, MIB, OWN).unwrap();
        raw.free_raw(address).unwrap();
        assert_ne!(on_new_thread(|| fixture.probe(MIB, OWN)), address, "{conf}: by address");
        fixture.device.inner().complete_all();
        fixture.process_events();
        let there = fixture.allocate(Request::new(MIB, OWN).at(address)).unwrap();
        fixture.give(fixture.worked(there, OWN));
        assert_ne!(on_new_thread(|| fixture.probe(MIB, OWN)), address, "{conf}: at an address");
        fixture.check();
    }
}

#[test]
fn a_private_pool_keeps_threads_apart_too() {
    for conf in BOTH {
        let fixture = Fixture::new(ROOMY, conf);
        let pools = fixture.private_pools();
        let pool = PoolId::next_user();
        pools.create_pool(pool, PoolOptions::default()).unwrap();
        let take = || fixture.worked(fixture.take_in(pool, MIB, OWN), OWN);
        let block = take();
        let address = block.address();
        fixture.give(block);
        let other = on_new_thread(take);
        assert_ne!(other.address(), address, "{conf}: work runs on it still");
        fixture.device.interceptor().finish_own();
        let third = on_new_thread(take);
        assert_eq!(third.address(), address, "{conf}");
        fixture.give(other);
        fixture.give(third);
        // The scope routes the requests to the pool.
        let scope = PoolScope::open(pools, pool, ScopeFilter::Stream(OWN)).unwrap();
        fixture.device.inner().complete_all();
        let address = fixture.probe(MIB, OWN);
        assert_ne!(on_new_thread(|| fixture.probe(MIB, OWN)), address, "{conf}: in a scope");
        drop(scope);
        fixture.check();
    }
}

#[test]
fn a_pool_that_helps_the_default_one_out_keeps_threads_apart_too() {
    let fixture = Fixture::new(20 * MIB, "");
    let pools = fixture.private_pools();
    let pool = PoolId::next_user();
    let options = PoolOptions { use_on_oom: true, ..PoolOptions::default() };
    pools.create_pool(pool, options).unwrap();
    fixture.give(fixture.take_in(pool, 20 * MIB, OWN));
    fixture.process_events();
    fixture.device.inner().complete_all();
    fixture.process_events();
    fixture.give(fixture.take(20 * MIB, OWN));
    assert_eq!(fixture.live_and_draining(), (0, 20 << 20), "work runs on it still");
    fixture.check();
}

#[test]
fn what_is_freed_inside_its_capture_waits_for_the_end() {
    for conf in BOTH {
        let fixture = Fixture::new(ROOMY, conf);
        let pools = fixture.private_pools();
        let eager = fixture.take(MIB, OWN);
        let capture = Capture::begin(&*fixture.device, OWN).unwrap();
        let pool = PoolId::next_capture();
        let scope = PoolScope::open(pools, pool, ScopeFilter::Capture(capture)).unwrap();
        let first = fixture.probe(MIB, OWN);
        assert_ne!(fixture.probe(MIB, OWN), first, "{conf}: nothing passes in a capture");
        // Per-thread default streams of other threads are not captured, so their blocks are reused as
        // usual.
        let (before, stream) = on_new_thread(|| {
            (fixture.probe(MIB, OWN), fixture.device.interceptor().stream(OWN).unwrap())
        });
        fixture.device.inner().complete_stream(stream);
        assert_eq!(on_new_thread(|| fixture.probe(MIB, OWN)), before, "{conf}");
        // Work on `eager` from before the capture is not part of the graph, so it must be waited for.
        let address = eager.address();
        fixture.give(eager);
        Capture::end(&*fixture.device, OWN).unwrap();
        let graph = scope.finish();
        assert_ne!(on_new_thread(|| fixture.probe(MIB, OWN)), address, "{conf}: by another thread");
        assert_ne!(fixture.probe(MIB, OWN), address, "{conf}: its work runs still");
        fixture.device.interceptor().finish_own();
        assert_eq!(fixture.probe(MIB, OWN), address, "{conf}");
        drop(graph);
        fixture.device.inner().complete_all();
        fixture.empty_cache();
        fixture.check();
    }
}

#[test]
fn what_a_thread_does_after_its_capture_is_waited_for_when_the_free_is_put_off() {
    let fixture = Fixture::new(ROOMY, "");
    let pools = fixture.private_pools();
    let [user, captured] = [0; 2].map(|_| fixture.device.create_stream().unwrap());
    let begin = |stream, pool| {
        let capture = Capture::begin(&*fixture.device, stream).unwrap();
        PoolScope::open(pools, pool, ScopeFilter::Capture(capture)).unwrap()
    };
    let pool = PoolId::next_capture();
    let scope = begin(OWN, pool);
    let result = fixture.take(MIB, OWN);
    Capture::end(&*fixture.device, OWN).unwrap();
    let graph = scope.finish();
    let address = result.address();
    fixture.record(&result, user);
    let result = fixture.worked(fixture.worked(result, user), OWN);
    let scope = begin(captured, PoolId::next_capture());
    fixture.give(result);
    Capture::end(&*fixture.device, captured).unwrap();
    drop(scope.finish());
    let process = || fixture.process_events();
    let there = || {
        process();
        let block = fixture.take_in(pool, MIB, OWN);
        (block.address() == address, block)
    };
    process();
    fixture.device.inner().complete_stream(user);
    let (reused, first) = there();
    assert!(!reused, "its own work runs still");
    fixture.device.interceptor().finish_own();
    let (reused, second) = there();
    assert!(reused);
    [first, second].into_iter().for_each(|block| fixture.give(block));
    drop(graph);
    fixture.check();
}

#[test]
fn what_a_checkpoint_brings_back_obeys_too() {
    for conf in BOTH {
        let fixture = Fixture::new(ROOMY, conf);
        let pools = fixture.private_pools();
        let capture = Capture::begin(&*fixture.device, OWN).unwrap();
        let pool = PoolId::next_capture();
        let scope = PoolScope::open(pools, pool, ScopeFilter::Capture(capture)).unwrap();
        let result = fixture.take(MIB, OWN);
        Capture::end(&*fixture.device, OWN).unwrap();
        let graph = scope.finish();
        let checkpoint = fixture.checkpoints().checkpoint(pool).unwrap();
        let address = result.address();
        // Restores the checkpoint twice: the restored blocks must not prevent the second restore.
        assert_eq!(
            fixture.checkpoints().restore(&checkpoint).unwrap().freed[0].address,
            address,
            "{conf}"
        );
        let mut restored = fixture.checkpoints().restore(&checkpoint).unwrap();
        let again = restored.live.pop().expect("it was live");
        fixture.give(fixture.worked(again, OWN));
        let take = || fixture.take_in(pool, MIB, OWN);
        let other = on_new_thread(take);
        assert_ne!(other.address(), address, "{conf}: work runs on it still");
        fixture.device.interceptor().finish_own();
        let third = on_new_thread(take);
        assert_eq!(third.address(), address, "{conf}");
        [other, third].into_iter().for_each(|block| fixture.give(block));
        drop(graph);
        fixture.check();
    }
}

#[test]
fn pages_that_a_graph_used_are_unmapped_when_the_other_threads_work_is_done() {
    let fixture = Fixture::new(ROOMY, "expandable_segments:True");
    let pools = fixture.private_pools();
    on_new_thread(|| {
        let capture = Capture::begin(&*fixture.device, OWN).unwrap();
        let filter = ScopeFilter::Capture(capture);
        let scope = PoolScope::open(pools, PoolId::next_capture(), filter).unwrap();
        fixture.probe(MIB, OWN);
        Capture::end(&*fixture.device, OWN).unwrap();
        drop(scope.finish());
    });
    // A launch of the graph may still be running on another thread's own stream, so releasing pages must
    // synchronize the device.
    fixture.device.interceptor().take_order();
    fixture.empty_cache();
    assert_eq!(fixture.device.interceptor().take_order(), ["synchronize_device", "unmap"]);
    fixture.check();
}

#[test]
fn use_by_a_threads_own_stream_of_another_streams_block_is_waited_for() {
    let fixture = Fixture::new(ROOMY, "");
    let stream = fixture.device.create_stream().unwrap();
    let block = fixture.take(MIB, stream);
    let address = block.address();
    fixture.record(&block, OWN);
    fixture.give(fixture.worked(block, OWN));
    fixture.device.inner().complete_stream(stream);
    assert_ne!(on_new_thread(|| fixture.probe(MIB, stream)), address);
    fixture.device.interceptor().finish_own();
    fixture.device.inner().complete_stream(stream);
    assert_eq!(on_new_thread(|| fixture.probe(MIB, stream)), address);
    fixture.check();
}

#[test]
fn a_driver_that_fails_to_record_leaves_the_block_with_its_caller() {
    let device = Arc::new(Faulty::new(threaded(ROOMY)));
    let strategy = build(&Config::default(), device.clone(), BuildOptions::default()).unwrap();
    let block = strategy.take_on(MIB, OWN);
    device.fail_call(0, Some("record_event"));
    let error = strategy.free(block).unwrap_err();
    device.disarm();
    strategy.free(error.allocation).unwrap();
    drop(strategy);
    assert!(device.inner().inner().held().segments.is_empty());
}

#[test]
fn on_a_device_without_such_a_stream_the_number_is_a_plain_one() {
    let sim = Arc::new(stratalloc_sim::Sim::new(Default::default()));
    assert!(!sim.is_per_thread_stream(OWN));
    let strategy = build(&Config::default(), sim.clone(), BuildOptions::default()).unwrap();
    let probe = || {
        let block = strategy.take_on(MIB, OWN);
        let address = block.address();
        strategy.give(block);
        address
    };
    let first = probe();
    assert_eq!(on_new_thread(probe), first);
    assert_eq!(sim.calls("record_event"), 0);
}

#[test]
fn wrappers_of_a_device_hand_the_answer_through() {
    let device = threaded(ROOMY);
    assert!(Faulty::new(Arc::clone(&device)).is_per_thread_stream(OWN));
    let addresses = RecordedAddresses::default();
    assert!(addresses.before(Arc::clone(&device)).is_per_thread_stream(OWN));
    let shared = Arc::clone(&device) as Arc<dyn Driver>;
    assert!(shared.is_per_thread_stream(OWN) && !shared.is_per_thread_stream(StreamId(3)));
}

/// Tests the per-thread default stream (stream 2) of a GPU, with delayed work.
#[cfg(target_os = "linux")]
#[test]
fn a_gpus_per_thread_stream_is_one() {
    use stratalloc::driver::HoldsWork;

    let Some((_alone, cuda)) = crate::common::gpu::device() else { return };
    assert!(cuda.is_per_thread_stream(OWN));
    assert!(
        !cuda.is_per_thread_stream(StreamId::DEFAULT) && !cuda.is_per_thread_stream(StreamId(1))
    );
    let strategy = build(&Config::default(), cuda.clone(), BuildOptions::default()).unwrap();
    let take = || strategy.take_on(512, OWN);
    let elsewhere = || on_new_thread(take);
    // The segment exists already, so no device call is needed while work is delayed.
    let block = take();
    let address = block.address();
    let gate = cuda.hold_back(OWN).unwrap();
    strategy.give(block);
    let other = elsewhere();
    gate.open();
    assert_ne!(other.address(), address, "work of this thread's stream is held back");
    cuda.synchronize_stream(OWN).unwrap();
    let third = elsewhere();
    assert_eq!(third.address(), address);
    [other, third].into_iter().for_each(|block| strategy.give(block));
}
