//! One slot per thread, with a number, in which it says what it reads now.
//!
//! Slots are never freed, only handed on once they name nothing: a process has as many as it had threads
//! at once, and one more for each read that was leaked. A thread says
//! one thing at a time; who reads inside a read goes another way (see `swap`).

use std::cell::Cell;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

use super::{Global, Rank, barrier};

/// What one thread reads. On a line of its own, so that threads do not take it from each other.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct Slot {
    reading: AtomicPtr<()>,
    pub(super) asymmetric: bool,
    /// No other slot has it; small ones come first.
    pub(super) number: usize,
}

#[derive(Debug)]
struct Slots {
    all: Vec<&'static Slot>,
    /// Of threads that have ended. One may still name what a read that was leaked, or that is dropped
    /// later in the thread's end, goes on to use: it is handed on when it names nothing.
    unused: Vec<&'static Slot>,
}

static SLOTS: Global<Slots> =
    Global::new(Rank::Slots, Slots { all: Vec::new(), unused: Vec::new() });

thread_local! {
    /// The thread's slot, once it has one. Without a destructor, so that asking takes one load.
    static OWN: Cell<Option<&'static Slot>> = const { Cell::new(None) };
    static RETURN: Return = const { Return };
}

/// Offers the thread's slot to others when the thread ends.
struct Return;

impl Drop for Return {
    fn drop(&mut self) {
        SLOTS.lock().unused.extend(OWN.take());
    }
}

/// The calling thread's slot, unless it says something already, or the thread is ending.
#[inline]
pub(super) fn idle() -> Option<&'static Slot> {
    match OWN.get() {
        Some(slot) => slot.is_silent().then_some(slot),
        None => take(),
    }
}

/// The calling thread's slot, unless the thread is ending.
#[inline]
pub(super) fn own() -> Option<&'static Slot> {
    OWN.get().or_else(take)
}

/// Gives the thread a slot, unless it is ending.
#[cold]
fn take() -> Option<&'static Slot> {
    RETURN.try_with(|_| ()).ok()?;
    let asymmetric = barrier::is_asymmetric();
    let mut slots = SLOTS.lock();
    let silent = slots.unused.iter().rposition(|slot| slot.is_silent());
    let slot = match silent {
        Some(at) => slots.unused.swap_remove(at),
        None => {
            let reading = AtomicPtr::new(null_mut());
            let slot: &'static Slot =
                Box::leak(Box::new(Slot { reading, asymmetric, number: slots.all.len() }));
            slots.all.push(slot);
            slot
        }
    };
    OWN.set(Some(slot));
    Some(slot)
}

impl Slot {
    /// Whether it names nothing. Once its thread has ended nobody but the next owner makes it name
    /// something again.
    #[inline]
    fn is_silent(&self) -> bool {
        self.reading.load(Ordering::Relaxed).is_null()
    }

    /// Says that the thread reads what `at` points to; null for nothing. Only the slot's own thread.
    #[inline]
    pub(super) fn say(&self, at: *mut ()) {
        self.reading.store(at, Ordering::Release);
    }

    /// Says that the thread reads nothing any more. What it read comes before this.
    #[inline]
    pub(super) fn hush(&self) {
        self.reading.store(null_mut(), Ordering::Release);
    }
}

/// Whether any thread says that it reads what `at` points to. What those who stopped saying so have read
/// comes before this.
pub(super) fn anyone_reads(at: *mut ()) -> bool {
    SLOTS.read().all.iter().any(|slot| slot.reading.load(Ordering::Acquire) == at)
}
