//! The trait of all allocators, and the types of its arguments and results.
//!
//! A user-defined allocator implements [`DeviceAllocator::allocate`] and [`DeviceAllocator::free`].
//! Everything else is an optional capability, a field of [`Control`].

mod control;
mod halves;
mod hooks;
mod host_bytes;
mod peers;
mod pools;
mod recording;
mod sharing;
mod sleeping;

use std::fmt;
use std::sync::Arc;

use enum_dispatch::enum_dispatch;

use crate::config::Config;
use crate::error::{AllocError, DriverError, FractionError, FreeError, HandleError, PoolError};
use crate::history::SegmentLayout;
use crate::ids::{OwnerId, PoolId, StreamId};
use crate::size::{PoolKind, REQUEST_MAX_BYTES, fraction_of_limit};
use crate::stats::{Statistics, Usage};

pub use crate::system::ByteAccess;
pub use control::{Control, MemoryKind};
pub use hooks::{FreeMemoryCallback, Hooks, OomObserver};
pub use host_bytes::HostBytes;
pub use peers::PeerAccess;
pub use pools::{
    Checkpoints, Freed, MemoryPool, PoolCheckpoint, PoolHold, PoolOptions, PoolScope, PrivatePools,
    Restored, ScopeFilter, SegmentAllocator,
};
pub use recording::Recording;
pub use sharing::{Imported, Sharing};
pub use sleeping::{
    Backup, MissingMemory, PauseOptions, Paused, Resumed, SleepError, Sleeping, TagInfo,
    TagOptions, TagState, WhileAsleep,
};

/// Where a block must be placed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Place {
    /// The allocator chooses. An open scope routes the request to its private pool.
    #[default]
    Anywhere,
    /// In this pool, regardless of open scopes.
    Pool(PoolId),
    /// At exactly this address, within a free block. The free block must belong to the request's
    /// stream, and to the pool that scopes route the request to. Its bytes before the address are split
    /// off and stay free. Searches all free blocks of the stream. Never waits.
    Address(u64),
}

/// A request for a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Request {
    /// The size in bytes, at least 1.
    pub bytes: u64,
    /// The stream whose work uses the memory first. If it is the per-thread default stream, that of the
    /// calling thread is meant. It then also matters which thread frees the block: see [`StreamId`].
    pub stream: StreamId,
    /// Where the block must be placed.
    pub place: Place,
}

impl Request {
    /// Creates a request for `bytes` on `stream`, placed anywhere.
    #[inline]
    #[must_use]
    pub const fn new(bytes: u64, stream: StreamId) -> Self {
        Self { bytes, stream, place: Place::Anywhere }
    }

    /// Places the block in a pool, regardless of open scopes.
    #[inline]
    #[must_use]
    pub const fn in_pool(self, pool: PoolId) -> Self {
        Self { place: Place::Pool(pool), ..self }
    }

    /// Places the block at exactly this address.
    #[inline]
    #[must_use]
    pub const fn at(self, address: u64) -> Self {
        Self { place: Place::Address(address), ..self }
    }

    /// Returns the size of the request if it names no private pool and no address, otherwise an error.
    /// For allocators that support neither.
    ///
    /// # Errors
    ///
    /// [`AllocError::ZeroBytes`], [`AllocError::Pool`] for a private pool, [`AllocError::NoBlockAt`] for
    /// an address.
    #[inline]
    pub fn plain(&self) -> Result<u64, AllocError> {
        match self.place {
            Place::Anywhere | Place::Pool(PoolId::DEFAULT) if self.bytes == 0 => {
                Err(AllocError::ZeroBytes)
            }
            Place::Anywhere | Place::Pool(PoolId::DEFAULT) => Ok(self.bytes),
            Place::Pool(pool) => Err(PoolError::Unknown { pool }.into()),
            Place::Address(address) => Err(self.no_block_at(address)),
        }
    }

    /// Returns an error for zero bytes and for more than [`REQUEST_MAX_BYTES`].
    #[inline]
    pub(crate) fn check_size(&self) -> Result<(), AllocError> {
        let fits = self.bytes.wrapping_sub(1) < REQUEST_MAX_BYTES;
        if fits { Ok(()) } else { Err(AllocError::of_size(self.bytes)) }
    }

    /// Returns the error for a request at an address that no free block contains. For allocators that
    /// do not round sizes.
    #[cold]
    pub(crate) fn no_block_at(&self, address: u64) -> AllocError {
        AllocError::NoBlockAt { address, rounded_bytes: self.bytes, stream: self.stream }
    }
}

/// Identifies a block within its allocator. Only that allocator interprets it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)] // See `halves`.
pub struct Token(pub [u32; 3]);

impl Token {
    /// Creates a token that holds one number.
    #[inline]
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "the two halves of a number")]
    pub const fn numbered(number: u64) -> Self {
        Self([number as u32, (number >> 32) as u32, 0])
    }

    /// Returns the number of a [`numbered`](Self::numbered) token.
    #[inline]
    #[must_use]
    pub const fn number(self) -> u64 {
        self.0[0] as u64 | (self.0[1] as u64) << 32
    }
}

/// A live block.
///
/// The type cannot be copied, so a block is not freed twice by accident. It has no `Drop`: dropping it
/// leaks the block until its allocator is dropped. The typed buffers of `handle` free their block when
/// dropped.
#[must_use = "dropping an allocation leaks its block until the allocator is dropped"]
#[derive(Debug, PartialEq, Eq)]
#[repr(C)] // See `halves`.
pub struct Allocation {
    address: u64,
    size_bytes: u64,
    token: Token,
    owner: OwnerId,
}

impl Allocation {
    /// Creates a block of `size_bytes` at `address`. For implementations of allocators.
    #[inline]
    pub const fn new(address: u64, size_bytes: u64, owner: OwnerId, token: Token) -> Self {
        Self { address, size_bytes, token, owner }
    }

    /// Returns the device address of the block.
    #[inline]
    #[must_use]
    pub const fn address(&self) -> u64 {
        self.address
    }

    /// Returns the requested size in bytes, all of which the caller may use.
    #[inline]
    #[must_use]
    pub const fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Returns the id of the allocator that must free the block.
    #[inline]
    #[must_use]
    pub const fn owner(&self) -> OwnerId {
        self.owner
    }

    /// Returns an error unless the block belongs to the allocator `called`.
    ///
    /// # Errors
    ///
    /// [`HandleError::Foreign`].
    #[inline]
    pub const fn check_owner(&self, called: OwnerId) -> Result<(), HandleError> {
        if self.owner.number() == called.number() {
            return Ok(());
        }
        Err(HandleError::Foreign { owner: self.owner, called })
    }

    /// Returns the token, which only the allocator of the block interprets.
    #[inline]
    #[must_use]
    pub const fn token(&self) -> Token {
        self.token
    }
}

/// An allocator of one device's memory.
#[enum_dispatch]
pub trait DeviceAllocator: fmt::Debug + Send + Sync {
    /// Allocates a block of at least `request.bytes`. Work submitted to `request.stream` from now on
    /// may use it. Does not wait when a cached block fits. Otherwise it may wait for the driver and,
    /// under memory pressure, for running work. An allocator that supports no pools and no exact
    /// addresses calls [`Request::plain`] first.
    ///
    /// # Errors
    ///
    /// [`AllocError`]. Nothing has changed then.
    fn allocate(&self, request: Request) -> Result<Allocation, AllocError>;

    /// Frees a block. Work submitted to the block's own stream may still be running. Work on other
    /// streams must have been announced (see [`CrossStream`]). If
    /// [`CrossStream::needs_own_stream`] returns true, work on the block's own stream must have been
    /// announced too; `DeviceVec` does that.
    ///
    /// Does not wait for running work, with these exceptions:
    ///
    /// - A stream that the free must wait for was destroyed: an announced stream or, with
    ///   `cudaMallocAsync`, the block's own. The free then waits for the device.
    /// - The block is the last one of an allocator that a switch replaced. That allocator then releases
    ///   its memory.
    /// - The layer `guard` first waits for the block's streams, to check its bytes.
    /// - The allocator calls functions of the user, which may wait.
    ///
    /// # Errors
    ///
    /// [`FreeError`], which returns the allocation. Nothing has changed then.
    fn free(&self, allocation: Allocation) -> Result<(), FreeError>;

    /// Returns the name of this allocator, for messages. An allocator that is built by a registered name has
    /// that name.
    fn name(&self) -> &str {
        "user"
    }

    /// Frees the live block at `address` and returns its requested size in bytes. For callers that
    /// store only [`Allocation::address`]. Waits as [`free`](Self::free) does. Fails for an allocator
    /// without [`Control::by_address`].
    ///
    /// # Errors
    ///
    /// [`HandleError`]. Nothing has changed then.
    fn free_raw(&self, address: u64) -> Result<u64, HandleError> {
        Err(HandleError::UnknownAddress { address })
    }

    /// Calls [`CrossStream::record_stream`] for the live block at `address`.
    ///
    /// # Errors
    ///
    /// [`HandleError`]. Nothing has changed then.
    fn record_stream_raw(&self, address: u64, stream: StreamId) -> Result<(), HandleError> {
        let _ = stream;
        Err(HandleError::UnknownAddress { address })
    }

    /// Returns the most important counters. They are zeros if the allocator has none. The caching
    /// allocator returns them without waiting for a driver call, also if it has layers around it.
    fn usage(&self) -> Usage {
        self.control().counters.map(|own| Usage::of(&own.statistics())).unwrap_or_default()
    }

    /// Returns the capabilities that the allocator has now.
    fn control(&self) -> Control<'_> {
        Control::default()
    }
}

/// Forwards every method of [`DeviceAllocator`] to the same method of `$to`.
macro_rules! pass_on {
    ($self:ident => $to:expr) => {
        #[inline]
        fn allocate(&$self, request: Request) -> Result<Allocation, AllocError> {
            $to.allocate(request)
        }
        #[inline]
        fn free(&$self, allocation: Allocation) -> Result<(), FreeError> {
            $to.free(allocation)
        }
        fn name(&$self) -> &str {
            $to.name()
        }
        #[inline]
        fn free_raw(&$self, address: u64) -> Result<u64, HandleError> {
            $to.free_raw(address)
        }
        fn record_stream_raw(&$self, address: u64, stream: StreamId) -> Result<(), HandleError> {
            $to.record_stream_raw(address, stream)
        }
        fn usage(&$self) -> Usage {
            $to.usage()
        }
        fn control(&$self) -> Control<'_> {
            $to.control()
        }
    };
}
pub(crate) use pass_on;

impl<A: DeviceAllocator + ?Sized> DeviceAllocator for Box<A> {
    pass_on!(self => (**self));
}

impl<A: DeviceAllocator + ?Sized> DeviceAllocator for Arc<A> {
    pass_on!(self => (**self));
}

/// Use of a block on streams other than its own.
pub trait CrossStream: Send + Sync {
    /// Announces that work on `stream` uses the block. When the block is freed, it is not reused before
    /// the work submitted to `stream` until then has finished. Never waits. If `stream` is the
    /// per-thread default stream, it means that of the freeing thread, whichever thread announced it:
    /// see [`StreamId`].
    ///
    /// # Errors
    ///
    /// [`HandleError`] when the handle is foreign or stale.
    fn record_stream(&self, allocation: &Allocation, stream: StreamId) -> Result<(), HandleError>;

    /// Returns true if the free of a block waits for announced streams only. The block's own stream must
    /// then be announced too. Memory of the host is such memory: a program writes to a new block without
    /// a stream.
    fn needs_own_stream(&self) -> bool {
        false
    }

    /// Makes freed blocks available if the work of other streams on them has finished. Each allocation
    /// does this too. Does not wait for work of the device. Does nothing on a thread that captures.
    ///
    /// # Errors
    ///
    /// [`DriverError`] when an event cannot be queried. The block of that event continues to wait.
    fn process_events(&self) -> Result<(), DriverError>;
}

/// Control over cached memory.
pub trait Caching: Send + Sync {
    /// Waits for all pending events. Then releases all free segments, and the unused events, to the
    /// driver.
    ///
    /// # Errors
    ///
    /// [`DriverError`] when the driver fails. Memory that was not released stays cached.
    fn empty_cache(&self) -> Result<(), DriverError>;

    /// Sets the most bytes that the allocator may reserve, or removes this limit. Releases nothing.
    /// With `cudaMallocAsync` the limit applies to live bytes instead, as in PyTorch.
    fn set_limit_bytes(&self, limit_bytes: Option<u64>);

    /// Sets the limit to a fraction of [`total_bytes`](Self::total_bytes), rounded to the nearest byte.
    /// 1 removes the limit.
    ///
    /// # Errors
    ///
    /// [`FractionError`] outside [0, 1]. Nothing has changed then.
    fn set_memory_fraction(&self, fraction: f64) -> Result<(), FractionError>;

    /// Returns the most bytes that the allocator may reserve, if it is limited.
    fn limit_bytes(&self) -> Option<u64>;

    /// Returns the size of the memory that this allocator allocates from, in bytes: the device's or, for
    /// `cpu` and `pinned`, that of this machine or its container.
    ///
    /// # Errors
    ///
    /// [`DriverError`] when the size is unknown.
    fn total_bytes(&self) -> Result<u64, DriverError> {
        Ok(self.cache_info()?.device_total_bytes)
    }

    /// Returns the limit as a fraction of [`total_bytes`](Self::total_bytes), 1 if there is none.
    /// [`set_memory_fraction`](Self::set_memory_fraction) with this fraction leaves the limit as it is.
    ///
    /// # Errors
    ///
    /// [`DriverError`] when there is a limit and the size of the memory is unknown.
    fn memory_fraction(&self) -> Result<f64, DriverError> {
        match self.limit_bytes() {
            None => Ok(1.0),
            Some(limit_bytes) => Ok(fraction_of_limit(limit_bytes, self.total_bytes()?)),
        }
    }

    /// Applies a new configuration to later requests. Existing blocks and segments stay.
    ///
    /// # Errors
    ///
    /// [`DriverError`] when the device does not support the configuration. Nothing has changed then.
    fn apply(&self, config: &Config) -> Result<(), DriverError>;

    /// Returns the free and total bytes of the device, and the free blocks in the cache.
    ///
    /// # Errors
    ///
    /// [`DriverError`] when the driver cannot report its memory.
    fn cache_info(&self) -> Result<CacheInfo, DriverError>;

    /// Returns all segments with their blocks, in address order.
    fn layout(&self) -> Vec<SegmentLayout>;

    /// Returns the driver allocation that contains the block. For callers that pass it to the driver's
    /// own functions. Never waits for the device. Its cost grows with the number of blocks in the
    /// segment.
    ///
    /// # Errors
    ///
    /// [`HandleError`] when the handle is foreign or stale.
    fn base_allocation(&self, allocation: &Allocation) -> Result<BaseAllocation, HandleError>;
}

/// Segments that grow by pages.
pub trait Expandable: Send + Sync {
    /// Returns all expandable segments, in address order.
    fn expandable_segments(&self) -> Vec<ExpandableSegment>;

    /// Assigns a stream to a class of `expandable_segments_reserve_by_class`, or to no class. Applies
    /// to segments reserved later. If the configuration does not name the class, the stream reserves as
    /// much as one without a class.
    fn set_reserve_class(&self, stream: StreamId, class: Option<&str>);
}

/// A reserved address range that is mapped on demand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpandableSegment {
    /// The start address of the range.
    pub address: u64,
    /// The stream whose requests the segment serves.
    pub stream: StreamId,
    /// The pool of the segment.
    pub pool: PoolId,
    /// Small or large.
    pub kind: PoolKind,
    /// The size of a page, in bytes.
    pub page_bytes: u64,
    /// The size of the address range.
    pub reserved_bytes: u64,
    /// Bytes of the range that are mapped.
    pub mapped_bytes: u64,
}

/// The result of [`Caching::base_allocation`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BaseAllocation {
    /// The start of the block's segment. In an expandable segment, the start of the mapped range around
    /// the block.
    pub address: u64,
    /// The size of the segment or mapped range, in bytes. A range may grow and shrink while the block is
    /// live.
    pub size_bytes: u64,
    /// Whether this is a range of mapped pages. The driver has handles for the pages, but none for the
    /// range.
    pub expandable: bool,
}

/// The result of [`Caching::cache_info`], in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheInfo {
    /// Free memory of the device.
    pub device_free_bytes: u64,
    /// Total memory of the device.
    pub device_total_bytes: u64,
    /// The largest free block in the cache.
    pub largest_cached_bytes: u64,
    /// The number of free blocks in the cache.
    pub free_blocks: u64,
    /// The sum of the sizes of these blocks.
    pub free_block_bytes: u64,
}

impl CacheInfo {
    /// Creates the information for a cache without free blocks.
    pub(crate) fn empty(device_free_bytes: u64, device_total_bytes: u64) -> Self {
        Self { device_free_bytes, device_total_bytes, ..Self::default() }
    }

    /// Adds a free block to the numbers.
    pub(crate) fn add_free(&mut self, bytes: u64) {
        self.largest_cached_bytes = self.largest_cached_bytes.max(bytes);
        self.free_blocks += 1;
        self.free_block_bytes += bytes;
    }

    /// Returns the external fragmentation of the segments: 1 - largest free block / sum of all free
    /// blocks. Adjacent free blocks of a segment count as one. The result is 0 if nothing is free or
    /// all free bytes are in one block, and near 1 if they are in many small blocks. It is always 0 with
    /// `cudaMallocAsync`, because the driver does not report its free ranges.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a ratio, of far less than 2^52 bytes")]
    pub fn fragmentation(&self) -> f64 {
        match self.free_block_bytes {
            0 => 0.0,
            free_bytes => 1.0 - self.largest_cached_bytes as f64 / free_bytes as f64,
        }
    }
}

/// Counters.
pub trait Counters: Send + Sync {
    /// Returns all counters. They are exact if no call overlaps.
    fn statistics(&self) -> Statistics;
    /// Sets each peak to the current value.
    fn reset_peaks(&self);
    /// Sets all counters that only grow to zero: bytes and blocks allocated and freed, and numbers of
    /// events.
    fn reset_accumulated(&self);
}
