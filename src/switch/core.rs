//! Putting the next allocator in force, and finding the allocator that a call is for.
//!
//! Everything that can fail happens before the new allocator is put in force. `state` guards what must
//! not change in between (open scopes, peers, the limit). Lock order: the scope gate, `state`, `ledger`,
//! the list of generations, an allocator's own locks. None of these but the gate is held while an
//! allocator is built or dropped, or while hooks run. One exception: a memory fraction is passed to a
//! pluggable allocator's own function under `state`. Read next: `drain`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Arc, Weak};

use log::Level;
use parking_lot::{Mutex, RwLock};

use super::error::SwitchError;
use super::generation::Generation;
use super::hooks;
use super::ledger::Ledger;
use crate::allocator::{Caching, DeviceAllocator, Hooks};
use crate::config::{Config, Origin};
use crate::diagnostics;
use crate::driver::Driver;
use crate::error::{DriverError, DriverErrorKind};
use crate::history::History;
use crate::ids::{DeviceId, PoolId, StreamId};
use crate::registry::{self, BuildOptions, build_recording_in};
use crate::strategies::Strategy;
use crate::sync::{Read, Swap};

/// The configuration key that sets the limit.
const FRACTION: &str = "per_process_memory_fraction";

/// The most replaced allocators that may wait for their last blocks.
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
    /// The number of open scopes, a copy of the count in `state` that can be read without the lock.
    pub(super) open_scopes: AtomicUsize,
    /// Read-locked while no scope may open (`no_scopes`), write-locked to open one. Taken before
    /// `state`.
    pub(super) scope_gate: RwLock<()>,
    /// Bytes held by allocators that are being dropped. They count against the limit until the drop has
    /// ended.
    pub(super) dropping_bytes: AtomicU64,
    /// True if a retired allocator has drained but could not be dropped: a call was using it or a scope
    /// was open.
    pub(super) drop_blocked: AtomicBool,
    /// Checks of retired allocators requested since a thread began to check; 0 if no thread is checking.
    pub(super) check_requests: AtomicUsize,
}

/// The state that must not change while an allocator is put in force.
#[derive(Debug, Default)]
pub(super) struct SwitchState {
    pub(super) config: Config,
    /// Whether the current allocator was built from `config`, apart from changes applied since.
    pub(super) is_known: bool,
    /// How often a configuration was put in force.
    pub(super) edition: u64,
    /// The most bytes that all allocators together may reserve.
    pub(super) limit_bytes: Option<u64>,
    pub(super) peers: Vec<DeviceId>,
    pub(super) classes: BTreeMap<StreamId, String>,
    /// Private pools of the current allocator that were created through this type and may still have
    /// users.
    pub(super) pools: BTreeSet<PoolId>,
    /// Pools with an open scope.
    pub(super) scopes: Vec<PoolId>,
    /// Pools for which the current allocator is opening a scope. No lock is held then, because user
    /// functions may run.
    pub(super) opening: Vec<PoolId>,
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
                open_scopes: AtomicUsize::new(0),
                scope_gate: RwLock::new(()),
                dropping_bytes: AtomicU64::new(0),
                drop_blocked: AtomicBool::new(false),
                check_requests: AtomicUsize::new(0),
            }
        })
    }

    /// Builds the allocator that the configuration describes and puts it in force.
    pub(super) fn switch(&self, config: Config) -> Result<(), SwitchError> {
        self.switch_from(config, None).map(drop)
    }

    /// As [`switch`](Self::switch); returns false, with nothing changed, if the configuration in force
    /// has another edition than `edition`.
    fn switch_from(&self, config: Config, edition: Option<u64>) -> Result<bool, SwitchError> {
        if History::is_gathering() {
            return Err(SwitchError::InStackProvider);
        }
        let _lines = diagnostics::lines();
        // Checked before the build: a switch refused later drops the new allocator, which may wait for the
        // device.
        self.with_state(|state| self.refuse_pools(state))?;
        let driver = Arc::clone(&self.driver);
        let strategy = build_recording_in(&self.history, &config, driver, self.options)?;
        if self.options.raw_addresses && !strategy.control().by_address {
            return Err(lacks(&strategy, "blocks by bare address"));
        }
        let next = Generation::new(strategy, config.settings());
        hooks::attach(&next.strategy, &self.this);
        let name = next.strategy.name().to_owned();
        let Some(old) = self.install(next, config, edition)? else { return Ok(false) };
        diagnostics::note(Level::Info, || {
            let (device, before) = (self.driver.info().device, old.strategy.name());
            format!("switched from backend:{before} to backend:{name} (device {device})")
        });
        if let Some(_no_scopes) = self.hold_scopes_off() {
            old.release_idle();
        }
        self.request_check(old);
        self.update_limit();
        Ok(true)
    }

    /// Applies a further string. If it requires a switch and another configuration was put in force
    /// first, the string is parsed again on top of that one.
    pub(super) fn update(&self, text: &str) -> Result<(), SwitchError> {
        while let Some((next, edition)) = self.with_state(|state| self.change(state, text))? {
            if self.switch_from(next, Some(edition))? {
                break;
            }
        }
        Ok(())
    }

    /// See [`Switchable::check_update`](super::Switchable::check_update).
    pub(super) fn check_update(&self, text: &str) -> Result<(), SwitchError> {
        self.with_state(|state| {
            let next = state.updated(text)?;
            registry::check_name(&next.settings().backend)?;
            if state.stays(&next) { Ok(()) } else { self.refuse_pools(state) }
        })
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
            // This allocator has no changeable settings; keys of its own apply to the next allocator.
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
    fn refuse_pools(&self, state: &SwitchState) -> Result<(), SwitchError> {
        if let Some(pool) = state.scopes.first().or(state.opening.first()) {
            return Err(SwitchError::ScopeOpen { pool: *pool });
        }
        let current = self.generations.current();
        let Some(pools) = current.strategy.control().private_pools else { return Ok(()) };
        let is_used = |pool: &&PoolId| pools.pool_users(**pool).is_some_and(|users| users > 0);
        match state.pools.iter().find(is_used) {
            Some(pool) => Err(SwitchError::PoolInUse { pool: *pool }),
            None => Ok(()),
        }
    }

    fn install(
        &self,
        next: Generation,
        config: Config,
        edition: Option<u64>,
    ) -> Result<Option<Arc<Generation>>, SwitchError> {
        let mut state = self.state.lock();
        if edition.is_some_and(|edition| edition != state.edition) {
            return Ok(None);
        }
        self.refuse_pools(&state)?;
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
            caching.set_limit_bytes(self.limit_of_next(state.limit_bytes));
        }
        state.put(config);
        state.is_known = true;
        state.pools.clear();
        let mut ledger = self.ledger.lock();
        Self::begin_peaks(&mut ledger, &self.generations.all());
        let old = self.generations.replace(next);
        old.retire();
        drop(ledger);
        if state.limit_bytes.is_some() {
            self.set_current_limit(&state);
        }
        Ok(Some(old))
    }

    /// Calls the current allocator. If it was replaced during the call, checks whether it can be
    /// dropped.
    #[inline(always)]
    pub(super) fn call<R>(&self, call: impl FnOnce(&Generation) -> R) -> R {
        let generation = self.generations.read();
        let answer = call(&generation);
        self.leave(generation);
        answer
    }

    /// Ends a call. Returns true if its allocator was replaced during the call; that allocator is then
    /// checked.
    #[inline(always)]
    pub(super) fn leave(&self, generation: Read<'_, Generation>) -> bool {
        let replaced = generation.name();
        let was_replaced = generation.leave();
        if was_replaced {
            self.check_replaced(replaced);
        }
        was_replaced
    }

    /// Runs `act` with the state locked. `act` must not keep a reference to a generation.
    pub(super) fn with_state<R>(&self, act: impl FnOnce(&mut SwitchState) -> R) -> R {
        let answer = act(&mut self.state.lock());
        self.retry_blocked_drop();
        answer
    }

    /// Calls `call` on each generation, the current one first, and returns the results. Checks no retired
    /// allocator, so `state` may be held; without `state`, call
    /// [`retry_blocked_drop`](Self::retry_blocked_drop) afterwards.
    pub(super) fn each<R>(&self, mut call: impl FnMut(&Generation) -> R) -> Vec<R> {
        self.generations.all().iter().map(|generation| call(generation)).collect()
    }

    /// Calls `call` on one generation after the other, the current one first, until one returns a value.
    /// The caller must hold no lock.
    pub(super) fn find_map<R>(&self, mut call: impl FnMut(&Generation) -> Option<R>) -> Option<R> {
        let answer = self.generations.all().iter().find_map(|generation| call(generation));
        self.retry_blocked_drop();
        answer
    }

    /// As [`each`](Self::each), for callers that hold no lock.
    pub(super) fn call_all<R>(&self, call: impl FnMut(&Generation) -> R) -> Vec<R> {
        let answers = self.each(call);
        self.retry_blocked_drop();
        answers
    }

    /// As [`find_map`](Self::find_map), for frees.
    pub(super) fn free_by<R>(&self, mut free: impl FnMut(&Generation) -> Option<R>) -> Option<R> {
        // References to the other generations are released once one has freed the block.
        let freed = self.generations.all().into_iter().find_map(|generation| {
            let answer = free(&generation)?;
            Some((generation, answer))
        });
        let answer = freed.map(|(generation, answer)| {
            self.after_free_by(generation);
            answer
        });
        self.retry_blocked_drop();
        answer
    }

    /// Calls `call` on the current allocator, then on all, until one returns a value.
    pub(super) fn call_maker<R>(&self, call: impl Fn(&Strategy) -> Option<R>) -> Option<R> {
        let current = self.call(|generation| call(&generation.strategy));
        current.or_else(|| self.find_map(|generation| call(&generation.strategy)))
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
