//! Lists the processes that hold memory of a CUDA device, with the management library NVML.
//!
//! NVML comes with the driver, but is missing in some containers. It is loaded at the first use.
//! Without it the list is absent. NVML numbers devices differently (it ignores `CUDA_VISIBLE_DEVICES`),
//! so a device is found by its PCI bus id. Process ids are those that the kernel driver sees: in a
//! container they may be those of the host, or the list may be empty.

#![expect(unsafe_code, reason = "calling a foreign library")]

use std::ffi::{CString, c_char, c_uint, c_void};
use std::ptr;
use std::sync::OnceLock;

use hashbrown::HashMap;
use libloading::Library;

use super::Cuda;
use crate::driver::{DriverResult, ProcessUsage, Processes};
use crate::error::{DriverError, DriverErrorKind};

/// Names of the library. The second exists only where development files are installed.
const NAMES: [&str; 2] = ["libnvidia-ml.so.1", "libnvidia-ml.so"];

/// `NVML_VALUE_NOT_AVAILABLE`: the value of `nvmlProcessInfo_t.usedGpuMemory` if it is not known.
const UNKNOWN_BYTES: u64 = u64::MAX;

/// Extra entries for processes that start between the call that returns the count and the call that
/// lists.
const HEADROOM: c_uint = 5;

/// A device's handle (`nvmlDevice_t`): a pointer that only NVML dereferences.
type DeviceHandle = *mut c_void;

/// `nvmlProcessInfo_t` of `nvml.h`, as the functions with the suffix `_v3` write it.
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
/// The list has more entries than the caller's buffer.
const TOO_SMALL: Code = 7;

/// `nvmlDeviceGetComputeRunningProcesses_v3` and similar calls.
type ListCall =
    unsafe extern "C" fn(device: DeviceHandle, count: *mut c_uint, list: *mut ProcessInfo) -> Code;

/// `nvmlInit_v2`.
type StartCall = unsafe extern "C" fn() -> Code;
/// `nvmlDeviceGetHandleByPciBusId_v2`.
type FindCall = unsafe extern "C" fn(bus: *const c_char, device: *mut DeviceHandle) -> Code;

/// The functions of NVML that are used here.
struct Nvml {
    find: FindCall,
    computing: Option<ListCall>,
    drawing: Option<ListCall>,
    /// Keeps the library loaded while its functions are in use.
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
        // SAFETY: both functions have this signature.
        let list = |name: &[u8]| unsafe { library.get::<ListCall>(name) }.ok().map(|call| *call);
        let computing = list(b"nvmlDeviceGetComputeRunningProcesses_v3");
        let drawing = list(b"nvmlDeviceGetGraphicsRunningProcesses_v3");
        Some(Self { find, computing, drawing, _library: library })
    }
}

/// Returns NVML. It is loaded and initialised once per process, and never shut down.
fn library() -> Option<&'static Nvml> {
    static LIBRARY: OnceLock<Option<Nvml>> = OnceLock::new();
    LIBRARY.get_or_init(|| NAMES.into_iter().find_map(Nvml::load)).as_ref()
}

/// Returns the device with this PCI bus id, or the library's error code.
fn device_at(library: &Nvml, bus: &str) -> Result<DeviceHandle, Code> {
    let bus = CString::new(bus).map_err(|_| NOT_SUPPORTED)?;
    let mut device = ptr::null_mut();
    // SAFETY: the name ends with a zero. The handle is used only after success.
    match unsafe { (library.find)(bus.as_ptr(), &mut device) } {
        SUCCESS => Ok(device),
        other => Err(other),
    }
}

/// Returns the list that the function `call` reports for a device.
fn processes_of(device: DeviceHandle, call: ListCall) -> Result<Vec<ProcessInfo>, Code> {
    let mut count = 0;
    // SAFETY: with a count of zero, the call only writes the number of processes.
    match unsafe { call(device, &mut count, ptr::null_mut()) } {
        SUCCESS => return Ok(Vec::new()),
        TOO_SMALL => count = count.saturating_add(HEADROOM),
        other => return Err(other),
    }
    let empty =
        ProcessInfo { pid: 0, used_bytes: UNKNOWN_BYTES, gpu_instance: 0, compute_instance: 0 };
    let mut list = vec![empty; count as usize];
    // SAFETY: the list has room for `count` entries. The call sets `count` to the number written.
    match unsafe { call(device, &mut count, list.as_mut_ptr()) } {
        SUCCESS => list.truncate(count as usize),
        other => return Err(other),
    }
    Ok(list)
}

impl Cuda {
    /// Returns whether NVML is loaded and finds this device.
    pub(super) fn has_process_list(&self) -> bool {
        let known = |bus: &str| library().is_some_and(|library| device_at(library, bus).is_ok());
        self.bus.as_deref().is_some_and(known)
    }
}

impl Processes for Cuda {
    /// Lists the processes whose bytes are available.
    fn list(&self) -> DriverResult<Vec<ProcessUsage>> {
        let (Some(bus), Some(library)) = (self.bus.as_deref(), library()) else {
            let message =
                "there is no management library (libnvidia-ml), or the device has no PCI address";
            let kind = DriverErrorKind::NotSupported;
            return Err(DriverError::new(kind, "nvmlInit_v2", 0, message));
        };
        let device = device_at(library, bus)
            .map_err(|code| failed("nvmlDeviceGetHandleByPciBusId_v2", code))?;
        let asked = |call: Option<ListCall>| processes_of(device, call.ok_or(NOT_SUPPORTED)?);
        let computing = asked(library.computing)
            .map_err(|code| failed("nvmlDeviceGetComputeRunningProcesses_v3", code))?;
        // On some drivers a device without a display has no list of graphics processes.
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
        NO_PERMISSION => (DriverErrorKind::NotSupported, "this user has no permission"),
        _ => (DriverErrorKind::Other, "the management library refused"),
    };
    DriverError::new(kind, call, code.into(), message)
}

/// Returns one entry per process, without entries of unknown bytes. A process that both computes and
/// draws is in both lists of NVML. Its larger entry counts, because each contains all its bytes.
fn merged(processes: impl Iterator<Item = ProcessInfo>) -> Vec<ProcessUsage> {
    let mut bytes_of = HashMap::<u32, u64>::new();
    for process in processes {
        if process.used_bytes != UNKNOWN_BYTES {
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
    fn a_process_in_both_lists_counts_once_and_unknown_bytes_do_not() {
        let processes = [(9, 70), (4, 20), (9, 70), (5, UNKNOWN_BYTES), (4, 30)];
        let list = merged(processes.into_iter().map(|(pid, used)| process(pid, used)));
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
