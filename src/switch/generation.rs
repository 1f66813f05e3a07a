//! One allocator of a switchable allocator, current or retired.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

use crate::allocator::{Caching, Counters, CrossStream, DeviceAllocator};
use crate::config::{LayerSetting, Settings};
use crate::driver::{Driver, may_be_captured};
use crate::error::DriverError;
use crate::stats::Statistics;
use crate::strategies::Strategy;
use crate::sync::{All, Global, Rank};
use crate::{layers, registry};

/// One allocator: current first, then retired, then dropped.
#[derive(Debug)]
pub(super) struct Generation {
    pub(super) strategy: Strategy,
    pub(super) name: &'static str,
    /// Whether it reserves from the driver's default memory pool, which other allocators use too.
    shares_pool: bool,
    /// Blocks that it has freed as a retired allocator since it last released its idle memory.
    frees: AtomicI64,
    /// Whether it may be dropped: when last checked it had drained, and released its memory or shared a
    /// driver pool.
    pub(super) is_released: AtomicBool,
}

impl Generation {
    /// Returns true if the strategy has no hooks.
    #[cold]
    #[inline(never)]
    pub(super) fn has_no_hooks(&self) -> bool {
        self.strategy.control().hooks.is_none()
    }

    /// Creates a generation. A strategy without counters is wrapped in the layer `statistics`. So is one
    /// with a `front` inside another layer: the counters below a `front` treat blocks cached by threads as
    /// live.
    pub(super) fn new(strategy: Strategy, settings: &Settings) -> Self {
        let mut inner = settings.layers.iter().skip(1);
        let fronts = inner.any(|layer| matches!(layer, LayerSetting::Front { .. }));
        let counts = strategy.control().counters.is_some() && !fronts;
        let strategy = if counts {
            strategy
        } else {
            Strategy::User(Box::new(layers::statistics::statistics(strategy)))
        };
        Self {
            name: intern(strategy.name()),
            strategy,
            shares_pool: registry::shares_pool(settings),
            frees: AtomicI64::new(0),
            is_released: AtomicBool::new(false),
        }
    }

    pub(super) fn counters(&self) -> Option<&dyn Counters> {
        self.strategy.control().counters
    }

    pub(super) fn statistics(&self) -> Statistics {
        self.counters().map(Counters::statistics).unwrap_or_default()
    }

    /// Returns the bytes it holds from the driver. In a shared driver pool these are the bytes of its
    /// own active blocks.
    pub(super) fn held_bytes(&self) -> u64 {
        let held = match self.shares_pool {
            true => self.statistics().active_bytes.all.current,
            false => self.strategy.usage().reserved_bytes,
        };
        u64::try_from(held).unwrap_or(0)
    }

    /// Returns figures of each allocator. The first one that uses the shared driver pool keeps the
    /// pool's figures; `off` removes them from the others.
    pub(super) fn counted_once<T>(
        all: &All<Self>,
        figures: impl Fn(&Self) -> T,
        off: impl Fn(&mut T),
    ) -> impl Iterator<Item = T> {
        let mut is_counted = false;
        all.iter().map(move |generation| {
            let mut own = figures(generation);
            if generation.shares_pool && std::mem::replace(&mut is_counted, true) {
                off(&mut own);
            }
            own
        })
    }

    /// Returns the number of blocks that callers hold, without those that threads cache in a `front`.
    pub(super) fn live_blocks(&self) -> i64 {
        let kept = match &self.strategy {
            Strategy::Fronted(front) => i64::try_from(front.totals().held_blocks).unwrap_or(0),
            _ => 0,
        };
        self.strategy.usage().live_blocks - kept
    }

    /// Counts a free by a retired allocator, which has `live` blocks left. Returns true if idle memory
    /// should be released: the frees since the last release are at least an eighth of `live`.
    pub(super) fn count_free(&self, live: i64) -> bool {
        (self.frees.fetch_add(1, Ordering::Relaxed) + 1).saturating_mul(8) >= live
    }

    /// Returns true if none of its blocks is live or waits for other streams.
    pub(super) fn has_drained(&self) -> bool {
        let Statistics { active, allocation, .. } = self.statistics();
        self.live_blocks() == 0 && active.all.current == allocation.all.current
    }

    /// Returns true if both reserve from the driver's default memory pool.
    pub(super) fn shares_with(&self, other: &Self) -> bool {
        self.shares_pool && other.shares_pool
    }

    pub(super) fn process_events(&self) -> Result<(), DriverError> {
        self.strategy.control().cross_stream.map_or(Ok(()), CrossStream::process_events)
    }

    /// Releases idle memory. May wait.
    pub(super) fn release_idle(&self) -> Result<(), DriverError> {
        self.frees.store(0, Ordering::Relaxed);
        self.strategy.control().caching.map_or(Ok(()), Caching::empty_cache)
    }

    /// Returns true if it holds memory of a stream that may be captured. It must not be dropped then.
    pub(super) fn holds_captured_memory(&self, driver: &dyn Driver) -> bool {
        let layout = self.strategy.control().caching.map(Caching::layout).unwrap_or_default();
        layout.iter().any(|segment| may_be_captured(driver, segment.stream))
    }
}

static NAMES: Global<Option<HashSet<&'static str>>> = Global::new(Rank::StrategyNames, None);

/// Returns the same text with static lifetime: callers may use the name after the allocator was dropped.
/// Each different name is leaked once.
fn intern(name: &str) -> &'static str {
    let mut names = NAMES.lock();
    let names = names.get_or_insert_default();
    if let Some(known) = names.get(name) {
        return known;
    }
    let kept: &'static str = Box::leak(name.to_owned().into_boxed_str());
    names.insert(kept);
    kept
}
