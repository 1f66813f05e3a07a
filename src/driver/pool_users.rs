//! Counts the users that need a driver pool to keep its memory.
//!
//! Several allocators may share one pool. Each sets the pool's release threshold to the maximum while
//! it uses the pool. The last one restores the threshold from before the first. This type calls no
//! driver: it returns the threshold that the caller has to set.

/// The number of users of one pool, and the threshold to restore.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolUsers {
    count: u64,
    /// The release threshold from before the first user.
    before_bytes: u64,
}

impl PoolUsers {
    /// Adds a user (`keep`) or removes one. `now_bytes` is the pool's present threshold. Returns the new
    /// value, and the threshold that the caller must set, if any. Returns `None` if there is no user to
    /// remove.
    pub fn after(self, keep: bool, now_bytes: u64) -> Option<(Self, Option<u64>)> {
        let Self { count, before_bytes } = self;
        match (keep, count) {
            (true, 0) => Some((Self { count: 1, before_bytes: now_bytes }, Some(u64::MAX))),
            // Set the threshold again: another library may have lowered it.
            (true, _) => Some((Self { count: count + 1, before_bytes }, Some(u64::MAX))),
            (false, 0) => None,
            (false, 1) => Some((Self::default(), Some(before_bytes))),
            (false, _) => Some((Self { count: count - 1, before_bytes }, None)),
        }
    }

    /// Returns whether there are no users.
    #[cfg(all(feature = "cuda", target_pointer_width = "64", unix))]
    pub fn is_empty(self) -> bool {
        self.count == 0
    }
}

/// The error message when there is no user to remove.
pub const NO_POOL_USER: &str = "this pool has no user to remove";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_user_restores_the_threshold_from_before_the_first() {
        let (one, set) = PoolUsers::default().after(true, 7).unwrap();
        assert_eq!(set, Some(u64::MAX));
        let (two, set) = one.after(true, u64::MAX).unwrap();
        assert_eq!(set, Some(u64::MAX));
        let (one, set) = two.after(false, u64::MAX).unwrap();
        assert_eq!(set, None);
        assert_eq!(one.after(false, u64::MAX), Some((PoolUsers::default(), Some(7))));
        assert_eq!(PoolUsers::default().after(false, 7), None);
    }
}
