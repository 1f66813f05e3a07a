//! The interface by handles: allocators of one device each, for programs in other languages.

#![expect(unsafe_code, reason = "exported names and callers' pointers")]

use std::ffi::{c_char, c_void};

use super::guard::{self, Failure, Status, status};
use super::instance::Instance;
use super::pointers::{read, read_any, store, write_cut};
use super::table;
use crate::ids::StreamId;

/// A stream as callers have it: `cudaStream_t`, or any number.
pub(super) fn stream_of(stream: *mut c_void) -> StreamId {
    StreamId(stream.addr() as u64)
}

/// The same the other way.
pub(super) fn stream_to(stream: StreamId) -> *mut c_void {
    std::ptr::without_provenance_mut(usize::try_from(stream.0).unwrap_or(usize::MAX))
}

/// A device address as callers have it.
pub(super) fn pointer_to(address: u64) -> Result<*mut c_void, Failure> {
    let address = usize::try_from(address);
    let wide = |_| Failure::new(Status::Internal, "a device address that no pointer holds");
    Ok(std::ptr::without_provenance_mut(address.map_err(wide)?))
}

/// A block as callers have it; null for zero bytes.
#[inline]
pub(super) fn block(
    instance: &Instance,
    bytes: u64,
    stream: *mut c_void,
) -> Result<*mut c_void, Failure> {
    pointer_to(if bytes == 0 { 0 } else { instance.allocate(bytes, stream_of(stream))? })
}

/// Builds an allocator and stores its handle, which is never 0. `conf` is a configuration string, or
/// null for what the environment says (`ALLOC_CONF`, then PyTorch's variables). `device` is `sim` (no
/// memory, any size), `host` (memory of this machine) or `cuda:N`. Handles are of the process that got
/// them: the child of a fork makes its own.
///
/// What is legal in a configuration and probably not meant (a key that stands twice, variables of the
/// environment that differ) is said on the standard error stream, each text once in a process: here, by
/// `stratalloc_set_conf`, by `stratalloc_switch` and by PyTorch's functions.
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
        // SAFETY: our caller's promise.
        let device = unsafe { read(device, "device") }?;
        // SAFETY: our caller's promise.
        let conf = unsafe { read_any(conf, "conf") }?;
        table::add(Instance::open(conf, device)?)
    };
    // SAFETY: our caller's promise.
    unsafe { store(handle, "handle", work) }
}

/// Whether a configuration string can be used: it parses, and its backend is known. Nothing is built, so
/// what a device refuses shows later.
///
/// # Safety
///
/// `conf` ends with a zero byte if it is not null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_check_conf(conf: *const c_char) -> Status {
    // SAFETY: our caller's promise.
    status(|| Instance::check(unsafe { read(conf, "conf") }?))
}

/// Ends an allocator and gives all its memory back to the device, also blocks that are still live. Only
/// blocks of `backend:cpu` live on: any other `backend:cpu` of the process takes them back.
/// Calls of other threads that are inside finish first; later ones are refused.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_destroy(handle: u64) -> Status {
    status(|| table::remove(handle).map(drop))
}

/// Hands out a block of at least `bytes`, valid for work on `stream` from now on, and stores its
/// address. Zero bytes store null and are no error. Does not wait when a cached block fits.
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
    // SAFETY: our caller's promise.
    unsafe { store(pointer, "pointer", work) }
}

/// Takes the block that starts at `pointer` back; null is ignored. Work on the block's own stream may
/// still be running; work on other streams must have been announced. Waits for no running work, but for
/// these: when an announced stream (with `backend:cudaMallocAsync` the block's own too) was destroyed, the
/// device is waited for; the last block of an allocator that was switched away from ends it, and its memory
/// goes back; the layer `guard` looks at the block's bytes first; functions of users do as they like.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_free(handle: u64, pointer: *mut c_void) -> Status {
    status(|| {
        let instance = table::find(handle)?;
        if pointer.is_null() { Ok(()) } else { instance.free(pointer.addr() as u64) }
    })
}

/// Announces that work on `stream` uses the block: after its free it is reused only when that work
/// has finished. Never waits.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_record_stream(
    handle: u64,
    pointer: *mut c_void,
    stream: *mut c_void,
) -> Status {
    status(|| table::find(handle)?.record_stream(pointer.addr() as u64, stream_of(stream)))
}

/// Waits for all pending work on freed blocks and gives every segment that is wholly free back.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_empty_cache(handle: u64) -> Status {
    status(|| Ok(table::find(handle)?.caching()?.empty_cache()?))
}

/// Limits the allocator to a part of the device's memory, from 0 to 1; 1 removes the limit. The limit
/// counts reserved bytes; with `backend:cudaMallocAsync` it counts the bytes of blocks in use, as
/// PyTorch's does, and the driver's pool may reserve more. Releases nothing by itself.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_set_memory_fraction(handle: u64, fraction: f64) -> Status {
    status(|| Ok(table::find(handle)?.caching()?.set_memory_fraction(fraction)?))
}

/// Puts a further configuration string in force on top of those before; blocks stay. A string that
/// changes the backend, the layers or another key that an allocator reads only when it is built
/// switches, as `stratalloc_switch` does.
///
/// # Safety
///
/// `conf` ends with a zero byte if it is not null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_set_conf(handle: u64, conf: *const c_char) -> Status {
    // SAFETY: our caller's promise.
    status(|| table::find(handle)?.set_conf(unsafe { read(conf, "conf") }?))
}

/// Puts the allocator that the string names behind the handle: new requests go there, blocks from
/// before stay valid and are freed through the same handle. The string is complete: what it does not say
/// has its default. A limit stays unless the string says another. If the call fails, everything is as it
/// was. It fails while a pool has users or a scope is open. May wait for the device, as releasing memory
/// does.
///
/// # Safety
///
/// `conf` ends with a zero byte if it is not null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_switch(handle: u64, conf: *const c_char) -> Status {
    // SAFETY: our caller's promise.
    status(|| table::find(handle)?.switch(unsafe { read(conf, "conf") }?))
}

/// Writes what the calling thread's last failed call said, cut to `size` bytes with the zero at its
/// end, and returns the bytes that all of it takes. Empty text if no call of the thread has failed; a
/// call that succeeds leaves it alone. Returns 0 for a null buffer that has a size.
///
/// # Safety
///
/// `size` bytes from `buffer` may be written, unless it is null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_last_error(buffer: *mut c_char, size: usize) -> usize {
    // SAFETY: our caller's promise.
    unsafe { write_cut(buffer, size, &guard::last_error()) }
}

/// The version of the library, as `"1.2.3"`. Lives as long as the process.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}
