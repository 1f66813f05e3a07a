//! Reads the used memory of the current device.

#![expect(unsafe_code, reason = "calling a foreign library")]

use std::ffi::{CStr, c_int};
use std::sync::OnceLock;

use crate::symbols;

/// The number of a device in this process (`CUdevice`).
pub(crate) type Ordinal = c_int;

/// `CUDA_SUCCESS`.
const SUCCESS: c_int = 0;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
const RELAXED: c_int = 2;

type ReadMemory = unsafe extern "C" fn(free: *mut usize, total: *mut usize) -> c_int;
type ReadNumber = unsafe extern "C" fn(number: *mut c_int) -> c_int;

/// The functions of the driver that are called here.
struct Driver {
    memory: ReadMemory,
    device: ReadNumber,
    capture_mode: ReadNumber,
}

impl Driver {
    fn load() -> Option<Self> {
        let find = |name: &CStr| Some(symbols::of_driver(name)?.as_ptr());
        let memory = find(c"cuMemGetInfo_v2")?;
        let device = find(c"cuCtxGetDevice")?;
        let capture_mode = find(c"cuThreadExchangeStreamCaptureMode")?;
        // SAFETY: the function has this signature (`cuda.h`).
        let memory = unsafe { std::mem::transmute::<*mut (), ReadMemory>(memory) };
        // SAFETY: as above.
        let device = unsafe { std::mem::transmute::<*mut (), ReadNumber>(device) };
        // SAFETY: as above.
        let capture_mode = unsafe { std::mem::transmute::<*mut (), ReadNumber>(capture_mode) };
        Some(Self { memory, device, capture_mode })
    }
}

fn driver() -> Option<&'static Driver> {
    static DRIVER: OnceLock<Option<Driver>> = OnceLock::new();
    DRIVER.get_or_init(Driver::load).as_ref()
}

/// Returns the device of the thread's current context. Returns `None` without one.
pub(crate) fn current() -> Option<Ordinal> {
    let mut ordinal = 0;
    // SAFETY: the argument is valid for a write.
    let status = unsafe { (driver()?.device)(&mut ordinal) };
    (status == SUCCESS).then_some(ordinal)
}

/// Returns the used bytes of the current device: the total minus the free bytes, of all processes.
pub(crate) fn used_bytes() -> Option<u64> {
    let driver = driver()?;
    let (mut free, mut total, mut mode) = (0, 0, RELAXED);
    // In the relaxed mode, the call is allowed while the thread captures a stream.
    // SAFETY: the argument is valid for a read and a write.
    unsafe { (driver.capture_mode)(&mut mode) };
    // SAFETY: the arguments are valid for writes.
    let status = unsafe { (driver.memory)(&mut free, &mut total) };
    // SAFETY: as above. `mode` now has the former mode.
    unsafe { (driver.capture_mode)(&mut mode) };
    let used = total.checked_sub(free)? as u64;
    (status == SUCCESS).then_some(used)
}
