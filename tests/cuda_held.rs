//! Delayed work on a real device. Without a CUDA device each test prints `skipped: no CUDA device` and
//! ends.
//!
//! These tests are a separate program and run one at a time. All work of a program on a device shares
//! one context, so a call that waits for all work also waits for the work delayed here. For the same
//! reason, this program also contains tests in which calls of other threads could break a capture, and
//! tests that change the device's default pool.
#![cfg(target_os = "linux")]

mod common;

use std::sync::Arc;

use stratalloc::allocator::{Caching, DeviceAllocator, Request};
use stratalloc::config::{Config, KeyTable, Settings};
use stratalloc::driver::{Cuda, Driver, ProcessUsage};
use stratalloc::error::{AllocError, DriverErrorKind};
use stratalloc::ids::{DeviceId, StreamId};
use stratalloc::registry::{BuildOptions, build};
use stratalloc::size::MIB;
use stratalloc::strategies::MallocAsyncAllocator;
use stratalloc_sim::{Gates, WorkGate};

use common::gpu::{device, has_free, skip};

/// Delayed work on a stream finishes when it is released, whatever other streams do. A call that may wait
/// for work releases all delayed work.
#[test]
fn held_back_work_finishes_when_it_is_released() {
    let Some((_alone, cuda)) = device() else { return };
    let gated = Gates::before(Arc::clone(&cuda));
    let [first, second] = [0, 1].map(|_| cuda.create_stream().unwrap());
    let address = cuda.allocate(MIB).unwrap();
    // The first fill may make the driver load code and synchronize the device for that, so it runs before
    // work is delayed.
    for half in [address, address + MIB / 2] {
        cuda.fill(half, 1, MIB / 2, first).unwrap();
    }
    cuda.synchronize_stream(first).unwrap();
    let mut marks = Vec::new();
    let mut events = Vec::new();
    for (value, stream) in [(2, first), (3, first), (4, second)] {
        gated.hold(stream).unwrap();
        let half = if stream == first { address } else { address + MIB / 2 };
        gated.fill(half, value, MIB / 2, stream).unwrap();
        let event = gated.create_event().unwrap();
        gated.record_event(event, stream).unwrap();
        marks.push(gated.mark(stream).unwrap());
        events.push(event);
    }
    let finished = || events.iter().map(|event| gated.query_event(*event).unwrap());
    assert!(finished().eq([false, false, false]));
    gated.finish_until(second, marks[2]).unwrap();
    assert!(finished().eq([false, false, true]));
    gated.finish_until(first, marks[0]).unwrap();
    assert!(finished().eq([true, false, true]));
    // `Gates` opens all gates before a call that may wait, such as this copy. The copy waits for the
    // work of `first`, so all events have finished afterwards.
    let mut seen = [0; 1];
    gated.copy_to_host(&mut seen, address, first).unwrap();
    assert_eq!((seen, finished().all(|done| done)), ([3], true));
    gated.hold(first).unwrap();
    gated.fill(address, 5, MIB, first).unwrap();
    gated.free(address, MIB).unwrap();
    gated.finish_all().unwrap();
    events.into_iter().for_each(|event| gated.destroy_event(event).unwrap());
    gated.hold(second).unwrap();
    drop(gated);
    cuda.synchronize_device().unwrap();
    [first, second].into_iter().for_each(|stream| cuda.destroy_stream(stream).unwrap());
}

/// The replay must delay the work of the streams. Otherwise the work would finish at once, and blocks would
/// become free earlier than in the recording.
#[test]
fn a_recording_of_several_streams_reserves_what_it_reserved() {
    let Some((_alone, cuda)) = device() else { return };
    for (name, reserved) in
        [("multistream.default", 2_187_329_536_i64), ("multistream.expandable", 1_558_183_936)]
    {
        if !has_free(&cuda, 2 * reserved.unsigned_abs()) {
            return;
        }
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
            .join(format!("traces/{name}.pickle.xz"));
        let trace = stratalloc_recording::reader::read(&path, &Default::default()).unwrap();
        let mut workload = stratalloc_recording::Workload::of(&trace, 150_109_880_320);
        let named = workload.streams();
        let real: Vec<_> = named.iter().map(|_| cuda.create_stream().unwrap()).collect();
        workload.rename_streams(|stream| real[named.binary_search(&stream).unwrap()]);
        println!("{name}: {} streams", real.len());
        let gated = Arc::new(Gates::before(Arc::clone(&cuda)));
        let config = Config::parse(&trace.conf, &KeyTable::default()).unwrap();
        let driver = Arc::clone(&gated) as Arc<dyn Driver>;
        let strategy = build(&config, driver, BuildOptions::default()).unwrap();
        let run = stratalloc_recording::run(
            &workload,
            &strategy,
            Some(gated),
            1,
            &stratalloc_recording::Silent,
        )
        .unwrap();
        let held = run.statistics.reserved_bytes.all;
        assert_eq!((held.current, held.peak), (reserved, reserved), "{name}");
        strategy.engine().unwrap().empty_cache().unwrap();
        real.into_iter().for_each(|stream| cuda.destroy_stream(stream).unwrap());
    }
}

/// Memory allocated now must appear in the process list, whichever process ids the list shows. Half of
/// it suffices, because other programs may free memory at the same time.
#[test]
fn the_process_list_grows_with_what_is_taken() {
    let Some((_alone, cuda)) = device() else { return };
    let Some(processes) = cuda.processes() else {
        return skip("no management library, or it does not list the device");
    };
    let before = match processes.list() {
        Err(error) if error.kind() == DriverErrorKind::NotSupported => {
            return skip(format_args!("the list cannot be had: {error}"));
        }
        list => list.unwrap(),
    };
    println!("this process is {}, the list {before:?}", std::process::id());
    if before.is_empty() {
        return skip("the list shows no process, as in some containers");
    }
    let taken = 2048 * MIB;
    if !has_free(&cuda, 2 * taken) {
        return;
    }
    let sum = |list: &[ProcessUsage]| list.iter().map(|usage| usage.used_bytes).sum::<u64>();
    let address = cuda.allocate(taken).unwrap();
    let after = processes.list().unwrap();
    assert!(sum(&after) >= sum(&before) + taken / 2, "{before:?}, {after:?}");
    cuda.free(address, taken).unwrap();
    let driver = Arc::clone(&cuda) as Arc<dyn Driver>;
    let native = build(&Config::default(), driver, BuildOptions::default()).unwrap();
    match native.allocate(Request::new(cuda.info().total_bytes, StreamId::DEFAULT)) {
        Err(AllocError::OutOfMemory(report)) => {
            assert!(!report.holders.is_empty(), "{report}");
            println!("{report}");
        }
        other => panic!("{other:?}"),
    }
}

/// Opens the device twice, and builds an allocator on the default pool each time.
#[test]
fn allocators_that_share_the_default_pool_leave_it_as_it_was() {
    let Some((_alone, one)) = device() else { return };
    let two = Arc::new(Cuda::open(DeviceId(0)).unwrap());
    let pools = one.memory_pools().expect("the device has pools");
    let pool = pools.default_pool().unwrap();
    let on = |cuda: &Arc<Cuda>| {
        MallocAsyncAllocator::new(Arc::clone(cuda) as Arc<dyn Driver>, &Settings::default())
    };
    let before = pools.release_threshold(pool).unwrap();
    let (first, second) = (on(&one).unwrap(), on(&two).unwrap());
    drop(first);
    assert_eq!(pools.release_threshold(pool).unwrap(), u64::MAX);
    drop(second);
    assert_eq!(pools.release_threshold(pool).unwrap(), before);
}

/// In capture mode `global`, querying an event invalidates captures of other threads, unless the querying
/// thread is in relaxed mode. The open scope makes the engine expect a capture.
#[cfg(feature = "cudarc")]
#[test]
fn events_of_the_engine_break_no_capture_of_another_thread() {
    use cudarc::driver::{CudaContext, sys::CUstreamCaptureMode};
    use stratalloc::allocator::{PoolScope, ScopeFilter};
    use stratalloc::driver::Capture;
    use stratalloc::ids::PoolId;

    let Some((_alone, cuda)) = device() else { return };
    let driver = Arc::clone(&cuda) as Arc<dyn Driver>;
    let native = build(&Default::default(), driver, BuildOptions::default()).unwrap();
    if !has_free(&cuda, 1024 * MIB) {
        return;
    }
    let streams = native.control().cross_stream.expect("it follows streams");
    let [home, side] = [0, 1].map(|_| cuda.create_stream().unwrap());
    let block = native.allocate(Request::new(512 * MIB, home)).unwrap();
    for value in 0..100 {
        cuda.fill(block.address(), value, 512 * MIB, side).unwrap();
    }
    streams.record_stream(&block, side).unwrap();
    native.free(block).unwrap();
    let captured = CudaContext::new(0).unwrap().new_stream().unwrap();
    let pool = PoolId::next_user();
    let scope = PoolScope::open(
        native.control().private_pools.expect("it has pools"),
        pool,
        ScopeFilter::this_thread(),
    )
    .unwrap();
    captured.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL).unwrap();
    std::thread::scope(|threads| {
        threads.spawn(|| {
            for _ in 0..1000 {
                streams.process_events().expect("the event can be queried");
            }
        });
    });
    Capture::end(&*cuda, StreamId(captured.cu_stream() as u64)).expect("the capture is intact");
    drop(scope);
}

/// In capture mode `global`, releasing and allocating memory also invalidates captures of other threads,
/// unless the thread is in relaxed mode. Tests this under memory pressure, in `empty_cache`, and without an
/// open scope.
#[cfg(feature = "cudarc")]
#[test]
fn memory_that_goes_back_breaks_no_capture_of_another_thread() {
    use cudarc::driver::{CudaContext, sys::CUstreamCaptureMode};
    use stratalloc::driver::Capture;

    let Some((_alone, cuda)) = device() else { return };
    for conf in ["", "expandable_segments:True"] {
        if !has_free(&cuda, 1024 * MIB) {
            return;
        }
        let config = Config::parse(conf, &Default::default()).unwrap();
        let driver = Arc::clone(&cuda) as Arc<dyn Driver>;
        let strategy = build(&config, driver, BuildOptions::default()).unwrap();
        let caching = strategy.control().caching.unwrap();
        let home = cuda.create_stream().unwrap();
        let take = |bytes| strategy.allocate(Request::new(bytes, home)).unwrap();
        strategy.free(take(60 * MIB)).unwrap();
        let stats = || strategy.control().counters.unwrap().statistics();
        caching.set_limit_bytes(Some(100 * MIB));
        let captured = CudaContext::new(0).unwrap().new_stream().unwrap();
        captured.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL).unwrap();
        std::thread::scope(|threads| {
            threads.spawn(|| {
                let large = take(80 * MIB);
                assert!(stats().memory_reserved() <= 100 << 20, "what was idle went back, {conf}");
                strategy.free(large).unwrap();
                caching.empty_cache().unwrap();
                assert_eq!(stats().memory_reserved(), 0, "{conf}");
            });
        });
        Capture::end(&*cuda, StreamId(captured.cu_stream() as u64)).expect("the capture is intact");
    }
}
