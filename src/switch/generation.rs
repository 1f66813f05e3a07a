//! One of the allocators that follow each other, with what its retirement needs.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering, fence};

use crate::allocator::{Caching, Counters, DeviceAllocator};
use crate::config::{LayerSetting, Settings};
use crate::driver::{Driver, may_be_captured};
use crate::layers;
use crate::registry;
use crate::stats::Statistics;
use crate::strategies::Strategy;
use crate::sync::{All, Global, Rank};

/// One allocator. Current first, then retired, then gone.
#[derive(Debug)]
pub(super) struct Generation {
    pub(super) strategy: Strategy,
    pub(super) name: &'static str,
    /// Whether what it reserves is also reserved by others like it: the driver's default pool.
    shares_pool: bool,
    retired: AtomicBool,
    /// So many more frees until somebody looks whether it has drained.
    look_in: AtomicI64,
    /// Whether it may have drained since somebody looked, or somebody was inside when it had.
    pub(super) wants_look: AtomicBool,
    /// Whether an eighth of its blocks was freed since idle memory was last given back.
    pub(super) is_due: AtomicBool,
}

impl Generation {
    /// An allocator that counts. One that does not wears the layer `statistics`; so does one with a
    /// `front` inside, whose counters below take what threads keep for live blocks.
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
            look_in: AtomicI64::new(0),
            wants_look: AtomicBool::new(false),
            is_due: AtomicBool::new(false),
        }
    }

    #[inline]
    pub(super) fn is_retired(&self) -> bool {
        self.retired.load(Ordering::Relaxed)
    }

    /// It is replaced.
    pub(super) fn retire(&self) {
        self.retired.store(true, Ordering::SeqCst);
    }

    pub(super) fn counters(&self) -> Option<&dyn Counters> {
        self.strategy.control().counters
    }

    pub(super) fn statistics(&self) -> Statistics {
        self.counters().map(Counters::statistics).unwrap_or_default()
    }

    /// What it alone holds from the driver; of a pool that others use too, what its blocks take.
    pub(super) fn held_bytes(&self) -> u64 {
        if !self.shares_pool {
            return self.reserved_bytes();
        }
        u64::try_from(self.statistics().active_bytes.all.current).unwrap_or(0)
    }

    /// What it has reserved; of a pool that others use too, all of it.
    pub(super) fn reserved_bytes(&self) -> u64 {
        u64::try_from(self.statistics().reserved_bytes.all.current).unwrap_or(0)
    }

    /// Figures of each of these. What several reserve together is counted with the first, and taken `off`
    /// the others.
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

    /// Blocks in callers' hands, given its statistics: without those that threads keep in a front.
    pub(super) fn live_blocks(&self, statistics: &Statistics) -> i64 {
        let kept = match &self.strategy {
            Strategy::Fronted(front) => i64::try_from(front.totals().held_blocks).unwrap_or(0),
            _ => 0,
        };
        statistics.allocation.all.current - kept
    }

    /// Counts a free of a retired one; true when it is time to look.
    pub(super) fn freed_one(&self) -> bool {
        self.look_in.fetch_sub(1, Ordering::AcqRel) <= 1
    }

    /// Sets the next look for when an eighth of the live blocks has been freed. Returns how many are live,
    /// and how many wait for other streams.
    pub(super) fn await_frees(&self) -> (i64, i64) {
        let count = || {
            let statistics = self.statistics();
            let waiting = statistics.active.all.current - statistics.allocation.all.current;
            (self.live_blocks(&statistics), waiting)
        };
        let (mut live, _) = count();
        loop {
            let frees = (live / 8).max(1);
            self.look_in.store(frees, Ordering::SeqCst);
            fence(Ordering::SeqCst);
            // Frees from before the store are not counted down. As many as it waits for must be left.
            let (now, waiting) = count();
            if now >= frees || now == live {
                return (now, waiting);
            }
            live = now;
        }
    }

    /// Whether somebody wants it looked at; once. Who asks looks then.
    pub(super) fn wants_look_now(&self) -> bool {
        self.wants_look.swap(false, Ordering::SeqCst)
    }

    /// Whether both reserve from the driver's default pool.
    pub(super) fn shares_with(&self, other: &Self) -> bool {
        self.shares_pool && other.shares_pool
    }

    /// Gives idle memory back. May wait. False when a driver that fails now keeps some; it is asked again
    /// later.
    pub(super) fn give_idle_back(&self) -> bool {
        self.is_due.store(false, Ordering::Relaxed);
        let refused =
            self.strategy.control().caching.is_some_and(|caching| caching.empty_cache().is_err());
        if refused {
            self.is_due.store(true, Ordering::Relaxed);
        }
        !refused
    }

    /// Whether a stream that is being captured may use what it holds: that is given back later.
    pub(super) fn is_captures(&self, driver: &dyn Driver) -> bool {
        let layout = self.strategy.control().caching.map(Caching::layout).unwrap_or_default();
        layout.iter().any(|segment| may_be_captured(driver, segment.stream))
    }
}

static NAMES: Global<Option<HashSet<&'static str>>> = Global::new(Rank::StrategyNames, None);

/// The same text, living as long as the process: names are handed out as references and must outlive
/// the allocators that have them. There are as many as there are different names.
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
