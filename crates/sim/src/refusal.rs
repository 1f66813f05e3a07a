//! Errors of a simulated device before the name of the call is known. A refused call changed nothing.

use std::io;

use stratalloc::driver::call::Call;
use stratalloc::error::{DriverError, DriverErrorKind};

/// Kind, code and message of a [`DriverError`] without its call. If there is no code, CUDA's code for the
/// kind is used.
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

    /// Returns the error of a driver call.
    pub(super) fn of(self, call: Call) -> DriverError {
        let (kind, code, message) = *self.0;
        DriverError::new(kind, call.name(), code.unwrap_or_else(|| code_of(kind)), message)
    }
}

/// Converts an error of the system. Lack of memory, address space or mappings is reported as out of
/// memory, so that callers may release memory and retry.
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

/// Returns a refusal from the enclosing function unless the condition holds. The refusal is [`invalid`],
/// or that of the function named before the message.
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

/// Refuses a number that is not a positive multiple of the granularity.
pub(super) fn check_whole(what: &str, bytes: u64, granularity_bytes: u64) -> Done<()> {
    let is_whole = bytes > 0 && bytes.is_multiple_of(granularity_bytes);
    ensure!(is_whole, "{what} {bytes:#x} is not a positive multiple of {granularity_bytes:#x}");
    Ok(())
}

/// Returns CUDA's code for the kind, so that a message reads the same as on a real device.
fn code_of(kind: DriverErrorKind) -> i64 {
    match kind {
        DriverErrorKind::InvalidValue => 1,
        DriverErrorKind::OutOfMemory => 2,
        DriverErrorKind::NotSupported => 801,
        DriverErrorKind::CaptureActive => 900,
        _ => 0,
    }
}
