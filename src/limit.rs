//! A limit on the bytes that an allocator may hold, and the bytes charged to it.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::size::{FractionRounding, limit_of_fraction};

/// The value that means no limit.
const NONE: u64 = u64::MAX;

/// A limit, and the bytes charged to it. Uses atomic values and no lock.
#[derive(Debug)]
pub(crate) struct Limit {
    most_bytes: AtomicU64,
    charged_bytes: AtomicU64,
}

/// Bytes that are charged to the limit until this value is dropped.
#[derive(Debug)]
pub(crate) struct Charge<'l> {
    limit: &'l Limit,
    bytes: u64,
}

impl Limit {
    /// Returns a value without a limit, with nothing charged.
    pub(crate) const fn none() -> Self {
        Self { most_bytes: AtomicU64::new(NONE), charged_bytes: AtomicU64::new(0) }
    }

    /// Returns the limit in bytes, if there is one.
    #[inline]
    pub(crate) fn get(&self) -> Option<u64> {
        let most = self.most_bytes.load(Ordering::Relaxed);
        (most != NONE).then_some(most)
    }

    /// Sets the limit in bytes, or removes it. Releases no memory.
    pub(crate) fn set(&self, most_bytes: Option<u64>) {
        self.most_bytes.store(most_bytes.unwrap_or(NONE), Ordering::Relaxed);
    }

    /// Sets the limit to a fraction in [0, 1] of a device. 1 removes the limit.
    pub(crate) fn set_fraction(&self, fraction: f64, total_bytes: u64, rounding: FractionRounding) {
        self.set(limit_of_fraction(fraction, total_bytes, rounding));
    }

    /// Returns the bytes that can still be charged.
    pub(crate) fn room_bytes(&self) -> u64 {
        let most = self.most_bytes.load(Ordering::Relaxed);
        most.saturating_sub(self.charged_bytes.load(Ordering::Relaxed))
    }

    /// Charges bytes that are about to be allocated. Returns `None` if they would exceed the limit.
    pub(crate) fn charge(&self, bytes: u64) -> Option<Charge<'_>> {
        let most = self.most_bytes.load(Ordering::Relaxed);
        let grown = |charged: u64| charged.checked_add(bytes).filter(|charged| *charged <= most);
        let charged = self.charged_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, grown);
        charged.ok().map(|_| Charge { limit: self, bytes })
    }

    /// Returns the charge for bytes that [`Charge::keep`] left charged. Dropping it ends the charge.
    pub(crate) fn kept(&self, bytes: u64) -> Charge<'_> {
        Charge { limit: self, bytes }
    }
}

impl Charge<'_> {
    /// Leaves the bytes charged, because the allocator holds them from now on.
    pub(crate) fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for Charge<'_> {
    fn drop(&mut self) {
        self.limit.charged_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn charges_end_with_their_values_unless_they_are_kept() {
        let limit = Limit::none();
        limit.set(Some(10));
        let first = limit.charge(6).expect("it fits");
        assert!(limit.charge(5).is_none());
        first.keep();
        drop(limit.charge(4).expect("it fits exactly"));
        assert!(limit.charge(5).is_none(), "what was kept still counts");
        drop(limit.kept(6));
        assert!(limit.charge(10).is_some());
        limit.set(None);
        assert!(limit.charge(u64::MAX).is_some());
    }
}
