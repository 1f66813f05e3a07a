//! The results of the suite: properties tested, properties not tested and why, and failures.

use std::fmt;

use thiserror::Error;

use super::{Property, skip};

/// A kind of device that the suite runs on.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// A simulated device without memory. Its work finishes when the suite or a waiting call finishes it.
    Sim,
    /// Host memory, with threads that run work. Linux only.
    Host,
    /// A part of the first CUDA device. Linux only.
    Cuda,
}

impl Device {
    /// The kinds that this build supports. Whether a CUDA device exists is checked only when one is
    /// needed.
    pub const ALL: &[Self] =
        if cfg!(target_os = "linux") { &[Self::Sim, Self::Host, Self::Cuda] } else { &[Self::Sim] };
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sim => "sim",
            Self::Host => "host",
            Self::Cuda => "cuda",
        })
    }
}

/// The result for a property on a device.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The property held in all runs.
    Passed {
        /// The number of runs.
        runs: u64,
    },
    /// The property was not tested.
    NotTested {
        /// The reason.
        why: &'static str,
    },
    /// There is no device of this kind.
    NoDevice {
        /// The driver's error message.
        detail: String,
    },
}

impl Outcome {
    /// Returns "passed" if the runs have tested the property, otherwise "not tested".
    pub(super) fn of(tested: bool, runs: u64, why: &'static str) -> Self {
        if tested { Self::Passed { runs } } else { Self::NotTested { why } }
    }
}

/// The results for an allocator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The allocator.
    pub name: String,
    /// The outcome of every property on every device.
    pub outcomes: Vec<(Property, Device, Outcome)>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}:", self.name)?;
        // A driver's message is printed only on the first of successive lines that have it.
        let mut shown: Option<&str> = None;
        for (property, device, outcome) in &self.outcomes {
            match outcome {
                Outcome::Passed { runs } => {
                    writeln!(f, "  {device}: {property}: held, runs: {runs}")?
                }
                Outcome::NotTested { why } => {
                    writeln!(f, "  {device}: {property}: not tested: {why}")?;
                }
                Outcome::NoDevice { detail } => {
                    let why = skip::NO_CUDA_DEVICE;
                    write!(f, "  {device}: {property}: not tested: {why}")?;
                    match shown.replace(detail) == Some(detail) {
                        true => writeln!(f)?,
                        false => writeln!(f, " ({detail})")?,
                    }
                }
            }
        }
        Ok(())
    }
}

/// A property that does not hold.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub struct Failure {
    /// The allocator.
    pub name: String,
    /// The property.
    pub property: Property,
    /// The device.
    pub device: Device,
    /// The violation.
    pub what: String,
    /// The shortest sequence of operations found that causes the violation.
    pub lines: Vec<String>,
    /// The seed of the first script that failed. The sequence is a simplified part of that script.
    pub seed: u64,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, property, device, what, lines, seed } = self;
        writeln!(f, "{name} on {device}: {property} does not hold: {what}")?;
        writeln!(f, "the shortest sequence that shows it (from seed {seed}):")?;
        for (at, line) in lines.iter().enumerate() {
            writeln!(f, "  {:>3}. {line}", at + 1)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_of_a_missing_device_is_printed_once() {
        let detail = "cuInit: no driver".to_owned();
        let missing =
            |property| (property, Device::Cuda, Outcome::NoDevice { detail: detail.clone() });
        let outcomes = Property::ALL.iter().copied().map(missing).collect();
        let report = Report { name: "mine".to_owned(), outcomes }.to_string();
        assert_eq!(report.matches("cuInit").count(), 1, "{report}");
        assert_eq!(report.matches("not tested").count(), Property::ALL.len(), "{report}");
    }
}
