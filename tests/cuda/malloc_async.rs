//! `backend:cudaMallocAsync` on a real device.

use stratalloc::driver::Cuda;

use super::holds;
use crate::common::gpu::device;
use crate::common::prelude::*;
use crate::malloc_async::note;

/// Returns an allocator with its own memory pool, so that concurrent tests do not affect each other.
fn allocator(cuda: &Arc<Cuda>) -> MallocAsyncAllocator {
    let settings = Settings { malloc_async_own_pool: true, ..Settings::default() };
    let driver = Arc::clone(cuda) as Arc<dyn Driver>;
    MallocAsyncAllocator::new(driver, &settings).expect("the device has pools")
}

#[test]
fn blocks_hold_bytes_and_the_cache_can_be_emptied() {
    let Some((_alone, cuda)) = device() else { return };
    let allocator = allocator(&cuda);
    let stream = cuda.create_stream().unwrap();
    let blocks: Vec<_> = (1..=32u8)
        .map(|value| {
            let bytes = u64::from(value) * MIB + 17;
            let block = allocator.take_on(bytes, stream);
            cuda.fill(block.address(), value, bytes, stream).unwrap();
            (block, value)
        })
        .collect();
    for (block, value) in blocks {
        assert!(holds(&cuda, block.address(), block.size_bytes(), value, stream));
        allocator.give(block);
    }
    let counters = allocator.counters();
    assert!(counters.statistics().reserved_bytes.all.current > 0);
    allocator.empty_cache().unwrap();
    let s = counters.statistics();
    assert_eq!((s.allocated_bytes.all.current, s.reserved_bytes.all.current), (0, 0));
    let info = allocator.cache_info().unwrap();
    println!("{info:?}");
    assert!(info.largest_cached_bytes > 0);
    assert_eq!(counters.statistics().reserved_bytes.all.current, 0, "the search frees everything");
}

#[test]
fn a_block_that_another_stream_reads_keeps_its_bytes() {
    let Some((_alone, cuda)) = device() else { return };
    let allocator = allocator(&cuda);
    let (home, side) = (cuda.create_stream().unwrap(), cuda.create_stream().unwrap());
    let take = |bytes, stream| allocator.take_on(bytes, stream);
    let (target, slow) = (take(64 * MIB, home), take(256 * MIB, side));
    for round in 1..=8u8 {
        let source = take(64 * MIB, home);
        cuda.fill(source.address(), round, 64 * MIB, home).unwrap();
        let filled = cuda.create_event().unwrap();
        cuda.record_event(filled, home).unwrap();
        cuda.wait_event(side, filled).unwrap();
        for value in 0..80 {
            cuda.fill(slow.address(), value, 256 * MIB, side).unwrap();
        }
        cuda.copy(target.address(), source.address(), 64 * MIB, side).unwrap();
        allocator.record_stream(&source, side).unwrap();
        allocator.give(source);
        let other = take(64 * MIB, home);
        cuda.fill(other.address(), 99, 64 * MIB, home).unwrap();
        assert!(holds(&cuda, target.address(), 64 * MIB, round, side), "round {round}");
        allocator.give(other);
        cuda.destroy_event(filled).unwrap();
    }
    [target, slow].into_iter().for_each(|block| allocator.give(block));
}

/// Captures three cases: a free after the block's stream was joined, a free of a block from outside the
/// capture, and a use on a side stream.
#[test]
fn a_graph_is_captured_launched_and_freed() {
    let Some((_alone, cuda)) = device() else { return };
    let allocator = allocator(&cuda);
    let (main, side) = (cuda.create_stream().unwrap(), cuda.create_stream().unwrap());
    let take = |bytes, stream| allocator.take_on(bytes, stream);
    let order = |before: StreamId, after: StreamId| {
        let event = cuda.create_event().unwrap();
        cuda.record_event(event, before).unwrap();
        cuda.wait_event(after, event).unwrap();
        cuda.destroy_event(event).unwrap();
    };
    let (outside, result) = (take(MIB, main), take(4 * MIB, main));
    let capture = Capture::begin(&*cuda, main).unwrap();
    let pool = PoolId::next_capture();
    let scope = PoolScope::open(&allocator, pool, ScopeFilter::Capture(capture)).unwrap();
    order(main, side);
    let on_side = take(4 * MIB, side);
    cuda.fill(on_side.address(), 6, 4 * MIB, side).unwrap();
    order(side, main);
    cuda.copy(result.address(), on_side.address(), 4 * MIB, main).unwrap();
    allocator.record_stream(&on_side, main).unwrap();
    allocator.give(on_side);
    // Blocks freed in the capture must be reused: the test allows less than 1 GiB for these 3200 MiB.
    for value in 0..50 {
        let block = take(64 * MIB, main);
        cuda.fill(block.address(), value, 64 * MIB, main).unwrap();
        allocator.give(block);
    }
    allocator.give(outside);
    assert_eq!(note(&allocator, "deferred_frees"), 1);
    let graph = cuda.end_capture(main).expect("every free is joined");
    let hold = scope.finish();
    assert_eq!(allocator.stats().active.all.current, 1);
    for _ in 0..3 {
        cuda.fill(result.address(), 0, 4 * MIB, main).unwrap();
        graph.launch(main).unwrap();
        assert!(holds(&cuda, result.address(), 4 * MIB, 6, main));
    }
    let reserved = allocator.stats().reserved_bytes.all.peak;
    println!("graph and pool together: {reserved} bytes");
    assert!(reserved < 1 << 30, "50 blocks of 64 MiB shared their memory");
    allocator.give(result);
    cuda.synchronize_device().unwrap();
    drop((graph, hold));
    allocator.empty_cache().unwrap();
}

#[test]
fn the_limit_and_the_device_end_in_reports() {
    let Some((_alone, cuda)) = device() else { return };
    let allocator = allocator(&cuda);
    allocator.set_limit_bytes(Some(64 * MIB));
    let refused = allocator.try_allocate(65 * MIB, StreamId::DEFAULT);
    assert!(matches!(refused, Err(AllocError::OutOfMemory(_))));
    allocator.set_limit_bytes(None);
    let total = cuda.info().total_bytes;
    match allocator.try_allocate(total, StreamId::DEFAULT) {
        Err(AllocError::OutOfMemory(report)) => println!("{report}"),
        other => panic!("{other:?}"),
    }
    allocator.give(allocator.take(MIB));
}

/// A new thread has no current context. A created stream belongs to a context, and the default streams
/// are those of the device's primary context. No call may leave a context current.
#[test]
fn a_thread_without_a_context_allocates_and_frees() {
    let Some((_alone, cuda)) = device() else { return };
    let allocator = allocator(&cuda);
    let own = cuda.create_stream().unwrap();
    std::thread::scope(|threads| {
        for stream in [own, StreamId::DEFAULT, StreamId(1), StreamId(2)] {
            let (allocator, cuda) = (&allocator, &cuda);
            threads.spawn(move || {
                for value in 1..=50u8 {
                    let block = allocator.take_on(MIB, stream);
                    cuda.fill(block.address(), value, MIB, stream).unwrap();
                    assert!(holds(cuda, block.address(), MIB, value, stream), "{stream}");
                    allocator.give(block);
                }
            });
        }
    });
    assert_eq!(allocator.stats().allocation.all.current, 0);
    cuda.destroy_stream(own).unwrap();
}
