//! Private pools of a switchable allocator.
//!
//! A pool belongs to the allocator that was current when it was made, and every call about it goes
//! there, also after a switch: it serves `allocate_in`, is emptied, checkpointed and restored. Only new
//! scopes are refused, because requests go to the current allocator. While a scope is open there is no
//! switch. An allocator whose pool has users stays, because a graph may use its freed addresses.

use std::sync::atomic::Ordering;

use parking_lot::RwLockWriteGuard;

use super::Switchable;
use super::core::Doors;
use super::generation::Generation;
use crate::allocator::{
    Allocation, DeviceAllocator, PoolCheckpoint, PoolOptions, PrivatePools, Request, Restored,
    ScopeFilter,
};
use crate::error::{AllocError, PoolError};
use crate::history::SegmentLayout;
use crate::ids::PoolId;

/// The pools of a generation, if this one is known there.
fn knows(generation: &Generation, pool: PoolId) -> Option<&dyn PrivatePools> {
    generation.strategy.private_pools().filter(|pools| pools.pool_users(pool).is_some())
}

impl Switchable {
    /// Asks the maker of a pool. An unknown pool is the current allocator's affair. Looks at nobody, so
    /// `doors` may be held.
    fn ask_maker<R>(
        &self,
        pool: PoolId,
        ask: impl Fn(&dyn PrivatePools) -> Result<R, PoolError>,
    ) -> Result<R, PoolError> {
        let found = self.core.find(|generation| knows(generation, pool).map(&ask));
        let current = || self.core.generations.current().strategy.private_pools().map(&ask);
        found.or_else(current).unwrap_or(Err(PoolError::Unknown { pool }))
    }

    /// The same for calls that hold nothing. What the call ended may have kept an allocator.
    fn ask_pool<R>(
        &self,
        pool: PoolId,
        ask: impl Fn(&dyn PrivatePools) -> Result<R, PoolError>,
    ) -> Result<R, PoolError> {
        let answer = self.ask_maker(pool, ask);
        self.look();
        answer
    }

    /// Writes down whether a pool has an open scope.
    fn note_scope(&self, doors: &mut Doors, pool: PoolId, is_open: bool) {
        doors.scopes.retain(|open| *open != pool);
        if is_open {
            doors.scopes.push(pool);
        }
        self.core.open_scopes.store(doors.scopes.len(), Ordering::SeqCst);
    }

    /// Held while a scope is opened.
    fn gate(&self, pool: PoolId) -> Result<RwLockWriteGuard<'_, ()>, PoolError> {
        let what = "scopes opened from inside a release of memory";
        self.core.open_gate().ok_or(PoolError::NotSupported { pool, what })
    }

    /// Whether a pool is of an allocator that was replaced.
    fn is_of_retired(&self, pool: PoolId) -> bool {
        let known = |g: &Generation| knows(g, pool).map(|_| g.is_retired());
        self.core.find(known).unwrap_or(false)
    }

    /// Remembers a pool, and forgets those that nobody knows any more.
    fn remember(&self, pool: PoolId) {
        let all = self.core.generations.all();
        let mut pools = self.core.pools.lock();
        pools.retain(|pool| all.iter().any(|generation| knows(generation, *pool).is_some()));
        pools.insert(pool);
    }

    /// After something that may have been the last thing that kept an allocator.
    fn look(&self) {
        if self.core.generations.retired() > 0 {
            self.core.look_at_all();
        }
    }
}

impl PrivatePools for Switchable {
    fn create_pool(&self, pool: PoolId, options: PoolOptions) -> Result<(), PoolError> {
        self.core.with_doors(|_| {
            if self.is_of_retired(pool) {
                return Err(PoolError::Taken { pool });
            }
            if self.core.generations.current().strategy.private_pools().is_none() {
                return Err(PoolError::NotSupported { pool, what: "private pools" });
            }
            self.ask_maker(pool, |pools| pools.create_pool(pool, options.clone()))?;
            self.remember(pool);
            Ok(())
        })
    }

    fn retain_pool(&self, pool: PoolId) -> Result<(), PoolError> {
        self.ask_pool(pool, |pools| pools.retain_pool(pool))
    }

    fn release_pool(&self, pool: PoolId) -> Result<(), PoolError> {
        self.ask_pool(pool, |pools| pools.release_pool(pool))
    }

    fn pool_users(&self, pool: PoolId) -> Option<u32> {
        self.core.ask(|generation| generation.strategy.private_pools()?.pool_users(pool))
    }

    /// Waits until retired allocators have released what they are releasing now.
    fn open_scope(&self, pool: PoolId, filter: ScopeFilter) -> Result<(), PoolError> {
        let _gate = self.gate(pool)?;
        self.core.with_doors(|doors| {
            if self.is_of_retired(pool) {
                let what = "new scopes after the pool's allocator was switched away from";
                return Err(PoolError::NotSupported { pool, what });
            }
            self.ask_maker(pool, |pools| pools.open_scope(pool, filter.clone()))?;
            self.note_scope(doors, pool, true);
            self.remember(pool);
            Ok(())
        })
    }

    fn close_scope(&self, pool: PoolId) -> Result<(), PoolError> {
        let closed = self.core.with_doors(|doors| {
            let closed = self.ask_maker(pool, |pools| pools.close_scope(pool));
            // Also when that failed: makers have ended the scope then, or never had it.
            self.note_scope(doors, pool, false);
            closed
        });
        self.look();
        closed
    }

    fn allocate_in(&self, pool: PoolId, request: Request) -> Result<Allocation, AllocError> {
        let unknown = || Err(PoolError::Unknown { pool }.into());
        // One that was replaced may grow too, by what all others leave of the limit now.
        let of_retired = self.core.generations.retired() > 0 && self.is_of_retired(pool);
        if of_retired {
            self.core.spread_limit();
        }
        let taken = self.core.take(request, |current| {
            let ask = |pools: &dyn PrivatePools| pools.allocate_in(pool, request);
            let own = knows(current, pool).map(ask);
            let made = own.or_else(|| {
                let all = self.core.generations.all();
                all.iter().find_map(|generation| knows(generation, pool).map(ask))
            });
            made.or_else(|| current.strategy.private_pools().map(ask)).unwrap_or_else(unknown)
        });
        if of_retired {
            self.core.spread_limit();
        }
        self.core.left();
        taken
    }

    fn empty_pool(&self, pool: PoolId) -> Result<(), PoolError> {
        self.ask_pool(pool, |pools| pools.empty_pool(pool))
    }

    fn live_addresses(&self, pool: PoolId) -> Result<Vec<u64>, PoolError> {
        self.ask_pool(pool, |pools| pools.live_addresses(pool))
    }

    fn pool_layout(&self, pool: PoolId) -> Result<Vec<SegmentLayout>, PoolError> {
        self.ask_pool(pool, |pools| pools.pool_layout(pool))
    }

    fn checkpoint(&self, pool: PoolId) -> Result<PoolCheckpoint, PoolError> {
        self.ask_pool(pool, |pools| pools.checkpoint(pool))
    }

    fn restore(&self, checkpoint: &PoolCheckpoint) -> Result<Restored, PoolError> {
        self.ask_pool(checkpoint.pool, |pools| pools.restore(checkpoint))
    }
}
