//! Many streams, scopes and pools: the results equal those of a plain search. That the cost does not grow
//! with their number is checked by the benchmark of instructions.

use stratalloc::allocator::TagOptions;

use crate::common::prelude::*;

fn streams(count: u64) -> Vec<StreamId> {
    (0..count).map(|n| StreamId(0x1000 + n * 0x40)).collect()
}

fn pool_of(fixture: &Fixture, address: u64) -> PoolId {
    let layout = fixture.layout();
    let holds = |segment: &&SegmentLayout| {
        (segment.address..segment.address + segment.size_bytes).contains(&address)
    };
    layout.iter().find(holds).expect("every block is in a segment").pool
}

/// Returns true if a filter of these tests accepts a request of this thread.
fn accepts(filter: &ScopeFilter, stream: StreamId) -> bool {
    match filter {
        ScopeFilter::Stream(own) => *own == stream,
        ScopeFilter::Where(accepts) => accepts(stream),
        ScopeFilter::Thread(_) => true,
        ScopeFilter::Capture(_) => false,
    }
}

#[test]
fn the_newest_of_many_scopes_that_accept_a_request_serves_it() {
    let fixture = Fixture::new(1 << 40, "");
    let (mut rng, streams) = (Rng::new(5), streams(40));
    let pools = fixture.private_pools();
    let mut open: Vec<(PoolId, ScopeFilter)> = Vec::new();
    let mut routed = 0;
    for _ in 0..runs(3000) {
        let stream = streams[rng.below(streams.len())];
        match rng.below(5) {
            0 | 1 if open.len() < 60 => {
                let rest = rng.among(0..3);
                let filter = match rng.below(20) {
                    0 => ScopeFilter::this_thread(),
                    1..=3 => ScopeFilter::Where(Arc::new(move |by| by.0 / 0x40 % 16 == rest)),
                    _ => ScopeFilter::Stream(stream),
                };
                let pool = PoolId::next_user();
                pools.open_scope(pool, filter.clone()).unwrap();
                open.push((pool, filter));
            }
            2 if !open.is_empty() => {
                let (pool, _) = open.remove(rng.below(open.len()));
                pools.close_scope(pool).unwrap();
                pools.release_pool(pool).unwrap();
                pools.empty_pool(pool).unwrap();
            }
            _ => {
                let newest = open.iter().rev().find(|(_, filter)| accepts(filter, stream));
                let block = fixture.take_on(512, stream);
                let served_by = pool_of(&fixture, block.address());
                assert_eq!(served_by, newest.map_or(PoolId::DEFAULT, |(pool, _)| *pool));
                routed += usize::from(newest.is_some());
                fixture.give(block);
            }
        }
    }
    assert!(routed > 300, "only {routed} requests were routed");
    assert_eq!(fixture.engine().private_pool_count(), open.len());
}

#[test]
fn a_tag_with_many_scopes_is_served_until_the_last_is_closed() {
    let fixture = Fixture::new(ROOMY, "");
    let pools = fixture.private_pools();
    let tag = TagOptions { name: "weights".to_owned(), ..TagOptions::default() };
    let options = PoolOptions { tag: Some(tag), ..PoolOptions::default() };
    let pool = PoolId::next_user();
    pools.create_pool(pool, options).unwrap();
    let streams = streams(30);
    for stream in &streams {
        pools.open_scope(pool, ScopeFilter::Stream(*stream)).unwrap();
    }
    let is_routed = |stream: StreamId| {
        let block = fixture.take_on(512, stream);
        let is_routed = pool_of(&fixture, block.address()) == pool;
        fixture.give(block);
        is_routed
    };
    // The newest is closed first, here and on another thread, which opened none.
    for (closed, stream) in streams.iter().enumerate().rev() {
        assert!(is_routed(*stream) && is_routed(streams[0]));
        match closed % 2 {
            0 => pools.close_scope(pool).unwrap(),
            _ => on_new_thread(|| pools.close_scope(pool)).unwrap(),
        }
        assert!(!is_routed(*stream));
    }
    assert!(matches!(pools.close_scope(pool), Err(PoolError::ScopeClosed { .. })));
}

/// A live block, its own stream and the other streams that use it.
struct Held {
    block: Allocation,
    stream: StreamId,
    uses: BTreeSet<StreamId>,
}

#[test]
fn blocks_that_many_streams_use_become_free_in_any_order_and_the_usage_is_exact() {
    for fixture in fixtures(ROOMY) {
        let (mut rng, streams) = (Rng::new(8), streams(50));
        let mut live: Vec<Held> = Vec::new();
        let mut draining: Vec<BTreeSet<StreamId>> = Vec::new();
        for _ in 0..runs(3000) {
            match rng.below(8) {
                0 | 1 => {
                    let bytes = if rng.below(4) == 0 { 3 * MIB } else { 512 };
                    let stream = streams[rng.below(streams.len())];
                    let block = fixture.take_on(bytes, stream);
                    live.push(Held { block, stream, uses: BTreeSet::new() });
                }
                2 | 3 if !live.is_empty() => {
                    let at = rng.below(live.len());
                    let Held { block, stream: own, uses } = &mut live[at];
                    for _ in 0..rng.below(40) {
                        let stream = streams[rng.below(streams.len())];
                        fixture.record(block, stream);
                        if stream != *own {
                            uses.insert(stream);
                        }
                    }
                }
                4 | 5 if !live.is_empty() => {
                    let freed = live.swap_remove(rng.below(live.len()));
                    fixture.give(freed.block);
                    draining.push(freed.uses);
                }
                _ => {
                    let stream = streams[rng.below(streams.len())];
                    fixture.device.complete_stream(stream);
                    draining.iter_mut().for_each(|uses| _ = uses.remove(&stream));
                    fixture.process_events();
                }
            }
            draining.retain(|uses| !uses.is_empty());
            let usage = fixture.usage();
            assert_eq!(usage.live_blocks, i64::try_from(live.len()).unwrap());
            let stats = fixture.stats();
            assert_eq!(usage.live_blocks, stats.allocation.all.current);
            let active = usize::try_from(stats.active.all.current).unwrap();
            assert_eq!(active, live.len() + draining.len());
            assert_eq!(usage.allocated_bytes, stats.allocated_bytes.all.current);
            assert_eq!(usage.allocated_peak_bytes, stats.allocated_bytes.all.peak);
        }
        for held in live {
            fixture.give(held.block);
        }
        fixture.device.complete_all();
        fixture.process_events();
        assert_eq!((fixture.stats().active.all.current, fixture.usage().live_blocks), (0, 0));
        fixture.check();
    }
}

#[test]
fn a_block_is_active_until_the_last_of_its_many_streams_has_passed() {
    let fixture = Fixture::new(ROOMY, "");
    let streams = streams(200);
    let block = fixture.take_on(512, StreamId(1));
    streams.iter().for_each(|stream| fixture.record(&block, *stream));
    fixture.give(block);
    let middle = streams.len() / 2;
    let order = (0..middle).flat_map(|n| [middle - 1 - n, middle + n]);
    for (passed, at) in order.enumerate() {
        assert_eq!(fixture.stats().active.all.current, 1, "{passed} streams have passed");
        fixture.device.complete_stream(streams[at]);
        fixture.process_events();
    }
    assert_eq!(fixture.stats().active.all.current, 0);
}

#[test]
fn pools_that_ended_allow_a_switch_and_the_last_one_in_use_refuses_it() {
    let fixture = FixtureOn::<Sim, Switchable>::new(ROOMY, "backend:native");
    let pools = fixture.private_pools();
    let all: Vec<_> = (0..100).map(|_| PoolId::next_user()).collect();
    for pool in &all {
        pools.create_pool(*pool, PoolOptions::default()).unwrap();
    }
    let (kept, others) = all.split_last().unwrap();
    for pool in others {
        pools.release_pool(*pool).unwrap();
        pools.empty_pool(*pool).unwrap();
        assert_eq!(pools.pool_users(*pool), None);
    }
    let refused = fixture.allocator.switch("backend:native");
    assert!(matches!(refused, Err(SwitchError::PoolInUse { pool }) if pool == *kept));
    pools.release_pool(*kept).unwrap();
    fixture.allocator.switch("backend:native").unwrap();
}
