//! Captures: the memory that graphs keep, and blocks freed inside a capture.

use std::sync::Mutex;

use stratalloc::registry::build;

use crate::common::prelude::*;

const REUSE: &str = "graph_capture_record_stream_reuse:True";

fn both_with_reuse() -> [String; 2] {
    BOTH.map(|conf| format!("{conf}{}{REUSE}", if conf.is_empty() { "" } else { "," }))
}

// For each request size: the segments and reserved bytes that a graph adds, and those that its result
// keeps.
#[test]
fn a_graphs_memory_is_counted_and_its_result_outlives_it() {
    for (bytes, segments, reserved_mib) in [
        (512, 1, 2),
        (MIB, 2, 4),
        (MIB + 512, 1, 20),
        (10 * MIB - 512, 2, 40),
        (10 * MIB + 512, 3, 36),
    ] {
        let bed = Bed::new(ROOMY, "");
        let (stream, pool) = (bed.stream(), PoolId::next_capture());
        let scope = bed.capture(stream, pool);
        // Two temporary blocks and a result that is kept.
        let a = bed.take_on(bytes, stream);
        let b = bed.take_on(bytes, stream);
        let result = bed.take_on(bytes, stream);
        bed.give(a);
        bed.give(b);
        bed.end_capture(stream);
        let graph = scope.finish();
        let now = bed.stats();
        assert_eq!(now.segment.all.current, segments, "{bytes}");
        assert_eq!(bed.reserved_bytes(), reserved_mib * MIB, "{bytes}");
        bed.empty_cache();
        assert_eq!(bed.reserved_bytes(), reserved_mib * MIB, "a graph keeps its memory");
        drop(graph);
        bed.empty_cache();
        assert_eq!(bed.stats().segment.all.current, 1, "the result's segment: {bytes}");
        bed.give(result);
        bed.empty_cache();
        assert_eq!((bed.reserved_bytes(), bed.engine().private_pool_count()), (0, 0));
        bed.check();
    }
}

#[test]
fn an_expandable_graph_adds_no_segment() {
    let bed = Bed::new(ROOMY, "expandable_segments:True");
    let (stream, pool) = (bed.stream(), PoolId::next_capture());
    let scope = bed.capture(stream, pool);
    bed.give(bed.take_on(MIB, stream));
    bed.end_capture(stream);
    let graph = scope.finish();
    assert_eq!(bed.stats().segment.all.current, 0);
    assert_eq!(bed.reserved_bytes(), 2 * MIB);
    drop(graph);
    bed.empty_cache();
    assert_eq!(bed.reserved_bytes(), 0);
    bed.check();
}

// Two graphs of 2 MiB need 2 MiB less if they share a pool.
#[test]
fn graphs_that_share_a_pool_share_its_memory() {
    for conf in BOTH {
        let reserved = [false, true].map(|shared| {
            let bed = Bed::new(ROOMY, conf);
            let stream = bed.stream();
            let first = PoolId::next_capture();
            let second = if shared { first } else { PoolId::next_capture() };
            let graphs = [first, second].map(|pool| {
                let scope = bed.capture(stream, pool);
                bed.give(bed.take_on(KIB, stream));
                bed.end_capture(stream);
                scope.finish()
            });
            let bytes = bed.reserved_bytes();
            drop(graphs);
            bed.empty_cache();
            assert_eq!(bed.reserved_bytes(), 0);
            bed.check();
            bytes
        });
        assert_eq!(reserved[0] - reserved[1], 2 * MIB);
    }
}

#[test]
fn a_capture_that_fails_leaves_nothing_behind() {
    for bed in beds(ROOMY) {
        let (stream, pool) = (bed.stream(), PoolId::next_capture());
        let attempt = || -> Result<(), PoolError> {
            let _scope = bed.capture(stream, pool);
            let block = bed.take_on(MIB, stream);
            bed.device.invalidate_capture(stream);
            bed.give(block);
            // A framework that fails here drops its scope on the way out.
            Err(PoolError::IsDefault)
        };
        assert!(attempt().is_err());
        assert!(Capture::end(&*bed.device, stream).is_err(), "the capture was broken");
        assert_eq!(bed.private_pools().pool_users(pool), Some(0));
        bed.empty_cache();
        assert_eq!((bed.reserved_bytes(), bed.engine().private_pool_count()), (0, 0));
        let again = PoolId::next_capture();
        let scope = bed.capture(stream, again);
        bed.give(bed.take_on(MIB, stream));
        bed.end_capture(stream);
        drop(scope);
        bed.check();
    }
}

#[test]
fn a_capture_in_the_same_pool_can_be_repeated() {
    for bed in beds(ROOMY) {
        let stream = bed.stream();
        let pool = PoolId::next_user();
        bed.private_pools().create_pool(pool, Default::default()).unwrap();
        let addresses: Vec<_> = (0..3)
            .map(|_| {
                let scope = bed.capture(stream, pool);
                let block = bed.take_on(3 * MIB, stream);
                let address = block.address();
                bed.give(block);
                bed.end_capture(stream);
                drop(scope);
                address
            })
            .collect();
        assert!(addresses.windows(2).all(|pair| pair[0] == pair[1]), "{addresses:?}");
        bed.private_pools().release_pool(pool).unwrap();
        bed.private_pools().empty_pool(pool).unwrap();
        assert_eq!(bed.engine().private_pool_count(), 0);
        bed.check();
    }
}

#[test]
fn only_streams_of_the_capture_are_routed_to_its_pool() {
    let bed = Bed::new(ROOMY, "");
    let (stream, side, other) = (bed.stream(), bed.stream(), bed.stream());
    let pool = PoolId::next_capture();
    let scope = bed.capture(stream, pool);
    let forked = {
        bed.join(stream, side);
        bed.take_on(KIB, side)
    };
    let inside = bed.take_on(KIB, stream);
    let outside = bed.take_on(KIB, other);
    assert_eq!(bed.private_pools().live_addresses(pool).unwrap().len(), 2);
    bed.join(side, stream);
    bed.end_capture(stream);
    let _graph = scope.finish();
    [forked, inside, outside].into_iter().for_each(|block| bed.give(block));
    bed.check();
}

// A request in a capture must not query events, because the query would fail. Uses recorded in the
// capture end with it, and the next request outside frees the block.
#[test]
fn a_block_used_by_another_stream_in_a_capture_is_free_after_it() {
    for bed in beds(ROOMY) {
        let (stream, side) = (bed.stream(), bed.stream());
        let (before, elsewhere) = (bed.take_on(3 * MIB, stream), bed.stream());
        bed.record(&before, elsewhere);
        bed.give(before);
        let pool = PoolId::next_capture();
        let scope = bed.capture(stream, pool);
        bed.join(stream, side);
        let block = bed.take_on(4 * MIB, stream);
        let address = block.address();
        bed.record(&block, side);
        bed.give(block);
        let queries = bed.device.calls("query_event");
        let second = bed.take_on(4 * MIB, stream);
        assert_ne!(second.address(), address, "its other use is not joined");
        assert_eq!(bed.device.calls("query_event"), queries, "no event was queried");
        assert_eq!(bed.stats().active_bytes.all.current, 11 << 20, "two wait");
        bed.join(side, stream);
        bed.end_capture(stream);
        let graph = scope.finish();
        bed.give(second);
        bed.give(bed.take_on(512, stream));
        assert_eq!(bed.private_pools().live_addresses(pool).unwrap(), [0; 0]);
        let waiting = bed.stats().active_bytes.all.current;
        assert_eq!(waiting, 3 << 20, "only the use from before the capture is waited for");
        bed.device.complete_all();
        bed.give(bed.take_on(512, stream));
        assert_eq!(bed.stats().active.all.current, 0);
        drop(graph);
        bed.empty_cache();
        assert_eq!(bed.reserved_bytes(), 0);
        bed.check();
    }
}

// With reuse on, a block is reused inside the capture once its other stream is joined.
#[test]
fn reuse_in_a_capture_waits_for_the_join_of_a_stream() {
    for conf in both_with_reuse() {
        let bed = Bed::new(ROOMY, &conf);
        let (stream, side) = (bed.stream(), bed.stream());
        let scope = bed.capture(stream, PoolId::next_capture());
        bed.join(stream, side);
        let block = bed.take_on(8 * MIB, stream);
        let address = block.address();
        bed.work(&block, side);
        bed.give(block);
        let early = bed.take_on(8 * MIB, stream);
        assert_ne!(early.address(), address, "{conf}");
        bed.join(side, stream);
        let late = bed.take_on(8 * MIB, stream);
        assert_eq!(late.address(), address, "{conf}");
        bed.end_capture(stream);
        drop(scope);
        [early, late].into_iter().for_each(|block| bed.give(block));
        bed.check();
    }
}

#[test]
fn reuse_in_a_capture_waits_for_the_join_of_all_streams() {
    for conf in both_with_reuse() {
        let bed = Bed::new(ROOMY, &conf);
        let stream = bed.stream();
        let sides = [bed.stream(), bed.stream(), bed.stream()];
        let scope = bed.capture(stream, PoolId::next_capture());
        sides.into_iter().for_each(|side| bed.join(stream, side));
        let block = bed.take_on(8 * MIB, stream);
        let address = block.address();
        sides.into_iter().for_each(|side| bed.work(&block, side));
        bed.give(block);
        let mut held = Vec::new();
        for (joined, side) in sides.into_iter().enumerate() {
            held.push(bed.take_on(8 * MIB, stream));
            assert_ne!(held[joined].address(), address, "{joined} of 3 joined");
            bed.join(side, stream);
        }
        held.push(bed.take_on(8 * MIB, stream));
        assert_eq!(held[3].address(), address);
        bed.end_capture(stream);
        drop(scope);
        held.into_iter().for_each(|block| bed.give(block));
        bed.check();
    }
}

// A block deferred in one graph is free for the next graph of the same pool.
#[test]
fn what_one_graph_deferred_the_next_one_reuses() {
    for conf in both_with_reuse() {
        let bed = Bed::new(ROOMY, &conf);
        let (stream, side) = (bed.stream(), bed.stream());
        let pool = PoolId::next_capture();
        let first = bed.capture(stream, pool);
        bed.join(stream, side);
        let block = bed.take_on(8 * MIB, stream);
        let address = block.address();
        bed.work(&block, side);
        bed.give(block);
        bed.join(side, stream);
        bed.end_capture(stream);
        let graph = first.finish();
        let second = bed.capture(stream, pool);
        let again = bed.take_on(8 * MIB, stream);
        assert_eq!(again.address(), address);
        bed.end_capture(stream);
        drop(second);
        drop(graph);
        bed.give(again);
        bed.check();
    }
}

// A use from before the capture is real work: the block waits until that work is done.
#[test]
fn a_use_from_before_the_capture_is_waited_for() {
    for conf in both_with_reuse() {
        let bed = Bed::new(ROOMY, &conf);
        let (stream, side) = (bed.stream(), bed.stream());
        let pool = PoolId::next_user();
        bed.private_pools().create_pool(pool, Default::default()).unwrap();
        let request = Request::new(8 * MIB, stream);
        let block = bed.allocate(request.in_pool(pool)).unwrap();
        let address = block.address();
        bed.record(&block, side);
        let scope = bed.capture(stream, pool);
        bed.join(stream, side);
        bed.work(&block, side);
        bed.give(block);
        bed.join(side, stream);
        let inside = bed.take_on(8 * MIB, stream);
        assert_ne!(inside.address(), address);
        bed.end_capture(stream);
        drop(scope);
        bed.give(inside);
        let waiting = bed.take_in(pool, 16 * MIB, stream);
        assert_eq!(bed.stats().active_bytes.all.current, 24 << 20, "it still waits");
        bed.give(waiting);
        bed.device.complete_all();
        let free = bed.allocate(request.in_pool(pool)).unwrap();
        assert_eq!(bed.stats().active.all.current, 1);
        bed.give(free);
        bed.check();
    }
}

#[test]
fn out_of_memory_in_a_capture_is_an_error_that_releases_nothing() {
    for bed in beds(1 << 30) {
        let stream = bed.stream();
        bed.give(bed.take_on(900 * MIB, stream));
        let scope = bed.capture(stream, PoolId::next_capture());
        bed.fail(4 << 40, stream);
        bed.fail(500 * MIB, stream);
        assert!(bed.reserved_bytes() >= 900 * MIB, "the cache is as it was");
        bed.end_capture(stream);
        drop(scope);
        bed.give(bed.take_on(1000 * MIB, stream));
        bed.check();
    }
}

#[test]
fn emptying_the_cache_in_a_capture_does_nothing() {
    let bed = Bed::new(ROOMY, "");
    let stream = bed.stream();
    bed.give(bed.take_on(30 * MIB, stream));
    let scope = bed.capture(stream, PoolId::next_capture());
    bed.empty_cache();
    assert_eq!(bed.reserved_bytes(), 30 * MIB);
    bed.end_capture(stream);
    drop(scope);
    bed.empty_cache();
    assert_eq!(bed.reserved_bytes(), 0);
}

#[test]
fn a_scope_of_an_unknown_capture_routes_nobody() {
    let bed = Bed::new(ROOMY, "");
    let stream = bed.stream();
    let pool = PoolId::next_capture();
    let filter = ScopeFilter::Capture(u64::MAX);
    let scope = PoolScope::open(bed.private_pools(), pool, filter).unwrap();
    let block = bed.take_on(KIB, stream);
    assert_eq!(bed.private_pools().live_addresses(pool).unwrap(), [0; 0]);
    drop(scope);
    bed.give(block);
    assert!(matches!(
        bed.device.capture_status(StreamId(0)),
        Ok(stratalloc::driver::CaptureStatus::None)
    ));
    assert!(bed.control().private_pools.is_some());
}

#[test]
fn the_driver_is_told_of_captures_as_long_as_any_scope_is_open() {
    for bed in beds(ROOMY) {
        let stream = bed.stream();
        let of_thread =
            PoolScope::open(bed.private_pools(), PoolId::next_user(), ScopeFilter::this_thread())
                .unwrap();
        assert_eq!(bed.device.captures_expected(), 1, "a capture may begin inside it");
        let of_capture = bed.capture(stream, PoolId::next_capture());
        assert_eq!(bed.device.captures_expected(), 2);
        bed.end_capture(stream);
        drop(of_capture);
        assert_eq!(bed.device.captures_expected(), 1);
        drop(of_thread);
        assert_eq!(bed.device.captures_expected(), 0);
        let refused = bed.private_pools().close_scope(PoolId::next_user());
        assert!(refused.is_err());
        bed.private_pools()
            .open_scope(PoolId::next_capture(), ScopeFilter::Stream(stream))
            .unwrap();
        assert_eq!(bed.device.captures_expected(), 1);
        let Bed { device, allocator } = bed;
        drop(allocator);
        assert_eq!(device.captures_expected(), 0, "the allocator has gone with its scope");
    }
}

#[test]
fn a_driver_that_does_not_hear_of_captures_keeps_no_scope_from_opening() {
    let sim = Sim::new(SimOptions::default());
    let driver = Arc::new(Faulty::new(sim));
    let config = config("");
    let built = build(&config, Arc::<Faulty<Sim>>::clone(&driver) as _, BuildOptions::default());
    let strategy = built.unwrap();
    let pools = strategy.private_pools();
    let kind = DriverErrorKind::Other;
    driver.arm(FaultPlan { at: 0, kind, repeat: true, only: Some("expect_captures") });
    let scope = PoolScope::open(pools, PoolId::next_user(), ScopeFilter::this_thread()).unwrap();
    strategy.give(strategy.take(MIB));
    drop(scope);
    assert_eq!(driver.failed_calls(), 1, "what it was not told is not taken back");
}

#[test]
fn an_allocator_that_goes_inside_a_capture_leaves_the_capture_sound() {
    for conf in BOTH {
        let bed = Bed::new(ROOMY, conf);
        let (stream, other) = (bed.stream(), bed.stream());
        let _held = bed.take_on(MIB, other);
        let capture = Capture::begin(&*bed.device, stream).unwrap();
        bed.private_pools()
            .open_scope(PoolId::next_capture(), ScopeFilter::Capture(capture))
            .unwrap();
        let Bed { device, allocator } = bed;
        drop(allocator);
        assert_eq!(device.calls("synchronize_device"), 0, "{conf}");
        Capture::end(&*device, stream).expect("nobody broke it");
    }
}

/// How requests reach a pool without a scope of their capture.
#[derive(Clone, Copy, Debug)]
enum Way {
    Stream,
    Thread,
    Function,
    /// No scope; the request names the pool.
    Named,
}

const WAYS: [Way; 4] = [Way::Stream, Way::Thread, Way::Function, Way::Named];

impl Way {
    fn open(self, bed: &Bed, pool: PoolId, stream: StreamId) -> Option<PoolScope<'_>> {
        let filter = match self {
            Self::Stream => ScopeFilter::Stream(stream),
            Self::Thread => ScopeFilter::this_thread(),
            Self::Function => ScopeFilter::Where(Arc::new(move |other| other == stream)),
            Self::Named => return None,
        };
        Some(PoolScope::open(bed.private_pools(), pool, filter).expect("none is open"))
    }

    fn take(self, bed: &Bed, pool: PoolId, bytes: u64, stream: StreamId) -> Option<u64> {
        let request = Request::new(bytes, stream);
        let made = match self {
            Self::Named => bed.allocate(request.in_pool(pool)),
            _ => bed.allocate(request),
        };
        let block = made.ok()?;
        let address = block.address();
        bed.give(block);
        Some(address)
    }
}

#[test]
fn a_graphs_memory_stays_whatever_led_its_requests_to_the_pool() {
    for (conf, way) in BOTH.into_iter().flat_map(|conf| WAYS.map(|way| (conf, way))) {
        let bed = Bed::new(64 * MIB, conf);
        let (stream, pool) = (bed.stream(), PoolId::next_user());
        let options = PoolOptions { use_on_oom: true, ..PoolOptions::default() };
        bed.private_pools().create_pool(pool, options).unwrap();
        let live = bed.take_on(10 * MIB, stream);
        let scope = way.open(&bed, pool, stream);
        Capture::begin(&*bed.device, stream).unwrap();
        let graphs = way.take(&bed, pool, 40 * MIB, stream).expect("there is room");
        bed.end_capture(stream);
        drop(scope);
        let layout = bed.layout_of(pool);
        bed.fail(30 * MIB, stream);
        let scope = way.open(&bed, pool, stream);
        assert_eq!(way.take(&bed, pool, 55 * MIB, stream), None, "{conf} {way:?}");
        drop(scope);
        bed.empty_cache();
        assert_eq!(bed.layout_of(pool), layout, "{conf} {way:?}: the graph writes to it");
        let scope = way.open(&bed, pool, stream);
        assert_eq!(way.take(&bed, pool, 40 * MIB, stream), Some(graphs), "{conf} {way:?}");
        drop(scope);
        bed.private_pools().release_pool(pool).unwrap();
        bed.give(live);
        bed.empty_cache();
        assert_eq!(bed.reserved_bytes(), 0, "{conf} {way:?}");
        bed.check();
    }
}

/// Four threads capture graphs, each in a pool with `use_on_oom`, and cause memory pressure outside the
/// captures.
#[test]
fn no_thread_gets_the_memory_of_anothers_graph() {
    for conf in BOTH {
        let bed = Bed::new(96 * MIB, conf);
        // Memory that graphs write to, each range with its pool.
        let graphs: Mutex<Vec<(PoolId, u64, u64)>> = Mutex::default();
        let run = |number: usize| {
            let stream = bed.stream();
            for round in 0..60 {
                let way = WAYS[(number + round) % WAYS.len()];
                let pool = PoolId::next_user();
                let options = PoolOptions { use_on_oom: true, ..PoolOptions::default() };
                bed.private_pools().create_pool(pool, options).unwrap();
                let scope = way.open(&bed, pool, stream);
                Capture::begin(&*bed.device, stream).unwrap();
                let bytes = (12 + round as u64 % 3) * MIB;
                let request = Request::new(bytes, stream);
                let made = match way {
                    Way::Named => bed.allocate(request.in_pool(pool)),
                    _ => bed.allocate(request),
                };
                if let Ok(block) = made {
                    graphs.lock().unwrap().push((pool, block.address(), bytes));
                    bed.give(block);
                }
                bed.end_capture(stream);
                drop(scope);
                if let Ok(block) = bed.ask(11 * MIB, stream) {
                    let (start, end) = (block.address(), block.address() + 11 * MIB);
                    let taken = graphs
                        .lock()
                        .unwrap()
                        .iter()
                        .any(|(_, at, bytes)| *at < end && start < at + bytes);
                    assert!(!taken, "{conf} {way:?}: {start:#x} is a graph's");
                    bed.give(block);
                }
                graphs.lock().unwrap().retain(|(of, _, _)| *of != pool);
                bed.private_pools().release_pool(pool).unwrap();
            }
        };
        std::thread::scope(|s| (0..4).for_each(|number| drop(s.spawn(move || run(number)))));
        bed.empty_cache();
        assert_eq!((bed.reserved_bytes(), bed.engine().private_pool_count()), (0, 0));
        bed.check();
    }
}

/// As in PyTorch, the capture begins before its scope opens, and another stream allocates in between.
#[test]
fn a_capture_without_a_scope_yet_keeps_only_its_own_streams_memory() {
    for conf in BOTH {
        let bed = Bed::new(64 * MIB, conf);
        let [captured, idle, asking] = [(); 3].map(|()| bed.stream());
        let [mine, others] = [(captured, 20 * MIB), (idle, 30 * MIB)]
            .map(|(stream, bytes)| bed.take_on(bytes, stream));
        bed.give(mine);
        bed.give(others);
        let begun = std::thread::scope(|s| {
            s.spawn(|| Capture::begin(&*bed.device, captured).unwrap()).join().unwrap()
        });
        bed.give(bed.take_on(34 * MIB, asking));
        bed.empty_cache();
        assert_eq!(bed.reserved_bytes(), 20 * MIB, "{conf}: what the captured stream may use");
        let pool = PoolId::next_capture();
        let scope = PoolScope::open(bed.private_pools(), pool, ScopeFilter::Capture(begun))
            .expect("it is closed");
        bed.give(bed.take_on(MIB, captured));
        elsewhere(|| bed.end_capture(captured));
        drop(scope);
        bed.empty_cache();
        assert_eq!(bed.reserved_bytes(), 0, "{conf}");
        bed.check();
    }
}
