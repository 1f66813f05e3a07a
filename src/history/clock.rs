//! Timestamps of entries. Entries of one operation share a time, which keeps them together in the
//! history.

use std::cell::Cell;
use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::event::Action;
use crate::ids::ThreadNumber;

/// The timestamp of an entry. All entries are ordered by it.
///
/// An operation that takes memory from the driver records several entries, while other threads work on
/// other heaps. The entries of the operation share a time and differ in `step`, so no entry of another
/// thread comes between them. This order is valid, because events of different heaps do not depend on
/// each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Moment {
    /// Nanoseconds since the process's first timestamp. Of two events on different threads, the one
    /// that happens later never has an earlier time.
    time_ns: u64,
    /// Orders entries of different threads that have the same time.
    thread: u32,
    /// Orders the entries of one operation.
    step: u32,
}

thread_local! {
    /// The last timestamp of this thread. `thread` is 0 before the first one.
    static LAST: Cell<Moment> = const { Cell::new(Moment { time_ns: 0, thread: 0, step: 0 }) };
    /// Whether the next entry may share the time of the last one, because both belong to one operation.
    static CONTINUES: Cell<bool> = const { Cell::new(false) };
    /// The number of open (nested) operations on this thread.
    static OPEN: Cell<u32> = const { Cell::new(0) };
}

fn start() -> &'static (Instant, u64) {
    static START: OnceLock<(Instant, u64)> = OnceLock::new();
    START.get_or_init(|| {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        (Instant::now(), u64::try_from(since.as_micros()).unwrap_or_default())
    })
}

impl Moment {
    /// Returns the current time. All timestamps of a thread differ, even if the clock is coarse.
    pub(super) fn now() -> Self {
        let since = u64::try_from(start().0.elapsed().as_nanos()).unwrap_or(u64::MAX - 1);
        LAST.with(|last| {
            let mut before = last.get();
            if before.thread == 0 {
                before.thread = ThreadNumber::current().low_half();
            }
            let now = Self { time_ns: since.max(before.time_ns + 1), step: 0, ..before };
            last.set(now);
            now
        })
    }

    /// Returns the current time, for an entry that trackers receive but that is not recorded. Does not
    /// change the thread's last timestamp, so the recorded entries of one operation still share a time.
    pub(super) fn passing() -> Self {
        let last = LAST.get();
        let now = Self::now();
        LAST.set(last);
        now
    }

    /// Returns the timestamp of an entry. The entry of a request, and the entries of the segments that
    /// this request takes from the driver or releases to it, share a time.
    pub(super) fn of(action: Action) -> Self {
        let continues = CONTINUES.get();
        CONTINUES.set(action.is_segment() && OPEN.get() > 0);
        let belongs = action.is_segment() || matches!(action, Action::Alloc | Action::OutOfMemory);
        if !continues || !belongs {
            return Self::now();
        }
        LAST.with(|last| {
            last.set(last.get().next());
            last.get()
        })
    }

    /// Returns a timestamp with the same time and the next step.
    pub(crate) fn next(self) -> Self {
        Self { step: self.step + 1, ..self }
    }

    pub(super) fn time_ns(self) -> u64 {
        self.time_ns
    }

    /// Returns the time between an earlier timestamp and this one.
    pub(super) fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.time_ns.saturating_sub(earlier.time_ns))
    }

    /// Returns microseconds since 1970.
    pub(super) fn unix_us(self) -> u64 {
        start().1 + self.time_ns / 1000
    }
}

/// An open operation of the calling thread. Ends when dropped.
#[derive(Debug)]
pub(crate) struct Operation(());

impl Operation {
    pub(super) fn begin() -> Self {
        OPEN.set(OPEN.get() + 1);
        CONTINUES.set(false);
        Self(())
    }

    /// Returns true if the calling thread has an open operation.
    pub(super) fn is_open() -> bool {
        OPEN.get() > 0
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        OPEN.set(OPEN.get().saturating_sub(1));
        CONTINUES.set(false);
    }
}
