//! Finds out whether a recording begins with no memory at all.
//!
//! The events are applied forward to no memory. If each agrees with those before it and they end with the
//! final layout, no memory existed before the first event. Nothing is then reconstructed backwards, where
//! the kind of unmapped pages can only be guessed (`start`).

use std::collections::{BTreeMap, HashSet};

use super::trace::Trace;
use stratalloc::history::{Action, BlockStateName};

/// Returns true if the events alone lead from no memory to the final layout.
pub(super) fn is_complete(trace: &Trace) -> bool {
    let mut reserved = Ranges::default();
    let mut live: HashSet<u64> = HashSet::new();
    let agree = trace.events.iter().all(|event| {
        let (start, end) = (event.address, event.address.saturating_add(event.size_bytes));
        match event.action {
            Action::SegmentAlloc | Action::SegmentMap => reserved.add(start, end),
            Action::SegmentFree | Action::SegmentUnmap => reserved.remove(start, end),
            Action::Alloc => live.insert(start),
            Action::FreeRequested => live.contains(&start),
            Action::FreeCompleted => live.remove(&start),
            Action::Snapshot | Action::OutOfMemory | Action::TagPause | Action::TagResume => true,
        }
    });
    let mut last = Ranges::default();
    let tiled = |(start, bytes): (u64, u64)| last.add(start, start.saturating_add(bytes));
    let blocks = trace.segments.iter().flat_map(|segment| &segment.blocks);
    let mut in_use = blocks.filter(|block| block.state != BlockStateName::Inactive);
    agree
        && trace.segments.iter().map(|s| (s.address, s.size_bytes)).all(tiled)
        && last == reserved
        && in_use.all(|block| live.remove(&block.address))
        && live.is_empty()
}

/// Address ranges that do not overlap: the end of each, by its start. Adjacent ranges are joined.
#[derive(Debug, Default, PartialEq, Eq)]
struct Ranges {
    ends: BTreeMap<u64, u64>,
}

impl Ranges {
    /// Adds a range. Returns false if it is empty or part of it was there already.
    fn add(&mut self, mut start: u64, mut end: u64) -> bool {
        let below = self.ends.range(..end).next_back().map(|(start, end)| (*start, *end));
        if start >= end || below.is_some_and(|(_, below_end)| below_end > start) {
            return false;
        }
        if let Some((below_start, below_end)) = below
            && below_end == start
        {
            start = below_start;
        }
        if let Some(above_end) = self.ends.remove(&end) {
            end = above_end;
        }
        self.ends.insert(start, end);
        true
    }

    /// Removes a range. Returns false if part of it was not there.
    fn remove(&mut self, start: u64, end: u64) -> bool {
        let within = self.ends.range(..=start).next_back().map(|(start, end)| (*start, *end));
        let Some((first, last)) = within.filter(|(_, last)| *last >= end) else {
            return false;
        };
        self.ends.remove(&first);
        for (start, end) in [(first, start), (end, last)] {
            if start < end {
                self.ends.insert(start, end);
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_joined_and_cut() {
        let mut ranges = Ranges::default();
        assert!(ranges.add(0, 10) && ranges.add(20, 30) && ranges.add(10, 20));
        assert_eq!(ranges.ends, BTreeMap::from([(0, 30)]));
        assert!(!ranges.add(29, 40) && !ranges.add(30, 30) && !ranges.remove(20, 31));
        assert!(ranges.remove(5, 25));
        assert_eq!(ranges.ends, BTreeMap::from([(0, 5), (25, 30)]));
        assert!(!ranges.remove(4, 6) && !ranges.remove(10, 11) && !ranges.add(4, 6));
        assert!(!ranges.add(5, 40), "it contains another range");
    }
}
