//! The functions that PyTorch's pluggable allocator loads: two required ones and eight optional
//! callbacks.
//!
//! Each device has one allocator (`devices`). It is created at the first use, with the configuration from
//! the environment, and never destroyed. Finding it costs one load and takes no lock.
//!
//! PyTorch passes a null pointer on without an error, and the optional callbacks return no status. So
//! failures are also written to the standard error stream. PyTorch opens a pool's scope before a capture
//! begins. PyTorch passes a C++ function that selects the streams. It is copied, and called at each
//! request.
//!
//! Source of the signatures: PyTorch's `CUDAPluggableAllocator`.

#![expect(unsafe_code, reason = "exported names and callers' pointers")]

mod class;
mod settings;

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

use super::calls::{pointer_to, stream_of};
use super::devices::{open_device, open_devices, opened};
use super::fork::is_child;
use super::guard::{Failure, Status, guard, status};
use super::instance::environment_over;
use super::messages::write_last_error;
use super::pointers::{store, store_any};
use super::pools::Pool;
use super::table::DEVICE_HANDLE;
pub use class::*;
pub use settings::*;
use stratalloc::allocator::ScopeFilter;
use stratalloc::strategies::plugin::copied;

/// Runs one call as [`guard`] does, and also writes a failure to the standard error stream. Returns
/// `otherwise` after a failure.
#[inline]
fn reporting<T>(otherwise: T, work: impl FnOnce() -> Result<T, Failure>) -> T {
    match guard(work) {
        Ok(done) => done,
        Err(_) => {
            write_last_error();
            otherwise
        }
    }
}

/// Allocates a block for PyTorch. Returns null for zero bytes, without an error. Also returns null, and
/// sets the thread's last error, when the call fails: not enough memory, no such device, or an invalid
/// configuration in the environment, for example. For tests, the variable `STRATALLOC_DEVICE` may be
/// `sim` or `host` instead of `cuda`.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_torch_malloc(
    size: usize,
    device: c_int,
    stream: *mut c_void,
) -> *mut c_void {
    if size == 0 {
        return null_mut();
    }
    reporting(null_mut(), || {
        let open = open_device(device)?;
        pointer_to(open.allocate(size as u64, stream_of(stream))?)
    })
}

/// Frees a block for PyTorch. Ignores null. In the child of a fork, ignores blocks on a device for which
/// the child has created no allocator. Ignores `size` and `stream`, because the allocator has stored
/// them.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_torch_free(
    pointer: *mut c_void,
    size: usize,
    device: c_int,
    stream: *mut c_void,
) {
    let _ = (size, stream);
    if pointer.is_null() {
        return;
    }
    reporting((), || match opened(device) {
        Ok(open) => open.free(pointer.addr() as u64),
        // The block belongs to the parent of the fork, whose allocator does not exist here.
        Err(_) if is_child() => Ok(()),
        Err(none) => Err(none),
    });
}

/// `set_init_fn`: reads the environment, so that an invalid configuration is reported immediately.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_torch_init(device_count: c_int) {
    // No allocator is created here, because it would use memory of a device that may stay unused.
    let _ = device_count;
    reporting((), || environment_over("").map(drop));
}

/// `set_reset_fn`: empties the caches of all devices. Waits for the devices.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_torch_reset() {
    for (_, open) in open_devices() {
        reporting((), || Ok(open.caching()?.empty_cache()?));
    }
}

/// Calls `stratalloc_history_drop_stack_source` for the allocators of all devices.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_torch_drop_stack_sources() -> Status {
    status(|| {
        for (_, open) in open_devices() {
            open.history().drop_stack_provider();
        }
        Ok(())
    })
}

/// `set_memory_fraction_fn`: limits a device's allocator to a fraction of the device's memory.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_torch_memory_fraction(fraction: f64, device: c_int) {
    reporting((), || Ok(open_device(device)?.caching()?.set_memory_fraction(fraction)?));
}

/// `set_base_alloc_fn`: returns the start of the segment that contains `pointer`, and stores the
/// segment's size. If `pointer` is unknown, returns `pointer` and stores 0. Returns null for null, and
/// stores nothing. Walks over all segments.
///
/// # Safety
///
/// `size` may be written, unless it is null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_torch_base_allocation(
    pointer: *mut c_void,
    size: *mut usize,
) -> *mut c_void {
    if pointer.is_null() {
        return pointer;
    }
    reporting(pointer, || {
        let address = pointer.addr() as u64;
        let found = open_devices().find_map(|(_, open)| open.base_of(address));
        let size_bytes = found.map_or(0, |(_, size_bytes)| size_bytes);
        // SAFETY: required of the caller (`# Safety`).
        unsafe { store_any(size, usize::try_from(size_bytes).unwrap_or(usize::MAX)) };
        found.map_or_else(|| Err(not_ours(address)), |(base, _)| pointer_to(base))
    })
}

/// `set_record_stream_fn`: announces that work on `stream` uses the block. Ignores null.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_torch_record_stream(pointer: *mut c_void, stream: *mut c_void) {
    if pointer.is_null() {
        return;
    }
    reporting((), || {
        let address = pointer.addr() as u64;
        // PyTorch does not pass the device, so each allocator is tried. Only one of them has the block.
        for (_, open) in open_devices() {
            match open.record_stream(address, stream_of(stream)) {
                Err(failure) if failure.status == Status::UnknownAddress => {}
                other => return other,
            }
        }
        Err(not_ours(address))
    });
}

/// `set_begin_allocate_to_pool`: routes the requests that a filter accepts to a pool. The new scope
/// takes precedence over all scopes that are already open. The filter is copied. It is called at each
/// request with the request's stream, on the requesting thread. A null or empty filter accepts the
/// calling thread's requests.
///
/// # Safety
///
/// `filter` is null, or a `std::function<bool(cudaStream_t)>` of GNU's C++ library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_torch_begin_allocate_to_pool(
    device: c_int,
    pool: Pool,
    filter: *mut c_void,
) {
    reporting((), || {
        // SAFETY: required of the caller (`# Safety`).
        let copied = unsafe { copied(filter) };
        let filter = copied.map_or_else(ScopeFilter::this_thread, ScopeFilter::Where);
        Ok(open_device(device)?.pools()?.open_scope(pool.into(), filter)?)
    });
}

/// `set_end_allocate_to_pool_fn`: closes the pool's scope. The pool stays in use until it is released.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_torch_end_allocate_to_pool(device: c_int, pool: Pool) {
    reporting((), || Ok(opened(device)?.pools()?.close_scope(pool.into())?));
}

/// `set_release_pool`: removes a user from a pool. The free memory of a pool without users is released
/// the next time the allocator releases memory.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_torch_release_pool(device: c_int, pool: Pool) {
    reporting((), || Ok(opened(device)?.pools()?.release_pool(pool.into())?));
}

/// Stores a handle of PyTorch's allocator on a device, for the other functions of this interface.
/// Creates the allocator if there is none yet. The allocator cannot be destroyed. The handle is
/// `STRATALLOC_TORCH_HANDLE` plus the device's ordinal. Calls with it take no lock to find the
/// allocator.
///
/// # Safety
///
/// `handle` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_torch_handle(device: c_int, handle: *mut u64) -> Status {
    let work = || {
        let _ = open_device(device)?;
        Ok(DEVICE_HANDLE + u64::try_from(device).unwrap_or_default())
    };
    // SAFETY: required of the caller (`# Safety`).
    unsafe { store(handle, "handle", work) }
}

/// Empties the caches of all devices, as `stratalloc_torch_reset` does, and returns a status. If one
/// device fails, continues with the others and returns the status of the last failure. Waits for the
/// devices.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_torch_empty_cache() -> Status {
    let mut ended = Status::Ok;
    for (_, open) in open_devices() {
        let emptied = status(|| Ok(open.caching()?.empty_cache()?));
        if emptied != Status::Ok {
            ended = emptied;
        }
    }
    ended
}

#[cold]
fn not_ours(address: u64) -> Failure {
    let text = format_args!("no block of any device is at {address:#x}");
    Failure::new(Status::UnknownAddress, text)
}
