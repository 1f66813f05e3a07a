//! Buffers that cudarc uses, on a real device.

use cudarc::driver::{CudaContext, DevicePtr, DevicePtrMut};
use stratalloc::driver::Cuda;
use stratalloc::handle::{BufferError, DeviceVec};

use super::{DEVICE_CONFS, live_blocks};
use crate::common::gpu::device;
use crate::common::prelude::*;

fn handle(conf: &str) -> Option<(MutexGuard<'static, ()>, Handle)> {
    let (alone, cuda) = device()?;
    let config = config(conf);
    Some((alone, Handle::build(&config, cuda).expect("the device can")))
}

/// `FILLS` fills of `SLOW_BYTES` bytes keep a stream busy for a long time.
const SLOW_BYTES: usize = 256 << 20;
const FILLS: usize = 40;

/// A function with the trait bounds of cudarc's own functions, to check that buffers satisfy them.
fn takes_any<T>(source: &impl DevicePtr<T>, target: &mut impl DevicePtrMut<T>) -> (usize, usize) {
    (source.len(), target.num_bytes())
}

#[test]
fn cudarcs_copies_take_our_buffers() {
    for conf in DEVICE_CONFS {
        let Some((_alone, handle)) = handle(conf) else { return };
        let context = CudaContext::new(0).unwrap();
        let (stream, side) = (context.new_stream().unwrap(), context.new_stream().unwrap());
        let values: Vec<u32> = (0..50_000).collect();
        let source = handle.cuda_from_slice(&values, &stream).unwrap();
        let mut target = handle.cuda_zeroed::<u32>(50_000, &stream).unwrap();
        assert_eq!(takes_any(&source, &mut target), (50_000, 200_000));
        // cudarc makes `side` wait for the work of `stream`.
        side.memcpy_dtod(&source, &mut target).unwrap();
        assert_eq!(stream.clone_dtoh(&target).unwrap(), values);
        assert_eq!(stream.clone_dtoh(&target.as_view().slice(10..12)).unwrap(), [10, 11]);
        stream.memcpy_htod(&[7, 8], &mut target.as_view_mut().slice_mut(0..2)).unwrap();
        let back = DeviceVec::from_cuda(&handle, target).unwrap();
        assert_eq!(back.to_vec().unwrap()[..3], [7, 8, 2]);
        drop((source, back));
        assert_eq!((live_blocks(&handle), handle.lost_blocks()), (0, 0), "{conf}");
    }
}

#[test]
fn a_buffer_that_another_stream_reads_is_not_used_again_too_early() {
    for conf in DEVICE_CONFS {
        let Some((_alone, handle)) = handle(conf) else { return };
        let context = CudaContext::new(0).unwrap();
        let (stream, side) = (context.new_stream().unwrap(), context.new_stream().unwrap());
        const N: usize = 64 << 20;
        let mut slow = handle.cuda_zeroed::<u8>(SLOW_BYTES, &side).unwrap();
        let mut target = handle.cuda_zeroed::<u8>(N, &side).unwrap();
        for round in 1..=5u8 {
            let source = handle.cuda_from_slice(&vec![round; N], &stream).unwrap();
            (0..FILLS).for_each(|_| side.memset_zeros(&mut slow).unwrap());
            side.memcpy_dtod(&source, &mut target).unwrap();
            drop(source);
            let mut other = handle.cuda_zeroed::<u8>(N, &stream).unwrap();
            stream.memset_zeros(&mut other).unwrap();
            let seen = side.clone_dtoh(&target).unwrap();
            assert!(seen.iter().all(|byte| *byte == round), "{conf}: round {round}");
        }
    }
}

#[test]
fn cudarcs_own_buffers_can_be_taken_over() {
    let Some((_alone, handle)) = handle(DEVICE_CONFS[0]) else { return };
    let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
    let theirs = stream.clone_htod(&[1.5f32, 2.5]).unwrap();
    let ours = DeviceVec::from_cuda_slice(&handle, theirs).unwrap();
    assert_eq!(ours.to_vec().unwrap(), [1.5, 2.5]);
    assert_eq!(live_blocks(&handle), 0);
    drop(ours);
    let s = handle.stats();
    assert_eq!(s.memory_allocated(), 0);
}

#[test]
fn a_stream_of_cudarcs_may_be_let_go_of_before_its_buffers() {
    for conf in DEVICE_CONFS {
        let Some((_alone, handle)) = handle(conf) else { return };
        let context = CudaContext::new(0).unwrap();
        for round in 0..20u32 {
            let stream = context.new_stream().unwrap();
            let dropped = handle.cuda_from_slice(&[round; 50_000], &stream).unwrap();
            let taken_back = handle.cuda_from_slice(&[round; 50_000], &stream).unwrap();
            drop(stream);
            drop(dropped);
            let back = DeviceVec::from_cuda(&handle, taken_back).unwrap();
            assert_eq!(back.to_vec().unwrap(), [round; 50_000], "{conf}");
        }
        assert_eq!((live_blocks(&handle), handle.lost_blocks()), (0, 0), "{conf}");
        context.check_err().expect("cudarc met no failure either");
    }
}

#[test]
fn a_buffer_changes_streams_in_order() {
    for conf in DEVICE_CONFS {
        let Some((_alone, handle)) = handle(conf) else { return };
        let context = CudaContext::new(0).unwrap();
        let side = context.new_stream().unwrap();
        let own = handle.driver().create_stream().unwrap();
        const N: usize = 64 << 20;
        let mut slow = handle.cuda_zeroed::<u8>(SLOW_BYTES, &side).unwrap();
        let mut slow_own = handle.zeroed::<u8>(SLOW_BYTES, own).unwrap();
        for round in 1..=5u8 {
            let source = handle.cuda_from_slice(&vec![round; N], &side).unwrap();
            (0..FILLS).for_each(|_| slow_own.view_mut().fill_zero().unwrap());
            // The slow fills delay the zeroing on `own` and the copy on `side`. The copy must still run
            // after the zeroing.
            let mut target = handle.zeroed::<u8>(N, own).unwrap().into_cuda(&side).unwrap();
            (0..FILLS).for_each(|_| side.memset_zeros(&mut slow).unwrap());
            side.memcpy_dtod(&source, &mut target).unwrap();
            let back = DeviceVec::from_cuda(&handle, target).unwrap();
            assert_eq!(back.stream(), own);
            let seen = back.to_vec().unwrap();
            assert!(seen.iter().all(|byte| *byte == round), "{conf}: round {round}");
        }
        drop((slow, slow_own));
        handle.driver().synchronize_stream(own).unwrap();
    }
}

#[test]
fn a_slice_that_is_taken_over_comes_behind_its_readers() {
    let Some((_alone, handle)) = handle(DEVICE_CONFS[0]) else { return };
    let context = CudaContext::new(0).unwrap();
    let (stream, side) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    const N: usize = 64 << 20;
    let mut slow = side.alloc_zeros::<u8>(SLOW_BYTES).unwrap();
    let mut target = side.alloc_zeros::<u8>(N).unwrap();
    for round in 1..=5u8 {
        let source = stream.clone_htod(&vec![round; N]).unwrap();
        (0..FILLS).for_each(|_| side.memset_zeros(&mut slow).unwrap());
        side.memcpy_dtod(&source, &mut target).unwrap();
        let mut ours = DeviceVec::from_cuda_slice(&handle, source).unwrap();
        ours.view_mut().fill_zero().unwrap();
        let seen = side.clone_dtoh(&target).unwrap();
        assert!(seen.iter().all(|byte| *byte == round), "round {round}");
    }
}

#[test]
fn streams_of_other_devices_and_contexts_are_refused() {
    let Some((_alone, handle)) = handle(DEVICE_CONFS[0]) else { return };
    let own = CudaContext::new(0).unwrap().new_stream().unwrap();
    let mut others = vec![CudaContext::new_non_primary(0, 0).unwrap()];
    if Cuda::count().unwrap() > 1 {
        others.push(CudaContext::new(1).unwrap());
    }
    for context in others {
        let stream = context.new_stream().unwrap();
        let refused = handle.cuda_zeroed::<u8>(64, &stream);
        assert!(matches!(refused, Err(BufferError::OtherDevice { .. })), "{refused:?}");
        let theirs = stream.clone_htod(&[1u8, 2]).unwrap();
        let refused = DeviceVec::from_cuda_slice(&handle, theirs);
        assert!(matches!(refused, Err(BufferError::OtherDevice { .. })), "{refused:?}");
    }
    let sim = Arc::new(Sim::new(SimOptions::default()));
    let simulated = Handle::build(handle_config(), sim).unwrap();
    let refused = simulated.cuda_zeroed::<u8>(64, &own);
    assert!(matches!(refused, Err(BufferError::OtherDevice { driver: "sim", .. })), "{refused:?}");
    assert_eq!((live_blocks(&handle), live_blocks(&simulated)), (0, 0));
}

fn handle_config() -> &'static Config {
    static CONFIG: std::sync::OnceLock<Config> = std::sync::OnceLock::new();
    CONFIG.get_or_init(|| config(DEVICE_CONFS[0]))
}

/// Work on a stream does not depend on the thread's current context. A created stream belongs to a context,
/// and the default streams are those of the primary context.
#[test]
fn another_context_of_the_thread_does_no_harm() {
    let Some((_alone, handle)) = handle("backend:cudaMallocAsync") else { return };
    let driver = handle.driver();
    let stream = driver.create_stream().unwrap();
    let other = CudaContext::new_non_primary(0, 0).unwrap();
    for stream in [stream, StreamId::DEFAULT, StreamId(2)] {
        for value in 1..=20u8 {
            other.bind_to_thread().unwrap();
            let block = handle.take_on(4 << 20, stream);
            driver.fill(block.address(), value, 4 << 20, stream).unwrap();
            let mut seen = vec![0; 4 << 20];
            driver.copy_to_host(&mut seen, block.address(), stream).unwrap();
            assert!(seen.iter().all(|byte| *byte == value), "{stream}");
            handle.give(block);
            let current = cudarc::driver::result::ctx::get_current().unwrap();
            assert_eq!(current, Some(other.cu_ctx()), "{stream}: it is current as before");
        }
    }
    driver.destroy_stream(stream).unwrap();
    assert_eq!(live_blocks(&handle), 0);
}
