//! The trait that every allocator implements, and the types of its arguments and results.
//!
//! A user-defined allocator implements [`DeviceAllocator::allocate`] and
//! [`DeviceAllocator::free`]; everything else is a capability that may be absent, a field of [`Control`].

mod control;
mod hooks;
mod peers;
mod pools;
mod recording;
mod sharing;

use std::fmt;
use std::sync::Arc;

use enum_dispatch::enum_dispatch;

use crate::config::Config;
use crate::error::{AllocError, DriverError, FractionError, FreeError, HandleError, PoolError};
use crate::history::SegmentLayout;
use crate::ids::{OwnerId, PoolId, StreamId};
use crate::size::{PoolKind, REQUEST_MAX_BYTES};
use crate::stats::{Statistics, Usage};

pub use control::Control;
pub use hooks::{FreeMemoryCallback, Hooks, OomObserver};
pub use peers::PeerAccess;
pub use pools::{
    Checkpoints, Freed, MemoryPool, PoolCheckpoint, PoolHold, PoolOptions, PoolScope, PrivatePools,
    Restored, ScopeFilter, SegmentAllocator,
};
pub use recording::Recording;
pub use sharing::{Imported, Sharing};

/// Where a block must lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Place {
    /// Wherever the allocator likes; an open scope of a private pool routes it there.
    #[default]
    Anywhere,
    /// In this pool, whatever scopes are open.
    Pool(PoolId),
    /// At exactly this address, in a free block of the request's stream and of the pool that scopes route it
    /// to. What lies before it in that block is cut off and stays free. Looks at every free block of the
    /// stream; never waits.
    Address(u64),
}

/// What a caller asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Request {
    /// How many bytes; at least 1.
    pub bytes: u64,
    /// The stream whose work will use the memory first. A per-thread stream is the calling thread's, and
    /// then the thread that frees matters too: see [`StreamId`].
    pub stream: StreamId,
    /// Where the block must lie.
    pub place: Place,
}

impl Request {
    /// `bytes` on `stream`, anywhere.
    #[inline]
    #[must_use]
    pub const fn new(bytes: u64, stream: StreamId) -> Self {
        Self { bytes, stream, place: Place::Anywhere }
    }

    /// The same in this pool, whatever scopes are open.
    #[inline]
    #[must_use]
    pub const fn in_pool(self, pool: PoolId) -> Self {
        Self { place: Place::Pool(pool), ..self }
    }

    /// The same at exactly this address.
    #[inline]
    #[must_use]
    pub const fn at(self, address: u64) -> Self {
        Self { place: Place::Address(address), ..self }
    }

    /// The bytes of a plain request: for allocators that have no private pools and cannot hand out exact
    /// addresses. The default pool is wherever such an allocator likes.
    ///
    /// # Errors
    ///
    /// [`AllocError::ZeroBytes`], [`AllocError::Pool`] for a pool, [`AllocError::NoBlockAt`] for an address.
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

    /// Refuses zero bytes, and more than [`REQUEST_MAX_BYTES`].
    #[inline]
    pub(crate) fn check_size(&self) -> Result<(), AllocError> {
        let fits = self.bytes.wrapping_sub(1) < REQUEST_MAX_BYTES;
        if fits { Ok(()) } else { Err(AllocError::of_size(self.bytes)) }
    }

    /// The refusal of an address, where nothing is rounded.
    #[cold]
    pub(crate) fn no_block_at(&self, address: u64) -> AllocError {
        AllocError::NoBlockAt { address, rounded_bytes: self.bytes, stream: self.stream }
    }
}

/// What an allocator needs to find its block again. Its maker's own; others carry it unread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Token(pub [u32; 3]);

impl Token {
    /// A token that is one number.
    #[inline]
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "the two halves of a number")]
    pub const fn numbered(number: u64) -> Self {
        Self([number as u32, (number >> 32) as u32, 0])
    }

    /// The number of a [`numbered`](Self::numbered) token.
    #[inline]
    #[must_use]
    pub const fn number(self) -> u64 {
        self.0[0] as u64 | (self.0[1] as u64) << 32
    }
}

/// A block in a caller's hands.
///
/// It cannot be copied, so a block cannot be freed twice by accident, and it has no `Drop`:
/// dropping it leaks the block until its allocator goes. RAII handles are built on top.
#[must_use = "dropping an allocation leaks its block until the allocator goes"]
#[derive(Debug, PartialEq, Eq)]
pub struct Allocation {
    address: u64,
    size_bytes: u64,
    token: Token,
    owner: OwnerId,
}

impl Allocation {
    /// For makers of allocators: a block of `size_bytes` at `address`.
    #[inline]
    pub const fn new(address: u64, size_bytes: u64, owner: OwnerId, token: Token) -> Self {
        Self { address, size_bytes, token, owner }
    }

    /// Where the block starts on the device.
    #[inline]
    #[must_use]
    pub const fn address(&self) -> u64 {
        self.address
    }

    /// How many bytes the caller asked for and may use.
    #[inline]
    #[must_use]
    pub const fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// The allocator that made it and that must free it.
    #[inline]
    #[must_use]
    pub const fn owner(&self) -> OwnerId {
        self.owner
    }

    /// Refuses the handle of another allocator than this one.
    ///
    /// # Errors
    ///
    /// [`HandleError::Foreign`].
    #[inline]
    pub const fn check_owner(&self, asked: OwnerId) -> Result<(), HandleError> {
        if self.owner.number() == asked.number() {
            return Ok(());
        }
        Err(HandleError::Foreign { owner: self.owner, asked })
    }

    /// Its maker's own mark.
    #[inline]
    #[must_use]
    pub const fn token(&self) -> Token {
        self.token
    }
}

/// An allocator of one device's memory.
#[enum_dispatch]
pub trait DeviceAllocator: fmt::Debug + Send + Sync {
    /// Hands out a block of at least `request.bytes`, valid for work on `request.stream` from now
    /// on. Does not wait when a cached block fits; otherwise it may wait for the driver and, under
    /// memory pressure, for running work. An allocator that knows no pools and no exact addresses
    /// begins with [`Request::plain`].
    ///
    /// # Errors
    ///
    /// [`AllocError`]; nothing has changed then.
    fn allocate(&self, request: Request) -> Result<Allocation, AllocError>;

    /// Takes a block back. Work that was submitted to the block's own stream may still be running;
    /// work on other streams must have been announced (see [`CrossStream`]).
    ///
    /// Waits for no running work, but for these: when a stream that the free must come behind was
    /// destroyed (an announced one, with `cudaMallocAsync` the block's own too), the device is waited
    /// for; the last block of an allocator that was switched away from ends it, and its memory goes
    /// back; the layer `guard` looks at the block's bytes first; functions of users do as they like.
    ///
    /// # Errors
    ///
    /// [`FreeError`], which gives the allocation back; nothing has changed then.
    fn free(&self, allocation: Allocation) -> Result<(), FreeError>;

    /// What users call this allocator.
    fn name(&self) -> &str {
        "user"
    }

    /// Frees the live block that starts at `address`, for callers that keep nothing but
    /// [`Allocation::address`], and returns how many bytes were requested for it. Waits as
    /// [`free`](Self::free) does. An allocator without [`Control::by_address`] knows no addresses.
    ///
    /// # Errors
    ///
    /// [`HandleError`]; nothing has changed then.
    fn free_raw(&self, address: u64) -> Result<u64, HandleError> {
        Err(HandleError::UnknownAddress { address })
    }

    /// [`CrossStream::record_stream`] for the live block that starts at `address`.
    ///
    /// # Errors
    ///
    /// [`HandleError`]; nothing has changed then.
    fn record_stream_raw(&self, address: u64, stream: StreamId) -> Result<(), HandleError> {
        let _ = stream;
        Err(HandleError::UnknownAddress { address })
    }

    /// The most important counters; zeros from an allocator without any. Those of the caching engine
    /// wait for no call of the driver, also under layers.
    fn usage(&self) -> Usage {
        self.control().counters.map(|own| Usage::of(&own.statistics())).unwrap_or_default()
    }

    /// Everything else that it can do now.
    fn control(&self) -> Control<'_> {
        Control::default()
    }
}

/// Every method of [`DeviceAllocator`], as a call of the same method on `$to`.
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

/// Use of a block by other streams than its own.
pub trait CrossStream: Send + Sync {
    /// Announces that work on `stream` uses the block. After its free the block is reused only
    /// when the work submitted to `stream` before the free has finished. Never waits. A per-thread
    /// stream is that of the thread that frees, whoever announced it: see [`StreamId`].
    ///
    /// # Errors
    ///
    /// [`HandleError`] when the handle is foreign or stale.
    fn record_stream(&self, allocation: &Allocation, stream: StreamId) -> Result<(), HandleError>;

    /// Returns blocks whose other streams have finished to their pools. Each allocation does this
    /// by itself. Waits for no work of the device, and does nothing on a thread that captures.
    ///
    /// # Errors
    ///
    /// [`DriverError`] when an event cannot be queried; its block stays waiting.
    fn process_events(&self) -> Result<(), DriverError>;
}

/// Control over cached memory.
pub trait Caching: Send + Sync {
    /// Waits for all pending events and gives every segment that is wholly free back to the driver, and the
    /// events that are kept for later use.
    ///
    /// # Errors
    ///
    /// [`DriverError`] when the driver fails; what was not given back stays cached.
    fn empty_cache(&self) -> Result<(), DriverError>;

    /// Sets the most bytes that may be reserved, or removes the limit. Releases nothing by itself.
    /// `cudaMallocAsync` counts the bytes of blocks in use instead, as PyTorch does.
    fn set_limit_bytes(&self, limit_bytes: Option<u64>);

    /// Sets the limit to a part of the device's memory; 1 removes it.
    ///
    /// # Errors
    ///
    /// [`FractionError`] outside [0, 1]; nothing has changed then.
    fn set_memory_fraction(&self, fraction: f64) -> Result<(), FractionError>;

    /// The most bytes that may be reserved.
    fn limit_bytes(&self) -> Option<u64>;

    /// Puts a new configuration in force; blocks and segments stay.
    ///
    /// # Errors
    ///
    /// [`DriverError`] when the device cannot do what the configuration asks for; nothing has
    /// changed then.
    fn apply(&self, config: &Config) -> Result<(), DriverError>;

    /// Free and total bytes of the device, and the largest block that a cached block could serve.
    ///
    /// # Errors
    ///
    /// [`DriverError`] when the driver cannot say.
    fn cache_info(&self) -> Result<CacheInfo, DriverError>;

    /// Every block of every segment, in address order.
    fn layout(&self) -> Vec<SegmentLayout>;

    /// What the block is a part of, for those who speak to the driver about it themselves. Never
    /// waits for the device; walks over the blocks of the segment.
    ///
    /// # Errors
    ///
    /// [`HandleError`] when the handle is foreign or stale.
    fn base_allocation(&self, allocation: &Allocation) -> Result<BaseAllocation, HandleError>;
}

/// Segments that grow by pages.
pub trait Expandable: Send + Sync {
    /// Every expandable segment, in address order.
    fn expandable_segments(&self) -> Vec<ExpandableSegment>;

    /// Puts a stream into a class of `expandable_segments_reserve_by_class`, or with `None` into
    /// none. It counts for segments that are reserved from then on. A class that the configuration
    /// does not name has the reserve of streams without one.
    fn set_reserve_class(&self, stream: StreamId, class: Option<&str>);
}

/// One range of address space that is mapped as it is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpandableSegment {
    /// Where it starts.
    pub address: u64,
    /// The stream whose requests it serves.
    pub stream: StreamId,
    /// Its pool.
    pub pool: PoolId,
    /// Small or large.
    pub kind: PoolKind,
    /// How much is mapped at once.
    pub page_bytes: u64,
    /// Its address space.
    pub reserved_bytes: u64,
    /// Of that, so much has memory.
    pub mapped_bytes: u64,
}

/// What [`Caching::base_allocation`] answers, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BaseAllocation {
    /// Where the segment starts that the block is part of; of an expandable segment, where the
    /// mapped range around the block starts.
    pub address: u64,
    /// The size of that segment or range. A range may grow and shrink while the block lives.
    pub size_bytes: u64,
    /// Whether it is a range of pages: the driver knows its pages, not the range, and no single
    /// handle of the driver stands for it.
    pub expandable: bool,
}

/// What [`Caching::cache_info`] answers, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheInfo {
    /// Free on the device.
    pub device_free_bytes: u64,
    /// All the device has.
    pub device_total_bytes: u64,
    /// The largest free block in the cache.
    pub largest_cached_bytes: u64,
    /// How many blocks are free in the cache.
    pub free_blocks: u64,
    /// The sum of their sizes.
    pub free_block_bytes: u64,
}

impl CacheInfo {
    /// The device's memory, and a cache without free blocks.
    pub(crate) fn empty(device_free_bytes: u64, device_total_bytes: u64) -> Self {
        let (largest_cached_bytes, free_blocks, free_block_bytes) = (0, 0, 0);
        Self {
            device_free_bytes,
            device_total_bytes,
            largest_cached_bytes,
            free_blocks,
            free_block_bytes,
        }
    }

    /// Counts a free block.
    pub(crate) fn add_free(&mut self, bytes: u64) {
        self.largest_cached_bytes = self.largest_cached_bytes.max(bytes);
        self.free_blocks += 1;
        self.free_block_bytes += bytes;
    }

    /// External fragmentation of the allocator's segments: 1 - largest free block / sum of all free blocks.
    /// Neighbouring free blocks of a segment are one block. 0 if one block has all free bytes, or nothing is
    /// free; near 1 if many small blocks have them. `cudaMallocAsync` does not see its free ranges: 0.
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
    /// All of them at this moment: exact when no call overlaps.
    fn statistics(&self) -> Statistics;
    /// Sets every peak to its current value.
    fn reset_peaks(&self);
    /// Sets everything that was summed up since the start (allocated, freed, numbers of events) to
    /// zero.
    fn reset_accumulated(&self);
}
