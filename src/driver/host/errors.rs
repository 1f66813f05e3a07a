//! Refusals of this driver.
//!
//! What is illegal is said with its numbers; what the system refused keeps the system's code. Too
//! little memory, address space or room for mappings is out-of-memory, so that callers may release
//! something and try again.

use std::io;

use rustix::io::Errno;

use crate::driver::refusal::{Done, Refusal, out_of_memory};
use crate::error::DriverErrorKind;

/// More than the device has left.
pub(super) fn short(asked_bytes: u64, free_bytes: u64) -> Refusal {
    out_of_memory(format!("{asked_bytes} bytes asked for, {free_bytes} free"))
}

impl From<Errno> for Refusal {
    fn from(error: Errno) -> Self {
        io::Error::from(error).into()
    }
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        let code = error.raw_os_error().unwrap_or(0);
        let short =
            code == Errno::NOMEM.raw_os_error() || error.kind() == io::ErrorKind::OutOfMemory;
        let kind = if short { DriverErrorKind::OutOfMemory } else { DriverErrorKind::Other };
        Self::new(kind, Some(code.into()), format!("the system said: {error}"))
    }
}

/// Bytes of the device as bytes of this process. More than the address space is out of memory.
pub(super) fn length(bytes: u64) -> Done<usize> {
    usize::try_from(bytes).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory).into())
}
