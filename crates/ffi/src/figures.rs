//! Counters and sizes of an allocator and its device, `record_free`, and turning the cache on and off.

#![expect(unsafe_code, reason = "exported names and callers' pointers")]

use std::ffi::{c_int, c_void};

use super::calls::pointer_to;
use super::device::device_count;
use super::guard::{Failure, Status, status};
use super::pointers::{OutPointer, store, store_all};
use super::table;
use stratalloc::allocator::{Counters, DeviceAllocator};

/// Memory of the device and of the cache.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheInfo {
    /// Free bytes of the device.
    pub device_free_bytes: u64,
    /// All bytes of the device.
    pub device_total_bytes: u64,
    /// The largest free block in the cache, in bytes.
    pub largest_cached_bytes: u64,
    /// Number of free blocks in the cache.
    pub free_blocks: u64,
}

/// Sets every peak to its current value.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_reset_peaks(handle: u64) -> Status {
    table::on(handle, |instance| instance.allocator.reset_peaks())
}

/// Sets all accumulated counters (allocated, freed, numbers of events) to zero.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_reset_accumulated(handle: u64) -> Status {
    table::on(handle, |instance| instance.allocator.reset_accumulated())
}

/// Stores the fraction of the memory that the allocator may reserve. Stores 1 if there is no limit. The
/// memory is the device's or, for `backend:cpu` and `backend:pinned`, that of this machine or its container.
/// A limit is a whole number of bytes, so the last digits may differ from the fraction that was set. Setting
/// the stored fraction does not change the limit.
///
/// # Safety
///
/// `fraction` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_memory_fraction(handle: u64, fraction: *mut f64) -> Status {
    let work = || Ok(table::find(handle)?.caching()?.memory_fraction()?);
    // SAFETY: required of the caller (`# Safety`).
    unsafe { store(fraction, "fraction", work) }
}

/// Stores the free and the total bytes of the device, as its driver reports them now. Cached memory
/// does not count as free. A limit does not affect the numbers.
///
/// # Safety
///
/// `free_bytes` and `total_bytes` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_memory_info(
    handle: u64,
    free_bytes: *mut u64,
    total_bytes: *mut u64,
) -> Status {
    let work = || {
        let info = table::find(handle)?.driver.memory_info()?;
        Ok([info.free_bytes, info.total_bytes])
    };
    // SAFETY: required of the caller (`# Safety`).
    unsafe { store_all([free_bytes, total_bytes], work) }
}

/// Stores memory figures of the device and the cache. Walks over the free blocks.
///
/// # Safety
///
/// `info` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_cache_info(handle: u64, info: *mut CacheInfo) -> Status {
    let work = || {
        let now = table::find(handle)?.caching()?.cache_info()?;
        Ok(CacheInfo {
            device_free_bytes: now.device_free_bytes,
            device_total_bytes: now.device_total_bytes,
            largest_cached_bytes: now.largest_cached_bytes,
            free_blocks: now.free_blocks,
        })
    };
    // SAFETY: required of the caller (`# Safety`).
    unsafe { store(info, "info", work) }
}

/// Stores the start and the size in bytes of the segment that contains `pointer`. For an expandable
/// segment, stores those of the mapped range that contains it. For a block that was allocated with the
/// cache off, stores those of the block. Walks over all segments.
///
/// # Safety
///
/// `base` and `size` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_base_allocation(
    handle: u64,
    pointer: *mut c_void,
    base: *mut *mut c_void,
    size: *mut u64,
) -> Status {
    status(|| {
        // SAFETY: required of the caller (`# Safety`).
        let base = unsafe { OutPointer::new(base, "base") }?;
        // SAFETY: required of the caller (`# Safety`).
        let size = unsafe { OutPointer::new(size, "size") }?;
        let instance = table::find(handle)?;
        instance.caching()?;
        let found = instance.base_of(pointer.addr() as u64);
        let unknown =
            || Failure::new(Status::UnknownAddress, format_args!("no segment has {pointer:?}"));
        let (address, size_bytes) = found.ok_or_else(unknown)?;
        base.put(pointer_to(address)?);
        size.put(size_bytes);
        Ok(())
    })
}

/// Stores the allocated and the reserved bytes, and the peak of each. Much cheaper than the text
/// `STRATALLOC_TEXT_STATISTICS`. With `backend:native` and no layers, it does not wait while another
/// thread calls the driver.
///
/// # Safety
///
/// All four pointers may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_usage(
    handle: u64,
    allocated: *mut u64,
    allocated_peak: *mut u64,
    reserved: *mut u64,
    reserved_peak: *mut u64,
) -> Status {
    let work = || {
        let now = table::find(handle)?.allocator.usage();
        let allocated = [now.allocated_bytes, now.allocated_peak_bytes];
        let reserved = [now.reserved_bytes, now.reserved_peak_bytes];
        Ok([allocated[0], allocated[1], reserved[0], reserved[1]]
            .map(|bytes| u64::try_from(bytes).unwrap_or(0)))
    };
    // SAFETY: required of the caller (`# Safety`).
    unsafe { store_all([allocated, allocated_peak, reserved, reserved_peak], work) }
}

/// Stores the number of live blocks. As cheap as `stratalloc_usage`.
///
/// # Safety
///
/// `count` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_block_count(handle: u64, count: *mut u64) -> Status {
    // SAFETY: required of the caller (`# Safety`).
    unsafe {
        store(count, "count", || {
            Ok(u64::try_from(table::find(handle)?.allocator.usage().live_blocks).unwrap_or(0))
        })
    }
}

/// Stores the external fragmentation of the allocator's segments, from 0 to 1: 1 - largest free block /
/// sum of all free blocks. Adjacent free blocks count as one. Stores 0 if nothing is free. Always
/// stores 0 with `backend:cudaMallocAsync`, because the driver does not report its free ranges. Walks
/// over the free blocks.
///
/// # Safety
///
/// `fragmentation` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_fragmentation(handle: u64, fragmentation: *mut f64) -> Status {
    // SAFETY: required of the caller (`# Safety`).
    unsafe {
        store(fragmentation, "fragmentation", || {
            Ok(table::find(handle)?.caching()?.cache_info()?.fragmentation())
        })
    }
}

/// Stores the number of CUDA devices. Stores 0 without a CUDA driver.
///
/// # Safety
///
/// `count` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_device_count(count: *mut c_int) -> Status {
    // SAFETY: required of the caller (`# Safety`).
    unsafe { store(count, "count", || Ok(c_int::try_from(device_count()?).unwrap_or(c_int::MAX))) }
}

/// Removes the live block of `backend:cpu` that starts at `pointer` from the allocator. The caller then
/// frees the block's memory: with `free` if the block is below 1 MiB, otherwise with `munmap`. Call this
/// function first and free the memory after it: once the memory is freed, the system may reuse the
/// address. Not supported by other backends, or if there are layers.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_record_free(handle: u64, pointer: *mut c_void) -> Status {
    status(|| table::find(handle)?.record_free(pointer.addr() as u64))
}

/// Turns the cache off if `on` is 0, otherwise on. With the cache off, each request is one call of the
/// driver, and a free releases the memory at once and waits for the device. This is for tools that
/// observe every allocation. Blocks that are allocated with the cache off appear in no counter, history,
/// pool or layer, and no limit applies to them. Existing blocks are not affected. Only `backend:native`
/// supports this. After a switch to another backend, the cache of that backend is used.
///
/// If the variable `PYTORCH_NO_CUDA_MEMORY_CACHING` (or `PYTORCH_NO_HIP_MEMORY_CACHING`) is set to any
/// value, the cache is initially off in allocators that get their configuration from the environment.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_set_caching(handle: u64, on: c_int) -> Status {
    status(|| table::find(handle)?.set_caching(on != 0))
}

/// Stores 1 if the cache is on, 0 if it is off.
///
/// # Safety
///
/// `on` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_caching(handle: u64, on: *mut c_int) -> Status {
    // SAFETY: required of the caller (`# Safety`).
    unsafe { store(on, "on", || Ok(c_int::from(table::find(handle)?.is_caching()))) }
}
