//! Interference with private pools: captures of other threads, captures without a scope, checkpoints
//! that were modified, segment allocators that call back.

use stratalloc::allocator::{PoolCheckpoint, PoolHold};

use crate::common::bed::Built;
use crate::common::prelude::*;
use crate::common::racing::{Racing, capture_before_next_event, end_capture, racing};

/// Starts a capture of `stream` in a pool, on a new thread.
fn capture_elsewhere(bed: &Bed, stream: StreamId) -> PoolId {
    elsewhere(|| {
        let pool = PoolId::next_capture();
        let capture = Capture::begin(&*bed.device, stream).expect("it is not captured");
        let opened = bed.private_pools().open_scope(pool, ScopeFilter::Capture(capture));
        opened.expect("the pool is new");
        pool
    })
}

#[test]
fn a_checkpoint_between_two_blocks_is_refused() {
    let bed = Bed::with(1 << 30, Settings::default());
    let pool = bed.pool();
    let block = bed.take_in(pool.id(), 4096, HOME);
    let mut hostile = bed.checkpoints().checkpoint(pool.id()).unwrap();
    bed.give(block);
    let segment = &mut hostile.segments[0];
    segment.blocks.truncate(1);
    segment.address += 1;
    segment.blocks[0].address += 1;
    segment.size_bytes = segment.blocks[0].size_bytes;
    let answer = bed.checkpoints().restore(&hostile);
    assert!(matches!(answer, Err(PoolError::NotInPool { .. })), "{answer:?}");
    bed.check();
}

#[test]
fn a_checkpoint_that_is_refused_changes_nothing_about_what_pressure_may_take() {
    let bed = Bed::with(64 * MIB, Settings::default());
    let pool = bed.pool();
    let block = bed.take_in(pool.id(), 30 * MIB, HOME);
    let segments = bed.layout_of(pool.id());
    let mut hostile = PoolCheckpoint { pool: pool.id(), segments };
    hostile.segments[0].address += 1 << 40;
    bed.checkpoints().restore(&hostile).unwrap_err();
    bed.give(block);
    bed.give(bed.take_in(pool.id(), 50 * MIB, HOME));
}

#[test]
fn oversize_blocks_of_a_checkpoint_stay() {
    let settings = Settings { max_split_bytes: Some(20 * MIB), ..Settings::default() };
    let bed = Bed::with(100 * MIB, settings);
    let pool = bed.pool();
    let block = bed.take_in(pool.id(), 60 * MIB, HOME);
    let checkpoint = bed.checkpoints().checkpoint(pool.id()).unwrap();
    bed.give(block);
    let large = bed.allocate(Request::new(90 * MIB, HOME).in_pool(pool.id()));
    assert!(large.is_err(), "what the checkpoint needs was released");
    assert_eq!(bed.checkpoints().restore(&checkpoint).unwrap().live.len(), 1);
}

#[test]
fn a_pool_that_a_captured_stream_used_keeps_its_memory() {
    let bed = Bed::with(100 * MIB, Settings::default());
    let pool = bed.pool();
    let capture = Capture::begin(&*bed.device, SIDE).unwrap();
    let graph =
        PoolScope::open(bed.private_pools(), PoolId::next_capture(), ScopeFilter::Capture(capture))
            .unwrap();
    let inner = pool.enter().unwrap();
    let block = bed.take_on(60 * MIB, SIDE);
    let address = block.address();
    bed.give(block);
    drop(inner);
    bed.end_capture(SIDE);
    let _hold: PoolHold<'_> = graph.finish();
    // Each launch of the graph writes to this address.
    bed.allocate(Request::new(90 * MIB, HOME).in_pool(pool.id())).unwrap_err();
    let layout = bed.layout_of(pool.id());
    assert!(layout.iter().any(|segment| segment.address == address), "{layout:?}");
}

#[test]
fn a_use_announced_while_somebody_else_captures_is_waited_for() {
    let bed = Bed::with(1 << 30, Settings::default());
    let pool = capture_elsewhere(&bed, FAR);
    let block = bed.take(4096);
    let address = block.address();
    bed.record(&block, SIDE);
    bed.give(block);
    bed.end_capture(FAR);
    bed.private_pools().close_scope(pool).unwrap();
    let next = bed.take(4096);
    assert_ne!(next.address(), address, "the work on SIDE has not finished");
}

#[test]
fn pressure_elsewhere_leaves_a_captured_stream_alone() {
    let settings = Settings { expandable_segments: true, ..Settings::default() };
    let bed = Bed::with(100 * MIB, settings);
    for stream in [SIDE, FAR] {
        bed.give(bed.take_on(40 * MIB, stream));
    }
    let _pool = capture_elsewhere(&bed, SIDE);
    bed.give(bed.take(50 * MIB));
}

#[test]
fn a_scope_may_close_before_the_capture_of_its_stream_ends() {
    for reuse in [false, true] {
        let settings = Settings { graph_capture_record_stream_reuse: reuse, ..Settings::default() };
        let bed = Bed::with(1 << 30, settings);
        let block = bed.take(4096);
        let address = block.address();
        bed.record(&block, SIDE);
        let pool = capture_elsewhere(&bed, SIDE);
        bed.give(block);
        bed.private_pools().close_scope(pool).unwrap();
        for _ in 0..2 {
            let other = bed.take(4096);
            assert_ne!(other.address(), address);
            bed.give(other);
        }
        bed.end_capture(SIDE);
        for _ in 0..2 {
            bed.give(bed.take(4096));
        }
        bed.empty_cache();
        assert!(bed.layout().is_empty(), "{:?}", bed.layout());
    }
}

#[test]
fn a_capture_that_nobody_told_of_spoils_nothing() {
    let bed = Bed::with(1 << 30, Settings::default());
    let block = bed.take(4096);
    bed.record(&block, SIDE);
    elsewhere(|| Capture::begin(&*bed.device, SIDE)).unwrap();
    bed.give(block);
    for _ in 0..2 {
        bed.give(bed.take(4096));
    }
    bed.end_capture(SIDE);
    for _ in 0..2 {
        bed.give(bed.take(4096));
    }
    bed.empty_cache();
    assert!(bed.layout().is_empty(), "{:?}", bed.layout());
}

#[test]
fn a_pool_that_only_reserved_addresses_goes_too() {
    let settings = Settings { expandable_segments: true, ..Settings::default() };
    let bed = Bed::with(64 * MIB, settings);
    let kept = bed.take(60 * MIB);
    let pool = bed.pool();
    bed.allocate(Request::new(20 * MIB, SIDE).in_pool(pool.id())).unwrap_err();
    drop(pool);
    bed.empty_cache();
    assert_eq!(bed.engine().private_pool_count(), 0);
    bed.give(kept);
}

/// Panics instead of allocating.
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
    let bed = Bed::with(64 * MIB, Settings::default());
    bed.caching().set_memory_fraction(0.5).unwrap();
    let options = PoolOptions { allocator: Some(Arc::new(Rude)), ..PoolOptions::default() };
    let pool = MemoryPool::new(bed.private_pools(), options).unwrap();
    let request = Request::new(20 * MIB, HOME);
    catch_unwind(AssertUnwindSafe(|| bed.allocate(request.in_pool(pool.id())))).unwrap_err();
    bed.give(bed.take(30 * MIB));
    drop(pool);
    assert_eq!(bed.engine().private_pool_count(), 0);
}

#[test]
fn nothing_is_asked_of_the_device_while_this_thread_captures() {
    let bed = Bed::with(1 << 30, Settings::default());
    let block = bed.take(4096);
    bed.record(&block, FAR);
    bed.give(block);
    let capture = Capture::begin(&*bed.device, SIDE).unwrap();
    let scope =
        PoolScope::open(bed.private_pools(), PoolId::next_capture(), ScopeFilter::Capture(capture))
            .unwrap();
    bed.cross_stream().process_events().unwrap();
    assert_eq!(bed.device.calls("query_event"), 0);
    drop(scope);
}

/// An event that is recorded inside a capture never completes.
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
fn a_driver_that_cannot_tell_of_a_capture_may_hide_one() {
    let bed = BedOn::<Faulty<Arc<Sim>>>::new(ROOMY, "");
    let sim = bed.device.inner();
    let side = bed.stream();
    let block = bed.take(MIB);
    bed.record(&block, side);
    elsewhere(|| Capture::begin(&**sim, side)).unwrap();
    bed.device.fail_call(0, Some("capture_status"));
    bed.give(block);
    bed.device.disarm();
    elsewhere(|| Capture::end(&**sim, side)).unwrap();
    bed.give(bed.take(MIB));
    sim.complete_all();
    bed.give(bed.take(MIB));
    assert_eq!(bed.stats().active.all.current, 0);
}
