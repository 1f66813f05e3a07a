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
        self.counters().into_iter().for_each(|counter| counter.peak = counter.current);
    }

    /// Sets the sums to zero.
    pub fn reset_accumulated(&mut self) {
        self.counters().into_iter().for_each(|counter| (counter.allocated, counter.freed) = (0, 0));
    }
}

/// All counters of an allocator at one moment. Sizes are in bytes.
///
/// Source of names and meanings: PyTorch's `torch.cuda.memory_stats()`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Statistics {
    /// Live blocks: allocated and not freed.
    pub allocation: PerPool,
    /// Fixed segments currently allocated from the driver.
    pub segment: PerPool,
    /// Live blocks, and freed blocks that wait for other streams.
    pub active: PerPool,
    /// Free parts of split fixed segments.
    pub inactive_split: PerPool,
    /// Bytes of live blocks.
    pub allocated_bytes: PerPool,
    /// Bytes reserved from the driver.
    pub reserved_bytes: PerPool,
    /// Bytes of live blocks, and of freed blocks that wait for other streams.
    pub active_bytes: PerPool,
    /// Bytes of free parts of split fixed segments.
    pub inactive_split_bytes: PerPool,
    /// Requested bytes of active blocks.
    pub requested_bytes: PerPool,
    /// Live blocks of at least `max_split_size`.
    pub oversize_allocations: Counter,
    /// Segments of at least `max_split_size`.
    pub oversize_segments: Counter,
    /// Final attempts of requests after the cache was emptied.
    pub num_alloc_retries: i64,
    /// Failed requests.
    pub num_ooms: i64,
    /// Requests that `throw_on_cudamalloc_oom` rejected before the driver was called. Not among the keys
    /// of the PyTorch version whose recordings are verified.
    pub num_oom_rejections: i64,
    /// How often the allocator waited for the pending events of all streams.
    pub num_sync_all_streams: i64,
    /// Segments allocated from the driver, and ranges mapped.
    pub num_device_alloc: i64,
    /// Segments released to the driver, and ranges unmapped.
    pub num_device_free: i64,
    /// `max_split_size_mb`, in bytes, when the allocator was built; -1 for unlimited.
    pub max_split_size: i64,
    /// Requests served by a cached block.
    pub hits: u64,
    /// Requests that needed more than a search of the cache.
    pub misses: u64,
    /// The number of free blocks.
    pub free_blocks: u64,
    /// Bytes of tags whose memory a pause released and no resume has mapped since. They are not reserved.
    pub paused_bytes: u64,
    /// Bytes reserved from the driver by each private pool, in no order; pools that never reserved any
    /// are left out. A pool that no longer exists is listed with a current value of 0 until peaks and
    /// sums are reset. Not among the keys of the PyTorch version whose recordings are verified.
    pub reserved_by_pool: Vec<(PoolId, PerPool)>,
    /// Counters that only this strategy has. Their names begin with a word for the strategy and a dot.
    pub own: Vec<OwnCounter>,
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

impl Default for Statistics {
    fn default() -> Self {
        Self {
            allocation: PerPool::default(),
            segment: PerPool::default(),
            active: PerPool::default(),
            inactive_split: PerPool::default(),
            allocated_bytes: PerPool::default(),
            reserved_bytes: PerPool::default(),
            active_bytes: PerPool::default(),
            inactive_split_bytes: PerPool::default(),
            requested_bytes: PerPool::default(),
            oversize_allocations: Counter::default(),
            oversize_segments: Counter::default(),
            num_alloc_retries: 0,
            num_ooms: 0,
            num_oom_rejections: 0,
            num_sync_all_streams: 0,
            num_device_alloc: 0,
            num_device_free: 0,
            max_split_size: -1,
            hits: 0,
            misses: 0,
            free_blocks: 0,
            paused_bytes: 0,
            reserved_by_pool: Vec::new(),
            own: Vec::new(),
        }
    }
}

/// The families of counters of `$of`, each with its name.
macro_rules! families {
    ($($of:tt)+) => {
        [
            ("active", $($of)+.active),
            ("active_bytes", $($of)+.active_bytes),
            ("allocated_bytes", $($of)+.allocated_bytes),
            ("allocation", $($of)+.allocation),
            ("inactive_split", $($of)+.inactive_split),
            ("inactive_split_bytes", $($of)+.inactive_split_bytes),
            ("requested_bytes", $($of)+.requested_bytes),
            ("reserved_bytes", $($of)+.reserved_bytes),
            ("segment", $($of)+.segment),
        ]
    };
}

impl Statistics {
    fn families_mut(&mut self) -> [(&'static str, &mut PerPool); 9] {
        families!(&mut self)
    }

    /// Sets the peaks of the families to the current values.
    pub(crate) fn reset_peaks(&mut self) {
        self.families_mut().into_iter().for_each(|(_, family)| family.reset_peaks());
    }

    /// Sets the sums of the families and the numbers of events to zero.
    pub(crate) fn reset_accumulated(&mut self) {
        self.families_mut().into_iter().for_each(|(_, family)| family.reset_accumulated());
        (self.hits, self.misses) = (0, 0);
        (self.num_alloc_retries, self.num_ooms, self.num_sync_all_streams) = (0, 0, 0);
        (self.num_device_alloc, self.num_device_free) = (0, 0);
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

    /// Returns the families: the counters kept for each kind of pool. Keys and fields have the same
    /// names.
    #[doc(hidden)]
    pub fn families(&self) -> [(&'static str, &PerPool); 9] {
        families!(&self)
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
    fn a_counter_remembers_its_peak_and_its_sums() {
        let mut counter = Counter::default();
        counter.increase(5);
        counter.decrease(3);
        counter.increase(1);
        assert_eq!(counter, Counter { current: 3, peak: 5, allocated: 6, freed: 3 });
    }
}
