//! GPUDirect RDMA on a fake library that may refuse access to its pieces, as drivers under WSL2 do.

use std::cell::{Cell, RefCell};

use super::*;
use crate::driver::Driver;
use crate::driver::cuda::Abilities;
use crate::driver::cuda::tests::{device_over, library};
use crate::size::MIB;

const OUT_OF_MEMORY: u32 = 2;
const UNKNOWN: u32 = 999;
/// The bit of a piece that was created for GPUDirect RDMA.
const DIRECT: u64 = 1 << 32;

thread_local! {
    /// Result of `cuMemSetAccess` for a piece with GPUDirect RDMA, and for any other piece.
    static ANSWERS: Cell<[u32; 2]> = const { Cell::new([0; 2]) };
    /// Result of creating a piece.
    static CREATED: Cell<u32> = const { Cell::new(0) };
    /// The pieces that exist.
    static PIECES: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
    /// The mapped pieces, with their addresses.
    static MAPPED: RefCell<Vec<(u64, u64)>> = const { RefCell::new(Vec::new()) };
    /// The reserved addresses.
    static RESERVED: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
    /// The number of the next piece or range.
    static NEXT: Cell<u64> = const { Cell::new(1) };
    /// The calls that create a piece.
    static CREATIONS: Cell<u64> = const { Cell::new(0) };
}

fn next() -> u64 {
    NEXT.replace(NEXT.get() + 1)
}

library! {
    piece_create(piece: &mut u64, _: usize, what: &AllocationProperties, _: u64) = {
        CREATIONS.set(CREATIONS.get() + 1);
        if CREATED.get() != 0 {
            return CREATED.get();
        }
        *piece = next() | if what.direct == 1 { DIRECT } else { 0 };
        PIECES.with_borrow_mut(|all| all.push(*piece));
        0
    };
    piece_release(piece: u64) = { PIECES.with_borrow_mut(|all| all.retain(|own| *own != piece)); 0 };
    address_reserve(address: &mut u64, _: usize, _: usize, _: u64, _: u64) = {
        *address = next() << 30;
        RESERVED.with_borrow_mut(|all| all.push(*address));
        0
    };
    address_free(address: u64, _: usize) = {
        RESERVED.with_borrow_mut(|all| all.retain(|own| *own != address));
        0
    };
    piece_map(address: u64, _: usize, _: usize, piece: u64, _: u64) = {
        MAPPED.with_borrow_mut(|all| all.push((address, piece)));
        0
    };
    piece_unmap(address: u64, _: usize) = {
        MAPPED.with_borrow_mut(|all| all.retain(|(own, _)| *own != address));
        0
    };
    set_access(address: u64, _: usize, _: &AccessDescription, _: usize) = {
        let is_direct = MAPPED.with_borrow(|all| {
            all.iter().any(|(own, piece)| *own == address && piece & DIRECT != 0)
        });
        ANSWERS.get()[usize::from(!is_direct)]
    };
    context_current(context: &mut u64) = { *context = 0; 0 };
}

/// Returns a device that reports GPUDirect RDMA.
fn cuda() -> Cuda {
    let can = Abilities { virtual_memory: true, descriptors: true, ..Abilities::default() };
    device_over(library(), Abilities { direct: true, ..can })
}

/// Creates and maps a piece. Returns whether it was created for GPUDirect RDMA.
fn map_one(cuda: &Cuda, exportable: Exportable) -> DriverResult<bool> {
    let bytes = 20 * MIB;
    let piece = cuda.create(bytes, exportable)?;
    let address = cuda.reserve(bytes)?;
    cuda.map(address, bytes, piece)?;
    cuda.set_access(address, bytes, cuda.info().device)?;
    Ok(piece.0 & DIRECT != 0)
}

fn nothing_is_held() -> bool {
    PIECES.with_borrow(Vec::is_empty)
        && MAPPED.with_borrow(Vec::is_empty)
        && RESERVED.with_borrow(Vec::is_empty)
}

#[test]
fn pieces_are_mapped_without_rdma_where_the_driver_refuses_access_to_them() {
    ANSWERS.set([UNKNOWN, 0]);
    let device = cuda();
    for exportable in [Exportable::No, Exportable::Descriptor] {
        assert_eq!(map_one(&device, exportable), Ok(false), "{exportable:?}");
    }
    assert_eq!(CREATIONS.get(), 4, "two trials, then one call for each piece");
    assert_eq!(PIECES.with_borrow(Vec::len), 2, "the pieces of the trials were released");
    ANSWERS.set([0, 0]);
    assert_eq!(map_one(&cuda(), Exportable::No), Ok(true), "each device has its own result");
    assert_eq!(map_one(&device, Exportable::No), Ok(false), "remembered");
}

#[test]
fn pieces_keep_rdma_where_it_works_after_one_trial() {
    let device = cuda();
    assert_eq!(map_one(&device, Exportable::Descriptor), Ok(true));
    assert_eq!(map_one(&device, Exportable::No), Ok(true));
    assert_eq!((CREATIONS.get(), PIECES.with_borrow(Vec::len)), (3, 2));
    assert_eq!(RESERVED.with_borrow(Vec::len), 2);
}

#[test]
fn failures_without_rdma_or_for_lack_of_memory_are_not_remembered() {
    let device = cuda();
    CREATED.set(OUT_OF_MEMORY);
    assert!(map_one(&device, Exportable::No).unwrap_err().is_out_of_memory());
    CREATED.set(0);
    ANSWERS.set([UNKNOWN; 2]);
    assert_eq!(map_one(&device, Exportable::No).unwrap_err().code(), i64::from(UNKNOWN));
    ANSWERS.set([0; 2]);
    assert_eq!(map_one(&device, Exportable::No), Ok(true));
}

#[test]
fn a_trial_leaves_nothing_behind() {
    for answers in [[0; 2], [UNKNOWN, 0], [UNKNOWN; 2]] {
        ANSWERS.set(answers);
        let device = cuda();
        device.uses_direct();
        assert!(nothing_is_held(), "{answers:?}");
    }
}
