//! What `src/sync/platform.rs` names, over loom.

use std::sync::OnceLock;
use std::time::Duration;

pub(super) use loom::sync::atomic::{AtomicPtr, AtomicU8, AtomicU64, AtomicUsize, Ordering, fence};
pub(super) use loom::thread::yield_now;
pub(super) use per_thread as thread_local;
pub(super) use std::sync::atomic::compiler_fence;

/// A flag that can be created in a constant. Loom learns of such a flag at its first use, which must happen
/// before threads share it.
#[derive(Debug)]
pub(super) struct AtomicBool {
    first: bool,
    flag: OnceLock<loom::sync::atomic::AtomicBool>,
}

impl Default for AtomicBool {
    fn default() -> Self {
        let flag = Self::new(false);
        flag.flag();
        flag
    }
}

impl AtomicBool {
    pub(super) const fn new(first: bool) -> Self {
        Self { first, flag: OnceLock::new() }
    }

    fn flag(&self) -> &loom::sync::atomic::AtomicBool {
        self.flag.get_or_init(|| loom::sync::atomic::AtomicBool::new(self.first))
    }

    pub(super) fn load(&self, order: Ordering) -> bool {
        self.flag().load(order)
    }

    pub(super) fn store(&self, value: bool, order: Ordering) {
        self.flag().store(value, order);
    }

    pub(super) fn compare_exchange(
        &self,
        current: bool,
        new: bool,
        success: Ordering,
        failure: Ordering,
    ) -> Result<bool, bool> {
        self.flag().compare_exchange(current, new, success, failure)
    }
}

/// A wait for another thread, without time.
pub(super) fn sleep(_: Duration) {
    yield_now();
}

/// Nothing: a thread that waits yields later.
pub(super) fn spin_loop() {}

/// The interface of parking_lot over loom's lock.
#[derive(Debug, Default)]
pub(super) struct Mutex<T>(loom::sync::Mutex<T>);

impl<T> Mutex<T> {
    pub(super) fn new(value: T) -> Self {
        Self(loom::sync::Mutex::new(value))
    }

    pub(super) fn lock(&self) -> loom::sync::MutexGuard<'_, T> {
        self.0.lock().expect("no thread panics with the lock")
    }
}

/// The interface of parking_lot over loom's lock.
#[derive(Debug)]
pub(super) struct RwLock<T>(loom::sync::RwLock<T>);

impl<T> RwLock<T> {
    pub(super) fn new(value: T) -> Self {
        Self(loom::sync::RwLock::new(value))
    }

    pub(super) fn read(&self) -> loom::sync::RwLockReadGuard<'_, T> {
        self.0.read().expect("no thread panics with the lock")
    }

    pub(super) fn write(&self) -> loom::sync::RwLockWriteGuard<'_, T> {
        self.0.write().expect("no thread panics with the lock")
    }
}

/// Loom's thread-locals, declared as constants. Their destructors do not run: loom would run them after the
/// execution.
macro_rules! per_thread {
    ($($(#[$meta:meta])* static $name:ident: $type:ty = const { $first:expr };)*) => {
        $(loom::thread_local! { $(#[$meta])* static $name: &'static $type = Box::leak(Box::new($first)); })*
    };
}
pub(super) use per_thread;

/// A system without membarrier(2).
pub(super) mod membarrier {
    pub(in crate::sync) fn register() -> bool {
        false
    }

    pub(in crate::sync) fn order_all() -> bool {
        false
    }
}
