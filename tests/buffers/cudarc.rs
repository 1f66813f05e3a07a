//! Buffers in cudarc's hands, on a real device.

use std::sync::Arc;

use cudarc::driver::{CudaContext, DevicePtr, DevicePtrMut};
use stratalloc::allocator::DeviceAllocator;
use stratalloc::config::{Config, KeyTable};
use stratalloc::driver::Cuda;
use stratalloc::handle::{DeviceVec, Handle};
use stratalloc::ids::DeviceId;

use crate::{CONFS, live_blocks};

fn handle(conf: &str) -> Option<Handle> {
    let cuda = match Cuda::open(DeviceId(0)) {
        Ok(cuda) => cuda,
        Err(error) => {
            println!("skipped: no CUDA device ({error})");
            return None;
        }
    };
    let config = Config::parse(conf, &KeyTable::default()).expect("a legal string");
    Some(Handle::build(&config, Arc::new(cuda)).expect("the device can"))
}

/// What cudarc's own functions ask of a buffer.
fn takes_any<T>(source: &impl DevicePtr<T>, target: &mut impl DevicePtrMut<T>) -> (usize, usize) {
    (source.len(), target.num_bytes())
}

#[test]
fn cudarcs_copies_take_our_buffers() {
    for conf in CONFS {
        let Some(handle) = handle(conf) else { return };
        let context = CudaContext::new(0).unwrap();
        let (stream, side) = (context.new_stream().unwrap(), context.new_stream().unwrap());
        let values: Vec<u32> = (0..50_000).collect();
        let source = handle.cuda_from_slice(&values, &stream).unwrap();
        let mut target = handle.cuda_zeroed::<u32>(50_000, &stream).unwrap();
        assert_eq!(takes_any(&source, &mut target), (50_000, 200_000));
        // On another stream, which cudarc orders behind ours.
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
    for conf in CONFS {
        let Some(handle) = handle(conf) else { return };
        let context = CudaContext::new(0).unwrap();
        let (stream, side) = (context.new_stream().unwrap(), context.new_stream().unwrap());
        const N: usize = 64 << 20;
        let mut slow = handle.cuda_zeroed::<u8>(1 << 30, &side).unwrap();
        let mut target = handle.cuda_zeroed::<u8>(N, &side).unwrap();
        for round in 1..=5u8 {
            let source = handle.cuda_from_slice(&vec![round; N], &stream).unwrap();
            (0..10).for_each(|_| side.memset_zeros(&mut slow).unwrap());
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
    let Some(handle) = handle(CONFS[0]) else { return };
    let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
    let theirs = stream.clone_htod(&[1.5f32, 2.5]).unwrap();
    let ours = DeviceVec::from_cuda_slice(&handle, theirs).unwrap();
    assert_eq!(ours.to_vec().unwrap(), [1.5, 2.5]);
    assert_eq!(live_blocks(&handle), 0);
    drop(ours);
    let s = handle.counters().unwrap().statistics();
    assert_eq!(s.memory_allocated(), 0);
}
