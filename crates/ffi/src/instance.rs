//! One allocator behind the C interface. Blocks are identified by address, and a missing capability is
//! a [`Failure`].

use std::sync::Arc;

use super::device::open_device;
use super::guard::{Failure, Status, bad_configuration};
use super::messages::warn;
use super::uncached::{self, Uncached};
use stratalloc::allocator::{
    Caching, Checkpoints, DeviceAllocator, Expandable, Hooks, PeerAccess, PoolOptions,
    PrivatePools, Recording, Request, ScopeFilter, Sharing, Sleeping,
};
use stratalloc::config::{Config, LayerSetting, PeersSetting, from_process};
use stratalloc::driver::Driver;
use stratalloc::error::{HandleError, PoolError};
use stratalloc::history::History;
use stratalloc::ids::{DeviceId, PoolId, StreamId};
use stratalloc::registry::{self, BuildOptions};
use stratalloc::strategies::Strategy;
use stratalloc::switch::Switchable;

/// A switchable allocator and its device.
#[derive(Debug)]
pub(super) struct Instance {
    pub(super) allocator: Switchable,
    pub(super) driver: Arc<dyn Driver>,
    uncached: Uncached,
    /// A configuration string with default values. Each complete configuration string is applied on top
    /// of it.
    defaults: &'static str,
}

/// Reads the configuration from the environment, applies it on top of `defaults` (a configuration
/// string), and writes its warnings.
pub(super) fn environment_over(defaults: &str) -> Result<Config, Failure> {
    let found = from_process(&registry::key_table())?;
    warn(&found.config);
    match found.source {
        None => parse(defaults),
        Some((_, text)) => parse_over(defaults, &text),
    }
}

fn parse_over(defaults: &str, text: &str) -> Result<Config, Failure> {
    further(&parse(defaults)?, text)
}

/// Returns `config` with a configuration string applied on top.
pub(super) fn further(config: &Config, text: &str) -> Result<Config, Failure> {
    let next = config.updated(text, &registry::key_table());
    next.map_err(|error| bad_configuration(text, &error))
}

/// The settings of an allocator at one moment.
#[derive(Debug)]
pub(super) struct InForce {
    pub(super) config: Config,
    /// The memory limit, which calls may have changed since the configuration was applied.
    limit_bytes: Option<u64>,
}

pub(super) fn parse(text: &str) -> Result<Config, Failure> {
    let parsed = Config::parse(text, &registry::key_table());
    parsed.map_err(|error| bad_configuration(text, &error))
}

impl Instance {
    /// Checks that a configuration string parses and names a known backend.
    pub(super) fn check(text: &str) -> Result<(), Failure> {
        Ok(registry::check_name(&parse(text)?.settings().backend)?)
    }

    /// Creates an allocator on a device. Without a string, reads the configuration from the
    /// environment.
    pub(super) fn open(conf: Option<&str>, device: &str) -> Result<Self, Failure> {
        match conf {
            Some(text) => Self::on_device(&parse(text).inspect(warn)?, device),
            None => Self::open_over("", &environment_over("")?, device),
        }
    }

    /// Creates an allocator with `config`. Turns its cache off if the environment requires that. The
    /// configuration of each later switch is applied on top of `defaults`.
    pub(super) fn open_over(
        defaults: &'static str,
        config: &Config,
        device: &str,
    ) -> Result<Self, Failure> {
        let instance = Self { defaults, ..Self::on_device(config, device)? };
        if uncached::is_set_in_environment() {
            instance.uncached.turn(true);
        }
        Ok(instance)
    }

    fn on_device(config: &Config, device: &str) -> Result<Self, Failure> {
        Self::build(config, open_device(device)?)
    }

    pub(super) fn build(config: &Config, driver: Arc<dyn Driver>) -> Result<Self, Failure> {
        stratalloc::diagnostics::log_by_environment();
        #[cfg(feature = "advise")]
        stratalloc_analysis::advise_on_oom::<super::advice::Clock>();
        let options = BuildOptions { raw_addresses: true };
        let allocator = Switchable::build(config, Arc::clone(&driver), options)?;
        // Callers get blocks as addresses, so the allocator must be able to find blocks by address.
        if !allocator.control().by_address {
            let what = "blocks by bare address (layers:[front] serves callers with handles only)";
            return Err(Failure::lacks(allocator.name(), what));
        }
        let uncached = Uncached::new(Arc::clone(&driver));
        Ok(Self { allocator, driver, uncached, defaults: "" })
    }

    /// Allocates a block and returns its address.
    #[inline]
    pub(super) fn allocate(&self, bytes: u64, stream: StreamId) -> Result<u64, Failure> {
        if !self.is_caching() {
            return Ok(self.uncached.allocate(bytes)?);
        }
        Ok(self.allocator.allocate(Request::new(bytes, stream))?.address())
    }

    /// Allocates a block that starts at exactly `address`.
    pub(super) fn allocate_at(
        &self,
        bytes: u64,
        stream: StreamId,
        address: u64,
    ) -> Result<u64, Failure> {
        Ok(self.allocator.allocate(Request::new(bytes, stream).at(address))?.address())
    }

    #[inline]
    pub(super) fn free(&self, address: u64) -> Result<(), Failure> {
        match self.allocator.free_raw(address) {
            Ok(_) => Ok(()),
            Err(error) => match self.uncached.free(address) {
                Some(freed) => Ok(freed?),
                None => Err(error.into()),
            },
        }
    }

    /// Frees a block and returns the bytes that were requested for it. `None` if no live block starts
    /// at `address`.
    #[inline]
    pub(super) fn take_back(&self, address: u64) -> Option<Result<u64, Failure>> {
        match self.allocator.free_raw(address) {
            Ok(requested_bytes) => Some(Ok(requested_bytes)),
            Err(refused) => self.take_back_uncached(address, refused),
        }
    }

    #[cold]
    fn take_back_uncached(
        &self,
        address: u64,
        refused: HandleError,
    ) -> Option<Result<u64, Failure>> {
        if let HandleError::Driver(error) = refused {
            return Some(Err(error.into()));
        }
        let requested_bytes = self.uncached.size_of(address)?;
        Some(self.uncached.free(address)?.map(|()| requested_bytes).map_err(Failure::from))
    }

    pub(super) fn record_stream(&self, address: u64, stream: StreamId) -> Result<(), Failure> {
        let recorded = self.allocator.record_stream_raw(address, stream);
        // An uncached block needs no record, because its free waits for all work of the device.
        let is_known = recorded.is_ok() || self.uncached.size_of(address).is_some();
        if is_known { Ok(()) } else { Ok(recorded?) }
    }

    /// Returns true if the cache of the current strategy can be turned off.
    fn may_do_without_cache(&self) -> bool {
        self.allocator.control().may_be_bypassed
    }

    pub(super) fn is_caching(&self) -> bool {
        !(self.uncached.is_on() && self.may_do_without_cache())
    }

    /// Turns the cache on or off for later requests. Existing blocks are not affected.
    pub(super) fn set_caching(&self, on: bool) -> Result<(), Failure> {
        if !on && !self.may_do_without_cache() {
            return Err(self.lacks("way past its cache"));
        }
        self.uncached.turn(!on);
        Ok(())
    }

    fn lacks(&self, what: &str) -> Failure {
        Failure::lacks(self.allocator.name(), what)
    }

    /// Returns the failure for a missing capability `what`. Names the layer if the reason is a layer
    /// whose blocks start at other addresses than those of the strategy.
    fn lacks_addresses(&self, what: &str) -> Failure {
        let config = self.allocator.config();
        let moves = |layer: &&LayerSetting| layer.may_move_blocks();
        match config.settings().layers.iter().find(moves) {
            Some(layer) => Failure::new(
                Status::NotSupported,
                format_args!(
                    "layers:[{}] has no {what}: it moves the blocks of backend:{}",
                    layer.text(),
                    self.allocator.name()
                ),
            ),
            None => self.lacks(what),
        }
    }

    /// Removes a live block of `backend:cpu`. The caller then frees the block's memory.
    pub(super) fn record_free(&self, address: u64) -> Result<(), Failure> {
        match &*self.allocator.strategy() {
            Strategy::Cpu(own) => {
                // From here on the block's memory belongs to the caller.
                std::mem::forget(own.record_free(address)?);
                Ok(())
            }
            _ => {
                let what = "record_free is for backend:cpu without layers";
                Err(Failure::new(Status::NotSupported, what))
            }
        }
    }

    pub(super) fn caching(&self) -> Result<&dyn Caching, Failure> {
        self.allocator.control().caching.ok_or_else(|| self.lacks("cache"))
    }

    pub(super) fn pools(&self) -> Result<&dyn PrivatePools, Failure> {
        self.allocator.control().private_pools.ok_or_else(|| self.lacks_addresses("private pools"))
    }

    pub(super) fn checkpoints(&self) -> Result<&dyn Checkpoints, Failure> {
        self.allocator.control().checkpoints.ok_or_else(|| self.lacks_addresses("checkpoints"))
    }

    pub(super) fn sleeping(&self) -> Result<&dyn Sleeping, Failure> {
        self.allocator.control().sleeping.ok_or_else(|| self.lacks_addresses("memory that sleeps"))
    }

    pub(super) fn sharing(&self) -> Result<&dyn Sharing, Failure> {
        self.allocator
            .control()
            .sharing
            .ok_or_else(|| self.lacks_addresses("blocks in other processes"))
    }

    pub(super) fn peers(&self) -> Result<&dyn PeerAccess, Failure> {
        self.allocator.control().peer_access.ok_or_else(|| self.lacks("use by other devices"))
    }

    pub(super) fn expandable(&self) -> Result<&dyn Expandable, Failure> {
        self.allocator.control().expandable.ok_or_else(|| self.lacks("expandable segments"))
    }

    pub(super) fn hooks(&self) -> &Hooks {
        self.allocator.control().hooks.expect("every switchable allocator has them")
    }

    pub(super) fn history(&self) -> &History {
        self.allocator.history()
    }

    /// Applies a configuration string on top of the current settings. Switches if it changes a key that
    /// is read only when an allocator is built.
    pub(super) fn set_conf(&self, text: &str) -> Result<(), Failure> {
        self.allocator.update(text)?;
        // The string is now applied, so nothing may fail from here on. It is parsed alone, because the
        // warnings concern only this string.
        let _ = parse(text).inspect(warn);
        Ok(())
    }

    /// Returns the errors of [`set_conf`](Self::set_conf) that can be found without changes.
    pub(super) fn check_conf(&self, text: &str) -> Result<(), Failure> {
        Ok(self.allocator.check_update(text)?)
    }

    pub(super) fn in_force(&self) -> InForce {
        let limit_bytes = self.allocator.control().caching.and_then(Caching::limit_bytes);
        InForce { config: self.allocator.config(), limit_bytes }
    }

    /// Restores earlier settings. If the allocator was switched since, switches back.
    pub(super) fn restore(&self, before: InForce) -> Result<(), Failure> {
        let InForce { config, limit_bytes } = before;
        if self.caching()?.apply(&config).is_err() {
            self.allocator.switch_to(config)?;
        }
        self.caching()?.set_limit_bytes(limit_bytes);
        Ok(())
    }

    /// Switches to an allocator with this complete configuration string.
    pub(super) fn switch(&self, text: &str) -> Result<(), Failure> {
        let config = parse_over(self.defaults, text)?;
        self.allocator.switch_to(config.clone())?;
        warn(&config);
        Ok(())
    }

    /// Gives another device access to this device's memory, if that is possible and `peers:none` is not
    /// set. May wait for the driver.
    pub(super) fn enable_peer(&self, device: DeviceId) -> Result<(), Failure> {
        let all = (self.driver.peers(), self.allocator.control().peer_access);
        let (Some(peers), Some(access)) = all else { return Ok(()) };
        let wanted = self.allocator.config().settings().peers == PeersSetting::Auto;
        if wanted && peers.can_access(device)? {
            access.enable_peer_access(device)?;
        }
        Ok(())
    }

    /// Creates a pool with one user, or adds a user to an existing pool.
    pub(super) fn ensure_pool(&self, pool: PoolId, options: PoolOptions) -> Result<(), Failure> {
        let pools = self.pools()?;
        let ensured = match pools.retain_pool(pool) {
            Err(PoolError::Unknown { .. }) => match pools.create_pool(pool, options) {
                // Another thread has created the pool in between.
                Err(PoolError::Taken { .. }) => pools.retain_pool(pool),
                created => created,
            },
            retained => retained,
        };
        Ok(ensured?)
    }

    /// Opens a scope of an existing pool.
    pub(super) fn open_scope(&self, pool: PoolId, filter: ScopeFilter) -> Result<(), Failure> {
        let pools = self.pools()?;
        // `open_scope` would create an unknown pool. `retain_pool` fails for it.
        pools.retain_pool(pool)?;
        let opened = pools.open_scope(pool, filter);
        // May fail, because another thread may have released more users than it had added.
        let _ = pools.release_pool(pool);
        Ok(opened?)
    }

    /// Returns the start and the size of the segment, mapped range or uncached block that contains an
    /// address.
    pub(super) fn base_of(&self, address: u64) -> Option<(u64, u64)> {
        if let Some(block) = self.uncached.around(address) {
            return Some(block);
        }
        let segments = self.caching().ok()?.layout();
        let found =
            segments.iter().find(|s| (s.address..s.address + s.size_bytes).contains(&address));
        found.map(|segment| (segment.address, segment.size_bytes))
    }
}
