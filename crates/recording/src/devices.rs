//! The devices of one process, or the ranks of one job, compared: which of them to look at first.
//!
//! [`DeviceFigures::order`] is the only place that chooses. The reader takes the first device of this order
//! if the caller names none; commands show all devices, and a sweep its ranks, in this order.

use std::cmp::Reverse;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::trace::{Trace, TraceEvent};
use stratalloc::history::{Action, BlockStateName, SegmentLayout};

/// The figures of one device by which devices are compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DeviceFigures {
    /// The number of the device.
    pub device: u32,
    /// The number of recorded events.
    pub events: u64,
    /// Whether only the memory at the end is known: fewer than two requests were recorded, and memory existed
    /// before them.
    #[serde(default)]
    pub is_end_only: bool,
    /// The peak of reserved bytes, or those at the end if only these are known.
    pub reserved_peak_bytes: u64,
    /// The peak of live bytes, as requested, or those at the end if only these are known.
    pub live_peak_bytes: u64,
    /// The number of requests that failed.
    pub failures: u64,
    /// The time of the first of them, in microseconds on the recorded machine's clock; `null` if none failed
    /// or no time was recorded.
    pub first_failure_us: Option<u64>,
}

impl DeviceFigures {
    /// Computes the figures of a recording.
    #[must_use]
    pub fn of(trace: &Trace) -> Self {
        let mut survey = Survey::default();
        trace.each_event().for_each(|e| survey.see(e.action, e.size_bytes, e.time_us));
        let mut end = EndBytes::default();
        trace.segments.iter().for_each(|segment| end.add(segment));
        survey.finish(trace.device, end)
    }

    /// Returns the key by which devices are sorted: those with events, of these the one that failed first,
    /// then those with a history, then those with the most reserved bytes.
    #[must_use]
    pub fn order(&self) -> impl Ord + use<> {
        let first_failure_us = self.first_failure_us.unwrap_or(u64::MAX);
        let bytes = Reverse((self.reserved_peak_bytes, self.live_peak_bytes));
        (
            self.events == 0,
            self.failures == 0,
            first_failure_us,
            self.is_end_only,
            bytes,
            self.device,
        )
    }
}

/// The bytes of a device at the end of a recording.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct EndBytes {
    pub(super) reserved: u64,
    live: u64,
}

impl EndBytes {
    pub(super) fn add(&mut self, segment: &SegmentLayout) {
        self.reserved = self.reserved.saturating_add(segment.size_bytes);
        let live = segment.blocks.iter().filter(|b| b.state == BlockStateName::ActiveAllocated);
        self.live = live.fold(self.live, |sum, block| sum.saturating_add(block.requested_bytes));
    }

    pub(super) fn plus(self, other: Self) -> Self {
        let reserved = self.reserved.saturating_add(other.reserved);
        Self { reserved, live: self.live.saturating_add(other.live) }
    }
}

/// Bytes since the first event, relative to those before it, and their peak.
#[derive(Clone, Copy, Debug, Default)]
struct Course {
    now: i128,
    peak: i128,
}

impl Course {
    fn add(&mut self, bytes: i128) {
        self.now += bytes;
        self.peak = self.peak.max(self.now);
    }

    /// Returns the bytes before the first event, and the peak, if `end_bytes` are left at the end.
    fn before_and_peak(self, end_bytes: u64) -> (u64, u64) {
        // The difference is negative if the file lacks segments that its events allocate.
        let before = (i128::from(end_bytes) - self.now).max(0);
        let whole = |bytes: i128| u64::try_from(bytes).unwrap_or(u64::MAX);
        (whole(before), whole(before + self.peak))
    }
}

/// Returns the reserved bytes before the first event, and their peak. `segments` are those at the end.
pub fn reserved_before_and_peak(segments: &[SegmentLayout], events: &[TraceEvent]) -> (u64, u64) {
    let mut reserved = Course::default();
    events.iter().for_each(|event| reserved.add(event.reserved_change()));
    let end_bytes = segments.iter().map(|segment| segment.size_bytes);
    reserved.before_and_peak(end_bytes.fold(0, u64::saturating_add))
}

/// Computes the figures of a device from its events, one by one.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Survey {
    figures: DeviceFigures,
    reserved: Course,
    /// The live bytes, and the same if a block is live until its free completes.
    live: Course,
    live_until_completed: Course,
    has_free_requests: bool,
    requests: u64,
}

impl Survey {
    pub(super) fn see(&mut self, action: Action, size_bytes: u64, time_us: u64) {
        let bytes = i128::from(size_bytes);
        self.figures.events += 1;
        match action {
            Action::SegmentAlloc | Action::SegmentMap => self.reserved.add(bytes),
            Action::SegmentFree | Action::SegmentUnmap => self.reserved.add(-bytes),
            Action::Alloc => {
                self.requests += 1;
                self.live.add(bytes);
                self.live_until_completed.add(bytes);
            }
            Action::FreeRequested => {
                self.has_free_requests = true;
                self.live.add(-bytes);
            }
            Action::FreeCompleted => self.live_until_completed.add(-bytes),
            Action::OutOfMemory => {
                self.requests += 1;
                let figures = &mut self.figures;
                figures.failures += 1;
                if figures.failures == 1 && time_us > 0 {
                    figures.first_failure_us = Some(time_us);
                }
            }
            _ => {}
        }
    }

    pub(super) fn finish(self, device: u32, end: EndBytes) -> DeviceFigures {
        // A recorder may leave out the requests of frees.
        let live = if self.has_free_requests { self.live } else { self.live_until_completed };
        let (reserved_before, reserved_peak) = self.reserved.before_and_peak(end.reserved);
        let (live_before, live_peak) = live.before_and_peak(end.live);
        let is_end_only = match self.requests {
            0 => true,
            1 => reserved_before > 0 || live_before > 0,
            _ => false,
        };
        let [reserved_peak_bytes, live_peak_bytes] = match is_end_only {
            true => [end.reserved, end.live],
            false => [reserved_peak, live_peak],
        };
        DeviceFigures { device, is_end_only, reserved_peak_bytes, live_peak_bytes, ..self.figures }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_device_that_failed_first_is_first_and_then_the_one_with_the_most_reserved_bytes() {
        let of = |device, reserved_peak_bytes, failures, first_failure_us| DeviceFigures {
            device,
            events: 10,
            reserved_peak_bytes,
            failures,
            first_failure_us,
            ..DeviceFigures::default()
        };
        let mut devices = [
            of(0, 10, 0, None),
            of(1, 90, 0, None),
            of(2, 20, 1, Some(700)),
            of(3, 30, 4, Some(500)),
            DeviceFigures { events: 0, ..of(4, 1000, 0, None) },
            of(5, 95, 2, None),
            DeviceFigures { is_end_only: true, ..of(6, 1000, 0, None) },
        ];
        devices.sort_by_key(DeviceFigures::order);
        assert_eq!(devices.map(|one| one.device), [3, 2, 5, 1, 0, 6, 4]);
    }
}
