//! Opens devices by name.

use std::sync::Arc;

use super::guard::{Failure, Status};
use stratalloc::driver::Driver;
#[cfg(unix)]
use stratalloc::error::DriverErrorKind;
use stratalloc::ids::DeviceId;
#[cfg(target_os = "linux")]
use stratalloc_sim::{Host, HostOptions, Sim, SimOptions};

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
        "cuda" if ordinal.is_some() => open_cuda(device),
        _ => Err(unknown()),
    }
}

/// Returns the number of CUDA devices. Returns 0 if there is no driver, or if it does not start.
#[cfg(unix)]
pub(super) fn device_count() -> Result<u32, Failure> {
    match stratalloc::driver::Cuda::count() {
        Err(error) if error.kind() == DriverErrorKind::NotSupported => Ok(0),
        counted => Ok(counted?),
    }
}

#[cfg(not(unix))]
#[expect(clippy::unnecessary_wraps, reason = "the driver may fail where there is one")]
pub(super) fn device_count() -> Result<u32, Failure> {
    Ok(0)
}

#[cfg(unix)]
fn open_cuda(device: DeviceId) -> Result<Arc<dyn Driver>, Failure> {
    Ok(Arc::new(stratalloc::driver::Cuda::open(device)?))
}

#[cfg(not(unix))]
fn open_cuda(_: DeviceId) -> Result<Arc<dyn Driver>, Failure> {
    Err(Failure::new(Status::NotSupported, "this library was built without the feature cuda"))
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
