//! Callbacks that are told of each entry as it happens.
//!
//! Entries are made under locks. A tracker hears of them when the operation that made them has released its
//! locks, on the same thread and before the operation returns, so it may allocate and free; what it does
//! itself is recorded, and told to nobody.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::RwLock;

use super::event::Entry;
use super::record::History;

/// Told of an entry. What it panics with is lost.
pub type Tracker = Arc<dyn Fn(&Entry) + Send + Sync>;

/// Names a tracker, to remove it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TrackerId(pub(crate) u64);

pub(super) struct Trackers {
    /// No other history's, also when this one is gone.
    number: u64,
    any: AtomicBool,
    next: AtomicU64,
    all: RwLock<Vec<(TrackerId, Tracker)>>,
}

impl Default for Trackers {
    fn default() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        Self {
            number,
            any: AtomicBool::new(false),
            next: AtomicU64::new(0),
            all: RwLock::default(),
        }
    }
}

impl fmt::Debug for Trackers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} trackers", self.all.read().len())
    }
}

thread_local! {
    /// Entries of this thread that nobody was told of, and whose history they are.
    static UNTOLD: RefCell<Vec<(u64, Entry)>> = const { RefCell::new(Vec::new()) };
    static TELLS: Cell<bool> = const { Cell::new(false) };
}

impl History {
    /// Tells `tracker` of every entry from now on, while recording is on.
    pub fn add_tracker(&self, tracker: Tracker) -> TrackerId {
        let id = TrackerId(self.trackers.next.fetch_add(1, Ordering::Relaxed));
        let mut all = self.trackers.all.write();
        all.push((id, tracker));
        self.trackers.any.store(true, Ordering::Relaxed);
        id
    }

    /// Tells it no more, and says whether it was there. A call on another thread may still run.
    pub fn remove_tracker(&self, id: TrackerId) -> bool {
        let removed: Vec<_> = {
            let mut all = self.trackers.all.write();
            let removed = all.extract_if(.., |(known, _)| *known == id).collect();
            self.trackers.any.store(!all.is_empty(), Ordering::Relaxed);
            removed
        };
        !removed.is_empty()
    }
}

impl Trackers {
    #[inline]
    pub(super) fn any(&self) -> bool {
        self.any.load(Ordering::Relaxed)
    }

    /// Keeps an entry until this thread's operation has ended.
    #[inline]
    pub(super) fn keep(&self, entry: &Entry) {
        if self.any.load(Ordering::Relaxed) && !TELLS.get() {
            UNTOLD.with_borrow_mut(|untold| untold.push((self.number, entry.clone())));
        }
    }

    /// Tells what this thread kept. No lock is held.
    pub(super) fn tell(&self) {
        if !self.any.load(Ordering::Relaxed) || TELLS.get() {
            return;
        }
        let own = |(of, _): &mut (u64, Entry)| *of == self.number;
        let entries: Vec<_> = UNTOLD.with_borrow_mut(|untold| untold.extract_if(.., own).collect());
        if entries.is_empty() {
            return;
        }
        let trackers: Vec<_> =
            self.all.read().iter().map(|(_, tracker)| Arc::clone(tracker)).collect();
        TELLS.set(true);
        for (_, entry) in &entries {
            for tracker in &trackers {
                if let Err(panic) = catch_unwind(AssertUnwindSafe(|| tracker(entry))) {
                    // Dropping what it panicked with may panic again.
                    mem::forget(panic);
                }
            }
        }
        TELLS.set(false);
    }
}
