//! The core of the C interface: creates an allocator for one device, allocates and frees.

#![expect(unsafe_code, reason = "exported names and callers' pointers")]

use std::ffi::{c_char, c_void};

use super::guard::{self, Failure, Status, status};
use super::instance::Instance;
use super::pointers::{read, read_any, store, write_cut};
use super::{fork, table, user_data};
use stratalloc::ids::StreamId;

/// Converts a stream from the caller's type: a `cudaStream_t`, or any number on `sim` and `host`.
pub(super) fn stream_of(stream: *mut c_void) -> StreamId {
    StreamId(stream.addr() as u64)
}

/// Converts a stream to the caller's type.
pub(super) fn stream_to(stream: StreamId) -> *mut c_void {
    std::ptr::without_provenance_mut(usize::try_from(stream.0).unwrap_or(usize::MAX))
}

/// Converts a device address to a pointer.
pub(super) fn pointer_to(address: u64) -> Result<*mut c_void, Failure> {
    let address = usize::try_from(address);
    let wide = |_| Failure::new(Status::Internal, "a device address that no pointer holds");
    Ok(std::ptr::without_provenance_mut(address.map_err(wide)?))
}

/// Allocates a block and returns its address. Returns null for zero bytes.
#[inline]
pub(super) fn block(
    instance: &Instance,
    bytes: u64,
    stream: *mut c_void,
) -> Result<*mut c_void, Failure> {
    pointer_to(if bytes == 0 { 0 } else { instance.allocate(bytes, stream_of(stream))? })
}

/// Creates an allocator and stores its handle, which is never 0. `conf` is a configuration string. If
/// it is null, the environment is read (`ALLOC_CONF`, then PyTorch's variables). `device` is `sim` (a
/// simulated H200 without memory behind its addresses), `host` (memory of this machine) or `cuda:N`. A
/// handle is valid only in the process that created it: the child of a fork must create its own.
///
/// Some configurations are valid but probably a mistake, such as a repeated key, or two environment
/// variables with different configurations. Each causes one warning per process on the standard error
/// stream. This function writes such warnings, and so do `stratalloc_set_conf`, `stratalloc_switch` and
/// the functions for PyTorch.
///
/// # Safety
///
/// `conf` and `device` end with a zero byte if they are not null; `handle` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_create(
    conf: *const c_char,
    device: *const c_char,
    handle: *mut u64,
) -> Status {
    let work = || {
        // SAFETY: required of the caller (`# Safety`).
        let device = unsafe { read(device, "device") }?;
        // SAFETY: required of the caller (`# Safety`).
        let conf = unsafe { read_any(conf, "conf") }?;
        fork::prepare_for();
        Ok(user_data::add(Instance::open(conf, device)?))
    };
    // SAFETY: required of the caller (`# Safety`).
    unsafe { store(handle, "handle", work) }
}

/// Checks that a configuration string parses and that its backend is known. Creates no allocator, so it
/// does not find errors that depend on a device.
///
/// # Safety
///
/// `conf` ends with a zero byte if it is not null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_check_conf(conf: *const c_char) -> Status {
    // SAFETY: required of the caller (`# Safety`).
    status(|| Instance::check(unsafe { read(conf, "conf") }?))
}

/// Destroys an allocator and releases all its memory to the device, including live blocks. Blocks of
/// `backend:cpu` are the exception: they stay valid, and any other `backend:cpu` allocator of the
/// process can free them. If calls on other threads are still running, the last of them releases the
/// memory. Later calls with the handle fail. Does nothing in a forked child, if the allocator is of the
/// parent: only the parent can use it and what was made from it.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_destroy(handle: u64) -> Status {
    status(|| table::release(handle))
}

/// Allocates a block of at least `bytes` and stores its address. Work submitted to `stream` from now on
/// may use the block. For zero bytes, stores null and succeeds. Does not wait when a cached block fits,
/// except under the layer `guard`.
///
/// # Safety
///
/// `pointer` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_allocate(
    handle: u64,
    bytes: u64,
    stream: *mut c_void,
    pointer: *mut *mut c_void,
) -> Status {
    let work = || block(&*table::find(handle)?, bytes, stream);
    // SAFETY: required of the caller (`# Safety`).
    unsafe { store(pointer, "pointer", work) }
}

/// Frees the block that starts at `pointer`. Null is ignored. Work on the block's own stream may still
/// be running. Work on other streams must have been announced with `stratalloc_record_stream`.
///
/// Does not wait for running work, with these exceptions. If an announced stream was destroyed (with
/// `backend:cudaMallocAsync` also the block's own stream), the call waits for the device. If the block
/// is the last one of an allocator that a switch has replaced, the memory of that allocator is released,
/// which may wait. The layer `guard` waits for the block's streams before it checks the bytes around the
/// block. If the block was allocated with the cache off, the driver waits for the device. An allocator
/// that calls functions of the user may wait in them.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_free(handle: u64, pointer: *mut c_void) -> Status {
    status(|| {
        let instance = table::find(handle)?;
        if pointer.is_null() { Ok(()) } else { instance.free(pointer.addr() as u64) }
    })
}

/// Announces that work on `stream` uses the block. When the block is freed, it is not reused before
/// that work has finished. Never waits.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_record_stream(
    handle: u64,
    pointer: *mut c_void,
    stream: *mut c_void,
) -> Status {
    status(|| table::find(handle)?.record_stream(pointer.addr() as u64, stream_of(stream)))
}

/// Waits until the streams that use freed blocks have finished with them. Then releases the segments
/// without live blocks. `backend:native` keeps those of pools with users, and releases nothing while a
/// graph is captured.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_empty_cache(handle: u64) -> Status {
    status(|| Ok(table::find(handle)?.caching()?.empty_cache()?))
}

/// Limits the allocator to a fraction of the device's memory, from 0 to 1. 1 removes the limit. With
/// `backend:cpu` and `backend:pinned` it is a fraction of the memory of this machine or its container. The
/// limit is rounded to the nearest byte and applies to reserved bytes. With `backend:cudaMallocAsync` it
/// applies to live bytes, as in PyTorch, and the driver's pool may reserve more. Setting a limit releases no
/// memory.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_set_memory_fraction(handle: u64, fraction: f64) -> Status {
    status(|| Ok(table::find(handle)?.caching()?.set_memory_fraction(fraction)?))
}

/// Applies a configuration string on top of the current settings. Blocks stay valid. If the string
/// changes a key that is read only when an allocator is built (such as the backend or the layers), the
/// call switches as `stratalloc_switch` does.
///
/// # Safety
///
/// `conf` ends with a zero byte if it is not null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_set_conf(handle: u64, conf: *const c_char) -> Status {
    // SAFETY: required of the caller (`# Safety`).
    status(|| table::find(handle)?.set_conf(unsafe { read(conf, "conf") }?))
}

/// Switches the handle to an allocator with this configuration. New requests go to that allocator.
/// Existing blocks stay valid and are freed through the same handle. The string is complete: a key that
/// it omits has its default value. A memory limit stays unless the string sets another one.
///
/// If the call fails, nothing has changed. The call fails while a pool has users or a scope is open. May
/// wait for the device, because memory may be released.
///
/// # Safety
///
/// `conf` ends with a zero byte if it is not null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_switch(handle: u64, conf: *const c_char) -> Status {
    // SAFETY: required of the caller (`# Safety`).
    status(|| table::find(handle)?.switch(unsafe { read(conf, "conf") }?))
}

/// Writes the message of the calling thread's last failed call, cut to `size` bytes including the
/// terminating zero. Returns the number of bytes that the whole message needs. The message is empty if
/// no call of the thread has failed. A successful call does not change it. Returns 0 for a null buffer
/// with a nonzero size.
///
/// # Safety
///
/// `size` bytes from `buffer` may be written, unless it is null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_last_error(buffer: *mut c_char, size: usize) -> usize {
    // SAFETY: required of the caller (`# Safety`).
    unsafe { write_cut(buffer, size, &guard::last_error()) }
}

/// Returns the status of the calling thread's last failed call. `STRATALLOC_STATUS_OK` if no call of the
/// thread has failed. A successful call does not change it. For functions that return a pointer.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_last_status() -> Status {
    guard::last_status()
}

/// Returns the version of the library, as `"1.2.3"`. The text is never freed.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}
