//! The calls by which a block is had and given back, and what a layer does at each.
//!
//! [`Layer`] is what a layer's author writes: only the calls it changes, the rest goes straight to the
//! allocator below. [`Layered`] makes a [`DeviceAllocator`] of it and is the one place that forwards every
//! capability; it keeps no state. A capability that the allocator below lacks stays absent. Read
//! next: `limit`, a small one, `shift`, for layers that move blocks, and `front`, which keeps some.
//!
//! A layer that only looks at whether a request failed leaves the answer where the allocator below wrote
//! it, and changes it there on failure: moving a handle reads as a whole what was just written in pieces,
//! and the processor waits for that.

use std::fmt;
use std::ops::Deref;

use crate::allocator::{
    Allocation, BaseAllocation, CacheInfo, Caching, Checkpoints, Counters, CrossStream,
    DeviceAllocator, Expandable, Hooks, Imported, PeerAccess, PoolCheckpoint, PoolOptions,
    PrivatePools, RawAddresses, Recording, Request, Restored, ScopeFilter, Sharing,
};
use crate::config::Config;
use crate::error::{
    AllocError, DriverError, FractionError, FreeError, HandleError, OutOfMemory, PoolError,
};
use crate::history::SegmentLayout;
use crate::ids::{PoolId, StreamId};
use crate::sharing::{SharedHandle, SharingError};
use crate::stats::{Statistics, Usage};

/// What a layer does. Everything has a default that goes straight to the allocator below.
pub trait Layer: fmt::Debug + Send + Sync {
    /// The allocator below.
    type Inner: DeviceAllocator;

    /// The allocator below.
    fn inner(&self) -> &Self::Inner;

    /// Hands out a block. May wait as the allocator below does.
    ///
    /// # Errors
    ///
    /// [`AllocError`]; nothing has changed then.
    #[inline]
    fn allocate(&self, request: Request) -> Result<Allocation, AllocError> {
        self.inner().allocate(request)
    }

    /// Takes a block back.
    ///
    /// # Errors
    ///
    /// [`FreeError`] with the allocation as it was.
    #[inline]
    fn free(&self, allocation: Allocation) -> Result<(), FreeError> {
        self.inner().free(allocation)
    }

    /// Takes a block back by address, and says how many bytes were asked for it.
    ///
    /// # Errors
    ///
    /// [`HandleError`]; nothing has changed then.
    #[inline]
    fn free_raw(&self, address: u64) -> Result<u64, HandleError> {
        raw_of(self.inner()).free_raw(address)
    }

    /// Announces another stream's use by address.
    ///
    /// # Errors
    ///
    /// [`HandleError`]; nothing has changed then.
    fn record_stream_raw(&self, address: u64, stream: StreamId) -> Result<(), HandleError> {
        raw_of(self.inner()).record_stream_raw(address, stream)
    }

    /// Announces another stream's use.
    ///
    /// # Errors
    ///
    /// [`HandleError`]; nothing has changed then.
    fn record_stream(&self, allocation: &Allocation, stream: StreamId) -> Result<(), HandleError> {
        cross_of(self.inner()).record_stream(allocation, stream)
    }

    /// Whether blocks have other addresses or sizes below than above. Then capabilities that speak of
    /// the blocks below by address (pools, sharing, exact addresses) are absent above.
    fn moves_blocks(&self) -> bool {
        false
    }

    /// Whether blocks can be given back by address, where the allocator below can do it.
    fn serves_addresses(&self) -> bool {
        true
    }

    /// The handle that the allocator below knows, for calls that only look; `None` when it is the same.
    fn below(&self, allocation: &Allocation) -> Option<Allocation> {
        let _ = allocation;
        None
    }

    /// Gives a pool's blocks back and hands out those of the checkpoint.
    ///
    /// # Errors
    ///
    /// [`PoolError`]; nothing has changed then.
    fn restore(&self, checkpoint: &PoolCheckpoint) -> Result<Restored, PoolError> {
        checkpoints_of(self.inner()).restore(checkpoint)
    }

    /// A scope is about to open. Called again with [`scope_closed`](Self::scope_closed) if it does not.
    fn scope_opens(&self) {}

    /// A scope has closed.
    fn scope_closed(&self) {}

    /// Idle memory is about to be released.
    fn empties(&self) {}

    /// What is recorded.
    fn recording(&self) -> Option<&dyn Recording> {
        self.inner().recording()
    }

    /// Whether the layer counts.
    fn counts(&self) -> bool {
        self.inner().counters().is_some()
    }

    /// The counters.
    fn statistics(&self) -> Statistics {
        self.inner().counters().map(Counters::statistics).unwrap_or_default()
    }

    /// The most important counters. A layer with its own [`statistics`](Self::statistics) has its own here,
    /// too: the default returns those of the allocator below.
    fn usage(&self) -> Usage {
        self.inner().counters().map(Counters::usage).unwrap_or_default()
    }

    /// Peaks become current values.
    fn reset_peaks(&self) {
        if let Some(counters) = self.inner().counters() {
            counters.reset_peaks();
        }
    }

    /// Sums become zero.
    fn reset_accumulated(&self) {
        if let Some(counters) = self.inner().counters() {
            counters.reset_accumulated();
        }
    }
}

const PRESENT: &str = "a capability is handed out only while the allocator below has it";

pub(super) fn caching_of<A: DeviceAllocator>(inner: &A) -> &dyn Caching {
    inner.caching().expect(PRESENT)
}

pub(super) fn pools_of<A: DeviceAllocator>(inner: &A) -> &dyn PrivatePools {
    inner.private_pools().expect(PRESENT)
}

pub(super) fn checkpoints_of<A: DeviceAllocator>(inner: &A) -> &dyn Checkpoints {
    inner.checkpoints().expect(PRESENT)
}

pub(super) fn raw_of<A: DeviceAllocator>(inner: &A) -> &dyn RawAddresses {
    inner.raw_addresses().expect(PRESENT)
}

pub(super) fn cross_of<A: DeviceAllocator>(inner: &A) -> &dyn CrossStream {
    inner.cross_stream().expect(PRESENT)
}

fn sharing_of<A: DeviceAllocator>(inner: &A) -> &dyn Sharing {
    inner.sharing().expect(PRESENT)
}

/// The error of a layer that refuses a request by itself: `report`, and who holds the memory, which the
/// allocator below would have said.
#[cold]
pub(super) fn out_of_memory<A: DeviceAllocator>(inner: &A, mut report: OutOfMemory) -> AllocError {
    if let Some(own) = inner.recording() {
        own.history().explain(&mut report);
    }
    AllocError::OutOfMemory(Box::new(report))
}

/// An allocator that wears a layer. Dereferences to the layer, for what only that layer can answer.
#[derive(Debug)]
pub struct Layered<L>(L);

impl<L: Layer> Layered<L> {
    /// The allocator below, wearing `layer`.
    pub fn new(layer: L) -> Self {
        Self(layer)
    }

    /// What the allocator below is asked with: the handle as it is, or as it is known there.
    fn seen<R>(&self, allocation: &Allocation, ask: impl FnOnce(&Allocation) -> R) -> R {
        match self.0.below(allocation) {
            Some(below) => ask(&below),
            None => ask(allocation),
        }
    }
}

impl<L> Deref for Layered<L> {
    type Target = L;

    fn deref(&self) -> &L {
        &self.0
    }
}

impl<L: Layer> DeviceAllocator for Layered<L> {
    #[inline]
    fn allocate(&self, request: Request) -> Result<Allocation, AllocError> {
        self.0.allocate(request)
    }

    #[inline]
    fn free(&self, allocation: Allocation) -> Result<(), FreeError> {
        self.0.free(allocation)
    }

    fn name(&self) -> &str {
        self.0.inner().name()
    }

    fn cross_stream(&self) -> Option<&dyn CrossStream> {
        self.0.inner().cross_stream().map(|_| self as &dyn CrossStream)
    }

    fn caching(&self) -> Option<&dyn Caching> {
        self.0.inner().caching().map(|_| self as &dyn Caching)
    }

    fn counters(&self) -> Option<&dyn Counters> {
        self.0.counts().then_some(self as &dyn Counters)
    }

    fn raw_addresses(&self) -> Option<&dyn RawAddresses> {
        let raw = self.0.inner().raw_addresses().filter(|_| self.0.serves_addresses());
        raw.map(|_| self as &dyn RawAddresses)
    }

    fn hooks(&self) -> Option<&Hooks> {
        self.0.inner().hooks()
    }

    fn private_pools(&self) -> Option<&dyn PrivatePools> {
        let pools = self.0.inner().private_pools().filter(|_| !self.0.moves_blocks());
        pools.map(|_| self as &dyn PrivatePools)
    }

    fn checkpoints(&self) -> Option<&dyn Checkpoints> {
        let checkpoints = self.0.inner().checkpoints().filter(|_| !self.0.moves_blocks());
        checkpoints.map(|_| self as &dyn Checkpoints)
    }

    fn expandable(&self) -> Option<&dyn Expandable> {
        self.0.inner().expandable()
    }

    fn peer_access(&self) -> Option<&dyn PeerAccess> {
        self.0.inner().peer_access()
    }

    fn sharing(&self) -> Option<&dyn Sharing> {
        let sharing = self.0.inner().sharing().filter(|_| !self.0.moves_blocks());
        sharing.map(|_| self as &dyn Sharing)
    }

    /// That of the allocator below: addresses and sizes are as it knows them.
    fn recording(&self) -> Option<&dyn Recording> {
        self.0.recording()
    }
}

impl<L: Layer> CrossStream for Layered<L> {
    fn record_stream(&self, allocation: &Allocation, stream: StreamId) -> Result<(), HandleError> {
        self.0.record_stream(allocation, stream)
    }

    fn process_events(&self) -> Result<(), DriverError> {
        cross_of(self.0.inner()).process_events()
    }
}

impl<L: Layer> Caching for Layered<L> {
    fn empty_cache(&self) -> Result<(), DriverError> {
        self.0.empties();
        caching_of(self.0.inner()).empty_cache()
    }

    fn set_limit_bytes(&self, limit_bytes: Option<u64>) {
        caching_of(self.0.inner()).set_limit_bytes(limit_bytes);
    }

    fn set_memory_fraction(&self, fraction: f64) -> Result<(), FractionError> {
        caching_of(self.0.inner()).set_memory_fraction(fraction)
    }

    fn limit_bytes(&self) -> Option<u64> {
        caching_of(self.0.inner()).limit_bytes()
    }

    fn apply(&self, config: &Config) -> Result<(), DriverError> {
        caching_of(self.0.inner()).apply(config)
    }

    fn cache_info(&self) -> Result<CacheInfo, DriverError> {
        caching_of(self.0.inner()).cache_info()
    }

    fn layout(&self) -> Vec<SegmentLayout> {
        caching_of(self.0.inner()).layout()
    }

    fn base_allocation(&self, allocation: &Allocation) -> Result<BaseAllocation, HandleError> {
        self.seen(allocation, |below| caching_of(self.0.inner()).base_allocation(below))
    }
}

impl<L: Layer> Counters for Layered<L> {
    fn statistics(&self) -> Statistics {
        self.0.statistics()
    }

    fn usage(&self) -> Usage {
        self.0.usage()
    }

    fn reset_peaks(&self) {
        self.0.reset_peaks();
    }

    fn reset_accumulated(&self) {
        self.0.reset_accumulated();
    }
}

impl<L: Layer> RawAddresses for Layered<L> {
    #[inline]
    fn free_raw(&self, address: u64) -> Result<u64, HandleError> {
        self.0.free_raw(address)
    }

    fn record_stream_raw(&self, address: u64, stream: StreamId) -> Result<(), HandleError> {
        self.0.record_stream_raw(address, stream)
    }
}

impl<L: Layer> Sharing for Layered<L> {
    fn share(&self, allocation: &Allocation) -> Result<SharedHandle, SharingError> {
        self.seen(allocation, |below| sharing_of(self.0.inner()).share(below))
    }

    fn share_raw(&self, address: u64) -> Result<SharedHandle, SharingError> {
        sharing_of(self.0.inner()).share_raw(address)
    }

    fn open(&self, handle: &SharedHandle) -> Result<Imported, SharingError> {
        sharing_of(self.0.inner()).open(handle)
    }
}

impl<L: Layer> PrivatePools for Layered<L> {
    fn create_pool(&self, pool: PoolId, options: PoolOptions) -> Result<(), PoolError> {
        pools_of(self.0.inner()).create_pool(pool, options)
    }

    fn set_pool_options(
        &self,
        pool: PoolId,
        use_on_oom: bool,
        no_split: bool,
    ) -> Result<(), PoolError> {
        pools_of(self.0.inner()).set_pool_options(pool, use_on_oom, no_split)
    }

    fn retain_pool(&self, pool: PoolId) -> Result<(), PoolError> {
        pools_of(self.0.inner()).retain_pool(pool)
    }

    fn release_pool(&self, pool: PoolId) -> Result<(), PoolError> {
        pools_of(self.0.inner()).release_pool(pool)
    }

    fn pool_users(&self, pool: PoolId) -> Option<u32> {
        pools_of(self.0.inner()).pool_users(pool)
    }

    fn open_scope(&self, pool: PoolId, filter: ScopeFilter) -> Result<(), PoolError> {
        self.0.scope_opens();
        let opened = pools_of(self.0.inner()).open_scope(pool, filter);
        if opened.is_err() {
            self.0.scope_closed();
        }
        opened
    }

    fn close_scope(&self, pool: PoolId) -> Result<(), PoolError> {
        let closed = pools_of(self.0.inner()).close_scope(pool);
        if closed.as_ref().err().is_none_or(PoolError::ends_scope) {
            self.0.scope_closed();
        }
        closed
    }

    fn empty_pool(&self, pool: PoolId) -> Result<(), PoolError> {
        pools_of(self.0.inner()).empty_pool(pool)
    }

    fn live_addresses(&self, pool: PoolId) -> Result<Vec<u64>, PoolError> {
        pools_of(self.0.inner()).live_addresses(pool)
    }

    fn pool_layout(&self, pool: PoolId) -> Result<Vec<SegmentLayout>, PoolError> {
        pools_of(self.0.inner()).pool_layout(pool)
    }
}

impl<L: Layer> Checkpoints for Layered<L> {
    fn checkpoint(&self, pool: PoolId) -> Result<PoolCheckpoint, PoolError> {
        checkpoints_of(self.0.inner()).checkpoint(pool)
    }

    fn restore(&self, checkpoint: &PoolCheckpoint) -> Result<Restored, PoolError> {
        self.0.restore(checkpoint)
    }
}
