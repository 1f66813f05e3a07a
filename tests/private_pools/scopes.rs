//! Scopes and users: the pool that serves each request, and the memory that remains after them.

use std::sync::mpsc::channel;

use crate::common::prelude::*;

fn pool_of(bed: &Bed, address: u64) -> PoolId {
    let layout = bed.engine().layout();
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
    let bed = Bed::new(ROOMY, "");
    let pool = bed.pool();
    let users = || bed.private_pools().pool_users(pool.id());
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

// A block that outlives its pool keeps its segment until it is freed and memory is released.
#[test]
fn a_block_may_outlive_its_pool() {
    for bed in beds(ROOMY) {
        let pool = bed.pool();
        let id = pool.id();
        let scope = pool.enter().unwrap();
        let kept = bed.take(MIB);
        let freed = bed.take(30 * MIB);
        drop(scope);
        bed.give(freed);
        drop(pool);
        assert_eq!(bed.reserved_bytes(), 2 * MIB, "the idle segment went with the pool");
        assert_eq!(pool_of(&bed, kept.address()), id);
        bed.give(kept);
        assert_eq!(bed.reserved_bytes(), 2 * MIB);
        bed.empty_cache();
        assert_eq!((bed.reserved_bytes(), bed.engine().private_pool_count()), (0, 0));
        bed.check();
    }
}

// Emptying the cache inside a scope releases nothing of the pool, on four threads at once.
#[test]
fn emptying_the_cache_spares_pools_in_use() {
    for bed in beds(ROOMY) {
        let (done, wait) = channel();
        thread::scope(|s| {
            for n in 0..4 {
                let (bed, done) = (&bed, done.clone());
                s.spawn(move || {
                    let pool = bed.pool();
                    let _scope = pool.enter().unwrap();
                    bed.give(bed.take_on(MIB, StreamId(n)));
                    bed.empty_cache();
                    done.send(bed.layout_of(pool.id()).len()).unwrap();
                });
            }
        });
        drop(done);
        assert_eq!(wait.into_iter().collect::<Vec<_>>(), [1; 4]);
        bed.empty_cache();
        assert_eq!(bed.reserved_bytes(), 0);
        bed.check();
    }
}

#[test]
fn pools_may_come_and_go_for_ever() {
    let bed = Bed::new(ROOMY, "");
    let warm = |n: u64| {
        let pool = bed.pool();
        let scope = pool.enter().unwrap();
        let block = bed.take_on(KIB, StreamId(n % 3));
        drop(scope);
        bed.give(block);
    };
    (0..10).for_each(warm);
    let (bytes, _) = bed.engine().metadata();
    (0..70_000).for_each(warm);
    assert_eq!(bed.engine().metadata().0, bytes, "heaps are used again");
    assert_eq!(bed.engine().private_pool_count(), 0);
    bed.check();
}

#[test]
fn a_stale_handle_of_a_pool_that_has_gone_is_refused() {
    let bed = Bed::new(ROOMY, "");
    let in_new_pool = || {
        let pool = bed.pool();
        let scope = pool.enter().unwrap();
        let block = bed.take(KIB);
        drop(scope);
        (pool, block)
    };
    let (old, block) = in_new_pool();
    let (address, token, owner) = (block.address(), block.token(), block.owner());
    bed.give(block);
    drop(old);
    let (_new, other) = in_new_pool();
    assert_eq!(other.address(), address, "the very place, for another pool");
    let forged = stratalloc::allocator::Allocation::new(address, KIB, owner, token);
    assert!(bed.free(forged).is_err());
    bed.give(other);
    bed.check();
}

// A pool with `use_on_oom` serves a request to the default pool before that fails; others never do.
#[test]
fn a_pool_may_help_the_default_pool_out() {
    for bed in beds(ROOMY) {
        bed.engine().set_memory_fraction(1.0).unwrap();
        let caching: &dyn stratalloc::allocator::Caching = bed.engine();
        caching.set_limit_bytes(Some(80 * MIB));
        let helps = PoolOptions { use_on_oom: true, ..PoolOptions::default() };
        let shy = bed.pool();
        let kind = MemoryPool::new(bed.private_pools(), helps).unwrap();
        let mut addresses = Vec::new();
        for pool in [&shy, &kind] {
            let _scope = pool.enter().unwrap();
            let block = bed.take(40 * MIB);
            addresses.push(block.address());
            bed.give(block);
        }
        let helped = bed.take(30 * MIB);
        assert_eq!(helped.address(), addresses[1]);
        assert_eq!(pool_of(&bed, helped.address()), kind.id());
        bed.fail(30 * MIB, HOME);
        bed.give(helped);
        bed.check();
    }
}

#[test]
fn released_pools_help_nobody() {
    let bed = Bed::new(ROOMY, "");
    for _ in 0..10 {
        let helps = PoolOptions { use_on_oom: true, ..PoolOptions::default() };
        let pool = MemoryPool::new(bed.private_pools(), helps).unwrap();
        let scope = pool.enter().unwrap();
        let kept = bed.take(30 * MIB);
        drop(scope);
        bed.give(kept);
        bed.private_pools().retain_pool(pool.id()).unwrap();
        drop(pool);
    }
    let caching: &dyn stratalloc::allocator::Caching = bed.engine();
    caching.set_limit_bytes(Some(310 * MIB));
    let block = bed.take(30 * MIB);
    assert_ne!(pool_of(&bed, block.address()), PoolId::DEFAULT, "retained pools still help");
    bed.give(block);
    let gone = Bed::new(ROOMY, "");
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

// Requests of 4 MiB with segments of 20 MiB: a pool that does not split has one block in each segment.
#[test]
fn a_pool_may_refuse_to_split() {
    let bed = Bed::new(ROOMY, "");
    let whole = PoolOptions { no_split: true, ..PoolOptions::default() };
    let counts = [PoolOptions::default(), whole].map(|options| {
        let pool = MemoryPool::new(bed.private_pools(), options).unwrap();
        let scope = pool.enter().unwrap();
        let held: Vec<_> = (0..5).map(|_| bed.take(4 * MIB)).collect();
        let segments = bed.layout_of(pool.id());
        let blocks: usize = segments.iter().map(|segment| segment.blocks.len()).sum();
        drop(scope);
        held.into_iter().for_each(|block| bed.give(block));
        (segments.len(), blocks)
    });
    assert_eq!(counts, [(1, 5), (5, 5)]);
    bed.check();
}

// PyTorch does not release free segments of a pool in use, not even for that pool's requests.
#[test]
fn pressure_in_a_pool_releases_its_own_idle_segments_unless_a_graph_knows_them() {
    for conf in BOTH {
        let bed = Bed::new(ROOMY, conf);
        let caching: &dyn stratalloc::allocator::Caching = bed.engine();
        caching.set_limit_bytes(Some(100 * MIB));
        let pool = bed.pool();
        let scope = pool.enter().unwrap();
        let wall = (conf.is_empty()).then(|| bed.take(20 * MIB));
        let pair = [40, 30].map(|mib| bed.take(mib * MIB));
        pair.into_iter().for_each(|block| bed.give(block));
        bed.give(bed.take(80 * MIB));
        drop(scope);
        let report = bed.fail(90 * MIB, HOME);
        assert!(report.cached_private_bytes > 0, "{report}");
        wall.into_iter().for_each(|block| bed.give(block));
        bed.check();
    }
}

#[test]
fn the_default_pools_idle_memory_serves_a_pool_under_pressure() {
    for bed in beds(ROOMY) {
        let caching: &dyn stratalloc::allocator::Caching = bed.engine();
        caching.set_limit_bytes(Some(100 * MIB));
        bed.give(bed.take(60 * MIB));
        let pool = bed.pool();
        let scope = pool.enter().unwrap();
        let block = bed.take(60 * MIB);
        assert_eq!(bed.stats().num_alloc_retries, 1);
        bed.give(block);
        drop(scope);
        bed.check();
    }
}

#[test]
fn the_history_names_the_pool() {
    let bed = Bed::new(ROOMY, "");
    bed.engine().history().start(&RecordOptions::at_most(100));
    let pool = bed.pool();
    let scope = pool.enter().unwrap();
    bed.give(bed.take(MIB));
    drop(scope);
    let mut events = Vec::new();
    bed.engine().history().drain_into(&mut events);
    assert_eq!(events.len(), 4);
    assert!(events.iter().all(|event| event.pool == pool.id()), "{events:?}");
    assert_eq!(bed.layout_of(pool.id())[0].pool, pool.id());
}

/// Routes a capture's requests as PyTorch's graphs do: with a function that checks the capture. Autograd
/// threads take part in the capture, and other threads have their own scopes.
#[test]
fn a_captures_first_request_from_a_third_thread_goes_to_the_captures_pool() {
    for conf in BOTH {
        let bed = Bed::new(ROOMY, conf);
        let (stream, own, graphs) = (bed.stream(), PoolId::next_user(), PoolId::next_capture());
        let capture = Capture::begin(&*bed.device, stream).unwrap();
        let sim = Arc::clone(&bed.device);
        let filter = ScopeFilter::Where(Arc::new(move |stream| {
            sim.capture_status(stream) == Ok(CaptureStatus::Active { capture })
        }));
        let scope = PoolScope::open(bed.private_pools(), graphs, filter).unwrap();
        let of_thread =
            PoolScope::open(bed.private_pools(), own, ScopeFilter::this_thread()).unwrap();
        let third = elsewhere(|| bed.take_on(MIB, stream));
        assert_eq!(pool_of(&bed, third.address()), graphs, "{conf}");
        let here = bed.take(MIB);
        assert_eq!(pool_of(&bed, here.address()), own, "{conf}");
        Capture::end(&*bed.device, stream).unwrap();
        let after = elsewhere(|| bed.take_on(MIB, stream));
        assert_eq!(pool_of(&bed, after.address()), PoolId::DEFAULT, "{conf}");
        [third, here, after].into_iter().for_each(|block| bed.give(block));
        drop((scope, of_thread));
        bed.check();
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
        let bed = Bed::new(ROOMY, conf);
        let (home, side) = (bed.stream(), bed.stream());
        let block = bed.take_on(8 * MIB, home);
        bed.work(&block, side);
        bed.give(block);
        bed.device.complete_all();
        let pool = bed.pool();
        let scope = pool.enter().unwrap();
        let inside = bed.take_on(MIB, home);
        let waits = bed.stats().active.all.current == 2;
        assert_eq!(waits, !polls, "{conf}");
        drop(scope);
        let after = bed.take_on(MIB, home);
        assert_eq!(bed.stats().active.all.current, 2, "{conf}: after the scope all are queried");
        [inside, after].into_iter().for_each(|block| bed.give(block));
        bed.check();
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
        let bed = Bed::new(ROOMY, conf);
        bed.caching().set_limit_bytes(Some(100 * MIB));
        bed.give(bed.take(60 * MIB));
        let pool = bed.pool();
        let scope = pool.enter().unwrap();
        let request = bed.ask(80 * MIB, HOME);
        assert_eq!(request.is_ok(), releases, "{conf}");
        drop(scope);
        request.into_iter().for_each(|block| bed.give(block));
        drop(pool);
        bed.give(bed.take(80 * MIB));
        bed.check();
    }
}
