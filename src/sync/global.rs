//! A process-wide lock that stays consistent across `fork`.
//!
//! Each lock registers itself at its first use. A thread that forks first acquires all registered locks
//! ([`hold_all`]). So in the child every value is complete, and every lock is held by the child's only
//! thread. The locks are those of `std`. parking_lot keeps waiting threads in a process-wide table that
//! has locks of its own, and a child could inherit these in the locked state.

use std::any::Any;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::barrier;

/// The locks of the process, in the order in which a fork acquires them. The first one may be held
/// while an allocator is built. The others are held briefly, and no other lock is acquired while one of
/// them is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rank {
    Devices,
    Objects,
    Gates,
    Backends,
    StrategyNames,
    FrontIndices,
    Tracked,
    Adviser,
    CpuBlocks,
    Slots,
    Warnings,
}

/// A value with such a lock: see the module. No user code runs while it is held.
#[derive(Debug)]
pub struct Global<T> {
    value: RwLock<T>,
    rank: Rank,
    is_listed: AtomicBool,
}

trait Hold: Sync {
    fn hold(&'static self) -> Box<dyn Any>;
}

type List = Vec<(Rank, &'static dyn Hold)>;

/// All locks that were used so far, by rank. A fork acquires the lock of this list last.
static LISTED: Mutex<List> = Mutex::new(Vec::new());

fn listed() -> MutexGuard<'static, List> {
    LISTED.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<T: Send + Sync + 'static> Global<T> {
    #[doc(hidden)]
    pub const fn new(rank: Rank, value: T) -> Self {
        Self { value: RwLock::new(value), rank, is_listed: AtomicBool::new(false) }
    }

    /// Locks for reading. Ignores that a panic has poisoned the lock.
    #[inline]
    #[doc(hidden)]
    pub fn read(&'static self) -> RwLockReadGuard<'static, T> {
        self.list();
        self.value.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks for writing. Ignores that a panic has poisoned the lock.
    #[inline]
    #[doc(hidden)]
    pub fn lock(&'static self) -> RwLockWriteGuard<'static, T> {
        self.list();
        self.value.write().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    fn list(&'static self) {
        if !self.is_listed.load(Ordering::Relaxed) {
            self.list_now();
        }
    }

    #[cold]
    fn list_now(&'static self) {
        let mut all = listed();
        if !self.is_listed.swap(true, Ordering::Relaxed) {
            let at = all.partition_point(|(rank, _)| *rank <= self.rank);
            all.insert(at, (self.rank, self));
        }
    }
}

impl<T: Send + Sync + 'static> Hold for Global<T> {
    fn hold(&'static self) -> Box<dyn Any> {
        Box::new(self.lock())
    }
}

/// Acquires all locks of the process, by rank, until the result is dropped. Skips those of rank `own`,
/// which the calling thread already holds.
pub fn hold_all(own: Option<Rank>) -> Vec<Box<dyn Any>> {
    // Make this decision before the fork. Otherwise the child could wait forever for another thread of
    // the parent that was making it.
    let _ = barrier::is_asymmetric();
    loop {
        let all = listed().clone();
        let others = all.iter().filter(|(rank, _)| Some(*rank) != own);
        let mut held: Vec<_> = others.map(|(_, lock)| lock.hold()).collect();
        let now = listed();
        // If another lock was registered after the list was copied, try again: it may be held.
        if now.len() == all.len() {
            held.push(Box::new(now));
            return held;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fork_takes_every_lock_that_was_used_by_rank() {
        static LATE: Global<u8> = Global::new(Rank::Warnings, 0);
        static EARLY: Global<u8> = Global::new(Rank::Devices, 0);
        drop(LATE.lock());
        drop(EARLY.read());
        let held = hold_all(None);
        let is_taken = |lock: &Global<u8>| lock.value.try_read().is_err();
        assert!(is_taken(&LATE) && is_taken(&EARLY));
        drop(held);
        assert!(!is_taken(&LATE) && !is_taken(&EARLY));
        let held = hold_all(Some(Rank::Devices));
        assert!(is_taken(&LATE) && !is_taken(&EARLY));
        drop(held);
        assert!(listed().is_sorted_by_key(|(rank, _)| *rank));
    }
}
