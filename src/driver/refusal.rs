//! Why `sim` or `host` refuses a call, before the call's name is put on it. Nothing has changed.

use super::call::Call;
use crate::error::{DriverError, DriverErrorKind};

/// Kind, code and text of a [`DriverError`] without its call.
#[derive(Debug)]
pub(super) struct Refusal(Box<(DriverErrorKind, i64, String)>);

/// What a call returns before its name is put on an error.
pub(super) type Done<T> = Result<T, Refusal>;

impl Refusal {
    pub(super) fn new(kind: DriverErrorKind, code: i64, message: impl Into<String>) -> Self {
        Self(Box::new((kind, code, message.into())))
    }

    pub(super) fn message(&self) -> &str {
        &self.0.2
    }

    /// The error of a driver's call.
    pub(super) fn of(self, call: Call) -> DriverError {
        let (kind, code, message) = *self.0;
        DriverError::new(kind, call.name(), code, message)
    }
}
