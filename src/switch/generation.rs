//! One allocator of a switchable allocator, current or retired, with the state that its retirement
//! needs.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering, fence};

use crate::allocator::{Caching, Counters, DeviceAllocator};
use crate::config::{LayerSetting, Settings};
use crate::driver::{Driver, may_be_captured};
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
    retired: AtomicBool,
    /// A check whether it has drained follows after this number of further frees.
    frees_until_check: AtomicI64,
    /// Whether a check is requested: it may have drained, or a call prevented its drop.
    pub(super) check_requested: AtomicBool,
    /// Whether an eighth of its blocks was freed since idle memory was last released.
    pub(super) needs_release: AtomicBool,
}

impl Generation {
    /// Creates an allocator that counts. One without counters is wrapped in the layer `statistics`. So
    /// is one with a `front` inside another layer: the counters below a `front` treat blocks cached by
    /// threads as live.
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
            retired: AtomicBool::new(false),
            frees_until_check: AtomicI64::new(0),
            check_requested: AtomicBool::new(false),
            needs_release: AtomicBool::new(false),
        }
    }

    #[inline]
    pub(super) fn is_retired(&self) -> bool {
        self.retired.load(Ordering::Relaxed)
    }

    /// Marks it as replaced.
    pub(super) fn retire(&self) {
        self.retired.store(true, Ordering::SeqCst);
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
        if !self.shares_pool {
            return self.reserved_bytes();
        }
        u64::try_from(self.statistics().active_bytes.all.current).unwrap_or(0)
    }

    /// Returns the bytes it has reserved. In a shared driver pool this is the whole pool.
    pub(super) fn reserved_bytes(&self) -> u64 {
        u64::try_from(self.statistics().reserved_bytes.all.current).unwrap_or(0)
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

    /// Returns the number of blocks in callers' hands, without those that threads cache in a `front`.
    pub(super) fn live_blocks(&self, statistics: &Statistics) -> i64 {
        let kept = match &self.strategy {
            Strategy::Fronted(front) => i64::try_from(front.totals().held_blocks).unwrap_or(0),
            _ => 0,
        };
        statistics.allocation.all.current - kept
    }

    /// Counts a free; returns true when it is time for a check.
    pub(super) fn count_free(&self) -> bool {
        self.frees_until_check.fetch_sub(1, Ordering::AcqRel) <= 1
    }

    /// Schedules the next check for when an eighth of the live blocks has been freed. Returns the number
    /// of live blocks, and of blocks that wait for other streams.
    pub(super) fn await_frees(&self) -> (i64, i64) {
        let count = || {
            let statistics = self.statistics();
            let waiting = statistics.active.all.current - statistics.allocation.all.current;
            (self.live_blocks(&statistics), waiting)
        };
        let (mut live, _) = count();
        loop {
            let frees = (live / 8).max(1);
            self.frees_until_check.store(frees, Ordering::SeqCst);
            fence(Ordering::SeqCst);
            // Frees before the store did not decrement the new value. If fewer than `frees` live blocks
            // remain, it would never reach 0. So the number of live blocks is read again.
            let (now, waiting) = count();
            if now >= frees || now == live {
                return (now, waiting);
            }
            live = now;
        }
    }

    /// Returns true if a check is requested, and clears the request. The caller must then check.
    pub(super) fn take_check_request(&self) -> bool {
        self.check_requested.swap(false, Ordering::SeqCst)
    }

    /// Returns true if both reserve from the driver's default memory pool.
    pub(super) fn shares_with(&self, other: &Self) -> bool {
        self.shares_pool && other.shares_pool
    }

    /// Releases idle memory. May wait. Returns false if the driver refused some of it; a later call
    /// tries again.
    pub(super) fn release_idle(&self) -> bool {
        self.needs_release.store(false, Ordering::Relaxed);
        let refused =
            self.strategy.control().caching.is_some_and(|caching| caching.empty_cache().is_err());
        if refused {
            self.needs_release.store(true, Ordering::Relaxed);
        }
        !refused
    }

    /// Returns true if a stream under capture may use memory it holds; that memory is released later.
    pub(super) fn holds_captured_memory(&self, driver: &dyn Driver) -> bool {
        let layout = self.strategy.control().caching.map(Caching::layout).unwrap_or_default();
        layout.iter().any(|segment| may_be_captured(driver, segment.stream))
    }
}

static NAMES: Global<Option<HashSet<&'static str>>> = Global::new(Rank::StrategyNames, None);

/// Returns the same text with static lifetime: callers hold names longer than the allocator lives. Each
/// different name is leaked once.
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
