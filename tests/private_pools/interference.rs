//! Private pools where others interfere: captures of other threads, captures nobody told of,
//! checkpoints that were tampered with, allocators that call back.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::thread;

use stratalloc::allocator::{PoolCheckpoint, PoolHold, SegmentAllocator};

use crate::common::prelude::*;
use crate::common::racing::{Racing, capture_before_next_event, end_capture, racing};

const HOME: StreamId = StreamId(0);
const SIDE: StreamId = StreamId(0x40);
const FAR: StreamId = StreamId(0x80);

fn bed(total_bytes: u64, settings: Settings) -> (Arc<Sim>, Arc<Engine>) {
    let sim = Arc::new(Sim::with_bytes(total_bytes));
    let options = EngineOptions { settings, raw_addresses: true, ..EngineOptions::default() };
    let engine = Engine::new(Arc::<Sim>::clone(&sim), &options).expect("the device can");
    (sim, Arc::new(engine))
}

fn take(engine: &Engine, bytes: u64, stream: StreamId) -> Allocation {
    engine.take_on(bytes, stream)
}

fn take_in(engine: &Engine, pool: PoolId, bytes: u64, stream: StreamId) -> Allocation {
    engine.take_in(pool, bytes, stream)
}

/// Starts a capture of `stream` in a pool on a thread of its own.
fn capture_elsewhere(sim: &Arc<Sim>, engine: &Arc<Engine>, stream: StreamId) -> PoolId {
    let (sim, engine) = (Arc::clone(sim), Arc::clone(engine));
    let begin = move || {
        let pool = PoolId::next_capture();
        let capture = Capture::begin(&*sim, stream).expect("it is not captured");
        engine.open_scope(pool, ScopeFilter::Capture(capture)).expect("the pool is new");
        pool
    };
    thread::spawn(begin).join().expect("it begins")
}

#[test]
fn a_checkpoint_between_two_blocks_is_refused() {
    let (_sim, engine) = bed(1 << 30, Settings::default());
    let pools: &dyn PrivatePools = &*engine;
    let pool = MemoryPool::new(pools, PoolOptions::default()).unwrap();
    let block = take_in(&engine, pool.id(), 4096, HOME);
    let mut hostile = engine.checkpoints().checkpoint(pool.id()).unwrap();
    engine.give(block);
    let segment = &mut hostile.segments[0];
    segment.blocks.truncate(1);
    segment.address += 1;
    segment.blocks[0].address += 1;
    segment.size_bytes = segment.blocks[0].size_bytes;
    let answer = engine.checkpoints().restore(&hostile);
    assert!(matches!(answer, Err(PoolError::NotInPool { .. })), "{answer:?}");
    engine.check().unwrap();
}

#[test]
fn a_checkpoint_that_is_refused_changes_nothing_about_what_pressure_may_take() {
    let (_sim, engine) = bed(64 * MIB, Settings::default());
    let pools: &dyn PrivatePools = &*engine;
    let pool = MemoryPool::new(pools, PoolOptions::default()).unwrap();
    let block = take_in(&engine, pool.id(), 30 * MIB, HOME);
    let segments = pools.pool_layout(pool.id()).unwrap();
    let mut hostile = PoolCheckpoint { pool: pool.id(), segments };
    hostile.segments[0].address += 1 << 40;
    engine.checkpoints().restore(&hostile).unwrap_err();
    engine.give(block);
    let large = take_in(&engine, pool.id(), 50 * MIB, HOME);
    engine.give(large);
}

#[test]
fn oversize_blocks_of_a_checkpoint_stay() {
    let settings = Settings { max_split_bytes: Some(20 * MIB), ..Settings::default() };
    let (_sim, engine) = bed(100 * MIB, settings);
    let pools: &dyn PrivatePools = &*engine;
    let pool = MemoryPool::new(pools, PoolOptions::default()).unwrap();
    let block = take_in(&engine, pool.id(), 60 * MIB, HOME);
    let checkpoint = engine.checkpoints().checkpoint(pool.id()).unwrap();
    engine.give(block);
    let large = engine.allocate(Request::new(90 * MIB, HOME).in_pool(pool.id()));
    assert!(large.is_err(), "what the checkpoint needs was released");
    assert_eq!(engine.checkpoints().restore(&checkpoint).unwrap().live.len(), 1);
}

#[test]
fn a_pool_that_a_captured_stream_used_keeps_its_memory() {
    let (sim, engine) = bed(100 * MIB, Settings::default());
    let pools: &dyn PrivatePools = &*engine;
    let pool = MemoryPool::new(pools, PoolOptions::default()).unwrap();
    let capture = Capture::begin(&*sim, SIDE).unwrap();
    let graph =
        PoolScope::open(pools, PoolId::next_capture(), ScopeFilter::Capture(capture)).unwrap();
    let inner = pool.enter().unwrap();
    let block = take(&engine, 60 * MIB, SIDE);
    let address = block.address();
    engine.give(block);
    drop(inner);
    Capture::end(&*sim, SIDE).unwrap();
    let _hold: PoolHold<'_> = graph.finish();
    // The graph writes here whenever it is launched.
    engine.allocate(Request::new(90 * MIB, HOME).in_pool(pool.id())).unwrap_err();
    let layout = pools.pool_layout(pool.id()).unwrap();
    assert!(layout.iter().any(|segment| segment.address == address), "{layout:?}");
}

#[test]
fn a_use_announced_while_somebody_else_captures_is_waited_for() {
    let (sim, engine) = bed(1 << 30, Settings::default());
    let pool = capture_elsewhere(&sim, &engine, FAR);
    let block = take(&engine, 4096, HOME);
    let address = block.address();
    engine.record_stream(&block, SIDE).unwrap();
    engine.give(block);
    Capture::end(&*sim, FAR).unwrap();
    engine.close_scope(pool).unwrap();
    let next = take(&engine, 4096, HOME);
    assert_ne!(next.address(), address, "the work on SIDE has not finished");
}

#[test]
fn pressure_elsewhere_leaves_a_captured_stream_alone() {
    let settings = Settings { expandable_segments: true, ..Settings::default() };
    let (sim, engine) = bed(100 * MIB, settings);
    for stream in [SIDE, FAR] {
        let block = take(&engine, 40 * MIB, stream);
        engine.give(block);
    }
    let _pool = capture_elsewhere(&sim, &engine, SIDE);
    let block = take(&engine, 50 * MIB, HOME);
    engine.give(block);
}

#[test]
fn a_scope_may_close_before_the_capture_of_its_stream_ends() {
    for reuse in [false, true] {
        let settings = Settings { graph_capture_record_stream_reuse: reuse, ..Settings::default() };
        let (sim, engine) = bed(1 << 30, settings);
        let block = take(&engine, 4096, HOME);
        let address = block.address();
        engine.record_stream(&block, SIDE).unwrap();
        let pool = capture_elsewhere(&sim, &engine, SIDE);
        engine.give(block);
        engine.close_scope(pool).unwrap();
        for _ in 0..2 {
            let other = take(&engine, 4096, HOME);
            assert_ne!(other.address(), address);
            engine.give(other);
        }
        Capture::end(&*sim, SIDE).unwrap();
        for _ in 0..2 {
            let other = take(&engine, 4096, HOME);
            engine.give(other);
        }
        engine.empty_cache().unwrap();
        assert!(engine.layout().is_empty(), "{:?}", engine.layout());
    }
}

#[test]
fn a_capture_that_nobody_told_of_spoils_nothing() {
    let (sim, engine) = bed(1 << 30, Settings::default());
    let block = take(&engine, 4096, HOME);
    engine.record_stream(&block, SIDE).unwrap();
    let begin = {
        let sim = Arc::clone(&sim);
        move || Capture::begin(&*sim, SIDE)
    };
    thread::spawn(begin).join().unwrap().unwrap();
    engine.give(block);
    for _ in 0..2 {
        let other = take(&engine, 4096, HOME);
        engine.give(other);
    }
    Capture::end(&*sim, SIDE).unwrap();
    for _ in 0..2 {
        let other = take(&engine, 4096, HOME);
        engine.give(other);
    }
    engine.empty_cache().unwrap();
    assert!(engine.layout().is_empty(), "{:?}", engine.layout());
}

/// Asks the engine for its statistics when it goes.
#[derive(Debug)]
struct Curious {
    engine: OnceLock<Arc<Engine>>,
    sim: Arc<Sim>,
}

impl SegmentAllocator for Curious {
    fn allocate(&self, size_bytes: u64, _: StreamId) -> Option<u64> {
        self.sim.allocate(size_bytes).ok()
    }

    fn free(&self, address: u64, size_bytes: u64, _: StreamId) {
        self.sim.free(address, size_bytes).expect("it is the sim's");
    }
}

impl Drop for Curious {
    fn drop(&mut self) {
        let _now = self.engine.get().expect("it was set").statistics();
    }
}

/// A lock that is held while the allocator is dropped makes this test wait without end.
#[test]
fn a_pools_own_allocator_is_dropped_with_no_lock_held() {
    let (sim, engine) = bed(1 << 30, Settings::default());
    let own = Arc::new(Curious { engine: OnceLock::new(), sim });
    own.engine.set(Arc::clone(&engine)).unwrap();
    let options = PoolOptions { allocator: Some(own), ..PoolOptions::default() };
    let pool = MemoryPool::new(&*engine, options).unwrap();
    let block = take_in(&engine, pool.id(), 4096, HOME);
    engine.give(block);
    drop(pool);
    assert_eq!(engine.private_pool_count(), 0);
}

#[test]
fn a_pool_that_only_reserved_addresses_goes_too() {
    let settings = Settings { expandable_segments: true, ..Settings::default() };
    let (_sim, engine) = bed(64 * MIB, settings);
    let kept = take(&engine, 60 * MIB, HOME);
    let pool = MemoryPool::new(&*engine, PoolOptions::default()).unwrap();
    engine.allocate(Request::new(20 * MIB, SIDE).in_pool(pool.id())).unwrap_err();
    drop(pool);
    engine.empty_cache().unwrap();
    assert_eq!(engine.private_pool_count(), 0);
    engine.give(kept);
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
    let (_sim, engine) = bed(64 * MIB, Settings::default());
    engine.set_memory_fraction(0.5).unwrap();
    let options = PoolOptions { allocator: Some(Arc::new(Rude)), ..PoolOptions::default() };
    let pool = MemoryPool::new(&*engine, options).unwrap();
    let request = Request::new(20 * MIB, HOME);
    catch_unwind(AssertUnwindSafe(|| engine.allocate(request.in_pool(pool.id())))).unwrap_err();
    let block = take(&engine, 30 * MIB, HOME);
    engine.give(block);
    drop(pool);
    assert_eq!(engine.private_pool_count(), 0);
}

#[test]
fn nothing_is_asked_of_the_device_while_this_thread_captures() {
    let (sim, engine) = bed(1 << 30, Settings::default());
    let block = take(&engine, 4096, HOME);
    engine.record_stream(&block, FAR).unwrap();
    engine.give(block);
    let capture = Capture::begin(&*sim, SIDE).unwrap();
    let scope =
        PoolScope::open(&*engine, PoolId::next_capture(), ScopeFilter::Capture(capture)).unwrap();
    engine.cross_stream().process_events().unwrap();
    assert_eq!(sim.calls("query_event"), 0);
    drop(scope);
}

/// An event that is recorded inside a capture never passes.
#[test]
fn a_capture_that_begins_while_a_block_is_freed_keeps_it_until_its_end() {
    let device = racing(1 << 30);
    let options = EngineOptions {
        settings: Settings::default(),
        raw_addresses: true,
        ..EngineOptions::default()
    };
    let engine = Engine::new(Arc::<Racing>::clone(&device), &options).expect("the device can");
    let side = device.inner().create_stream().unwrap();
    let block = take(&engine, MIB, HOME);
    engine.record_stream(&block, side).unwrap();
    capture_before_next_event(&device, side);
    engine.give(block);
    end_capture(&device, side);
    engine.poll_events().unwrap();
    engine.free(take(&engine, MIB, HOME)).unwrap();
    device.inner().complete_all();
    engine.free(take(&engine, MIB, HOME)).unwrap();
    assert_eq!(engine.statistics().active.all.current, 0);
    engine.check().unwrap();
}

#[test]
fn a_driver_that_cannot_tell_of_a_capture_may_hide_one() {
    let options = SimOptions {
        event_mode: EventMode::Manual,
        costs: CallCosts::NONE,
        ..SimOptions::default()
    };
    let device = Arc::new(Faulty::new(Sim::new(options)));
    let options = EngineOptions {
        settings: Settings::default(),
        raw_addresses: true,
        ..EngineOptions::default()
    };
    let engine = Engine::new(Arc::<Faulty<Sim>>::clone(&device), &options).expect("it can");
    let sim = device.inner();
    let side = sim.create_stream().unwrap();
    let block = take(&engine, MIB, HOME);
    engine.record_stream(&block, side).unwrap();
    thread::scope(|s| s.spawn(|| Capture::begin(sim, side).unwrap()).join()).unwrap();
    device.fail_call(0, Some("capture_status"));
    engine.give(block);
    device.disarm();
    thread::scope(|s| s.spawn(|| Capture::end(sim, side).unwrap()).join()).unwrap();
    engine.free(take(&engine, MIB, HOME)).unwrap();
    sim.complete_all();
    engine.free(take(&engine, MIB, HOME)).unwrap();
    assert_eq!(engine.statistics().active.all.current, 0);
}
