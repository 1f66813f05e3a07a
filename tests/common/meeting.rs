//! A driver whose allocations wait for company: it shows which misses may overlap.
//!
//! An allocation lets other threads run until a second one is inside, or for a bounded number of turns.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::thread::yield_now;

use stratalloc::driver::{DriverResult, Interceptor};

/// Lets allocations wait for company.
#[derive(Debug)]
pub(crate) struct Meeting {
    inside: AtomicUsize,
    most_inside: AtomicUsize,
    /// How often an allocation that is alone lets others run.
    turns: u64,
}

impl Meeting {
    pub(crate) fn new(turns: u64) -> Self {
        Self { inside: AtomicUsize::new(0), most_inside: AtomicUsize::new(0), turns }
    }

    /// How many allocations were inside at once, at most.
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
        for _ in 0..self.turns {
            if self.most_inside() > 1 {
                break;
            }
            yield_now();
        }
        let answer = act();
        self.inside.fetch_sub(1, SeqCst);
        answer
    }
}
