//! Fabric handles on a fake library: the calls that are made, and the results that are cached.

use std::cell::{Cell, RefCell};

use super::*;
use crate::driver::cuda::Abilities;
use crate::driver::cuda::api::AllocationProperties;
use crate::driver::cuda::tests::{device_over, library};
use crate::driver::{Driver, Exportable};
use crate::size::MIB;

const OUT_OF_MEMORY: u32 = 2;
const NOT_PERMITTED: u32 = 800;

thread_local! {
    /// Result of creating a piece with a fabric handle.
    static FABRIC_ANSWER: Cell<u32> = const { Cell::new(0) };
    /// The handle types of all requested pieces, in order.
    static ASKED: RefCell<Vec<u32>> = const { RefCell::new(Vec::new()) };
    /// `gpuDirectRDMACapable` of the last piece.
    static DIRECT: Cell<u8> = const { Cell::new(0) };
    /// Pieces that were created and not released.
    static LIVE_PIECES: Cell<u64> = const { Cell::new(0) };
}

library! {
    piece_create(piece: &mut u64, _: usize, what: &AllocationProperties, _: u64) = {
        ASKED.with_borrow_mut(|asked| asked.push(what.handles));
        DIRECT.set(what.direct);
        if what.handles & FABRIC != 0 && FABRIC_ANSWER.get() != 0 {
            return FABRIC_ANSWER.get();
        }
        LIVE_PIECES.set(LIVE_PIECES.get() + 1);
        *piece = 70 + LIVE_PIECES.get();
        0
    };
    piece_release(_: u64) = { LIVE_PIECES.set(LIVE_PIECES.get() - 1); 0 };
    // The handle is the piece's number, eight times.
    piece_export_fabric(handle: &mut [u8; 64], piece: u64, kind: u32, _: u64) = {
        handle.as_chunks_mut().0.fill(piece.to_le_bytes());
        u32::from(kind != FABRIC)
    };
    piece_import_fabric(piece: &mut u64, handle: &[u8; 64], kind: u32) = {
        *piece = u64::from_le_bytes(*handle.first_chunk().expect("it is longer"));
        u32::from(kind != FABRIC)
    };
    context_current(context: &mut u64) = { *context = 0; 0 };
}

/// Returns a device over the fake library. The device's context is 0 and is current, so no call pushes
/// it.
fn cuda(can_fabric: bool) -> Cuda {
    cuda_that_can(Abilities { fabric: can_fabric, ..Abilities::default() })
}

fn cuda_that_can(can: Abilities) -> Cuda {
    device_over(library(), Abilities { virtual_memory: true, descriptors: true, ..can })
}

fn asked() -> Vec<u32> {
    ASKED.with_borrow_mut(std::mem::take)
}

#[test]
fn a_piece_for_the_fabric_is_opened_by_its_handle() {
    let cuda = cuda(true);
    let piece = cuda.create(4 * MIB, Exportable::Fabric).unwrap();
    assert_eq!(asked(), [9, 9], "tried with a small one, then made; both kinds of handles");
    let fabric = cuda.virtual_memory().unwrap().fabric().expect("it works");
    let handle = fabric.export_handle(piece).unwrap();
    assert_eq!(fabric.import_handle(&handle).unwrap(), piece);
    assert_eq!(asked(), [0; 0], "what was found out is remembered");
    assert_eq!(LIVE_PIECES.get(), 1, "the trial's piece was released");
}

#[test]
fn where_the_system_forbids_it_descriptors_are_made_and_it_is_not_tried_again() {
    FABRIC_ANSWER.set(NOT_PERMITTED);
    let cuda = cuda(true);
    cuda.create(4 * MIB, Exportable::Fabric).unwrap();
    assert_eq!(asked(), [9, DESCRIPTOR]);
    FABRIC_ANSWER.set(0);
    cuda.create(4 * MIB, Exportable::Fabric).unwrap();
    assert_eq!(asked(), [DESCRIPTOR], "remembered");
    assert!(cuda.virtual_memory().unwrap().fabric().is_none());
    let error = cuda.import_handle(&FabricHandle([0; 64])).unwrap_err();
    assert_eq!(error.kind(), DriverErrorKind::NotSupported);
}

#[test]
fn lack_of_memory_is_not_lack_of_fabric() {
    FABRIC_ANSWER.set(OUT_OF_MEMORY);
    let cuda = cuda(true);
    assert!(cuda.virtual_memory().unwrap().fabric().is_none());
    FABRIC_ANSWER.set(0);
    assert!(cuda.virtual_memory().unwrap().fabric().is_some());
}

#[test]
fn a_device_that_cannot_is_not_even_tried() {
    let cuda = cuda(false);
    cuda.create(4 * MIB, Exportable::Fabric).unwrap();
    cuda.create(4 * MIB, Exportable::No).unwrap();
    assert_eq!(asked(), [DESCRIPTOR, 0]);
}

#[test]
fn pieces_are_capable_of_gpu_direct_rdma_where_the_device_is() {
    for direct in [false, true] {
        let cuda = cuda_that_can(Abilities { direct, fabric: true, ..Abilities::default() });
        for exportable in [Exportable::No, Exportable::Descriptor, Exportable::Fabric] {
            DIRECT.set(7);
            cuda.create(4 * MIB, exportable).unwrap();
            assert_eq!(DIRECT.get(), u8::from(direct), "{exportable:?}");
        }
    }
}
