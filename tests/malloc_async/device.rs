//! Tests on a real device. Without one each test prints `skipped: no CUDA device` and ends.

use stratalloc::driver::Cuda;

use super::note;
use crate::common::gpu::device;
use crate::common::prelude::*;

fn on_a_device() -> Option<(MutexGuard<'static, ()>, Arc<Cuda>, MallocAsyncAllocator)> {
    let (alone, cuda) = device()?;
    let made = MallocAsyncAllocator::new(cuda.clone(), &Settings::default());
    Some((alone, cuda, made.expect("the device has pools")))
}

#[test]
fn a_graph_reuses_what_it_freed_and_runs_again_and_again() {
    let Some((_alone, cuda, allocator)) = on_a_device() else { return };
    let (main, side) = (cuda.create_stream().unwrap(), cuda.create_stream().unwrap());
    let event = cuda.create_event().unwrap();
    let result = allocator.take_on(MIB, main);
    let capture = Capture::begin(&*cuda, main).unwrap();
    let filter = ScopeFilter::Capture(capture);
    let scope = PoolScope::open(&allocator, PoolId::next_capture(), filter).unwrap();
    let first = allocator.take_on(8 * MIB, main);
    let address = first.address();
    cuda.fill(address, 7, 8 * MIB, main).unwrap();
    cuda.record_event(event, main).unwrap();
    cuda.wait_event(side, event).unwrap();
    cuda.copy(result.address(), address, MIB, side).unwrap();
    allocator.record_stream(&first, side).unwrap();
    let frontier = cuda.frontier(main).unwrap();
    allocator.give(first);
    assert_eq!(cuda.frontier(main).unwrap(), frontier, "a free does not move its stream");
    let second = allocator.take_on(8 * MIB, main);
    assert_eq!(second.address(), address);
    cuda.fill(address, 9, 8 * MIB, main).unwrap();
    allocator.give(second);
    cuda.record_event(event, side).unwrap();
    cuda.wait_event(main, event).unwrap();
    let graph = cuda.end_capture(main).unwrap();
    drop(scope);
    for _ in 0..3 {
        graph.launch(main).unwrap();
    }
    let mut seen = [0; 4096];
    cuda.copy_to_host(&mut seen, result.address(), main).unwrap();
    assert!(seen.iter().all(|byte| *byte == 7), "the copy came before the reuse");
    drop(graph);
    allocator.give(result);
    assert_eq!(allocator.statistics().active.all.current, 0);
}

#[test]
fn shortage_and_frees_elsewhere_leave_a_capture_sound() {
    let Some((_alone, cuda, allocator)) = on_a_device() else { return };
    let (stream, other) = (cuda.create_stream().unwrap(), cuda.create_stream().unwrap());
    let outside = allocator.take_on(MIB, stream);
    let capture = Capture::begin(&*cuda, stream).unwrap();
    let filter = ScopeFilter::Capture(capture);
    let scope = PoolScope::open(&allocator, PoolId::next_capture(), filter).unwrap();
    let inside = allocator.take_on(MIB, stream);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            let too_much = cuda.info().total_bytes * 2;
            let refused = allocator.try_allocate(too_much, other);
            assert!(matches!(refused, Err(AllocError::OutOfMemory(_))), "{refused:?}");
            allocator.empty_cache().unwrap();
            allocator.cache_info().unwrap();
            allocator.give(outside);
        });
    });
    assert_eq!(note(&allocator, "deferred_frees"), 1);
    // The graph is destroyed without a launch, while its block is live.
    Capture::end(&*cuda, stream).unwrap();
    drop(scope);
    allocator.give(inside);
    let counts = allocator.statistics();
    assert_eq!((counts.active.all.current, counts.active_bytes.all.current), (0, 0));
    allocator.give(allocator.take(MIB));
}
