//! A driver whose allocations wait for each other, to test which cache misses can overlap in time.

use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::thread::yield_now;

use stratalloc::driver::{DriverResult, Interceptor};

/// How an allocation in the driver waits for a second one.
#[derive(Debug)]
enum Wait {
    /// Until the second allocation has entered the driver.
    ForSecond(Barrier),
    /// Until the second allocation has entered the driver, or until this thread has yielded this many
    /// times.
    AtMost(u64),
}

/// Makes two allocations in the driver wait for each other.
#[derive(Debug)]
pub(crate) struct Meeting {
    inside: AtomicUsize,
    most_inside: AtomicUsize,
    wait: Wait,
}

impl Meeting {
    fn new(wait: Wait) -> Self {
        Self { inside: AtomicUsize::new(0), most_inside: AtomicUsize::new(0), wait }
    }

    /// Returns an interceptor for two allocations that must overlap. If they cannot, the test hangs.
    pub(crate) fn of_two() -> Self {
        Self::new(Wait::ForSecond(Barrier::new(2)))
    }

    /// Returns an interceptor for allocations that must not overlap. Each waits for another one for up
    /// to `turns` yields of its thread.
    pub(crate) fn of_one(turns: u64) -> Self {
        Self::new(Wait::AtMost(turns))
    }

    /// Returns the maximum number of allocations that were in the driver at once.
    pub(crate) fn most_inside(&self) -> usize {
        self.most_inside.load(SeqCst)
    }
}

impl Interceptor for Meeting {
    fn around<T>(
        &self,
        call: &'static str,
        act: impl FnOnce() -> DriverResult<T>,
    ) -> DriverResult<T> {
        if call != "allocate" {
            return act();
        }
        let inside = self.inside.fetch_add(1, SeqCst) + 1;
        self.most_inside.fetch_max(inside, SeqCst);
        match &self.wait {
            Wait::ForSecond(both) => _ = both.wait(),
            Wait::AtMost(turns) => {
                (0..*turns).take_while(|_| self.most_inside() < 2).for_each(|_| yield_now());
            }
        }
        let answer = act();
        self.inside.fetch_sub(1, SeqCst);
        answer
    }
}
