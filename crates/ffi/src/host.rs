//! The counters of page-locked host memory, in the form of PyTorch's `host_memory_stats`.

#![expect(unsafe_code, reason = "exported names and callers' pointers")]

use super::guard::{Failure, Status};
use super::pointers::store;
use super::table;
use stratalloc::allocator::DeviceAllocator;
use stratalloc::stats::{Counter, Statistics};

/// A counter of host memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostCounter {
    /// The current value.
    pub current: i64,
    /// The highest value since the start or the last reset of peaks.
    pub peak: i64,
    /// The sum of all increases since the start or the last reset of accumulated counters.
    pub allocated: i64,
    /// The sum of all decreases since the start or the last reset of accumulated counters.
    pub freed: i64,
}

impl From<Counter> for HostCounter {
    fn from(own: Counter) -> Self {
        let Counter { current, peak, allocated, freed } = own;
        Self { current, peak, allocated, freed }
    }
}

/// The times of the driver's calls of one kind, in microseconds.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostTimes {
    /// The sum since the start or the last reset of accumulated counters.
    pub total: i64,
    /// The longest time since the start or the last reset of peaks.
    pub max: i64,
    /// The shortest time since the start or the last reset of peaks; 0 if there was none.
    pub min: i64,
    /// The number of calls since the start or the last reset of accumulated counters.
    pub count: i64,
}

/// The counters of `backend:pinned`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostStatistics {
    /// Allocations from the driver.
    pub driver_allocations: i64,
    /// Allocations that were released to the driver.
    pub driver_frees: i64,
    /// Blocks that were allocated from the driver: live, waiting or free.
    pub blocks: HostCounter,
    /// The bytes of these blocks.
    pub reserved_bytes: HostCounter,
    /// Live blocks.
    pub live_blocks: HostCounter,
    /// The bytes of live blocks, after rounding.
    pub live_bytes: HostCounter,
    /// The times of allocations from the driver.
    pub allocate_time: HostTimes,
    /// The times of releases to the driver.
    pub free_time: HostTimes,
}

impl HostStatistics {
    /// Returns `None` if the allocator has no counters of host memory.
    fn of(all: &Statistics) -> Option<Self> {
        let own = |name: String| all.own.iter().find(|own| own.name == name).map(|own| own.count);
        let times = |call: &str| {
            let value = |name| own(format!("pinned.{call}_us.{name}"));
            Some(HostTimes {
                total: value("total")?,
                max: value("max")?,
                min: value("min")?,
                count: value("count")?,
            })
        };
        Some(Self {
            driver_allocations: all.num_device_alloc,
            driver_frees: all.num_device_free,
            blocks: all.segment.all.into(),
            reserved_bytes: all.reserved_bytes.all.into(),
            live_blocks: all.allocation.all.into(),
            live_bytes: all.allocated_bytes.all.into(),
            allocate_time: times("allocate")?,
            free_time: times("free")?,
        })
    }
}

/// Stores the counters of an allocator of page-locked host memory. Only `backend:pinned` has them.
///
/// # Safety
///
/// `statistics` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_host_statistics(
    handle: u64,
    statistics: *mut HostStatistics,
) -> Status {
    let work = || {
        let instance = table::find(handle)?;
        let control = instance.allocator.control();
        let found = control.counters.and_then(|own| HostStatistics::of(&own.statistics()));
        found.ok_or_else(|| Failure::lacks(instance.allocator.name(), "counters of host memory"))
    };
    // SAFETY: required of the caller (`# Safety`).
    unsafe { store(statistics, "statistics", work) }
}

#[cfg(test)]
mod tests {
    use std::ptr::null_mut;

    use super::*;
    use crate::{
        stratalloc_allocate, stratalloc_create, stratalloc_destroy, stratalloc_empty_cache,
        stratalloc_free, stratalloc_reset_accumulated,
    };

    fn create(conf: &std::ffi::CStr, device: &std::ffi::CStr) -> u64 {
        let mut handle = 0;
        // SAFETY: both texts end with a zero, and the handle's pointer is to a local variable.
        let made = unsafe { stratalloc_create(conf.as_ptr(), device.as_ptr(), &raw mut handle) };
        assert_eq!(made, Status::Ok, "{}", crate::guard::last_error());
        handle
    }

    fn allocate(handle: u64, bytes: u64) -> *mut std::ffi::c_void {
        let mut pointer = null_mut();
        // SAFETY: the pointer is to a local variable.
        let made = unsafe { stratalloc_allocate(handle, bytes, null_mut(), &raw mut pointer) };
        assert_eq!(made, Status::Ok, "{}", crate::guard::last_error());
        pointer
    }

    fn statistics(handle: u64) -> Result<HostStatistics, Status> {
        let mut found = HostStatistics::default();
        // SAFETY: the pointer is to a local variable.
        match unsafe { stratalloc_host_statistics(handle, &raw mut found) } {
            Status::Ok => Ok(found),
            status => Err(status),
        }
    }

    #[test]
    fn pinned_memory_is_counted_as_pytorch_counts_it() {
        let layered = c"backend:pinned,layers:[statistics]";
        for (conf, device) in [(c"backend:pinned", c"sim"), (layered, c"host")] {
            let handle = create(conf, device);
            let blocks = [1 << 20, 3 << 20].map(|bytes| allocate(handle, bytes));
            assert_eq!(stratalloc_free(handle, blocks[0]), Status::Ok);
            let again = allocate(handle, 1 << 20);
            assert_eq!(again, blocks[0]);
            assert_eq!(stratalloc_free(handle, again), Status::Ok);
            let now = statistics(handle).unwrap();
            assert_eq!((now.driver_allocations, now.driver_frees), (2, 0));
            let counter =
                |current, peak, allocated, freed| HostCounter { current, peak, allocated, freed };
            assert_eq!(now.blocks, counter(2, 2, 2, 0));
            assert_eq!(now.reserved_bytes, counter(4 << 20, 4 << 20, 4 << 20, 0));
            assert_eq!(now.live_blocks, counter(1, 2, 3, 2));
            assert_eq!(now.live_bytes, counter(3 << 20, 4 << 20, 5 << 20, 2 << 20));
            assert_eq!((now.allocate_time.count, now.free_time.count), (2, 0));
            assert!(now.allocate_time.max <= now.allocate_time.total);
            assert_eq!(stratalloc_empty_cache(handle), Status::Ok);
            let now = statistics(handle).unwrap();
            assert_eq!((now.driver_frees, now.free_time.count, now.blocks.current), (1, 1, 1));
            assert_eq!(stratalloc_reset_accumulated(handle), Status::Ok);
            let now = statistics(handle).unwrap();
            assert_eq!((now.allocate_time.count, now.blocks), (0, counter(1, 2, 0, 0)));
            assert_eq!(stratalloc_destroy(handle), Status::Ok);
        }
        let native = create(c"backend:native", c"sim");
        assert_eq!(statistics(native), Err(Status::NotSupported));
        assert_eq!(crate::guard::last_error(), "backend:native has no counters of host memory");
        assert_eq!(stratalloc_destroy(native), Status::Ok);
    }
}
