//! Events that must not disturb private pools: captures of other threads, captures without a scope,
//! modified checkpoints, and segment allocators that call back.

use stratalloc::allocator::{PoolCheckpoint, PoolHold};

use crate::common::fixture::Built;
use crate::common::prelude::*;
use crate::common::racing::{Racing, capture_before_next_event, end_capture, racing};

/// Starts a capture of `stream` in a pool, on a new thread.
fn capture_elsewhere(fixture: &Fixture, stream: StreamId) -> PoolId {
    on_new_thread(|| {
        let pool = PoolId::next_capture();
        let capture = Capture::begin(&*fixture.device, stream).expect("it is not captured");
        let opened = fixture.private_pools().open_scope(pool, ScopeFilter::Capture(capture));
        opened.expect("the pool is new");
        pool
    })
}

#[test]
fn a_checkpoint_between_two_blocks_is_refused() {
    let fixture = Fixture::with(1 << 30, Settings::default());
    let pool = fixture.pool();
    let block = fixture.take_in(pool.id(), 4096, HOME);
    let mut hostile = fixture.checkpoints().checkpoint(pool.id()).unwrap();
    fixture.give(block);
    let segment = &mut hostile.segments[0];
    segment.blocks.truncate(1);
    segment.address += 1;
    segment.blocks[0].address += 1;
    segment.size_bytes = segment.blocks[0].size_bytes;
    let answer = fixture.checkpoints().restore(&hostile);
    assert!(matches!(answer, Err(PoolError::NotInPool { .. })), "{answer:?}");
    fixture.check();
}

#[test]
fn a_checkpoint_that_is_refused_changes_nothing_about_what_pressure_may_take() {
    let fixture = Fixture::with(64 * MIB, Settings::default());
    let pool = fixture.pool();
    let block = fixture.take_in(pool.id(), 30 * MIB, HOME);
    let segments = fixture.layout_of(pool.id());
    let mut hostile = PoolCheckpoint { pool: pool.id(), segments };
    hostile.segments[0].address += 1 << 40;
    fixture.checkpoints().restore(&hostile).unwrap_err();
    fixture.give(block);
    fixture.give(fixture.take_in(pool.id(), 50 * MIB, HOME));
}

#[test]
fn oversize_blocks_of_a_checkpoint_stay() {
    let settings = Settings { max_split_bytes: Some(20 * MIB), ..Settings::default() };
    let fixture = Fixture::with(100 * MIB, settings);
    let pool = fixture.pool();
    let block = fixture.take_in(pool.id(), 60 * MIB, HOME);
    let checkpoint = fixture.checkpoints().checkpoint(pool.id()).unwrap();
    fixture.give(block);
    let large = fixture.allocate(Request::new(90 * MIB, HOME).in_pool(pool.id()));
    assert!(large.is_err(), "what the checkpoint needs was released");
    assert_eq!(fixture.checkpoints().restore(&checkpoint).unwrap().live.len(), 1);
}

#[test]
fn a_pool_that_a_captured_stream_used_keeps_its_memory() {
    let fixture = Fixture::with(100 * MIB, Settings::default());
    let pool = fixture.pool();
    let capture = Capture::begin(&*fixture.device, SIDE).unwrap();
    let graph = PoolScope::open(
        fixture.private_pools(),
        PoolId::next_capture(),
        ScopeFilter::Capture(capture),
    )
    .unwrap();
    let inner = pool.enter().unwrap();
    let block = fixture.take_on(60 * MIB, SIDE);
    let address = block.address();
    fixture.give(block);
    drop(inner);
    fixture.end_capture(SIDE);
    let _hold: PoolHold<'_> = graph.finish();
    // Each launch of the graph writes to this address.
    fixture.allocate(Request::new(90 * MIB, HOME).in_pool(pool.id())).unwrap_err();
    let layout = fixture.layout_of(pool.id());
    assert!(layout.iter().any(|segment| segment.address == address), "{layout:?}");
}

#[test]
fn a_use_recorded_during_another_threads_capture_is_waited_for() {
    let fixture = Fixture::with(1 << 30, Settings::default());
    let pool = capture_elsewhere(&fixture, FAR);
    let block = fixture.take(4096);
    let address = block.address();
    fixture.record(&block, SIDE);
    fixture.give(block);
    fixture.end_capture(FAR);
    fixture.private_pools().close_scope(pool).unwrap();
    let next = fixture.take(4096);
    assert_ne!(next.address(), address, "the work on SIDE has not finished");
}

#[test]
fn pressure_elsewhere_leaves_a_captured_stream_alone() {
    let settings = Settings { expandable_segments: true, ..Settings::default() };
    let fixture = Fixture::with(100 * MIB, settings);
    for stream in [SIDE, FAR] {
        fixture.give(fixture.take_on(40 * MIB, stream));
    }
    let _pool = capture_elsewhere(&fixture, SIDE);
    fixture.give(fixture.take(50 * MIB));
}

#[test]
fn a_scope_may_close_before_the_capture_of_its_stream_ends() {
    for reuse in [false, true] {
        let settings = Settings { graph_capture_record_stream_reuse: reuse, ..Settings::default() };
        let fixture = Fixture::with(1 << 30, settings);
        let block = fixture.take(4096);
        let address = block.address();
        fixture.record(&block, SIDE);
        let pool = capture_elsewhere(&fixture, SIDE);
        fixture.give(block);
        fixture.private_pools().close_scope(pool).unwrap();
        for _ in 0..2 {
            let other = fixture.take(4096);
            assert_ne!(other.address(), address);
            fixture.give(other);
        }
        fixture.end_capture(SIDE);
        for _ in 0..2 {
            fixture.give(fixture.take(4096));
        }
        fixture.empty_cache();
        assert!(fixture.layout().is_empty(), "{:?}", fixture.layout());
    }
}

#[test]
fn an_unannounced_capture_breaks_nothing() {
    let fixture = Fixture::with(1 << 30, Settings::default());
    let block = fixture.take(4096);
    fixture.record(&block, SIDE);
    on_new_thread(|| Capture::begin(&*fixture.device, SIDE)).unwrap();
    fixture.give(block);
    for _ in 0..2 {
        fixture.give(fixture.take(4096));
    }
    fixture.end_capture(SIDE);
    for _ in 0..2 {
        fixture.give(fixture.take(4096));
    }
    fixture.empty_cache();
    assert!(fixture.layout().is_empty(), "{:?}", fixture.layout());
}

#[test]
fn a_pool_that_only_reserved_addresses_goes_too() {
    let settings = Settings { expandable_segments: true, ..Settings::default() };
    let fixture = Fixture::with(64 * MIB, settings);
    let kept = fixture.take(60 * MIB);
    let pool = fixture.pool();
    fixture.allocate(Request::new(20 * MIB, SIDE).in_pool(pool.id())).unwrap_err();
    drop(pool);
    fixture.empty_cache();
    assert_eq!(fixture.engine().private_pool_count(), 0);
    fixture.give(kept);
}

/// A segment allocator that panics instead of allocating.
#[derive(Debug)]
struct Rude;

impl SegmentAllocator for Rude {
    fn allocate(&self, _: u64, _: StreamId) -> Option<u64> {
        panic!("rude")
    }

    fn free(&self, _: u64, _: u64, _: StreamId) {}
}

#[test]
fn an_allocator_that_panics_leaves_nothing_behind() {
    let fixture = Fixture::with(64 * MIB, Settings::default());
    fixture.caching().set_memory_fraction(0.5).unwrap();
    let options = PoolOptions { allocator: Some(Arc::new(Rude)), ..PoolOptions::default() };
    let pool = MemoryPool::new(fixture.private_pools(), options).unwrap();
    let request = Request::new(20 * MIB, HOME);
    catch_unwind(AssertUnwindSafe(|| fixture.allocate(request.in_pool(pool.id())))).unwrap_err();
    fixture.give(fixture.take(30 * MIB));
    drop(pool);
    assert_eq!(fixture.engine().private_pool_count(), 0);
}

#[test]
fn nothing_is_asked_of_the_device_while_this_thread_captures() {
    let fixture = Fixture::with(1 << 30, Settings::default());
    let block = fixture.take(4096);
    fixture.record(&block, FAR);
    fixture.give(block);
    let capture = Capture::begin(&*fixture.device, SIDE).unwrap();
    let scope = PoolScope::open(
        fixture.private_pools(),
        PoolId::next_capture(),
        ScopeFilter::Capture(capture),
    )
    .unwrap();
    fixture.cross_stream().process_events().unwrap();
    assert_eq!(fixture.device.calls("query_event"), 0);
    drop(scope);
}

/// The capture begins while a free records an event. An event that is recorded inside a capture never
/// completes.
#[test]
fn a_capture_that_begins_while_a_block_is_freed_keeps_it_until_its_end() {
    let device = racing(1 << 30);
    let own = Strategy::built(&config(""), Arc::<Racing>::clone(&device));
    let side = device.inner().create_stream().unwrap();
    let block = own.take(MIB);
    own.record(&block, side);
    capture_before_next_event(&device, side);
    own.give(block);
    end_capture(&device, side);
    own.cross_stream().process_events().unwrap();
    own.give(own.take(MIB));
    device.inner().complete_all();
    own.give(own.take(MIB));
    assert_eq!(own.stats().active.all.current, 0);
    own.engine().unwrap().check().unwrap();
}

#[test]
fn a_driver_that_cannot_report_captures_may_hide_one() {
    let fixture = FixtureOn::<Faulty<Arc<Sim>>>::new(ROOMY, "");
    let sim = fixture.device.inner();
    let side = fixture.stream();
    let block = fixture.take(MIB);
    fixture.record(&block, side);
    on_new_thread(|| Capture::begin(&**sim, side)).unwrap();
    fixture.device.fail_call(0, Some("capture_status"));
    fixture.give(block);
    fixture.device.disarm();
    on_new_thread(|| Capture::end(&**sim, side)).unwrap();
    fixture.give(fixture.take(MIB));
    sim.complete_all();
    fixture.give(fixture.take(MIB));
    assert_eq!(fixture.stats().active.all.current, 0);
}
