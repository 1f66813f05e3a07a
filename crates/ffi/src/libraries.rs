//! Functions that allocators of other libraries call: CuPy, RMM, Numba, ONNX Runtime and TensorRT.
//!
//! Their requests are served by the process's allocator of the device, which is also PyTorch's if it is
//! installed there. So all libraries share one cache, one limit and one history. While recording is on,
//! the stacks of a library's requests have the library's name as their innermost frame.
//!
//! The libraries call with a size, and at most a device and a stream. CuPy's C interface has no argument
//! for the stream: CuPy's function `get_stream_ptr` returns the calling thread's current one. ONNX
//! Runtime's functions have no argument for the device either, so [`stratalloc_onnxruntime_use`] sets it
//! once. ONNX Runtime works on the legacy default stream when it uses them.
//!
//! Sources: `CFunctionAllocator` in CuPy's `memory.pyx`, `get_stream_ptr` in CuPy's `stream.pyx`; the
//! options `gpu_external_alloc`, `_free` and `_empty_cache` of ONNX Runtime's CUDA provider.

#![expect(unsafe_code, reason = "exported names and callers' pointers")]

use std::ffi::{CString, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;

use super::calls::{block, stream_of};
use super::devices::{open_device, opened};
use super::fork::is_child;
use super::guard::{Failure, Status, guard, last_error, status};
use super::instance::Instance;
use super::pointers::read;
use stratalloc::history::Context;

/// Allocates a block on `stream` for a library. Adds its name to the stack if recording is on.
#[inline]
fn allocate<'a>(
    library: impl FnOnce() -> Result<&'a str, Failure>,
    device: c_int,
    bytes: usize,
    stream: *mut c_void,
) -> Result<*mut c_void, Failure> {
    let open = open_device(device)?;
    let _named = match open.history().is_on() {
        true => Some(Context::scope(library()?)),
        false => None,
    };
    block(open, bytes as u64, stream)
}

/// Frees a block once the work on `stream` so far has finished.
#[inline]
fn free(open: &Instance, pointer: *mut c_void, stream: *mut c_void) -> Result<(), Failure> {
    let address = pointer.addr() as u64;
    // This has no effect if the block was requested for the same stream.
    open.record_stream(address, stream_of(stream))?;
    open.free(address)
}

/// Calls `work` with the device's allocator. Does nothing in the child of a fork in which the device has
/// no allocator, because the block belongs to the parent's.
#[inline]
fn with_owner(
    device: c_int,
    work: impl FnOnce(&Instance) -> Result<(), Failure>,
) -> Result<(), Failure> {
    match opened(device) {
        Ok(open) => work(open),
        Err(_) if is_child() => Ok(()),
        Err(none) => Err(none),
    }
}

/// Allocates a block from the process's allocator of `device`, for work on `stream`. Creates the
/// allocator if there is none yet. `library` is the name in the history, and is read only while
/// recording is on. Returns null for zero bytes. Also returns null if the call fails; then
/// `stratalloc_last_status` and `stratalloc_last_error` have the reason. May wait as
/// `stratalloc_allocate` does.
///
/// # Safety
///
/// `library` ends with a zero byte if it is not null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_library_malloc(
    library: *const c_char,
    size: usize,
    device: c_int,
    stream: *mut c_void,
) -> *mut c_void {
    // SAFETY: required of the caller (`# Safety`).
    let name = || unsafe { read(library, "library") };
    guard(|| allocate(name, device, size, stream)).unwrap_or(null_mut())
}

/// Frees a block of the process's allocator of `device`. The block is reused by other streams, and by
/// other libraries, only when the work that was submitted to `stream` before this call has finished.
/// Null is ignored.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_library_free(
    pointer: *mut c_void,
    device: c_int,
    stream: *mut c_void,
) -> Status {
    status(|| match pointer.is_null() {
        true => Ok(()),
        false => with_owner(device, |open| free(open, pointer, stream)),
    })
}

/// The functions of CuPy and Python that `stratalloc_cupy_malloc` calls.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Cupy {
    /// CuPy's `get_stream_ptr`: returns the calling thread's current stream on a device, as a number. Returns
    /// -1 after setting Python's error indicator if it fails.
    pub stream_of: Option<unsafe extern "C" fn(device: c_int) -> *mut c_void>,
    /// Python's `PyErr_SetString`.
    pub set_error: Option<unsafe extern "C" fn(kind: *mut c_void, message: *const c_char)>,
    /// The exception type for a request that finds no memory.
    pub out_of_memory: *mut c_void,
    /// The exception type for other failures.
    pub failure: *mut c_void,
}

/// The `malloc` of CuPy's `CFunctionAllocator`. `param` points to a `stratalloc_cupy`. The block is for
/// work on CuPy's current stream of the calling thread. If the call fails, returns null and sets Python's
/// error indicator, so CuPy raises an exception with the message. The calling thread must hold Python's
/// global interpreter lock, as it does when CuPy calls.
///
/// # Safety
///
/// `param` points to a `stratalloc_cupy` whose members are valid, or is null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_cupy_malloc(
    param: *const Cupy,
    size: usize,
    device: c_int,
) -> *mut c_void {
    // SAFETY: required of the caller (`# Safety`).
    let Some(&cupy) = (unsafe { param.as_ref() }) else { return null_mut() };
    let (Some(stream_of), Some(set_error)) = (cupy.stream_of, cupy.set_error) else {
        return null_mut();
    };
    // SAFETY: CuPy's function (`# Safety`), and the thread holds the lock that it needs.
    let stream = unsafe { stream_of(device) };
    if stream.addr() == usize::MAX {
        return null_mut();
    }
    guard(|| allocate(|| Ok("CuPy"), device, size, stream)).unwrap_or_else(|status| {
        let message = CString::new(last_error()).unwrap_or_default();
        let kind = match status {
            Status::OutOfMemory => cupy.out_of_memory,
            _ => cupy.failure,
        };
        // SAFETY: Python's function with an exception type (`# Safety`), and the thread holds the lock.
        unsafe { set_error(kind, message.as_ptr()) };
        null_mut()
    })
}

/// The `free` of CuPy's `CFunctionAllocator`. A failure only sets the thread's last error, because CuPy
/// takes no result.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_cupy_free(param: *const Cupy, pointer: *mut c_void, device: c_int) {
    let _ = param;
    // The current stream of the thread that drops an array is not that of its last use. As in CuPy's
    // own pool, the block can be reused by later work on the stream that it was requested for.
    let _ = guard(|| with_owner(device, |open| open.free(pointer.addr() as u64)));
}

/// The device of ONNX Runtime's sessions.
static ONNX_DEVICE: OnceLock<c_int> = OnceLock::new();

/// Returns the device that was set, or 0.
fn onnx_device() -> c_int {
    ONNX_DEVICE.get().copied().unwrap_or_default()
}

/// Sets the device of the blocks that `stratalloc_onnxruntime_alloc` returns; 0 without this call. Creates
/// the allocator of the device if there is none yet. Fails if another device was set before, because live
/// blocks may belong to it.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_onnxruntime_use(device: c_int) -> Status {
    status(|| {
        let _ = open_device(device)?;
        match *ONNX_DEVICE.get_or_init(|| device) {
            own if own == device => Ok(()),
            own => Err(Failure::invalid(format_args!(
                "ONNX Runtime's blocks are on device {own}: one process cannot also have them on \
                 device {device}"
            ))),
        }
    })
}

/// For the option `gpu_external_alloc` of ONNX Runtime's CUDA provider. The block is for work on the legacy
/// default stream, on which ONNX Runtime works with an external allocator. Returns null, and sets the
/// thread's last error, if the call fails; ONNX Runtime then reports a failed request.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_onnxruntime_alloc(size: usize) -> *mut c_void {
    guard(|| allocate(|| Ok("ONNX Runtime"), onnx_device(), size, null_mut())).unwrap_or(null_mut())
}

/// For the option `gpu_external_free` of ONNX Runtime's CUDA provider.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_onnxruntime_free(pointer: *mut c_void) {
    if !pointer.is_null() {
        let _ = guard(|| with_owner(onnx_device(), |open| open.free(pointer.addr() as u64)));
    }
}

/// For the option `gpu_external_empty_cache` of ONNX Runtime's CUDA provider. Waits for the device.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_onnxruntime_empty_cache() {
    let _ = guard(|| with_owner(onnx_device(), |open| Ok(open.caching()?.empty_cache()?)));
}
