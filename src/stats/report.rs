//! The statistics that users read: all counters of `torch.cuda.memory_stats()` and the most important
//! values.

use std::fmt::Write as _;

use crate::ids::PoolId;
use crate::size::{PoolKind, human_bytes};

/// One counter. `current = allocated - freed` unless accumulated values were reset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counter {
    /// The current value.
    pub current: i64,
    /// The highest value since the start or the last reset of peaks.
    pub peak: i64,
    /// The sum of all increases, modulo 2^64.
    pub allocated: i64,
    /// The sum of all decreases, modulo 2^64.
    pub freed: i64,
}

/// Converts a number of bytes to the type of the counters.
pub(crate) fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

impl Counter {
    /// Increases the counter by `n`, which is not negative.
    pub fn increase(&mut self, n: i64) {
        self.current += n;
        // Sums of bytes can exceed 2^63.
        self.allocated = self.allocated.wrapping_add(n);
        self.peak = self.peak.max(self.current);
    }

    /// Decreases the counter by `n`, which is not negative.
    pub fn decrease(&mut self, n: i64) {
        self.current -= n;
        self.freed = self.freed.wrapping_add(n);
    }

    /// Sets the peak to the current value.
    fn reset_peak(&mut self) {
        self.peak = self.current;
    }

    /// Sets the sums to zero.
    fn reset_accumulated(&mut self) {
        (self.allocated, self.freed) = (0, 0);
    }

    /// Adds another counter, including its peak.
    pub(crate) fn add(&mut self, other: &Self) {
        self.current += other.current;
        self.peak += other.peak;
        self.allocated = self.allocated.wrapping_add(other.allocated);
        self.freed = self.freed.wrapping_add(other.freed);
    }
}

/// A counter for each kind of pool and for all pools.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PerPool {
    /// All pools. The peak is that of the sum, not the sum of the peaks.
    pub all: Counter,
    /// Large pools.
    pub large: Counter,
    /// Small pools.
    pub small: Counter,
}

impl PerPool {
    /// Increases the counter of a kind, and that of all pools, by `n`, which is not negative.
    pub fn increase(&mut self, kind: PoolKind, n: i64) {
        self.all.increase(n);
        self.of_kind(kind).increase(n);
    }

    /// Decreases the counter of a kind, and that of all pools, by `n`, which is not negative.
    pub fn decrease(&mut self, kind: PoolKind, n: i64) {
        self.all.decrease(n);
        self.of_kind(kind).decrease(n);
    }

    /// Adds the counters of another allocator, including peaks.
    pub(crate) fn add(&mut self, other: &Self) {
        self.all.add(&other.all);
        self.large.add(&other.large);
        self.small.add(&other.small);
    }

    fn of_kind(&mut self, kind: PoolKind) -> &mut Counter {
        match kind {
            PoolKind::Small => &mut self.small,
            PoolKind::Large => &mut self.large,
        }
    }

    fn counters(&mut self) -> [&mut Counter; 3] {
        [&mut self.all, &mut self.large, &mut self.small]
    }

    /// Sets the peaks to the current values.
    pub fn reset_peaks(&mut self) {
        self.counters().into_iter().for_each(Counter::reset_peak);
    }

    /// Sets the sums to zero.
    pub fn reset_accumulated(&mut self) {
        self.counters().into_iter().for_each(Counter::reset_accumulated);
    }
}

/// Declares [`Statistics`]. The group of a field decides how sums and resets treat it, so none is left out.
macro_rules! statistics {
    (
        families { $($(#[$family_doc:meta])* $family:ident,)+ }
        counters { $($(#[$counter_doc:meta])* $counter:ident,)+ }
        events { $($(#[$event_doc:meta])* $event:ident: $event_type:ty,)+ }
        amounts { $($(#[$amount_doc:meta])* $amount:ident: $amount_type:ty,)+ }
        others { $($(#[$other_doc:meta])* $other:ident: $other_type:ty = $default:expr,)+ }
    ) => {
        /// All counters of an allocator at one moment. Sizes are in bytes.
        ///
        /// Source of names and meanings: PyTorch's `torch.cuda.memory_stats()`.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct Statistics {
            $($(#[$family_doc])* pub $family: PerPool,)+
            $($(#[$counter_doc])* pub $counter: Counter,)+
            $($(#[$event_doc])* pub $event: $event_type,)+
            $($(#[$amount_doc])* pub $amount: $amount_type,)+
            $($(#[$other_doc])* pub $other: $other_type,)+
        }

        impl Default for Statistics {
            fn default() -> Self {
                Self {
                    $($family: PerPool::default(),)+
                    $($counter: Counter::default(),)+
                    $($event: 0,)+
                    $($amount: 0,)+
                    $($other: $default,)+
                }
            }
        }

        const FAMILIES: usize = [$(stringify!($family)),+].len();

        impl Statistics {
            /// Returns the families: the counters kept for each kind of pool. Keys and fields have the same
            /// names.
            #[doc(hidden)]
            pub fn families(&self) -> [(&'static str, &PerPool); FAMILIES] {
                [$((stringify!($family), &self.$family)),+]
            }

            /// Returns every counter.
            pub(crate) fn counters_mut(&mut self) -> impl Iterator<Item = &mut Counter> {
                let families = [$(&mut self.$family),+].into_iter().flat_map(PerPool::counters);
                families.chain([$(&mut self.$counter),+])
            }

            /// Sets the sums of all counters and the numbers of events to zero.
            pub(crate) fn reset_accumulated(&mut self) {
                self.counters_mut().for_each(Counter::reset_accumulated);
                $(self.$event = 0;)+
                self.own.iter_mut().for_each(|own| own.count = 0);
            }

            /// Adds the statistics of another allocator, including peaks, but not its `max_split_size`.
            pub(crate) fn add(&mut self, other: &Self) {
                $(self.$family.add(&other.$family);)+
                $(self.$counter.add(&other.$counter);)+
                $(self.$event += other.$event;)+
                $(self.$amount += other.$amount;)+
                self.add_lists(other);
            }
        }
    };
}

statistics! {
    families {
        /// Live blocks, and freed blocks that wait for other streams.
        active,
        /// Bytes of live blocks, and of freed blocks that wait for other streams.
        active_bytes,
        /// Bytes of live blocks.
        allocated_bytes,
        /// Live blocks: allocated and not freed.
        allocation,
        /// Free parts of split fixed segments.
        inactive_split,
        /// Bytes of free parts of split fixed segments.
        inactive_split_bytes,
        /// Requested bytes of active blocks.
        requested_bytes,
        /// Bytes reserved from the driver.
        reserved_bytes,
        /// Fixed segments currently allocated from the driver.
        segment,
    }
    counters {
        /// Live blocks of at least `max_split_size`.
        oversize_allocations,
        /// Segments of at least `max_split_size`.
        oversize_segments,
    }
    events {
        /// Final attempts of requests after the cache was emptied.
        num_alloc_retries: i64,
        /// Failed requests.
        num_ooms: i64,
        /// Requests that `throw_on_cudamalloc_oom` rejected before the driver was called. Not among the keys
        /// of the PyTorch version whose recordings are verified.
        num_oom_rejections: i64,
        /// How often the allocator waited for the pending events of all streams.
        num_sync_all_streams: i64,
        /// Segments allocated from the driver, and ranges mapped.
        num_device_alloc: i64,
        /// Segments released to the driver, and ranges unmapped.
        num_device_free: i64,
        /// Requests served by a cached block.
        hits: u64,
        /// Requests that needed more than a search of the cache.
        misses: u64,
    }
    amounts {
        /// The number of free blocks.
        free_blocks: u64,
        /// Bytes of tags whose memory a pause released and no resume has mapped since. They are not reserved.
        paused_bytes: u64,
    }
    others {
        /// `max_split_size_mb`, in bytes, when the allocator was built; -1 for unlimited.
        max_split_size: i64 = -1,
        /// Bytes reserved from the driver by each private pool, in no order; pools that never reserved any
        /// are left out. A pool that no longer exists is listed with a current value of 0 until peaks and
        /// sums are reset. Not among the keys of the PyTorch version whose recordings are verified.
        reserved_by_pool: Vec<(PoolId, PerPool)> = Vec::new(),
        /// Counters that only this strategy has. Their names begin with a word for the strategy and a dot.
        own: Vec<OwnCounter> = Vec::new(),
    }
}

/// The most frequently read counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// The number of live blocks.
    pub live_blocks: i64,
    /// Bytes of live blocks.
    pub allocated_bytes: i64,
    /// The peak of these bytes since the start or the last reset of peaks.
    pub allocated_peak_bytes: i64,
    /// Bytes reserved from the driver.
    pub reserved_bytes: i64,
    /// The peak of these bytes since the start or the last reset of peaks.
    pub reserved_peak_bytes: i64,
}

impl Usage {
    /// Returns these counters of `statistics`.
    #[must_use]
    pub fn of(statistics: &Statistics) -> Self {
        Self {
            live_blocks: statistics.allocation.all.current,
            allocated_bytes: statistics.memory_allocated(),
            allocated_peak_bytes: statistics.max_memory_allocated(),
            reserved_bytes: statistics.memory_reserved(),
            reserved_peak_bytes: statistics.max_memory_reserved(),
        }
    }

    /// Returns the sums of two allocators' counters.
    #[must_use]
    pub(crate) fn plus(self, other: Self) -> Self {
        Self {
            live_blocks: self.live_blocks + other.live_blocks,
            allocated_bytes: self.allocated_bytes + other.allocated_bytes,
            allocated_peak_bytes: self.allocated_peak_bytes + other.allocated_peak_bytes,
            reserved_bytes: self.reserved_bytes + other.reserved_bytes,
            reserved_peak_bytes: self.reserved_peak_bytes + other.reserved_peak_bytes,
        }
    }
}

/// A counter that only one strategy has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnCounter {
    /// Letters, digits, dots and underscores, for example `malloc_async.deferred_frees`.
    pub name: &'static str,
    /// The number of events since the start or the last reset.
    pub count: i64,
}

impl Statistics {
    /// Sets the peaks of all counters to the current values.
    pub(crate) fn reset_peaks(&mut self) {
        self.counters_mut().for_each(Counter::reset_peak);
    }

    /// Adds the counters of pools and of strategies.
    fn add_lists(&mut self, other: &Self) {
        for (pool, reserved) in &other.reserved_by_pool {
            match self.reserved_by_pool.iter_mut().find(|(known, _)| known == pool) {
                Some((_, known)) => known.add(reserved),
                None => self.reserved_by_pool.push((*pool, *reserved)),
            }
        }
        for own in &other.own {
            match self.own.iter_mut().find(|known| known.name == own.name) {
                Some(known) => known.count += own.count,
                None => self.own.push(*own),
            }
        }
    }

    /// Counts an allocated block of `bytes`.
    #[inline]
    pub(crate) fn count_alloc(&mut self, kind: PoolKind, bytes: i64) {
        self.allocation.increase(kind, 1);
        self.allocated_bytes.increase(kind, bytes);
    }

    /// Counts a freed block of `bytes`.
    #[inline]
    pub(crate) fn count_free(&mut self, kind: PoolKind, bytes: i64) {
        self.allocation.decrease(kind, 1);
        self.allocated_bytes.decrease(kind, bytes);
    }

    /// Returns the bytes of live blocks.
    #[must_use]
    pub fn memory_allocated(&self) -> i64 {
        self.allocated_bytes.all.current
    }

    /// Returns the peak of the bytes of live blocks.
    #[must_use]
    pub fn max_memory_allocated(&self) -> i64 {
        self.allocated_bytes.all.peak
    }

    /// Returns the bytes reserved from the driver.
    #[must_use]
    pub fn memory_reserved(&self) -> i64 {
        self.reserved_bytes.all.current
    }

    /// Returns the peak of the bytes reserved from the driver.
    #[must_use]
    pub fn max_memory_reserved(&self) -> i64 {
        self.reserved_bytes.all.peak
    }

    /// Returns the cached bytes of one kind; 0 if concurrent changes make the difference negative.
    #[must_use]
    pub(crate) fn cached_bytes_of(&self, kind: PoolKind) -> u64 {
        let (reserved, active) = match kind {
            PoolKind::Small => (self.reserved_bytes.small, self.active_bytes.small),
            PoolKind::Large => (self.reserved_bytes.large, self.active_bytes.large),
        };
        u64::try_from(reserved.current - active.current).unwrap_or(0)
    }

    /// Returns the reserved bytes that no active block covers. Blocks of tags that sleep are active but not
    /// reserved, so the result is too low then, and never below 0.
    #[must_use]
    pub fn cached_bytes(&self) -> i64 {
        (self.reserved_bytes.all.current - self.active_bytes.all.current).max(0)
    }

    /// Returns all keys of `torch.cuda.memory_stats()` with their values, sorted by name.
    #[must_use]
    pub fn pytorch_keys(&self) -> Vec<(String, i64)> {
        let mut keys = Vec::with_capacity(122);
        for (name, family) in self.families() {
            push_family(&mut keys, name, family);
        }
        push_counter(&mut keys, "oversize_allocations", self.oversize_allocations);
        push_counter(&mut keys, "oversize_segments", self.oversize_segments);
        let alone = [
            ("max_split_size", self.max_split_size),
            ("num_alloc_retries", self.num_alloc_retries),
            ("num_device_alloc", self.num_device_alloc),
            ("num_device_free", self.num_device_free),
            ("num_ooms", self.num_ooms),
            ("num_sync_all_streams", self.num_sync_all_streams),
        ];
        keys.extend(alone.map(|(name, value)| (name.to_owned(), value)));
        keys.sort();
        keys
    }

    /// Returns [`pytorch_keys`](Self::pytorch_keys), then the other counters that all strategies have,
    /// then the strategy's [own](Self::own) counters.
    #[must_use]
    pub fn keys(&self) -> Vec<(String, i64)> {
        let mut keys = self.pytorch_keys();
        let besides = [
            ("free_blocks", self.free_blocks.cast_signed()),
            ("hits", self.hits.cast_signed()),
            ("misses", self.misses.cast_signed()),
            ("num_oom_rejections", self.num_oom_rejections),
            ("paused_bytes", self.paused_bytes.cast_signed()),
        ];
        keys.extend(besides.map(|(name, value)| (name.to_owned(), value)));
        for (pool, reserved) in &self.reserved_by_pool {
            let PoolId { capture, user } = pool;
            let family = format!("reserved_bytes_by_private_pools.{capture}_{user}");
            push_family(&mut keys, &family, reserved);
        }
        keys.extend(self.own.iter().map(|own| (own.name.to_owned(), own.count)));
        keys
    }

    /// Returns a table for display. Of the strategy's own counters it has those that are not zero.
    #[must_use]
    pub fn summary(&self) -> String {
        let mut text = String::new();
        let line = |text: &mut String, name: &str, cells: [String; 4]| {
            // Writing to a String cannot fail.
            let _ = writeln!(
                text,
                "{name:<24}{:>14}{:>14}{:>14}{:>14}",
                cells[0], cells[1], cells[2], cells[3]
            );
        };
        line(&mut text, "", ["current", "peak", "allocated", "freed"].map(str::to_owned));
        for (name, family) in self.families() {
            let bytes = name.ends_with("_bytes");
            for (pool, c) in [("", family.all), (" large", family.large), (" small", family.small)]
            {
                let cells = [c.current, c.peak, c.allocated, c.freed].map(|n| {
                    if bytes { human_bytes(n.max(0).unsigned_abs()) } else { n.to_string() }
                });
                line(&mut text, &format!("{name}{pool}"), cells);
            }
        }
        let _ = writeln!(
            text,
            "hits {}  misses {}  retries {}  out of memory {}  device allocations {}  frees {}",
            self.hits,
            self.misses,
            self.num_alloc_retries,
            self.num_ooms,
            self.num_device_alloc,
            self.num_device_free
        );
        for own in self.own.iter().filter(|own| own.count != 0) {
            let _ = writeln!(text, "{} {}", own.name, own.count);
        }
        text
    }
}

fn push_family(keys: &mut Vec<(String, i64)>, name: &str, family: &PerPool) {
    for (pool, counter) in
        [("all", family.all), ("large_pool", family.large), ("small_pool", family.small)]
    {
        push_counter(keys, &format!("{name}.{pool}"), counter);
    }
}

fn push_counter(keys: &mut Vec<(String, i64)>, name: &str, counter: Counter) {
    keys.push((format!("{name}.allocated"), counter.allocated));
    keys.push((format!("{name}.current"), counter.current));
    keys.push((format!("{name}.freed"), counter.freed));
    keys.push((format!("{name}.peak"), counter.peak));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_122_pytorch_keys_each_once() {
        let keys = Statistics::default().pytorch_keys();
        assert_eq!(keys.len(), 122);
        assert!(keys.windows(2).all(|pair| pair[0].0 < pair[1].0));
    }

    #[test]
    fn a_strategys_own_counters_are_listed_after_pytorchs() {
        let own = vec![
            OwnCounter { name: "mine.never", count: 0 },
            OwnCounter { name: "mine.rare", count: 3 },
        ];
        let statistics = Statistics { own, ..Statistics::default() };
        let keys = statistics.keys();
        assert_eq!(keys[..122], statistics.pytorch_keys());
        let behind: Vec<_> = keys[122..].iter().map(|(name, value)| (&**name, *value)).collect();
        let of_all = ["free_blocks", "hits", "misses", "num_oom_rejections", "paused_bytes"]
            .map(|name| (name, 0));
        assert_eq!(behind[..5], of_all);
        assert_eq!(behind[5..], [("mine.never", 0), ("mine.rare", 3)]);
        let text = statistics.summary();
        assert!(text.ends_with("\nmine.rare 3\n") && !text.contains("never"), "{text}");
    }

    #[test]
    fn sums_and_resets_visit_every_counter() {
        let counter = Counter { current: 1, peak: 2, allocated: 3, freed: 2 };
        let mut sum = Statistics::default();
        sum.counters_mut().for_each(|each| *each = counter);
        // Everything but the families and the counters, in a fixed order.
        let others = |of: &Statistics| {
            let numbers = of.keys().into_iter().filter(|(key, _)| !key.contains('.'));
            numbers.filter(|(key, _)| key != "max_split_size").map(|(_, n)| n).collect::<Vec<_>>()
        };
        (sum.num_alloc_retries, sum.num_ooms, sum.num_oom_rejections) = (1, 1, 1);
        (sum.num_sync_all_streams, sum.num_device_alloc, sum.num_device_free) = (1, 1, 1);
        (sum.hits, sum.misses, sum.free_blocks, sum.paused_bytes) = (1, 1, 1, 1);
        sum.own = vec![OwnCounter { name: "mine.rare", count: 1 }];
        sum.reserved_by_pool = vec![(PoolId { capture: 0, user: 7 }, PerPool::default())];
        sum.add(&sum.clone());
        let twice = Counter { current: 2, peak: 4, allocated: 6, freed: 4 };
        assert!(sum.counters_mut().all(|each| *each == twice));
        assert_eq!(sum.counters_mut().count() * 4, 116, "the PyTorch keys of counters");
        assert_eq!(others(&sum), [2; 10]);
        assert_eq!((sum.own[0].count, sum.own.len(), sum.reserved_by_pool.len()), (2, 1, 1));
        sum.reset_accumulated();
        sum.reset_peaks();
        let reset = Counter { current: 2, peak: 2, allocated: 0, freed: 0 };
        assert!(sum.counters_mut().all(|each| *each == reset));
        assert_eq!(others(&sum).iter().sum::<i64>(), 4, "only amounts are left");
        assert_eq!(sum.own[0].count, 0);
    }

    #[test]
    fn a_counter_remembers_its_peak_and_its_sums() {
        let mut counter = Counter::default();
        counter.increase(5);
        counter.decrease(3);
        counter.increase(1);
        assert_eq!(counter, Counter { current: 3, peak: 5, allocated: 6, freed: 3 });
    }
}
