//! Refusals of this driver, before a call's name is put on them.
//!
//! What is illegal is said with its numbers; what the system refused keeps the system's code. Too
//! little memory, address space or room for mappings is out-of-memory, so that callers may release
//! something and try again.

use std::io;

use rustix::io::Errno;

use crate::error::{DriverError, DriverErrorKind};

/// Why something was not done. Nothing has changed.
#[derive(Debug)]
pub(super) enum Refusal {
    /// The caller may not ask for this.
    Illegal(String),
    /// More than the device has left.
    Short { asked_bytes: u64, free_bytes: u64 },
    /// The system said no.
    System(io::Error),
}

impl Refusal {
    /// The error of a driver's call.
    pub(super) fn of(self, call: &'static str) -> DriverError {
        match self {
            Self::Illegal(message) => invalid(call, message),
            Self::Short { asked_bytes, free_bytes } => {
                let message = format!("{asked_bytes} bytes asked for, {free_bytes} free");
                DriverError::new(DriverErrorKind::OutOfMemory, call, 0, message)
            }
            Self::System(error) => {
                let code = error.raw_os_error().unwrap_or(0);
                let short = code == Errno::NOMEM.raw_os_error()
                    || error.kind() == io::ErrorKind::OutOfMemory;
                let kind =
                    if short { DriverErrorKind::OutOfMemory } else { DriverErrorKind::Other };
                DriverError::new(kind, call, code.into(), format!("the system said: {error}"))
            }
        }
    }
}

impl From<Errno> for Refusal {
    fn from(error: Errno) -> Self {
        Self::System(error.into())
    }
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        Self::System(error)
    }
}

pub(super) fn invalid(call: &'static str, message: String) -> DriverError {
    DriverError::new(DriverErrorKind::InvalidValue, call, 0, message)
}

/// Bytes of the device as bytes of this process. More than the address space is out of memory.
pub(super) fn length(bytes: u64) -> Result<usize, Refusal> {
    let none = |_| Refusal::System(io::ErrorKind::OutOfMemory.into());
    usize::try_from(bytes).map_err(none)
}
