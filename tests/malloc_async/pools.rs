//! Private pools. Each serves requests from its own memory pool of the driver, except requests in a capture:
//! their memory belongs to the graph.

use stratalloc::driver::MemoryPools;

use super::sim;
use crate::common::prelude::*;

#[test]
fn a_scope_routes_a_threads_requests_and_blocks_stay_apart() {
    let fixture = sim(256);
    let before = fixture.take(MIB);
    let pool = fixture.pool();
    let scope = pool.enter().unwrap();
    let inside = fixture.take(MIB);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            fixture.give(fixture.take(MIB));
        });
    });
    drop(scope);
    let after = fixture.take(MIB);
    assert_eq!(fixture.live_addresses(pool.id()).unwrap(), [inside.address()]);
    assert!(holds_exactly(&*fixture, pool.id(), &[inside.address()]).unwrap());
    assert_eq!(fixture.pool_layout(pool.id()).unwrap().len(), 1);
    assert_eq!(fixture.layout().len(), 3);
    assert_eq!(fixture.statistics().reserved_bytes.all.current, 64 << 20);
    for block in [before, inside, after] {
        fixture.give(block);
    }
    let id = pool.id();
    drop(pool);
    assert_eq!(fixture.pool_users(id), None);
    fixture.device.synchronize_device().unwrap();
    assert_eq!(fixture.statistics().reserved_bytes.all.current, 32 << 20);
}

#[test]
fn a_released_pool_lives_as_long_as_its_blocks() {
    let fixture = sim(256);
    let id = PoolId::next_user();
    fixture.create_pool(id, PoolOptions::default()).unwrap();
    let block = fixture.take_in(id, MIB, HOME);
    fixture.release_pool(id).unwrap();
    assert_eq!(fixture.pool_users(id), Some(0));
    fixture.give(block);
    assert_eq!(fixture.pool_users(id), None);
    assert_eq!(fixture.device.calls("destroy_pool"), 0, "its last free may be on its way");
    fixture.device.synchronize_device().unwrap();
    assert_eq!(fixture.used_bytes(), 0);
    fixture.empty_cache();
    assert_eq!(fixture.device.calls("destroy_pool"), 1);
}

#[test]
fn reserved_bytes_count_a_released_pool_until_its_last_block_has_gone() {
    let fixture = sim(256);
    let reserved = || {
        let s = fixture.statistics();
        let (allocated, reserved) = (s.allocated_bytes.all, s.reserved_bytes.all);
        assert!(allocated.current <= reserved.current, "{allocated:?} of {reserved:?}");
        (reserved.current >> 20, reserved.peak >> 20)
    };
    let pools = [(); 2].map(|()| PoolId::next_user());
    let blocks = pools.map(|id| {
        fixture.create_pool(id, PoolOptions::default()).unwrap();
        fixture.take_in(id, 64 * MIB, HOME)
    });
    for id in pools {
        fixture.release_pool(id).unwrap();
        assert_eq!(reserved(), (128, 128));
    }
    let [first, second] = blocks;
    let wait = || fixture.device.synchronize_device().unwrap();
    fixture.give(first);
    wait();
    assert_eq!(reserved(), (64, 128));
    fixture.reset_peaks();
    assert_eq!(reserved(), (64, 64));
    fixture.give(second);
    wait();
    assert_eq!(reserved(), (0, 64));
    fixture.empty_cache();
    assert_eq!(reserved(), (0, 64), "the pools are destroyed");
    fixture.reset_peaks();
    assert_eq!(reserved(), (0, 0));
}

#[test]
fn the_peak_of_reserved_bytes_outlives_pools_and_does_not_add_them_up() {
    let fixture = sim(256);
    for round in 0..4 {
        let pool = fixture.pool();
        fixture.give(fixture.take_in(pool.id(), 64 * MIB, HOME));
        drop(pool);
        fixture.device.synchronize_device().unwrap();
        let reserved = fixture.statistics().reserved_bytes.all;
        assert_eq!((reserved.current, reserved.peak >> 20), (0, 64), "round {round}");
    }
}

#[test]
fn what_a_graph_holds_is_counted_once_when_its_pool_has_gone() {
    let fixture = sim(256);
    let driver = &fixture.device;
    let stream = driver.create_stream().unwrap();
    let capture = Capture::begin(&**driver, stream).unwrap();
    let id = PoolId::next_capture();
    let scope = PoolScope::open(&*fixture, id, ScopeFilter::Capture(capture)).unwrap();
    let inside = fixture.take_on(MIB, stream);
    let outside = fixture.take_in(id, MIB, HOME);
    let reserved = || fixture.statistics().reserved_bytes.all.current >> 20;
    assert_eq!(reserved(), 64);
    drop(scope);
    assert_eq!(reserved(), 34, "what its block needs, and the graph's");
    fixture.give(outside);
    assert_eq!(fixture.pool_users(id), Some(0));
    Capture::end(&**driver, stream).unwrap();
    fixture.device.synchronize_device().unwrap();
    assert_eq!(reserved(), 32, "the graph's");
    assert_eq!(fixture.statistics().reserved_bytes.all.peak >> 20, 64);
    drop(inside);
}

#[test]
fn idle_memory_of_a_pool_that_was_opted_in_saves_others() {
    for opted in [false, true] {
        let fixture = sim(128);
        let id = PoolId::next_user();
        let options = PoolOptions { use_on_oom: opted, ..PoolOptions::default() };
        fixture.create_pool(id, options).unwrap();
        fixture.give(fixture.take_in(id, 64 * MIB, HOME));
        let wanted = fixture.try_allocate(96 * MIB, HOME);
        match (opted, wanted) {
            (true, Ok(block)) => fixture.give(block),
            (false, Err(AllocError::OutOfMemory(report))) => {
                assert_eq!(report.cached_private_bytes, 64 * MIB);
            }
            (_, other) => panic!("use_on_oom {opted}: {other:?}"),
        }
    }
}

#[derive(Debug)]
struct Nothing;

impl SegmentAllocator for Nothing {
    fn allocate(&self, _size_bytes: u64, _stream: StreamId) -> Option<u64> {
        None
    }

    fn free(&self, _address: u64, _size_bytes: u64, _stream: StreamId) {}
}

#[test]
fn what_driver_pools_cannot_do_is_refused_by_name() {
    let fixture = sim(64);
    let pool = PoolId::next_user();
    let not = |what| Err(PoolError::NotSupported { pool, what });
    let own = PoolOptions { allocator: Some(Arc::new(Nothing)), ..PoolOptions::default() };
    assert_eq!(fixture.create_pool(pool, own), not("segments of a user's allocator"));
    let whole = PoolOptions { no_split: true, ..PoolOptions::default() };
    assert_eq!(fixture.create_pool(pool, whole), not("blocks that are never split"));
    fixture.create_pool(pool, PoolOptions::default()).unwrap();
    assert!(fixture.control().checkpoints.is_none());
    assert_eq!(
        fixture.open_scope(PoolId::DEFAULT, ScopeFilter::Stream(HOME)),
        Err(PoolError::IsDefault)
    );
}

#[test]
fn a_captures_pool_takes_no_driver_pool_before_it_needs_one() {
    let fixture = sim(256);
    let driver = &fixture.device;
    let stream = driver.create_stream().unwrap();
    let capture = Capture::begin(&**driver, stream).unwrap();
    let id = PoolId::next_capture();
    let scope = PoolScope::open(&*fixture, id, ScopeFilter::Capture(capture)).unwrap();
    fixture.give(fixture.take_on(MIB, stream));
    assert_eq!(driver.calls("create_pool"), 0);
    let outside = fixture.take_in(id, MIB, HOME);
    assert_eq!(driver.calls("create_pool"), 1, "this one comes from no graph");
    let idle = driver.usage(driver.default_pool().unwrap()).unwrap();
    assert_eq!(idle.used_bytes, 0, "and from no other pool");
    assert_eq!(fixture.live_addresses(id).unwrap(), [outside.address()]);
    Capture::end(&**driver, stream).unwrap();
    let hold = scope.finish();
    fixture.give(outside);
    drop(hold);
    assert_eq!(fixture.pool_users(id), None);
    fixture.empty_cache();
    assert_eq!((driver.calls("create_pool"), driver.calls("destroy_pool")), (1, 1));
}

/// Sets the flag when it is dropped, even by a panic.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// After a pool is destroyed, its handle in the driver is invalid or belongs to another pool. So it must not
/// be used.
#[test]
fn a_destroyed_pool_is_not_queried() {
    let fixture = sim(4096);
    let over = AtomicBool::new(false);
    std::thread::scope(|threads| {
        for _ in 0..2 {
            threads.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    fixture.empty_cache();
                    fixture.reset_peaks();
                    fixture.statistics();
                }
            });
        }
        let _end = Ends(&over);
        // With many pools, a thread that walks the list of pools finds some that were destroyed in the
        // meantime.
        for _ in 0..50 {
            let ids: Vec<_> = (0..64).map(|_| PoolId::next_user()).collect();
            for id in &ids {
                fixture.create_pool(*id, PoolOptions::default()).unwrap();
            }
            let (fixture, last) = (&fixture, ids[63]);
            let asking = threads.spawn(move || {
                loop {
                    match fixture.allocate(Request::new(4096, HOME).in_pool(last)) {
                        Ok(block) => fixture.give(block),
                        Err(AllocError::Pool(_)) => break,
                        Err(error) => panic!("{error}"),
                    }
                }
            });
            for id in ids {
                fixture.release_pool(id).unwrap();
            }
            asking.join().unwrap();
        }
    });
    fixture.empty_cache();
    let driver = &fixture.device;
    assert_eq!(driver.calls("create_pool"), driver.calls("destroy_pool"));
}

#[test]
fn a_pool_that_cannot_be_made_when_it_is_needed_fails_the_request_alone() {
    let sim = SimMachine::new(256 * MIB);
    let faulty = Arc::new(Faulty::new(Arc::clone(&sim.0)));
    let allocator = MallocAsyncAllocator::new(faulty.clone(), &Settings::default()).unwrap();
    let id = PoolId::next_user();
    let scope = PoolScope::open(&allocator, id, ScopeFilter::Stream(HOME)).unwrap();
    for only in ["create_pool", "keep_memory", "allow_reuse"] {
        faulty.fail_call(0, Some(only));
        let refused = allocator.try_allocate(MIB, HOME);
        assert!(matches!(refused, Err(AllocError::Driver(_))), "{only}: {refused:?}");
    }
    let block = allocator.take_on(MIB, HOME);
    assert_eq!(allocator.live_addresses(id).unwrap(), [block.address()]);
    allocator.give(block);
    drop(scope);
    allocator.empty_cache().unwrap();
    assert_eq!(sim.0.calls("create_pool"), sim.0.calls("destroy_pool"));
}

#[test]
fn a_scope_of_a_pool_without_users_stays_open_until_it_is_closed() {
    let fixture = sim(256);
    let id = PoolId::next_user();
    fixture.open_scope(id, ScopeFilter::this_thread()).unwrap();
    fixture.release_pool(id).unwrap();
    let refused = fixture.allocate(Request::new(MIB, HOME));
    assert!(matches!(refused, Err(AllocError::Pool(_))), "{refused:?}");
    fixture.close_scope(id).unwrap();
    assert!(fixture.close_scope(id).is_err());
    let block = fixture.take(MIB);
    fixture.give(block);
}
