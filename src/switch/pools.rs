//! Private pools of a switchable allocator.
//!
//! A pool belongs to the allocator that was current when it was made, and every call about it goes
//! there, also after a switch: it serves `allocate_in`, is emptied, checkpointed and restored. Only new
//! scopes are refused, because requests go to the current allocator. While a scope is open there is no
//! switch. An allocator whose pool has users stays, because a graph may use its freed addresses.

use std::sync::atomic::Ordering;

use parking_lot::RwLockWriteGuard;

use super::Switchable;
use super::core::{Core, SwitchState};
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

/// A scope that is about to open. Dropped, it did not.
struct Opening<'s> {
    core: &'s Core,
    pool: PoolId,
}

impl Opening<'_> {
    /// It is open.
    fn opened(self) {
        self.core.state.lock().scopes.push(self.pool);
    }
}

impl Drop for Opening<'_> {
    fn drop(&mut self) {
        let mut state = self.core.state.lock();
        strike(&mut state.opening, self.pool);
        self.core.count_scopes(&state);
    }
}

/// A scope that counts as closed when this is dropped.
struct Closing<'s> {
    core: &'s Core,
    pool: PoolId,
}

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        let mut state = self.core.state.lock();
        strike(&mut state.scopes, self.pool);
        self.core.count_scopes(&state);
    }
}

/// Takes one mention of a pool off a list.
fn strike(pools: &mut Vec<PoolId>, pool: PoolId) {
    if let Some(at) = pools.iter().position(|listed| *listed == pool) {
        pools.remove(at);
    }
}

impl Core {
    fn count_scopes(&self, state: &SwitchState) {
        self.open_scopes.store(state.scopes.len() + state.opening.len(), Ordering::SeqCst);
    }
}

impl Switchable {
    /// Asks the maker of a pool. An unknown pool is the current allocator's affair. Looks at nobody, so
    /// `state` may be held.
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

    /// Says that a scope is about to open, if that is allowed now. From then on nothing is switched, and no
    /// retired allocator waits or releases; so the maker, whose functions may be a user's, is asked with no
    /// lock held.
    fn announce(
        &self,
        pool: PoolId,
        allowed: impl Fn() -> Result<(), PoolError>,
    ) -> Result<Opening<'_>, PoolError> {
        let _gate = self.gate(pool)?;
        self.core.with_state(|state| {
            allowed()?;
            state.opening.push(pool);
            self.core.count_scopes(state);
            Ok(Opening { core: &self.core, pool })
        })
    }

    /// Closes a scope where it was opened. It counts as closed whatever the answer: makers have ended it
    /// then, or never had it.
    fn close_at_maker(&self, pool: PoolId) -> Result<(), PoolError> {
        let _closing = Closing { core: &self.core, pool };
        self.ask_maker(pool, |pools| pools.close_scope(pool))
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
        self.core.with_state(|_| {
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
        let opening = self.announce(pool, || match self.is_of_retired(pool) {
            true => {
                let what = "new scopes after the pool's allocator was switched away from";
                Err(PoolError::NotSupported { pool, what })
            }
            false => Ok(()),
        })?;
        let opened = self.ask_maker(pool, |pools| pools.open_scope(pool, filter.clone()));
        if opened.is_ok() {
            self.remember(pool);
            opening.opened();
        }
        self.core.left();
        opened
    }

    fn close_scope(&self, pool: PoolId) -> Result<(), PoolError> {
        let closed = self.close_at_maker(pool);
        self.look();
        self.core.left();
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
