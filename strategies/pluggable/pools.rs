//! Private pools over a user's functions.
//!
//! If the functions manage pools themselves (`begin_pool`), scopes are forwarded to them, and no freed
//! block is kept here.
//!
//! Otherwise this module keeps the pools. A block freed in a pool with users stays there, idle, for
//! requests of the same stream and about the same size. So the memory of a graph captured in the pool is
//! not reused elsewhere, even if the functions do not support graphs.
//!
//! Lock order: pools, then a shard. No user's function runs while either is held.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::PluggableAllocator;
use super::plugin::StreamFilter;
use super::table::{Block, State};
use crate::allocator::{
    Allocation, Checkpoints, Freed, PoolCheckpoint, PoolOptions, PrivatePools, Request, Restored,
    ScopeFilter, Token,
};
use crate::driver::{CaptureStatus, Driver};
use crate::error::{AllocResult, DriverError, PoolError};
use crate::history::{Action, BlockLayout, BlockStateName, SegmentLayout};
use crate::ids::{PoolId, StreamId, ThreadNumber};
use crate::live_blocks::Live;
use crate::scopes::{Scopes, accepts};

/// An idle block of more than 512 B is reused only for requests of at least seven eighths of its size.
const SLACK_DIVISOR: u64 = 8;

/// Stream, size and address of an idle block.
pub(super) type Idle = (StreamId, u64, u64);

#[derive(Debug, Default)]
pub(super) struct Pool {
    users: u32,
    /// How often the user's `begin_pool` was called. When the pool has no users any more, `release_pool` is
    /// called as often.
    begun: u32,
    /// The thread that is calling the user's `end_pool` for the scope that was closed last.
    ending: Option<ThreadNumber>,
    pub(super) options: PoolOptions,
    /// True if the pool served a request of a captured stream or a checkpoint was taken. Its idle blocks
    /// then stay in the pool until it has no users.
    pub(super) fixed: bool,
    /// The number of the pool's blocks in the table.
    blocks: usize,
    idle: BTreeSet<Idle>,
}

/// The data of an open scope.
#[derive(Clone, Copy, Debug)]
struct Opened {
    pool: PoolId,
    /// The thread that opened the scope, if the scope serves only one request of that thread.
    brief: Option<ThreadNumber>,
}

/// All pools except the default one.
#[derive(Debug, Default)]
pub(super) struct PoolTable {
    pools: BTreeMap<PoolId, Pool>,
}

#[derive(Debug)]
pub(super) struct Pools {
    known: Mutex<PoolTable>,
    /// Notified when a scope was closed.
    closed: Condvar,
    /// Opened and closed under `known`.
    scopes: Scopes<Opened>,
}

impl PoolTable {
    pub(super) fn in_use(&mut self, pool: PoolId) -> Result<&mut Pool, PoolError> {
        match self.pools.get_mut(&pool) {
            Some(found) if found.users > 0 => Ok(found),
            Some(_) => Err(PoolError::Released { pool }),
            None => Err(PoolError::missing(pool)),
        }
    }

    fn known(&self, pool: PoolId) -> Result<&Pool, PoolError> {
        self.pools.get(&pool).ok_or(PoolError::Unknown { pool })
    }

    /// Sets or clears the thread that is calling the user's `end_pool`. While it is set, other threads
    /// wait before they open a scope.
    fn set_ending(&mut self, pool: PoolId, thread: Option<ThreadNumber>) {
        if let Some(found) = self.pools.get_mut(&pool) {
            found.ending = thread;
        }
    }

    /// Adds a freed block to its pool's idle blocks, if the pool has users. Returns true if the block
    /// was added.
    pub(super) fn keep(&mut self, pool: PoolId, block: Idle) -> bool {
        let found = self.pools.get_mut(&pool).filter(|found| found.users > 0);
        found.is_some_and(|found| found.idle.insert(block))
    }

    /// Subtracts a removed block from its pool's count. Removes the pool if it has no blocks and no users.
    pub(super) fn remove_block(&mut self, pool: PoolId) {
        if let Some(found) = self.pools.get_mut(&pool) {
            found.blocks -= 1;
            if found.blocks == 0 && found.users == 0 {
                self.pools.remove(&pool);
            }
        }
    }

    /// Removes the idle block that fits best and returns its address.
    fn take_idle(&mut self, pool: PoolId, request: Request) -> Option<u64> {
        let idle = &mut self.pools.get_mut(&pool)?.idle;
        let most = request.bytes.saturating_add(request.bytes / (SLACK_DIVISOR - 1)).max(512);
        let range = (request.stream, request.bytes, 0)..=(request.stream, most, u64::MAX);
        let found = *idle.range(range).next()?;
        idle.remove(&found);
        Some(found.2)
    }
}

impl Pools {
    pub(super) fn new(driver: Arc<dyn Driver>) -> Self {
        let scopes = Scopes::new(driver);
        Self { known: Mutex::default(), closed: Condvar::new(), scopes }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, PoolTable> {
        self.known.lock()
    }

    /// Returns true if a scope of this allocator is used by a capture, or another allocator over the same
    /// driver has an open scope.
    pub(super) fn any_capture_known(&self) -> bool {
        self.scopes.any_capture() || self.scopes.any_in_other_allocators()
    }

    /// Counts a block of the pool that is about to be added to the table.
    pub(super) fn add_block(&self, pool: PoolId) {
        if pool != PoolId::DEFAULT {
            // The pool may have been removed in the meantime. It is then created again, without users,
            // until the block is removed.
            self.lock().pools.entry(pool).or_default().blocks += 1;
        }
    }
}

impl PluggableAllocator {
    /// Returns the pool that serves a request.
    pub(super) fn route(&self, request: Request) -> Result<PoolId, DriverError> {
        let routed = self.pools.scopes.route(request.stream)?;
        Ok(routed.to.map_or(PoolId::DEFAULT, |opened| opened.pool))
    }

    /// Allocates an idle block of `pool`, if one fits the request.
    pub(super) fn revive(
        &self,
        known: &mut PoolTable,
        pool: PoolId,
        request: Request,
    ) -> Option<Allocation> {
        let address = known.take_idle(pool, request)?;
        let serial = self.table.lock(address).revive(address, request.bytes)?;
        self.record(Action::Alloc, address, request.bytes, (request.stream, pool));
        Some(Allocation::new(address, request.bytes, self.owner, Token::numbered(serial)))
    }

    /// Allocates an idle block of a pool with `use_on_oom`, for a request to the default pool.
    pub(super) fn take_from_helpers(&self, request: Request) -> Option<Allocation> {
        let mut known = self.pools.lock();
        let helps = |(_, pool): &(&PoolId, &Pool)| pool.options.use_on_oom && !pool.fixed;
        let helpers: Vec<_> = known.pools.iter().filter(helps).map(|(id, _)| *id).collect();
        let found = helpers.into_iter().find_map(|pool| self.revive(&mut known, pool, request))?;
        if let Some(block) = self.table.lock(found.address()).get_mut(found.address()) {
            block.is_lent = true;
        }
        Some(found)
    }

    /// Frees the idle blocks of pools without users, and those of `own` unless a graph or checkpoint
    /// needs them.
    pub(super) fn release_idle(&self, own: Option<PoolId>) {
        let mut known = self.pools.lock();
        let idle: Vec<(PoolId, Idle)> = known
            .pools
            .iter_mut()
            .filter(|(id, pool)| pool.users == 0 || (Some(**id) == own && !pool.fixed))
            .flat_map(|(id, pool)| std::mem::take(&mut pool.idle).into_iter().map(|b| (*id, b)))
            .collect();
        let mut removed = Vec::new();
        for (pool, (_, _, address)) in idle {
            if let Some(block) = self.table.lock(address).remove(address) {
                known.remove_block(pool);
                removed.push((address, block));
            }
        }
        drop(known);
        for (address, block) in removed {
            self.free_removed(address, &block);
        }
    }

    /// Converts a scope's filter to a closure for the user's functions. A thread filter compares with
    /// the thread that calls the closure.
    fn stream_filter(&self, filter: ScopeFilter) -> StreamFilter {
        match filter {
            ScopeFilter::Where(accepts) => accepts,
            ScopeFilter::Thread(_) | ScopeFilter::Stream(_) => {
                Arc::new(move |stream| accepts(&filter, stream, CaptureStatus::None))
            }
            ScopeFilter::Capture(_) => {
                let driver = Arc::clone(&self.driver);
                Arc::new(move |stream| {
                    driver.capture_status(stream).is_ok_and(|now| accepts(&filter, stream, now))
                })
            }
        }
    }

    fn open(
        &self,
        pool: PoolId,
        filter: ScopeFilter,
        brief: Option<ThreadNumber>,
    ) -> Result<(), PoolError> {
        PoolError::unless_private(pool)?;
        let mut known = self.pools.lock();
        loop {
            let busy = match self.pools.scopes.of(pool) {
                Some(opened) => opened.brief,
                None => match known.pools.get(&pool).and_then(|found| found.ending) {
                    Some(thread) => Some(thread),
                    None => break,
                },
            };
            // Another thread is serving a single request in the pool or calling `end_pool`. Both end
            // soon, so this thread waits. If it is this thread itself, the call fails, because the wait
            // would never end.
            match busy {
                Some(thread) if thread != ThreadNumber::current() => {
                    self.pools.closed.wait(&mut known);
                }
                _ => return Err(PoolError::ScopeOpen { pool }),
            }
        }
        if brief.is_some() {
            known.in_use(pool)?;
        } else if known.pools.get(&pool).is_some_and(|found| found.users == 0) {
            return Err(PoolError::Released { pool });
        }
        let found = known.pools.entry(pool).or_default();
        found.users += u32::from(brief.is_none());
        found.begun += u32::from(self.callbacks.begin_pool.is_some());
        self.pools.scopes.open(pool, filter.clone(), Opened { pool, brief });
        drop(known);
        let Some(begin) = &self.callbacks.begin_pool else { return Ok(()) };
        let begun = || begin(self.device.device, pool, self.stream_filter(filter));
        // If the user's function panics, the scope is removed again.
        if let Err(panic) = catch_unwind(AssertUnwindSafe(begun)) {
            self.forget_scope(pool, brief.is_none());
            resume_unwind(panic);
        }
        Ok(())
    }

    /// Undoes the opening of a scope whose `begin_pool` panicked.
    fn forget_scope(&self, pool: PoolId, has_user: bool) {
        let mut known = self.pools.lock();
        let closed = self.pools.scopes.close(pool);
        let mut removed = None;
        if let Ok(found) = known.in_use(pool) {
            found.begun -= 1;
            found.users -= u32::from(has_user);
            if found.users == 0 && found.blocks == 0 {
                removed = known.pools.remove(&pool);
            }
        }
        drop(known);
        // Outside the lock: dropping a filter or a pool may run user code.
        drop((closed, removed));
        self.pools.closed.notify_all();
    }

    fn close(&self, pool: PoolId) -> Result<(), PoolError> {
        let mut known = self.pools.lock();
        let closed = self.pools.scopes.close(pool).ok_or(PoolError::ScopeClosed { pool })?;
        let end = self.callbacks.end_pool.as_ref();
        known.set_ending(pool, end.map(|_| ThreadNumber::current()));
        drop(known);
        drop(closed);
        let ended = end.map(|end| catch_unwind(AssertUnwindSafe(|| end(self.device.device, pool))));
        self.pools.lock().set_ending(pool, None);
        self.pools.closed.notify_all();
        if let Some(Err(panic)) = ended {
            resume_unwind(panic);
        }
        Ok(())
    }

    /// Allocates in a pool, regardless of open scopes.
    pub(super) fn allocate_in(&self, pool: PoolId, request: Request) -> AllocResult {
        // User functions with `begin_pool` find the pool by its open scope only, so the request needs
        // one.
        let by_scope = pool != PoolId::DEFAULT && self.callbacks.begin_pool.is_some();
        if by_scope && self.route(request)? != pool {
            return self.allocate_briefly(pool, request);
        }
        self.serve(pool, request)
    }

    fn allocate_briefly(&self, pool: PoolId, request: Request) -> AllocResult {
        /// Closes the scope, even if a user's function panics.
        struct Close<'a>(&'a PluggableAllocator, PoolId);
        impl Drop for Close<'_> {
            fn drop(&mut self) {
                let _ = self.0.close(self.1);
            }
        }
        self.open(pool, ScopeFilter::this_thread(), Some(ThreadNumber::current()))?;
        let _close = Close(self, pool);
        self.serve(pool, request)
    }

    pub(super) fn layout_of(&self, wanted: impl Fn(&Block) -> bool) -> Vec<SegmentLayout> {
        self.layout_and(wanted, || ()).0
    }

    /// Returns the layout, and the result of `then`, which is called while the whole table is still
    /// locked.
    pub(super) fn layout_and<T>(
        &self,
        wanted: impl Fn(&Block) -> bool,
        then: impl FnOnce() -> T,
    ) -> (Vec<SegmentLayout>, T) {
        let shards = self.table.lock_all();
        let blocks = shards.iter().flat_map(|shard| shard.iter()).filter(|block| wanted(block));
        let mut found: Vec<_> = blocks.map(layout).collect();
        let result = then();
        drop(shards);
        SegmentLayout::sort(&mut found);
        (found, result)
    }

    fn restore_checked(
        &self,
        known: &mut PoolTable,
        checkpoint: &PoolCheckpoint,
    ) -> Result<(), PoolError> {
        let pool = checkpoint.pool;
        known.in_use(pool)?;
        let is_used = |block: &&Live<Block>| {
            let elsewhere =
                !block.uses.is_empty() || self.driver.is_per_thread_stream(block.stream);
            block.pool == pool && block.is_owned_by_pool() && elsewhere
        };
        let shards = self.table.lock_all();
        if let Some(used) = shards.iter().flat_map(|shard| shard.iter()).find(is_used) {
            return Err(PoolError::UsedElsewhere { pool, address: used.address });
        }
        drop(shards);
        let mut last = None;
        for segment in &checkpoint.segments {
            let (address, size_bytes) = (segment.address, segment.size_bytes);
            let has_it = |block: &Block| {
                let found = (block.pool, block.stream, block.size_bytes);
                let is_ours = block.state == State::Idle || block.is_owned_by_pool();
                found == (pool, segment.stream, size_bytes) && is_ours
            };
            let is_sound = |block: &BlockLayout| {
                let whole = (block.address, block.size_bytes) == (address, size_bytes);
                // An idle block of the checkpoint may have been freed in the meantime. Restoring does
                // not need it.
                block.state == BlockStateName::Inactive
                    || whole
                        && (1..=size_bytes).contains(&block.requested_bytes)
                        && self.table.lock(address).get(address).is_some_and(|live| has_it(live))
            };
            // Segments must be in ascending order of address, so that no block occurs twice.
            let follows = last.replace(address) < Some(address);
            if !follows || segment.blocks.len() != 1 || !segment.blocks.iter().all(is_sound) {
                return Err(PoolError::NotInPool { pool, address, size_bytes });
            }
        }
        Ok(())
    }
}

fn layout(live: &Live<Block>) -> SegmentLayout {
    let state = match live.state {
        State::Live => BlockStateName::ActiveAllocated,
        State::Draining => BlockStateName::ActivePendingFree,
        State::Idle => BlockStateName::Inactive,
    };
    let Live { address, value: Block { size_bytes, requested_bytes, stream, pool, .. }, .. } =
        *live;
    let block = BlockLayout { address, size_bytes, requested_bytes, state };
    SegmentLayout::of_block(block, stream, pool)
}

/// Refuses tags, because their memory must be virtual memory.
fn check_no_tag(pool: PoolId, options: &PoolOptions) -> Result<(), PoolError> {
    let what = "tags (backend:native has them)";
    options.tag.as_ref().map_or(Ok(()), |_| Err(PoolError::NotSupported { pool, what }))
}

impl PrivatePools for PluggableAllocator {
    fn create_pool(&self, pool: PoolId, options: PoolOptions) -> Result<(), PoolError> {
        PoolError::unless_private(pool)?;
        check_no_tag(pool, &options)?;
        let mut known = self.pools.lock();
        if known.pools.contains_key(&pool) {
            return Err(PoolError::Taken { pool });
        }
        known.pools.insert(pool, Pool { users: 1, options, ..Pool::default() });
        Ok(())
    }

    fn set_pool_options(&self, pool: PoolId, options: &PoolOptions) -> Result<(), PoolError> {
        check_no_tag(pool, options)?;
        let mut known = self.pools.lock();
        let own = &mut known.in_use(pool)?.options;
        (own.use_on_oom, own.no_split) = (options.use_on_oom, options.no_split);
        Ok(())
    }

    fn retain_pool(&self, pool: PoolId) -> Result<(), PoolError> {
        self.pools.lock().in_use(pool)?.users += 1;
        Ok(())
    }

    fn release_pool(&self, pool: PoolId) -> Result<(), PoolError> {
        let (begun, removed) = {
            let mut known = self.pools.lock();
            let found = known.in_use(pool)?;
            found.users -= 1;
            if found.users > 0 {
                return Ok(());
            }
            let begun = std::mem::take(&mut found.begun);
            let is_empty = found.blocks == 0;
            (begun, is_empty.then(|| known.pools.remove(&pool)))
        };
        drop(removed);
        if let Some(release) = &self.callbacks.release_pool {
            (0..begun).for_each(|_| release(self.device.device, pool));
        }
        Ok(())
    }

    fn pool_users(&self, pool: PoolId) -> Option<u32> {
        self.pools.lock().known(pool).ok().map(|found| found.users)
    }

    fn open_scope(&self, pool: PoolId, filter: ScopeFilter) -> Result<(), PoolError> {
        // A capture may begin in the scope, and no event is queried during a capture.
        let may_poll = match &filter {
            ScopeFilter::Capture(_) => false,
            ScopeFilter::Stream(stream) => self.may_wait_for(*stream),
            ScopeFilter::Thread(_) | ScopeFilter::Where(_) => !self.pools.any_capture_known(),
        };
        if may_poll && self.waiting.any() {
            self.poll()?;
        }
        self.open(pool, filter, None)
    }

    fn close_scope(&self, pool: PoolId) -> Result<(), PoolError> {
        self.close(pool)
    }

    fn empty_pool(&self, pool: PoolId) -> Result<(), PoolError> {
        if self.pools.lock().known(pool)?.users > 0 {
            return Ok(());
        }
        let drained = self.drain();
        self.release_idle(None);
        Ok(drained?)
    }

    fn pool_layout(&self, pool: PoolId) -> Result<Vec<SegmentLayout>, PoolError> {
        self.pools.lock().known(pool)?;
        Ok(self.layout_of(|block| block.pool == pool))
    }
}

impl Checkpoints for PluggableAllocator {
    fn checkpoint(&self, pool: PoolId) -> Result<PoolCheckpoint, PoolError> {
        let mut known = self.pools.lock();
        known.in_use(pool)?;
        // A block that the pool has lent belongs to the request that took it.
        let segments = self.layout_of(|block| block.pool == pool && !block.is_lent_now());
        let draining = |s: &&SegmentLayout| s.blocks[0].state == BlockStateName::ActivePendingFree;
        if let Some(segment) = segments.iter().find(draining) {
            return Err(PoolError::Draining { pool, address: segment.address });
        }
        known.in_use(pool)?.fixed = true;
        Ok(PoolCheckpoint { pool, segments })
    }

    fn restore(&self, checkpoint: &PoolCheckpoint) -> Result<Restored, PoolError> {
        let pool = checkpoint.pool;
        let mut known = self.pools.lock();
        self.restore_checked(&mut known, checkpoint)?;
        let mut restored = Restored::default();
        let live = self.layout_of(|block| block.pool == pool && block.is_owned_by_pool());
        for segment in live {
            self.table.lock(segment.address).keep(segment.address);
            known.keep(pool, (segment.stream, segment.size_bytes, segment.address));
            let size_bytes = segment.blocks[0].requested_bytes;
            for action in [Action::FreeRequested, Action::FreeCompleted] {
                self.record(action, segment.address, size_bytes, (segment.stream, pool));
            }
            restored.freed.push(Freed { address: segment.address, size_bytes });
        }
        for segment in &checkpoint.segments {
            let block = segment.blocks[0];
            if block.state == BlockStateName::Inactive {
                continue;
            }
            let (address, requested) = (block.address, block.requested_bytes);
            known.in_use(pool)?.idle.remove(&(segment.stream, segment.size_bytes, address));
            if let Some(serial) = self.table.lock(address).revive(address, requested) {
                let token = Token::numbered(serial);
                self.record(Action::Alloc, address, requested, (segment.stream, pool));
                restored.live.push(Allocation::new(address, requested, self.owner, token));
            }
        }
        Ok(restored)
    }
}
