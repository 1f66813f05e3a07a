//! The devices that the command line can open.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use stratalloc::driver::Driver;
#[cfg(unix)]
use stratalloc::driver::HoldsWork;
use stratalloc::error::{DriverError, DriverErrorKind};
use stratalloc::ids::StreamId;
use stratalloc_sim::{EventMode, Gates, WorkGate};
#[cfg(target_os = "linux")]
use stratalloc_sim::{Host, HostOptions};

/// The value of `--device`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Device {
    /// A simulated device of any size, without memory.
    Sim,
    /// Memory of this machine that behaves like a device.
    Host,
    /// A CUDA device, by its number.
    Cuda(u32),
}

/// An open device.
pub(crate) struct OpenDevice {
    pub(crate) driver: Arc<dyn Driver>,
    /// Controls when the device's work finishes, if the device supports that.
    pub(crate) work_gate: Option<Arc<dyn WorkGate>>,
}

impl Device {
    /// Returns all devices that may exist. Includes the first CUDA device even if there is none, so that
    /// its error is printed.
    pub(crate) fn all() -> Vec<Self> {
        #[cfg(unix)]
        let count = stratalloc::driver::Cuda::count().unwrap_or(1).max(1);
        #[cfg(not(unix))]
        let count = 1;
        [Self::Sim, Self::Host].into_iter().chain((0..count).map(Self::Cuda)).collect()
    }

    /// Opens the device, with `total_bytes` of memory or with the device's own size.
    pub(crate) fn open(self, total_bytes: Option<u64>) -> Result<OpenDevice, DriverError> {
        match self {
            Self::Sim => {
                let sim = stratalloc_analysis::open_sim(total_bytes, EventMode::Immediate);
                let work_gate = Some(Arc::clone(&sim) as Arc<dyn WorkGate>);
                Ok(OpenDevice { driver: sim, work_gate })
            }
            #[cfg(target_os = "linux")]
            Self::Host => {
                let defaults = HostOptions::default();
                let total_bytes = total_bytes.unwrap_or(defaults.total_bytes);
                Ok(gated(Host::new(HostOptions { total_bytes, ..defaults })))
            }
            #[cfg(not(target_os = "linux"))]
            Self::Host => Err(not_supported("the host device needs Linux")),
            Self::Cuda(_) if total_bytes.is_some() => Err(not_supported(
                "a CUDA device has the memory it has; --total-memory is for sim and host",
            )),
            Self::Cuda(number) => open_cuda(number),
        }
    }
}

fn not_supported(why: &'static str) -> DriverError {
    DriverError::new(DriverErrorKind::NotSupported, "open", 0, why)
}

#[cfg(unix)]
fn open_cuda(number: u32) -> Result<OpenDevice, DriverError> {
    Ok(gated(stratalloc::driver::Cuda::open(stratalloc::ids::DeviceId(number))?))
}

#[cfg(not(unix))]
fn open_cuda(_: u32) -> Result<OpenDevice, DriverError> {
    Err(not_supported("this program was built without the feature cuda"))
}

impl OpenDevice {
    /// Returns this many streams in addition to the default one. On CUDA the driver creates them; on
    /// other devices any number is a valid stream.
    pub(crate) fn streams(&self, count: usize) -> Result<Vec<StreamId>, DriverError> {
        let real = self.driver.info().driver == "cuda";
        let stream =
            |n: u64| if real { self.driver.create_stream() } else { Ok(StreamId(64 * (n + 1))) };
        (0..count as u64).map(stream).collect()
    }
}

/// Opens a device that runs its work by itself, with gates that can delay the work.
#[cfg(unix)]
fn gated(driver: impl HoldsWork + 'static) -> OpenDevice {
    let gated = Arc::new(Gates::before(driver));
    let work_gate = Some(Arc::clone(&gated) as Arc<dyn WorkGate>);
    OpenDevice { driver: gated, work_gate }
}

impl FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "sim" => Ok(Self::Sim),
            "host" => Ok(Self::Host),
            other => {
                let number = other.strip_prefix("cuda:").and_then(|number| number.parse().ok());
                let refuse = || format!("{other:?} is no device; expected sim, host or cuda:N");
                number.map(Self::Cuda).ok_or_else(refuse)
            }
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sim => f.write_str("sim"),
            Self::Host => f.write_str("host"),
            Self::Cuda(number) => write!(f, "cuda:{number}"),
        }
    }
}
