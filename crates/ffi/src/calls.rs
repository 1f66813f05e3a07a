//! The C interface's core: creates an allocator for one device, allocates and frees.

#![expect(unsafe_code, reason = "exported names and callers' pointers")]

use std::ffi::{c_char, c_void};

use super::guard::{self, Failure, Status, status};
use super::instance::Instance;
use super::pointers::{read, read_any, store, write_cut};
use super::table;
use stratalloc::ids::StreamId;

/// Converts a caller's stream (`cudaStream_t`, or any number).
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

/// Allocates a block and returns its address; null for zero bytes.
#[inline]
pub(super) fn block(
    instance: &Instance,
    bytes: u64,
    stream: *mut c_void,
) -> Result<*mut c_void, Failure> {
    pointer_to(if bytes == 0 { 0 } else { instance.allocate(bytes, stream_of(stream))? })
}

/// Creates an allocator and stores its handle, which is never 0. `conf` is a configuration string, or
/// null to read the environment (`ALLOC_CONF`, then PyTorch's variables). `device` is `sim` (no memory,
/// any size), `host` (memory of this machine) or `cuda:N`. A handle is valid only in the process that
/// created it: the child of a fork must create its own.
///
/// Some configurations are legal and probably a mistake, such as a repeated key or environment variables
/// that differ. These cause a warning on the standard error stream, each text once per process. The
/// functions that warn are this one, `stratalloc_set_conf`, `stratalloc_switch` and PyTorch's.
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

/// Checks that a configuration string parses and that its backend is known. Builds nothing, so errors of
/// a device show up later.
///
/// # Safety
///
/// `conf` ends with a zero byte if it is not null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_check_conf(conf: *const c_char) -> Status {
    // SAFETY: our caller's promise.
    status(|| Instance::check(unsafe { read(conf, "conf") }?))
}

/// Destroys an allocator and releases all its memory to the device, including live blocks. Blocks of
/// `backend:cpu` are the exception: they stay valid, and any other `backend:cpu` allocator of the process
/// can free them. Calls that run on other threads finish first; later ones are refused.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_destroy(handle: u64) -> Status {
    status(|| table::remove(handle).map(drop))
}

/// Allocates a block of at least `bytes`, usable by work on `stream` at once, and stores its address.
/// Zero bytes store null and are no error. Does not wait when a cached block fits.
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

/// Frees the block that starts at `pointer`; null is ignored. Work on the block's own stream may still be
/// running. Work on other streams must have been announced with `stratalloc_record_stream`.
///
/// Does not wait for running work, with these exceptions. If an announced stream was destroyed (with
/// `backend:cudaMallocAsync` also the block's own stream), the call waits for the device. Freeing the
/// last block of a retired allocator, one that was switched away from, releases its memory, which may
/// wait. The layer `guard` waits for the block's streams before it checks the bytes around the block.
/// Callers' functions may wait.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_free(handle: u64, pointer: *mut c_void) -> Status {
    status(|| {
        let instance = table::find(handle)?;
        if pointer.is_null() { Ok(()) } else { instance.free(pointer.addr() as u64) }
    })
}

/// Announces that work on `stream` uses the block. After its free, the block is reused only when that
/// work has finished. Never waits.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_record_stream(
    handle: u64,
    pointer: *mut c_void,
    stream: *mut c_void,
) -> Status {
    status(|| table::find(handle)?.record_stream(pointer.addr() as u64, stream_of(stream)))
}

/// Waits for all pending work on freed blocks, then releases every segment that is entirely free.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_empty_cache(handle: u64) -> Status {
    status(|| Ok(table::find(handle)?.caching()?.empty_cache()?))
}

/// Limits the allocator to a fraction of the device's memory, from 0 to 1; 1 removes the limit. The limit
/// counts reserved bytes. With `backend:cudaMallocAsync` it counts the bytes of blocks in use, as PyTorch
/// does, and the driver's pool may reserve more. Setting a limit releases no memory.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_set_memory_fraction(handle: u64, fraction: f64) -> Status {
    status(|| Ok(table::find(handle)?.caching()?.set_memory_fraction(fraction)?))
}

/// Applies a configuration string on top of the current settings; blocks stay. If the string changes a
/// key that is read only when an allocator is built (the backend, the layers and others), the call
/// switches as `stratalloc_switch` does.
///
/// # Safety
///
/// `conf` ends with a zero byte if it is not null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_set_conf(handle: u64, conf: *const c_char) -> Status {
    // SAFETY: our caller's promise.
    status(|| table::find(handle)?.set_conf(unsafe { read(conf, "conf") }?))
}

/// Switches the handle to the allocator that the string describes. New requests go to that allocator;
/// existing blocks stay valid and are freed through the same handle. The string is complete: a key that
/// it omits has its default. A memory limit stays unless the string sets another.
///
/// If the call fails, nothing has changed. It fails while a pool has users or a scope is open. May wait
/// for the device, as releasing memory does.
///
/// # Safety
///
/// `conf` ends with a zero byte if it is not null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_switch(handle: u64, conf: *const c_char) -> Status {
    // SAFETY: our caller's promise.
    status(|| table::find(handle)?.switch(unsafe { read(conf, "conf") }?))
}

/// Writes the message of the calling thread's last failed call, cut to `size` bytes including the
/// terminating zero. Returns the bytes that the whole message needs. The message is empty if no call of
/// the thread has failed; a successful call leaves it unchanged. Returns 0 for a null buffer with a
/// nonzero size.
///
/// # Safety
///
/// `size` bytes from `buffer` may be written, unless it is null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_last_error(buffer: *mut c_char, size: usize) -> usize {
    // SAFETY: our caller's promise.
    unsafe { write_cut(buffer, size, &guard::last_error()) }
}

/// Returns the version of the library, as `"1.2.3"`. The text is never freed.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}
