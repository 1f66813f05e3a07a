//! A guard: while it lives, no scope (routing of requests to a private pool) is open and none opens.
//!
//! Retired allocators wait for the device and release memory only under this guard, because they have no
//! record of stream captures in the current allocator. A thread-local count shows whether the thread
//! holds a guard; such a thread never waits for the lock of the open scopes.

use std::cell::Cell;

use parking_lot::RecursiveRwLockReadGuard;

use super::core::ScopeCounts;

thread_local! {
    /// The number of guards that the thread holds.
    static HELD: Cell<usize> = const { Cell::new(0) };
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct NoScopes<'c> {
    _scopes: RecursiveRwLockReadGuard<'c, ScopeCounts>,
}

impl<'c> NoScopes<'c> {
    pub(super) fn new(scopes: RecursiveRwLockReadGuard<'c, ScopeCounts>) -> Self {
        HELD.set(HELD.get() + 1);
        Self { _scopes: scopes }
    }

    /// Returns true if the calling thread holds a guard, of any switchable allocator.
    pub(super) fn is_held_here() -> bool {
        HELD.get() > 0
    }
}

impl Drop for NoScopes<'_> {
    fn drop(&mut self) {
        HELD.set(HELD.get() - 1);
    }
}
