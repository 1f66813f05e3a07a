//! One allocator after another behind one face: the strategy can change while the program runs.
//!
//! [`Switchable`] is a [`DeviceAllocator`] over the **current** allocator and the **retired** ones that
//! still have live blocks. New requests go to the current one. A block goes back to the one that made it:
//! the current one is asked first and refuses what is not its own, then the retired ones. A retired one
//! goes when its last block is freed and nobody is inside. A switch builds and checks first, so one that
//! fails changes nothing. Read next: `core`, then `crate::sync` for how a call finds the current one.

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

use crate::allocator::{Allocation, Control, DeviceAllocator, Request};
use crate::config::Config;
use crate::driver::Driver;
use crate::error::{AllocError, FreeError, HandleError};
use crate::ids::StreamId;
use crate::registry::{self, BuildError, BuildOptions};
use crate::stats::Usage;
use crate::strategies::Strategy;
use crate::sync::Read;

use self::core::Core;
use self::generation::Generation;
pub use error::SwitchError;

/// See the [module](self). Cheap to clone; all clones switch together.
#[derive(Clone, Debug)]
pub struct Switchable {
    core: Arc<Core>,
}

impl Switchable {
    /// An allocator that begins with `strategy`, which was built over `driver` from `config`. Later ones
    /// are built over the same driver with the same options.
    #[must_use]
    pub fn new(
        strategy: Strategy,
        driver: Arc<dyn Driver>,
        config: Config,
        options: BuildOptions,
    ) -> Self {
        Self { core: Core::new(strategy, driver, Some(config), options) }
    }

    /// The same with an allocator of which nobody knows what it was built from: any further string
    /// switches.
    pub(crate) fn around(
        strategy: Strategy,
        driver: Arc<dyn Driver>,
        options: BuildOptions,
    ) -> Self {
        Self { core: Core::new(strategy, driver, None, options) }
    }

    /// An allocator that begins with what the configuration names.
    ///
    /// # Errors
    ///
    /// [`BuildError`]; nothing was taken from the device then.
    pub fn build(
        config: &Config,
        driver: Arc<dyn Driver>,
        options: BuildOptions,
    ) -> Result<Self, BuildError> {
        let strategy = registry::build(config, Arc::clone(&driver), options)?;
        Ok(Self::new(strategy, driver, config.clone(), options))
    }

    /// Puts the allocator that the string names in force for all later requests. The string is complete:
    /// what it does not say has its default. Blocks stay valid and go back to the allocator that made
    /// them, whose idle memory is given back at once. A request that runs at this moment on another
    /// thread may still be served by the old allocator.
    ///
    /// May wait for the driver and for running work, as releasing memory does.
    ///
    /// # Errors
    ///
    /// [`SwitchError`]; everything is as it was then.
    pub fn switch(&self, text: &str) -> Result<(), SwitchError> {
        let parsed = Config::parse(text, &registry::key_table());
        let refused = |error| SwitchError::Configuration { text: text.to_owned(), error };
        self.switch_to(parsed.map_err(refused)?)
    }

    /// The same with a configuration that was parsed before.
    ///
    /// # Errors
    ///
    /// [`SwitchError`]; everything is as it was then.
    pub fn switch_to(&self, config: Config) -> Result<(), SwitchError> {
        self.core.switch(config)
    }

    /// Puts a further string in force, on top of those before: what it does not say stays, apart from
    /// the keys that PyTorch resets. A string that changes a key that the allocator reads once, when it is
    /// built ([`Key::is_fixed`](crate::config::Key::is_fixed)), switches; any other changes the present
    /// allocator. A
    /// `per_process_memory_fraction` in it is the limit from now on (PyTorch's further strings move no
    /// limit). May wait as [`switch`](Self::switch) does.
    ///
    /// # Errors
    ///
    /// [`SwitchError`]; everything is as it was then.
    pub fn update(&self, text: &str) -> Result<(), SwitchError> {
        self.core.update(text)
    }

    /// Returns the error of [`update`](Self::update) as far as it is known without changing anything: what
    /// the string and open scopes and pools refuse. The driver may refuse later.
    ///
    /// # Errors
    ///
    /// [`SwitchError`].
    #[cfg(feature = "ffi")]
    pub(crate) fn check_update(&self, text: &str) -> Result<(), SwitchError> {
        self.core.check_update(text)
    }

    /// The configuration in force.
    #[must_use]
    pub fn config(&self) -> Config {
        self.core.state.lock().config.clone()
    }

    /// The device.
    #[must_use]
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.core.driver
    }

    /// The current allocator. It stays, with all its memory, as long as this is held, also when another
    /// one is put in force: for a look, not to keep. Blocks, scopes and limits that go past the
    /// switchable allocator are not known to it.
    #[must_use]
    pub fn strategy(&self) -> CurrentStrategy {
        CurrentStrategy {
            core: Arc::clone(&self.core),
            held: Some(self.core.generations.current()),
        }
    }

    /// How many replaced allocators still have blocks in callers' hands, or waiting for other streams.
    #[must_use]
    pub fn retired(&self) -> usize {
        self.core.generations.retired()
    }

    #[cold]
    #[inline(never)]
    fn after_free(
        &self,
        generation: Read<'_, Generation>,
        freed: Result<(), FreeError>,
    ) -> Result<(), FreeError> {
        self.core.leave(generation);
        freed.or_else(|refused| self.free_elsewhere(refused))
    }

    /// Takes a block back that the current allocator has refused.
    #[cold]
    fn free_elsewhere(&self, refused: FreeError) -> Result<(), FreeError> {
        if !is_unknown(&refused.reason) {
            return Err(refused);
        }
        let FreeError { reason, allocation } = refused;
        let mut asked = Some(allocation);
        // The one that made a live block is among these, also if it became the current one just now.
        let freed = self.core.free_by(|generation| {
            let refused = generation.strategy.free(asked.take()?);
            match refused {
                Err(error) if is_unknown(&error.reason) => {
                    asked = Some(error.allocation);
                    None
                }
                answer => Some(answer),
            }
        });
        match (freed, asked) {
            (Some(answer), _) => answer,
            (None, Some(allocation)) => Err(FreeError { reason, allocation }),
            (None, None) => Ok(()),
        }
    }
}

/// Whether an allocator says that a block is none of its own.
fn is_unknown(reason: &HandleError) -> bool {
    matches!(reason, HandleError::Foreign { .. } | HandleError::UnknownAddress { .. })
}

/// An answer, unless it says that the block belongs elsewhere.
fn of_maker<T>(answer: Result<T, HandleError>) -> Option<Result<T, HandleError>> {
    match answer {
        Err(reason) if is_unknown(&reason) => None,
        answer => Some(answer),
    }
}

/// A hold on the allocator that was current, which reads as its [`Strategy`].
pub struct CurrentStrategy {
    core: Arc<Core>,
    /// Always there until the drop.
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
        self.core.left();
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
        self.core.take(request, |generation| generation.strategy.allocate(request))
    }

    #[inline]
    fn free(&self, allocation: Allocation) -> Result<(), FreeError> {
        let generation = self.core.generations.read();
        // One variable from here to the caller, as in `Core::take`.
        let mut freed = generation.strategy.free(allocation);
        if freed.is_err() {
            freed = self.after_free(generation, freed);
        } else {
            self.core.leave(generation);
        }
        freed
    }

    fn name(&self) -> &str {
        self.core.call(|generation| generation.name)
    }

    #[inline]
    fn free_raw(&self, address: u64) -> Result<u64, HandleError> {
        let free = |strategy: &Strategy| of_maker(strategy.free_raw(address));
        let freed = self.core.call(|generation| free(&generation.strategy));
        let found = freed.or_else(|| self.core.free_by(|generation| free(&generation.strategy)));
        found.unwrap_or(Err(HandleError::UnknownAddress { address }))
    }

    fn record_stream_raw(&self, address: u64, stream: StreamId) -> Result<(), HandleError> {
        let record = |strategy: &Strategy| of_maker(strategy.record_stream_raw(address, stream));
        self.core.ask_maker(record).unwrap_or(Err(HandleError::UnknownAddress { address }))
    }

    fn usage(&self) -> Usage {
        self.core.with_counters(|ledger, all| {
            let off = |own: &mut Usage| (own.reserved_bytes, own.reserved_peak_bytes) = (0, 0);
            let all = Generation::counted_once(all, |one| one.strategy.usage(), off);
            ledger.add_usage(all.fold(Usage::default(), Usage::plus))
        })
    }

    /// What the current allocator or a retired one can do. Counters always, because an allocator that does
    /// not count wears the layer that does; hooks always, because they wait for an allocator that calls them;
    /// the recording always, because it goes on through a switch.
    fn control(&self) -> Control<'_> {
        let own = Control {
            cross_stream: Some(self),
            caching: Some(self),
            by_address: true,
            private_pools: Some(self),
            checkpoints: Some(self),
            expandable: Some(self),
            peer_access: Some(self),
            sharing: Some(self),
            ..Control::default()
        };
        let of = |generation: &Generation| own.also_in(&generation.strategy.control());
        let mut control = self.core.call(of);
        if self.core.generations.retired() > 0 {
            control = self.core.ask_all(of).into_iter().fold(control, Control::or);
        }
        Control {
            counters: Some(self),
            hooks: Some(&self.core.hooks),
            recording: Some(self),
            ..control
        }
    }
}
