//! Stream-ordered pools of a CUDA device.
//!
//! While any thread captures in the mode `global`, allocating, freeing and trimming fail on all threads
//! and invalidate that capture. (Observed with driver 13.0, also on streams that are not captured.) These
//! calls do not depend on the order of captured work. So trimming, and creating or destroying a pool,
//! always set the thread's capture mode to relaxed while they run. Allocating and freeing do so while
//! captures are expected.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use parking_lot::Mutex;

use super::api::{AccessDescription, Location, PoolProperties, got};
use super::{Cuda, foreign, size};
use crate::driver::pool_users::{NO_POOL_USER, PoolUsers};
use crate::driver::{DriverPoolId, DriverPoolUsage, DriverResult, MemoryPools};
use crate::error::{DriverError, DriverErrorKind};
use crate::ids::{DeviceId, StreamId};

/// `CUmemPool_attribute` numbers for reuse: after events, after finished work, with dependencies that
/// the driver inserts.
const REUSE: [u32; 3] = [1, 2, 3];
/// `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`.
const RELEASE_THRESHOLD: u32 = 4;

/// `CUmemPool_attribute` numbers: used bytes, their high mark, reserved bytes, their high mark.
const OF_POOLS: [u32; 4] = [7, 8, 5, 6];
/// `CUgraphMem_attribute` numbers of the same counters.
const OF_GRAPHS: [u32; 4] = [0, 1, 2, 3];

fn usage(
    [used, used_high, reserved, reserved_high]: [u32; 4],
    get: impl Fn(u32) -> DriverResult<u64>,
) -> DriverResult<DriverPoolUsage> {
    Ok(DriverPoolUsage {
        used_bytes: get(used)?,
        used_high_bytes: get(used_high)?,
        reserved_bytes: get(reserved)?,
        reserved_high_bytes: get(reserved_high)?,
    })
}

/// Users of pools in this process. A pool has the same handle in all [`Cuda`] values of its device.
static POOL_USERS: Mutex<BTreeMap<DriverPoolId, PoolUsers>> = Mutex::new(BTreeMap::new());

impl MemoryPools for Cuda {
    fn default_pool(&self) -> DriverResult<DriverPoolId> {
        got(|pool| self.api.pool_default(pool, self.device)).map(DriverPoolId)
    }

    fn create_pool(&self) -> DriverResult<DriverPoolId> {
        let _ready = self.enter_relaxed()?;
        let properties = PoolProperties {
            kind: 1,
            handles: 0,
            location: Location::device(self.device),
            windows: 0,
            most_bytes: 0,
            usage: 0,
            reserved: [0; 54],
        };
        let pool = got(|pool| self.api.pool_create(pool, &properties))?;
        self.own_pools.lock().insert(pool);
        Ok(DriverPoolId(pool))
    }

    fn destroy_pool(&self, pool: DriverPoolId) -> DriverResult<()> {
        // Both locks are held during the call: once the pool is destroyed, `create_pool` on another
        // thread may get the same handle.
        let mut own = self.own_pools.lock();
        if !own.contains(&pool.0) {
            return Err(foreign("cuMemPoolDestroy", "pool", pool.0));
        }
        let mut pool_users = POOL_USERS.lock();
        let _ready = self.enter_relaxed()?;
        self.api.pool_destroy(pool.0).ok()?;
        own.remove(&pool.0);
        pool_users.remove(&pool);
        Ok(())
    }

    fn set_release_threshold(&self, pool: DriverPoolId, bytes: u64) -> DriverResult<()> {
        let mut bytes = bytes;
        self.api.pool_set(pool.0, RELEASE_THRESHOLD, &mut bytes).ok()
    }

    fn release_threshold(&self, pool: DriverPoolId) -> DriverResult<u64> {
        got(|bytes| self.api.pool_get(pool.0, RELEASE_THRESHOLD, bytes))
    }

    fn keep_memory(&self, pool: DriverPoolId, keep: bool) -> DriverResult<()> {
        // Locked during the calls: two threads may add users at the same time, through two [`Cuda`]
        // values of the device.
        let mut all = POOL_USERS.lock();
        let now_bytes = self.release_threshold(pool)?;
        let changed = all.get(&pool).copied().unwrap_or_default().after(keep, now_bytes);
        let (pool_users, set) = changed.ok_or_else(|| {
            let kind = DriverErrorKind::InvalidValue;
            DriverError::new(kind, "keep_memory", 0, NO_POOL_USER.to_owned())
        })?;
        set.map_or(Ok(()), |bytes| self.set_release_threshold(pool, bytes))?;
        if pool_users.is_empty() {
            all.remove(&pool);
        } else {
            all.insert(pool, pool_users);
        }
        Ok(())
    }

    fn allow_reuse(&self, pool: DriverPoolId) -> DriverResult<()> {
        // The driver reads these attributes as 32-bit values: the lower half on a little-endian
        // machine.
        let allow = |flag| self.api.pool_set(pool.0, flag, &mut 1).ok();
        REUSE.into_iter().try_for_each(allow)
    }

    fn open_pool(&self, pool: DriverPoolId, other: DeviceId) -> DriverResult<()> {
        let device = self.number_of(other)?;
        let access = AccessDescription { location: Location::device(device), flags: 3 };
        self.api.pool_open(pool.0, &access, 1).ok()
    }

    fn allocate_async(&self, pool: DriverPoolId, bytes: u64, on: StreamId) -> DriverResult<u64> {
        let (bytes, mut address) = (size(bytes)?, 0);
        self.in_order_of(on, || self.api.pool_allocate(&mut address, bytes, pool.0, on.0))?;
        Ok(address)
    }

    fn free_async(&self, address: u64, on: StreamId) -> DriverResult<()> {
        self.in_order_of(on, || self.api.pool_free(address, on.0))
    }

    fn trim(&self, pool: DriverPoolId, keep_bytes: u64) -> DriverResult<()> {
        let _ready = self.enter_relaxed()?;
        self.api.pool_trim(pool.0, size(keep_bytes)?).ok()
    }

    fn usage(&self, pool: DriverPoolId) -> DriverResult<DriverPoolUsage> {
        usage(OF_POOLS, |what| got(|value| self.api.pool_get(pool.0, what, value)))
    }

    fn reset_high_marks(&self, pool: DriverPoolId) -> DriverResult<()> {
        let [_, used_high, _, reserved_high] = OF_POOLS;
        let reset = |mark| self.api.pool_set(pool.0, mark, &mut 0).ok();
        [used_high, reserved_high].into_iter().try_for_each(reset)
    }

    /// Returns zeros if the library lacks the function: older drivers hold no memory for graphs.
    fn graph_usage(&self) -> DriverResult<DriverPoolUsage> {
        if self.api.graph_memory_get.is_none() {
            return Ok(DriverPoolUsage::default());
        }
        usage(OF_GRAPHS, |what| got(|value| self.api.graph_memory_get(self.device, what, value)))
    }

    fn reset_graph_high_marks(&self) -> DriverResult<()> {
        if self.api.graph_memory_set.is_none() {
            return Ok(());
        }
        let [_, used_high, _, reserved_high] = OF_GRAPHS;
        let reset = |mark| self.api.graph_memory_set(self.device, mark, &mut 0).ok();
        [used_high, reserved_high].into_iter().try_for_each(reset)
    }

    fn trim_graphs(&self) -> DriverResult<()> {
        if self.api.graph_memory_trim.is_none() {
            return Ok(());
        }
        let _ready = self.enter_relaxed()?;
        self.api.graph_memory_trim(self.device).ok()
    }
}
