//! A lock that belongs to the whole process, and that a fork may find taken.
//!
//! Whoever forks takes it first ([`Global::lock`]), so that the child gets it whole and lets go of it as
//! the parent does. That needs a lock that is nothing but itself: parking_lot's keep who waits in one table
//! for all of them, with locks of its own, and a child may inherit those taken.

use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// See the [module](self). Nobody runs users' code under it.
#[derive(Debug, Default)]
pub(crate) struct Global<T>(RwLock<T>);

impl<T> Global<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(RwLock::new(value))
    }

    /// To look. What a panic has left is looked at all the same.
    #[inline]
    pub(crate) fn read(&self) -> RwLockReadGuard<'_, T> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// To change.
    #[inline]
    pub(crate) fn lock(&self) -> RwLockWriteGuard<'_, T> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}
