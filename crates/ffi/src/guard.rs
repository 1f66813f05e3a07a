//! Error handling of every exported function: a failure becomes a status and a message, and panics are
//! caught.

use std::any::Any;
use std::cell::RefCell;
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};

use stratalloc::allocator::SleepError;
use stratalloc::config::{ConfigError, EnvironmentError};
use stratalloc::error::{
    AllocError, DriverError, DriverErrorKind, FractionError, HandleError, PoolError,
};
use stratalloc::handle::BufferError;
use stratalloc::handle::dlpack::TensorError;
use stratalloc::registry::BuildError;
use stratalloc::sharing::SharingError;
use stratalloc::switch::SwitchError;

/// The result of a call. If it is not `OK`, nothing has changed, with two exceptions. A request that
/// fails with `OUT_OF_MEMORY` may have released cached memory and called callbacks before. If the driver
/// or the library fails in a call with several steps, completed steps stay in effect.
/// `stratalloc_last_error` returns the message of the calling thread's last failure.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Success.
    Ok = 0,
    /// A null pointer, text that is not UTF-8, a number that is out of range, or another argument that
    /// the call cannot use.
    InvalidArgument = 1,
    /// The handle does not belong to an allocator, checkpoint, snapshot, block or tensor, or the object
    /// was destroyed.
    UnknownHandle = 2,
    /// The configuration string cannot be used.
    BadConfiguration = 3,
    /// Neither the cache nor the device can serve the request.
    OutOfMemory = 4,
    /// No live block starts at the address.
    UnknownAddress = 5,
    /// The pool is unknown, has no user, already has an open scope, or lacks the open scope that the
    /// call needs. A switch also fails with this status while a pool has users or a scope is open.
    BadPool = 6,
    /// The device, the strategy, a layer or this version does not support the call.
    NotSupported = 7,
    /// A call of the driver failed.
    DriverFailed = 8,
    /// The output does not fit in the buffer.
    BufferTooSmall = 9,
    /// A bug in the library, or in a function of the user that it called. The allocator may be unusable
    /// after this.
    Internal = 10,
    /// The tag is not awake.
    Asleep = 11,
    /// The tag cannot be paused or resumed now: a graph is captured, its pages are shared, or a wait is
    /// not allowed here.
    Busy = 12,
}

/// A failed call: its status, and the message that `stratalloc_last_error` returns.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) status: Status,
    pub(super) text: String,
}

impl Failure {
    #[cold]
    pub(super) fn new(status: Status, text: impl Display) -> Self {
        Self { status, text: text.to_string() }
    }

    #[cold]
    pub(super) fn invalid(text: impl Display) -> Self {
        Self::new(Status::InvalidArgument, text)
    }

    #[cold]
    pub(super) fn null(what: &str) -> Self {
        Self::invalid(format_args!("{what} is null"))
    }

    #[cold]
    pub(super) fn lacks(strategy: &str, what: &str) -> Self {
        Self::new(Status::NotSupported, format_args!("backend:{strategy} has no {what}"))
    }
}

thread_local! {
    static LAST: RefCell<(Status, String)> = const { RefCell::new((Status::Ok, String::new())) };
}

/// Runs one call. A failure or a panic is returned as a status, and its message becomes the thread's
/// last error.
#[inline]
pub(super) fn guard<T>(work: impl FnOnce() -> Result<T, Failure>) -> Result<T, Status> {
    // `AssertUnwindSafe`: a panic may leave the allocator in an inconsistent state. The caller learns of
    // it by the returned status, `Internal`.
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(done)) => Ok(done),
        Ok(Err(failure)) => Err(remember(failure)),
        Err(panic) => Err(remember(panicked(panic))),
    }
}

/// Runs a call without a result, as [`guard`] does.
#[inline]
pub(super) fn status(work: impl FnOnce() -> Result<(), Failure>) -> Status {
    match guard(work) {
        Ok(()) => Status::Ok,
        Err(status) => status,
    }
}

#[cold]
fn remember(failure: Failure) -> Status {
    let Failure { status, text } = failure;
    // The thread-local may be destroyed already if the thread is exiting.
    let _ = LAST.try_with(|last| *last.borrow_mut() = (status, text));
    status
}

#[cold]
fn panicked(panic: Box<dyn Any + Send>) -> Failure {
    let message = panic.downcast_ref::<String>().map(String::as_str);
    let message = message.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
    let failure =
        Failure::new(Status::Internal, format_args!("a defect of the library: {message}"));
    // Dropping the payload may panic again, and nothing would catch that panic.
    std::mem::forget(panic);
    failure
}

/// Returns the message of the calling thread's last failed call. Empty if no call has failed.
pub(super) fn last_error() -> String {
    LAST.try_with(|last| last.borrow().1.clone()).unwrap_or_default()
}

/// Returns the status of the calling thread's last failed call. `Ok` if no call has failed.
pub(super) fn last_status() -> Status {
    LAST.try_with(|last| last.borrow().0).unwrap_or(Status::Ok)
}

/// An error type that converts to a [`Failure`].
trait Fails: Display {
    fn status(&self) -> Status;

    /// Returns the message.
    fn text(&self) -> String {
        self.to_string()
    }
}

impl<E: Fails> From<E> for Failure {
    #[cold]
    fn from(error: E) -> Self {
        Self { status: error.status(), text: error.text() }
    }
}

impl Fails for AllocError {
    fn status(&self) -> Status {
        match self {
            Self::Driver(error) => error.status(),
            Self::Pool(error) if matches!(**error, PoolError::NotSupported { .. }) => {
                Status::NotSupported
            }
            Self::Pool(error) if matches!(**error, PoolError::Asleep { .. }) => Status::Asleep,
            Self::Pool(_) => Status::BadPool,
            Self::ZeroBytes | Self::NoBlockAt { .. } => Status::InvalidArgument,
            Self::TooLarge { .. } | Self::OutOfMemory(_) | Self::TooManyStreams { .. } => {
                Status::OutOfMemory
            }
            // `BadAddress`: a user's allocation function returned an unusable address.
            _ => Status::Internal,
        }
    }
}

impl Fails for HandleError {
    fn status(&self) -> Status {
        match self {
            Self::Driver(error) => error.status(),
            _ => Status::UnknownAddress,
        }
    }
}

impl Fails for PoolError {
    fn status(&self) -> Status {
        match self {
            Self::Driver(error) => error.status(),
            Self::NotSupported { .. } => Status::NotSupported,
            Self::Asleep { .. } => Status::Asleep,
            _ => Status::BadPool,
        }
    }
}

impl Fails for SleepError {
    fn status(&self) -> Status {
        match self {
            Self::Driver(error) => error.status(),
            Self::Pool(error) => error.status(),
            Self::NotATag { .. } | Self::OtherOptions { .. } => Status::BadPool,
            Self::NotSupported => Status::NotSupported,
            Self::HostMemory { .. } | Self::OutOfMemory(_) => Status::OutOfMemory,
            Self::NoBackup { .. } => Status::UnknownAddress,
            Self::Disk { source, .. } => source.status(),
            _ => Status::Busy,
        }
    }
}

impl Fails for DriverError {
    fn status(&self) -> Status {
        match self.kind() {
            DriverErrorKind::OutOfMemory => Status::OutOfMemory,
            DriverErrorKind::NotSupported => Status::NotSupported,
            _ => Status::DriverFailed,
        }
    }
}

impl Fails for SharingError {
    fn status(&self) -> Status {
        match self {
            Self::Handle(error) => error.status(),
            Self::Driver(error) => error.status(),
            Self::Asleep { .. } => Status::Asleep,
            Self::Format(_) | Self::TooManyPages { .. } | Self::OwnProcess => {
                Status::InvalidArgument
            }
            Self::NotExportable { .. } | Self::NotSupported { .. } | Self::PageSize { .. } => {
                Status::NotSupported
            }
            // Any other error means that the block cannot be fetched from its process. For example, that
            // process has freed the block or ended.
            _ => Status::UnknownAddress,
        }
    }
}

impl Fails for BufferError {
    fn status(&self) -> Status {
        match self {
            Self::Alloc(error) => error.status(),
            Self::Handle(error) => error.status(),
            Self::Driver(error) => error.status(),
            Self::TooLong { .. } => Status::OutOfMemory,
            Self::NoStreams { .. } => Status::NotSupported,
            _ => Status::InvalidArgument,
        }
    }
}

impl Fails for TensorError {
    fn status(&self) -> Status {
        match self {
            Self::Buffer(error) => error.status(),
            Self::Driver(error) => error.status(),
            Self::NoMemory { .. } | Self::NotContiguous { .. } | Self::Bits { .. } => {
                Status::NotSupported
            }
            _ => Status::InvalidArgument,
        }
    }
}

impl Fails for FractionError {
    fn status(&self) -> Status {
        Status::InvalidArgument
    }
}

impl Fails for BuildError {
    fn status(&self) -> Status {
        match self {
            Self::Driver(error) => error.status(),
            Self::NotAvailable { .. } => Status::NotSupported,
            _ => Status::BadConfiguration,
        }
    }
}

impl Fails for SwitchError {
    fn status(&self) -> Status {
        match self {
            Self::Configuration { .. } => Status::BadConfiguration,
            Self::Build(error) => error.status(),
            Self::Apply(error) => error.status(),
            Self::Peer(error) => error.status(),
            Self::ScopeOpen { .. } | Self::PoolInUse { .. } => Status::BadPool,
            Self::Lacks { .. } | Self::InStackProvider => Status::NotSupported,
            Self::TooMany { .. } => Status::OutOfMemory,
            _ => Status::Internal,
        }
    }

    fn text(&self) -> String {
        match self {
            Self::Configuration { text, error } => bad_configuration(text, error).text,
            other => other.to_string(),
        }
    }
}

impl Fails for EnvironmentError {
    fn status(&self) -> Status {
        Status::BadConfiguration
    }

    fn text(&self) -> String {
        format!("{self}\n{}", self.error.caret(&self.text))
    }
}

/// Returns the failure for a rejected configuration string, with a caret under the place of the error.
#[cold]
pub(super) fn bad_configuration(text: &str, error: &ConfigError) -> Failure {
    let caret = error.caret(text);
    Failure::new(Status::BadConfiguration, format_args!("configuration: {error}\n{caret}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_a_status_and_a_text() {
        for words in ["static", "owned"] {
            let outcome = status(|| match words {
                "static" => panic!("static"),
                other => panic!("{other}"),
            });
            assert_eq!(outcome, Status::Internal);
            assert_eq!(last_error(), format!("a defect of the library: {words}"));
        }
        struct Bomb;
        impl Drop for Bomb {
            fn drop(&mut self) {
                panic!("a payload that panics when it is dropped");
            }
        }
        assert_eq!(status(|| std::panic::panic_any(Bomb)), Status::Internal);
        assert_eq!(last_error(), "a defect of the library: no message");
    }

    #[test]
    fn each_thread_has_its_own_last_error() {
        assert_eq!(status(|| Err(Failure::null("x"))), Status::InvalidArgument);
        std::thread::spawn(|| assert_eq!(last_error(), "")).join().unwrap();
        assert_eq!(status(|| Ok(())), Status::Ok);
        assert_eq!(last_error(), "x is null", "a good call leaves it alone");
    }
}
