//! One numbered slot per thread, which holds the address that the thread is reading (a hazard pointer).
//!
//! Slots are never freed. The slot of an ended thread is given to another thread once it is empty. So
//! there are as many slots as there were threads at the same time, plus one for each read that was
//! leaked. A slot holds one address at a time. A read inside another read uses a counted reference
//! instead (see `swap`).

use std::cell::Cell;
use std::ptr::null_mut;

use super::platform::{AtomicPtr, AtomicU8, Ordering, thread_local};
use super::{Global, Rank, barrier};

/// A slot: the address that one thread reads. Aligned, so that no two slots share a cache line.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct HazardSlot {
    reading: AtomicPtr<()>,
    /// [`ASYMMETRIC`], [`SYMMETRIC`] or [`MISLED`]. Used only by the slot's own thread.
    mode: AtomicU8,
    /// Unique among all slots. The lowest numbers are used first.
    pub(super) number: usize,
}

/// The barrier of the thread needs no processor fence.
const ASYMMETRIC: u8 = 0;
/// The barrier of the thread is a processor fence.
const SYMMETRIC: u8 = 1;
/// As [`SYMMETRIC`], which is right for any thread. The slot has announced a value that was replaced
/// already. In one mode with the kind of barrier, so that the end of a read tests both at once.
const MISLED: u8 = 2;

#[derive(Debug, Default)]
struct HazardSlots {
    all: Vec<&'static HazardSlot>,
    /// Slots of threads that have ended. A slot may still hold an address, because the read was leaked
    /// or is dropped later in the thread's end. Such a slot is reused only after it is empty.
    unused: Vec<&'static HazardSlot>,
}

static SLOTS: Global<HazardSlots> =
    Global::new(Rank::Slots, HazardSlots { all: Vec::new(), unused: Vec::new() });

thread_local! {
    /// The slot of the thread, if it has one. The value has no destructor, so reading it takes one
    /// load.
    static OWN: Cell<Option<&'static HazardSlot>> = const { Cell::new(None) };
    static RETURN: Return = const { Return };
}

/// Its drop makes the thread's slot available to others when the thread ends.
struct Return;

impl Drop for Return {
    fn drop(&mut self) {
        SLOTS.lock().unused.extend(OWN.with(|own| own.take()));
    }
}

/// Returns the calling thread's slot. `None` if the slot holds an address or the thread is ending.
#[inline]
pub(super) fn idle() -> Option<&'static HazardSlot> {
    match OWN.with(|own| own.get()) {
        Some(slot) => slot.is_empty().then_some(slot),
        None => take(),
    }
}

/// Returns the calling thread's slot. `None` if the thread is ending.
#[inline]
pub(super) fn own() -> Option<&'static HazardSlot> {
    OWN.with(|own| own.get()).or_else(take)
}

/// Assigns a slot to the calling thread. Returns `None` if the thread is ending.
#[cold]
fn take() -> Option<&'static HazardSlot> {
    RETURN.try_with(|_| ()).ok()?;
    let mut slots = SLOTS.lock();
    let empty = slots.unused.iter().rposition(|slot| slot.is_empty());
    let slot = match empty {
        Some(at) => slots.unused.swap_remove(at),
        None => {
            let slot: &'static HazardSlot = Box::leak(Box::new(HazardSlot {
                reading: AtomicPtr::new(null_mut()),
                mode: AtomicU8::new(usual_mode()),
                number: slots.all.len(),
            }));
            slots.all.push(slot);
            slot
        }
    };
    OWN.with(|own| own.set(Some(slot)));
    Some(slot)
}

/// Returns the mode of a slot that has misled no thread.
fn usual_mode() -> u8 {
    if barrier::is_asymmetric() { ASYMMETRIC } else { SYMMETRIC }
}

impl HazardSlot {
    /// Returns true if the slot is empty. Once empty, the slot of an ended thread stays empty until
    /// another thread gets it.
    #[inline]
    fn is_empty(&self) -> bool {
        self.reading.load(Ordering::Relaxed).is_null()
    }

    /// Returns true if the thread's barrier needs no processor fence.
    #[inline(always)]
    pub(super) fn is_asymmetric(&self) -> bool {
        self.mode.load(Ordering::Relaxed) == ASYMMETRIC
    }

    /// Notes that the slot has announced a value that was replaced already. Called only by the slot's own
    /// thread. [`is_asymmetric`](Self::is_asymmetric) then returns false.
    pub(super) fn note_misled(&self) {
        self.mode.store(MISLED, Ordering::Relaxed);
    }

    /// Returns true if the slot was [noted](Self::note_misled) since the last call. Called only by the
    /// slot's own thread.
    pub(super) fn take_misled(&self) -> bool {
        let is_misled = self.mode.load(Ordering::Relaxed) == MISLED;
        if is_misled {
            self.mode.store(usual_mode(), Ordering::Relaxed);
        }
        is_misled
    }

    /// Announces that the thread reads the value at `at`. Null means nothing. Called only by the slot's
    /// own thread.
    #[inline]
    pub(super) fn announce(&self, at: *mut ()) {
        self.reading.store(at, Ordering::Release);
    }

    /// Announces that the thread reads nothing. The thread's earlier reads are ordered before this
    /// store.
    #[inline]
    pub(super) fn clear(&self) {
        self.reading.store(null_mut(), Ordering::Release);
    }
}

/// Returns true if any thread announces that it reads the value at `at`. If not, the reads that threads
/// announced before happen before the return of this call.
pub(super) fn is_read(at: *mut ()) -> bool {
    SLOTS.read().all.iter().any(|slot| slot.reading.load(Ordering::Acquire) == at)
}
