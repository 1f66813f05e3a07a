//! The strategies on a real device: bytes, streams, graphs, processes. Without a CUDA device each test
//! prints `skipped: no CUDA device` and ends. A device of 8 GiB suffices.
mod malloc_async;
mod pinned;
mod sleep;
mod two;

use stratalloc::driver::{Cuda, Exportable, Peers};
use stratalloc::registry::build;

use crate::common::gpu::{device, second, skip};
use crate::common::prelude::*;

fn strategy(cuda: &Arc<Cuda>, conf: &str) -> Strategy {
    let config = config(conf);
    let driver = Arc::clone(cuda) as Arc<dyn Driver>;
    build(&config, driver, BuildOptions { raw_addresses: true }).expect("the device can")
}

fn engine(strategy: &Strategy) -> &Engine {
    strategy.engine().expect("built on the engine")
}

/// Returns true if every byte of a range has this value.
fn holds(cuda: &Cuda, address: u64, bytes: u64, value: u8, stream: StreamId) -> bool {
    let mut seen = vec![0; usize::try_from(bytes).expect("test sizes fit")];
    cuda.copy_to_host(&mut seen, address, stream).expect("it is readable");
    seen.iter().all(|byte| *byte == value)
}

const BOTH: [&str; 2] = ["", "expandable_segments:True"];

#[test]
fn memory_streams_and_events_work() {
    let Some((_alone, cuda)) = device() else { return };
    println!("{:?}, driver {:?}", cuda.info(), Cuda::driver_version());
    let stream = cuda.create_stream().unwrap();
    let [a, b] = [0, 1].map(|_| cuda.allocate(4 * MIB).unwrap());
    cuda.copy_from_host(a, &[7; 1000], stream).unwrap();
    cuda.copy(b, a, 1000, stream).unwrap();
    let event = cuda.create_event().unwrap();
    assert_eq!(cuda.query_event(event), Ok(true), "never recorded");
    cuda.record_event(event, stream).unwrap();
    cuda.synchronize_event(event).unwrap();
    assert_eq!(cuda.query_event(event), Ok(true));
    assert!(holds(&cuda, b, 1000, 7, stream));
    cuda.fill(b, 9, 4 * MIB, stream).unwrap();
    assert!(holds(&cuda, b, 4 * MIB, 9, stream));
    let before = cuda.memory_info().unwrap();
    assert!(before.free_bytes < before.total_bytes);
    assert!(cuda.allocate(1 << 50).unwrap_err().is_out_of_memory());
    cuda.destroy_event(event).unwrap();
    cuda.destroy_stream(stream).unwrap();
    cuda.destroy_stream(stream).unwrap_err();
    cuda.free(a, 4 * MIB).unwrap();
    cuda.free(b, 4 * MIB).unwrap();
    cuda.synchronize_device().unwrap();
}

#[test]
fn pages_can_be_mapped_twice_and_leave_the_process() {
    let Some((_alone, cuda)) = device() else { return };
    let Some(memory) = cuda.virtual_memory() else { return skip("no virtual memory") };
    let stream = StreamId::DEFAULT;
    let size = memory.granularity_bytes();
    let base = memory.reserve(4 * size).unwrap();
    let piece = memory.create(size, Exportable::Descriptor).unwrap();
    for address in [base, base + 2 * size] {
        memory.map(address, size, piece).unwrap();
        memory.set_access(address, size, DeviceId(0)).unwrap();
    }
    cuda.fill(base, 5, size, stream).unwrap();
    assert!(holds(&cuda, base + 2 * size, size, 5, stream), "two names of one piece");
    let again = memory.import(memory.export(piece).unwrap(), size).unwrap();
    memory.map(base + size, size, again).unwrap();
    memory.set_access(base + size, size, DeviceId(0)).unwrap();
    assert!(holds(&cuda, base + size, size, 5, stream), "imported from a descriptor");
    memory.release(piece).unwrap();
    memory.release(again).unwrap();
    memory.unmap(base, 3 * size).unwrap();
    memory.unreserve(base, 4 * size).unwrap();
}

/// Memory created with `Exportable::Fabric` can be exported as a file descriptor too, even where fabric
/// handles are not allowed.
#[test]
fn a_piece_for_the_fabric_can_leave_in_any_case() {
    let Some((_alone, cuda)) = device() else { return };
    let Some(memory) = cuda.virtual_memory() else { return skip("no virtual memory") };
    let size = memory.granularity_bytes();
    let piece = memory.create(size, Exportable::Fabric).unwrap();
    let again = memory.import(memory.export(piece).unwrap(), size).unwrap();
    memory.release(again).unwrap();
    match memory.fabric() {
        Some(fabric) => {
            let handle = fabric.export_handle(piece).unwrap();
            memory.release(fabric.import_handle(&handle).unwrap()).unwrap();
        }
        None => skip("no fabric handles here"),
    }
    memory.release(piece).unwrap();
}

#[test]
fn driver_pools_serve_and_count() {
    let Some((_alone, cuda)) = device() else { return };
    let Some(pools) = cuda.memory_pools() else { return skip("no memory pools") };
    let stream = cuda.create_stream().unwrap();
    let pool = pools.create_pool().unwrap();
    pools.set_release_threshold(pool, u64::MAX).unwrap();
    let block = pools.allocate_async(pool, 3 * MIB, stream).unwrap();
    cuda.fill(block, 3, 3 * MIB, stream).unwrap();
    assert!(holds(&cuda, block, 3 * MIB, 3, stream));
    assert_eq!(pools.usage(pool).unwrap().used_bytes, 3 * MIB);
    pools.free_async(block, stream).unwrap();
    cuda.synchronize_stream(stream).unwrap();
    let usage = pools.usage(pool).unwrap();
    assert_eq!((usage.used_bytes, usage.used_high_bytes), (0, 3 * MIB));
    assert!(usage.reserved_bytes > 0, "it caches");
    pools.trim(pool, 0).unwrap();
    assert_eq!(pools.usage(pool).unwrap().reserved_bytes, 0);
    pools.reset_high_marks(pool).unwrap();
    assert_eq!(pools.usage(pool).unwrap().used_high_bytes, 0);
    pools.destroy_pool(pool).unwrap();
    pools.destroy_pool(pool).unwrap_err();
    pools.default_pool().unwrap();
}

/// Runs random histories. Every block must keep its bytes while it is live.
#[test]
fn random_histories_keep_every_byte() {
    let Some((_alone, cuda)) = device() else { return };
    for conf in BOTH {
        let strategy = strategy(&cuda, conf);
        let streams = [StreamId::DEFAULT, cuda.create_stream().unwrap()];
        let mut held: Vec<(Allocation, u8, StreamId)> = Vec::new();
        let mut rng = 12345_u64;
        for step in 0..600_u64 {
            rng = rng.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let roll = rng >> 33;
            if roll % 100 < 55 && held.len() < 60 {
                let bytes = [512, 3 * KIB, 700 * KIB, 2 * MIB, 11 * MIB][(roll % 5) as usize];
                let stream = streams[(roll % 2) as usize];
                let value = u8::try_from(step % 251).unwrap();
                let block = strategy.take_on(bytes, stream);
                cuda.fill(block.address(), value, bytes, stream).unwrap();
                held.push((block, value, stream));
            } else if !held.is_empty() {
                let (block, value, stream) =
                    held.swap_remove(usize::try_from(roll).unwrap() % held.len());
                let (address, bytes) = (block.address(), block.size_bytes());
                assert!(holds(&cuda, address, bytes, value, stream), "{conf}: step {step}");
                strategy.give(block);
            }
            if step % 150 == 149 {
                engine(&strategy).empty_cache().unwrap();
            }
        }
        engine(&strategy).check().unwrap();
        held.into_iter().for_each(|(block, ..)| strategy.give(block));
        engine(&strategy).empty_cache().unwrap();
        assert_eq!(engine(&strategy).statistics().memory_reserved(), 0);
    }
}

/// A block that is freed while another stream still reads it must not be reused before that read
/// completes.
#[test]
fn a_block_that_another_stream_reads_keeps_its_bytes() {
    let Some((_alone, cuda)) = device() else { return };
    for conf in BOTH {
        let strategy = strategy(&cuda, conf);
        let (home, side) = (cuda.create_stream().unwrap(), cuda.create_stream().unwrap());
        let bytes = 64 * MIB;
        let target = strategy.take_on(bytes, home);
        let slow = strategy.take_on(256 * MIB, side);
        let source = strategy.take_on(bytes, home);
        let address = source.address();
        cuda.fill(address, 1, bytes, home).unwrap();
        let filled = cuda.create_event().unwrap();
        cuda.record_event(filled, home).unwrap();
        cuda.wait_event(side, filled).unwrap();
        // The fills of `slow` delay the copy, so the copy is still pending when `source` is freed.
        for value in 0..160 {
            cuda.fill(slow.address(), value, 256 * MIB, side).unwrap();
        }
        cuda.copy(target.address(), address, bytes, side).unwrap();
        strategy.record(&source, side);
        strategy.give(source);
        let other = strategy.take_on(bytes, home);
        assert_ne!(other.address(), address, "{conf}: its other stream works");
        cuda.fill(other.address(), 2, bytes, home).unwrap();
        cuda.synchronize_device().unwrap();
        assert!(holds(&cuda, target.address(), bytes, 1, home), "{conf}");
        let again = strategy.take_on(bytes, home);
        assert_eq!(again.address(), address, "{conf}: free by now");
        [target, slow, other, again].into_iter().for_each(|block| strategy.give(block));
        cuda.destroy_event(filled).unwrap();
    }
}

/// A graph's memory is private: if the graph is launched after other allocations, it still writes to the
/// memory with which it was captured.
#[test]
fn a_graph_in_a_private_pool_survives_other_allocations() {
    let Some((_alone, cuda)) = device() else { return };
    for conf in BOTH {
        let strategy = strategy(&cuda, conf);
        let pools: &dyn PrivatePools = engine(&strategy);
        let stream = cuda.create_stream().unwrap();
        let warm = strategy.take_on(4 * MIB, stream);
        strategy.give(warm);
        let pool = PoolId::next_capture();
        let capture = Capture::begin(&*cuda, stream).unwrap();
        assert_eq!(cuda.capture_status(stream), Ok(CaptureStatus::Active { capture }));
        let scope = PoolScope::open(pools, pool, ScopeFilter::Capture(capture)).unwrap();
        let between = strategy.take_on(4 * MIB, stream);
        cuda.fill(between.address(), 6, 4 * MIB, stream).unwrap();
        let result = strategy.take_on(4 * MIB, stream);
        cuda.copy(result.address(), between.address(), 4 * MIB, stream).unwrap();
        let frontier = Capture::frontier(&*cuda, stream).unwrap();
        assert_eq!(frontier.len(), 1);
        assert_eq!(Capture::dependencies(&*cuda, frontier[0]).unwrap().len(), 1);
        strategy.give(between);
        let graph = cuda.end_capture(stream).unwrap();
        let hold = scope.finish();
        // The graph's temporary block is free in its pool. No request outside the pool may get it.
        let others: Vec<_> = (0..20).map(|_| strategy.take_on(4 * MIB, stream)).collect();
        for other in &others {
            cuda.fill(other.address(), 9, 4 * MIB, stream).unwrap();
        }
        for _ in 0..3 {
            cuda.fill(result.address(), 0, 4 * MIB, stream).unwrap();
            graph.launch(stream).unwrap();
            assert!(holds(&cuda, result.address(), 4 * MIB, 6, stream), "{conf}");
        }
        for other in others {
            assert!(holds(&cuda, other.address(), 4 * MIB, 9, stream), "{conf}");
            strategy.give(other);
        }
        strategy.give(result);
        drop((graph, hold));
        engine(&strategy).empty_cache().unwrap();
        assert_eq!(engine(&strategy).private_pool_count(), 0);
        assert_eq!(engine(&strategy).statistics().memory_reserved(), 0);
    }
}

/// Frees blocks inside a capture, where no event may be queried. If the configuration allows it, a block is
/// reused once the stream that used it is joined.
#[test]
fn a_join_inside_a_capture_frees_what_it_joins() {
    let Some((_alone, cuda)) = device() else { return };
    for (conf, reuses) in [("", false), ("graph_capture_record_stream_reuse:True", true)] {
        let strategy = strategy(&cuda, conf);
        let pools: &dyn PrivatePools = engine(&strategy);
        let (stream, side) = (cuda.create_stream().unwrap(), cuda.create_stream().unwrap());
        let join = |first: StreamId, then: StreamId| {
            let event = cuda.create_event().unwrap();
            cuda.record_event(event, first).unwrap();
            cuda.wait_event(then, event).unwrap();
            cuda.destroy_event(event).unwrap();
        };
        let capture = Capture::begin(&*cuda, stream).unwrap();
        let pool = PoolId::next_capture();
        let scope = PoolScope::open(pools, pool, ScopeFilter::Capture(capture)).unwrap();
        join(stream, side);
        let block = strategy.take_on(8 * MIB, stream);
        let address = block.address();
        cuda.fill(address, 1, 8 * MIB, side).unwrap();
        strategy.record(&block, side);
        strategy.give(block);
        let early = strategy.take_on(8 * MIB, stream);
        assert_ne!(early.address(), address);
        join(side, stream);
        let late = strategy.take_on(8 * MIB, stream);
        assert_eq!(late.address() == address, reuses, "{conf}");
        Capture::end(&*cuda, stream).unwrap();
        drop(scope);
        [early, late].into_iter().for_each(|block| strategy.give(block));
        strategy.give(strategy.take_on(512, stream));
        assert_eq!(engine(&strategy).statistics().active.all.current, 0, "{conf}");
    }
}

#[test]
fn a_limit_and_the_device_end_in_reports() {
    let Some((_alone, cuda)) = device() else { return };
    for conf in BOTH {
        let strategy = strategy(&cuda, conf);
        let caching: &dyn Caching = engine(&strategy);
        caching.set_limit_bytes(Some(256 * MIB));
        let held: Vec<_> = (0..4).map(|_| strategy.take_on(60 * MIB, StreamId::DEFAULT)).collect();
        match strategy.try_allocate(60 * MIB, StreamId::DEFAULT) {
            Err(AllocError::OutOfMemory(report)) => {
                assert_eq!(report.limit_bytes, Some(256 * MIB));
                assert!(report.device_free_bytes.unwrap() > 256 * MIB);
            }
            other => panic!("{other:?}"),
        }
        held.into_iter().for_each(|block| strategy.give(block));
        strategy.give(strategy.take_on(240 * MIB, StreamId::DEFAULT));
        caching.set_limit_bytes(None);
        let total = cuda.info().total_bytes;
        match strategy.try_allocate(total - total % 512, StreamId::DEFAULT) {
            Err(AllocError::OutOfMemory(report)) => println!("{report}"),
            other => panic!("{other:?}"),
        }
        cuda.synchronize_device().expect("a refused request breaks nothing");
    }
}

/// Each thread uses its own stream. Only every other thread makes the device's context current first.
#[test]
fn threads_need_no_context_of_their_own() {
    let Some((_alone, cuda)) = device() else { return };
    for conf in BOTH {
        let strategy = strategy(&cuda, conf);
        std::thread::scope(|scope| {
            for value in 1..=4_u8 {
                let (cuda, strategy) = (&cuda, &strategy);
                scope.spawn(move || {
                    if value % 2 == 0 {
                        cuda.make_current().unwrap();
                    }
                    let stream = cuda.create_stream().unwrap();
                    for round in 0..50_u64 {
                        let bytes = (1 + round % 7) * 300 * KIB;
                        let block = strategy.take_on(bytes, stream);
                        cuda.fill(block.address(), value, bytes, stream).unwrap();
                        assert!(holds(cuda, block.address(), bytes, value, stream));
                        strategy.give(block);
                    }
                });
            }
        });
        engine(&strategy).check().unwrap();
    }
}

#[test]
fn a_peer_reaches_what_it_was_let_into() {
    let Some((_alone, cuda)) = device() else { return };
    let Some(second) = second() else { return };
    if !Peers::can_access(&*cuda, DeviceId(1)).unwrap() {
        return skip("the second device cannot reach the first");
    }
    for conf in BOTH {
        let strategy = strategy(&cuda, conf);
        let stream = cuda.create_stream().unwrap();
        let early = strategy.take_on(4 * MIB, stream);
        strategy.peer_access().enable_peer_access(DeviceId(1)).unwrap();
        let late = strategy.take_on(40 * MIB, stream);
        let there = second.create_stream().unwrap();
        for block in [&early, &late] {
            second.fill(block.address(), 4, block.size_bytes(), there).unwrap();
            second.synchronize_stream(there).unwrap();
            assert!(holds(&cuda, block.address(), block.size_bytes(), 4, stream), "{conf}");
        }
        [early, late].into_iter().for_each(|block| strategy.give(block));
    }
}

/// The environment variable that contains the handle for the other process to open.
const SHARED: &str = "STRATALLOC_TEST_SHARED";

/// The code of the other process. Without the environment variable, this test does nothing.
#[test]
fn the_other_process_opens_and_answers() {
    let Ok(text) = std::env::var(SHARED) else { return };
    let (_alone, cuda) = device().expect("the first process has one");
    let bytes: Vec<u8> = (0..text.len() / 2)
        .map(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).expect("hexadecimal"))
        .collect();
    let handle = SharedHandle::from_bytes(&bytes).unwrap();
    let strategy = strategy(&cuda, "");
    let seen = strategy.sharing().open(&handle).unwrap();
    assert!(holds(&cuda, seen.address(), seen.size_bytes(), 77, StreamId::DEFAULT));
    cuda.fill(seen.address(), 78, seen.size_bytes(), StreamId::DEFAULT).unwrap();
    cuda.synchronize_device().unwrap();
}

fn is_not_supported(error: &SharingError) -> bool {
    match error {
        SharingError::NotSupported { .. } => true,
        SharingError::Driver(error) => error.kind() == DriverErrorKind::NotSupported,
        _ => false,
    }
}

#[test]
fn a_block_is_shared_between_two_processes() {
    let Some((_alone, cuda)) = device() else { return };
    for conf in ["", "expandable_segments:True,expandable_segments_ipc:True"] {
        let strategy = strategy(&cuda, conf);
        let pair = [0, 1].map(|_| strategy.take_on(3 * MIB, StreamId::DEFAULT));
        let block = &pair[1];
        cuda.fill(block.address(), 77, 3 * MIB, StreamId::DEFAULT).unwrap();
        cuda.synchronize_device().unwrap();
        let handle = match strategy.sharing().share(block) {
            Ok(handle) => handle,
            Err(error) if is_not_supported(&error) => {
                skip(format_args!("{conf:?} cannot be shared here: {error}"));
                continue;
            }
            Err(error) => panic!("{conf:?}: {error}"),
        };
        let text: String = handle.as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
        let other = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "cuda::the_other_process_opens_and_answers", "--nocapture"])
            .env(SHARED, text)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let stderr = String::from_utf8_lossy(&other.stdout).into_owned()
            + &String::from_utf8_lossy(&other.stderr);
        assert!(other.status.success(), "{conf}: {stderr}");
        assert!(holds(&cuda, block.address(), 3 * MIB, 78, StreamId::DEFAULT), "{conf}");
        pair.into_iter().for_each(|block| strategy.give(block));
    }
}

/// Addresses of live blocks of many sizes never overlap.
#[test]
fn many_live_blocks_do_not_overlap() {
    let Some((_alone, cuda)) = device() else { return };
    for conf in BOTH {
        let strategy = strategy(&cuda, conf);
        let held: Vec<_> =
            (1..400_u64).map(|n| strategy.take_on(n * 1000, StreamId::DEFAULT)).collect();
        let ranges: BTreeMap<u64, u64> =
            held.iter().map(|block| (block.address(), block.size_bytes())).collect();
        let ordered: Vec<_> = ranges.into_iter().collect();
        assert_eq!(ordered.len(), 399);
        assert!(ordered.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0));
        held.into_iter().for_each(|block| strategy.give(block));
    }
}

#[test]
fn memory_of_the_host_is_not_passed_off_as_the_devices() {
    let Some((_alone, cuda)) = device() else { return };
    let config = config("backend:cpu");
    let error = build(&config, cuda, BuildOptions::default()).unwrap_err();
    assert!(error.to_string().contains("host memory"), "{error}");
}
