//! Errors of the system.
//!
//! They keep their code. Lack of memory, address space or mappings is reported as out of memory, so that
//! callers may release memory and retry.

use std::io;

use rustix::io::Errno;

use crate::refusal::{Done, Refusal};
use stratalloc::error::DriverErrorKind;

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
        Self::new(kind, Some(code.into()), format!("the system reported: {error}"))
    }
}

/// Converts device bytes to a size in this process. A size beyond the address space is out of memory.
pub(super) fn length(bytes: u64) -> Done<usize> {
    usize::try_from(bytes).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory).into())
}
