//! Calls trackers (user code) for memory that is allocated from the driver or released to it.
//!
//! The growth lock is released during the call, so that a tracker may use the allocator. During the call
//! the memory is in no heap, or withheld from allocation in its heap, so no other thread can use it. Its
//! pool is marked as busy and cannot be removed. The state behind the lock is consistent at these points,
//! as it is when a miss calls a pool's own allocator. Values read from it before the call may be out of
//! date afterwards.

use parking_lot::MutexGuard;

use super::cell::HeapCell;
use super::engine::{Engine, event};
use super::growth::Growth;
use crate::history::Action;

impl Engine {
    /// Calls the trackers. If there are none, returns at once without releasing the growth lock.
    pub(super) fn announce(
        &self,
        growth: &mut MutexGuard<'_, Growth>,
        action: Action,
        address: u64,
        size_bytes: u64,
        cell: &HeapCell,
    ) {
        if !self.history.has_trackers() {
            return;
        }
        let pool = cell.pool();
        let event = event(action, address, size_bytes, cell);
        growth.pools.set_busy(pool, true);
        growth.announcing += 1;
        MutexGuard::unlocked(growth, || self.history.announce(event));
        growth.announcing -= 1;
        growth.pools.set_busy(pool, false);
        self.announced.notify_all();
    }

    /// Waits until no thread is calling trackers in `announce`. Returns true if it had to wait. Inside a
    /// tracker it returns false at once: `announcing` may include this thread's own call, which cannot
    /// end while it waits.
    pub(super) fn wait_for_announced(&self, growth: &mut MutexGuard<'_, Growth>) -> bool {
        if growth.announcing == 0 || self.history.is_in_tracker() {
            return false;
        }
        self.announced.wait_while(growth, |growth| growth.announcing > 0);
        true
    }
}
