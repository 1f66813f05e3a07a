//! One allocator as other languages see it: blocks by bare address, capabilities as calls.

use std::sync::Arc;

use parking_lot::Mutex;

use super::device::open_device;
use super::guard::{Failure, bad_configuration};
use crate::allocator::{
    Caching, Counters, DeviceAllocator, PrivatePools, RawAddresses, Request, ScopeFilter,
};
use crate::config::{Config, from_environment};
use crate::driver::Driver;
use crate::ids::{PoolId, StreamId};
use crate::registry::{self, BuildOptions};
use crate::stats::Statistics;
use crate::strategies::Strategy;

/// An allocator and what it was made of.
#[derive(Debug)]
pub(super) struct Instance {
    strategy: Strategy,
    pub(super) driver: Arc<dyn Driver>,
    /// What is in force: a further string adds to it.
    config: Mutex<Config>,
}

/// What the environment says.
pub(super) fn environment() -> Result<Config, Failure> {
    let found = from_environment(&registry::key_table(), |name| std::env::var(name).ok())?;
    Ok(found.config)
}

impl Instance {
    /// An allocator on a device. Without a text the environment decides.
    pub(super) fn open(conf: Option<&str>, device: &str) -> Result<Self, Failure> {
        let config = match conf {
            Some(text) => Config::parse(text, &registry::key_table())
                .map_err(|error| bad_configuration(text, &error))?,
            None => environment()?,
        };
        let driver = open_device(device)?;
        let options = BuildOptions { raw_addresses: true };
        let strategy = registry::build(&config, Arc::clone(&driver), options)?;
        Ok(Self { strategy, driver, config: Mutex::new(config) })
    }

    /// The address of a block.
    #[inline]
    pub(super) fn allocate(&self, bytes: u64, stream: StreamId) -> Result<u64, Failure> {
        let request = Request::new(bytes, stream);
        match self.strategy.engine() {
            Some(engine) => Ok(engine.allocate_raw(request)?),
            None => Ok(self.raw()?.allocate_raw(request)?),
        }
    }

    /// The address of a block in a pool, whatever scopes are open.
    pub(super) fn allocate_in(
        &self,
        pool: PoolId,
        bytes: u64,
        stream: StreamId,
    ) -> Result<u64, Failure> {
        Ok(self.pools()?.allocate_in(pool, Request::new(bytes, stream))?.address())
    }

    #[inline]
    pub(super) fn free(&self, address: u64) -> Result<(), Failure> {
        match self.strategy.engine() {
            Some(engine) => Ok(engine.free_raw(address)?),
            None => Ok(self.raw()?.free_raw(address)?),
        }
    }

    pub(super) fn raw(&self) -> Result<&dyn RawAddresses, Failure> {
        self.strategy
            .raw_addresses()
            .ok_or_else(|| Failure::lacks(self.strategy.name(), "blocks by bare address"))
    }

    pub(super) fn caching(&self) -> Result<&dyn Caching, Failure> {
        self.strategy.caching().ok_or_else(|| Failure::lacks(self.strategy.name(), "cache"))
    }

    pub(super) fn pools(&self) -> Result<&dyn PrivatePools, Failure> {
        self.strategy
            .private_pools()
            .ok_or_else(|| Failure::lacks(self.strategy.name(), "private pools"))
    }

    pub(super) fn statistics(&self) -> Result<Statistics, Failure> {
        let counters: Option<&dyn Counters> = self.strategy.counters();
        let counters = counters.ok_or_else(|| Failure::lacks(self.strategy.name(), "counters"))?;
        Ok(counters.statistics())
    }

    /// Puts a further configuration string in force.
    pub(super) fn set_conf(&self, text: &str) -> Result<(), Failure> {
        let mut config = self.config.lock();
        let next = config
            .updated(text, &registry::key_table())
            .map_err(|error| bad_configuration(text, &error))?;
        self.caching()?.apply(&next)?;
        *config = next;
        Ok(())
    }

    /// Opens a scope of a pool that is there.
    pub(super) fn open_scope(&self, pool: PoolId, filter: ScopeFilter) -> Result<(), Failure> {
        let pools = self.pools()?;
        // Opening would make a pool that is unknown; retaining says so.
        pools.retain_pool(pool)?;
        let opened = pools.open_scope(pool, filter);
        pools.release_pool(pool)?;
        Ok(opened?)
    }

    /// Start and size of the segment, or of the mapped range, that an address lies in.
    pub(super) fn base_of(&self, address: u64) -> Option<(u64, u64)> {
        let segments = self.caching().ok()?.layout();
        let found =
            segments.iter().find(|s| (s.address..s.address + s.size_bytes).contains(&address));
        found.map(|segment| (segment.address, segment.size_bytes))
    }
}

/// The statistics as one flat JSON object with PyTorch's keys.
pub(super) fn json(statistics: &Statistics) -> String {
    let keys = statistics.pytorch_keys();
    // The keys are made of letters, dots and underscores, which need no escaping.
    let pairs: Vec<String> = keys.iter().map(|(key, value)| format!("\"{key}\":{value}")).collect();
    format!("{{{}}}", pairs.join(","))
}
