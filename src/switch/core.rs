//! Building the next allocator, putting it in force, and letting the old ones go.
//!
//! Everything that can fail happens before the new allocator is put in force. What must not change
//! while that happens (open scopes, peers, the limit) is guarded by `doors`. No lock is held while an
//! allocator is built or dropped.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::error::SwitchError;
use super::generation::Generation;
use crate::allocator::{CrossStream, DeviceAllocator};
use crate::config::Config;
use crate::driver::Driver;
use crate::registry::{self, BuildOptions};
use crate::strategies::Strategy;
use crate::sync::{All, Swap};

/// As many replaced allocators may wait for their last blocks.
pub(super) const RETIRED_MAX: usize = 4096;

/// What all copies of a switchable allocator share.
#[derive(Debug)]
pub(super) struct Core {
    pub(super) generations: Swap<Generation>,
    pub(super) driver: Arc<dyn Driver>,
    pub(super) options: BuildOptions,
    pub(super) doors: Mutex<Doors>,
    /// A retired one has drained and could not go yet, because somebody was inside.
    stuck: AtomicBool,
}

/// What must not change while an allocator is put in force.
#[derive(Debug, Default)]
pub(super) struct Doors {
    pub(super) config: Config,
}

impl Core {
    pub(super) fn new(
        strategy: Strategy,
        driver: Arc<dyn Driver>,
        config: Config,
        options: BuildOptions,
    ) -> Arc<Self> {
        let first = Generation::new(strategy, Some(config.settings()));
        Arc::new(Self {
            generations: Swap::new(first),
            driver,
            options,
            doors: Mutex::new(Doors { config }),
            stuck: AtomicBool::new(false),
        })
    }

    /// Builds what the string says and puts it in force.
    pub(super) fn switch(&self, text: &str) -> Result<(), SwitchError> {
        let config = Config::parse(text, &registry::key_table())
            .map_err(|error| SwitchError::Configuration { text: text.to_owned(), error })?;
        let next = self.build(&config)?;
        self.install(next, config)
    }

    fn build(&self, config: &Config) -> Result<Generation, SwitchError> {
        let strategy = registry::build(config, Arc::clone(&self.driver), self.options)?;
        if self.options.raw_addresses && strategy.raw_addresses().is_none() {
            let (name, what) = (strategy.name().to_owned(), "blocks by bare address");
            return Err(SwitchError::Lacks { name, what });
        }
        Ok(Generation::new(strategy, Some(config.settings())))
    }

    fn install(&self, next: Generation, config: Config) -> Result<(), SwitchError> {
        let old = {
            let mut doors = self.doors.lock();
            if self.generations.retired() >= RETIRED_MAX {
                return Err(SwitchError::TooMany { limit: RETIRED_MAX });
            }
            doors.config = config;
            let old = self.generations.replace(next);
            old.retire();
            old
        };
        old.give_idle_back();
        self.look_at(old);
        Ok(())
    }

    /// Looks whether a retired one has drained, and lets it go if so; otherwise says when to look again.
    /// Waits for no work of the device unless memory is given back.
    pub(super) fn look_at(&self, old: Arc<Generation>) {
        let Some(old) = self.try_let_go(old) else { return };
        // Somebody was inside. Whoever leaves from now on looks; who left before is seen by this.
        self.stuck.store(true, Ordering::SeqCst);
        self.try_let_go(old);
    }

    /// Gives a drained one back that could not go.
    fn try_let_go(&self, old: Arc<Generation>) -> Option<Arc<Generation>> {
        if !Self::has_drained(&old) {
            return None;
        }
        match self.generations.let_go(old, Self::has_drained) {
            Ok(gone) => {
                drop(gone);
                None
            }
            Err(old) => Some(old),
        }
    }

    /// Whether no block of it is in callers' hands or waits for other streams.
    fn has_drained(old: &Generation) -> bool {
        // An event that cannot be asked keeps its block waiting.
        let _ = old.strategy.cross_stream().map(CrossStream::process_events);
        let statistics = old.statistics();
        let live = old.live_blocks(&statistics);
        let waiting = statistics.active.all.current - statistics.allocation.all.current;
        old.look_after(live);
        live == 0 && waiting == 0
    }

    /// Looks at all retired ones.
    #[cold]
    pub(super) fn look_at_all(&self) {
        self.stuck.store(false, Ordering::SeqCst);
        let mut all = self.generations.all();
        while all.len() > 1 {
            if let Some(old) = all.pop() {
                self.look_at(old);
            }
        }
    }

    /// Calls the current one. If it was replaced meanwhile, whoever leaves it looks whether it can go.
    #[inline]
    pub(super) fn call<R>(&self, call: impl FnOnce(&Generation) -> R) -> R {
        let mut retired = false;
        let answer = self.generations.with(|generation| {
            let answer = call(generation);
            retired = generation.is_retired();
            answer
        });
        if retired {
            self.look_at_all();
        }
        answer
    }

    /// Frees by asking one after the other until one answers.
    pub(super) fn find_in<R>(
        &self,
        all: All<Generation>,
        mut ask: impl FnMut(&Generation) -> Option<R>,
    ) -> Option<R> {
        let mut found = None;
        for generation in all {
            if let Some(answer) = ask(&generation) {
                found = Some((generation, answer));
                break;
            }
        }
        let Some((generation, answer)) = found else {
            self.left();
            return None;
        };
        self.freed_of(generation);
        Some(answer)
    }

    /// No reference to any generation is held any more: one that could not go for it is looked at.
    pub(super) fn left(&self) {
        if self.stuck.load(Ordering::SeqCst) {
            self.look_at_all();
        }
    }

    fn freed_of(&self, old: Arc<Generation>) {
        if old.is_retired() && old.freed_one() {
            old.is_due.store(true, Ordering::Relaxed);
            self.look_at(old);
        } else {
            drop(old);
        }
        self.left();
    }
}
