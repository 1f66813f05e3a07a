//! The difference between the resources that a driver has allocated and those it should have, as text.

use std::fmt;

use super::Checked;
use stratalloc_sim::HeldResources;

/// The maximum number of ranges of one kind that are listed.
const NAMED_MAX: usize = 4;

/// Checks that after the allocator was dropped the driver holds the same resources as before it was
/// built.
///
/// # Errors
///
/// The ranges still held, or else those that are missing.
pub(super) fn all_came_back(before: &HeldResources, after: &HeldResources) -> Checked {
    let (more, less) = (Beside(after, before), Beside(before, after));
    match (before == after, more.is_nothing()) {
        (true, _) => Ok(()),
        (false, false) => Err(format!("the allocator is dropped; still held are {more}")),
        (false, true) => Err(format!("the allocator is dropped; not held any more are {less}")),
    }
}

/// The name of a kind of range, and the start and size in bytes of each range.
type Ranges = (&'static str, Vec<(u64, u64)>);

/// The ranges and counts that the first value has and the second lacks.
struct Beside<'h>(&'h HeldResources, &'h HeldResources);

impl Beside<'_> {
    fn ranges(&self) -> [Ranges; 3] {
        let Self(own, other) = self;
        let only = |own: &[(u64, u64)], other: &[(u64, u64)]| -> Vec<(u64, u64)> {
            own.iter().filter(|range| !other.contains(range)).copied().collect()
        };
        [
            ("segments", only(&own.segments, &other.segments)),
            ("address ranges", only(&own.reservations, &other.reservations)),
            ("mapped pieces", only(&own.mapped, &other.mapped)),
        ]
    }

    /// Returns the names and numbers of resources that have no ranges.
    fn counts(&self) -> [(&'static str, u64); 3] {
        let Self(own, other) = self;
        [
            ("physical pieces", own.pieces.saturating_sub(other.pieces)),
            ("ranges of pools", own.pool_ranges.saturating_sub(other.pool_ranges)),
            ("events", own.events.saturating_sub(other.events)),
        ]
    }

    fn is_nothing(&self) -> bool {
        self.ranges().iter().all(|(_, ranges)| ranges.is_empty())
            && self.counts().iter().all(|(_, count)| *count == 0)
    }
}

impl fmt::Display for Beside<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut words = Vec::new();
        for (name, ranges) in self.ranges() {
            if ranges.is_empty() {
                continue;
            }
            let named = ranges.iter().take(NAMED_MAX);
            let mut named: Vec<_> =
                named.map(|(start, bytes)| format!("{bytes} bytes at {start:#x}")).collect();
            if ranges.len() > NAMED_MAX {
                named.push("...".to_owned());
            }
            words.push(format!("{name}: {} ({})", ranges.len(), named.join(", ")));
        }
        let counts = self.counts().into_iter().filter(|(_, count)| *count > 0);
        words.extend(counts.map(|(name, count)| format!("{name}: {count}")));
        f.write_str(&words.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leaks_are_listed_with_hexadecimal_addresses() {
        let kept = (0x7f00_0000_0000, 512);
        let before = HeldResources { segments: vec![kept], events: 2, ..HeldResources::default() };
        assert_eq!(all_came_back(&before, &before), Ok(()));
        let lost = (1..=5).map(|n| (kept.0 + n * 0x1000, 4096));
        let segments = std::iter::once(kept).chain(lost).collect();
        let after = HeldResources { segments, events: 3, ..HeldResources::default() };
        let message = all_came_back(&before, &after).unwrap_err();
        assert_eq!(
            message,
            "the allocator is dropped; still held are segments: 5 (4096 bytes at 0x7f0000001000, 4096 bytes at \
             0x7f0000002000, 4096 bytes at 0x7f0000003000, 4096 bytes at 0x7f0000004000, ...); \
             events: 1"
        );
        let message = all_came_back(&after, &before).unwrap_err();
        assert!(
            message.starts_with("the allocator is dropped; not held any more are segments: 5 ("),
            "{message}"
        );
    }
}
