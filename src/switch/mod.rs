//! Replacing the allocator while the program runs.
//!
//! [`Switchable`] is a [`DeviceAllocator`] over the **current** allocator and the **retired** ones that
//! still have live blocks. Each of them is a `Generation`. New requests go to the current one. A block is
//! freed by the allocator that made it: every allocator refuses foreign blocks, so the current one is
//! tried first, then the retired ones. The next allocator is built and checked before the switch, so a
//! failed switch changes nothing.
//!
//! A retired allocator has **drained** when none of its blocks is live or waits for a stream. The free of
//! its last block then drops it, or a later call does (`drain` lists them). A drop requires that no call is
//! using the allocator, that the driver accepts its memory, and that no scope is open (a scope routes
//! requests to a private pool). While a private pool has users nothing is switched: a CUDA graph may use
//! the pool's addresses. Read next: `core`, then `crate::sync` for how a call finds the current allocator.

mod capabilities;
mod core;
mod drain;
mod error;
mod generation;
mod hooks;
mod ledger;
mod no_scopes;
mod pools;

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use crate::allocator::{Allocation, Control, DeviceAllocator, MemoryKind, Request};
use crate::config::Config;
use crate::driver::Driver;
use crate::error::{AllocError, FreeError, HandleError};
use crate::ids::StreamId;
use crate::registry::{self, BuildError, BuildOptions};
use crate::stats::Usage;
use crate::strategies::Strategy;

use self::core::Core;
use self::generation::Generation;
pub use error::SwitchError;

/// See the [module](self). Cheap to clone; all clones switch together.
#[derive(Clone, Debug)]
pub struct Switchable {
    core: Arc<Core>,
}

impl Switchable {
    /// Creates a switchable allocator whose current allocator is `strategy`, built over `driver` from
    /// `config`. Later allocators are built over the same driver with the same options.
    #[must_use]
    pub fn new(
        strategy: Strategy,
        driver: Arc<dyn Driver>,
        config: Config,
        options: BuildOptions,
    ) -> Self {
        Self { core: Core::new(strategy, driver, Some(config), options) }
    }

    /// As [`new`](Self::new), for a strategy of unknown configuration: any string passed to
    /// [`update`](Self::update) causes a switch.
    pub(crate) fn around(
        strategy: Strategy,
        driver: Arc<dyn Driver>,
        options: BuildOptions,
    ) -> Self {
        Self { core: Core::new(strategy, driver, None, options) }
    }

    /// Builds the allocator that the configuration names, and a switchable allocator with that as its
    /// current one.
    ///
    /// # Errors
    ///
    /// [`BuildError`]; nothing was allocated from the device then.
    pub fn build(
        config: &Config,
        driver: Arc<dyn Driver>,
        options: BuildOptions,
    ) -> Result<Self, BuildError> {
        let strategy = registry::build(config, Arc::clone(&driver), options)?;
        Ok(Self::new(strategy, driver, config.clone(), options))
    }

    /// Puts the allocator that the string names in force for all later requests. The string is complete: a
    /// key that it does not name has its default. Blocks stay valid and are freed by the allocator that
    /// made them. The idle memory of the replaced allocator is released at once. A request that is running
    /// on another thread may still be served by the old allocator.
    ///
    /// May wait for the driver and for running work, as releasing memory does.
    ///
    /// # Errors
    ///
    /// [`SwitchError`]; nothing was changed then.
    pub fn switch(&self, text: &str) -> Result<(), SwitchError> {
        let parsed = Config::parse(text, &registry::key_table());
        let refused = |error| SwitchError::Configuration { text: text.to_owned(), error };
        self.switch_to(parsed.map_err(refused)?)
    }

    /// As [`switch`](Self::switch), with a parsed configuration.
    ///
    /// # Errors
    ///
    /// [`SwitchError`]; nothing was changed then.
    pub fn switch_to(&self, config: Config) -> Result<(), SwitchError> {
        self.core.switch(config, None).map(drop)
    }

    /// Applies a further configuration string on top of the earlier ones. Keys that it does not name
    /// keep their values, apart from those that PyTorch resets. A key that the allocator reads only when
    /// it is built ([`Key::is_fixed`](crate::config::Key::is_fixed)) requires a switch; any other key
    /// changes the current allocator. A `per_process_memory_fraction` in the string becomes the limit
    /// (in PyTorch, further strings do not change the limit). May wait as [`switch`](Self::switch) does.
    ///
    /// # Errors
    ///
    /// [`SwitchError`]; nothing was changed then.
    pub fn update(&self, text: &str) -> Result<(), SwitchError> {
        self.core.update(text)
    }

    /// Returns the errors of [`update`](Self::update) that can be found without changing anything: an
    /// invalid string, an unknown backend, open scopes and pools in use. The driver may still refuse later.
    ///
    /// # Errors
    ///
    /// [`SwitchError`].
    #[doc(hidden)]
    pub fn check_update(&self, text: &str) -> Result<(), SwitchError> {
        self.core.check_update(text)
    }

    /// Returns the configuration in force.
    #[must_use]
    pub fn config(&self) -> Config {
        self.core.state.lock().config.clone()
    }

    /// Returns the driver.
    #[must_use]
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.core.driver
    }

    /// Returns the current allocator, for inspection. The guard keeps that allocator and all its memory
    /// alive, also after a switch, so do not store the guard. Blocks, scopes and limits made directly on
    /// the returned allocator are unknown to the switchable one.
    #[must_use]
    pub fn strategy(&self) -> CurrentStrategy {
        CurrentStrategy {
            core: Arc::clone(&self.core),
            held: Some(self.core.generations.current()),
        }
    }

    /// Returns the number of replaced allocators that were not dropped yet, usually because of blocks that
    /// are live or wait for other streams.
    #[must_use]
    pub fn retired(&self) -> usize {
        self.core.generations.retired()
    }

    /// Announces a block's own stream before its free, if the allocator that made the block needs that:
    /// see [`CrossStream::needs_own_stream`].
    ///
    /// # Errors
    ///
    /// [`HandleError`] when the block is stale.
    pub(crate) fn record_own_stream(
        &self,
        allocation: &Allocation,
        stream: StreamId,
    ) -> Result<(), HandleError> {
        let record = |strategy: &Strategy| {
            let streams = strategy.control().cross_stream?;
            let needed = streams.needs_own_stream();
            of_maker(needed.then(|| streams.record_stream(allocation, stream))?)
        };
        let mut answer = self.core.call(|generation| record(&generation.strategy));
        // Read after the call: if a switch replaced the maker before the call, the maker is retired now.
        if answer.is_none() && self.core.generations.retired() > 0 {
            answer = self.core.generations.all().iter().find_map(|one| record(&one.strategy));
        }
        answer.unwrap_or(Ok(()))
    }

    /// Returns the kind of a block's memory, as the allocator that made the block reports it.
    pub(crate) fn memory_of(&self, allocation: &Allocation) -> MemoryKind {
        let found = self.core.call_maker(|strategy| {
            let control = strategy.control();
            let made = of_maker(control.caching?.base_allocation(allocation));
            made.map(|_| control.memory)
        });
        found.unwrap_or_else(|| self.control().memory)
    }

    /// Frees a block that the current allocator has refused, in the allocator that made the block. Returns
    /// the same error if the current one did.
    #[cold]
    #[inline(never)]
    fn free_by_maker(&self, refused: FreeError) -> Result<(), FreeError> {
        if !is_unknown(&refused.reason) {
            return Err(refused);
        }
        let FreeError { reason, mut allocation } = refused;
        // The allocator that made a live block is in this list, even if it became the current one just now.
        let (maker, answer) = 'found: {
            for generation in self.core.generations.all() {
                match generation.strategy.free(allocation) {
                    Err(error) if is_unknown(&error.reason) => allocation = error.allocation,
                    answer => break 'found (generation, answer),
                }
            }
            return Err(FreeError { reason, allocation });
        };
        self.core.after_free_by(maker);
        answer
    }
}

/// Returns true if an allocator refused a block because it did not make it.
fn is_unknown(reason: &HandleError) -> bool {
    matches!(reason, HandleError::Foreign { .. } | HandleError::UnknownAddress { .. })
}

/// Returns `None` if an allocator refused a block because it did not make it, otherwise the result.
fn of_maker<T>(answer: Result<T, HandleError>) -> Option<Result<T, HandleError>> {
    match answer {
        Err(reason) if is_unknown(&reason) => None,
        answer => Some(answer),
    }
}

/// A guard that keeps alive the allocator that was current when the guard was made. Dereferences to its
/// [`Strategy`].
pub struct CurrentStrategy {
    core: Arc<Core>,
    /// `Some` until the drop.
    held: Option<Arc<Generation>>,
}

impl Deref for CurrentStrategy {
    type Target = Strategy;

    fn deref(&self) -> &Strategy {
        &self.held.as_ref().expect("held until the drop").strategy
    }
}

impl Drop for CurrentStrategy {
    fn drop(&mut self) {
        drop(self.held.take());
        let _ = self.core.drop_drained();
    }
}

impl fmt::Debug for CurrentStrategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

impl DeviceAllocator for Switchable {
    #[inline]
    fn allocate(&self, request: Request) -> Result<Allocation, AllocError> {
        self.core.allocate(request)
    }

    #[inline]
    fn free(&self, allocation: Allocation) -> Result<(), FreeError> {
        let generation = self.core.generations.read();
        match generation.strategy.free(allocation) {
            Ok(()) => {
                self.core.leave(generation);
                Ok(())
            }
            Err(refused) => {
                self.core.leave(generation);
                self.free_by_maker(refused)
            }
        }
    }

    fn name(&self) -> &str {
        self.core.call(|generation| generation.name)
    }

    #[inline]
    fn free_raw(&self, address: u64) -> Result<u64, HandleError> {
        let free = |strategy: &Strategy| of_maker(strategy.free_raw(address));
        let freed = self.core.call(|generation| free(&generation.strategy));
        let freed = freed.or_else(|| self.core.free_by(free));
        freed.unwrap_or(Err(HandleError::UnknownAddress { address }))
    }

    fn record_stream_raw(&self, address: u64, stream: StreamId) -> Result<(), HandleError> {
        let record = |strategy: &Strategy| of_maker(strategy.record_stream_raw(address, stream));
        self.core.call_maker(record).unwrap_or(Err(HandleError::UnknownAddress { address }))
    }

    fn usage(&self) -> Usage {
        let ledger = self.core.ledger.lock();
        let all = self.core.generations.all();
        let off = |own: &mut Usage| (own.reserved_bytes, own.reserved_peak_bytes) = (0, 0);
        let all = Generation::counted_once(&all, |one| one.strategy.usage(), off);
        ledger.add_usage(all.fold(Usage::default(), Usage::plus))
    }

    /// Returns the capabilities of the current allocator and of retired ones. Three are always present.
    /// Counters: an allocator without them is wrapped in the layer `statistics`. Hooks: they stay
    /// registered for later allocators. Recording: it continues across switches.
    fn control(&self) -> Control<'_> {
        let own = Control {
            cross_stream: Some(self),
            caching: Some(self),
            by_address: true,
            may_be_bypassed: true,
            private_pools: Some(self),
            checkpoints: Some(self),
            expandable: Some(self),
            peer_access: Some(self),
            sharing: Some(self),
            sleeping: Some(self),
            host_bytes: Some(self),
            ..Control::default()
        };
        let of = |generation: &Generation| own.also_in(&generation.strategy.control());
        let mut control = self.core.call(of);
        if self.core.generations.retired() > 0 {
            control = self.core.each(|one| of(one)).into_iter().fold(control, Control::or);
        }
        Control {
            counters: Some(self),
            hooks: Some(&self.core.hooks),
            recording: Some(self),
            ..control
        }
    }
}
