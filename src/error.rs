//! Error types, with the numbers that explain each failure.
//!
//! Callers match on variants. The `Display` text is for people. A successful call allocates no host
//! memory for its error type, because the large report of an out-of-memory error is boxed.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;

use crate::allocator::Allocation;
use crate::ids::{DeviceId, OwnerId, PoolId, StreamId};
use crate::size::{REQUEST_MAX_BYTES, human_bytes};

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

/// The report of a failed request: all numbers that explain it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OutOfMemory {
    /// The device.
    pub device: DeviceId,
    /// The stream of the request.
    pub stream: StreamId,
    /// The pool of the request.
    pub pool: PoolId,
    /// The requested size.
    pub requested_bytes: u64,
    /// The requested size after rounding.
    pub rounded_bytes: u64,
    /// The size of the segment that the driver would have had to allocate.
    pub segment_bytes: u64,
    /// Free memory of the device. `None` if the driver did not report it.
    pub device_free_bytes: Option<u64>,
    /// Total memory of the device. `None` if the driver did not report it.
    pub device_total_bytes: Option<u64>,
    /// The limit on the bytes that this allocator reserves, if it has one. For `cudaMallocAsync`, and if
    /// `layers::limit` refused the request, it is a limit on the bytes of live blocks instead.
    pub limit_bytes: Option<u64>,
    /// Bytes of live blocks, without those of tags that are not awake.
    pub allocated_bytes: u64,
    /// Bytes reserved from the driver. 0 if unknown; the text then omits the cached bytes.
    pub reserved_bytes: u64,
    /// Free bytes in small pools.
    pub cached_small_bytes: u64,
    /// Free bytes in large pools.
    pub cached_large_bytes: u64,
    /// Free bytes in private pools, which are included in the two values above.
    pub cached_private_bytes: u64,
    /// The free bytes of each stream and pool that has any, at most 5, sorted by the largest range.
    pub free: Vec<FreeRanges>,
    /// Bytes that callers freed but that unfinished work of other streams still uses.
    pub draining_bytes: u64,
    /// The driver's error, if the driver was called and failed.
    pub driver: Option<DriverError>,
    /// The processes that use most of the device's memory, largest first, at most 5. Empty if the
    /// driver was not called for memory or cannot list processes.
    pub holders: Vec<Holder>,
    /// The call stacks with the most live bytes, largest first, at most 10. Empty unless the history
    /// records stacks or names of scopes.
    pub live: Vec<LiveBytes>,
    /// The current configuration, without default values.
    pub configuration: Option<String>,
    /// The file with a snapshot, or the reason why it was not written. `None` if no snapshot is
    /// configured.
    pub snapshot: Option<Result<PathBuf, String>>,
    /// Settings and changes that would most likely have helped, as sentences.
    pub hints: Vec<String>,
}

/// Live blocks that were allocated from one place of the program.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LiveBytes {
    /// The sum of the requested sizes of the blocks, in bytes.
    pub bytes: u64,
    /// The number of blocks.
    pub blocks: u64,
    /// The age of the oldest block.
    pub oldest: Duration,
    /// The innermost frames of the call stack.
    pub frames: Vec<String>,
}

impl fmt::Display for LiveBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (held, oldest) = (human_bytes(self.bytes), self.oldest.as_secs_f64());
        let (blocks, plural) = (self.blocks, if self.blocks == 1 { "block" } else { "blocks" });
        let no_frames = self.frames.is_empty();
        let asked = if no_frames { "unknown call stack" } else { &self.frames.join(" < ") };
        write!(f, "{held} in {blocks} {plural}, up to {oldest:.1} s old: {asked}")
    }
}

/// The free memory for requests on one stream in one pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FreeRanges {
    /// The stream. Requests on other streams cannot use this memory.
    pub stream: StreamId,
    /// The pool.
    pub pool: PoolId,
    /// The sum of the ranges, in bytes.
    pub bytes: u64,
    /// The number of ranges. One request is served from one range.
    pub ranges: u64,
    /// The largest range, in bytes.
    pub largest_bytes: u64,
    /// The number of blocks in the same segments that are live or wait for other streams. They separate
    /// the ranges and prevent the release of the segments.
    pub between_blocks: u64,
    /// The bytes of these blocks.
    pub between_bytes: u64,
}

/// A process that holds memory of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The process id as the driver reports it. In a container this may be the id on the host.
    pub process: u32,
    /// The memory that the process holds on the device, in bytes.
    pub used_bytes: u64,
}

impl Holder {
    /// Returns true if the process id is that of this process.
    #[must_use]
    pub(crate) fn is_this_process(&self) -> bool {
        self.process == std::process::id()
    }
}

impl OutOfMemory {
    /// The most processes in a report.
    pub(crate) const HOLDERS_MAX: usize = 5;
    /// The most pairs of stream and pool in a report.
    pub(crate) const FREE_MAX: usize = 5;
    /// The most call stacks in a report.
    pub(crate) const LIVE_MAX: usize = 10;

    /// Creates a report of a failed request for `bytes` on `stream`. All other numbers are 0, and the
    /// text omits them.
    #[must_use]
    pub fn of(bytes: u64, stream: StreamId) -> Self {
        let (requested_bytes, rounded_bytes, segment_bytes) = (bytes, bytes, bytes);
        Self { stream, requested_bytes, rounded_bytes, segment_bytes, ..Self::default() }
    }
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let h = human_bytes;
        if let Some(total) = self.device_total_bytes.filter(|total| self.requested_bytes > *total) {
            let (asked, all) = (h(self.requested_bytes), h(total));
            writeln!(f, "out of memory on device {}: tried to allocate {asked}.", self.device)?;
            let why = "no setting makes room for this request";
            return writeln!(f, "The device has {all} in total: {why}.");
        }
        write!(f, "out of memory on device {}", self.device)?;
        // A report that was created from a driver error alone has no request.
        if self.requested_bytes > 0 {
            let tried = self.segment_bytes.max(self.requested_bytes);
            let asked = h(self.requested_bytes);
            write!(f, ": tried to allocate {} for a request of {asked}", h(tried))?;
            if self.rounded_bytes > 0 {
                write!(f, " ({} rounded)", h(self.rounded_bytes))?;
            }
            write!(f, " on stream {}", self.stream)?;
        }
        writeln!(f, ".")?;
        if let (Some(free), Some(total)) = (self.device_free_bytes, self.device_total_bytes) {
            writeln!(f, "The device has {} in total, of which {} is free.", h(total), h(free))?;
        }
        let has_cache = self.reserved_bytes > 0;
        let held = h(self.allocated_bytes);
        match self.limit_bytes.map(h) {
            Some(limit) if has_cache || self.allocated_bytes == 0 => {
                writeln!(f, "This allocator may reserve {limit}.")?;
            }
            Some(limit) => writeln!(f, "Callers may hold {limit} and hold {held}.")?,
            None => {}
        }
        if has_cache {
            writeln!(
                f,
                "It holds {}: {held} allocated, {} cached in large and {} in small pools, {} waiting \
                 for other streams.",
                h(self.reserved_bytes),
                h(self.cached_large_bytes),
                h(self.cached_small_bytes),
                h(self.draining_bytes)
            )?;
        }
        if self.pool != PoolId::DEFAULT {
            writeln!(f, "The request was for pool {}.", self.pool)?;
        }
        if self.cached_private_bytes > 0 {
            let private = h(self.cached_private_bytes);
            writeln!(f, "Private pools hold {private} of the cached memory.")?;
        }
        for free in &self.free {
            writeln!(f, "{free}")?;
        }
        if self.free.is_empty() && self.cached_large_bytes + self.cached_small_bytes > 0 {
            writeln!(f, "The driver does not report the layout of the cached memory.")?;
        } else if self.free.is_empty() && has_cache {
            writeln!(f, "No block is free.")?;
        }
        if let Some(driver) = &self.driver {
            writeln!(f, "Driver error: {driver}.")?;
        }
        for holder in &self.holders {
            let this = if holder.is_this_process() { " (this one)" } else { "" };
            let (process, held) = (holder.process, h(holder.used_bytes));
            writeln!(f, "Process {process}{this} holds {held} of the device.")?;
        }
        for live in &self.live {
            writeln!(f, "Live: {live}")?;
        }
        if let Some(configuration) = &self.configuration {
            writeln!(f, "In force: {configuration}")?;
        }
        match &self.snapshot {
            Some(Ok(path)) => writeln!(f, "Snapshot: {}", path.display())?,
            Some(Err(why)) => writeln!(f, "Snapshot: not written: {why}")?,
            None => {}
        }
        for hint in &self.hints {
            writeln!(f, "Hint: {hint}")?;
        }
        Ok(())
    }
}

impl fmt::Display for FreeRanges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let h = human_bytes;
        write!(f, "Free on stream {}", self.stream)?;
        if self.pool != PoolId::DEFAULT {
            write!(f, " of pool {}", self.pool)?;
        }
        write!(f, ": {}", h(self.bytes))?;
        if self.ranges > 1 {
            write!(f, " in {} ranges, the largest {}", self.ranges, h(self.largest_bytes))?;
        }
        match self.between_blocks {
            0 => f.write_str("."),
            1 => write!(f, ", beside a block in use of {}.", h(self.between_bytes)),
            n => write!(f, ", beside {n} blocks in use of {} in total.", h(self.between_bytes)),
        }
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
