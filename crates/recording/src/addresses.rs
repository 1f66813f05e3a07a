//! The addresses that the simulated driver returns in a replay: the recorded ones, in recorded order.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;

use super::trace::{Trace, TraceEvent};
use stratalloc::history::{Action, SegmentLayout};
use stratalloc::size::SMALL_SEGMENT_BYTES;

/// Returns the recorded address ranges of `action` in order, after those in `before`, which are older than
/// the first event. Each recorded range has the key of its heap ([`heap_of`]).
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

/// An address distance: more than the memory of any device, and a multiple of every allocation granularity.
const BEYOND_BYTES: u64 = 1 << 44;

/// Returns the addresses of the recorded segments, and a last one far above all of them. The last one
/// serves a replay that allocates one segment more than was recorded.
pub(super) fn starts(segments: &[(Range<u64>, Option<u64>)]) -> Vec<u64> {
    let mut starts: Vec<_> = segments.iter().map(|(segment, _)| segment.start).collect();
    let highest = starts.iter().max().copied().unwrap_or_default();
    starts.extend(highest.checked_add(BEYOND_BYTES).map(|far| far & !(BEYOND_BYTES - 1)));
    starts
}

/// Returns a key for an event's heap: a hash of stream, pool (if recorded) and kind (small or large).
pub(super) fn heap_of(event: &TraceEvent, is_small: bool) -> u64 {
    let mut hasher = DefaultHasher::new();
    (event.stream, event.named_pool(), is_small).hash(&mut hasher);
    hasher.finish()
}

/// Returns the address ranges held at the start of a recording: the fixed segments, or with `expandable`
/// each reservation from its first to its last mapped page.
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
