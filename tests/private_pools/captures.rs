//! Captures: the memory that graphs keep, and blocks that are freed inside a capture.

use std::sync::Mutex;

use stratalloc::registry::build;

use crate::common::prelude::*;

const REUSE: &str = "graph_capture_record_stream_reuse:True";

fn both_with_reuse() -> [String; 2] {
    BOTH.map(|conf| format!("{conf}{}{REUSE}", if conf.is_empty() { "" } else { "," }))
}

// Each case: the size of the requests, and the segments and reserved MiB of the graph below.
#[test]
fn a_graphs_memory_is_counted_and_its_result_outlives_it() {
    for (bytes, segments, reserved_mib) in [
        (512, 1, 2),
        (MIB, 2, 4),
        (MIB + 512, 1, 20),
        (10 * MIB - 512, 2, 40),
        (10 * MIB + 512, 3, 36),
    ] {
        let fixture = Fixture::new(ROOMY, "");
        let (stream, pool) = (fixture.stream(), PoolId::next_capture());
        let scope = fixture.capture(stream, pool);
        // The graph has two temporary blocks and a result that is kept.
        let a = fixture.take_on(bytes, stream);
        let b = fixture.take_on(bytes, stream);
        let result = fixture.take_on(bytes, stream);
        fixture.give(a);
        fixture.give(b);
        fixture.end_capture(stream);
        let graph = scope.finish();
        let now = fixture.stats();
        assert_eq!(now.segment.all.current, segments, "{bytes}");
        assert_eq!(fixture.reserved_bytes(), reserved_mib * MIB, "{bytes}");
        fixture.empty_cache();
        assert_eq!(fixture.reserved_bytes(), reserved_mib * MIB, "a graph keeps its memory");
        drop(graph);
        fixture.empty_cache();
        assert_eq!(fixture.stats().segment.all.current, 1, "the result's segment: {bytes}");
        fixture.give(result);
        fixture.empty_cache();
        assert_eq!((fixture.reserved_bytes(), fixture.engine().private_pool_count()), (0, 0));
        fixture.check();
    }
}

#[test]
fn an_expandable_graph_adds_no_segment() {
    let fixture = Fixture::new(ROOMY, "expandable_segments:True");
    let (stream, pool) = (fixture.stream(), PoolId::next_capture());
    let scope = fixture.capture(stream, pool);
    fixture.give(fixture.take_on(MIB, stream));
    fixture.end_capture(stream);
    let graph = scope.finish();
    assert_eq!(fixture.stats().segment.all.current, 0);
    assert_eq!(fixture.reserved_bytes(), 2 * MIB);
    drop(graph);
    fixture.empty_cache();
    assert_eq!(fixture.reserved_bytes(), 0);
    fixture.check();
}

// Two graphs with a pool each need 2 MiB more than two graphs that share a pool.
#[test]
fn graphs_that_share_a_pool_share_its_memory() {
    for conf in BOTH {
        let reserved = [false, true].map(|shared| {
            let fixture = Fixture::new(ROOMY, conf);
            let stream = fixture.stream();
            let first = PoolId::next_capture();
            let second = if shared { first } else { PoolId::next_capture() };
            let graphs = [first, second].map(|pool| {
                let scope = fixture.capture(stream, pool);
                fixture.give(fixture.take_on(KIB, stream));
                fixture.end_capture(stream);
                scope.finish()
            });
            let bytes = fixture.reserved_bytes();
            drop(graphs);
            fixture.empty_cache();
            assert_eq!(fixture.reserved_bytes(), 0);
            fixture.check();
            bytes
        });
        assert_eq!(reserved[0] - reserved[1], 2 * MIB);
    }
}

#[test]
fn a_capture_that_fails_leaves_nothing_behind() {
    for fixture in fixtures(ROOMY) {
        let (stream, pool) = (fixture.stream(), PoolId::next_capture());
        let attempt = || -> Result<(), PoolError> {
            let _scope = fixture.capture(stream, pool);
            let block = fixture.take_on(MIB, stream);
            fixture.device.invalidate_capture(stream);
            fixture.give(block);
            // A framework that fails here drops its scope when it returns the error.
            Err(PoolError::IsDefault)
        };
        assert!(attempt().is_err());
        assert!(Capture::end(&*fixture.device, stream).is_err(), "the capture was broken");
        assert_eq!(fixture.private_pools().pool_users(pool), Some(0));
        fixture.empty_cache();
        assert_eq!((fixture.reserved_bytes(), fixture.engine().private_pool_count()), (0, 0));
        let again = PoolId::next_capture();
        let scope = fixture.capture(stream, again);
        fixture.give(fixture.take_on(MIB, stream));
        fixture.end_capture(stream);
        drop(scope);
        fixture.check();
    }
}

#[test]
fn a_capture_in_the_same_pool_can_be_repeated() {
    for fixture in fixtures(ROOMY) {
        let stream = fixture.stream();
        let pool = PoolId::next_user();
        fixture.private_pools().create_pool(pool, Default::default()).unwrap();
        let addresses: Vec<_> = (0..3)
            .map(|_| {
                let scope = fixture.capture(stream, pool);
                let block = fixture.take_on(3 * MIB, stream);
                let address = block.address();
                fixture.give(block);
                fixture.end_capture(stream);
                drop(scope);
                address
            })
            .collect();
        assert!(addresses.windows(2).all(|pair| pair[0] == pair[1]), "{addresses:?}");
        fixture.private_pools().release_pool(pool).unwrap();
        fixture.private_pools().empty_pool(pool).unwrap();
        assert_eq!(fixture.engine().private_pool_count(), 0);
        fixture.check();
    }
}

#[test]
fn only_streams_of_the_capture_are_routed_to_its_pool() {
    let fixture = Fixture::new(ROOMY, "");
    let (stream, side, other) = (fixture.stream(), fixture.stream(), fixture.stream());
    let pool = PoolId::next_capture();
    let scope = fixture.capture(stream, pool);
    let forked = {
        fixture.join(stream, side);
        fixture.take_on(KIB, side)
    };
    let inside = fixture.take_on(KIB, stream);
    let outside = fixture.take_on(KIB, other);
    assert_eq!(fixture.private_pools().live_addresses(pool).unwrap().len(), 2);
    fixture.join(side, stream);
    fixture.end_capture(stream);
    let _graph = scope.finish();
    [forked, inside, outside].into_iter().for_each(|block| fixture.give(block));
    fixture.check();
}

// A request in a capture must not query events, because that would break the capture. Uses recorded in
// the capture end with it, and the next request outside frees the block.
#[test]
fn a_block_used_by_another_stream_in_a_capture_is_free_after_it() {
    for fixture in fixtures(ROOMY) {
        let (stream, side) = (fixture.stream(), fixture.stream());
        let (before, elsewhere) = (fixture.take_on(3 * MIB, stream), fixture.stream());
        fixture.record(&before, elsewhere);
        fixture.give(before);
        let pool = PoolId::next_capture();
        let scope = fixture.capture(stream, pool);
        fixture.join(stream, side);
        let block = fixture.take_on(4 * MIB, stream);
        let address = block.address();
        fixture.record(&block, side);
        fixture.give(block);
        let queries = fixture.device.calls("query_event");
        let second = fixture.take_on(4 * MIB, stream);
        assert_ne!(second.address(), address, "its other use is not joined");
        assert_eq!(fixture.device.calls("query_event"), queries, "no event was queried");
        assert_eq!(fixture.stats().active_bytes.all.current, 11 << 20, "two wait");
        fixture.join(side, stream);
        fixture.end_capture(stream);
        let graph = scope.finish();
        fixture.give(second);
        fixture.give(fixture.take_on(512, stream));
        assert_eq!(fixture.private_pools().live_addresses(pool).unwrap(), [0; 0]);
        let waiting = fixture.stats().active_bytes.all.current;
        assert_eq!(waiting, 3 << 20, "only the use from before the capture is waited for");
        fixture.device.complete_all();
        fixture.give(fixture.take_on(512, stream));
        assert_eq!(fixture.stats().active.all.current, 0);
        drop(graph);
        fixture.empty_cache();
        assert_eq!(fixture.reserved_bytes(), 0);
        fixture.check();
    }
}

// With reuse enabled, a block is reused inside the capture after its other stream was joined.
#[test]
fn reuse_in_a_capture_waits_for_the_join_of_a_stream() {
    for conf in both_with_reuse() {
        let fixture = Fixture::new(ROOMY, &conf);
        let (stream, side) = (fixture.stream(), fixture.stream());
        let scope = fixture.capture(stream, PoolId::next_capture());
        fixture.join(stream, side);
        let block = fixture.take_on(8 * MIB, stream);
        let address = block.address();
        fixture.work(&block, side);
        fixture.give(block);
        let early = fixture.take_on(8 * MIB, stream);
        assert_ne!(early.address(), address, "{conf}");
        fixture.join(side, stream);
        let late = fixture.take_on(8 * MIB, stream);
        assert_eq!(late.address(), address, "{conf}");
        fixture.end_capture(stream);
        drop(scope);
        [early, late].into_iter().for_each(|block| fixture.give(block));
        fixture.check();
    }
}

#[test]
fn reuse_in_a_capture_waits_for_the_join_of_all_streams() {
    for conf in both_with_reuse() {
        let fixture = Fixture::new(ROOMY, &conf);
        let stream = fixture.stream();
        let sides = [fixture.stream(), fixture.stream(), fixture.stream()];
        let scope = fixture.capture(stream, PoolId::next_capture());
        sides.into_iter().for_each(|side| fixture.join(stream, side));
        let block = fixture.take_on(8 * MIB, stream);
        let address = block.address();
        sides.into_iter().for_each(|side| fixture.work(&block, side));
        fixture.give(block);
        let mut held = Vec::new();
        for (joined, side) in sides.into_iter().enumerate() {
            held.push(fixture.take_on(8 * MIB, stream));
            assert_ne!(held[joined].address(), address, "{joined} of 3 joined");
            fixture.join(side, stream);
        }
        held.push(fixture.take_on(8 * MIB, stream));
        assert_eq!(held[3].address(), address);
        fixture.end_capture(stream);
        drop(scope);
        held.into_iter().for_each(|block| fixture.give(block));
        fixture.check();
    }
}

// A block whose free was deferred in one graph is free for the next graph of the same pool.
#[test]
fn what_one_graph_deferred_the_next_one_reuses() {
    for conf in both_with_reuse() {
        let fixture = Fixture::new(ROOMY, &conf);
        let (stream, side) = (fixture.stream(), fixture.stream());
        let pool = PoolId::next_capture();
        let first = fixture.capture(stream, pool);
        fixture.join(stream, side);
        let block = fixture.take_on(8 * MIB, stream);
        let address = block.address();
        fixture.work(&block, side);
        fixture.give(block);
        fixture.join(side, stream);
        fixture.end_capture(stream);
        let graph = first.finish();
        let second = fixture.capture(stream, pool);
        let again = fixture.take_on(8 * MIB, stream);
        assert_eq!(again.address(), address);
        fixture.end_capture(stream);
        drop(second);
        drop(graph);
        fixture.give(again);
        fixture.check();
    }
}

// A use from before the capture is not part of the graph. The block must wait until that work has
// finished.
#[test]
fn a_use_from_before_the_capture_is_waited_for() {
    for conf in both_with_reuse() {
        let fixture = Fixture::new(ROOMY, &conf);
        let (stream, side) = (fixture.stream(), fixture.stream());
        let pool = PoolId::next_user();
        fixture.private_pools().create_pool(pool, Default::default()).unwrap();
        let request = Request::new(8 * MIB, stream);
        let block = fixture.allocate(request.in_pool(pool)).unwrap();
        let address = block.address();
        fixture.record(&block, side);
        let scope = fixture.capture(stream, pool);
        fixture.join(stream, side);
        fixture.work(&block, side);
        fixture.give(block);
        fixture.join(side, stream);
        let inside = fixture.take_on(8 * MIB, stream);
        assert_ne!(inside.address(), address);
        fixture.end_capture(stream);
        drop(scope);
        fixture.give(inside);
        let waiting = fixture.take_in(pool, 16 * MIB, stream);
        assert_eq!(fixture.stats().active_bytes.all.current, 24 << 20, "it still waits");
        fixture.give(waiting);
        fixture.device.complete_all();
        let free = fixture.allocate(request.in_pool(pool)).unwrap();
        assert_eq!(fixture.stats().active.all.current, 1);
        fixture.give(free);
        fixture.check();
    }
}

#[test]
fn out_of_memory_in_a_capture_is_an_error_that_releases_nothing() {
    for fixture in fixtures(1 << 30) {
        let stream = fixture.stream();
        fixture.give(fixture.take_on(900 * MIB, stream));
        let scope = fixture.capture(stream, PoolId::next_capture());
        fixture.fail(4 << 40, stream);
        fixture.fail(500 * MIB, stream);
        assert!(fixture.reserved_bytes() >= 900 * MIB, "the cache is as it was");
        fixture.end_capture(stream);
        drop(scope);
        fixture.give(fixture.take_on(1000 * MIB, stream));
        fixture.check();
    }
}

#[test]
fn emptying_the_cache_in_a_capture_does_nothing() {
    let fixture = Fixture::new(ROOMY, "");
    let stream = fixture.stream();
    fixture.give(fixture.take_on(30 * MIB, stream));
    let scope = fixture.capture(stream, PoolId::next_capture());
    fixture.empty_cache();
    assert_eq!(fixture.reserved_bytes(), 30 * MIB);
    fixture.end_capture(stream);
    drop(scope);
    fixture.empty_cache();
    assert_eq!(fixture.reserved_bytes(), 0);
}

#[test]
fn a_scope_of_an_unknown_capture_routes_nothing() {
    let fixture = Fixture::new(ROOMY, "");
    let stream = fixture.stream();
    let pool = PoolId::next_capture();
    let filter = ScopeFilter::Capture(u64::MAX);
    let scope = PoolScope::open(fixture.private_pools(), pool, filter).unwrap();
    let block = fixture.take_on(KIB, stream);
    assert_eq!(fixture.private_pools().live_addresses(pool).unwrap(), [0; 0]);
    drop(scope);
    fixture.give(block);
    assert!(matches!(
        fixture.device.capture_status(StreamId(0)),
        Ok(stratalloc::driver::CaptureStatus::None)
    ));
    assert!(fixture.control().private_pools.is_some());
}

#[test]
fn captures_are_announced_to_the_driver_while_any_scope_is_open() {
    for fixture in fixtures(ROOMY) {
        let stream = fixture.stream();
        let of_thread = PoolScope::open(
            fixture.private_pools(),
            PoolId::next_user(),
            ScopeFilter::this_thread(),
        )
        .unwrap();
        assert_eq!(fixture.device.captures_expected(), 1, "a capture may begin inside it");
        let of_capture = fixture.capture(stream, PoolId::next_capture());
        assert_eq!(fixture.device.captures_expected(), 2);
        fixture.end_capture(stream);
        drop(of_capture);
        assert_eq!(fixture.device.captures_expected(), 1);
        drop(of_thread);
        assert_eq!(fixture.device.captures_expected(), 0);
        let refused = fixture.private_pools().close_scope(PoolId::next_user());
        assert!(refused.is_err());
        fixture
            .private_pools()
            .open_scope(PoolId::next_capture(), ScopeFilter::Stream(stream))
            .unwrap();
        assert_eq!(fixture.device.captures_expected(), 1);
        let Fixture { device, allocator } = fixture;
        drop(allocator);
        assert_eq!(device.captures_expected(), 0, "the allocator was dropped with its scope");
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
    assert_eq!(driver.failed_calls(), 1, "what was not announced is not revoked");
}

#[test]
fn an_allocator_that_goes_inside_a_capture_leaves_the_capture_sound() {
    for conf in BOTH {
        let fixture = Fixture::new(ROOMY, conf);
        let (stream, other) = (fixture.stream(), fixture.stream());
        let _held = fixture.take_on(MIB, other);
        let capture = Capture::begin(&*fixture.device, stream).unwrap();
        fixture
            .private_pools()
            .open_scope(PoolId::next_capture(), ScopeFilter::Capture(capture))
            .unwrap();
        let Fixture { device, allocator } = fixture;
        drop(allocator);
        assert_eq!(device.calls("synchronize_device"), 0, "{conf}");
        Capture::end(&*device, stream).expect("the capture is intact");
    }
}

/// How a request reaches a pool while its stream is captured: by the filter of a scope, or by the pool's id.
#[derive(Clone, Copy, Debug)]
enum Way {
    Stream,
    Thread,
    Function,
    /// No scope: the request specifies the pool.
    Named,
}

const WAYS: [Way; 4] = [Way::Stream, Way::Thread, Way::Function, Way::Named];

impl Way {
    fn open(self, fixture: &Fixture, pool: PoolId, stream: StreamId) -> Option<PoolScope<'_>> {
        let filter = match self {
            Self::Stream => ScopeFilter::Stream(stream),
            Self::Thread => ScopeFilter::this_thread(),
            Self::Function => ScopeFilter::Where(Arc::new(move |other| other == stream)),
            Self::Named => return None,
        };
        Some(PoolScope::open(fixture.private_pools(), pool, filter).expect("none is open"))
    }

    fn take(self, fixture: &Fixture, pool: PoolId, bytes: u64, stream: StreamId) -> Option<u64> {
        let request = Request::new(bytes, stream);
        let made = match self {
            Self::Named => fixture.allocate(request.in_pool(pool)),
            _ => fixture.allocate(request),
        };
        let block = made.ok()?;
        let address = block.address();
        fixture.give(block);
        Some(address)
    }
}

#[test]
fn a_graphs_memory_stays_whatever_led_its_requests_to_the_pool() {
    for (conf, way) in BOTH.into_iter().flat_map(|conf| WAYS.map(|way| (conf, way))) {
        let fixture = Fixture::new(64 * MIB, conf);
        let (stream, pool) = (fixture.stream(), PoolId::next_user());
        let options = PoolOptions { use_on_oom: true, ..PoolOptions::default() };
        fixture.private_pools().create_pool(pool, options).unwrap();
        let live = fixture.take_on(10 * MIB, stream);
        let scope = way.open(&fixture, pool, stream);
        Capture::begin(&*fixture.device, stream).unwrap();
        let graphs = way.take(&fixture, pool, 40 * MIB, stream).expect("there is room");
        fixture.end_capture(stream);
        drop(scope);
        let layout = fixture.layout_of(pool);
        fixture.fail(30 * MIB, stream);
        let scope = way.open(&fixture, pool, stream);
        assert_eq!(way.take(&fixture, pool, 55 * MIB, stream), None, "{conf} {way:?}");
        drop(scope);
        fixture.empty_cache();
        assert_eq!(fixture.layout_of(pool), layout, "{conf} {way:?}: the graph writes to it");
        let scope = way.open(&fixture, pool, stream);
        assert_eq!(way.take(&fixture, pool, 40 * MIB, stream), Some(graphs), "{conf} {way:?}");
        drop(scope);
        fixture.private_pools().release_pool(pool).unwrap();
        fixture.give(live);
        fixture.empty_cache();
        assert_eq!(fixture.reserved_bytes(), 0, "{conf} {way:?}");
        fixture.check();
    }
}

/// Four threads capture graphs, each in a pool with `use_on_oom`. They also cause memory pressure
/// outside of the captures.
#[test]
fn no_thread_gets_the_memory_of_anothers_graph() {
    for conf in BOTH {
        let fixture = Fixture::new(96 * MIB, conf);
        // The memory that graphs write to: ranges, each with its pool.
        let graphs: Mutex<Vec<(PoolId, u64, u64)>> = Mutex::default();
        let run = |number: usize| {
            let stream = fixture.stream();
            for round in 0..60 {
                let way = WAYS[(number + round) % WAYS.len()];
                let pool = PoolId::next_user();
                let options = PoolOptions { use_on_oom: true, ..PoolOptions::default() };
                fixture.private_pools().create_pool(pool, options).unwrap();
                let scope = way.open(&fixture, pool, stream);
                Capture::begin(&*fixture.device, stream).unwrap();
                let bytes = (12 + round as u64 % 3) * MIB;
                let request = Request::new(bytes, stream);
                let made = match way {
                    Way::Named => fixture.allocate(request.in_pool(pool)),
                    _ => fixture.allocate(request),
                };
                if let Ok(block) = made {
                    graphs.lock().unwrap().push((pool, block.address(), bytes));
                    fixture.give(block);
                }
                fixture.end_capture(stream);
                drop(scope);
                if let Ok(block) = fixture.try_allocate(11 * MIB, stream) {
                    let (start, end) = (block.address(), block.address() + 11 * MIB);
                    let taken = graphs
                        .lock()
                        .unwrap()
                        .iter()
                        .any(|(_, at, bytes)| *at < end && start < at + bytes);
                    assert!(!taken, "{conf} {way:?}: {start:#x} is a graph's");
                    fixture.give(block);
                }
                graphs.lock().unwrap().retain(|(of, _, _)| *of != pool);
                fixture.private_pools().release_pool(pool).unwrap();
            }
        };
        std::thread::scope(|s| (0..4).for_each(|number| drop(s.spawn(move || run(number)))));
        fixture.empty_cache();
        assert_eq!((fixture.reserved_bytes(), fixture.engine().private_pool_count()), (0, 0));
        fixture.check();
    }
}

/// As in PyTorch, the capture begins before its scope opens. In between, another stream allocates.
#[test]
fn a_capture_without_a_scope_yet_keeps_only_its_own_streams_memory() {
    for conf in BOTH {
        let fixture = Fixture::new(64 * MIB, conf);
        let [captured, idle, asking] = [(); 3].map(|()| fixture.stream());
        let [mine, others] = [(captured, 20 * MIB), (idle, 30 * MIB)]
            .map(|(stream, bytes)| fixture.take_on(bytes, stream));
        fixture.give(mine);
        fixture.give(others);
        let begun = std::thread::scope(|s| {
            s.spawn(|| Capture::begin(&*fixture.device, captured).unwrap()).join().unwrap()
        });
        fixture.give(fixture.take_on(34 * MIB, asking));
        fixture.empty_cache();
        assert_eq!(fixture.reserved_bytes(), 20 * MIB, "{conf}: what the captured stream may use");
        let pool = PoolId::next_capture();
        let scope = PoolScope::open(fixture.private_pools(), pool, ScopeFilter::Capture(begun))
            .expect("it is closed");
        fixture.give(fixture.take_on(MIB, captured));
        on_new_thread(|| fixture.end_capture(captured));
        drop(scope);
        fixture.empty_cache();
        assert_eq!(fixture.reserved_bytes(), 0, "{conf}");
        fixture.check();
    }
}
