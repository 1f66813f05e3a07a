//! The changes of inactive splits that an allocation or a free makes, and how they reach the counters.

/// The change in the number and size of inactive splits: free blocks that are only a part of their
/// segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SplitChange {
    /// The change in their number.
    pub(crate) count: i64,
    /// The change in their total bytes.
    pub(crate) bytes: i64,
}

impl SplitChange {
    /// Returns the sum of two changes.
    #[must_use]
    pub(crate) const fn plus(self, other: Self) -> Self {
        Self { count: self.count + other.count, bytes: self.bytes + other.bytes }
    }
}

/// Counts a change in inactive splits of one kind of pool. A heap calls the function for its direction, so
/// that an inlined implementation need not test signs.
pub(crate) trait CountParts: Sized {
    /// The result of counting.
    type Counted;

    /// Counts `bytes` more in inactive splits. Their number changes by `count`.
    fn more(self, count: i64, bytes: u64) -> Self::Counted;

    /// Counts `bytes` less in inactive splits, whose number does not grow. It changes by `count`.
    fn less(self, count: i64, bytes: u64) -> Self::Counted;
}

/// Returns the change without counting it.
pub(super) struct Report;

impl CountParts for Report {
    type Counted = SplitChange;

    #[inline(always)]
    fn more(self, count: i64, bytes: u64) -> SplitChange {
        SplitChange { count, bytes: signed(bytes) }
    }

    #[inline(always)]
    fn less(self, count: i64, bytes: u64) -> SplitChange {
        SplitChange { count, bytes: -signed(bytes) }
    }
}

#[expect(clippy::cast_possible_wrap, reason = "segments are smaller than 2^63 bytes")]
#[inline]
fn signed(bytes: u64) -> i64 {
    bytes as i64
}
