//! Counters over all allocators: the current one, the retired ones and those that were dropped.
//!
//! Current values and totals are added up, so they are as exact as those of each allocator. **Peaks** are
//! reset at a switch. From then on a peak is the sum of the allocators' own peaks. It is never below the
//! true peak, and exceeds it by at most what retired allocators have freed since.

use crate::stats::{Counter, PerPool, Statistics, Usage};

/// The counters of dropped allocators.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    /// Totals of dropped allocators, and their peaks since the last switch.
    dropped: Statistics,
    /// Refusals that a retry followed. The allocators counted them, but no caller saw them.
    hidden_refusals: i64,
}

impl Ledger {
    /// Returns the sum of all counters, given those of each living allocator. `max_split_size` is taken
    /// from the first, the current allocator.
    pub(super) fn sum(&self, all: &[Statistics]) -> Statistics {
        let mut sum = self.dropped.clone();
        for one in all {
            add(&mut sum, one);
        }
        sum.num_ooms = (sum.num_ooms - self.hidden_refusals).max(0);
        sum.max_split_size = all.first().map_or(-1, |current| current.max_split_size);
        sum
    }

    /// Returns `all`, the usage of the living allocators, increased by that of the dropped ones.
    pub(super) fn add_usage(&self, all: Usage) -> Usage {
        Usage::of(&self.dropped).plus(all)
    }

    /// Adds the last counters of an allocator that is being dropped.
    pub(super) fn add_dropped(&mut self, last: &Statistics) {
        let mut last = last.clone();
        // The drop releases its cached segments.
        last.num_device_free += last.segment.all.current;
        last.free_blocks = 0;
        // The drop destroys its pools.
        last.reserved_by_pool.clear();
        for counter in counters(&mut last) {
            // The drop frees what `current` counts. Not all of that is in `allocated`, if the totals were
            // reset.
            let unfreed = counter.allocated.wrapping_sub(counter.freed).max(0);
            counter.freed = counter.freed.wrapping_add(counter.current.min(unfreed));
            counter.current = 0;
        }
        add(&mut self.dropped, &last);
    }

    /// Counts refusals that no caller has seen.
    pub(super) fn hide_refusals(&mut self, refusals: i64) {
        self.hidden_refusals += refusals;
    }

    /// Resets the peaks.
    pub(super) fn reset_peaks(&mut self) {
        counters(&mut self.dropped).into_iter().for_each(|counter| counter.peak = 0);
    }

    /// Resets the accumulated totals.
    pub(super) fn reset_accumulated(&mut self) {
        let mut ended = std::mem::take(&mut self.dropped);
        for (kept, ended) in counters(&mut self.dropped).into_iter().zip(counters(&mut ended)) {
            // Keep the peaks, which are not totals.
            kept.peak = ended.peak;
        }
        self.hidden_refusals = 0;
    }
}

/// Adds every figure that can be added, peaks included.
fn add(sum: &mut Statistics, one: &Statistics) {
    for (sum, one) in counters(sum).into_iter().zip(counters(&mut one.clone())) {
        sum.add(one);
    }
    sum.num_alloc_retries += one.num_alloc_retries;
    sum.num_ooms += one.num_ooms;
    sum.num_oom_rejections += one.num_oom_rejections;
    sum.num_sync_all_streams += one.num_sync_all_streams;
    sum.num_device_alloc += one.num_device_alloc;
    sum.num_device_free += one.num_device_free;
    sum.hits += one.hits;
    sum.misses += one.misses;
    sum.free_blocks += one.free_blocks;
    sum.paused_bytes += one.paused_bytes;
    for (pool, reserved) in &one.reserved_by_pool {
        match sum.reserved_by_pool.iter_mut().find(|(known, _)| known == pool) {
            Some((_, known)) => known.add(reserved),
            None => sum.reserved_by_pool.push((*pool, *reserved)),
        }
    }
    for own in &one.own {
        match sum.own.iter_mut().find(|known| known.name == own.name) {
            Some(known) => known.count += own.count,
            None => sum.own.push(*own),
        }
    }
}

/// Returns every counter, in a fixed order.
fn counters(statistics: &mut Statistics) -> [&mut Counter; 29] {
    let Statistics {
        allocation: PerPool { all: a, large: b, small: c },
        segment: PerPool { all: d, large: e, small: f },
        active: PerPool { all: g, large: h, small: i },
        inactive_split: PerPool { all: j, large: k, small: l },
        allocated_bytes: PerPool { all: m, large: n, small: o },
        reserved_bytes: PerPool { all: p, large: q, small: r },
        active_bytes: PerPool { all: s, large: t, small: u },
        inactive_split_bytes: PerPool { all: v, large: w, small: x },
        requested_bytes: PerPool { all: y, large: z, small: aa },
        oversize_allocations: ab,
        oversize_segments: ac,
        ..
    } = statistics;
    [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t, u, v, w, x, y, z, aa, ab, ac]
}
