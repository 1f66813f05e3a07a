//! One numbered slot per thread, which holds the address that the thread is reading (a hazard pointer).
//!
//! Slots are never freed. A slot passes to another thread once its thread has ended and it is empty. So
//! there are as many as there were threads at once, plus one for each leaked read. A thread announces
//! one address at a time; a read inside a read takes a counted reference instead (see `swap`).

use std::cell::Cell;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

use super::{Global, Rank, barrier};

/// The address that one thread reads. Aligned so that no two slots share a cache line.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct HazardSlot {
    reading: AtomicPtr<()>,
    pub(super) asymmetric: bool,
    /// Unique. The lowest numbers are used first.
    pub(super) number: usize,
}

#[derive(Debug)]
struct HazardSlots {
    all: Vec<&'static HazardSlot>,
    /// Slots of threads that have ended. A slot may still hold an address: of a leaked read, or of one
    /// that is dropped later in the thread's end. Such a slot is reused only once it is empty.
    unused: Vec<&'static HazardSlot>,
}

static SLOTS: Global<HazardSlots> =
    Global::new(Rank::Slots, HazardSlots { all: Vec::new(), unused: Vec::new() });

thread_local! {
    /// The thread's slot, once it has one. Without a destructor, so reading it takes one load.
    static OWN: Cell<Option<&'static HazardSlot>> = const { Cell::new(None) };
    static RETURN: Return = const { Return };
}

/// Makes the thread's slot available to others when the thread ends.
struct Return;

impl Drop for Return {
    fn drop(&mut self) {
        SLOTS.lock().unused.extend(OWN.take());
    }
}

/// Returns the calling thread's slot; `None` if the slot is in use or the thread is ending.
#[inline]
pub(super) fn idle() -> Option<&'static HazardSlot> {
    match OWN.get() {
        Some(slot) => slot.is_empty().then_some(slot),
        None => take(),
    }
}

/// Returns the calling thread's slot; `None` if the thread is ending.
#[inline]
pub(super) fn own() -> Option<&'static HazardSlot> {
    OWN.get().or_else(take)
}

/// Assigns a slot to the calling thread; returns `None` if the thread is ending.
#[cold]
fn take() -> Option<&'static HazardSlot> {
    RETURN.try_with(|_| ()).ok()?;
    let asymmetric = barrier::is_asymmetric();
    let mut slots = SLOTS.lock();
    let empty = slots.unused.iter().rposition(|slot| slot.is_empty());
    let slot = match empty {
        Some(at) => slots.unused.swap_remove(at),
        None => {
            let reading = AtomicPtr::new(null_mut());
            let slot: &'static HazardSlot =
                Box::leak(Box::new(HazardSlot { reading, asymmetric, number: slots.all.len() }));
            slots.all.push(slot);
            slot
        }
    };
    OWN.set(Some(slot));
    Some(slot)
}

impl HazardSlot {
    /// Returns true if the slot is empty. After its thread has ended, only the next owner fills it
    /// again.
    #[inline]
    fn is_empty(&self) -> bool {
        self.reading.load(Ordering::Relaxed).is_null()
    }

    /// Announces that the thread reads `at`; null means nothing. Only called by the slot's own thread.
    #[inline]
    pub(super) fn announce(&self, at: *mut ()) {
        self.reading.store(at, Ordering::Release);
    }

    /// Announces that the thread reads nothing. Its earlier reads are ordered before this store.
    #[inline]
    pub(super) fn clear(&self) {
        self.reading.store(null_mut(), Ordering::Release);
    }
}

/// Returns true if any thread announces that it reads `at`. Reads of threads that have ended their
/// announcement happen before this call returns.
pub(super) fn is_read(at: *mut ()) -> bool {
    SLOTS.read().all.iter().any(|slot| slot.reading.load(Ordering::Acquire) == at)
}
