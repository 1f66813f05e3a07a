//! Counters over all allocators: the current one, the retired ones and those that were dropped.
//!
//! Current values and totals are added up, so they are as exact as those of each allocator. **Peaks** are
//! reset at a switch. From then on a peak is the sum of the allocators' own peaks. It is never below the
//! true peak, and exceeds it by at most what retired allocators have freed since.

use crate::stats::{Statistics, Usage};

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
            sum.add(one);
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
        // The drop destroys its tags and its pools.
        last.paused_bytes = 0;
        last.reserved_by_pool.clear();
        for counter in last.counters_mut() {
            // The drop frees what `current` counts. Not all of that is in `allocated`, if the totals were
            // reset.
            let unfreed = counter.allocated.wrapping_sub(counter.freed).max(0);
            counter.freed = counter.freed.wrapping_add(counter.current.min(unfreed));
            counter.current = 0;
        }
        self.dropped.add(&last);
    }

    /// Counts refusals that no caller has seen.
    pub(super) fn hide_refusals(&mut self, refusals: i64) {
        self.hidden_refusals += refusals;
    }

    /// Resets the peaks.
    pub(super) fn reset_peaks(&mut self) {
        self.dropped.reset_peaks();
    }

    /// Resets the accumulated totals.
    pub(super) fn reset_accumulated(&mut self) {
        self.dropped.reset_accumulated();
        self.hidden_refusals = 0;
    }
}
