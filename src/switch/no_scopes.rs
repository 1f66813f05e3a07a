//! A guard: while it lives, no scope is open and none opens.
//!
//! Retired allocators wait for the device and release memory only under this guard, because they have no
//! record of stream captures in the current allocator. A thread-local count shows whether the thread
//! holds a guard; such a thread never waits for the gate. The gate guards no data.

use std::cell::Cell;

use parking_lot::RwLockReadGuard;

thread_local! {
    /// The number of guards that the thread holds.
    static HELD: Cell<usize> = const { Cell::new(0) };
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct NoScopes<'c> {
    _gate: RwLockReadGuard<'c, ()>,
}

impl<'c> NoScopes<'c> {
    pub(super) fn new(gate: RwLockReadGuard<'c, ()>) -> Self {
        HELD.set(HELD.get() + 1);
        Self { _gate: gate }
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
