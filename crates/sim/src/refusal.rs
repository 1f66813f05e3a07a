//! Errors of a simulated device, before the name of the failed call is added.

use std::io;

use stratalloc::driver::call::Call;
use stratalloc::error::{DriverError, DriverErrorKind};

/// Kind, code and message of a [`DriverError`] without its call. A code of `None` stands for CUDA's code of
/// the kind.
#[derive(Debug)]
pub(super) struct Refusal(Box<(DriverErrorKind, Option<i64>, String)>);

/// Result of a call before its name is added to an error.
pub(super) type Done<T> = Result<T, Refusal>;

impl Refusal {
    pub(super) fn new(
        kind: DriverErrorKind,
        code: Option<i64>,
        message: impl Into<String>,
    ) -> Self {
        Self(Box::new((kind, code, message.into())))
    }

    pub(super) fn message(&self) -> &str {
        &self.0.2
    }

    /// Adds the name of the failed call.
    pub(super) fn of(self, call: Call) -> DriverError {
        let (kind, code, message) = *self.0;
        DriverError::new(kind, call.name(), code.unwrap_or_else(|| code_of(kind)), message)
    }
}

/// Converts an error of the operating system. Lack of memory, address space or mappings becomes an
/// out-of-memory error, so that callers may release memory and retry.
impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        let kind = match error.kind() {
            io::ErrorKind::OutOfMemory => DriverErrorKind::OutOfMemory,
            _ => DriverErrorKind::Other,
        };
        let code = error.raw_os_error().unwrap_or(0);
        Self::new(kind, Some(code.into()), format!("the system reported: {error}"))
    }
}

/// Returns a refusal for an invalid argument.
pub(super) fn invalid(message: impl Into<String>) -> Refusal {
    Refusal::new(DriverErrorKind::InvalidValue, None, message)
}

/// Returns an error from the enclosing function unless the condition holds. The function named before the
/// message creates the error; without a name, [`invalid`] does.
macro_rules! ensure {
    ($condition:expr, $refusal:ident: $($text:tt)+) => {
        if !$condition {
            return Err($refusal(format!($($text)+)));
        }
    };
    ($condition:expr, $($text:tt)+) => {
        ensure!($condition, invalid: $($text)+)
    };
}
pub(super) use ensure;

pub(super) fn out_of_memory(message: impl Into<String>) -> Refusal {
    Refusal::new(DriverErrorKind::OutOfMemory, None, message)
}

/// Returns an error unless `bytes` is a positive multiple of the granularity.
pub(super) fn check_whole(what: &str, bytes: u64, granularity_bytes: u64) -> Done<()> {
    let is_whole = bytes > 0 && bytes.is_multiple_of(granularity_bytes);
    ensure!(is_whole, "{what} {bytes:#x} is not a positive multiple of {granularity_bytes:#x}");
    Ok(())
}

/// Returns CUDA's code for the kinds that a simulated device uses, and 0 for others. So messages read as on a
/// real device.
fn code_of(kind: DriverErrorKind) -> i64 {
    match kind {
        DriverErrorKind::InvalidValue => 1,
        DriverErrorKind::OutOfMemory => 2,
        DriverErrorKind::NotSupported => 801,
        DriverErrorKind::CaptureActive => 900,
        _ => 0,
    }
}
