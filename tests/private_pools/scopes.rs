//! Scopes and users: which pool serves a request, and which memory remains afterwards.

use std::sync::mpsc::channel;

use crate::common::prelude::*;

fn pool_of(fixture: &Fixture, address: u64) -> PoolId {
    let layout = fixture.engine().layout();
    let holds = |s: &&stratalloc::history::SegmentLayout| {
        (s.address..s.address + s.size_bytes).contains(&address)
    };
    layout.iter().find(holds).expect("every block is in a segment").pool
}

#[test]
fn ids_of_pools_are_distinct_also_between_threads() {
    let make = || (0..50).map(|_| PoolId::next_user()).collect::<Vec<_>>();
    let threads: Vec<_> = (0..4).map(|_| thread::spawn(make)).collect();
    let mut ids: Vec<_> = threads.into_iter().flat_map(|t| t.join().unwrap()).collect();
    assert!(ids.iter().all(|id| id.capture == 0 && id.user > 0));
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 200);
    assert_eq!(PoolId::next_capture().user, 0);
}

#[test]
fn users_are_counted_by_pools_and_scopes() {
    let fixture = Fixture::new(ROOMY, "");
    let pool = fixture.pool();
    let users = || fixture.private_pools().pool_users(pool.id());
    assert_eq!(users(), Some(1));
    let scope = pool.enter().unwrap();
    assert_eq!(users(), Some(2));
    let hold = scope.finish();
    assert_eq!(users(), Some(2), "a graph keeps its pool");
    drop(hold);
    assert_eq!(users(), Some(1));
    drop(pool.enter().unwrap());
    assert_eq!(users(), Some(1), "an abandoned scope leaves nothing behind");
}

// A block that is live when its pool is dropped keeps its segment until it is freed and memory is released.
#[test]
fn a_block_may_outlive_its_pool() {
    for fixture in fixtures(ROOMY) {
        let pool = fixture.pool();
        let id = pool.id();
        let scope = pool.enter().unwrap();
        let kept = fixture.take(MIB);
        let freed = fixture.take(30 * MIB);
        drop(scope);
        fixture.give(freed);
        drop(pool);
        assert_eq!(fixture.reserved_bytes(), 2 * MIB, "the idle segment went with the pool");
        assert_eq!(pool_of(&fixture, kept.address()), id);
        fixture.give(kept);
        assert_eq!(fixture.reserved_bytes(), 2 * MIB);
        fixture.empty_cache();
        assert_eq!((fixture.reserved_bytes(), fixture.engine().private_pool_count()), (0, 0));
        fixture.check();
    }
}

// Emptying the cache inside a scope must release nothing of the scope's pool. Tested on four threads at
// once.
#[test]
fn emptying_the_cache_spares_pools_in_use() {
    for fixture in fixtures(ROOMY) {
        let (done, wait) = channel();
        thread::scope(|s| {
            for n in 0..4 {
                let (fixture, done) = (&fixture, done.clone());
                s.spawn(move || {
                    let pool = fixture.pool();
                    let _scope = pool.enter().unwrap();
                    fixture.give(fixture.take_on(MIB, StreamId(n)));
                    fixture.empty_cache();
                    done.send(fixture.layout_of(pool.id()).len()).unwrap();
                });
            }
        });
        drop(done);
        assert_eq!(wait.into_iter().collect::<Vec<_>>(), [1; 4]);
        fixture.empty_cache();
        assert_eq!(fixture.reserved_bytes(), 0);
        fixture.check();
    }
}

#[test]
fn pools_may_be_created_and_released_without_end() {
    let fixture = Fixture::new(ROOMY, "");
    let warm = |n: u64| {
        let pool = fixture.pool();
        let scope = pool.enter().unwrap();
        let block = fixture.take_on(KIB, StreamId(n % 3));
        drop(scope);
        fixture.give(block);
    };
    (0..10).for_each(warm);
    let (bytes, _) = fixture.engine().metadata();
    (0..70_000).for_each(warm);
    assert_eq!(fixture.engine().metadata().0, bytes, "heaps are used again");
    assert_eq!(fixture.engine().private_pool_count(), 0);
    fixture.check();
}

#[test]
fn a_stale_handle_of_a_pool_that_has_gone_is_refused() {
    let fixture = Fixture::new(ROOMY, "");
    let in_new_pool = || {
        let pool = fixture.pool();
        let scope = pool.enter().unwrap();
        let block = fixture.take(KIB);
        drop(scope);
        (pool, block)
    };
    let (old, block) = in_new_pool();
    let (address, token, owner) = (block.address(), block.token(), block.owner());
    fixture.give(block);
    drop(old);
    let (_new, other) = in_new_pool();
    assert_eq!(other.address(), address, "the very place, for another pool");
    let forged = stratalloc::allocator::Allocation::new(address, KIB, owner, token);
    assert!(fixture.free(forged).is_err());
    fixture.give(other);
    fixture.check();
}

// Before a request to the default pool fails, a pool with `use_on_oom` must serve it. Other pools must
// not.
#[test]
fn a_pool_may_help_the_default_pool_out() {
    for fixture in fixtures(ROOMY) {
        fixture.engine().set_memory_fraction(1.0).unwrap();
        let caching: &dyn stratalloc::allocator::Caching = fixture.engine();
        caching.set_limit_bytes(Some(80 * MIB));
        let helps = PoolOptions { use_on_oom: true, ..PoolOptions::default() };
        let shy = fixture.pool();
        let kind = MemoryPool::new(fixture.private_pools(), helps).unwrap();
        let mut addresses = Vec::new();
        for pool in [&shy, &kind] {
            let _scope = pool.enter().unwrap();
            let block = fixture.take(40 * MIB);
            addresses.push(block.address());
            fixture.give(block);
        }
        let helped = fixture.take(30 * MIB);
        assert_eq!(helped.address(), addresses[1]);
        assert_eq!(pool_of(&fixture, helped.address()), kind.id());
        fixture.fail(30 * MIB, HOME);
        fixture.give(helped);
        fixture.check();
    }
}

#[test]
fn released_pools_serve_no_request() {
    let fixture = Fixture::new(ROOMY, "");
    for _ in 0..10 {
        let helps = PoolOptions { use_on_oom: true, ..PoolOptions::default() };
        let pool = MemoryPool::new(fixture.private_pools(), helps).unwrap();
        let scope = pool.enter().unwrap();
        let kept = fixture.take(30 * MIB);
        drop(scope);
        fixture.give(kept);
        fixture.private_pools().retain_pool(pool.id()).unwrap();
        drop(pool);
    }
    let caching: &dyn stratalloc::allocator::Caching = fixture.engine();
    caching.set_limit_bytes(Some(310 * MIB));
    let block = fixture.take(30 * MIB);
    assert_ne!(pool_of(&fixture, block.address()), PoolId::DEFAULT, "retained pools still help");
    fixture.give(block);
    let gone = Fixture::new(ROOMY, "");
    let caching: &dyn stratalloc::allocator::Caching = gone.engine();
    caching.set_limit_bytes(Some(40 * MIB));
    let helps = PoolOptions { use_on_oom: true, ..PoolOptions::default() };
    let id = PoolId::next_user();
    gone.private_pools().create_pool(id, helps).unwrap();
    gone.give(gone.take_in(id, 30 * MIB, HOME));
    gone.private_pools().release_pool(id).unwrap();
    let block = gone.take(30 * MIB);
    assert_eq!(pool_of(&gone, block.address()), PoolId::DEFAULT, "its memory was released");
    gone.check();
}

// Requests of 4 MiB, with segments of 20 MiB. A pool that does not split has one block in each segment.
#[test]
fn a_pool_may_refuse_to_split() {
    let fixture = Fixture::new(ROOMY, "");
    let whole = PoolOptions { no_split: true, ..PoolOptions::default() };
    let counts = [PoolOptions::default(), whole].map(|options| {
        let pool = MemoryPool::new(fixture.private_pools(), options).unwrap();
        let scope = pool.enter().unwrap();
        let held: Vec<_> = (0..5).map(|_| fixture.take(4 * MIB)).collect();
        let segments = fixture.layout_of(pool.id());
        let blocks: usize = segments.iter().map(|segment| segment.blocks.len()).sum();
        drop(scope);
        held.into_iter().for_each(|block| fixture.give(block));
        (segments.len(), blocks)
    });
    assert_eq!(counts, [(1, 5), (5, 5)]);
    fixture.check();
}

// Under memory pressure, a request to a pool with users releases free segments of that pool. PyTorch
// releases none of them.
#[test]
fn pressure_in_a_pool_releases_its_own_idle_segments_unless_a_graph_knows_them() {
    for conf in BOTH {
        let fixture = Fixture::new(ROOMY, conf);
        let caching: &dyn stratalloc::allocator::Caching = fixture.engine();
        caching.set_limit_bytes(Some(100 * MIB));
        let pool = fixture.pool();
        let scope = pool.enter().unwrap();
        let wall = (conf.is_empty()).then(|| fixture.take(20 * MIB));
        let pair = [40, 30].map(|mib| fixture.take(mib * MIB));
        pair.into_iter().for_each(|block| fixture.give(block));
        fixture.give(fixture.take(80 * MIB));
        drop(scope);
        let report = fixture.fail(90 * MIB, HOME);
        assert!(report.cached_private_bytes > 0, "{report}");
        wall.into_iter().for_each(|block| fixture.give(block));
        fixture.check();
    }
}

#[test]
fn the_default_pools_idle_memory_serves_a_pool_under_pressure() {
    for fixture in fixtures(ROOMY) {
        let caching: &dyn stratalloc::allocator::Caching = fixture.engine();
        caching.set_limit_bytes(Some(100 * MIB));
        fixture.give(fixture.take(60 * MIB));
        let pool = fixture.pool();
        let scope = pool.enter().unwrap();
        let block = fixture.take(60 * MIB);
        assert_eq!(fixture.stats().num_alloc_retries, 1);
        fixture.give(block);
        drop(scope);
        fixture.check();
    }
}

#[test]
fn the_history_names_the_pool() {
    let fixture = Fixture::new(ROOMY, "");
    fixture.engine().history().start(&RecordOptions::at_most(100));
    let pool = fixture.pool();
    let scope = pool.enter().unwrap();
    fixture.give(fixture.take(MIB));
    drop(scope);
    let mut events = Vec::new();
    fixture.engine().history().drain_into(&mut events);
    assert_eq!(events.len(), 4);
    assert!(events.iter().all(|event| event.pool == pool.id()), "{events:?}");
    assert_eq!(fixture.layout_of(pool.id())[0].pool, pool.id());
}

/// Routes a capture's requests as PyTorch's graphs do: by a function that checks the capture. Threads of
/// autograd take part in the capture, and other threads have scopes of their own.
#[test]
fn a_captures_first_request_from_a_third_thread_goes_to_the_captures_pool() {
    for conf in BOTH {
        let fixture = Fixture::new(ROOMY, conf);
        let (stream, own, graphs) = (fixture.stream(), PoolId::next_user(), PoolId::next_capture());
        let capture = Capture::begin(&*fixture.device, stream).unwrap();
        let sim = Arc::clone(&fixture.device);
        let filter = ScopeFilter::Where(Arc::new(move |stream| {
            sim.capture_status(stream) == Ok(CaptureStatus::Active { capture })
        }));
        let scope = PoolScope::open(fixture.private_pools(), graphs, filter).unwrap();
        let of_thread =
            PoolScope::open(fixture.private_pools(), own, ScopeFilter::this_thread()).unwrap();
        let third = on_new_thread(|| fixture.take_on(MIB, stream));
        assert_eq!(pool_of(&fixture, third.address()), graphs, "{conf}");
        let here = fixture.take(MIB);
        assert_eq!(pool_of(&fixture, here.address()), own, "{conf}");
        Capture::end(&*fixture.device, stream).unwrap();
        let after = on_new_thread(|| fixture.take_on(MIB, stream));
        assert_eq!(pool_of(&fixture, after.address()), PoolId::DEFAULT, "{conf}");
        [third, here, after].into_iter().for_each(|block| fixture.give(block));
        drop((scope, of_thread));
        fixture.check();
    }
}

#[test]
fn a_routed_pool_stops_the_queries_of_events_only_where_the_version_of_pytorch_did() {
    for (conf, polls) in [
        ("", true),
        ("compat:pytorch", false),
        ("compat:pytorch-2.12", false),
        ("compat:pytorch-2.13", true),
        ("compat:pytorch-2.15", true),
    ] {
        let fixture = Fixture::new(ROOMY, conf);
        let (home, side) = (fixture.stream(), fixture.stream());
        let block = fixture.take_on(8 * MIB, home);
        fixture.work(&block, side);
        fixture.give(block);
        fixture.device.complete_all();
        let pool = fixture.pool();
        let scope = pool.enter().unwrap();
        let inside = fixture.take_on(MIB, home);
        let waits = fixture.stats().active.all.current == 2;
        assert_eq!(waits, !polls, "{conf}");
        drop(scope);
        let after = fixture.take_on(MIB, home);
        assert_eq!(
            fixture.stats().active.all.current,
            2,
            "{conf}: after the scope all are queried"
        );
        [inside, after].into_iter().for_each(|block| fixture.give(block));
        fixture.check();
    }
}

#[test]
fn a_request_to_a_routed_pool_releases_no_free_segments_where_the_version_of_pytorch_did_not() {
    for (conf, releases) in [
        ("", true),
        ("compat:pytorch", false),
        ("compat:pytorch-2.12", false),
        ("compat:pytorch-2.13", true),
    ] {
        let fixture = Fixture::new(ROOMY, conf);
        fixture.caching().set_limit_bytes(Some(100 * MIB));
        fixture.give(fixture.take(60 * MIB));
        let pool = fixture.pool();
        let scope = pool.enter().unwrap();
        let request = fixture.try_allocate(80 * MIB, HOME);
        assert_eq!(request.is_ok(), releases, "{conf}");
        drop(scope);
        request.into_iter().for_each(|block| fixture.give(block));
        drop(pool);
        fixture.give(fixture.take(80 * MIB));
        fixture.check();
    }
}
