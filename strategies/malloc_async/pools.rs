//! Private pools: one driver pool each, and the scopes that route requests to them.
//!
//! Memory of a captured graph belongs to no driver pool. So a pool that a scope creates exists only in
//! this table until its first request outside a graph, which creates the driver pool. The driver requires
//! a pool to be empty before it is destroyed.
//!
//! Checkpoints, blocks at exact addresses, pools over a user's allocator and pools that never split are
//! refused, because they need control over the driver's segments.

use parking_lot::RwLockReadGuard;

use super::capabilities::sum;
use super::capture::capture_in;
use super::{MallocAsyncAllocator, Route, keep_everything};
use crate::allocator::{PeerAccess, PoolOptions, PrivatePools, ScopeFilter};
use crate::driver::{DriverPoolId, DriverPoolUsage, MemoryPools, open_to_peer};
use crate::error::{AllocError, DriverError, PoolError};
use crate::history::SegmentLayout;
use crate::ids::{DeviceId, PoolId, StreamId};
use crate::scopes::Routed;

/// All private pools.
#[derive(Debug, Default)]
pub(super) struct Pools {
    entries: Vec<Entry>,
    /// Devices with peer access. New pools are made accessible to them.
    peers: Vec<DeviceId>,
    /// Driver pools without users and blocks. Each is destroyed once it holds no memory.
    retired: Vec<DriverPoolId>,
    /// The largest sum of all pools' high marks (peaks of reserved bytes) since the last reset of peaks.
    /// It is updated just before a pool's mark is discarded.
    pub(super) destroyed_high_bytes: u64,
}

#[derive(Debug)]
struct Entry {
    id: PoolId,
    /// `None` for a pool created by a scope, until a request outside a graph needs one.
    driver_pool: Option<DriverPoolId>,
    /// With 0 users, the driver pool keeps no free memory; it remains only for the blocks still live.
    users: u32,
    use_on_oom: bool,
}

impl Entry {
    fn new(id: PoolId, driver_pool: Option<DriverPoolId>, use_on_oom: bool) -> Self {
        Self { id, driver_pool, users: 1, use_on_oom }
    }
}

impl Pools {
    fn entry(&mut self, id: PoolId) -> Result<&mut Entry, PoolError> {
        let found = self.entries.iter_mut().find(|entry| entry.id == id);
        found.ok_or_else(|| PoolError::missing(id))
    }

    fn in_use(&mut self, id: PoolId) -> Result<&mut Entry, PoolError> {
        let entry = self.entry(id)?;
        if entry.users == 0 { Err(PoolError::Released { pool: id }) } else { Ok(entry) }
    }

    /// Returns the driver pools of private pools with users and the option `use_on_oom`. Before a request
    /// to another pool fails, these pools are trimmed.
    pub(super) fn opted_in(&self) -> Vec<DriverPoolId> {
        let opted = |entry: &&Entry| entry.users > 0 && entry.use_on_oom;
        self.entries.iter().filter(opted).filter_map(|entry| entry.driver_pool).collect()
    }

    /// Returns the driver pools without users.
    fn unused(&self) -> Vec<DriverPoolId> {
        let unused = self.entries.iter().filter(|entry| entry.users == 0);
        unused.filter_map(|entry| entry.driver_pool).chain(self.retired.iter().copied()).collect()
    }

    /// Returns the driver pools of all private pools, including retired ones.
    pub(super) fn driver_pools(&self) -> Vec<DriverPoolId> {
        let known = self.entries.iter().filter_map(|entry| entry.driver_pool);
        known.chain(self.retired.iter().copied()).collect()
    }
}

/// Trims a driver pool, and destroys it if it is then empty. Returns true if it was destroyed.
pub(super) fn destroy_if_empty(driver: &dyn MemoryPools, pool: DriverPoolId) -> bool {
    let left = driver.trim(pool, 0).and_then(|()| driver.usage(pool));
    left.is_ok_and(|usage| usage.reserved_bytes == 0) && driver.destroy_pool(pool).is_ok()
}

impl MallocAsyncAllocator {
    /// Finds the route of a request when scopes are open, frees are deferred, or the caller names a
    /// pool.
    #[cold]
    pub(super) fn route_checked(
        &self,
        pool: Option<PoolId>,
        stream: StreamId,
    ) -> Result<Route, AllocError> {
        if self.captures.deferred() > 0 {
            self.try_free_deferred();
        }
        let (pool, capture) = match pool {
            Some(pool) => (pool, self.capture_of(stream)?),
            None => {
                let Routed { to, status } = self.scopes.route(stream)?;
                (to.unwrap_or(PoolId::DEFAULT), capture_in(status))
            }
        };
        let mut pools = self.pools.lock();
        let driver_pool = match pool {
            PoolId::DEFAULT => self.main.id,
            private => match pools.in_use(private)?.driver_pool {
                Some(made) => made,
                // Memory of a graph comes from no pool, so any pool of the device may be passed.
                None if capture.is_some() => self.main.id,
                None => {
                    let made = self.new_driver_pool(&pools.peers)?;
                    *pools.in_use(private)?.driver_pool.insert(made)
                }
            },
        };
        Ok(Route { pool, driver_pool, capture })
    }

    /// Creates a driver pool that keeps its free memory and is accessible to these devices.
    fn new_driver_pool(&self, peers: &[DeviceId]) -> Result<DriverPoolId, DriverError> {
        let driver = self.memory_pools();
        let pool = driver.create_pool()?;
        let open = || peers.iter().try_for_each(|peer| driver.open_pool(pool, *peer));
        if let Err(error) = keep_everything(driver, pool).and_then(|()| open()) {
            // Ignored, because the error that led here is the one to report.
            let _ = driver.destroy_pool(pool);
            return Err(error);
        }
        Ok(pool)
    }

    /// Moves the driver pools of pools without users and blocks to `retired`. Waits until no other
    /// thread is in a driver call about a private pool.
    fn forget_empty_pools(&self) {
        if !self.pools.lock().entries.iter().any(|entry| entry.users == 0) {
            return;
        }
        // No thread holds `ending` shared now, so every block that a pool has served is in the table.
        let _alone = self.ending.write();
        let Pools { entries, retired, .. } = &mut *self.pools.lock();
        let blocks = self.blocks.lock();
        let is_empty = |entry: &mut Entry| entry.users == 0 && !blocks.any_of(entry.id);
        retired.extend(entries.extract_if(.., is_empty).filter_map(|entry| entry.driver_pool));
    }

    /// Destroys driver pools without users and blocks, if the driver reports that they are empty. See
    /// [`MemoryPools::destroy_pool`].
    pub(super) fn destroy_empty_pools(&self) {
        self.forget_empty_pools();
        if self.pools.lock().retired.is_empty() {
            return;
        }
        let _alone = self.ending.write();
        let pools = &mut *self.pools.lock();
        self.keep_high_marks(pools);
        let driver = self.memory_pools();
        // A pool that could not be destroyed stays in the list for the next call.
        pools.retired.retain(|pool| !destroy_if_empty(driver, *pool));
    }

    /// Makes a driver pool keep no free memory, and resets its high mark. Without the reset, the marks
    /// of pools that were used one after another would add up.
    fn retire(&self, pools: &mut Pools, pool: DriverPoolId) {
        self.keep_high_marks(pools);
        let driver = self.memory_pools();
        // Failures are harmless: the driver keeps more memory, which is released later, or keeps a high
        // mark, which makes the reported peak too high but never too low.
        let _ = driver.set_release_threshold(pool, 0);
        let _ = driver.trim(pool, 0);
        let _ = driver.reset_high_marks(pool);
    }

    /// Stores the sum of the high marks of all pools if it is the largest so far. Called before a mark is
    /// discarded.
    fn keep_high_marks(&self, pools: &mut Pools) {
        let all = sum(self.usage_of_main(), self.usage_of(&pools.driver_pools()));
        pools.destroyed_high_bytes = pools.destroyed_high_bytes.max(all.reserved_high_bytes);
    }

    /// Prevents the destruction of the route's driver pool while the returned guard lives.
    ///
    /// # Errors
    ///
    /// [`PoolError`] if the pool was destroyed after the route was found.
    pub(super) fn keep_pool(
        &self,
        route: &Route,
    ) -> Result<Option<RwLockReadGuard<'_, ()>>, PoolError> {
        if route.driver_pool == self.main.id {
            return Ok(None);
        }
        let kept = self.ending.read();
        let pool = route.pool;
        let now = self.pools.lock().in_use(pool)?.driver_pool;
        // A pool may have been destroyed and created again with the same id. Then it has another driver
        // pool.
        if now == Some(route.driver_pool) {
            Ok(Some(kept))
        } else {
            Err(PoolError::Released { pool })
        }
    }

    /// Calls `act` for the main driver pool, then for every other driver pool of this allocator.
    pub(super) fn on_all_pools(
        &self,
        act: impl Fn(DriverPoolId) -> Result<(), DriverError>,
    ) -> Result<(), DriverError> {
        act(self.main.id)?;
        let _pool_guard = self.ending.read();
        let pools = self.pools.lock().driver_pools();
        pools.into_iter().try_for_each(act)
    }

    /// Calls `act` for the pools, other than the main one, that are trimmed before the request fails:
    /// pools with `use_on_oom`, pools without users, and the request's own pool.
    pub(super) fn on_helping_pools(
        &self,
        route: &Route,
        act: impl Fn(DriverPoolId) -> Result<(), DriverError>,
    ) -> Result<(), DriverError> {
        let _pool_guard = self.ending.read();
        let helping = {
            let mut pools = self.pools.lock();
            let mut helping = pools.opted_in();
            helping.extend(pools.unused());
            let own = pools.in_use(route.pool).ok().and_then(|own| own.driver_pool);
            helping.extend(own.filter(|own| *own == route.driver_pool));
            helping
        };
        helping.into_iter().try_for_each(act)
    }

    /// Returns the usage of private pools, including those without users. Skips pools for which the
    /// driver fails.
    pub(super) fn usage_of_private_pools(&self) -> DriverPoolUsage {
        let _pool_guard = self.ending.read();
        let pools = self.pools.lock().driver_pools();
        self.usage_of(&pools)
    }

    fn usage_of(&self, pools: &[DriverPoolId]) -> DriverPoolUsage {
        let usage = |pool: &DriverPoolId| self.memory_pools().usage(*pool).ok();
        pools.iter().filter_map(usage).fold(DriverPoolUsage::default(), sum)
    }
}

impl PeerAccess for MallocAsyncAllocator {
    /// Makes all present and future pools accessible to the device.
    fn enable_peer_access(&self, device: DeviceId) -> Result<(), DriverError> {
        open_to_peer(&*self.driver, device)?;
        let mut pools = self.pools.lock();
        let driver = self.memory_pools();
        driver.open_pool(self.main.id, device)?;
        pools.driver_pools().into_iter().try_for_each(|pool| driver.open_pool(pool, device))?;
        if !pools.peers.contains(&device) {
            pools.peers.push(device);
        }
        Ok(())
    }

    fn peers(&self) -> Vec<DeviceId> {
        self.pools.lock().peers.clone()
    }
}

impl PrivatePools for MallocAsyncAllocator {
    fn create_pool(&self, id: PoolId, options: PoolOptions) -> Result<(), PoolError> {
        PoolError::unless_private(id)?;
        for (asked, what) in [
            (options.allocator.is_some(), "segments of a user's allocator"),
            (options.no_split, "blocks that are never split"),
            (options.tag.is_some(), "tags (backend:native has them)"),
        ] {
            if asked {
                return Err(PoolError::NotSupported { pool: id, what });
            }
        }
        self.destroy_empty_pools();
        let mut pools = self.pools.lock();
        if pools.entries.iter().any(|entry| entry.id == id) {
            return Err(PoolError::Taken { pool: id });
        }
        let driver_pool = Some(self.new_driver_pool(&pools.peers)?);
        pools.entries.push(Entry::new(id, driver_pool, options.use_on_oom));
        Ok(())
    }

    fn set_pool_options(&self, id: PoolId, options: &PoolOptions) -> Result<(), PoolError> {
        let mut pools = self.pools.lock();
        let entry = pools.in_use(id)?;
        if options.no_split {
            return Err(PoolError::NotSupported { pool: id, what: "blocks that are never split" });
        }
        if options.tag.is_some() {
            return Err(PoolError::NotSupported {
                pool: id,
                what: "tags (backend:native has them)",
            });
        }
        entry.use_on_oom = options.use_on_oom;
        Ok(())
    }

    fn retain_pool(&self, id: PoolId) -> Result<(), PoolError> {
        self.pools.lock().in_use(id)?.users += 1;
        Ok(())
    }

    fn release_pool(&self, id: PoolId) -> Result<(), PoolError> {
        let mut pools = self.pools.lock();
        let entry = pools.in_use(id)?;
        entry.users -= 1;
        if let Entry { users: 0, driver_pool: Some(pool), .. } = *entry {
            self.retire(&mut pools, pool);
        }
        drop(pools);
        self.destroy_empty_pools();
        Ok(())
    }

    fn pool_users(&self, id: PoolId) -> Option<u32> {
        self.forget_empty_pools();
        self.pools.lock().entry(id).ok().map(|entry| entry.users)
    }

    fn open_scope(&self, id: PoolId, filter: ScopeFilter) -> Result<(), PoolError> {
        PoolError::unless_private(id)?;
        self.forget_empty_pools();
        let mut pools = self.pools.lock();
        if self.scopes.of(id).is_some() {
            return Err(PoolError::ScopeOpen { pool: id });
        }
        match pools.in_use(id) {
            Ok(entry) => entry.users += 1,
            Err(PoolError::Unknown { .. }) => pools.entries.push(Entry::new(id, None, false)),
            Err(error) => return Err(error),
        }
        self.scopes.open(id, filter, id);
        Ok(())
    }

    fn close_scope(&self, id: PoolId) -> Result<(), PoolError> {
        let closed = {
            let mut pools = self.pools.lock();
            let Some(closed) = self.scopes.close(id) else {
                return Err(pools.entry(id).err().unwrap_or(PoolError::ScopeClosed { pool: id }));
            };
            if !self.scopes.any() {
                self.captures.forget_leaves();
            }
            closed
        };
        drop(closed);
        Ok(self.free_deferred()?)
    }

    fn empty_pool(&self, id: PoolId) -> Result<(), PoolError> {
        let Entry { users, driver_pool, .. } = *self.pools.lock().entry(id)?;
        if let Some(pool) = driver_pool.filter(|_| users == 0) {
            let _pool_guard = self.ending.read();
            // The pool may have been destroyed in the meantime.
            if self.pools.lock().driver_pools().contains(&pool) {
                self.memory_pools().trim(pool, 0)?;
            }
        }
        Ok(())
    }

    fn pool_layout(&self, id: PoolId) -> Result<Vec<SegmentLayout>, PoolError> {
        self.pools.lock().entry(id)?;
        Ok(Self::layout_of(&self.blocks.lock(), Some(id)))
    }
}
