//! `backend:pinned` on a real device. The device accesses the blocks by their host addresses.

use stratalloc::driver::{HoldsWork, HostMemory};
use stratalloc::strategies::PinnedAllocator;

use super::*;
use crate::pinned::{pages_at, pinned_over};

const BYTES: u64 = 64 * MIB;

fn allocator(cuda: &Arc<Cuda>, keys: &str) -> PinnedAllocator {
    pinned_over(Arc::clone(cuda) as _, keys)
}

#[test]
fn copies_between_blocks_and_the_device_keep_their_bytes() {
    let Some((_alone, cuda)) = device() else { return };
    let stream = cuda.create_stream().unwrap();
    let on_device = cuda.allocate(BYTES).unwrap();
    for keys in [
        "",
        "pinned_rounding:power_of_two,pinned_reserve_segment_size_mb:200",
        "pinned_use_cuda_host_register:True,pinned_num_register_threads:4",
        "pinned_numa:auto,pinned_num_register_threads:8",
    ] {
        let own = allocator(&cuda, keys);
        let [from, to] = [0, 1].map(|_| own.take(BYTES));
        cuda.fill(from.address(), 5, BYTES, stream).unwrap();
        cuda.copy(on_device, from.address(), BYTES, stream).unwrap();
        cuda.copy(to.address(), on_device, BYTES, stream).unwrap();
        assert!(holds(&cuda, to.address(), BYTES, 5, stream), "{keys}");
        for block in [from, to] {
            own.record_stream_raw(block.address(), stream).unwrap();
            own.give(block);
        }
        own.caching().empty_cache().unwrap();
        let s = own.stats();
        println!("{keys}: {:?}", s.own);
        assert_eq!(s.active.all.current, 0);
    }
    cuda.free(on_device, BYTES).unwrap();
    cuda.destroy_stream(stream).unwrap();
}

#[test]
fn a_block_that_a_stream_writes_is_reused_only_after_its_work() {
    let Some((_alone, cuda)) = device() else { return };
    let own = allocator(&cuda, "");
    let stream = cuda.create_stream().unwrap();
    let on_device = cuda.allocate(BYTES).unwrap();
    cuda.fill(on_device, 7, BYTES, stream).unwrap();
    cuda.synchronize_stream(stream).unwrap();
    // The second block is cached, so that no call of the driver waits behind the gate.
    let [first, second] = [0, 1].map(|_| own.take(BYTES));
    let [address, other] = [&first, &second].map(Allocation::address);
    own.give(second);
    let gate = cuda.hold_back(stream).unwrap();
    cuda.copy(address, on_device, BYTES, stream).unwrap();
    own.record_stream_raw(address, stream).unwrap();
    own.give(first);
    let waits = own.take(BYTES);
    assert_eq!(waits.address(), other, "the copy into the first block has not begun");
    drop(gate);
    cuda.synchronize_stream(stream).unwrap();
    let reused = own.take(BYTES);
    assert_eq!(reused.address(), address);
    assert!(holds(&cuda, address, BYTES, 7, stream));
    drop(own);
    cuda.free(on_device, BYTES).unwrap();
    cuda.destroy_stream(stream).unwrap();
}

#[test]
fn a_background_thread_frees_blocks_while_a_graph_is_captured() {
    let Some((_alone, cuda)) = device() else { return };
    let own = allocator(&cuda, "pinned_use_background_threads:True");
    let [stream, other] = [0, 1].map(|_| cuda.create_stream().unwrap());
    let [captured, copied] = [0, 1].map(|_| own.take(MIB));
    let [address, target] = [&captured, &copied].map(Allocation::address);
    Capture::begin(&*cuda, stream).unwrap();
    cuda.copy(address, target, MIB, stream).unwrap();
    own.record_stream_raw(address, stream).unwrap();
    own.record_stream_raw(target, other).unwrap();
    own.give(captured);
    own.give(copied);
    while own.stats().active.all.current > 1 {
        thread::yield_now();
    }
    let graph = cuda.end_capture(stream).unwrap();
    assert_eq!(own.take(MIB).address(), target);
    assert_ne!(own.take(MIB).address(), address, "the graph uses it at each launch");
    cuda.fill(target, 3, MIB, stream).unwrap();
    graph.launch(stream).unwrap();
    assert!(holds(&cuda, address, MIB, 3, stream));
    drop(graph);
    drop(own);
    [stream, other].into_iter().for_each(|stream| cuda.destroy_stream(stream).unwrap());
}

#[test]
fn blocks_lie_on_the_node_of_the_device() {
    let Some((_alone, cuda)) = device() else { return };
    let Some(node) = cuda.host_node().unwrap() else { return skip("no node is known") };
    let own = allocator(&cuda, "pinned_numa:auto,pinned_num_register_threads:4");
    let block = own.take(BYTES);
    let Some(pages) = pages_at(block.address()) else { return skip("no numa_maps") };
    println!("node {node}: {pages}");
    if !pages.contains("prefer") {
        return skip("this process may not choose a node");
    }
    assert!(pages.contains(&format!(" N{node}=")), "{pages}");
}
