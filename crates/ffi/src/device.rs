//! Opens devices by name.

use std::sync::Arc;

use super::guard::{Failure, Status};
use stratalloc::driver::{Cuda, Driver};
use stratalloc::error::DriverErrorKind;
use stratalloc::ids::DeviceId;
#[cfg(target_os = "linux")]
use stratalloc_sim::{Host, HostOptions};
use stratalloc_sim::{Sim, SimOptions};

/// Opens the device `sim`, `host` or `cuda:N`. `sim` and `host` may also have an ordinal `:N`.
pub(super) fn open_device(spec: &str) -> Result<Arc<dyn Driver>, Failure> {
    let parts = spec.split_once(':');
    let (kind, ordinal) = parts.map_or((spec, None), |(kind, ordinal)| (kind, Some(ordinal)));
    let text = format_args!("{spec:?} is no device; expected sim, host or cuda:N");
    let unknown = || Failure::new(Status::InvalidArgument, text);
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    let device = match ordinal {
        Some(text) if !digits(text) => return Err(unknown()),
        Some(text) => DeviceId(text.parse().map_err(|_| unknown())?),
        None => DeviceId::default(),
    };
    match kind {
        "sim" => {
            // All simulated devices can access each other's memory.
            let options =
                SimOptions { device, reachable_devices: u32::MAX, ..SimOptions::default() };
            Ok(Arc::new(Sim::new(options)))
        }
        #[cfg(target_os = "linux")]
        "host" => Ok(Arc::new(Host::new(HostOptions { device, ..HostOptions::default() }))),
        "cuda" if ordinal.is_some() => Ok(Arc::new(Cuda::open(device)?)),
        _ => Err(unknown()),
    }
}

/// Returns the number of CUDA devices. Returns 0 if there is no driver, or if it does not start.
pub(super) fn device_count() -> Result<u32, Failure> {
    match Cuda::count() {
        Err(error) if error.kind() == DriverErrorKind::NotSupported => Ok(0),
        counted => Ok(counted?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_have_names_and_ordinals() {
        for (spec, ordinal) in [("sim", 0), ("sim:3", 3), ("host", 0), ("host:1", 1)] {
            assert_eq!(open_device(spec).unwrap().info().device, DeviceId(ordinal), "{spec}");
        }
        for spec in ["", "gpu", "sim:", "sim:-1", "sim:+1", "sim:x", "sim:99999999999", "cuda"] {
            assert_eq!(open_device(spec).unwrap_err().status, Status::InvalidArgument, "{spec}");
        }
    }
}
