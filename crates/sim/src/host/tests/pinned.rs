//! Copies between the device and pinned memory run in stream order, inside their slabs.

use super::*;
use stratalloc::driver::{PinnedId, PinnedMemory, PinnedRange};

fn range(pinned: PinnedId, offset_bytes: u64, size_bytes: u64) -> PinnedRange {
    PinnedRange { pinned, offset_bytes, size_bytes }
}

fn pinned_bytes(host: &Host, pinned: PinnedId, at: u64, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    host.read_pinned(pinned, at, &mut bytes).unwrap();
    bytes
}

#[test]
fn bytes_go_out_and_come_back_in_the_order_of_the_stream() {
    let host = host();
    let block = host.allocate(8192).unwrap();
    let slab = host.pin(4096).unwrap();
    assert_eq!(host.held().pinned_bytes, 4096);
    host.fill(block, 7, 8192, A).unwrap();
    let gate = host.hold(A);
    host.copy_out(range(slab, 1024, 2048), block, A).unwrap();
    host.fill(block, 9, 8192, A).unwrap();
    host.copy_in(block + 4096, range(slab, 1024, 2048), A).unwrap();
    assert_eq!(pinned_bytes(&host, slab, 1024, 1), [0], "the stream is held back");
    assert!(host.unpin(slab).unwrap_err().message().contains("running copy"));
    gate.open();
    host.synchronize_stream(A).unwrap();
    assert_eq!(
        pinned_bytes(&host, slab, 0, 4096),
        [[0; 1024], [7; 1024], [7; 1024], [0; 1024]].concat()
    );
    assert_eq!(bytes(&host, block + 4096, 4096, A), [[7; 2048], [9; 2048]].concat());
    host.write_pinned(slab, 4095, &[5]).unwrap();
    host.copy_in(block, range(slab, 4095, 1), A).unwrap();
    assert_eq!(bytes(&host, block, 2, A), [5, 9]);
    host.unpin(slab).unwrap();
    assert_eq!(host.held().pinned_bytes, 0);
}

#[test]
fn ranges_beyond_a_slab_and_unknown_slabs_are_refused() {
    let host = host();
    let block = host.allocate(8192).unwrap();
    let slab = host.pin(4096).unwrap();
    for (at, size) in [(0, 4097), (4096, 1), (u64::MAX, 2)] {
        let refused = host.copy_out(range(slab, at, size), block, A).unwrap_err();
        assert_eq!(refused.kind(), DriverErrorKind::InvalidValue);
        host.copy_in(block, range(slab, at, size), A).unwrap_err();
    }
    host.read_pinned(slab, 4095, &mut [0; 2]).unwrap_err();
    host.write_pinned(slab, 4095, &[0; 2]).unwrap_err();
    host.copy_out(range(slab, 0, 4096), block + 8000, A).unwrap_err();
    host.pin(0).unwrap_err();
    host.unpin(PinnedId(9)).unwrap_err();
    host.unpin(slab).unwrap();
    host.copy_out(range(slab, 0, 1), block, A).unwrap_err();
    host.unpin(slab).unwrap_err();
}
