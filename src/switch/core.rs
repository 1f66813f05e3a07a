//! Putting the next allocator in force, and finding the allocator that a call is for.
//!
//! Everything that can fail happens before the new allocator is put in force. `state` guards what must
//! not change in between (peers, the limit, used pools). Lock order: `state`, `ledger`, the list of
//! generations, an allocator's own locks. None of these is held while an allocator is built or dropped,
//! or while hooks run. One exception: a memory fraction is passed to a pluggable allocator's own
//! function under `state`. `scopes` is write-locked under none of these; threads that hold any of them,
//! or a read lock of `scopes`, may read-lock it. Read next: `drain`.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Weak};

use hashbrown::HashMap;
use log::Level;
use parking_lot::{Mutex, RecursiveRwLock, RecursiveRwLockReadGuard};

use super::error::SwitchError;
use super::generation::Generation;
use super::hooks;
use super::ledger::Ledger;
use crate::allocator::{Caching, DeviceAllocator, Hooks, PrivatePools};
use crate::config::{Config, Origin};
use crate::diagnostics;
use crate::driver::Driver;
use crate::error::{DriverError, DriverErrorKind};
use crate::history::History;
use crate::ids::{DeviceId, PoolId, StreamId};
use crate::registry::{self, BuildOptions, build_recording_in};
use crate::strategies::Strategy;
use crate::sync::{Read, Swap};

const FRACTION: &str = "per_process_memory_fraction";

/// The maximum number of replaced allocators that still have live blocks.
pub(super) const RETIRED_MAX: usize = 4096;

/// The state that all clones of a switchable allocator share.
#[derive(Debug)]
pub(super) struct Core {
    pub(super) this: Weak<Self>,
    pub(super) generations: Swap<Generation>,
    pub(super) driver: Arc<dyn Driver>,
    pub(super) options: BuildOptions,
    pub(super) hooks: Hooks,
    /// The history of the first allocator; later allocators continue it.
    pub(super) history: Arc<History>,
    pub(super) state: Mutex<SwitchState>,
    pub(super) ledger: Mutex<Ledger>,
    /// The number of scopes (routing of requests) of each pool that are open or being opened. Write-locked
    /// only to change the numbers: opening may run user functions. Read-locked while no scope may open
    /// (`no_scopes`).
    pub(super) scopes: RecursiveRwLock<ScopeCounts>,
    /// Bytes held by allocators that are being dropped. They count against the limit until the drop has
    /// ended.
    pub(super) dropping_bytes: AtomicU64,
    /// Whether retired allocators may have something to release or to drop.
    pub(super) has_idle: AtomicBool,
}

/// The number of open scopes of each pool that has any.
pub(super) type ScopeCounts = BTreeMap<PoolId, usize>;

/// The state that must not change while an allocator is put in force.
#[derive(Debug, Default)]
pub(super) struct SwitchState {
    pub(super) config: Config,
    /// True if the current allocator was built from a configuration. `config` is that configuration, with
    /// the changes applied since.
    pub(super) is_known: bool,
    /// How often `config` was replaced. Shows whether it changed while a new allocator was being built.
    pub(super) edition: u64,
    /// The most bytes that all allocators together may reserve.
    pub(super) limit_bytes: Option<u64>,
    pub(super) peers: Vec<DeviceId>,
    pub(super) classes: HashMap<StreamId, String>,
    /// Private pools of the current allocator that were created through this type and may still have
    /// users.
    pub(super) pools: BTreeSet<PoolId>,
    /// The pool of the set that was last checked for having ended.
    pub(super) last_checked: PoolId,
}

impl Core {
    pub(super) fn new(
        strategy: Strategy,
        driver: Arc<dyn Driver>,
        config: Option<Config>,
        options: BuildOptions,
    ) -> Arc<Self> {
        let is_known = config.is_some();
        let config = config.unwrap_or_default();
        let limit_bytes = strategy.control().caching.and_then(Caching::limit_bytes);
        let history =
            strategy.control().recording.map(|own| Arc::clone(own.history())).unwrap_or_default();
        let first = Generation::new(strategy, config.settings());
        let state = SwitchState { config, is_known, limit_bytes, ..SwitchState::default() };
        Arc::new_cyclic(|this| {
            hooks::attach(&first.strategy, this);
            Self {
                this: Weak::clone(this),
                generations: Swap::new(first),
                driver,
                options,
                hooks: Hooks::new(),
                history,
                state: Mutex::new(state),
                ledger: Mutex::default(),
                scopes: RecursiveRwLock::default(),
                dropping_bytes: AtomicU64::new(0),
                has_idle: AtomicBool::new(false),
            }
        })
    }

    /// Builds the allocator that the configuration describes and puts it in force. Returns false, with
    /// nothing changed, if the configuration in force has another edition than `edition`.
    pub(super) fn switch(&self, config: Config, edition: Option<u64>) -> Result<bool, SwitchError> {
        if History::is_gathering() {
            return Err(SwitchError::InStackProvider);
        }
        let _lines = diagnostics::lines();
        // Checked before the build, and again by `install`: a switch refused after the build drops the new
        // allocator, which may wait for the device.
        drop(self.refuse_pools(&self.state.lock())?);
        let driver = Arc::clone(&self.driver);
        let strategy = build_recording_in(&self.history, &config, driver, self.options)?;
        if self.options.raw_addresses && !strategy.control().by_address {
            return Err(lacks(&strategy, "blocks by bare address"));
        }
        let next = Generation::new(strategy, config.settings());
        hooks::attach(&next.strategy, &self.this);
        let name = next.strategy.name().to_owned();
        let Some(before) = self.install(next, config, edition)? else { return Ok(false) };
        diagnostics::note(Level::Info, || {
            let device = self.driver.info().device;
            format!("switched from backend:{before} to backend:{name} (device {device})")
        });
        // After an error the retired allocators keep the memory until the next release.
        let _ = self.release_idle();
        Ok(true)
    }

    /// Applies a further string. If it requires a switch and another configuration was put in force
    /// first, the string is parsed again on top of that one.
    pub(super) fn update(&self, text: &str) -> Result<(), SwitchError> {
        loop {
            let change = self.change(&mut self.state.lock(), text)?;
            let Some((next, edition)) = change else { return Ok(()) };
            if self.switch(next, Some(edition))? {
                return Ok(());
            }
        }
    }

    /// See [`Switchable::check_update`](super::Switchable::check_update).
    pub(super) fn check_update(&self, text: &str) -> Result<(), SwitchError> {
        let state = self.state.lock();
        let next = state.updated(text)?;
        registry::check_name(&next.settings().backend)?;
        if state.stays(&next) { Ok(()) } else { self.refuse_pools(&state).map(drop) }
    }

    /// Changes the current allocator according to a further string. If the string requires a switch,
    /// returns the configuration to switch to and the edition it is based on.
    fn change(
        &self,
        state: &mut SwitchState,
        text: &str,
    ) -> Result<Option<(Config, u64)>, SwitchError> {
        let next = state.updated(text)?;
        if !state.stays(&next) {
            return Ok(Some((next, state.edition)));
        }
        let current = self.generations.current();
        let Some(caching) = current.strategy.control().caching else {
            // This allocator cannot change settings. Only a change of its own keys (`extra`) has effect, by
            // a switch.
            if state.config.settings().extra != next.settings().extra {
                return Ok(Some((next, state.edition)));
            }
            return Err(lacks(&current.strategy, "cache, which further strings would change"));
        };
        self.apply(state, caching, next, false).map_err(SwitchError::Apply)?;
        Ok(None)
    }

    /// Applies a configuration that fits the current allocator, `caching`. A memory fraction that `next`
    /// sets (see `sets_fraction`) becomes the limit, as if set by a call. An older fraction is
    /// ignored: a call may have changed the limit since.
    pub(super) fn apply(
        &self,
        state: &mut SwitchState,
        caching: &dyn Caching,
        next: Config,
        is_complete: bool,
    ) -> Result<(), DriverError> {
        let sets_limit = sets_fraction(&next, is_complete);
        caching.apply(&next)?;
        if sets_limit {
            let fraction = next.settings().per_process_memory_fraction;
            if let Err(refused) = caching.set_memory_fraction(fraction) {
                // Restores the configuration in force, which could be applied before. An error here is
                // ignored: the first error is the one to report.
                if state.is_known {
                    let _ = caching.apply(&state.config);
                }
                let kind = DriverErrorKind::InvalidValue;
                return Err(DriverError::new(kind, "apply", 0, refused.to_string()));
            }
            state.limit_bytes = caching.limit_bytes();
            self.set_current_limit(state);
        }
        state.put(next);
        Ok(())
    }

    /// Returns an error while a scope is open or a pool has users: nothing may be switched then.
    /// Otherwise no scope opens while the result is held.
    fn refuse_pools(
        &self,
        state: &SwitchState,
    ) -> Result<RecursiveRwLockReadGuard<'_, ScopeCounts>, SwitchError> {
        let scopes = self.scopes.read();
        if let Some(pool) = scopes.keys().next() {
            return Err(SwitchError::ScopeOpen { pool: *pool });
        }
        let current = self.generations.current();
        let Some(pools) = current.strategy.control().private_pools else { return Ok(scopes) };
        let is_used = |pool: &&PoolId| pools.pool_users(**pool).is_some_and(|users| users > 0);
        match state.pools.iter().find(is_used) {
            Some(pool) => Err(SwitchError::PoolInUse { pool: *pool }),
            None => Ok(scopes),
        }
    }

    /// Makes `next` the current allocator and returns the name of the replaced one. Returns `None`, with
    /// nothing changed, if the configuration in force is not of this edition.
    fn install(
        &self,
        next: Generation,
        config: Config,
        edition: Option<u64>,
    ) -> Result<Option<&'static str>, SwitchError> {
        let mut state = self.state.lock();
        if edition.is_some_and(|edition| edition != state.edition) {
            return Ok(None);
        }
        let _no_scopes = self.refuse_pools(&state)?;
        if self.generations.retired() >= RETIRED_MAX {
            return Err(SwitchError::TooMany { limit: RETIRED_MAX });
        }
        state.carry_over(&next.strategy)?;
        let caching = next.strategy.control().caching;
        let own = caching.and_then(Caching::limit_bytes);
        if sets_fraction(&config, edition.is_none()) {
            state.limit_bytes = own;
        } else if config.origin(FRACTION) == Origin::Default {
            state.limit_bytes = state.limit_bytes.or(own);
        }
        if let Some(caching) = caching {
            caching.set_limit_bytes(self.limit_beside(&self.generations.all(), state.limit_bytes));
        }
        state.put(config);
        state.is_known = true;
        state.pools.clear();
        let mut ledger = self.ledger.lock();
        let all = self.generations.all();
        Self::begin_peaks(&mut ledger, &all);
        self.generations.replace(next);
        drop(ledger);
        if state.limit_bytes.is_some() {
            self.set_current_limit(&state);
        }
        Ok(Some(all[0].name))
    }

    /// Calls the current allocator. If it was replaced during the call, tries to drop the retired
    /// allocators without live blocks afterwards.
    #[inline(always)]
    pub(super) fn call<R>(&self, call: impl FnOnce(&Generation) -> R) -> R {
        let generation = self.generations.read();
        let answer = call(&generation);
        self.leave(generation);
        answer
    }

    /// Ends a call. Returns true if its allocator was replaced during the call. If so, tries to
    /// drop the retired allocators without live blocks.
    #[inline(always)]
    pub(super) fn leave(&self, generation: Read<'_, Generation>) -> bool {
        let was_replaced = generation.leave();
        if was_replaced {
            self.after_replaced();
        }
        was_replaced
    }

    /// Calls `call` on each generation, the current one first, and returns the results.
    pub(super) fn each<R>(&self, call: impl FnMut(&Arc<Generation>) -> R) -> Vec<R> {
        self.generations.all().iter().map(call).collect()
    }

    /// Calls `call` on the current allocator, then on all, until one returns a value.
    pub(super) fn call_maker<R>(&self, call: impl Fn(&Strategy) -> Option<R>) -> Option<R> {
        let current = self.call(|generation| call(&generation.strategy));
        current.or_else(|| self.generations.all().iter().find_map(|one| call(&one.strategy)))
    }
}

fn lacks(strategy: &Strategy, what: &'static str) -> SwitchError {
    SwitchError::Lacks { name: strategy.name().to_owned(), what }
}

/// Returns true if a configuration sets a memory fraction. A complete configuration sets every key that
/// any string named. One that updates the configuration in force sets only the keys that are new.
fn sets_fraction(config: &Config, is_complete: bool) -> bool {
    match config.origin(FRACTION) {
        Origin::Text { .. } | Origin::Code => true,
        Origin::Earlier => is_complete,
        Origin::Default => false,
    }
}

impl SwitchState {
    /// Adds a pool of the current allocator. Checks the next two pools of the set and removes those that
    /// ended, so that the set has at most about twice as many pools as there are.
    pub(super) fn add_pool(&mut self, pool: PoolId, pools: &dyn PrivatePools) {
        for _ in 0..2 {
            let behind = (Bound::Excluded(self.last_checked), Bound::Unbounded);
            let next = self.pools.range(behind).next().or_else(|| self.pools.first());
            let Some(next) = next.copied() else { break };
            self.last_checked = next;
            if pools.pool_users(next).is_none() {
                self.pools.remove(&next);
            }
        }
        self.pools.insert(pool);
    }

    /// Returns the configuration in force, changed by a further string.
    fn updated(&self, text: &str) -> Result<Config, SwitchError> {
        let refused = |error| SwitchError::Configuration { text: text.to_owned(), error };
        self.config.updated(text, &registry::key_table()).map_err(refused)
    }

    /// Returns true if the current allocator was built with the same fixed keys as this configuration
    /// has.
    fn stays(&self, next: &Config) -> bool {
        self.is_known && self.config.settings().is_built_alike(next.settings())
    }

    /// Returns true if the configuration can be applied to `strategy`, the current allocator.
    pub(super) fn fits(&self, strategy: &Strategy, config: &Config) -> bool {
        self.stays(config) || !self.is_known && config.settings().backend == strategy.name()
    }

    /// Records a configuration as the one in force.
    pub(super) fn put(&mut self, config: Config) {
        self.config = config;
        self.edition += 1;
    }

    /// Applies to the next allocator the peers and reserve classes that were set on the current one.
    fn carry_over(&self, next: &Strategy) -> Result<(), SwitchError> {
        for peer in &self.peers {
            let Some(peers) = next.control().peer_access else {
                return Err(lacks(next, "use by other devices"));
            };
            peers.enable_peer_access(*peer).map_err(SwitchError::Peer)?;
        }
        if let Some(expandable) = next.control().expandable {
            for (stream, class) in &self.classes {
                expandable.set_reserve_class(*stream, Some(class));
            }
        }
        Ok(())
    }
}
