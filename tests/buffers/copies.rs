//! Copies between buffers of two streams. The source is dropped at once, while the copy has not yet run.

use stratalloc::handle::DeviceVec;
use stratalloc_sim::HostOptions;

use super::CONFS;
use crate::common::prelude::*;

const LEN: usize = 4 << 20;

/// Creates a source on the first stream, copies it into the target and drops the source. The second handle is
/// of another allocator on the same device, in pinned memory.
type CopyFrom = fn(&[Handle; 2], [StreamId; 2], &mut DeviceVec<u8>);

fn source(handle: &Handle, stream: StreamId) -> DeviceVec<u8> {
    let source = handle.from_slice(&vec![7u8; LEN], stream).expect("it can");
    handle.driver().synchronize_stream(stream).expect("it can");
    source
}

fn buffer([handle, _]: &[Handle; 2], [one, _]: [StreamId; 2], target: &mut DeviceVec<u8>) {
    target.view_mut().copy_from(&source(handle, one).view()).expect("it can");
}

fn parts([handle, _]: &[Handle; 2], [one, _]: [StreamId; 2], target: &mut DeviceVec<u8>) {
    let source = source(handle, one);
    let (front, back) = source.view().split_at(LEN / 3).expect("it can");
    target.slice_mut(..LEN / 3).expect("it can").copy_from(&front).expect("it can");
    target.slice_mut(LEN / 3..).expect("it can").copy_from(&back).expect("it can");
}

fn tensor([handle, _]: &[Handle; 2], [one, _]: [StreamId; 2], target: &mut DeviceVec<u8>) {
    let tensor = source(handle, one).into_tensor().expect("it can");
    target.view_mut().copy_from(&tensor.view(handle, one).expect("it can")).expect("it can");
}

fn tensor_viewed_on_the_targets_stream(
    [handle, _]: &[Handle; 2],
    [one, two]: [StreamId; 2],
    target: &mut DeviceVec<u8>,
) {
    let tensor = source(handle, one).into_tensor().expect("it can");
    target.view_mut().copy_from(&tensor.view(handle, two).expect("it can")).expect("it can");
}

fn imported_tensor(
    [handle, _]: &[Handle; 2],
    [one, two]: [StreamId; 2],
    target: &mut DeviceVec<u8>,
) {
    let tensor = source(handle, one).into_tensor().expect("it can");
    let imported = DeviceVec::<u8>::from_tensor(handle, tensor, two).expect("it can");
    target.view_mut().copy_from(&imported.view()).expect("it can");
}

fn adopted([handle, _]: &[Handle; 2], [one, _]: [StreamId; 2], target: &mut DeviceVec<u8>) {
    let owner = source(handle, one);
    let address = owner.address();
    let adopted =
        DeviceVec::<u8>::adopt(handle, address, LEN, one, Box::new(owner)).expect("it can");
    target.view_mut().copy_from(&adopted.view()).expect("it can");
}

fn from_before_a_switch(
    [handle, _]: &[Handle; 2],
    [one, _]: [StreamId; 2],
    target: &mut DeviceVec<u8>,
) {
    let source = source(handle, one);
    handle.switch("backend:native,large_segment_size_mb:30").expect("it can");
    handle.switch("backend:cudaMallocAsync").expect("it can");
    target.view_mut().copy_from(&source.view()).expect("it can");
}

fn pinned_memory([_, pinned]: &[Handle; 2], [one, _]: [StreamId; 2], target: &mut DeviceVec<u8>) {
    let source = source(pinned, one);
    target.view_mut().copy_from(&source.view()).expect("it can");
    drop(source);
    drop(pinned.zeroed::<u8>(LEN, one).expect("it can"));
}

const SOURCES: [(&str, CopyFrom); 8] = [
    ("a buffer", buffer),
    ("parts of a buffer", parts),
    ("a tensor", tensor),
    ("a tensor viewed on the target's stream", tensor_viewed_on_the_targets_stream),
    ("an imported tensor", imported_tensor),
    ("adopted memory", adopted),
    ("a buffer from before a switch", from_before_a_switch),
    ("pinned memory of another allocator", pinned_memory),
];

#[test]
fn a_source_can_be_dropped_while_a_copy_on_another_stream_reads_it() {
    // Copies of memory of `backend:cpu` have finished when the call returns.
    for conf in CONFS.into_iter().filter(|conf| !conf.starts_with("backend:cpu")) {
        for (name, copy) in SOURCES {
            let options = HostOptions { total_bytes: 256 * MIB, ..HostOptions::default() };
            let device = Arc::new(Host::new(options));
            let handles = [conf, "backend:pinned"]
                .map(|conf| stratalloc::build(conf, Arc::<Host>::clone(&device) as _).unwrap());
            let handle = &handles[0];
            let streams = [(); 2].map(|()| handle.driver().create_stream().unwrap());
            let mut target = handle.zeroed::<u8>(LEN, streams[1]).unwrap();
            handle.driver().synchronize_device().unwrap();
            let gate = device.hold(streams[1]);
            copy(&handles, streams, &mut target);
            // Requests of both streams, which would overwrite the source.
            let others = streams.map(|stream| handle.zeroed::<u8>(LEN, stream).unwrap());
            drop(gate);
            let seen = target.to_vec().unwrap();
            let right = seen.iter().filter(|byte| **byte == 7).count();
            assert_eq!(right, LEN, "{conf}: {name}");
            drop(others);
        }
    }
}
