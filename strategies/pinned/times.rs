//! The times of the driver's calls that allocate and free memory.

use std::time::Duration;

use crate::stats::OwnCounter;

/// The times of one kind of call, in microseconds.
#[derive(Clone, Copy, Debug, Default)]
struct CallTimes {
    total: i64,
    max: i64,
    min: i64,
    count: i64,
}

impl CallTimes {
    fn add(&mut self, time: Duration) {
        let us = i64::try_from(time.as_micros()).unwrap_or(i64::MAX);
        self.min = if self.min == 0 { us } else { self.min.min(us) };
        self.max = self.max.max(us);
        self.total = self.total.saturating_add(us);
        self.count += 1;
    }
}

/// The times of all calls.
///
/// Source of the values, and of the rules for their resets: PyTorch's `host_memory_stats`.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Times {
    allocate: CallTimes,
    free: CallTimes,
    /// The number of failures that `pinned_free_catch_all` ignored.
    ignored: i64,
}

impl Times {
    pub(super) fn allocated(&mut self, time: Duration) {
        self.allocate.add(time);
    }

    pub(super) fn freed(&mut self, time: Duration) {
        self.free.add(time);
    }

    pub(super) fn ignored(&mut self) {
        self.ignored += 1;
    }

    /// Returns the values as counters with names.
    pub(super) fn own(&self) -> Vec<OwnCounter> {
        let Self { allocate, free, ignored } = *self;
        let counter = |(name, count)| OwnCounter { name, count };
        let named = [
            ("pinned.allocate_us.total", allocate.total),
            ("pinned.allocate_us.max", allocate.max),
            ("pinned.allocate_us.min", allocate.min),
            ("pinned.allocate_us.count", allocate.count),
            ("pinned.free_us.total", free.total),
            ("pinned.free_us.max", free.max),
            ("pinned.free_us.min", free.min),
            ("pinned.free_us.count", free.count),
            ("pinned.ignored_failures", ignored),
        ];
        named.map(counter).to_vec()
    }

    pub(super) fn reset_peaks(&mut self) {
        for times in [&mut self.allocate, &mut self.free] {
            (times.max, times.min) = (0, 0);
        }
    }

    pub(super) fn reset_accumulated(&mut self) {
        for times in [&mut self.allocate, &mut self.free] {
            (times.total, times.count) = (0, 0);
        }
        self.ignored = 0;
    }
}
