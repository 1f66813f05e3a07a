//! Errors as data: what was asked for, what was held, what the driver said.
//!
//! Callers match on variants and read `Display`. Nothing here allocates on a path that succeeds:
//! the large report of an out-of-memory error is boxed.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;

use crate::allocator::Allocation;
use crate::ids::{DeviceId, OwnerId, PoolId, StreamId};
use crate::size::{REQUEST_MAX_BYTES, human_bytes};

/// What kind of failure a driver reported.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriverErrorKind {
    /// The device (or the host) has not enough memory or address space for the call.
    OutOfMemory,
    /// The device or this driver cannot do what was asked.
    NotSupported,
    /// An argument is not legal: an unknown handle, an address that was never given out.
    InvalidValue,
    /// The call is not legal while a stream is being captured.
    CaptureActive,
    /// The device's context is broken and every later call fails too.
    DeviceLost,
    /// Everything else; the code says more.
    Other,
}

/// A call to a driver that failed. As large as a pointer.
#[derive(Clone, PartialEq, Eq, Error)]
#[error("{} failed: {} (code {})", self.call(), self.message(), self.code())]
pub struct DriverError(Box<Failure>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Failure {
    kind: DriverErrorKind,
    call: &'static str,
    code: i64,
    message: String,
}

impl fmt::Debug for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Failure { kind, call, code, message } = &*self.0;
        let mut shown = f.debug_struct("DriverError");
        shown.field("kind", kind).field("call", call).field("code", code);
        shown.field("message", message).finish()
    }
}

impl DriverError {
    /// `key` was read when the allocator was built, and another value was to be put in force.
    pub(crate) fn fixed_key(key: &str) -> Self {
        let message = format!("{key} is read when an allocator is built, and cannot change");
        Self::new(DriverErrorKind::NotSupported, "apply", 0, message)
    }

    /// An error of `kind` from `call`.
    #[must_use]
    pub fn new(
        kind: DriverErrorKind,
        call: &'static str,
        code: i64,
        message: impl Into<String>,
    ) -> Self {
        Self(Box::new(Failure { kind, call, code, message: message.into() }))
    }

    /// What kind of failure it was.
    #[must_use]
    pub fn kind(&self) -> DriverErrorKind {
        self.0.kind
    }

    /// The driver's function, by the driver's own name.
    #[must_use]
    pub fn call(&self) -> &'static str {
        self.0.call
    }

    /// The driver's own code.
    #[must_use]
    pub fn code(&self) -> i64 {
        self.0.code
    }

    /// The driver's own text, or ours with the numbers in it.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// The same failure with another text.
    pub(crate) fn with_message(mut self, message: String) -> Self {
        self.0.message = message;
        self
    }

    /// Whether releasing memory and trying again may help.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        self.kind() == DriverErrorKind::OutOfMemory
    }
}

/// Why no memory was handed out. Nothing has changed when one of these is returned.
#[non_exhaustive]
#[derive(Debug, Error)]
pub enum AllocError {
    /// A request of zero bytes: there is no address to hand out.
    #[error("a request of zero bytes has no address")]
    ZeroBytes,
    /// More than [`REQUEST_MAX_BYTES`].
    #[error(
        "out of memory: tried to allocate {requested_bytes} bytes, which is more than 1 EiB \
         ({REQUEST_MAX_BYTES} bytes)"
    )]
    TooLarge {
        /// What was asked for.
        requested_bytes: u64,
    },
    /// Neither the cache nor the driver nor releasing idle memory could serve the request.
    #[error("{0}")]
    OutOfMemory(Box<OutOfMemory>),
    /// More streams than the allocator keeps heaps for.
    #[error("stream {stream} would be number {limit} plus one: too many streams")]
    TooManyStreams {
        /// The stream of the request.
        stream: StreamId,
        /// How many streams have a heap already, which is the most there may be.
        limit: usize,
    },
    /// The pool that was asked for serves nobody.
    #[error(transparent)]
    Pool(Box<PoolError>),
    /// No free block holds the address that was asked for.
    #[error("no free block of stream {stream} holds {rounded_bytes} bytes at {address:#x}")]
    NoBlockAt {
        /// The address.
        address: u64,
        /// How many bytes were asked for, after rounding.
        rounded_bytes: u64,
        /// The stream of the request.
        stream: StreamId,
    },
    /// A user's own function answered with an address that cannot be handed out.
    #[error("the user's function answered {requested_bytes} bytes with {address:#x}, {fault}")]
    BadAddress {
        /// What it answered.
        address: u64,
        /// What it was asked for.
        requested_bytes: u64,
        /// What is wrong with that.
        fault: AddressFault,
    },
    /// The driver failed in a way that is not about memory.
    #[error(transparent)]
    Driver(DriverError),
}

/// The answer to a request: a block, or why there is none.
pub type AllocResult<T = Allocation> = Result<T, AllocError>;

impl AllocError {
    /// The error for a request of 0 bytes or of more than [`REQUEST_MAX_BYTES`].
    #[cold]
    pub(crate) fn of_size(requested_bytes: u64) -> Self {
        if requested_bytes == 0 { Self::ZeroBytes } else { Self::TooLarge { requested_bytes } }
    }
}

/// An error of the kind `OutOfMemory` becomes a report with nothing else in it.
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

// Errors are small: an answer of the hot path is at most a word larger than a block.
const _: () = assert!(
    size_of::<Result<Allocation, AllocError>>() <= size_of::<Allocation>() + size_of::<usize>()
);
const _: () = assert!(size_of::<Result<u64, HandleError>>() <= 3 * size_of::<usize>());

/// What is wrong with an address that a user's function answered with.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum AddressFault {
    /// It was answered before and not freed since. The function is not told.
    #[error("where a block lives that it handed out before")]
    Live,
    /// It is no multiple of what kernels load at once. The function got it back.
    #[error("which is no multiple of {alignment_bytes}")]
    Misaligned {
        /// What it must be a multiple of, in bytes.
        alignment_bytes: u64,
    },
    /// The block would not end within 64 bits. The function got it back.
    #[error("from where it would not end within 64 bits")]
    PastTheEnd,
}

/// Why a private pool refused. Nothing has changed when one of these is returned, unless it says so.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PoolError {
    /// (0, 0) is the default pool, which is not private.
    #[error("pool (0, 0) is the default pool, which always exists and has no scopes")]
    IsDefault,
    /// A pool with this id exists.
    #[error("pool {pool} exists already")]
    Taken {
        /// The pool.
        pool: PoolId,
    },
    /// No such pool, or all of it has gone.
    #[error("there is no pool {pool}")]
    Unknown {
        /// The pool.
        pool: PoolId,
    },
    /// The last user of the pool has gone.
    #[error("pool {pool} has no user any more")]
    Released {
        /// The pool.
        pool: PoolId,
    },
    /// A scope of the pool is open; a second one at the same time is not possible.
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
    /// A block waits for other streams, which a checkpoint cannot hold.
    #[error("the block at {address:#x} in pool {pool} waits for other streams")]
    Draining {
        /// The pool.
        pool: PoolId,
        /// The block.
        address: u64,
    },
    /// A live block is used by other streams outside of captures: it cannot be taken back now.
    #[error("other streams use the block at {address:#x} in pool {pool}")]
    UsedElsewhere {
        /// The pool.
        pool: PoolId,
        /// The block.
        address: u64,
    },
    /// What the checkpoint lists is not in the pool any more, or was never listed by it.
    #[error("pool {pool} has no memory for the checkpoint's {size_bytes} bytes at {address:#x}")]
    NotInPool {
        /// The pool.
        pool: PoolId,
        /// Where the checkpoint's blocks start.
        address: u64,
        /// How many bytes they have together.
        size_bytes: u64,
    },
    /// This allocator's pools cannot do what was asked.
    #[error("pool {pool}: {what} are not possible with this backend")]
    NotSupported {
        /// The pool.
        pool: PoolId,
        /// What was asked for, in the plural.
        what: &'static str,
    },
    /// The driver failed; what was done before stays done.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

impl PoolError {
    /// The error for a pool that does not exist as a private pool.
    pub(crate) fn missing(pool: PoolId) -> Self {
        if pool == PoolId::DEFAULT { Self::IsDefault } else { Self::Unknown { pool } }
    }

    /// Refuses the default pool.
    pub(crate) fn unless_private(pool: PoolId) -> Result<(), Self> {
        if pool == PoolId::DEFAULT { Err(Self::IsDefault) } else { Ok(()) }
    }

    /// Whether a scope that answered its end with this is closed all the same: the driver failed when the
    /// scope had gone. Any other refusal leaves it as it was.
    pub(crate) const fn ends_scope(&self) -> bool {
        matches!(self, Self::Driver(_))
    }
}

/// The report of a failed request: every number that explains it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OutOfMemory {
    /// The device.
    pub device: DeviceId,
    /// The stream of the request.
    pub stream: StreamId,
    /// The pool of the request.
    pub pool: PoolId,
    /// What the caller asked for.
    pub requested_bytes: u64,
    /// The same after rounding.
    pub rounded_bytes: u64,
    /// The segment that would have had to come from the driver.
    pub segment_bytes: u64,
    /// Free on the device, as the driver says. `None` when the driver could not say.
    pub device_free_bytes: Option<u64>,
    /// All the device has. `None` when the driver could not say.
    pub device_total_bytes: Option<u64>,
    /// The most this allocator may reserve, if it is limited; of a layer, the most that callers may hold.
    pub limit_bytes: Option<u64>,
    /// In callers' hands.
    pub allocated_bytes: u64,
    /// Held from the driver; 0 where that is not known, and then nothing is said of the cache.
    pub reserved_bytes: u64,
    /// Free in the small pools.
    pub cached_small_bytes: u64,
    /// Free in the large pools.
    pub cached_large_bytes: u64,
    /// Of what is free, so much is in private pools.
    pub cached_private_bytes: u64,
    /// What is free for each stream and pool that has something, the one with the largest range first; at
    /// most 5.
    pub free: Vec<FreeRanges>,
    /// Freed by the caller, but still used by other streams' unfinished work.
    pub draining_bytes: u64,
    /// What the driver said, if it was asked and refused.
    pub driver: Option<DriverError>,
    /// Processes that hold most of the device, the largest first; at most 5. Empty when the driver was not
    /// asked for memory, or does not list the processes.
    pub holders: Vec<Holder>,
    /// Who holds most of what is in callers' hands, the largest first; at most 10. Empty unless the history
    /// records stacks, or names of scopes.
    pub live: Vec<LiveBytes>,
    /// The configuration in force, as far as it differs from the defaults.
    pub configuration: Option<String>,
    /// The file that a snapshot was written to, or why there is none; `None` where nobody asked for one.
    pub snapshot: Option<Result<PathBuf, String>>,
    /// What would most likely have helped, as sentences.
    pub hints: Vec<String>,
}

/// Blocks that live and were asked for at one place of the program.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LiveBytes {
    /// What was asked for, in bytes.
    pub bytes: u64,
    /// How many blocks.
    pub blocks: u64,
    /// How long the oldest of them has lived.
    pub oldest: Duration,
    /// The innermost frames of who asked.
    pub frames: Vec<String>,
}

impl fmt::Display for LiveBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (held, oldest) = (human_bytes(self.bytes), self.oldest.as_secs_f64());
        let (blocks, plural) = (self.blocks, if self.blocks == 1 { "block" } else { "blocks" });
        let no_frames = self.frames.is_empty();
        let asked = if no_frames { "nobody knows who asked" } else { &self.frames.join(" < ") };
        write!(f, "{held} in {blocks} {plural}, up to {oldest:.1} s old: {asked}")
    }
}

/// What is free for requests on one stream in one pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FreeRanges {
    /// Only requests on this stream can use it.
    pub stream: StreamId,
    /// The pool it belongs to.
    pub pool: PoolId,
    /// All of it.
    pub bytes: u64,
    /// In so many ranges; a request needs one.
    pub ranges: u64,
    /// The largest of them.
    pub largest_bytes: u64,
    /// What keeps these ranges apart, and their segments from going back: blocks of the same segments that
    /// are in use, or wait for other streams.
    pub between_blocks: u64,
    /// Those blocks' bytes.
    pub between_bytes: u64,
}

/// A process that holds memory of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Its number, as the driver sees it: inside a container it may be the host's.
    pub process: u32,
    /// What it holds.
    pub used_bytes: u64,
}

impl Holder {
    /// Whether it has this process's number.
    #[must_use]
    pub(crate) fn is_this_process(&self) -> bool {
        self.process == std::process::id()
    }
}

impl OutOfMemory {
    /// The most processes that a report names.
    pub(crate) const HOLDERS_MAX: usize = 5;
    /// The most streams and pools whose free memory is described.
    pub(crate) const FREE_MAX: usize = 5;
    /// The most holders of live bytes.
    pub(crate) const LIVE_MAX: usize = 10;

    /// The report of a failed request for `bytes` on `stream` that nothing else is known of yet. What is
    /// left at 0 is not spoken of.
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
            return writeln!(f, "The device has {all} in all: {why}.");
        }
        write!(f, "out of memory on device {}", self.device)?;
        // A report that was made of a driver's error alone has no request.
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
            writeln!(f, "The device has {} in all, of which {} is free.", h(total), h(free))?;
        }
        let knows_cache = self.reserved_bytes > 0;
        let held = h(self.allocated_bytes);
        match self.limit_bytes.map(h) {
            Some(limit) if knows_cache || self.allocated_bytes == 0 => {
                writeln!(f, "This allocator may reserve {limit}.")?;
            }
            Some(limit) => writeln!(f, "Callers may hold {limit} and hold {held}.")?,
            None => {}
        }
        if knows_cache {
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
            writeln!(f, "Of what is cached, {private} is in private pools (of graphs, say).")?;
        }
        for free in &self.free {
            writeln!(f, "{free}")?;
        }
        if self.free.is_empty() && self.cached_large_bytes + self.cached_small_bytes > 0 {
            writeln!(f, "Where the cached memory lies is known to the driver only.")?;
        } else if self.free.is_empty() && knows_cache {
            writeln!(f, "No block is free.")?;
        }
        if let Some(driver) = &self.driver {
            writeln!(f, "The driver said: {driver}.")?;
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
            n => write!(f, ", beside {n} blocks in use of {} in all.", h(self.between_bytes)),
        }
    }
}

/// Why a handle or an address was refused. Nothing has changed when one of these is returned.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum HandleError {
    /// The handle belongs to another allocator.
    #[error("the allocation belongs to allocator {}, not to {}", owner.number(), asked.number())]
    Foreign {
        /// Who made it.
        owner: OwnerId,
        /// Who was asked.
        asked: OwnerId,
    },
    /// The block was freed before; its place may hold another block by now.
    #[error("the allocation at {address:#x} was freed before")]
    Stale {
        /// The address of the handle.
        address: u64,
    },
    /// No live block starts at this address.
    #[error("no live block starts at {address:#x}")]
    UnknownAddress {
        /// The address that was given.
        address: u64,
    },
    /// The driver failed, so that other streams' work on the block cannot be waited for.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

/// A free that was refused. It gives the allocation back.
#[derive(Debug, Error)]
#[error("{reason}")]
pub struct FreeError {
    /// Why.
    #[source]
    pub reason: HandleError,
    /// What was to be freed, as it was.
    pub allocation: Allocation,
}

/// A memory fraction that is no fraction.
#[derive(Clone, Copy, Debug, PartialEq, Error)]
#[error("memory fraction {fraction}: expected a number from 0 to 1")]
pub struct FractionError {
    /// What was given.
    pub fraction: f64,
}

impl FractionError {
    /// Refuses what is no fraction.
    pub(crate) fn check(fraction: f64) -> Result<(), Self> {
        if (0.0..=1.0).contains(&fraction) { Ok(()) } else { Err(Self { fraction }) }
    }
}
