//! Private pools of a switchable allocator.
//!
//! A pool belongs to the allocator that was current when the pool was created. A CUDA graph may use its
//! freed addresses, so nothing is switched while a pool has users. Every call about a pool therefore
//! goes to the current allocator. A pool that was released before a switch is unknown afterwards.

use std::sync::atomic::Ordering;

use super::Switchable;
use super::core::{Core, SwitchState};
use crate::allocator::{
    Checkpoints, DeviceAllocator, PoolCheckpoint, PoolOptions, PrivatePools, Restored, ScopeFilter,
};
use crate::error::PoolError;
use crate::history::SegmentLayout;
use crate::ids::PoolId;
use crate::sync::Defer;

impl Core {
    fn count_scopes(&self, state: &SwitchState) {
        self.open_scopes.store(state.scopes.len() + state.opening.len(), Ordering::SeqCst);
    }

    /// Removes one entry for `pool` from a list when the result is dropped.
    fn remove_on_drop(
        &self,
        pool: PoolId,
        list: fn(&mut SwitchState) -> &mut Vec<PoolId>,
    ) -> Defer<impl FnMut()> {
        Defer(move || {
            let state = &mut *self.state.lock();
            let pools = list(state);
            if let Some(at) = pools.iter().position(|listed| *listed == pool) {
                pools.remove(at);
            }
            self.count_scopes(state);
        })
    }
}

impl Switchable {
    fn with_pool<R>(
        &self,
        pool: PoolId,
        call: impl FnOnce(&dyn PrivatePools) -> Result<R, PoolError>,
    ) -> Result<R, PoolError> {
        self.core.call(|current| match current.strategy.control().private_pools {
            Some(pools) => call(pools),
            None => Err(PoolError::Unknown { pool }),
        })
    }

    fn with_checkpoints<R>(
        &self,
        pool: PoolId,
        call: impl FnOnce(&dyn Checkpoints) -> Result<R, PoolError>,
    ) -> Result<R, PoolError> {
        self.core.call(|current| match current.strategy.control().checkpoints {
            Some(checkpoints) => call(checkpoints),
            None => Err(PoolError::NotSupported { pool, what: "checkpoints" }),
        })
    }

    /// Marks a scope as opening until the result is dropped. During that time nothing is switched and no
    /// retired allocator waits or releases. So no lock is held while the scope is opened, which may run
    /// user functions.
    fn announce(&self, pool: PoolId) -> Result<Defer<impl FnMut()>, PoolError> {
        let what = "scopes opened from inside a release of memory";
        let _gate = self.core.open_gate().ok_or(PoolError::NotSupported { pool, what })?;
        let mut state = self.core.state.lock();
        state.opening.push(pool);
        self.core.count_scopes(&state);
        Ok(self.core.remove_on_drop(pool, |state| &mut state.opening))
    }

    /// Closes a scope on the allocator that opened it. The scope counts as closed even after an error:
    /// the allocator has then ended it, or never had it.
    fn close_at_maker(&self, pool: PoolId) -> Result<(), PoolError> {
        let _closing = self.core.remove_on_drop(pool, |state| &mut state.scopes);
        self.with_pool(pool, |pools| pools.close_scope(pool))
    }
}

impl PrivatePools for Switchable {
    fn create_pool(&self, pool: PoolId, options: PoolOptions) -> Result<(), PoolError> {
        self.core.with_state(|state| {
            let current = self.core.generations.current();
            let pools = current.strategy.control().private_pools;
            let pools = pools.ok_or(PoolError::NotSupported { pool, what: "private pools" })?;
            pools.create_pool(pool, options)?;
            state.pools.retain(|pool| pools.pool_users(*pool).is_some());
            state.pools.insert(pool);
            Ok(())
        })
    }

    fn set_pool_options(&self, pool: PoolId, options: &PoolOptions) -> Result<(), PoolError> {
        self.with_pool(pool, |pools| pools.set_pool_options(pool, options))
    }

    fn retain_pool(&self, pool: PoolId) -> Result<(), PoolError> {
        self.with_pool(pool, |pools| pools.retain_pool(pool))
    }

    fn release_pool(&self, pool: PoolId) -> Result<(), PoolError> {
        self.with_pool(pool, |pools| pools.release_pool(pool))
    }

    fn pool_users(&self, pool: PoolId) -> Option<u32> {
        self.core.call(|current| current.strategy.control().private_pools?.pool_users(pool))
    }

    /// Waits until retired allocators have released the memory that they are releasing now.
    fn open_scope(&self, pool: PoolId, filter: ScopeFilter) -> Result<(), PoolError> {
        let opening = self.announce(pool)?;
        let opened = self.with_pool(pool, |pools| pools.open_scope(pool, filter));
        if opened.is_ok() {
            let mut state = self.core.state.lock();
            state.scopes.push(pool);
            state.pools.insert(pool);
            drop(state);
            drop(opening);
        }
        self.core.retry_blocked_drop();
        opened
    }

    fn close_scope(&self, pool: PoolId) -> Result<(), PoolError> {
        let closed = self.close_at_maker(pool);
        if self.core.generations.retired() > 0 {
            self.core.check_all_retired();
        }
        self.core.retry_blocked_drop();
        closed
    }

    fn empty_pool(&self, pool: PoolId) -> Result<(), PoolError> {
        self.with_pool(pool, |pools| pools.empty_pool(pool))
    }

    fn pool_layout(&self, pool: PoolId) -> Result<Vec<SegmentLayout>, PoolError> {
        self.with_pool(pool, |pools| pools.pool_layout(pool))
    }
}

impl Checkpoints for Switchable {
    fn checkpoint(&self, pool: PoolId) -> Result<PoolCheckpoint, PoolError> {
        self.with_checkpoints(pool, |pools| pools.checkpoint(pool))
    }

    fn restore(&self, checkpoint: &PoolCheckpoint) -> Result<Restored, PoolError> {
        self.with_checkpoints(checkpoint.pool, |pools| pools.restore(checkpoint))
    }
}
