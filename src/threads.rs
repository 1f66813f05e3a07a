//! Thread-local values that stay usable until the very end of the thread.
//!
//! A thread may free memory in its last destructors: those of C++ `thread_local`s and of pthread keys.
//! A Rust thread-local with a destructor is already destroyed then. Using it panics, and so does
//! `std::thread::current`. So the thread-locals here have no destructor. The code that stores a value
//! also removes it, and an empty list owns no memory. For the number of a thread see
//! [`ThreadNumber`](crate::ids::ThreadNumber). `tests/tidy.rs` forbids other thread-locals.

use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU64, Ordering};

/// A thread-local value without a destructor. Its user must remove the value before the thread ends.
#[doc(hidden)]
pub struct Lasting<T>(Cell<ManuallyDrop<T>>);

impl<T: Default> Lasting<T> {
    #[doc(hidden)]
    pub const fn new(value: T) -> Self {
        Self(Cell::new(ManuallyDrop::new(value)))
    }

    /// Stores a value and returns the previous one.
    #[doc(hidden)]
    pub fn replace(&self, value: T) -> T {
        ManuallyDrop::into_inner(self.0.replace(ManuallyDrop::new(value)))
    }

    /// Returns the value and stores the default value.
    #[doc(hidden)]
    pub fn take(&self) -> T {
        self.replace(T::default())
    }

    /// Runs `act` on the value. The default value is stored while `act` runs, so `act` must not access
    /// this thread-local.
    fn with<R>(&self, act: impl FnOnce(&mut T) -> R) -> R {
        let mut value = self.take();
        let answer = act(&mut value);
        drop(self.replace(value));
        answer
    }
}

impl<T: Clone> Lasting<Option<T>> {
    /// Returns a copy of the value.
    pub(crate) fn cloned(&self) -> Option<T> {
        self.with(|value| value.clone())
    }
}

impl<T> Lasting<Vec<T>> {
    /// Runs `read` on the list.
    pub(crate) fn read<R>(&self, read: impl FnOnce(&[T]) -> R) -> R {
        self.with(|list| read(list))
    }

    /// Runs `change` on the list. If the list is empty after that, frees its memory.
    pub(crate) fn change<R>(&self, change: impl FnOnce(&mut Vec<T>) -> R) -> R {
        self.with(|list| {
            let answer = change(list);
            if list.is_empty() {
                *list = Vec::new();
            }
            answer
        })
    }
}

thread_local! {
    /// The regions that the calling thread is inside of. The innermost is last.
    static INSIDE: Lasting<Vec<u64>> = const { Lasting::new(Vec::new()) };
}

/// A region of code, such as the callbacks of one object, that a thread enters and leaves.
#[derive(Debug)]
pub(crate) struct Region(u64);

/// Guard: the thread is inside the region until this is dropped. It must be dropped on the same thread.
#[derive(Debug)]
pub(crate) struct Inside<'r> {
    region: &'r Region,
    stays_here: PhantomData<*const ()>,
}

impl Default for Region {
    /// Creates a region for one object.
    fn default() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

impl Region {
    /// Returns a number that no other region has.
    pub(crate) fn id(&self) -> u64 {
        self.0
    }

    /// Returns how many times the calling thread has entered the region and not left it yet.
    pub(crate) fn depth(&self) -> usize {
        INSIDE.with(|inside| inside.read(|all| all.iter().filter(|id| **id == self.0).count()))
    }

    /// Returns whether the calling thread is inside the region.
    pub(crate) fn is_here(&self) -> bool {
        self.depth() > 0
    }

    /// Enters the region until the returned guard is dropped.
    #[must_use = "dropping it leaves the region"]
    pub(crate) fn enter(&self) -> Inside<'_> {
        INSIDE.with(|inside| inside.change(|all| all.push(self.0)));
        Inside { region: self, stays_here: PhantomData }
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        INSIDE.with(|inside| {
            inside.change(|all| {
                if let Some(at) = all.iter().rposition(|id| *id == self.region.0) {
                    all.remove(at);
                }
            });
        });
        let Self { stays_here: _, .. } = self;
    }
}

impl<T> fmt::Debug for Lasting<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lasting").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_is_left_as_often_as_it_was_entered() {
        let (one, other) = (Region::default(), Region::default());
        let outer = one.enter();
        let inner = one.enter();
        assert_eq!((one.depth(), other.depth()), (2, 0));
        drop(outer);
        assert!(one.is_here());
        std::thread::scope(|scope| scope.spawn(|| assert!(!one.is_here())).join().unwrap());
        drop(inner);
        assert!(!one.is_here());
    }

    #[test]
    fn a_list_that_is_empty_again_owns_no_memory() {
        let list = Lasting::new(Vec::new());
        list.change(|list| list.push(1));
        assert_eq!(list.read(<[i32]>::len), 1);
        list.change(Vec::pop);
        assert_eq!(list.take().capacity(), 0);
    }
}
