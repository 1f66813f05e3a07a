//! Why `sim` or `host` refuses a call, before the call's name is put on it. Nothing has changed.

use super::call::Call;
use crate::error::{DriverError, DriverErrorKind};

/// Kind, code and text of a [`DriverError`] without its call. Without a code it gets the device's code for
/// the kind.
#[derive(Debug)]
pub(super) struct Refusal(Box<(DriverErrorKind, Option<i64>, String)>);

/// Result of a call before its name is put on an error.
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

    /// The error of a driver's call.
    pub(super) fn of(self, call: Call, code_of: fn(DriverErrorKind) -> i64) -> DriverError {
        let (kind, code, message) = *self.0;
        DriverError::new(kind, call.name(), code.unwrap_or_else(|| code_of(kind)), message)
    }
}

/// The caller may not ask for this.
pub(super) fn invalid(message: impl Into<String>) -> Refusal {
    Refusal::new(DriverErrorKind::InvalidValue, None, message)
}

/// Refuses a call unless the condition holds: as [`invalid`], or as the function that stands before the
/// text.
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

/// Refuses what is not a positive multiple of the granularity.
pub(super) fn check_whole(what: &str, bytes: u64, granularity_bytes: u64) -> Done<()> {
    let is_whole = bytes > 0 && bytes.is_multiple_of(granularity_bytes);
    ensure!(is_whole, "{what} {bytes:#x} is not a positive multiple of {granularity_bytes:#x}");
    Ok(())
}
