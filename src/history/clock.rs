//! Times of entries, and the order of those that belong together.

use std::cell::Cell;
use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::event::Action;
use crate::ids::ThreadNumber;

/// When something happened, and its place among all entries.
///
/// An operation that takes memory from the driver makes several entries while other threads go on. They share
/// a time, so that they stand together as those of an operation under one lock would: what others do
/// meanwhile to other heaps could as well have happened after.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Moment {
    /// Nanoseconds since the first one. What happens after something on another thread has no earlier time.
    time_ns: u64,
    /// Tells entries of two threads apart that happened at the same time.
    thread: u32,
    step: u32,
}

thread_local! {
    /// The last moment of this thread; its thread is 0 until there is one.
    static LAST: Cell<Moment> = const { Cell::new(Moment { time_ns: 0, thread: 0, step: 0 }) };
    /// Whether the next entry belongs to the operation of the last one.
    static GOES_ON: Cell<bool> = const { Cell::new(false) };
    /// Operations that are open, one inside the other.
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
    /// Now. No two moments of a thread are equal, however coarse the clock.
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

    /// Now, for an entry that is not recorded: entries of an operation before and after it stay together.
    pub(super) fn passing() -> Self {
        let last = LAST.get();
        let now = Self::now();
        LAST.set(last);
        now
    }

    /// Now, or with the entries before of the same operation: memory that was taken or given back for a
    /// request stands together with its answer.
    pub(super) fn of(action: Action) -> Self {
        let goes_on = GOES_ON.get();
        GOES_ON.set(action.is_segment() && OPEN.get() > 0);
        let belongs = action.is_segment() || matches!(action, Action::Alloc | Action::OutOfMemory);
        if !goes_on || !belongs {
            return Self::now();
        }
        LAST.with(|last| {
            last.set(last.get().next());
            last.get()
        })
    }

    /// Right after this one.
    pub(crate) fn next(self) -> Self {
        Self { step: self.step + 1, ..self }
    }

    pub(super) fn time_ns(self) -> u64 {
        self.time_ns
    }

    /// How long ago an earlier moment was.
    pub(super) fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.time_ns.saturating_sub(earlier.time_ns))
    }

    /// Microseconds since 1970.
    pub(super) fn unix_us(self) -> u64 {
        start().1 + self.time_ns / 1000
    }
}

/// An operation of this thread, until it is dropped.
#[derive(Debug)]
pub(crate) struct Operation(());

impl Operation {
    pub(super) fn begin() -> Self {
        OPEN.set(OPEN.get() + 1);
        GOES_ON.set(false);
        Self(())
    }

    /// Whether one of this thread is open.
    pub(super) fn is_open() -> bool {
        OPEN.get() > 0
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        OPEN.set(OPEN.get().saturating_sub(1));
        GOES_ON.set(false);
    }
}
