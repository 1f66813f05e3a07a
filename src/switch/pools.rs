//! Private pools of a switchable allocator.
//!
//! A pool belongs to the allocator that was current when the pool was created. A CUDA graph may use its
//! freed addresses, so nothing is switched while a pool has users. Every call about a pool therefore
//! goes to the current allocator. A pool that was released before a switch is unknown afterwards.

use std::collections::btree_map::Entry;
use std::path::Path;

use super::Switchable;
use super::no_scopes::NoScopes;
use crate::allocator::{
    Checkpoints, DeviceAllocator, PauseOptions, Paused, PoolCheckpoint, PoolOptions, PrivatePools,
    Restored, Resumed, ScopeFilter, SleepError, Sleeping, TagInfo,
};
use crate::error::PoolError;
use crate::history::SegmentLayout;
use crate::ids::PoolId;
use crate::sync::Defer;

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

    fn with_sleeping<R>(
        &self,
        call: impl FnOnce(&dyn Sleeping) -> Result<R, SleepError>,
    ) -> Result<R, SleepError> {
        self.core.call(|current| match current.strategy.control().sleeping {
            Some(sleeping) => call(sleeping),
            None => Err(SleepError::NotSupported),
        })
    }

    fn forget_scope(&self, pool: PoolId) {
        // A thread with a `NoScopes` guard would wait for itself at `write`. But then the list is empty.
        let is_open = self.core.scopes.read().contains_key(&pool);
        if is_open && let Entry::Occupied(mut count) = self.core.scopes.write().entry(pool) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }
}

impl PrivatePools for Switchable {
    fn create_pool(&self, pool: PoolId, options: PoolOptions) -> Result<(), PoolError> {
        let mut state = self.core.state.lock();
        let current = self.core.generations.current();
        let pools = current.strategy.control().private_pools;
        let pools = pools.ok_or(PoolError::NotSupported { pool, what: "private pools" })?;
        pools.create_pool(pool, options)?;
        state.add_pool(pool, pools);
        Ok(())
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

    /// Waits while another thread releases memory of retired allocators. The scope is listed as open before
    /// the allocator opens it, so no lock is held while the allocator does.
    fn open_scope(&self, pool: PoolId, filter: ScopeFilter) -> Result<(), PoolError> {
        if NoScopes::is_held_here() {
            let what = "scopes opened from inside a release of memory";
            return Err(PoolError::NotSupported { pool, what });
        }
        *self.core.scopes.write().entry(pool).or_default() += 1;
        let failed = Defer(|| self.forget_scope(pool));
        self.with_pool(pool, |pools| pools.open_scope(pool, filter))?;
        std::mem::forget(failed);
        self.core.state.lock().pools.insert(pool);
        Ok(())
    }

    /// The scope counts as closed even after an error: the allocator has then closed it, or never had it.
    fn close_scope(&self, pool: PoolId) -> Result<(), PoolError> {
        let closing = Defer(|| self.forget_scope(pool));
        let closed = self.with_pool(pool, |pools| pools.close_scope(pool));
        drop(closing);
        let _ = self.core.drop_drained();
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

/// A tag belongs to the current allocator, as every pool with users does.
impl Sleeping for Switchable {
    fn pause(&self, pool: PoolId, options: &PauseOptions) -> Result<Paused, SleepError> {
        self.with_sleeping(|sleeping| sleeping.pause(pool, options))
    }

    fn resume(&self, pool: PoolId) -> Result<Resumed, SleepError> {
        self.with_sleeping(|sleeping| sleeping.resume(pool))
    }

    fn tag_info(&self, pool: PoolId) -> Result<TagInfo, SleepError> {
        self.with_sleeping(|sleeping| sleeping.tag_info(pool))
    }

    fn tags(&self) -> Vec<(PoolId, TagInfo)> {
        self.with_sleeping(|sleeping| Ok(sleeping.tags())).unwrap_or_default()
    }

    fn set_directory(&self, pool: PoolId, directory: Option<&Path>) -> Result<(), SleepError> {
        self.with_sleeping(|sleeping| sleeping.set_directory(pool, directory))
    }

    fn read_backup(&self, address: u64, into: &mut [u8]) -> Result<(), SleepError> {
        self.with_sleeping(|sleeping| sleeping.read_backup(address, into))
    }
}
