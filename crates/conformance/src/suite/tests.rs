//! Runs the tests for GPUs on a part of host memory instead.

use std::sync::Arc;

use super::super::configured;
use super::super::machine::RealMachine;
use super::super::part::Share;
use super::*;
use stratalloc::driver::{Driver, DriverResult};
use stratalloc::size::MIB;
use stratalloc_sim::{Host, HostOptions};

/// Tests a property as on a GPU, but on a part of a host device. Panics if the whole device still holds
/// resources after the parts of the test were dropped.
fn on_a_part(build: &Build<'_>, property: Property) -> Result<Outcome, String> {
    let whole = Arc::new(Host::new(HostOptions { total_bytes: 1 << 30, ..HostOptions::default() }));
    let outcome = {
        let options = &Options::default().on_a_gpu();
        let machines: &Machines<'_> =
            &|bytes| Ok(Box::new(RealMachine::of(Share::of(Arc::clone(&whole), bytes))));
        let case = Case { build, device: Device::Cuda, options, machines };
        case.test_what_can_be(property).map_err(|broken| format!("{broken:?}"))
    };
    assert!(whole.held().is_nothing(), "{property}: {:?}", whole.held());
    outcome
}

#[test]
fn what_runs_on_a_gpu_holds_on_a_part_of_real_memory() {
    for conf in ["native", "native,expandable_segments:True", "cudaMallocAsync"] {
        let text = format!("backend:{conf}");
        for &property in Property::ALL {
            let outcome = on_a_part(&configured(&text), property);
            assert!(
                matches!(outcome, Ok(Outcome::Passed { .. })),
                "{text}: {property}: {outcome:?}"
            );
        }
    }
}

/// Checks that memory which an allocator leaks is freed, so that later tests have it.
#[test]
fn a_part_frees_what_a_test_leaked() {
    for conf in ["native", "native,expandable_segments:True", "cudaMallocAsync"] {
        let text = format!("backend:{conf}");
        let whole = Host::new(HostOptions { total_bytes: 64 * MIB, ..HostOptions::default() });
        let whole = Arc::new(whole);
        let machine = RealMachine::of(Share::of(Arc::clone(&whole), 32 * MIB));
        let lost = configured(&text)(machine.driver()).unwrap();
        let block =
            lost.allocate(stratalloc::allocator::Request::new(MIB, stratalloc::ids::StreamId(7)));
        assert!(block.is_ok() && !whole.held().is_nothing());
        std::mem::forget(lost);
        drop(machine);
        assert!(whole.held().is_nothing(), "{text}: {:?}", whole.held());
    }
}

#[test]
fn only_a_constructor_that_reports_a_lack_is_spared() {
    let refuses = |kind| {
        super::super::constructor(move |_| {
            Err(DriverError::new(kind, "build", 0, "not here").into())
        })
    };
    let property = Property::EverythingIsReleased;
    let cannot = on_a_part(&refuses(DriverErrorKind::NotSupported), property);
    assert_eq!(cannot, Ok(Outcome::NotTested { why: LACKS }));
    on_a_part(&refuses(DriverErrorKind::Other), property).unwrap_err();
}

#[test]
fn a_part_refuses_what_is_not_its_own() -> DriverResult<()> {
    let whole = Host::new(HostOptions { total_bytes: 64 * MIB, ..HostOptions::default() });
    let part = Share::of(Arc::new(whole), 16 * MIB);
    let address = part.allocate(MIB)?;
    part.free(address, 2 * MIB).unwrap_err();
    part.free(address + 512, MIB).unwrap_err();
    assert!(part.allocate(16 * MIB).unwrap_err().is_out_of_memory());
    let pools = part.memory_pools().expect("the host has pools");
    let pool = pools.default_pool()?;
    assert_eq!(pools.default_pool()?, pool);
    pools.destroy_pool(pool).unwrap_err();
    let range = pools.allocate_async(pool, 15 * MIB, stratalloc::ids::StreamId::DEFAULT)?;
    assert!(pools.allocate_async(pool, 1, stratalloc::ids::StreamId::DEFAULT).is_err());
    pools.free_async(range, stratalloc::ids::StreamId::DEFAULT)?;
    pools.free_async(range, stratalloc::ids::StreamId::DEFAULT).unwrap_err();
    part.free(address, MIB)
}
