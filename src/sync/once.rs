//! A shared value that is set once and read often: one load and one test, where a `OnceLock` of a pointer
//! reads its state first.

use std::marker::PhantomData;
use std::ptr::null_mut;
use std::sync::Arc;

use super::platform::{AtomicPtr, Ordering};

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct OnceArc<T> {
    /// Null, or the result of `Arc::into_raw`.
    at: AtomicPtr<T>,
    /// Makes this type `Send` and `Sync` only if a shared value is.
    owned: PhantomData<Arc<T>>,
}

impl<T> OnceArc<T> {
    /// Returns an empty cell.
    #[inline]
    pub(crate) fn new() -> Self {
        Self { at: AtomicPtr::new(null_mut()), owned: PhantomData }
    }

    /// Returns the value, or `None` if it was not set yet.
    #[inline(always)]
    pub(crate) fn get(&self) -> Option<&T> {
        // SAFETY: a pointer that is not null was set by `set`, with a reference that only the drop of this
        // cell releases. The result borrows the cell. The load sees the value that the store released.
        unsafe { self.at.load(Ordering::Acquire).as_ref() }
    }

    /// Returns a counted reference to the value, or `None` if it was not set yet.
    pub(crate) fn share(&self) -> Option<Arc<T>> {
        let value: *const T = self.get()?;
        // SAFETY: the value is in an `Arc`, as in `get`, and this cell holds a reference to it.
        unsafe { Arc::increment_strong_count(value) };
        // SAFETY: `value` is the result of `Arc::into_raw` in `set`, and the call above added a reference.
        Some(unsafe { Arc::from_raw(value) })
    }

    /// Sets the value and returns it. If it is set already, drops `value` and returns the first one.
    pub(crate) fn set(&self, value: Arc<T>) -> &T {
        let at = Arc::into_raw(value).cast_mut();
        let (empty, success) = (null_mut(), Ordering::AcqRel);
        let first = match self.at.compare_exchange(empty, at, success, Ordering::Acquire) {
            Ok(_) => at,
            Err(first) => {
                // SAFETY: `at` is the result of `Arc::into_raw` above, and was not stored.
                drop(unsafe { Arc::from_raw(at) });
                first
            }
        };
        // SAFETY: as in `get`; `first` is not null.
        unsafe { &*first }
    }
}

impl<T> Drop for OnceArc<T> {
    fn drop(&mut self) {
        let at = self.at.load(Ordering::Acquire);
        if !at.is_null() {
            // SAFETY: `at` is the result of `Arc::into_raw` in `set`, and a cell is dropped once.
            drop(unsafe { Arc::from_raw(at) });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_value_stays_and_every_value_is_dropped() {
        let (first, second) = (Arc::new(1), Arc::new(2));
        let cell = OnceArc::new();
        assert_eq!(cell.get(), None);
        assert_eq!(cell.set(Arc::clone(&first)), &1);
        assert_eq!(cell.set(Arc::clone(&second)), &1);
        assert_eq!(cell.get(), Some(&1));
        assert_eq!([&first, &second].map(Arc::strong_count), [2, 1]);
        drop(cell);
        assert_eq!(Arc::strong_count(&first), 1);
    }

    #[test]
    fn threads_that_set_it_at_once_get_the_same_value() {
        let cell = OnceArc::new();
        let found: Vec<u32> = std::thread::scope(|scope| {
            let set = |n| {
                scope.spawn({
                    let cell = &cell;
                    move || *cell.set(Arc::new(n))
                })
            };
            let threads: Vec<_> = (0..4).map(set).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(found.iter().all(|value| Some(value) == cell.get()), "{found:?}");
    }
}
