//! Private pools: one driver pool each, and the scopes that route requests to them.
//!
//! Memory of captured graphs comes from no pool: a capture's pool keeps its blocks apart in the
//! account only, and becomes a driver pool with the first request from outside the graph. Checkpoints,
//! pools over a user's allocator and pools that never split need to know the driver's segments; they are
//! refused.

use parking_lot::RwLockReadGuard;

use super::capabilities::sum;
use super::{MallocAsyncAllocator, Route, keep_everything};
use crate::allocator::{PoolOptions, ScopeFilter};
use crate::driver::{DriverPoolId, DriverPoolUsage, MemoryPools};
use crate::error::{AllocError, DriverError, PoolError};
use crate::ids::{DeviceId, PoolId, StreamId};

/// All private pools, and the open scopes, oldest first.
#[derive(Debug, Default)]
pub(super) struct Pools {
    entries: Vec<Entry>,
    scopes: Vec<Scope>,
    /// Devices that were let in: new pools are opened to them.
    peers: Vec<DeviceId>,
    gone: Gone,
}

/// High marks that the driver does not keep, since the last reset of peaks.
#[derive(Debug, Default)]
struct Gone {
    /// Of what destroyed pools hold.
    left_high_bytes: u64,
    /// What all high marks added up to, just before one of them went with its pool; the most of that.
    high_bytes: u64,
}

#[derive(Debug)]
struct Scope {
    pool: PoolId,
    filter: ScopeFilter,
    /// Whether a capture is under way as far as is known: the scope is of one, or met one.
    captures: bool,
}

#[derive(Debug)]
struct Entry {
    id: PoolId,
    /// A pool that a scope makes known has none before a request needs one: inside a graph none does.
    driver_pool: Option<DriverPoolId>,
    /// None left: the driver's pool is destroyed, and lives on for live blocks only.
    users: u32,
    use_on_oom: bool,
    /// What the driver's pool held when it was destroyed.
    left_bytes: u64,
}

impl Entry {
    fn new(id: PoolId, driver_pool: Option<DriverPoolId>, use_on_oom: bool) -> Self {
        Self { id, driver_pool, users: 1, use_on_oom, left_bytes: 0 }
    }
}

impl Pools {
    fn entry(&mut self, id: PoolId) -> Result<&mut Entry, PoolError> {
        if id == PoolId::DEFAULT {
            return Err(PoolError::IsDefault);
        }
        let found = self.entries.iter_mut().find(|entry| entry.id == id);
        found.ok_or(PoolError::Unknown { pool: id })
    }

    fn in_use(&mut self, id: PoolId) -> Result<&mut Entry, PoolError> {
        let entry = self.entry(id)?;
        if entry.users == 0 { Err(PoolError::Released { pool: id }) } else { Ok(entry) }
    }

    /// The pool of the newest scope that routes this request.
    fn routed(&mut self, stream: StreamId, capture: Option<u64>) -> Option<PoolId> {
        let matches = |filter: &ScopeFilter| match *filter {
            ScopeFilter::Thread(thread) => thread == std::thread::current().id(),
            ScopeFilter::Stream(own) => own == stream,
            ScopeFilter::Capture(id) => capture == Some(id),
        };
        let scope = self.scopes.iter_mut().rev().find(|scope| matches(&scope.filter))?;
        scope.captures |= capture.is_some();
        Some(scope.pool)
    }

    /// Whether an open scope knows of a capture.
    pub(super) fn any_capture(&self) -> bool {
        self.scopes.iter().any(|scope| scope.captures)
    }

    /// Driver pools whose idle memory other requests may have.
    pub(super) fn opted_in(&self) -> Vec<DriverPoolId> {
        let opted = |entry: &&Entry| entry.users > 0 && entry.use_on_oom;
        self.entries.iter().filter(opted).filter_map(|entry| entry.driver_pool).collect()
    }

    fn driver_pools(&self) -> Vec<DriverPoolId> {
        self.entries.iter().filter(|e| e.users > 0).filter_map(|e| e.driver_pool).collect()
    }

    /// Destroys all pools and forgets all scopes, and returns how many were open.
    pub(super) fn destroy_all(&mut self, driver: &dyn MemoryPools) -> usize {
        for pool in self.driver_pools() {
            // A driver that fails now keeps the memory; there is nobody to tell.
            let _ = driver.destroy_pool(pool);
        }
        self.entries.clear();
        std::mem::take(&mut self.scopes).len()
    }
}

impl MallocAsyncAllocator {
    /// Where a request goes when scopes are open, frees are deferred, or a pool is named.
    #[cold]
    pub(super) fn route_with_care(
        &self,
        pool: Option<PoolId>,
        stream: StreamId,
    ) -> Result<Route, AllocError> {
        if self.captures.deferred() > 0 {
            self.settle_if_one_may();
        }
        let capture = if self.captures.any_scope() { self.capture_of(stream)? } else { None };
        let mut pools = self.pools.lock();
        let pool = match pool {
            Some(pool) => pool,
            None => pools.routed(stream, capture).unwrap_or(PoolId::DEFAULT),
        };
        let driver_pool = match pool {
            PoolId::DEFAULT => self.main.id,
            private => match pools.in_use(private)?.driver_pool {
                Some(made) => made,
                // What a graph gets comes from no pool; all of a device say the same of it.
                None if capture.is_some() => self.main.id,
                None => {
                    let made = self.new_driver_pool(&pools.peers)?;
                    *pools.in_use(private)?.driver_pool.insert(made)
                }
            },
        };
        Ok(Route { pool, driver_pool, capture })
    }

    pub(super) fn make_pool(&self, id: PoolId, options: &PoolOptions) -> Result<(), PoolError> {
        if id == PoolId::DEFAULT {
            return Err(PoolError::IsDefault);
        }
        for (asked, what) in [
            (options.allocator.is_some(), "segments of a user's allocator"),
            (options.no_split, "blocks that are never split"),
        ] {
            if asked {
                return Err(PoolError::NotSupported { pool: id, what });
            }
        }
        self.forget_empty_pools();
        let mut pools = self.pools.lock();
        if pools.entries.iter().any(|entry| entry.id == id) {
            return Err(PoolError::Taken { pool: id });
        }
        let driver_pool = Some(self.new_driver_pool(&pools.peers)?);
        pools.entries.push(Entry::new(id, driver_pool, options.use_on_oom));
        Ok(())
    }

    /// A driver pool that keeps its memory and is open to these devices.
    fn new_driver_pool(&self, peers: &[DeviceId]) -> Result<DriverPoolId, DriverError> {
        let driver = self.memory_pools();
        let pool = driver.create_pool()?;
        let open = || peers.iter().try_for_each(|peer| driver.open_pool(pool, *peer));
        if let Err(error) = keep_everything(driver, pool).and_then(|()| open()) {
            // The first error is the one to tell.
            let _ = driver.destroy_pool(pool);
            return Err(error);
        }
        Ok(pool)
    }

    /// Pools without users are known as long as blocks of them live.
    fn forget_empty_pools(&self) {
        let mut pools = self.pools.lock();
        let blocks = self.blocks.lock();
        pools.entries.retain(|entry| entry.users > 0 || blocks.any_of(entry.id));
    }

    pub(super) fn add_user(&self, id: PoolId) -> Result<(), PoolError> {
        self.pools.lock().in_use(id)?.users += 1;
        Ok(())
    }

    /// Waits for who asks the driver about a private pool.
    pub(super) fn remove_user(&self, id: PoolId) -> Result<(), PoolError> {
        let _alone = self.ending.write();
        let mut pools = self.pools.lock();
        let Entry { users, driver_pool, .. } = *pools.in_use(id)?;
        if users == 1 {
            if let Some(pool) = driver_pool {
                self.destroy_pool(&mut pools, id, pool)?;
            }
            let open = pools.scopes.len();
            pools.scopes.retain(|scope| scope.pool != id);
            (pools.scopes.len()..open).for_each(|_| self.scope_closed());
        }
        pools.entry(id)?.users -= 1;
        let left_bytes = self.left_bytes(&pools);
        pools.gone.left_high_bytes = pools.gone.left_high_bytes.max(left_bytes);
        drop(pools);
        self.forget_empty_pools();
        Ok(())
    }

    /// Keeps what the driver knows of the pool until then. Nobody else may ask about pools meanwhile.
    fn destroy_pool(
        &self,
        pools: &mut Pools,
        id: PoolId,
        pool: DriverPoolId,
    ) -> Result<(), PoolError> {
        let left_bytes = self.memory_pools().usage(pool)?.reserved_bytes;
        let all = sum(self.usage_of_main(), self.usage_of(&pools.driver_pools()));
        let high_bytes = all.reserved_high_bytes + pools.gone.left_high_bytes;
        self.memory_pools().destroy_pool(pool)?;
        pools.gone.high_bytes = pools.gone.high_bytes.max(high_bytes);
        let entry = pools.entry(id)?;
        (entry.driver_pool, entry.left_bytes) = (None, left_bytes);
        Ok(())
    }

    pub(super) fn users_of(&self, id: PoolId) -> Option<u32> {
        self.forget_empty_pools();
        self.pools.lock().entry(id).ok().map(|entry| entry.users)
    }

    pub(super) fn begin_scope(&self, id: PoolId, filter: ScopeFilter) -> Result<(), PoolError> {
        if id == PoolId::DEFAULT {
            return Err(PoolError::IsDefault);
        }
        self.forget_empty_pools();
        let mut pools = self.pools.lock();
        if pools.scopes.iter().any(|scope| scope.pool == id) {
            return Err(PoolError::ScopeOpen { pool: id });
        }
        match pools.in_use(id) {
            Ok(entry) => entry.users += 1,
            Err(PoolError::Unknown { .. }) => pools.entries.push(Entry::new(id, None, false)),
            Err(error) => return Err(error),
        }
        let captures = matches!(filter, ScopeFilter::Capture(_));
        pools.scopes.push(Scope { pool: id, filter, captures });
        self.scope_opened();
        Ok(())
    }

    pub(super) fn end_scope(&self, id: PoolId) -> Result<(), PoolError> {
        {
            let mut pools = self.pools.lock();
            pools.entry(id)?;
            let open = pools.scopes.iter().position(|scope| scope.pool == id);
            pools.scopes.remove(open.ok_or(PoolError::ScopeClosed { pool: id })?);
            self.scope_closed();
        }
        Ok(self.settle_deferred()?)
    }

    pub(super) fn empty_private_pool(&self, id: PoolId) -> Result<(), PoolError> {
        // A pool without users was destroyed: the driver gives its memory back by itself.
        self.pools.lock().entry(id).map(drop)
    }

    pub(super) fn addresses_in(&self, id: PoolId) -> Result<Vec<u64>, PoolError> {
        self.pools.lock().entry(id)?;
        let mut addresses: Vec<u64> =
            self.blocks.lock().of(Some(id)).map(|(address, _)| address).collect();
        addresses.sort_unstable();
        Ok(addresses)
    }

    /// Opens every pool to a device that can be reached, and those to come.
    pub(super) fn let_in(&self, device: DeviceId) -> Result<(), DriverError> {
        let mut pools = self.pools.lock();
        let driver = self.memory_pools();
        driver.open_pool(self.main.id, device)?;
        pools.driver_pools().into_iter().try_for_each(|pool| driver.open_pool(pool, device))?;
        if !pools.peers.contains(&device) {
            pools.peers.push(device);
        }
        Ok(())
    }

    pub(super) fn let_in_so_far(&self) -> Vec<DeviceId> {
        self.pools.lock().peers.clone()
    }

    /// Keeps a private route's driver pool from being destroyed.
    ///
    /// # Errors
    ///
    /// [`PoolError`] when it was, since the route was found.
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
        // A pool that was made anew under the same name is another.
        if now == Some(route.driver_pool) {
            Ok(Some(kept))
        } else {
            Err(PoolError::Released { pool })
        }
    }

    /// Does something with every driver pool that this allocator made, and with the main one first.
    pub(super) fn on_all_pools(
        &self,
        act: impl Fn(DriverPoolId) -> Result<(), DriverError>,
    ) -> Result<(), DriverError> {
        act(self.main.id)?;
        let _kept = self.ending.read();
        let pools = self.pools.lock().driver_pools();
        pools.into_iter().try_for_each(act)
    }

    /// Does something with the pools whose idle memory a request may have, besides the main one.
    pub(super) fn on_helping_pools(
        &self,
        route: &Route,
        act: impl Fn(DriverPoolId) -> Result<(), DriverError>,
    ) -> Result<(), DriverError> {
        let _kept = self.ending.read();
        let helping = {
            let mut pools = self.pools.lock();
            let mut helping = pools.opted_in();
            let own = pools.in_use(route.pool).ok().and_then(|own| own.driver_pool);
            helping.extend(own.filter(|own| *own == route.driver_pool));
            helping
        };
        helping.into_iter().try_for_each(act)
    }

    /// What private pools hold, as far as the driver answers.
    ///
    /// A destroyed pool cannot be asked about. It counts with what it held last, all of it in use, as long
    /// as a block of it lives: so long the driver may keep that.
    pub(super) fn usage_of_private_pools(&self) -> DriverPoolUsage {
        let _kept = self.ending.read();
        let (pools, left_bytes, left_high_bytes) = {
            let pools = self.pools.lock();
            (pools.driver_pools(), self.left_bytes(&pools), pools.gone.left_high_bytes)
        };
        let left = DriverPoolUsage {
            used_bytes: left_bytes,
            used_high_bytes: left_high_bytes.max(left_bytes),
            reserved_bytes: left_bytes,
            reserved_high_bytes: left_high_bytes.max(left_bytes),
        };
        sum(self.usage_of(&pools), left)
    }

    /// The peak of reserved bytes, given what the high marks add up to now.
    pub(super) fn reserved_peak(&self, high_bytes: u64) -> u64 {
        self.pools.lock().gone.high_bytes.max(high_bytes)
    }

    /// Forgets high marks of pools that were destroyed.
    pub(super) fn reset_peaks_of_gone(&self) {
        let mut pools = self.pools.lock();
        pools.gone = Gone { left_high_bytes: self.left_bytes(&pools), high_bytes: 0 };
    }

    fn usage_of(&self, pools: &[DriverPoolId]) -> DriverPoolUsage {
        let usage = |pool: &DriverPoolId| self.memory_pools().usage(*pool).ok();
        pools.iter().filter_map(usage).fold(DriverPoolUsage::default(), sum)
    }

    /// What destroyed pools held, of which a block is still live.
    fn left_bytes(&self, pools: &Pools) -> u64 {
        let mut left = pools.entries.iter().filter(|entry| entry.left_bytes > 0).peekable();
        if left.peek().is_none() {
            return 0;
        }
        let blocks = self.blocks.lock();
        left.filter(|entry| blocks.any_outside_graphs_of(entry.id)).map(|e| e.left_bytes).sum()
    }
}
