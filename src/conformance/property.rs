//! The properties: which laws, which operations, on which device.

use std::fmt;

use super::laws::{self, Law};
#[cfg(target_os = "linux")]
use super::machine::HostMachine;
use super::machine::{Machine, SimMachine};
use super::report::{Device, Failure, Outcome, Report};
use super::script::Op;
use super::search::{self, Broken};
use super::{Build, Options};

/// Something that must hold of every allocator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Property {
    /// No byte belongs to two live blocks.
    LiveBlocksNeverOverlap,
}

impl Property {
    /// All of them.
    pub const ALL: &[Self] = &[Self::LiveBlocksNeverOverlap];

    /// It in words.
    #[must_use]
    pub const fn words(self) -> &'static str {
        match self {
            Self::LiveBlocksNeverOverlap => "live blocks never overlap",
        }
    }
}

impl fmt::Display for Property {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.words())
    }
}

/// What a property is tested on.
pub(super) struct Case<'a> {
    pub(super) build: &'a Build,
    pub(super) device: Device,
    pub(super) options: &'a Options,
}

impl Case<'_> {
    /// A new device.
    pub(super) fn machine(&self) -> Result<Box<dyn Machine>, String> {
        let bytes = self.options.device_bytes;
        match self.device {
            Device::Sim => Ok(Box::new(SimMachine::new(bytes))),
            #[cfg(target_os = "linux")]
            Device::Host => Ok(Box::new(HostMachine::new(bytes))),
            #[cfg(not(target_os = "linux"))]
            Device::Host => Err("the host driver needs Linux".to_owned()),
        }
    }

    /// Random scripts under some laws.
    fn scripts(&self, keep: fn(&Op) -> bool, laws: &[Law]) -> Result<Outcome, Broken> {
        search::scripts(self.options, keep, &|script| {
            let machine = self.machine().map_err(|what| (what, Vec::new()))?;
            search::on_a_bed(&*machine, self.build, &|bed| search::follow(bed, script, laws))
        })?;
        Ok(Outcome::Held { runs: self.options.scripts })
    }

    fn test(&self, property: Property) -> Result<Outcome, Broken> {
        let plain = |op: &Op| !matches!(op, Op::Misuse { .. } | Op::ResetPeaks);
        match property {
            Property::LiveBlocksNeverOverlap => {
                self.scripts(plain, &[laws::live_blocks_never_overlap])
            }
        }
    }
}

/// Tests one property of the allocator that `build` makes, on one device. Waits for the device's work.
///
/// # Errors
///
/// [`Failure`], with the shortest sequence of operations that shows it.
pub fn test(
    name: &str,
    build: &Build,
    property: Property,
    device: Device,
    options: &Options,
) -> Result<Outcome, Failure> {
    Case { build, device, options }.test(property).map_err(|broken| {
        let Broken { what, lines, seed } = broken;
        Failure { name: name.to_owned(), property, device, what, lines, seed }
    })
}

/// Tests every property on every device of this system.
///
/// # Errors
///
/// The first [`Failure`].
pub fn run(name: &str, build: &Build, options: &Options) -> Result<Report, Failure> {
    let mut outcomes = Vec::new();
    for &device in Device::ALL {
        for &property in Property::ALL {
            let outcome = test(name, build, property, device, options)?;
            outcomes.push((property, device, outcome));
        }
    }
    Ok(Report { name: name.to_owned(), outcomes })
}
