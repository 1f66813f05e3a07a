//! Addresses that the driver of a replay returns: the recorded ones, in recorded order.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;

use super::trace::{Trace, TraceEvent};
use stratalloc::history::{Action, SegmentLayout};
use stratalloc::size::SMALL_SEGMENT_BYTES;

/// Returns the recorded segments or mappings in order, those that existed before the first event first.
pub(super) fn ranges(
    trace: &Trace,
    action: Action,
    before: Vec<Range<u64>>,
) -> Vec<(Range<u64>, Option<u64>)> {
    let events = trace.events.iter().filter(|e| e.action == action);
    let ranges = events.map(|e| {
        let is_small = e.size_bytes <= SMALL_SEGMENT_BYTES;
        (e.address..e.address.saturating_add(e.size_bytes), Some(heap_of(e, is_small)))
    });
    before.into_iter().map(|range| (range, None)).chain(ranges).collect()
}

/// More than the memory of any device, and a multiple of every granularity.
const BEYOND_BYTES: u64 = 1 << 44;

/// Returns the addresses of the recorded segments, and one more far behind them all. A request that
/// grows past the recording gets that last address from the device, which may be as full as the recorded
/// one.
pub(super) fn starts(segments: &[(Range<u64>, Option<u64>)]) -> Vec<u64> {
    let mut starts: Vec<_> = segments.iter().map(|(segment, _)| segment.start).collect();
    let highest = starts.iter().max().copied().unwrap_or_default();
    starts.extend(highest.checked_add(BEYOND_BYTES).map(|far| far & !(BEYOND_BYTES - 1)));
    starts
}

/// Returns a key for the heap of an event: stream, pool (if the recording has pools) and kind.
pub(super) fn heap_of(event: &TraceEvent, is_small: bool) -> u64 {
    let mut hasher = DefaultHasher::new();
    (event.stream, event.named_pool(), is_small).hash(&mut hasher);
    hasher.finish()
}

/// Returns the fixed segments of a start; for expandable ones the reservations, up to their last mapped
/// page.
pub(super) fn held(
    layout: &[SegmentLayout],
    expandable: bool,
    total_bytes: u64,
) -> Vec<Range<u64>> {
    let groups = stratalloc::strategies::native::groups(layout, total_bytes);
    let of_kind = groups.filter(|group| group[0].expandable == expandable);
    let end = |last: &SegmentLayout| last.address + last.size_bytes;
    of_kind.map(|group| group[0].address..end(group[group.len() - 1])).collect()
}
