//! Calls of trackers for memory that comes from the driver or goes back.
//!
//! The growth lock is released during the call, so that a tracker may use the allocator. The memory is in no
//! heap then, or held in its heap, so no other thread can reach it, and its pool is busy and stays. The state
//! behind the lock is whole at these points, as it is when a miss waits for a pool's own allocator.
//! Everything read from it before the call may be out of date afterwards.

use parking_lot::MutexGuard;

use super::cell::HeapCell;
use super::engine::{Engine, event};
use super::growth::Growth;
use crate::history::Action;

impl Engine {
    /// Calls the trackers. Returns at once, with the lock held throughout, if there are none.
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

    /// Waits until the memory that other threads announce can serve requests or has gone back, if there is
    /// any. False at once if there is none, and inside a tracker, where two threads would wait for each
    /// other.
    pub(super) fn wait_for_announced(&self, growth: &mut MutexGuard<'_, Growth>) -> bool {
        if growth.announcing == 0 || self.history.is_in_tracker() {
            return false;
        }
        self.announced.wait_while(growth, |growth| growth.announcing > 0);
        true
    }
}
