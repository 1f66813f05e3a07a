//! Proof that no scope is open and none opens, for as long as it is held.
//!
//! Retired allocators wait for the device and release memory only under it, because they know nothing of
//! captures in the current one. Each thread knows whether it holds one: if so, it never waits for
//! the gate. It guards no data.

use std::cell::Cell;

use parking_lot::RwLockReadGuard;

thread_local! {
    /// How many of these the thread holds.
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

    /// Whether the calling thread holds one, of whichever allocator.
    pub(super) fn is_held_here() -> bool {
        HELD.get() > 0
    }
}

impl Drop for NoScopes<'_> {
    fn drop(&mut self) {
        HELD.set(HELD.get() - 1);
    }
}
