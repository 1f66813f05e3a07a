//! The counters and settings of a stream-ordered pool.

use super::{Done, State, invalid};
use stratalloc::driver::pool_users::{NO_POOL_USER, PoolUsers};
use stratalloc::driver::{DriverPoolId, DriverPoolUsage};

#[derive(Debug, Default)]
pub(super) struct PoolBooks {
    /// Calls that name the pool are refused. Its allocations can still be freed.
    pub(super) destroyed: bool,
    pub(super) threshold_bytes: u64,
    pool_users: PoolUsers,
    pub(super) usage: DriverPoolUsage,
}

impl PoolBooks {
    /// Counts allocated bytes.
    pub(super) fn allocate(&mut self, bytes: u64) {
        let usage = &mut self.usage;
        usage.used_bytes += bytes;
        usage.used_high_bytes = usage.used_high_bytes.max(usage.used_bytes);
    }

    /// Counts bytes reserved from the device.
    pub(super) fn grow(&mut self, bytes: u64) {
        let usage = &mut self.usage;
        usage.reserved_bytes += bytes;
        usage.reserved_high_bytes = usage.reserved_high_bytes.max(usage.reserved_bytes);
    }

    pub(super) fn reset_high_marks(&mut self) {
        self.usage.used_high_bytes = self.usage.used_bytes;
        self.usage.reserved_high_bytes = self.usage.reserved_bytes;
    }
}

/// The calls that use only a pool's counters and settings.
impl State {
    pub(super) fn set_release_threshold(&mut self, pool: DriverPoolId, bytes: u64) -> Done<()> {
        self.books(pool)?.threshold_bytes = bytes;
        Ok(())
    }

    pub(super) fn release_threshold(&mut self, pool: DriverPoolId) -> Done<u64> {
        Ok(self.books(pool)?.threshold_bytes)
    }

    pub(super) fn keep_memory(&mut self, pool: DriverPoolId, keep: bool) -> Done<()> {
        let books = self.books(pool)?;
        let changed = books.pool_users.after(keep, books.threshold_bytes);
        let (pool_users, set) = changed.ok_or_else(|| invalid(NO_POOL_USER))?;
        books.pool_users = pool_users;
        books.threshold_bytes = set.unwrap_or(books.threshold_bytes);
        Ok(())
    }

    /// Only checks that the pool exists: this device always reuses memory in the same way.
    pub(super) fn allow_reuse(&mut self, pool: DriverPoolId) -> Done<()> {
        self.books(pool).map(drop)
    }

    pub(super) fn usage(&mut self, pool: DriverPoolId) -> Done<DriverPoolUsage> {
        Ok(self.books(pool)?.usage)
    }

    pub(super) fn reset_high_marks(&mut self, pool: DriverPoolId) -> Done<()> {
        self.books(pool)?.reset_high_marks();
        Ok(())
    }
}
