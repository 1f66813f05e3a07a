//! Lists of free ranges. `sim` uses them for addresses, and `host` for the file that backs physical memory.

use std::collections::BTreeMap;

/// Start and size of each free range. No two ranges are adjacent.
#[derive(Debug, Default)]
pub(super) struct FreeRanges(BTreeMap<u64, u64>);

impl FreeRanges {
    /// Allocates the first bytes of the lowest range that is large enough, and returns their start.
    pub(super) fn take(&mut self, size_bytes: u64) -> Option<u64> {
        let (&start, &free_bytes) = self.0.iter().find(|(_, free)| **free >= size_bytes)?;
        self.0.remove(&start);
        if free_bytes > size_bytes {
            self.0.insert(start + size_bytes, free_bytes - size_bytes);
        }
        Some(start)
    }

    /// Adds a range and coalesces it with adjacent ranges. Returns start and end of the resulting range.
    pub(super) fn give(&mut self, start: u64, size_bytes: u64) -> (u64, u64) {
        let below = self.0.range(..start).next_back();
        let joined = below.filter(|(below, free)| *below + *free == start);
        let (first, end) = (joined.map_or(start, |(below, _)| *below), start + size_bytes);
        let end = end + self.0.remove(&end).unwrap_or(0);
        self.0.insert(first, end - first);
        (first, end)
    }

    /// Removes the range that starts at `start`.
    pub(super) fn remove(&mut self, start: u64) {
        self.0.remove(&start);
    }
}
