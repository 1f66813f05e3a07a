//! Callbacks (*trackers*) that are called with each entry.
//!
//! **Entries of blocks and failures** (`alloc`, `free_requested`, `free_completed`, `oom`) are recorded
//! under locks. A tracker is called with them on the same thread, after the operation has released its
//! locks and before it returns.
//!
//! **Entries of driver memory** (`segment_alloc`, `segment_map`, `segment_free`, `segment_unmap`). A
//! tracker may register the range with a network library, so the order of calls for one address
//! matters. The allocator calls [`History::announce`] while no other thread can reach the range. For a
//! new range, that is before the range serves any request. For a range to be released, it is after the
//! range has left the heap. So for one address, over all threads, calls for allocation and for release
//! alternate. The range is mapped during each call. No lock is held: a tracker may allocate, free and
//! take snapshots. If the driver refuses to release a range, trackers are called with an allocation of
//! the range again.
//!
//! **Inside a tracker** the thread is in the region `running`, and trackers are never called
//! recursively. A tracker is not called with blocks that trackers allocate or free. If a request of a
//! tracker takes a range from the driver, trackers are called with the range after the tracker has
//! returned, and the range is not released before. Inside a tracker no memory is released to the driver
//! ([`History::may_release`]). The strategy over a user's own functions (`pluggable`) has no cache, and
//! releases memory even inside a tracker. Trackers are then called with the released range after the
//! tracker has returned.
//!
//! Threads do not wait for trackers of other threads, with one exception: a request that would
//! otherwise fail waits until a new range was announced, because the range may serve it.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::{fmt, mem};

use parking_lot::{Mutex, RwLock};

use super::clock::Moment;
use super::context::Context;
use super::event::{Action, Entry, Event};
use super::record::{History, wants_context};
use crate::threads::{Lasting, Region};

/// Called with each entry. A panic is caught and ignored.
///
/// A tracker may allocate, free and take snapshots, also with the allocator that calls it. It is not
/// called with blocks that it allocates itself. While it runs, its thread releases no memory to the
/// driver, so emptying the cache has no effect there. A tracker must not wait for a request of another
/// thread.
pub type Tracker = Arc<dyn Fn(&Entry) + Send + Sync>;

/// Identifies a tracker. Needed to remove it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TrackerId(#[doc(hidden)] pub u64);

#[derive(Default)]
pub(super) struct Trackers {
    /// A thread is inside this region while it calls trackers.
    running: Region,
    any: AtomicBool,
    next: AtomicU64,
    all: RwLock<Vec<(TrackerId, Tracker)>>,
    /// Ranges that requests of trackers took from the driver, and that trackers have not been called
    /// with yet.
    unannounced: Mutex<Vec<Range<u64>>>,
}

impl fmt::Debug for Trackers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} trackers", self.all.read().len())
    }
}

thread_local! {
    /// Entries of the current operation that trackers have not been called with yet. Each has the id of
    /// the region `running` of its history, which identifies the history. Empty between operations.
    static KEPT: Lasting<Vec<(u64, Entry)>> = const { Lasting::new(Vec::new()) };
}

impl History {
    /// Adds a tracker. While recording is on, it is called with every entry, including those that the
    /// history [skips](super::RecordOptions::without).
    pub fn add_tracker(&self, tracker: Tracker) -> TrackerId {
        let id = TrackerId(self.trackers.next.fetch_add(1, Ordering::Relaxed));
        let mut all = self.trackers.all.write();
        all.push((id, tracker));
        self.trackers.any.store(true, Ordering::Relaxed);
        id
    }

    /// Removes a tracker. Returns false if no tracker has the id. A call of the tracker on another
    /// thread may still be running.
    pub fn remove_tracker(&self, id: TrackerId) -> bool {
        let removed: Vec<_> = {
            let mut all = self.trackers.all.write();
            let removed = all.extract_if(.., |(known, _)| *known == id).collect();
            self.trackers.any.store(!all.is_empty(), Ordering::Relaxed);
            removed
        };
        !removed.is_empty()
    }

    /// Returns true if changes of driver memory must be [announced](Self::announce).
    #[inline]
    pub(crate) fn has_trackers(&self) -> bool {
        self.is_on() && self.trackers.any()
    }

    /// Calls the trackers with memory that was just taken from the driver or is about to be released.
    /// Inside a tracker, the calls follow when that tracker has returned. No lock is held, and no other
    /// thread can reach the memory.
    pub(crate) fn announce(&self, event: Event) {
        if self.has_trackers() {
            let wanted = wants_context(self.stacks(), event.action);
            let context = if wanted { Context::current() } else { None };
            self.trackers.announce(Entry { event, moment: Moment::passing(), context });
        }
    }

    /// Returns true if the calling thread may release a range to the driver now. Returns false inside a
    /// tracker, and for a range that trackers have not been called with yet.
    pub(crate) fn may_release(&self, address: u64, size_bytes: u64) -> bool {
        !self.has_trackers()
            || !self.is_in_tracker()
                && !self.trackers.is_unannounced(&(address..address + size_bytes))
    }

    /// Returns true if the calling thread runs a tracker of this history.
    pub(crate) fn is_in_tracker(&self) -> bool {
        self.trackers.any() && self.trackers.running.is_here()
    }
}

impl Trackers {
    #[inline]
    pub(super) fn any(&self) -> bool {
        self.any.load(Ordering::Relaxed)
    }

    /// Keeps an entry until this thread's operation has released its locks. Does not keep entries of
    /// driver memory, because `announce` handles them, nor entries of a tracker's own requests.
    #[inline]
    pub(super) fn keep(&self, entry: &Entry) {
        if self.any() && !entry.event.action.is_segment() && !self.running.is_here() {
            self.push(entry.clone());
        }
    }

    fn push(&self, entry: Entry) {
        KEPT.with(|kept| kept.change(|kept| kept.push((self.running.id(), entry))));
    }

    /// Removes and returns the entries that this thread keeps for this history.
    fn take_kept(&self) -> Vec<Entry> {
        let own = |(of, _): &mut (u64, Entry)| *of == self.running.id();
        let taken = |kept: &mut Vec<(u64, Entry)>| -> Vec<_> {
            kept.extract_if(.., own).map(|(_, entry)| entry).collect()
        };
        KEPT.with(|kept| kept.change(taken))
    }

    /// Calls the trackers with the entries that this thread kept. No lock is held.
    pub(super) fn notify(&self) {
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
        } else if entry.event.action.is_release() && self.forget(entry.event.address) {
            // Both the allocation and the release of the range happened inside this tracker, so
            // trackers are called with neither.
        } else {
            if !entry.event.action.is_release() {
                self.unannounced.lock().push(range_of(&entry.event));
            }
            self.push(entry);
        }
    }

    /// Drops the entry of a range that was taken inside the running tracker. Returns false if there is
    /// none.
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

    /// Calls each tracker with each entry. Then does the same with the driver memory that the trackers
    /// themselves took.
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
                        // Dropping the panic's payload may panic again.
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
