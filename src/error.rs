//! Error types, with the numbers that explain each failure.
//!
//! Callers match on variants. The `Display` text is for people. A successful call allocates no host
//! memory for its error type, because the large report of an out-of-memory error is boxed.

mod out_of_memory;

use thiserror::Error;

use crate::allocator::Allocation;
use crate::ids::{OwnerId, PoolId, StreamId};
use crate::size::REQUEST_MAX_BYTES;

pub use out_of_memory::{FreeRanges, Holder, LiveBytes, OutOfMemory};

/// The kind of a driver failure.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriverErrorKind {
    /// The device or the host does not have enough memory or address space for the call.
    OutOfMemory,
    /// The device or its driver does not support the call.
    NotSupported,
    /// An argument is invalid: an unknown handle, or an address that is not allocated.
    InvalidValue,
    /// The call is not allowed while a stream is being captured.
    CaptureActive,
    /// The device's context is broken, and all later calls fail too.
    DeviceLost,
    /// Any other failure. See the code.
    Other,
}

/// A failed driver call. The size of a pointer.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{} failed: {} (code {})", self.call(), self.message(), self.code())]
pub struct DriverError(Box<Failure>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Failure {
    kind: DriverErrorKind,
    call: &'static str,
    code: i64,
    message: String,
}

impl DriverError {
    /// Returns the error for a change of `key`, which is read only when the allocator is built.
    pub(crate) fn fixed_key(key: &str) -> Self {
        let message = format!("{key} is read when an allocator is built, and cannot change");
        Self::new(DriverErrorKind::NotSupported, "apply", 0, message)
    }

    /// Creates an error of `kind` from `call`.
    #[must_use]
    pub fn new(
        kind: DriverErrorKind,
        call: &'static str,
        code: i64,
        message: impl Into<String>,
    ) -> Self {
        Self(Box::new(Failure { kind, call, code, message: message.into() }))
    }

    /// Returns the kind of the failure.
    #[must_use]
    pub fn kind(&self) -> DriverErrorKind {
        self.0.kind
    }

    /// Returns the name of the driver function.
    #[must_use]
    pub fn call(&self) -> &'static str {
        self.0.call
    }

    /// Returns the driver's error code.
    #[must_use]
    pub fn code(&self) -> i64 {
        self.0.code
    }

    /// Returns the driver's message, or a message of this library with the numbers of the call.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// Replaces the message.
    pub(crate) fn with_message(mut self, message: String) -> Self {
        self.0.message = message;
        self
    }

    /// Returns true if releasing memory and retrying may help.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        self.kind() == DriverErrorKind::OutOfMemory
    }
}

/// The error of an allocation. Nothing has changed then.
#[non_exhaustive]
#[derive(Debug, Error)]
pub enum AllocError {
    /// The request was for zero bytes.
    #[error("a request of zero bytes has no address")]
    ZeroBytes,
    /// The request was for more than [`REQUEST_MAX_BYTES`].
    #[error(
        "out of memory: tried to allocate {requested_bytes} bytes, which is more than 1 EiB \
         ({REQUEST_MAX_BYTES} bytes)"
    )]
    TooLarge {
        /// The requested size.
        requested_bytes: u64,
    },
    /// Neither the cache nor the driver could serve the request, even after free memory was released.
    #[error("{0}")]
    OutOfMemory(Box<OutOfMemory>),
    /// The allocator already has the maximum number of streams.
    #[error("too many streams: stream {stream} exceeds the limit of {limit}; reuse streams")]
    TooManyStreams {
        /// The stream of the request.
        stream: StreamId,
        /// The maximum number of streams.
        limit: usize,
    },
    /// The requested pool cannot serve requests.
    #[error(transparent)]
    Pool(Box<PoolError>),
    /// No free block of the stream contains the requested bytes at the requested address.
    #[error("no free block of stream {stream} holds {rounded_bytes} bytes at {address:#x}")]
    NoBlockAt {
        /// The address.
        address: u64,
        /// The requested size after rounding.
        rounded_bytes: u64,
        /// The stream of the request.
        stream: StreamId,
    },
    /// A user's allocation function returned an unusable address.
    #[error("the user's function returned {address:#x} for {requested_bytes} bytes, {fault}")]
    BadAddress {
        /// The returned address.
        address: u64,
        /// The size that the function was called with.
        requested_bytes: u64,
        /// The reason why the address is unusable.
        fault: AddressFault,
    },
    /// The driver failed for a reason other than memory.
    #[error(transparent)]
    Driver(DriverError),
}

/// The result of an allocation.
pub type AllocResult<T = Allocation> = Result<T, AllocError>;

impl AllocError {
    /// Returns the error for a request of 0 bytes or of more than [`REQUEST_MAX_BYTES`].
    #[cold]
    pub(crate) fn of_size(requested_bytes: u64) -> Self {
        if requested_bytes == 0 { Self::ZeroBytes } else { Self::TooLarge { requested_bytes } }
    }
}

/// Converts an error of the kind `OutOfMemory` to a report that contains only the error.
impl From<DriverError> for AllocError {
    fn from(error: DriverError) -> Self {
        if error.is_out_of_memory() {
            let report = OutOfMemory { driver: Some(error), ..OutOfMemory::default() };
            return Self::OutOfMemory(Box::new(report));
        }
        Self::Driver(error)
    }
}

impl From<PoolError> for AllocError {
    fn from(error: PoolError) -> Self {
        Self::Pool(Box::new(error))
    }
}

// Errors are kept small: the result of an allocation is at most one word larger than a block.
const _: () = assert!(
    size_of::<Result<Allocation, AllocError>>() <= size_of::<Allocation>() + size_of::<usize>()
);
const _: () = assert!(size_of::<Result<u64, HandleError>>() <= 3 * size_of::<usize>());

/// The reason why an address that a user's function returned is unusable.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum AddressFault {
    /// A live block has this address. The user's free function was not called for it.
    #[error("the address of a live block")]
    Live,
    /// The address is not a multiple of the alignment that kernels rely on. The memory was freed with
    /// the user's function.
    #[error("which is not a multiple of {alignment_bytes}")]
    Misaligned {
        /// The required alignment in bytes.
        alignment_bytes: u64,
    },
    /// The end of the block would not fit in 64 bits. The memory was freed with the user's function.
    #[error("where the block would end beyond 64 bits")]
    PastTheEnd,
}

/// The error of an operation on a private pool. Nothing has changed then, unless stated otherwise.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PoolError {
    /// (0, 0) is the default pool, which is not private.
    #[error("pool (0, 0) is the default pool, which always exists and has no scopes")]
    IsDefault,
    /// A pool with this id already exists.
    #[error("pool {pool} exists already")]
    Taken {
        /// The pool.
        pool: PoolId,
    },
    /// The pool never existed or no longer exists.
    #[error("there is no pool {pool}")]
    Unknown {
        /// The pool.
        pool: PoolId,
    },
    /// The pool has no users any more.
    #[error("pool {pool} has no users left")]
    Released {
        /// The pool.
        pool: PoolId,
    },
    /// A scope of the pool is already open. A pool can have only one open scope.
    #[error("a scope of pool {pool} is open already")]
    ScopeOpen {
        /// The pool.
        pool: PoolId,
    },
    /// No scope of the pool is open.
    #[error("no scope of pool {pool} is open")]
    ScopeClosed {
        /// The pool.
        pool: PoolId,
    },
    /// A freed block still waits for other streams, which a checkpoint cannot represent.
    #[error("the block at {address:#x} in pool {pool} waits for other streams")]
    Draining {
        /// The pool.
        pool: PoolId,
        /// The address of the block.
        address: u64,
    },
    /// A live block is used by other streams outside of captures, so it cannot be freed now.
    #[error("other streams use the block at {address:#x} in pool {pool}")]
    UsedElsewhere {
        /// The pool.
        pool: PoolId,
        /// Its address.
        address: u64,
    },
    /// The range in the checkpoint is not memory of the pool, or is no longer.
    #[error("pool {pool} has no memory for the checkpoint's {size_bytes} bytes at {address:#x}")]
    NotInPool {
        /// The pool.
        pool: PoolId,
        /// The start of the range.
        address: u64,
        /// The size of the range in bytes.
        size_bytes: u64,
    },
    /// The pools of this allocator do not support the operation.
    #[error("pool {pool}: {what} are not possible with this backend")]
    NotSupported {
        /// The pool.
        pool: PoolId,
        /// The unsupported feature, in the plural.
        what: &'static str,
    },
    /// The pool is a tag that is not awake.
    #[error("pool {pool} is asleep: resume its tag first")]
    Asleep {
        /// The pool.
        pool: PoolId,
    },
    /// The driver failed. Steps that were completed before stay in effect.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

impl PoolError {
    /// Returns the error for an id that names no private pool.
    pub(crate) fn missing(pool: PoolId) -> Self {
        if pool == PoolId::DEFAULT { Self::IsDefault } else { Self::Unknown { pool } }
    }

    /// Returns an error for the default pool.
    pub(crate) fn unless_private(pool: PoolId) -> Result<(), Self> {
        if pool == PoolId::DEFAULT { Err(Self::IsDefault) } else { Ok(()) }
    }

    /// Returns true if `close_scope` has closed the scope although it returned this error, because the
    /// driver failed afterwards. With any other error the scope is unchanged.
    pub const fn ends_scope(&self) -> bool {
        matches!(self, Self::Driver(_))
    }
}

/// The error of a call with a handle or an address. Nothing has changed then.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum HandleError {
    /// The handle belongs to another allocator.
    #[error("the allocation belongs to allocator {}, not to {}", owner.number(), called.number())]
    Foreign {
        /// The allocator that allocated the block.
        owner: OwnerId,
        /// The allocator that was called.
        called: OwnerId,
    },
    /// The block was freed before. Its memory may already belong to another block.
    #[error("the allocation at {address:#x} was freed before")]
    Stale {
        /// The address in the handle.
        address: u64,
    },
    /// No live block starts at this address.
    #[error("no live block starts at {address:#x}")]
    UnknownAddress {
        /// The address.
        address: u64,
    },
    /// The driver failed, so the allocator cannot wait for work of other streams on the block.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

/// The error of a free, which returns the allocation to the caller.
#[derive(Debug, Error)]
#[error("{reason}")]
pub struct FreeError {
    /// The reason.
    #[source]
    pub reason: HandleError,
    /// The allocation, unchanged.
    pub allocation: Allocation,
}

/// A memory fraction outside [0, 1].
#[derive(Clone, Copy, Debug, PartialEq, Error)]
#[error("memory fraction {fraction}: expected a number from 0 to 1")]
pub struct FractionError {
    /// The invalid value.
    pub fraction: f64,
}

impl FractionError {
    /// Returns an error unless `fraction` is in [0, 1].
    pub(crate) fn check(fraction: f64) -> Result<(), Self> {
        if (0.0..=1.0).contains(&fraction) { Ok(()) } else { Err(Self { fraction }) }
    }
}
