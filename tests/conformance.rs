//! The conformance suite, run on all built-in strategies and on allocators with deliberate defects.
//!
//! `CONFORMANCE_RUNS=1000 cargo test --test main conformance` runs 1000 random scripts for each property. If
//! there is a GPU, the tests use a few hundred MiB of its memory.

mod announcing;
mod bent;
mod broken;
#[cfg(target_os = "linux")]
mod skips;
mod toy;
mod users;

use stratalloc_conformance::configured;

use crate::common::prelude::*;

stratalloc_conformance::conformance_tests!(native, configured("backend:native"));
stratalloc_conformance::conformance_tests!(
    expandable,
    configured("backend:native,expandable_segments:True")
);
stratalloc_conformance::conformance_tests!(malloc_async, configured("backend:cudaMallocAsync"));
stratalloc_conformance::conformance_tests!(
    malloc_async_own_pool,
    configured("backend:cudaMallocAsync,malloc_async_own_pool:True")
);
stratalloc_conformance::conformance_tests!(cpu, configured("backend:cpu"));
stratalloc_conformance::conformance_tests!(pinned, announcing::pinned(""));
stratalloc_conformance::conformance_tests!(
    pinned_powers_of_two,
    announcing::pinned("pinned_rounding:power_of_two,pinned_max_cached_size_mb:2")
);
stratalloc_conformance::conformance_tests!(
    pytorch,
    configured("backend:native,compat:pytorch,max_split_size_mb:20,roundup_power2_divisions:4")
);
stratalloc_conformance::conformance_tests!(
    layered,
    configured("backend:native,layers:[statistics,limit:200MiB]")
);
stratalloc_conformance::conformance_tests!(switched, |driver| {
    let config = Config::parse("backend:cudaMallocAsync", &stratalloc::registry::key_table())?;
    let options = BuildOptions { raw_addresses: true };
    let switchable = Switchable::build(&config, driver, options)?;
    switchable.switch("backend:native")?;
    Ok(Box::new(switchable))
});

#[test]
fn impossible_sizes_are_refused_before_any_driver_call() {
    for backend in ["native", "cudaMallocAsync", "cpu", "pinned"] {
        let own =
            configured(&format!("backend:{backend}"))(Arc::new(Sim::with_bytes(GIB))).unwrap();
        assert!(matches!(own.try_allocate(0, HOME), Err(AllocError::ZeroBytes)), "{backend}");
        let huge = own.try_allocate(u64::MAX, HOME).unwrap_err().to_string();
        let wanted = AllocError::TooLarge { requested_bytes: u64::MAX }.to_string();
        assert_eq!(huge, wanted, "{backend}");
    }
}

/// The other properties count driver calls or counters exactly, which a thread of the allocator changes.
#[test]
fn a_background_thread_reuses_pinned_blocks_as_requests_do() {
    use stratalloc_conformance::{Device, Property, assert_holds};
    let build = announcing::pinned("pinned_use_background_threads:True");
    for property in [
        Property::LiveBlocksNeverOverlap,
        Property::BytesStayIntact,
        Property::ReuseWaitsForWork,
        Property::EverythingIsReleased,
        Property::ThreadsGetBlocksOfTheirOwn,
    ] {
        for device in Device::ALL {
            assert_holds("pinned in the background", &build, property, *device);
        }
    }
}
