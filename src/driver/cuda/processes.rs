//! Who holds memory of a CUDA device: asked of the management library, NVML.
//!
//! It comes with the driver, but not into every container, and is loaded when it is first asked for:
//! where it is missing there is no list, and nothing else is lost. It numbers devices in its own way
//! (`CUDA_VISIBLE_DEVICES` means nothing to it), so a device is found by its place on the bus.
//! Processes have the numbers that the driver sees: inside a container that may be the host's, or
//! nothing at all.

use std::ffi::OsStr;
use std::sync::OnceLock;

use hashbrown::HashMap;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::device::ProcessInfo;
use nvml_wrapper::{Device, Nvml};

use super::Cuda;
use crate::driver::{DriverResult, ProcessUsage, Processes};
use crate::error::{DriverError, DriverErrorKind};

/// What the library is called: the second name is there only where one can build against it.
const NAMES: [&str; 2] = ["libnvidia-ml.so.1", "libnvidia-ml.so"];

/// The library, loaded and started once for the process and never shut down.
fn library() -> Option<&'static Nvml> {
    static LIBRARY: OnceLock<Option<Nvml>> = OnceLock::new();
    let load = |name: &&str| Nvml::builder().lib_path(OsStr::new(name)).init().ok();
    LIBRARY.get_or_init(|| NAMES.iter().find_map(load)).as_ref()
}

impl Cuda {
    /// Whether the library is there and knows this device.
    pub(super) fn has_process_list(&self) -> bool {
        self.managed().is_some_and(|device| device.is_ok())
    }

    fn managed(&self) -> Option<Result<Device<'static>, NvmlError>> {
        let bus = self.bus.as_deref()?;
        library().map(|library| library.device_by_pci_bus_id(bus))
    }
}

impl Processes for Cuda {
    /// Processes whose bytes the library does not tell are left out.
    fn list(&self) -> DriverResult<Vec<ProcessUsage>> {
        let Some(device) = self.managed() else {
            let message = "there is no management library (libnvidia-ml), or no place on the bus";
            let kind = DriverErrorKind::NotSupported;
            return Err(DriverError::new(kind, "nvmlInit_v2", 0, message));
        };
        let device = device.map_err(|error| failed("nvmlDeviceGetHandleByPciBusId_v2", &error))?;
        let computing = device
            .running_compute_processes()
            .map_err(|error| failed("nvmlDeviceGetComputeRunningProcesses_v3", &error))?;
        // A device without a display has no such list on some drivers.
        let drawing = match device.running_graphics_processes() {
            Err(NvmlError::NotSupported) => Vec::new(),
            other => {
                other.map_err(|error| failed("nvmlDeviceGetGraphicsRunningProcesses_v3", &error))?
            }
        };
        Ok(merged(computing.into_iter().chain(drawing)))
    }
}

fn failed(call: &'static str, error: &NvmlError) -> DriverError {
    let kind = match error {
        NvmlError::NotSupported | NvmlError::NoPermission | NvmlError::FailedToLoadSymbol(_) => {
            DriverErrorKind::NotSupported
        }
        _ => DriverErrorKind::Other,
    };
    DriverError::new(kind, call, 0, error.to_string())
}

/// One entry for each process: one that both computes and draws is in both lists with the same bytes.
fn merged(processes: impl Iterator<Item = ProcessInfo>) -> Vec<ProcessUsage> {
    let mut bytes_of = HashMap::<u32, u64>::new();
    for process in processes {
        if let UsedGpuMemory::Used(bytes) = process.used_gpu_memory {
            let used = bytes_of.entry(process.pid).or_default();
            *used = bytes.max(*used);
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

    fn process(pid: u32, used_gpu_memory: UsedGpuMemory) -> ProcessInfo {
        ProcessInfo { pid, used_gpu_memory, gpu_instance_id: None, compute_instance_id: None }
    }

    #[test]
    fn a_process_in_both_lists_counts_once_and_untold_bytes_not_at_all() {
        use UsedGpuMemory::{Unavailable, Used};
        let told = [(9, Used(70)), (4, Used(20)), (9, Used(70)), (5, Unavailable), (4, Used(30))];
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
