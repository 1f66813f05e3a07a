//! Who holds memory of a CUDA device: asked of the management library, NVML.
//!
//! It comes with the driver, but not into every container, and is loaded when it is first asked for:
//! where it is missing there is no list, and nothing else is lost. It numbers devices in its own way
//! (`CUDA_VISIBLE_DEVICES` means nothing to it), so a device is found by its place on the bus.
//! Processes have the numbers that the driver sees: inside a container that may be the host's, or
//! nothing at all.

#![expect(unsafe_code, reason = "calling a foreign library")]

use std::ffi::{CString, c_char, c_uint, c_void};
use std::ptr;
use std::sync::OnceLock;

use hashbrown::HashMap;
use libloading::Library;

use super::Cuda;
use crate::driver::{DriverResult, ProcessUsage, Processes};
use crate::error::{DriverError, DriverErrorKind};

/// What the library is called: the second name is there only where one can build against it.
const NAMES: [&str; 2] = ["libnvidia-ml.so.1", "libnvidia-ml.so"];

/// `nvmlProcessInfo_t.usedGpuMemory` where the library cannot tell (`NVML_VALUE_NOT_AVAILABLE`).
const UNTOLD: u64 = u64::MAX;

/// Processes that may start between the question how many there are and the list.
const HEADROOM: c_uint = 5;

/// A device's handle (`nvmlDevice_t`): a pointer that only the library follows.
type DeviceHandle = *mut c_void;

/// `nvmlProcessInfo_t` of `nvml.h`, as the third version of its calls fills it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct ProcessInfo {
    pid: c_uint,
    used_bytes: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

/// `nvmlReturn_t`.
type Code = c_uint;
const SUCCESS: Code = 0;
const NOT_SUPPORTED: Code = 3;
const NO_PERMISSION: Code = 4;
/// The list has more entries than there was room for.
const TOO_SMALL: Code = 7;

/// `nvmlDeviceGetComputeRunningProcesses_v3` and its sisters.
type ListCall =
    unsafe extern "C" fn(device: DeviceHandle, count: *mut c_uint, list: *mut ProcessInfo) -> Code;

/// `nvmlInit_v2`.
type StartCall = unsafe extern "C" fn() -> Code;
/// `nvmlDeviceGetHandleByPciBusId_v2`.
type FindCall = unsafe extern "C" fn(bus: *const c_char, device: *mut DeviceHandle) -> Code;

/// What is called of the library.
struct Nvml {
    find: FindCall,
    computing: Option<ListCall>,
    drawing: Option<ListCall>,
    /// Stays loaded as long as its functions are called.
    _library: Library,
}

impl Nvml {
    fn load(name: &str) -> Option<Self> {
        // SAFETY: NVML's constructors may run at any time.
        let library = unsafe { Library::new(name) }.ok()?;
        // SAFETY: the symbol has this signature (`nvml.h`).
        let start = *unsafe { library.get::<StartCall>(b"nvmlInit_v2") }.ok()?;
        // SAFETY: the library is loaded.
        if unsafe { start() } != SUCCESS {
            return None;
        }
        // SAFETY: as above.
        let find = unsafe { library.get::<FindCall>(b"nvmlDeviceGetHandleByPciBusId_v2") };
        let find = *find.ok()?;
        // SAFETY: both lists are asked for with this signature.
        let list = |name: &[u8]| unsafe { library.get::<ListCall>(name) }.ok().map(|call| *call);
        let computing = list(b"nvmlDeviceGetComputeRunningProcesses_v3");
        let drawing = list(b"nvmlDeviceGetGraphicsRunningProcesses_v3");
        Some(Self { find, computing, drawing, _library: library })
    }
}

/// The library, loaded and started once for the process and never shut down.
fn library() -> Option<&'static Nvml> {
    static LIBRARY: OnceLock<Option<Nvml>> = OnceLock::new();
    LIBRARY.get_or_init(|| NAMES.into_iter().find_map(Nvml::load)).as_ref()
}

/// The device at this place on the bus, or what the library returned.
fn device_at(library: &Nvml, bus: &str) -> Result<DeviceHandle, Code> {
    let bus = CString::new(bus).map_err(|_| NOT_SUPPORTED)?;
    let mut device = ptr::null_mut();
    // SAFETY: the name ends with a zero, and the handle is written only where it says success.
    match unsafe { (library.find)(bus.as_ptr(), &mut device) } {
        SUCCESS => Ok(device),
        other => Err(other),
    }
}

/// What one of the calls that list processes says of the device.
fn processes_of(device: DeviceHandle, call: ListCall) -> Result<Vec<ProcessInfo>, Code> {
    let mut count = 0;
    // SAFETY: a length of zero asks only how many there are, and nothing is written but that.
    match unsafe { call(device, &mut count, ptr::null_mut()) } {
        SUCCESS => return Ok(Vec::new()),
        TOO_SMALL => count = count.saturating_add(HEADROOM),
        other => return Err(other),
    }
    let nobody = ProcessInfo { pid: 0, used_bytes: UNTOLD, gpu_instance: 0, compute_instance: 0 };
    let mut list = vec![nobody; count as usize];
    // SAFETY: the list has room for `count` entries, and `count` becomes how many were written.
    match unsafe { call(device, &mut count, list.as_mut_ptr()) } {
        SUCCESS => list.truncate(count as usize),
        other => return Err(other),
    }
    Ok(list)
}

impl Cuda {
    /// Whether the library is there and knows this device.
    pub(super) fn has_process_list(&self) -> bool {
        let known = |bus: &str| library().is_some_and(|library| device_at(library, bus).is_ok());
        self.bus.as_deref().is_some_and(known)
    }
}

impl Processes for Cuda {
    /// Processes whose bytes the library does not tell are left out.
    fn list(&self) -> DriverResult<Vec<ProcessUsage>> {
        let (Some(bus), Some(library)) = (self.bus.as_deref(), library()) else {
            let message = "there is no management library (libnvidia-ml), or no place on the bus";
            let kind = DriverErrorKind::NotSupported;
            return Err(DriverError::new(kind, "nvmlInit_v2", 0, message));
        };
        let device = device_at(library, bus)
            .map_err(|code| failed("nvmlDeviceGetHandleByPciBusId_v2", code))?;
        let asked = |call: Option<ListCall>| processes_of(device, call.ok_or(NOT_SUPPORTED)?);
        let computing = asked(library.computing)
            .map_err(|code| failed("nvmlDeviceGetComputeRunningProcesses_v3", code))?;
        // A device without a display has no such list on some drivers.
        let drawing = match asked(library.drawing) {
            Err(NOT_SUPPORTED) => Vec::new(),
            other => {
                other.map_err(|code| failed("nvmlDeviceGetGraphicsRunningProcesses_v3", code))?
            }
        };
        Ok(merged(computing.into_iter().chain(drawing)))
    }
}

fn failed(call: &'static str, code: Code) -> DriverError {
    let (kind, message) = match code {
        NOT_SUPPORTED => {
            (DriverErrorKind::NotSupported, "the device or its driver has no such list")
        }
        NO_PERMISSION => (DriverErrorKind::NotSupported, "this user may not ask for it"),
        _ => (DriverErrorKind::Other, "the management library refused"),
    };
    DriverError::new(kind, call, code.into(), message)
}

/// One entry for each process: one that both computes and draws is in both lists with the same bytes.
fn merged(processes: impl Iterator<Item = ProcessInfo>) -> Vec<ProcessUsage> {
    let mut bytes_of = HashMap::<u32, u64>::new();
    for process in processes {
        if process.used_bytes != UNTOLD {
            let used = bytes_of.entry(process.pid).or_default();
            *used = process.used_bytes.max(*used);
        }
    }
    let usage =
        bytes_of.into_iter().map(|(process, used_bytes)| ProcessUsage { process, used_bytes });
    let mut list: Vec<_> = usage.collect();
    list.sort_unstable_by_key(|usage| usage.process);
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(pid: u32, used_gpu_memory: u64) -> ProcessInfo {
        ProcessInfo { pid, used_bytes: used_gpu_memory, gpu_instance: 0, compute_instance: 0 }
    }

    #[test]
    fn a_process_in_both_lists_counts_once_and_untold_bytes_not_at_all() {
        let told = [(9, 70), (4, 20), (9, 70), (5, UNTOLD), (4, 30)];
        let list = merged(told.into_iter().map(|(pid, used)| process(pid, used)));
        let expected = [(4, 30), (9, 70)];
        assert_eq!(
            list,
            expected.map(|(process, used_bytes)| ProcessUsage { process, used_bytes })
        );
    }

    #[test]
    fn a_machine_without_the_library_has_no_list() {
        if library().is_some() {
            return println!("skipped: this machine has the management library");
        }
        assert!(library().is_none(), "and asking again is no panic");
    }
}
