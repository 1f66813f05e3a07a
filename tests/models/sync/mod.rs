//! `src/sync` over loom. See the package's `lib.rs`.

#![expect(unsafe_code, reason = "the sources of the library have it")]

#[path = "../../../src/sync/barrier.rs"]
mod barrier;
#[path = "../../../src/sync/growing.rs"]
mod growing;
#[path = "../../../src/sync/once.rs"]
mod once;
mod platform;
#[path = "../../../src/sync/quota.rs"]
mod quota;
#[path = "../../../src/sync/short_lock.rs"]
mod short_lock;
#[path = "../../../src/sync/slots.rs"]
mod slots;
#[path = "../../../src/sync/swap.rs"]
mod swap;

pub(crate) use growing::GrowingMap;
pub(crate) use once::OnceArc;
pub(crate) use quota::Quota;
pub(crate) use short_lock::ShortLock;
pub(crate) use swap::Swap;

use std::sync::{Mutex, PoisonError};

use loom::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

/// The rank of a lock, which only matters to forks.
pub(crate) enum Rank {
    Slots,
}

/// A process-wide value with a lock: a new one in each execution.
#[derive(Debug)]
pub(crate) struct Global<T: 'static> {
    first: T,
    current: Mutex<(u64, Option<&'static RwLock<T>>)>,
}

impl<T: Default> Global<T> {
    pub(crate) const fn new(_: Rank, first: T) -> Self {
        Self { first, current: Mutex::new((0, None)) }
    }

    fn current(&self) -> &'static RwLock<T> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        match *current {
            (execution, Some(lock)) if execution == crate::execution() => lock,
            _ => {
                // Leaked, because threads of the execution keep references until its end.
                let lock: &'static _ = Box::leak(Box::new(RwLock::new(T::default())));
                *current = (crate::execution(), Some(lock));
                lock
            }
        }
    }

    pub(crate) fn read(&self) -> RwLockReadGuard<'static, T> {
        self.current().read().expect("no thread panics with the lock")
    }

    pub(crate) fn lock(&self) -> RwLockWriteGuard<'static, T> {
        self.current().write().expect("no thread panics with the lock")
    }
}
