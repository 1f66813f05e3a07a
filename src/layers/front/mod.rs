//! `front`: caches a few small blocks per thread, so that a hit takes no lock.
//!
//! A freed block of up to 64 KiB (`front:SIZE` sets another limit, at most 1 MiB) is cached by the
//! thread that freed it. A thread caches at most 8 blocks of a size and 4 MiB in all. A cached block
//! serves that thread's next request of the same size, rounded to 512 bytes, on the same stream. **For
//! the strategy below, a cached block is allocated**: the strategy's counters, layout, limit and
//! history include it, with the rounded size. [`Front::here`] and [`Front::totals`] return the number
//! and bytes of cached blocks.
//!
//! A thread caches blocks of one stream at a time. It frees them in the strategy when it allocates or
//! frees on another stream, and when it ends. When a request is out of memory, and on `empty_cache`,
//! the calling thread's cache is emptied at once. The cache of every other thread is emptied at that
//! thread's next call here, because no thread can touch another thread's cache. So a thread that makes
//! no further call keeps its blocks until it ends. A request that was out of memory is then retried.
//!
//! Some calls bypass the caches: frees of blocks that `record_stream` has marked, and requests for a
//! pool or at an address. While a scope of a private pool is open, all calls bypass them. Frees by bare
//! address are not supported, because an address does not show which thread caches the block. A double
//! free with a forged handle is refused while the calling thread caches the block. It is not detected
//! if another thread caches the block or has allocated it since. When the front is dropped, blocks that
//! other threads cache are dropped with the strategy below.

mod local;

use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::{Mutex, RwLock};

use super::below::{Above, PRESENT};
use crate::allocator::{
    Allocation, Caching, Control, CrossStream, DeviceAllocator, HostBytes, Imported, Place,
    PoolOptions, PrivatePools, Request, ScopeFilter, Sharing,
};
use crate::error::{AllocError, AllocResult, DriverError, FreeError, HandleError, PoolError};
use crate::history::SegmentLayout;
use crate::ids::{OwnerId, PoolId, StreamId};
use crate::sharing::{SharedHandle, SharingError};
use crate::stats::Usage;
use crate::sync::{Global, Rank};
#[doc(hidden)]
pub use local::forget_all;
use local::{CachedBlock, Counts, EvictedBlock, FrontCallbacks, STEP_BYTES, bytes_of, class_of};

/// The most streams whose blocks are cached. Requests on further streams go to the strategy.
const STREAMS_MAX: usize = 256;

/// The counters of a front, for one thread or for all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FrontCounts {
    /// Requests served from the cache.
    pub hits: u64,
    /// Requests of a cached size class for which the cache had no block. Requests that bypass the cache do
    /// not count.
    pub misses: u64,
    /// Frees that were cached.
    pub frees: u64,
    /// Blocks in the cache now.
    pub held_blocks: u64,
    /// The bytes of these blocks, as the strategy below counts them.
    pub held_bytes: u64,
}

impl FrontCounts {
    fn of(counts: &Counts) -> Self {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Self {
            hits: read(&counts.hits),
            misses: read(&counts.misses),
            frees: read(&counts.frees),
            held_blocks: read(&counts.frees)
                .saturating_sub(read(&counts.hits))
                .saturating_sub(read(&counts.returned)),
            held_bytes: read(&counts.held_bytes),
        }
    }

    fn plus(self, other: Self) -> Self {
        Self {
            hits: self.hits + other.hits,
            misses: self.misses + other.misses,
            frees: self.frees + other.frees,
            held_blocks: self.held_blocks + other.held_blocks,
            held_bytes: self.held_bytes + other.held_bytes,
        }
    }
}

/// An allocator with per-thread caches.
#[derive(Debug)]
pub struct Front<A: DeviceAllocator + 'static> {
    shared: Arc<Shared<A>>,
}

#[derive(Debug)]
struct Shared<A> {
    inner: A,
    /// This front's number, its epoch, and whether a scope is open; see [`Shared::publish`]. A cache
    /// whose state differs is invalid.
    state: AtomicU64,
    /// The index of this front's cache in each thread's list.
    index: usize,
    classes: u32,
    /// The length of `marks`, readable without the lock.
    marked: AtomicUsize,
    /// Addresses of live blocks that `record_stream` has marked.
    marks: Mutex<HashSet<u64>>,
    phase: Mutex<Phase>,
    /// The owner of handles of the allocator below.
    owner_below: OnceLock<OwnerId>,
    /// Streams by their first owner number. Each stream has a range of owner numbers, one for each size
    /// class. So a free finds stream and size class from the handle.
    streams: RwLock<BTreeMap<u32, StreamId>>,
    /// Blocks that the allocator below has refused to free. The free is retried later.
    refused: Mutex<Vec<Allocation>>,
    threads: Mutex<Threads>,
    this: Weak<Shared<A>>,
}

#[derive(Debug, Default)]
struct Phase {
    scopes: u32,
    epoch: u32,
}

#[derive(Debug, Default)]
struct Threads {
    alive: Vec<Weak<Counts>>,
    ended: FrontCounts,
}

/// The indices of fronts in the threads' lists of caches. True if the index is taken.
static CACHE_INDICES: Global<Vec<bool>> = Global::new(Rank::FrontIndices, Vec::new());

fn take_index() -> usize {
    let mut indices = CACHE_INDICES.lock();
    let free = indices.iter().position(|taken| !taken).unwrap_or(indices.len());
    if free == indices.len() {
        indices.push(true);
    }
    indices[free] = true;
    free
}

/// Returns `inner` with per-thread caches of blocks of up to `block_max_bytes`, at most 1 MiB. With 0,
/// nothing is cached.
pub fn front<A: DeviceAllocator + 'static>(inner: A, block_max_bytes: u64) -> Front<A> {
    let classes = u32::try_from(block_max_bytes.min(1 << 20) / STEP_BYTES).unwrap_or(0);
    let id = u64::from(OwnerId::next().number());
    let shared = Arc::new_cyclic(|this| Shared {
        inner,
        state: AtomicU64::new(id << 32),
        index: take_index(),
        classes,
        marked: AtomicUsize::new(0),
        marks: Mutex::default(),
        phase: Mutex::default(),
        owner_below: OnceLock::new(),
        streams: RwLock::default(),
        refused: Mutex::default(),
        threads: Mutex::default(),
        this: Weak::clone(this),
    });
    Front { shared }
}

impl<A: DeviceAllocator + 'static> Front<A> {
    /// Returns the counters of the calling thread. Never waits.
    #[must_use]
    pub fn here(&self) -> FrontCounts {
        let state = self.shared.state.load(Ordering::Relaxed);
        let counts = local::counts(self.shared.index, state);
        counts.map(|counts| FrontCounts::of(&counts)).unwrap_or_default()
    }

    /// Returns the counters of each living thread, in no order. Exact when no call overlaps.
    #[must_use]
    pub fn threads(&self) -> Vec<FrontCounts> {
        let threads = self.shared.threads.lock();
        threads.alive.iter().filter_map(Weak::upgrade).map(|c| FrontCounts::of(&c)).collect()
    }

    /// Returns the counters of all threads together, including those that have ended. Exact when no call
    /// overlaps.
    #[must_use]
    pub fn totals(&self) -> FrontCounts {
        let ended = self.shared.threads.lock().ended;
        self.threads().into_iter().fold(ended, FrontCounts::plus)
    }
}

impl<A: DeviceAllocator + 'static> Shared<A> {
    fn scope_is_open(state: u64) -> bool {
        state & 1 == 1
    }

    /// Changes the state, so that every thread empties its cache at its next call.
    fn publish(&self, change: impl FnOnce(&mut Phase)) {
        let mut phase = self.phase.lock();
        change(&mut phase);
        phase.epoch = phase.epoch.wrapping_add(1) & (u32::MAX >> 1);
        let id = self.state.load(Ordering::Relaxed) >> 32;
        let low = u64::from(phase.epoch) << 1 | u64::from(phase.scopes > 0);
        self.state.store(id << 32 | low, Ordering::SeqCst);
    }

    /// Returns the stream and size class of an owner number. `None` if the number is not one of this
    /// front's.
    fn class_of_owner(&self, owner: OwnerId) -> Option<(StreamId, u32)> {
        let streams = self.streams.read();
        let (first, stream) = streams.range(..=owner.number()).next_back()?;
        let class = owner.number() - first;
        (class < self.classes).then_some((*stream, class))
    }

    /// Returns the first owner number of a stream. `None` if there are too many streams or no owner numbers
    /// left.
    fn first_owner_of(&self, stream: StreamId) -> Option<u32> {
        let known = |streams: &BTreeMap<u32, StreamId>| {
            streams.iter().find(|(_, own)| **own == stream).map(|(first, _)| *first)
        };
        if let Some(first) = known(&self.streams.read()) {
            return Some(first);
        }
        let mut streams = self.streams.write();
        if let Some(first) = known(&streams) {
            return Some(first);
        }
        if streams.len() == STREAMS_MAX {
            return None;
        }
        let first = OwnerId::next_row(self.classes)?.number();
        streams.insert(first, stream);
        Some(first)
    }

    /// Converts a handle of this front into the handle of the allocator below. `None` if nothing was
    /// allocated below yet.
    fn below(&self, allocation: &Allocation, class: u32) -> Option<Allocation> {
        let owner = *self.owner_below.get()?;
        Some(Allocation::new(allocation.address(), bytes_of(class), owner, allocation.token()))
    }

    /// Binds this thread's cache to `stream` and `state`, and frees the blocks that the cache held.
    /// Returns the stream's first owner number. `None` if nothing can be cached now.
    fn ready(&self, stream: StreamId, state: u64) -> Option<u32> {
        if Self::scope_is_open(state) {
            self.free_blocks(local::drain(self.index, state));
            return None;
        }
        let first_owner = self.first_owner_of(stream)?;
        let front = Weak::clone(&self.this);
        let (evicted, replaced) =
            local::put_in_force(self.index, state, stream, first_owner, || {
                let counts = Arc::default();
                let mut threads = self.threads.lock();
                threads.alive.retain(|counts| counts.strong_count() > 0);
                threads.alive.push(Arc::downgrade(&counts));
                (self.classes, counts, front as Weak<dyn FrontCallbacks>)
            })?;
        self.free_blocks(evicted);
        drop(replaced);
        Some(first_owner)
    }

    /// Frees this thread's cached blocks, and retries frees that were refused. Returns true if there
    /// were any such blocks.
    fn release(&self) -> bool {
        let state = self.state.load(Ordering::SeqCst);
        let evicted = local::drain(self.index, state);
        let refused = std::mem::take(&mut *self.refused.lock());
        let some = !evicted.is_empty() || !refused.is_empty();
        self.free_blocks(evicted);
        for below in refused {
            if let Err(error) = self.inner.free(below) {
                self.refused.lock().push(error.allocation);
            }
        }
        some
    }

    /// Allocates from the allocator below. If it is out of memory, makes each other thread empty its cache
    /// at its next call, frees this thread's cached blocks, and retries if there were any.
    fn allocate_below(&self, request: Request) -> AllocResult {
        let first = self.inner.allocate(request);
        if !matches!(first, Err(AllocError::OutOfMemory(_))) {
            return first;
        }
        self.publish(|_| {});
        if self.release() { self.inner.allocate(request) } else { first }
    }

    #[cold]
    #[inline(never)]
    fn take_below(&self, request: Request) -> AllocResult {
        let class = class_of(request.bytes);
        if class >= self.classes {
            return self.allocate_below(request);
        }
        let state = self.state.load(Ordering::SeqCst);
        let missed = || local::missed(self.index, request.stream, state);
        let ready = || self.ready(request.stream, state).and_then(|_| missed());
        let Some(first_owner) = missed().or_else(ready) else {
            return self.allocate_below(request);
        };
        let rounded = Request { bytes: bytes_of(class), ..request };
        let found = self.allocate_below(rounded)?;
        let known = *self.owner_below.get_or_init(|| found.owner()) == found.owner();
        // A scope that was opened during the request may have routed the request to a private pool.
        let routed = Self::scope_is_open(self.state.load(Ordering::SeqCst));
        if routed || !known || found.size_bytes() != rounded.bytes {
            return Ok(found);
        }
        let owner = OwnerId::numbered(first_owner + class);
        Ok(Allocation::new(found.address(), request.bytes, owner, found.token()))
    }

    #[cold]
    #[inline(never)]
    fn free_below(&self, allocation: Allocation) -> Result<(), FreeError> {
        let Some((stream, class)) = self.class_of_owner(allocation.owner()) else {
            return self.inner.free(allocation);
        };
        let state = self.state.load(Ordering::SeqCst);
        let stale = |allocation: Allocation| {
            let reason = HandleError::Stale { address: allocation.address() };
            Err(FreeError { reason, allocation })
        };
        if local::keeps(self.index, &allocation, state) {
            return stale(allocation);
        }
        let marked = self.unmark(allocation.address());
        if !marked {
            let in_force = local::is_in_force(self.index, stream, state)
                || self.ready(stream, state).is_some();
            if in_force && local::keep(self.index, &allocation, state) {
                return Ok(());
            }
        }
        let Some(below) = self.below(&allocation, class) else { return stale(allocation) };
        self.inner.free(below).map_err(|error| {
            if marked {
                self.mark(allocation.address());
            }
            FreeError { reason: error.reason, allocation }
        })
    }

    /// Marks a block as used by another stream, so that its free bypasses the cache. Returns true if
    /// the block was not marked before.
    fn mark(&self, address: u64) -> bool {
        let mut marks = self.marks.lock();
        let new = marks.insert(address);
        self.marked.store(marks.len(), Ordering::SeqCst);
        new
    }

    fn unmark(&self, address: u64) -> bool {
        if self.marked.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let mut marks = self.marks.lock();
        let was = marks.remove(&address);
        self.marked.store(marks.len(), Ordering::SeqCst);
        was
    }
}

impl<A: DeviceAllocator + 'static> FrontCallbacks for Shared<A> {
    fn free_blocks(&self, evicted: Vec<EvictedBlock>) {
        let Some(&owner) = self.owner_below.get() else {
            return;
        };
        for EvictedBlock { block: CachedBlock { address, token }, bytes } in evicted {
            if let Err(error) = self.inner.free(Allocation::new(address, bytes, owner, token)) {
                self.refused.lock().push(error.allocation);
            }
        }
    }

    fn remember(&self, counts: &Counts) {
        let mut threads = self.threads.lock();
        threads.ended = threads.ended.plus(FrontCounts::of(counts));
        threads.alive.retain(|alive| !std::ptr::eq(alive.as_ptr(), counts));
    }
}

impl<A> Drop for Shared<A> {
    fn drop(&mut self) {
        if let Some(taken) = CACHE_INDICES.lock().get_mut(self.index) {
            *taken = false;
        }
    }
}

impl<A: DeviceAllocator + 'static> Drop for Front<A> {
    fn drop(&mut self) {
        self.shared.release();
    }
}

impl<A: DeviceAllocator + 'static> DeviceAllocator for Front<A> {
    #[inline(never)]
    fn allocate(&self, request: Request) -> AllocResult {
        let shared = &*self.shared;
        if request.place != Place::Anywhere {
            return shared.inner.allocate(request);
        }
        match local::take(shared.index, request, shared.state.load(Ordering::Relaxed)) {
            Some(found) => Ok(found),
            None => shared.take_below(request),
        }
    }

    #[inline(never)]
    fn free(&self, allocation: Allocation) -> Result<(), FreeError> {
        let shared = &*self.shared;
        let state = shared.state.load(Ordering::Relaxed);
        if shared.marked.load(Ordering::Relaxed) == 0
            && local::keep(shared.index, &allocation, state)
        {
            return Ok(());
        }
        shared.free_below(allocation)
    }

    fn name(&self) -> &str {
        self.shared.inner.name()
    }

    fn usage(&self) -> Usage {
        self.shared.inner.usage()
    }

    fn control(&self) -> Control<'_> {
        let below = self.shared.inner.control();
        Control {
            cross_stream: below.cross_stream.map(|_| self as &dyn CrossStream),
            caching: below.caching.map(|_| self as &dyn Caching),
            host_bytes: below.host_bytes.map(|_| self as &dyn HostBytes),
            by_address: false,
            private_pools: below.private_pools.map(|_| self as &dyn PrivatePools),
            sharing: below.sharing.map(|_| self as &dyn Sharing),
            ..below
        }
    }
}

impl<A: DeviceAllocator + 'static> Front<A> {
    fn pools(&self) -> &dyn PrivatePools {
        self.inner().control().private_pools.expect(PRESENT)
    }

    fn sharing(&self) -> &dyn Sharing {
        self.inner().control().sharing.expect(PRESENT)
    }

    fn scope_closed(&self) {
        self.shared.publish(|phase| phase.scopes = phase.scopes.saturating_sub(1));
    }
}

impl<A: DeviceAllocator + 'static> Above for Front<A> {
    fn inner(&self) -> &dyn DeviceAllocator {
        &self.shared.inner
    }

    fn below(&self, allocation: &Allocation) -> Option<Allocation> {
        let (_, class) = self.shared.class_of_owner(allocation.owner())?;
        self.shared.below(allocation, class)
    }

    fn empties(&self) {
        self.shared.publish(|_| {});
        self.shared.release();
    }
}

impl<A: DeviceAllocator + 'static> CrossStream for Front<A> {
    fn record_stream(&self, allocation: &Allocation, stream: StreamId) -> Result<(), HandleError> {
        let Some(below) = self.below(allocation) else {
            return self.cross().record_stream(allocation, stream);
        };
        let new = self.shared.mark(allocation.address());
        self.cross().record_stream(&below, stream).inspect_err(|_| {
            if new {
                self.shared.unmark(allocation.address());
            }
        })
    }

    fn needs_own_stream(&self) -> bool {
        self.cross().needs_own_stream()
    }

    fn process_events(&self) -> Result<(), DriverError> {
        self.cross().process_events()
    }
}

impl<A: DeviceAllocator + 'static> Sharing for Front<A> {
    fn share(&self, allocation: &Allocation) -> Result<SharedHandle, SharingError> {
        self.with_handle_below(allocation, |below| self.sharing().share(below))
    }

    fn share_raw(&self, address: u64) -> Result<SharedHandle, SharingError> {
        self.sharing().share_raw(address)
    }

    fn open(&self, handle: &SharedHandle) -> Result<Imported, SharingError> {
        self.sharing().open(handle)
    }
}

impl<A: DeviceAllocator + 'static> PrivatePools for Front<A> {
    fn create_pool(&self, pool: PoolId, options: PoolOptions) -> Result<(), PoolError> {
        self.pools().create_pool(pool, options)
    }

    fn set_pool_options(&self, pool: PoolId, options: &PoolOptions) -> Result<(), PoolError> {
        self.pools().set_pool_options(pool, options)
    }

    fn retain_pool(&self, pool: PoolId) -> Result<(), PoolError> {
        self.pools().retain_pool(pool)
    }

    fn release_pool(&self, pool: PoolId) -> Result<(), PoolError> {
        self.pools().release_pool(pool)
    }

    fn pool_users(&self, pool: PoolId) -> Option<u32> {
        self.pools().pool_users(pool)
    }

    fn open_scope(&self, pool: PoolId, filter: ScopeFilter) -> Result<(), PoolError> {
        self.shared.publish(|phase| phase.scopes += 1);
        let opened = self.pools().open_scope(pool, filter);
        if opened.is_err() {
            self.scope_closed();
        }
        opened
    }

    fn close_scope(&self, pool: PoolId) -> Result<(), PoolError> {
        let closed = self.pools().close_scope(pool);
        if closed.as_ref().err().is_none_or(PoolError::ends_scope) {
            self.scope_closed();
        }
        closed
    }

    fn empty_pool(&self, pool: PoolId) -> Result<(), PoolError> {
        self.pools().empty_pool(pool)
    }

    fn live_addresses(&self, pool: PoolId) -> Result<Vec<u64>, PoolError> {
        self.pools().live_addresses(pool)
    }

    fn pool_layout(&self, pool: PoolId) -> Result<Vec<SegmentLayout>, PoolError> {
        self.pools().pool_layout(pool)
    }
}
