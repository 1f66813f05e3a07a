//! Values of one thread that stay usable until the very end of the thread.
//!
//! A thread may free memory in the last of its destructors: that of a C++ `thread_local`, or of a pthread
//! key. A thread-local of Rust with a destructor is gone by then, and to use it panics, as does
//! `std::thread::current`. The values here have no destructor. What they own is freed by the code that put
//! it there: a list that has become empty owns no memory. The number of a thread is
//! [`ThreadNumber`](crate::ids::ThreadNumber); `tests/tidy.rs` keeps other thread-locals out.

use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU64, Ordering};

/// A thread-local value without a destructor: the owner empties it before the thread ends.
pub(crate) struct Lasting<T>(Cell<ManuallyDrop<T>>);

impl<T: Default> Lasting<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(Cell::new(ManuallyDrop::new(value)))
    }

    /// Stores a value and returns the one before.
    pub(crate) fn replace(&self, value: T) -> T {
        ManuallyDrop::into_inner(self.0.replace(ManuallyDrop::new(value)))
    }

    /// Takes the value out.
    pub(crate) fn take(&self) -> T {
        self.replace(T::default())
    }

    /// Reads or changes the value. What `act` calls must not use it: the default is in its place.
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
    /// Reads the list.
    pub(crate) fn read<R>(&self, read: impl FnOnce(&[T]) -> R) -> R {
        self.with(|list| read(list))
    }

    /// Changes the list, and frees its memory if it has become empty.
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
    /// The regions that this thread is inside of, the innermost last.
    static INSIDE: Lasting<Vec<u64>> = const { Lasting::new(Vec::new()) };
}

/// A part of the code that a thread is inside of for a while, for one object: its callbacks, say.
#[derive(Debug)]
pub(crate) struct Region(u64);

/// Keeps the thread inside of a region. Dropped on the same thread.
#[derive(Debug)]
pub(crate) struct Inside<'r> {
    region: &'r Region,
    stays_here: PhantomData<*const ()>,
}

impl Default for Region {
    /// A region of one object.
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

    /// Counts how often the calling thread has entered the region without leaving it.
    pub(crate) fn depth(&self) -> usize {
        INSIDE.with(|inside| inside.read(|all| all.iter().filter(|id| **id == self.0).count()))
    }

    /// Whether the calling thread is inside of it.
    pub(crate) fn is_here(&self) -> bool {
        self.depth() > 0
    }

    /// Enters it until the result is dropped.
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
