//! One allocator as other languages see it: blocks by bare address, capabilities as calls.

use super::device::open_device;
use super::guard::{Failure, bad_configuration};
use super::said::warn;
use crate::allocator::{
    Caching, Counters, DeviceAllocator, PrivatePools, RawAddresses, Request, ScopeFilter,
};
use crate::config::{Config, from_process};
use crate::ids::{PoolId, StreamId};
use crate::registry::{self, BuildOptions};
use crate::stats::Statistics;
use crate::switch::Switchable;

/// An allocator, which can be switched.
#[derive(Debug)]
pub(super) struct Instance {
    allocator: Switchable,
}

/// What the environment says. What is probably not meant is told to people.
pub(super) fn environment() -> Result<Config, Failure> {
    let config = from_process(&registry::key_table())?.config;
    warn(&config);
    Ok(config)
}

fn parse(text: &str) -> Result<Config, Failure> {
    let parsed = Config::parse(text, &registry::key_table());
    parsed.map_err(|error| bad_configuration(text, &error))
}

impl Instance {
    /// Whether a text names an allocator.
    pub(super) fn check(text: &str) -> Result<(), Failure> {
        Ok(registry::check_name(&parse(text)?.settings().backend)?)
    }

    /// An allocator on a device. Without a text the environment decides.
    pub(super) fn open(conf: Option<&str>, device: &str) -> Result<Self, Failure> {
        let config = match conf {
            Some(text) => parse(text).inspect(warn)?,
            None => environment()?,
        };
        let driver = open_device(device)?;
        let options = BuildOptions { raw_addresses: true };
        Ok(Self { allocator: Switchable::build(&config, driver, options)? })
    }

    /// The address of a block.
    #[inline]
    pub(super) fn allocate(&self, bytes: u64, stream: StreamId) -> Result<u64, Failure> {
        Ok(self.allocator.allocate_raw(Request::new(bytes, stream))?)
    }

    #[inline]
    pub(super) fn free(&self, address: u64) -> Result<(), Failure> {
        Ok(self.allocator.free_raw(address)?)
    }

    pub(super) fn raw(&self) -> Result<&dyn RawAddresses, Failure> {
        self.allocator
            .raw_addresses()
            .ok_or_else(|| Failure::lacks(self.allocator.name(), "blocks by bare address"))
    }

    pub(super) fn caching(&self) -> Result<&dyn Caching, Failure> {
        self.allocator.caching().ok_or_else(|| Failure::lacks(self.allocator.name(), "cache"))
    }

    pub(super) fn pools(&self) -> Result<&dyn PrivatePools, Failure> {
        self.allocator
            .private_pools()
            .ok_or_else(|| Failure::lacks(self.allocator.name(), "private pools"))
    }

    pub(super) fn statistics(&self) -> Result<Statistics, Failure> {
        Ok(self.allocator.statistics())
    }

    /// Puts a further configuration string in force; another backend in it switches.
    pub(super) fn set_conf(&self, text: &str) -> Result<(), Failure> {
        self.allocator.update(text)?;
        // It is in force: what is warned of depends on this text alone, and nothing can fail any more.
        let _ = parse(text).inspect(warn);
        Ok(())
    }

    /// Puts the allocator that a complete configuration string names in force.
    pub(super) fn switch(&self, text: &str) -> Result<(), Failure> {
        let config = parse(text)?;
        self.allocator.switch_to(config.clone())?;
        warn(&config);
        Ok(())
    }

    /// Opens a scope of a pool that is there.
    pub(super) fn open_scope(&self, pool: PoolId, filter: ScopeFilter) -> Result<(), Failure> {
        let pools = self.pools()?;
        // Opening would make a pool that is unknown; retaining says so.
        pools.retain_pool(pool)?;
        let opened = pools.open_scope(pool, filter);
        // Another thread may have released more users than it had.
        let _ = pools.release_pool(pool);
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

/// The statistics as one flat JSON object, with PyTorch's keys and those of the strategy's own counters.
pub(super) fn json(statistics: &Statistics) -> String {
    let keys = statistics.keys();
    // Names are letters, digits, dots and underscores, as `OwnCounter` asks: nothing to escape.
    let pairs: Vec<String> = keys.iter().map(|(key, value)| format!("{key:?}:{value}")).collect();
    format!("{{{}}}", pairs.join(","))
}
