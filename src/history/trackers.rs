//! Callbacks that get each entry as it happens.
//!
//! **Blocks and failures** (`alloc`, `free_requested`, `free_completed`, `oom`). Their entries are made under
//! locks. A tracker gets them on the same thread when the operation has released its locks, before it
//! returns.
//!
//! **Memory of the driver** (`segment_alloc`, `segment_map`, `segment_free`, `segment_unmap`). A tracker may
//! register the range with a network library, so the order per address counts. The allocator calls
//! [`History::announce`] while no other thread can reach the range: after the driver gave it and before any
//! request is served from it, and again when it has left the heap and before the driver gets it back. So for
//! one address the calls of all threads alternate between coming and going, the range is mapped during
//! each call, and no lock is held: a tracker may allocate, free and take snapshots. If the driver refuses to
//! take a range back, trackers get it as coming again.
//!
//! **Inside a tracker** the thread is inside of `running`. It gets no entries of blocks that it makes itself.
//! Nothing can be announced there, since the tracker would be called inside itself. So a range that
//! its own requests take from the driver is announced when the call has returned, and stays until then;
//! and nothing goes back to the driver ([`History::may_release`]). A user's own functions have no cache: a
//! block that a tracker gives back to them is announced when the call has returned.
//!
//! Threads do not wait for trackers of other threads, except a request that would otherwise fail: the
//! range that is announced may serve it.

use std::fmt;
use std::mem;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock};

use super::clock::Moment;
use super::context::Context;
use super::event::{Action, Entry, Event};
use super::record::{History, wants_context};
use crate::threads::{Lasting, Region};

/// Gets an entry. A panic of it is caught and ignored.
///
/// It may allocate, free and take snapshots, also from the allocator that calls it. It gets no entries of the
/// blocks that it takes itself. Meanwhile nothing goes back to the driver on its thread: emptying the
/// cache inside a tracker releases nothing. It must not wait for a request of another thread.
pub type Tracker = Arc<dyn Fn(&Entry) + Send + Sync>;

/// Names a tracker, to remove it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TrackerId(pub(crate) u64);

#[derive(Default)]
pub(super) struct Trackers {
    /// A thread that calls trackers is inside of it.
    running: Region,
    any: AtomicBool,
    next: AtomicU64,
    all: RwLock<Vec<(TrackerId, Tracker)>>,
    /// Ranges that trackers' own requests took from the driver, until they are announced.
    unannounced: Mutex<Vec<Range<u64>>>,
}

impl fmt::Debug for Trackers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} trackers", self.all.read().len())
    }
}

thread_local! {
    /// Entries that this thread has to deliver, each with the region of its history. Empty outside of
    /// operations.
    static KEPT: Lasting<Vec<(u64, Entry)>> = const { Lasting::new(Vec::new()) };
}

impl History {
    /// Calls `tracker` with every entry from now on, while recording is on; also with those that the ring
    /// [skips](super::RecordOptions::without).
    pub fn add_tracker(&self, tracker: Tracker) -> TrackerId {
        let id = TrackerId(self.trackers.next.fetch_add(1, Ordering::Relaxed));
        let mut all = self.trackers.all.write();
        all.push((id, tracker));
        self.trackers.any.store(true, Ordering::Relaxed);
        id
    }

    /// Removes a tracker; false if there was none with the id. A call on another thread may still run.
    pub fn remove_tracker(&self, id: TrackerId) -> bool {
        let removed: Vec<_> = {
            let mut all = self.trackers.all.write();
            let removed = all.extract_if(.., |(known, _)| *known == id).collect();
            self.trackers.any.store(!all.is_empty(), Ordering::Relaxed);
            removed
        };
        !removed.is_empty()
    }

    /// Whether entries of memory that comes and goes must be [announced](Self::announce).
    #[inline]
    pub(crate) fn has_trackers(&self) -> bool {
        self.is_on() && self.trackers.any()
    }

    /// Calls the trackers with memory that has come from the driver, or is about to go back. No lock is held,
    /// and no other thread can reach the memory.
    pub(crate) fn announce(&self, event: Event) {
        if self.has_trackers() {
            let wanted = wants_context(self.stacks(), event.action);
            let context = if wanted { Context::current() } else { None };
            self.trackers.announce(Entry { event, moment: Moment::passing(), context });
        }
    }

    /// Whether the calling thread may give a range back to the driver now. It may not inside a tracker, nor
    /// before trackers have got the range.
    pub(crate) fn may_release(&self, address: u64, size_bytes: u64) -> bool {
        !self.has_trackers()
            || !self.is_in_tracker()
                && !self.trackers.is_unannounced(&(address..address + size_bytes))
    }

    /// Whether the calling thread runs a tracker of this history.
    pub(crate) fn is_in_tracker(&self) -> bool {
        self.trackers.any() && self.trackers.running.is_here()
    }
}

impl Trackers {
    #[inline]
    pub(super) fn any(&self) -> bool {
        self.any.load(Ordering::Relaxed)
    }

    /// Keeps an entry until this thread's operation has released its locks. Memory of the driver is announced
    /// instead.
    #[inline]
    pub(super) fn keep(&self, entry: &Entry) {
        if self.any() && !entry.event.action.is_segment() && !self.running.is_here() {
            self.push(entry.clone());
        }
    }

    fn push(&self, entry: Entry) {
        KEPT.with(|kept| kept.change(|kept| kept.push((self.running.id(), entry))));
    }

    /// Takes out what this thread keeps for this history.
    fn take_kept(&self) -> Vec<Entry> {
        let own = |(of, _): &mut (u64, Entry)| *of == self.running.id();
        let taken = |kept: &mut Vec<(u64, Entry)>| -> Vec<_> {
            kept.extract_if(.., own).map(|(_, entry)| entry).collect()
        };
        KEPT.with(|kept| kept.change(taken))
    }

    /// Calls the trackers with what this thread kept. No lock is held.
    pub(super) fn tell(&self) {
        if self.any() && !self.running.is_here() {
            let entries = self.take_kept();
            self.call(entries);
        }
    }

    fn announce(&self, entry: Entry) {
        if !self.running.is_here() {
            let mut entries = self.take_kept();
            entries.push(entry);
            self.call(entries);
        } else if entry.event.action.gives_back() && self.forget(entry.event.address) {
            // It came inside the same call.
        } else {
            if !entry.event.action.gives_back() {
                self.unannounced.lock().push(range_of(&entry.event));
            }
            self.push(entry);
        }
    }

    /// Forgets memory that came inside this call of a tracker and goes already; false if there is none.
    fn forget(&self, address: u64) -> bool {
        let of = |(of, entry): &mut (u64, Entry)| {
            *of == self.running.id() && entry.event.address == address
        };
        let forgotten = KEPT.with(|kept| kept.change(|kept| kept.extract_if(.., of).count()));
        self.unannounced.lock().retain(|range| range.start != address);
        forgotten > 0
    }

    fn is_unannounced(&self, range: &Range<u64>) -> bool {
        let overlaps = |other: &Range<u64>| other.start < range.end && range.start < other.end;
        self.unannounced.lock().iter().any(overlaps)
    }

    /// Calls every tracker with each of the entries, then with the memory that they took from the driver.
    fn call(&self, mut entries: Vec<Entry>) {
        if entries.is_empty() {
            return;
        }
        let trackers: Vec<_> =
            self.all.read().iter().map(|(_, tracker)| Arc::clone(tracker)).collect();
        let _inside = self.running.enter();
        while !entries.is_empty() {
            for entry in &entries {
                for tracker in &trackers {
                    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| tracker(entry))) {
                        // Dropping what it panicked with may panic again.
                        mem::forget(panic);
                    }
                }
                if matches!(entry.event.action, Action::SegmentAlloc | Action::SegmentMap) {
                    let own = range_of(&entry.event);
                    self.unannounced.lock().retain(|range| *range != own);
                }
            }
            entries = self.take_kept();
        }
    }
}

fn range_of(event: &Event) -> Range<u64> {
    event.address..event.address + event.size_bytes
}
