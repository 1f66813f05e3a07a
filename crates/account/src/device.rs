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

/// The used memory of a device.
pub(crate) struct Used {
    pub(crate) ordinal: Ordinal,
    /// The total minus the free bytes, of all processes.
    pub(crate) used_bytes: u64,
}

impl Used {
    /// Reads the used memory of the device of the thread's current context. Returns `None` without one.
    pub(crate) fn now() -> Option<Self> {
        static DRIVER: OnceLock<Option<Driver>> = OnceLock::new();
        let driver = DRIVER.get_or_init(Driver::load).as_ref()?;
        let (mut ordinal, mut free, mut total, mut mode) = (0, 0, 0, RELAXED);
        // SAFETY: the argument is valid for a write.
        if unsafe { (driver.device)(&mut ordinal) } != SUCCESS {
            return None;
        }
        // A thread that captures a stream may otherwise end its capture with a call that is not captured.
        // SAFETY: the argument is valid for a read and a write.
        unsafe { (driver.capture_mode)(&mut mode) };
        // SAFETY: the arguments are valid for writes.
        let status = unsafe { (driver.memory)(&mut free, &mut total) };
        // SAFETY: as above. `mode` now has the former mode.
        unsafe { (driver.capture_mode)(&mut mode) };
        let used_bytes = total.checked_sub(free)? as u64;
        (status == SUCCESS).then_some(Self { ordinal, used_bytes })
    }
}
