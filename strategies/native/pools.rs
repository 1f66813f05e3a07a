//! Private pools: their users, their heaps, and how requests are routed to them.
//!
//! A pool is a set of heaps, one for each stream that allocated in it. The growth lock protects the table
//! of pools. A pool's own allocator (`SegmentAllocator`) is user code and is called with no lock held.
//!
//! A **scope** routes requests to a pool. An open scope stores its pool's heaps, so a request that it
//! routes and that finds a free block does not take the growth lock.
//!
//! A pool has a count of **users**: its creator, each `retain_pool` and each opened scope; `release_pool`
//! removes one. A request on a stream under capture, or a checkpoint, **pins** the pool: while it has
//! users, its memory is not released, because the graph or checkpoint refers to its addresses. A pool
//! without users is **freeable**: its free memory is released by `empty_cache`, by `empty_pool` and in
//! the last step of a miss.
//!
//! Once a freeable pool is empty, its heaps are reused by other pools, so the number of pools over time
//! is unlimited. A heap's key (pool and stream) is checked under the heap's lock, which detects a heap
//! that now belongs to another pool.
//!
//! Source: PyTorch's private pools.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hashbrown::HashMap;
use parking_lot::{MutexGuard, RwLock};
use smallvec::SmallVec;

use super::cell::{HeapCell, HeapKey, HeapState};
use super::engine::{Engine, check_size};
use super::growth::Growth;
use super::sleep::Sleep;
use crate::allocator::{
    Allocation, Place, PoolOptions, PrivatePools, Request, ScopeFilter, SegmentAllocator,
};
use crate::diagnostics;
use crate::driver::{CaptureStatus, capture_status_of};
use crate::error::{AllocError, DriverError, PoolError};
use crate::heap::BlockId;
use crate::history::SegmentLayout;
use crate::ids::{PoolId, StreamId};
use crate::scopes::Routed;

/// The heaps of one pool.
#[derive(Debug)]
pub(super) struct PoolHeaps {
    pub(super) pool: PoolId,
    /// The number of the heap of each stream.
    numbers: RwLock<HashMap<StreamId, u32>>,
    /// True if the pool served a request during a capture, or a checkpoint of it was taken or restored.
    /// The graph or checkpoint refers to addresses of freed blocks, so the pool releases no memory while
    /// it has users.
    pinned: AtomicBool,
}

impl PoolHeaps {
    fn pin(&self) {
        self.pinned.store(true, Ordering::Relaxed);
    }

    fn is_pinned(&self) -> bool {
        self.pinned.load(Ordering::Relaxed)
    }
}

#[derive(Debug)]
pub(super) struct PrivatePool {
    heaps: Arc<PoolHeaps>,
    users: u32,
    options: PoolOptions,
    /// The number of misses in this pool and of tracker calls about it that are in progress. The pool is
    /// not removed until this is 0.
    busy: u32,
    /// The number of open scopes. Only a tag can have more than one.
    open: u32,
    /// Set if the pool is a tag.
    sleep: Option<Box<Sleep>>,
    /// Blocks that requests of the default pool have taken (`use_on_oom`). Some may have been freed since.
    lent: Vec<LentBlock>,
}

/// A block of a pool with `use_on_oom` that a request of the default pool has taken.
#[derive(Clone, Copy, Debug)]
pub(super) struct LentBlock {
    pub(super) address: u64,
    pub(super) heap: u32,
    pub(super) id: BlockId,
}

/// All private pools. Protected by the growth lock.
#[derive(Debug, Default)]
pub(super) struct Pools {
    pub(super) by_id: BTreeMap<PoolId, PrivatePool>,
    /// The pools that are tags, by name. Several may have one name if at most one of them has users.
    tags_by_name: HashMap<String, SmallVec<[PoolId; 1]>>,
    /// The numbers of the heaps of removed pools, all empty, for reuse.
    spare: Vec<u32>,
}

impl Pools {
    fn get(&self, pool: PoolId) -> Result<&PrivatePool, PoolError> {
        self.by_id.get(&pool).ok_or_else(|| PoolError::missing(pool))
    }

    fn get_mut(&mut self, pool: PoolId) -> Result<&mut PrivatePool, PoolError> {
        self.by_id.get_mut(&pool).ok_or_else(|| PoolError::missing(pool))
    }

    /// Returns the pool, or an error if it is unknown or has no users.
    pub(super) fn in_use(&mut self, pool: PoolId) -> Result<&mut PrivatePool, PoolError> {
        let found = self.get_mut(pool)?;
        if found.users == 0 { Err(PoolError::Released { pool }) } else { Ok(found) }
    }

    fn insert(&mut self, pool: PoolId, new: PrivatePool) {
        if let Some(sleep) = &new.sleep {
            self.add_name(pool, &sleep.options.name);
        }
        self.by_id.insert(pool, new);
    }

    fn add_name(&mut self, pool: PoolId, name: &str) {
        self.tags_by_name.entry_ref(name).or_default().push(pool);
    }

    fn remove(&mut self, pool: PoolId) -> Option<PrivatePool> {
        let removed = self.by_id.remove(&pool)?;
        if let Some(sleep) = &removed.sleep
            && let Some(same_name) = self.tags_by_name.get_mut(&*sleep.options.name)
        {
            same_name.retain(|other| *other != pool);
            if same_name.is_empty() {
                self.tags_by_name.remove(&*sleep.options.name);
            }
        }
        Some(removed)
    }

    /// Returns true if a tag other than `pool` has users and this name.
    pub(super) fn is_taken(&self, name: &str, pool: PoolId) -> bool {
        let mut same_name = self.tags_by_name.get(name).into_iter().flatten();
        same_name.any(|other| *other != pool && self.has_users(*other))
    }

    /// Marks the pool as referred to by graphs or checkpoints: while it has users, its memory is not
    /// released.
    pub(super) fn pin(&self, pool: PoolId) {
        if let Some(found) = self.by_id.get(&pool) {
            found.heaps.pin();
        }
    }

    /// Returns true if a pool has users, and graphs or checkpoints may refer to addresses of its freed
    /// blocks.
    pub(super) fn is_pinned(&self, pool: PoolId) -> bool {
        self.by_id.get(&pool).is_some_and(|found| found.users > 0 && found.heaps.is_pinned())
    }

    /// Adds one to the pool's `busy` count, or subtracts one.
    pub(super) fn set_busy(&mut self, pool: PoolId, busy: bool) {
        if let Some(found) = self.by_id.get_mut(&pool) {
            found.busy = if busy { found.busy + 1 } else { found.busy - 1 };
        }
    }

    /// Returns the pool's own allocator of segments, if it has one.
    pub(super) fn allocator_of(&self, pool: PoolId) -> Option<Arc<dyn SegmentAllocator>> {
        self.options_of(pool)?.allocator.clone()
    }

    pub(super) fn options_of(&self, pool: PoolId) -> Option<&PoolOptions> {
        self.by_id.get(&pool).map(|found| &found.options)
    }

    /// Returns the pools with `use_on_oom` whose free blocks the default pool may use now, in the order
    /// of their ids.
    pub(super) fn helpers(&self) -> impl Iterator<Item = &Arc<PoolHeaps>> {
        let helping = |pool: &&PrivatePool| {
            pool.options.use_on_oom && pool.users > 0 && !pool.heaps.is_pinned()
        };
        self.by_id.values().filter(helping).map(|pool| &pool.heaps)
    }

    /// Adds a block to those that a pool has lent. `is_live` returns false for a block that was freed.
    pub(super) fn add_lent(
        &mut self,
        pool: PoolId,
        block: LentBlock,
        is_live: impl Fn(&LentBlock) -> bool,
    ) {
        if let Some(found) = self.by_id.get_mut(&pool) {
            // Visits the list only when it is full. Its length stays below twice the most live blocks.
            if found.lent.len() == found.lent.capacity() {
                found.lent.retain(is_live);
            }
            found.lent.push(block);
        }
    }

    /// Returns the blocks that a pool has lent. Some may have been freed since.
    pub(super) fn lent(&self, pool: PoolId) -> &[LentBlock] {
        self.by_id.get(&pool).map_or(&[], |found| &found.lent)
    }

    /// Returns true if a private pool is not pinned and its segments came from the driver. Under pressure
    /// its free segments may then be released even if it has users.
    pub(super) fn may_shrink(&self, pool: PoolId) -> bool {
        self.is_awake(pool)
            && (self.by_id.get(&pool))
                .is_some_and(|p| !p.heaps.is_pinned() && p.options.allocator.is_none())
    }

    /// Returns the pools without users, in the order of their ids.
    pub(super) fn freeable(&self) -> Vec<PoolId> {
        self.by_id.keys().copied().filter(|pool| self.is_freeable(*pool)).collect()
    }

    pub(super) fn is_freeable(&self, pool: PoolId) -> bool {
        self.by_id.get(&pool).is_some_and(|found| {
            found.users == 0 && found.sleep.as_ref().is_none_or(|sleep| !sleep.is_changing())
        })
    }

    /// Returns true unless the pool is a tag that is not awake.
    pub(super) fn is_awake(&self, pool: PoolId) -> bool {
        self.tag(pool).is_none_or(|sleep| sleep.is_awake())
    }

    /// Fails if the pool is a tag that is not awake.
    pub(super) fn check_awake(&self, pool: PoolId) -> Result<(), PoolError> {
        if self.is_awake(pool) { Ok(()) } else { Err(PoolError::Asleep { pool }) }
    }

    /// Returns true unless the pool is a tag whose pages are in the list for its next resume.
    pub(super) fn is_mapped(&self, pool: PoolId) -> bool {
        self.tag(pool).is_none_or(|sleep| sleep.is_mapped)
    }

    /// Returns the state of a tag. `None` if the pool is no tag.
    pub(super) fn tag(&self, pool: PoolId) -> Option<&Sleep> {
        self.by_id.get(&pool)?.sleep.as_deref()
    }

    /// Returns the state of a tag. `None` if the pool is no tag.
    pub(super) fn tag_mut(&mut self, pool: PoolId) -> Option<&mut Sleep> {
        self.by_id.get_mut(&pool)?.sleep.as_deref_mut()
    }

    /// Returns the tags, in the order of their ids.
    pub(super) fn tags(&self) -> impl Iterator<Item = (PoolId, &Sleep)> {
        self.by_id.iter().filter_map(|(pool, own)| Some((*pool, own.sleep.as_deref()?)))
    }

    /// Returns the states of the tags.
    pub(super) fn tags_mut(&mut self) -> impl Iterator<Item = &mut Sleep> {
        self.by_id.values_mut().filter_map(|own| own.sleep.as_deref_mut())
    }

    /// Returns true if a request in the pool is served off the hot path, or the pool's memory is
    /// announced to trackers.
    pub(super) fn is_busy(&self, pool: PoolId) -> bool {
        self.by_id.get(&pool).is_some_and(|found| found.busy > 0)
    }

    /// Returns true if the pool has users.
    pub(super) fn has_users(&self, pool: PoolId) -> bool {
        self.by_id.get(&pool).is_some_and(|found| found.users > 0)
    }
}

impl Engine {
    /// Serves a request off the hot path: because events are pending, a scope is open, freed blocks are
    /// deferred, or the request names a pool or an address.
    #[cold]
    pub(super) fn allocate_checked(&self, request: Request) -> Result<Allocation, AllocError> {
        check_size(request.bytes)?;
        let _context = self.history.of_request();
        match request.place {
            Place::Anywhere => {}
            Place::Pool(pool) => return self.allocate_in_pool(pool, request),
            Place::Address(address) => return self.allocate_at(request, address),
        }
        let Routed { to, status } = self.route(request.stream)?;
        match to {
            Some(heaps) => self.allocate_in_heaps(&heaps, request, status),
            None => self.allocate_by_default::<true>(request.bytes, request.stream),
        }
    }

    /// Frees waiting blocks that can be freed by now. Returns the private pool to which scopes route a
    /// request on this stream, if any, and the stream's capture status.
    #[inline]
    pub(super) fn route(&self, stream: StreamId) -> Result<Routed<Arc<PoolHeaps>>, DriverError> {
        let routed = self.scopes.route(stream)?;
        self.finish_waiting(stream, routed.status)?;
        Ok(routed)
    }

    /// Allocates in a pool, regardless of open scopes.
    fn allocate_in_pool(&self, pool: PoolId, request: Request) -> Result<Allocation, AllocError> {
        let status = capture_status_of(&*self.driver, request.stream)?;
        self.finish_waiting(request.stream, status)?;
        if pool == PoolId::DEFAULT {
            return self.allocate_by_default::<true>(request.bytes, request.stream);
        }
        let heaps = Arc::clone(&self.growth.lock().pools.in_use(pool)?.heaps);
        self.allocate_in_heaps(&heaps, request, status)
    }

    /// Allocates in a private pool. `status` is the capture status of the request's stream.
    fn allocate_in_heaps(
        &self,
        heaps: &Arc<PoolHeaps>,
        request: Request,
        status: CaptureStatus,
    ) -> Result<Allocation, AllocError> {
        // Each launch of the graph uses the block's memory again, even if the block was freed in the
        // capture.
        if status != CaptureStatus::None {
            heaps.pin();
        }
        let key = HeapKey { pool: heaps.pool, stream: request.stream };
        let cell = match self.heap_in(heaps, request.stream) {
            Some(cell) => cell,
            None => self.add_private_heap(heaps, request.stream)?,
        };
        self.allocate_in_heap(cell, key, request)
    }

    fn add_private_heap(
        &self,
        heaps: &Arc<PoolHeaps>,
        stream: StreamId,
    ) -> Result<&HeapCell, AllocError> {
        let mut growth = self.growth.lock();
        let pool = heaps.pool;
        let known = growth.pools.get(pool).is_ok_and(|found| Arc::ptr_eq(&found.heaps, heaps));
        if !known {
            return Err(PoolError::Unknown { pool }.into());
        }
        if let Some(cell) = self.heap_in(heaps, stream) {
            return Ok(cell);
        }
        let key = HeapKey { pool, stream };
        let policy = growth.policy_of(pool);
        let spare = growth.pools.spare.pop().and_then(|number| self.heaps.get(number));
        let cell: &HeapCell = match spare {
            Some(cell) => cell,
            None => self.heaps.add(key, HeapState::new(self.addresses.is_kept(), policy))?,
        };
        cell.move_to(key, policy);
        heaps.numbers.write().insert(stream, cell.number);
        Ok(cell)
    }

    pub(super) fn heaps_of(&self, growth: &Growth, pool: PoolId) -> Vec<&HeapCell> {
        if pool == PoolId::DEFAULT {
            return self.heaps.of_default_pool();
        }
        let Ok(found) = growth.pools.get(pool) else { return Vec::new() };
        let numbers = found.heaps.numbers.read();
        let mut cells: Vec<_> =
            numbers.values().filter_map(|number| self.heaps.get(*number)).collect();
        cells.sort_by_key(|cell| cell.stream());
        cells
    }

    /// Returns the heaps of the default pool, then those of the private pools by pool id.
    pub(super) fn all_heaps(&self, growth: &Growth) -> Vec<&HeapCell> {
        let private = growth.pools.by_id.keys().flat_map(|pool| self.heaps_of(growth, *pool));
        self.heaps.of_default_pool().into_iter().chain(private).collect()
    }

    /// Returns the heap of a stream in a private pool.
    pub(super) fn heap_in(&self, heaps: &PoolHeaps, stream: StreamId) -> Option<&HeapCell> {
        self.heaps.get(*heaps.numbers.read().get(&stream)?)
    }

    /// Removes those of `pools` that have no users, no blocks and no open scope, and are not busy.
    pub(super) fn forget_empty_pools(
        &self,
        growth: &mut MutexGuard<'_, Growth>,
        pools: impl IntoIterator<Item = PoolId>,
    ) {
        let mut forgotten = Vec::new();
        for pool in pools {
            if !growth.pools.is_freeable(pool) {
                continue;
            }
            if !growth.pools.get(pool).is_ok_and(|found| found.busy == 0 && found.open == 0) {
                continue;
            }
            let cells = self.heaps_of(growth, pool);
            for cell in &cells {
                self.unreserve_addresses(growth, cell, false);
            }
            if cells.iter().any(|cell| cell.lock().heap.block_count() > 0) {
                continue;
            }
            for cell in cells {
                // A thread that has already looked up this heap will get an error from `lock_at`.
                let policy = cell.lock().policy;
                cell.move_to(HeapKey { pool: PoolId::NONE, stream: cell.stream() }, policy);
                growth.pools.spare.push(cell.number);
            }
            forgotten.extend(growth.pools.remove(pool));
        }
        let tags = forgotten.iter_mut().filter_map(|pool| pool.sleep.as_mut());
        let stores: Vec<_> = tags.flat_map(|sleep| sleep.backup.take_stores()).collect();
        if !stores.is_empty() {
            let kept = MutexGuard::unlocked(growth, || self.unpin(stores));
            growth.leftovers.pinned.extend(kept);
        }
        // Dropping a pool drops its own allocator, which is user code: no lock may be held.
        if forgotten.iter().any(|pool| pool.options.allocator.is_some()) {
            MutexGuard::unlocked(growth, || drop(forgotten));
        }
    }

    /// Returns the number of private pools, including pools without users that still hold memory.
    #[must_use]
    pub fn private_pool_count(&self) -> usize {
        self.growth.lock().pools.by_id.len()
    }
}

fn new_pool(pool: PoolId, options: PoolOptions) -> PrivatePool {
    PrivatePool {
        sleep: options.tag.clone().map(Sleep::new),
        heaps: Arc::new(PoolHeaps {
            pool,
            numbers: RwLock::default(),
            pinned: AtomicBool::new(false),
        }),
        users: 1,
        options,
        busy: 0,
        open: 0,
        lent: Vec::new(),
    }
}

impl PrivatePools for Engine {
    fn create_pool(&self, pool: PoolId, options: PoolOptions) -> Result<(), PoolError> {
        let mut growth = self.growth.lock();
        if pool == PoolId::DEFAULT || pool == PoolId::NONE {
            return Err(PoolError::IsDefault);
        }
        if growth.pools.by_id.contains_key(&pool) {
            return Err(PoolError::Taken { pool });
        }
        self.check_tag(&growth, pool, &options)?;
        growth.pools.insert(pool, new_pool(pool, options));
        Ok(())
    }

    fn set_pool_options(&self, pool: PoolId, options: &PoolOptions) -> Result<(), PoolError> {
        let mut growth = self.growth.lock();
        growth.pools.in_use(pool)?;
        let is_tag = growth.pools.options_of(pool).is_some_and(|own| own.tag == options.tag);
        let allocator = growth.pools.allocator_of(pool);
        self.check_tag(&growth, pool, &PoolOptions { allocator, ..options.clone() })?;
        let found = growth.pools.in_use(pool)?;
        let is_new = found.heaps.numbers.read().is_empty();
        if options.tag.is_some() && !is_tag {
            if !is_new || found.sleep.is_some() {
                let what = "tags once they have been used, or other options of a tag";
                return Err(PoolError::NotSupported { pool, what });
            }
            found.options.tag.clone_from(&options.tag);
            found.sleep = options.tag.clone().map(Sleep::new);
        }
        if options.use_on_oom && found.sleep.is_some() {
            return Err(PoolError::NotSupported { pool, what: "tags with use_on_oom" });
        }
        if options.no_split != found.options.no_split && !is_new {
            let what = "another rule of splitting once it has been used";
            return Err(PoolError::NotSupported { pool, what });
        }
        found.options.use_on_oom = options.use_on_oom;
        found.options.no_split = options.no_split;
        if let Some(tag) = options.tag.as_ref().filter(|_| !is_tag) {
            growth.pools.add_name(pool, &tag.name);
        }
        Ok(())
    }

    fn retain_pool(&self, pool: PoolId) -> Result<(), PoolError> {
        self.growth.lock().pools.in_use(pool)?.users += 1;
        Ok(())
    }

    fn release_pool(&self, pool: PoolId) -> Result<(), PoolError> {
        self.growth.lock().pools.in_use(pool)?.users -= 1;
        // Requests that wait for a tag end when it has no users.
        self.slept.notify_all();
        Ok(())
    }

    fn pool_users(&self, pool: PoolId) -> Option<u32> {
        self.growth.lock().pools.get(pool).ok().map(|found| found.users)
    }

    fn open_scope(&self, pool: PoolId, filter: ScopeFilter) -> Result<(), PoolError> {
        {
            let _context = self.history.of_free();
            self.finish_before_scope(&filter)?;
        }
        let mut growth = self.growth.lock();
        if pool == PoolId::DEFAULT || pool == PoolId::NONE {
            return Err(PoolError::IsDefault);
        }
        let known = growth.pools.by_id.contains_key(&pool);
        let made = || PrivatePool { users: 0, ..new_pool(pool, PoolOptions::default()) };
        let found = growth.pools.by_id.entry(pool).or_insert_with(made);
        if found.open > 0 && found.sleep.is_none() {
            return Err(PoolError::ScopeOpen { pool });
        }
        if known && found.users == 0 {
            return Err(PoolError::Released { pool });
        }
        found.users += 1;
        found.open += 1;
        self.scopes.open(pool, filter, Arc::clone(&found.heaps));
        self.attention.add_other();
        Ok(())
    }

    fn close_scope(&self, pool: PoolId) -> Result<(), PoolError> {
        let _context = self.history.of_free();
        let closed = {
            let mut growth = self.growth.lock();
            let found = growth.pools.get_mut(pool)?;
            let closed = self.scopes.close(pool).ok_or(PoolError::ScopeClosed { pool })?;
            found.open -= 1;
            closed
        };
        self.attention.remove_other();
        if closed.was_captures {
            self.end_capture(pool)?;
        }
        Ok(())
    }

    /// Waits for the events of the pool's blocks and releases its free memory. Does nothing while the
    /// pool has users or a capture is active.
    fn empty_pool(&self, pool: PoolId) -> Result<(), PoolError> {
        let _lines = diagnostics::lines();
        let _context = self.history.of_free();
        let mut growth = self.growth.lock();
        growth.pools.get(pool)?;
        if !growth.pools.is_freeable(pool) || self.scopes.any_capture() {
            return Ok(());
        }
        growth.counters.num_sync_all_streams += 1;
        let drained = self.drain_events(Some(pool));
        self.release_pool_memory(&mut growth, pool)?;
        self.forget_empty_pools(&mut growth, [pool]);
        drained.map_err(PoolError::Driver)
    }

    fn pool_layout(&self, pool: PoolId) -> Result<Vec<SegmentLayout>, PoolError> {
        let growth = self.growth.lock();
        if pool != PoolId::DEFAULT {
            growth.pools.get(pool)?;
        }
        Ok(self.layout_of(&self.heaps_of(&growth, pool)))
    }
}
