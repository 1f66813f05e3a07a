//! Illegal calls that the simulated device and the host device must refuse. Other tests of these devices are
//! next to their code.

use std::fmt::Debug;

use stratalloc::driver::{DriverPoolId, Exportable, PhysicalId};
#[cfg(target_os = "linux")]
use stratalloc_sim::Host;

use crate::common::prelude::*;

const PIECE: u64 = 2 * MIB;

#[track_caller]
fn refused<T: Debug>(result: DriverResult<T>) {
    let error = result.expect_err("it is illegal");
    assert_eq!(error.kind(), DriverErrorKind::InvalidValue, "{error}");
}

fn free_mib(device: &impl Driver) -> u64 {
    device.memory_info().expect("it is legal").free_bytes / MIB
}

fn pieces_are_mapped_opened_and_unmapped_whole<D: Base>() {
    let device = D::with_bytes(64 * MIB);
    let memory = device.virtual_memory().expect("it is legal");
    for odd in [0, 1, MIB, PIECE + 1, 3 * MIB] {
        refused(memory.reserve(odd));
        refused(memory.create(odd, Exportable::No));
    }
    let at = memory.reserve(4 * PIECE).expect("it is legal");
    let create = |bytes| memory.create(bytes, Exportable::No).expect("it is legal");
    let (large, small) = (create(2 * PIECE), create(PIECE));
    memory.map(at, 2 * PIECE, large).expect("it is legal");
    memory.set_access(at, 2 * PIECE, DeviceId(0)).expect("it is legal");
    for (from, bytes, piece) in [
        (at + 2 * PIECE, PIECE, large),
        (at + 2 * PIECE, PIECE, PhysicalId(99)),
        (at + 2 * PIECE + 512, PIECE, small),
        (at + 2 * PIECE + MIB, PIECE, small),
        (at + PIECE, PIECE, small),
        (at + 4 * PIECE, PIECE, small),
        (at + 3 * PIECE, 2 * PIECE, large),
        (PIECE, PIECE, small),
        (u64::MAX - PIECE + 1, PIECE, small),
    ] {
        refused(memory.map(from, bytes, piece));
    }
    refused(memory.set_access(at, 2 * PIECE, DeviceId(1)));
    refused(memory.set_access(at, PIECE, DeviceId(0)));
    refused(memory.set_access(at, 3 * PIECE, DeviceId(0)));
    for (from, pieces) in [(0, 1), (1, 1), (0, 3), (0, 4), (2, 1)] {
        refused(memory.unmap(at + from * PIECE, pieces * PIECE));
    }
    for (from, pieces) in [(0, 4), (0, 2), (1, 3)] {
        refused(memory.unreserve(at + from * PIECE, pieces * PIECE));
    }
    refused(device.free(at, 4 * PIECE));
    refused(memory.export(large));
    memory.release(large).expect("it is legal");
    refused(memory.release(large));
    refused(memory.map(at + 2 * PIECE, 2 * PIECE, large));
    device.fill(at, 1, 2 * PIECE, HOME).expect("it is legal");
    device.synchronize_device().expect("it is legal");
    memory.unmap(at, 2 * PIECE).expect("it is legal");
    assert_eq!(free_mib(&device), 62);
    // Memory that is mapped twice exists until its last mapping is removed.
    memory.map(at, PIECE, small).expect("it is legal");
    memory.map(at + PIECE, PIECE, small).expect("it is legal");
    memory.release(small).expect("it is legal");
    for free in [62, 64] {
        memory.unmap(at + (free - 62) / 2 * PIECE, PIECE).expect("it is legal");
        assert_eq!(free_mib(&device), free);
    }
    memory.unreserve(at, 4 * PIECE).expect("it is legal");
    refused(memory.unreserve(at, 4 * PIECE));
    refused(memory.map(at, PIECE, create(PIECE)));
}

fn pools_refuse_what_is_illegal_and_go_with_their_last_allocation<D: Base>() {
    let device = D::with_bytes(64 * MIB);
    let pools = device.memory_pools().expect("it is legal");
    let main = pools.default_pool().expect("it is legal");
    let live = pools.allocate_async(main, 1000, HOME).expect("it is legal");
    refused(pools.destroy_pool(main));
    refused(pools.allocate_async(main, 0, HOME));
    refused(pools.allocate_async(DriverPoolId(9), 1, HOME));
    refused(pools.usage(DriverPoolId(9)));
    refused(pools.free_async(live + 512, HOME));
    refused(device.free(live, 1000));
    refused(device.fill(live, 1, 1025, HOME));
    for huge in [65 * MIB, u64::MAX] {
        assert!(
            pools.allocate_async(main, huge, HOME).expect_err("it is too much").is_out_of_memory()
        );
    }
    pools.free_async(live, HOME).expect("it is legal");
    refused(pools.free_async(live, HOME));
    device.synchronize_device().expect("it is legal");
    assert_eq!(free_mib(&device), 64);

    let own = pools.create_pool().expect("it is legal");
    let last = pools.allocate_async(own, 512, HOME).expect("it is legal");
    pools.destroy_pool(own).expect("it is legal");
    refused(pools.allocate_async(own, 512, HOME));
    refused(pools.usage(own));
    refused(pools.destroy_pool(own));
    device.fill(last, 3, 512, HOME).expect("it is legal");
    device.synchronize_device().expect("it is legal");
    assert!(free_mib(&device) < 64);
    pools.free_async(last, HOME).expect("it is legal");
    device.synchronize_device().expect("it is legal");
    assert_eq!(free_mib(&device), 64);
}

#[test]
fn both_refuse_the_same() {
    pieces_are_mapped_opened_and_unmapped_whole::<Sim>();
    pools_refuse_what_is_illegal_and_go_with_their_last_allocation::<Sim>();
    #[cfg(target_os = "linux")]
    pieces_are_mapped_opened_and_unmapped_whole::<Host>();
    #[cfg(target_os = "linux")]
    pools_refuse_what_is_illegal_and_go_with_their_last_allocation::<Host>();
}
