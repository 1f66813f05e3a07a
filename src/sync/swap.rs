//! A value that is read at every call and replaced rarely, and the values that it replaced.
//!
//! A read stores the value's address in the thread's slot, and then checks that the value is still the
//! current one. This needs no lock and no reference count. A replaced value is kept until
//! `take_retired` removes it, which it does only while no thread reads the value. A read inside
//! another read, and a read on a thread that is ending, use a counted reference instead.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use smallvec::SmallVec;

use super::barrier;
use super::platform::{AtomicPtr, Ordering, RwLock};
use super::slots::{self, HazardSlot};

/// See the [module](self).
pub(crate) struct Swap<T> {
    current: AtomicPtr<T>,
    kept: RwLock<Values<T>>,
}

struct Values<T> {
    current: Arc<T>,
    /// The replaced values, newest first.
    retired: Vec<Arc<T>>,
}

/// The current value, then the replaced values from the newest to the oldest.
pub(crate) type All<T> = SmallVec<[Arc<T>; 4]>;

/// A read, which lasts until it is dropped. It must stay on its thread.
pub(crate) struct Read<'s, T> {
    at: *const T,
    /// The slot that announces `at`. If there is none, the read has a reference of its own: `at` is the
    /// result of `Arc::into_raw`.
    slot: Option<&'static HazardSlot>,
    swap: &'s Swap<T>,
}

impl<T> Deref for Read<'_, T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: `at` points into an `Arc`. Either this read has a reference, or `kept` contains it. Only
        // `take_retired` removes values from `kept`, and it skips a value that a slot announces. `at`
        // was still the current value after `slot` announced it, so it was replaced later, and the
        // barrier of `take_retired` makes the announcement visible to the scan of the slots. The slot
        // holds `at` until this read is dropped, because a read inside this read gets no slot. `kept`
        // outlives this read, because the read borrows the swap.
        unsafe { &*self.at }
    }
}

impl<T> Read<'_, T> {
    /// Ends the read. Returns true if the value was replaced before the end, or if this read began while a
    /// value was being replaced. This read may then have made a [`Swap::take_retired`] fail. If the result
    /// is false, it has not and will not.
    #[inline(always)]
    pub(crate) fn leave(self) -> bool {
        let (swap, at, slot) = (self.swap, self.at, self.slot);
        drop(self);
        if !slot.is_some_and(HazardSlot::is_asymmetric) && is_misled_or_fenced(slot) {
            return true;
        }
        // Pairs with the barrier of `take_retired`. Either its scan sees that the read has ended, or
        // this load sees the next value.
        barrier::light(true);
        !std::ptr::eq(swap.current.load(Ordering::Acquire), at)
    }
}

/// Orders the end of a read without an asymmetric barrier. Returns true if its slot announced another value
/// first.
#[cold]
#[inline(never)]
fn is_misled_or_fenced(slot: Option<&HazardSlot>) -> bool {
    barrier::light(false);
    slot.is_some_and(HazardSlot::take_misled)
}

impl<T> Drop for Read<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        match self.slot {
            Some(slot) => slot.clear(),
            None => drop_counted(self.at),
        }
    }
}

/// Drops the reference of a read without a slot.
#[cold]
#[inline(never)]
fn drop_counted<T>(at: *const T) {
    // SAFETY: `at` is the result of `Arc::into_raw` in `count_read`, and a read is dropped once.
    drop(unsafe { Arc::from_raw(at) });
}

impl<T: Send + Sync> Swap<T> {
    /// Creates a swap with `value` as its current value.
    pub(crate) fn new(value: T) -> Self {
        let current = Arc::new(value);
        let at = Arc::as_ptr(&current).cast_mut();
        let kept = RwLock::new(Values { current, retired: Vec::new() });
        Self { current: AtomicPtr::new(at), kept }
    }

    /// Returns the current value. It lives until the read is dropped, even if it is replaced before.
    #[inline(always)]
    pub(crate) fn read(&self) -> Read<'_, T> {
        let slot = slots::idle();
        let at = match slot {
            None => self.count_read(),
            Some(slot) => {
                let at = self.current.load(Ordering::Acquire);
                if self.announce(slot, at) == at { at } else { self.announce_again(slot) }
            }
        };
        Read { at, slot, swap: self }
    }

    /// Announces that the thread reads the value at `at`, and returns the address of the current value.
    #[inline(always)]
    fn announce(&self, slot: &HazardSlot, at: *mut T) -> *mut T {
        slot.announce(at.cast());
        barrier::light(slot.is_asymmetric());
        self.current.load(Ordering::Acquire)
    }

    /// Announces a value that is just being replaced. Returns its address.
    #[cold]
    #[inline(never)]
    fn announce_again(&self, slot: &HazardSlot) -> *const T {
        // A scan of the slots may have seen the first announcement, so `leave` must return true, even if the
        // value that is read is still the current one then.
        slot.note_misled();
        let mut at = self.current.load(Ordering::Acquire);
        loop {
            match self.announce(slot, at) {
                now if now == at => return at,
                now => at = now,
            }
        }
    }

    /// Counts a read without a slot. Returns the address of its value.
    #[cold]
    #[inline(never)]
    fn count_read(&self) -> *const T {
        Arc::into_raw(self.current())
    }

    /// Calls `read` with the current value.
    #[cfg(test)]
    #[inline(always)]
    pub(crate) fn with<R>(&self, read: impl FnOnce(&T) -> R) -> R {
        read(&self.read())
    }

    /// Returns a counted reference to the current value.
    pub(crate) fn current(&self) -> Arc<T> {
        Arc::clone(&self.kept.read().current)
    }

    /// Returns the current and all replaced values, as of one moment.
    pub(crate) fn all(&self) -> All<T> {
        let kept = self.kept.read();
        let mut all = All::with_capacity(1 + kept.retired.len());
        all.push(Arc::clone(&kept.current));
        all.extend(kept.retired.iter().cloned());
        all
    }

    /// Returns the number of replaced values that were not removed yet.
    pub(crate) fn retired(&self) -> usize {
        self.kept.read().retired.len()
    }

    /// Makes `next` the current value, and keeps the replaced value. Does not wait for readers.
    pub(crate) fn replace(&self, next: T) {
        let next = Arc::new(next);
        let mut kept = self.kept.write();
        self.current.store(Arc::as_ptr(&next).cast_mut(), Ordering::SeqCst);
        let old = std::mem::replace(&mut kept.current, next);
        kept.retired.insert(0, old);
    }

    /// Removes the oldest replaced value that no thread reads, that has no other reference and for which
    /// `may_take` returns true. `may_take` runs under this swap's lock. No new read of the value can
    /// begin then.
    pub(crate) fn take_retired(&self, mut may_take: impl FnMut(&T) -> bool) -> Option<T> {
        let mut kept = self.kept.write();
        if kept.retired.is_empty() || !barrier::heavy() {
            return None;
        }
        // New references are made only under the lock, so a count of one does not rise here.
        let at = kept.retired.iter().rposition(|old| {
            let is_read = slots::is_read(Arc::as_ptr(old).cast_mut().cast());
            Arc::strong_count(old) == 1 && !is_read && may_take(old)
        })?;
        let taken = kept.retired.remove(at);
        drop(kept);
        Arc::into_inner(taken)
    }
}

impl<T> fmt::Debug for Swap<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let retired = self.kept.read().retired.len();
        f.debug_struct("Swap").field("retired", &retired).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::sync::atomic::AtomicUsize;
    use std::sync::mpsc;

    use super::*;

    /// A value that counts its drop, and changes `twice` in it, so that a read after the drop is
    /// noticed.
    #[derive(Debug)]
    struct Marked {
        value: u64,
        twice: u64,
        drops: Arc<AtomicUsize>,
    }

    impl Marked {
        fn new(value: u64, drops: &Arc<AtomicUsize>) -> Self {
            Self { value, twice: value * 2, drops: Arc::clone(drops) }
        }
    }

    impl Drop for Marked {
        fn drop(&mut self) {
            self.twice = u64::MAX;
            self.drops.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_value_that_is_read_stays_until_the_read_has_ended() {
        let drops = Arc::default();
        let swap = Swap::new(Marked::new(1, &drops));
        swap.with(|first| {
            swap.replace(Marked::new(2, &drops));
            assert!(swap.take_retired(|_| true).is_none(), "this thread reads it");
            assert_eq!(
                swap.with(|second| second.value),
                2,
                "a read inside a read sees the new one"
            );
            assert_eq!(first.twice, 2);
        });
        let held = swap.all().pop().unwrap();
        assert_eq!(drops.load(Ordering::SeqCst), 0);
        assert!(swap.take_retired(|_| true).is_none(), "another reference exists");
        drop(held);
        assert!(swap.take_retired(|_| false).is_none(), "it may not");
        drop(swap.take_retired(|_| true).expect("no reference is left"));
        assert_eq!((drops.load(Ordering::SeqCst), swap.retired()), (1, 0));
    }

    #[test]
    fn a_leaked_read_keeps_its_value() {
        // Leaked, because the slot keeps its address, and no swap of another test may reuse this
        // address.
        let swap: &'static Swap<u32> = Box::leak(Box::new(Swap::new(1)));
        std::thread::scope(|scope| {
            scope.spawn(|| std::mem::forget(swap.read())).join().unwrap();
            // A thread that wrongly got the leaked slot would overwrite the address.
            scope.spawn(|| swap.with(|value| assert_eq!(*value, 1))).join().unwrap();
        });
        swap.replace(2);
        std::thread::scope(|scope| {
            scope.spawn(|| swap.with(|value| assert_eq!(*value, 2))).join().unwrap();
        });
        assert_eq!(swap.take_retired(|_| true), None, "it may still be in use");
        assert_eq!(swap.retired(), 1);
    }

    /// A value that drops its read late in the end of its thread, when the channel allows it.
    struct Late {
        read: Option<Read<'static, u32>>,
        ending: mpsc::Sender<()>,
        end: mpsc::Receiver<()>,
    }

    impl Drop for Late {
        fn drop(&mut self) {
            self.ending.send(()).unwrap();
            self.end.recv().unwrap();
            assert_eq!(**self.read.as_ref().unwrap(), 1);
        }
    }

    #[test]
    fn a_read_that_is_dropped_late_in_the_end_of_its_thread_keeps_its_value_until_then() {
        thread_local! {
            static LATE: RefCell<Option<Late>> = const { RefCell::new(None) };
        }
        let swap: &'static Swap<u32> = Box::leak(Box::new(Swap::new(1)));
        let ((ending, is_ending), (end_it, end)) = (mpsc::channel(), mpsc::channel());
        let thread = std::thread::spawn(move || {
            // Created before the slot, so its destructor runs after the slot has become available to
            // other threads.
            LATE.with_borrow_mut(|late| {
                *late = Some(Late { read: Some(swap.read()), ending, end });
            });
        });
        is_ending.recv().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| swap.with(|value| assert_eq!(*value, 1))).join().unwrap();
        });
        swap.replace(2);
        assert_eq!(swap.take_retired(|_| true), None, "the thread reads it");
        end_it.send(()).unwrap();
        thread.join().unwrap();
        assert_eq!(swap.take_retired(|_| true), Some(1));
    }

    #[test]
    fn the_end_of_a_read_returns_whether_the_value_was_replaced() {
        let swap = Swap::new(1);
        assert!(!swap.read().leave());
        let read = swap.read();
        let counted = swap.read();
        swap.replace(2);
        assert!(counted.leave() && read.leave());
        assert!(!swap.read().leave());
    }

    #[test]
    fn a_read_that_panics_has_ended() {
        let swap = Swap::new(1);
        let panics = std::panic::AssertUnwindSafe(|| swap.with(|_| panic!("as planned")));
        assert!(std::panic::catch_unwind(panics).is_err());
        swap.replace(2);
        assert_eq!(swap.take_retired(|_| true), Some(1));
    }

    #[test]
    fn readers_never_see_a_dropped_value() {
        let drops = Arc::default();
        let swap = Swap::new(Marked::new(0, &drops));
        const ROUNDS: u64 = 2000;
        std::thread::scope(|scope| {
            // Dropped when the loop below ends, including by a panic.
            let running = Arc::new(());
            for _ in 0..3 {
                let (swap, watched) = (&swap, Arc::downgrade(&running));
                scope.spawn(move || {
                    let mut last = 0;
                    while watched.strong_count() > 0 {
                        let seen = swap.with(|marked| {
                            let value = marked.value;
                            assert_eq!(marked.twice, value * 2);
                            value
                        });
                        assert!(seen >= last, "values do not come back");
                        last = seen;
                    }
                });
            }
            for value in 1..=ROUNDS {
                swap.replace(Marked::new(value, &drops));
                while swap.take_retired(|_| true).is_none() {
                    std::thread::yield_now();
                }
            }
            drop(running);
        });
        assert_eq!(drops.load(Ordering::SeqCst), usize::try_from(ROUNDS).unwrap());
    }
}
