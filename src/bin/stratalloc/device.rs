//! The devices that the command line can open.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use stratalloc::driver::Driver;
use stratalloc::driver::Sim;
#[cfg(target_os = "linux")]
use stratalloc::driver::host::{Host, HostOptions};
use stratalloc::driver::sim::{EventMode, SimOptions};
use stratalloc::error::DriverError;

/// What `--device` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Device {
    /// Simulated: any size, no memory.
    Sim,
    /// Real memory of this machine with a device's semantics.
    Host,
}

/// An open device.
pub(crate) struct Opened {
    pub(crate) driver: Arc<dyn Driver>,
    /// The simulation, if it is one.
    pub(crate) sim: Option<Arc<Sim>>,
}

impl Device {
    /// All that could be there.
    pub(crate) const ALL: [Self; 2] = [Self::Sim, Self::Host];

    /// Opens the device, as large as `total_bytes` says or as it is.
    pub(crate) fn open(self, total_bytes: Option<u64>) -> Result<Opened, DriverError> {
        match self {
            Self::Sim => Ok(open_sim(total_bytes, EventMode::Immediate)),
            #[cfg(target_os = "linux")]
            Self::Host => {
                let defaults = HostOptions::default();
                let total_bytes = total_bytes.unwrap_or(defaults.total_bytes);
                let host = Host::new(HostOptions { total_bytes, ..defaults });
                Ok(Opened { driver: Arc::new(host), sim: None })
            }
            #[cfg(not(target_os = "linux"))]
            Self::Host => Err(DriverError::new(
                stratalloc::error::DriverErrorKind::NotSupported,
                "open",
                0,
                "the host device needs Linux",
            )),
        }
    }
}

/// A simulated device whose other streams finish as `event_mode` says.
pub(crate) fn open_sim(total_bytes: Option<u64>, event_mode: EventMode) -> Opened {
    let defaults = SimOptions::default();
    let sim = Arc::new(Sim::new(SimOptions {
        total_bytes: total_bytes.unwrap_or(defaults.total_bytes),
        event_mode,
        ..defaults
    }));
    Opened { driver: Arc::clone(&sim) as Arc<dyn Driver>, sim: Some(sim) }
}

impl FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "sim" => Ok(Self::Sim),
            "host" => Ok(Self::Host),
            cuda if cuda.starts_with("cuda:") => {
                Err("the CUDA driver is not part of this version; use sim or host".to_owned())
            }
            other => Err(format!("{other:?} is no device; expected sim, host or cuda:N")),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sim => "sim",
            Self::Host => "host",
        })
    }
}
