//! The difference between the resources that a driver has allocated and those it should have, as text.

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
    for (what, beyond) in [
        ("still held are", beyond(after, before)),
        ("not held any more are", beyond(before, after)),
    ] {
        if !beyond.is_empty() {
            return Err(format!("the allocator is dropped; {what} {beyond}"));
        }
    }
    Ok(())
}

/// Lists the ranges and counts that `own` has and `other` lacks.
fn beyond(own: &HeldResources, other: &HeldResources) -> String {
    let mut words = Vec::new();
    for (name, own, other) in [
        ("segments", &own.segments, &other.segments),
        ("address ranges", &own.reservations, &other.reservations),
        ("mapped pieces", &own.mapped, &other.mapped),
    ] {
        let ranges: Vec<_> = own.iter().filter(|range| !other.contains(range)).collect();
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
    for (name, own, other) in [
        ("physical pieces", own.pieces, other.pieces),
        ("ranges of pools", own.pool_ranges, other.pool_ranges),
        ("bytes of pinned memory", own.pinned_bytes, other.pinned_bytes),
        ("events", own.events, other.events),
    ] {
        if own > other {
            words.push(format!("{name}: {}", own - other));
        }
    }
    words.join("; ")
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
