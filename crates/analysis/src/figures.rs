//! Figures of a recording that need no replay.

use std::collections::HashMap;

use stratalloc::history::Action;
use stratalloc_recording::{Op, Trace, TraceEvent, Workload, reserved_before_and_peak};

/// Figures of the recorded program from the first recorded event on. Sizes are in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Reserved bytes when the recording began.
    pub reserved_before_bytes: u64,
    /// The peak of reserved bytes.
    pub peak_reserved_bytes: u64,
    /// The peak of allocated bytes, after rounding. Known only if an exact replay exists.
    pub peak_allocated_bytes: Option<u64>,
    /// The number of segments and mapped ranges that were allocated from the device.
    pub device_allocs: u64,
    /// The number of segments and mapped ranges that were released.
    pub device_frees: u64,
    /// The number of requests that failed.
    pub ooms: u64,
    /// How often all free segments were released to serve a request. Known only if an exact replay exists.
    pub retries: Option<u64>,
    /// Microseconds from the first event to the last, if the recording has times.
    pub duration_us: Option<u64>,
}

impl Figures {
    /// Computes the figures from the events and the final layout.
    #[must_use]
    pub fn of(trace: &Trace) -> Self {
        let (reserved_before_bytes, peak_reserved_bytes) =
            reserved_before_and_peak(&trace.segments, &trace.events);
        let count =
            |is_one: fn(&&TraceEvent) -> bool| trace.events.iter().filter(is_one).count() as u64;
        Self {
            reserved_before_bytes,
            peak_reserved_bytes,
            device_allocs: count(|event| event.reserved_change() > 0),
            device_frees: count(|event| event.reserved_change() < 0),
            ooms: trace.requests().filter(|e| e.action == Action::OutOfMemory).count() as u64,
            duration_us: duration_us(&trace.events),
            ..Self::default()
        }
    }
}

/// Returns the time from the first event with a time to the last, in microseconds.
fn duration_us(events: &[TraceEvent]) -> Option<u64> {
    let times = || events.iter().map(|event| event.time_us).filter(|time_us| *time_us > 0);
    Some(times().max()? - times().min()?)
}

/// Returns the peak of the sum of requested sizes of live blocks, including requests that failed in the
/// recording. A device needs at least this much memory. A freed block that other streams still use is
/// not counted: a request that finds no memory waits until those streams have finished.
pub(super) fn live_peak_bytes(workload: &Workload) -> u64 {
    let (mut live, mut peak) = (LiveSizes::default(), 0);
    for op in workload.ops.iter() {
        live.apply(op);
        let failing_bytes = match op {
            Op::AllocateFailing { bytes, .. } => bytes,
            _ => 0,
        };
        peak = peak.max(live.bytes.saturating_add(failing_bytes));
    }
    peak
}

/// Returns the blocks that live when the sum of their requested sizes is first at its peak: their numbers
/// and requested bytes. Requests that failed in the recording are not counted.
pub(super) fn live_at_peak(workload: &Workload) -> Vec<(u32, u64)> {
    let mut now = LiveSizes::default();
    let (mut peak_bytes, mut operations) = (0, 0);
    for (at, op) in workload.ops.iter().enumerate() {
        now.apply(op);
        if now.bytes > peak_bytes {
            (peak_bytes, operations) = (now.bytes, at + 1);
        }
    }
    let mut then = LiveSizes::default();
    workload.ops.range(0..operations).for_each(|op| then.apply(op));
    let mut live: Vec<(u32, u64)> = then.bytes_of.into_iter().collect();
    live.sort_unstable();
    live
}

/// The live blocks after some operations.
#[derive(Default)]
struct LiveSizes {
    /// The requested bytes of each live block, by its number.
    bytes_of: HashMap<u32, u64>,
    /// The requested bytes of all live blocks.
    bytes: u64,
}

impl LiveSizes {
    fn apply(&mut self, op: Op) {
        match op {
            Op::Allocate { id, bytes, .. } => {
                self.bytes_of.insert(id, bytes);
                self.bytes = self.bytes.saturating_add(bytes);
            }
            Op::Free { id } | Op::FreeInUse { id, .. } => {
                let bytes = self.bytes_of.remove(&id).unwrap_or(0);
                self.bytes = self.bytes.saturating_sub(bytes);
            }
            Op::AllocateFailing { .. } | Op::Finished { .. } | Op::EmptyCache => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stratalloc::history::SegmentLayout;
    use stratalloc::ids::{PoolId, StreamId};
    use stratalloc::size::{MIB, PoolKind};

    fn event(action: Action, address: u64, size_bytes: u64) -> TraceEvent {
        TraceEvent::new(action, address, size_bytes, StreamId(0))
    }

    #[test]
    fn what_was_held_before_is_found_from_the_end() {
        let segment = SegmentLayout {
            address: 64 * MIB,
            size_bytes: 20 * MIB,
            stream: StreamId(0),
            kind: PoolKind::Large,
            pool: PoolId::DEFAULT,
            expandable: false,
            asleep: false,
            blocks: Vec::new(),
        };
        let trace = Trace {
            events: vec![
                event(Action::SegmentFree, 0, 8 * MIB),
                event(Action::SegmentAlloc, 32 * MIB, 2 * MIB),
                event(Action::OutOfMemory, 0, 99 * MIB),
                event(Action::SegmentFree, 32 * MIB, 2 * MIB),
            ],
            segments: vec![segment],
            ..Trace::default()
        };
        let figures = Figures::of(&trace);
        assert_eq!(figures.reserved_before_bytes, 28 * MIB);
        assert_eq!(figures.peak_reserved_bytes, 28 * MIB);
        let counts = (figures.device_allocs, figures.device_frees, figures.ooms);
        assert_eq!(counts, (1, 2, 1));
        assert_eq!(figures.duration_us, None);
    }

    #[test]
    fn the_time_is_from_the_first_event_with_a_time_to_the_last() {
        let at = |time_us| TraceEvent { time_us, ..event(Action::Alloc, 0, 512) };
        let trace = Trace { events: vec![at(0), at(1_000), at(4_500)], ..Trace::default() };
        assert_eq!(Figures::of(&trace).duration_us, Some(3_500));
    }

    #[test]
    fn blocks_that_only_wait_for_others_are_not_needed() {
        let (stream, pool) = (StreamId(0), PoolId::DEFAULT);
        let take = |id, bytes| Op::Allocate { id, bytes, stream, pool };
        let ops = vec![
            take(0, 10),
            Op::FreeInUse { id: 0, lane: StreamId(9) },
            take(1, 6),
            Op::AllocateFailing { id: 2, bytes: 5, stream },
            Op::Finished { id: 0 },
            Op::Free { id: 1 },
        ];
        let workload = Workload { ops: ops.into(), blocks: 3, ..Workload::default() };
        assert_eq!(live_peak_bytes(&workload), 11);
    }
}
