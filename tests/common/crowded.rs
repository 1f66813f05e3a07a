//! The simulated device with a list of processes that the test sets, as if other processes used the
//! device.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use stratalloc::driver::{DriverResult, Intercepted, Interceptor, Parts, ProcessUsage, Processes};
use stratalloc_sim::Sim;

pub(crate) type Crowded = Intercepted<Sim, Others>;

pub(crate) fn crowded(sim: Sim, list: DriverResult<Vec<ProcessUsage>>) -> Arc<Crowded> {
    Arc::new(Intercepted::with(sim, Others { list, queries: AtomicUsize::new(0) }))
}

/// The list of processes that hold memory of the device.
#[derive(Debug)]
pub(crate) struct Others {
    list: DriverResult<Vec<ProcessUsage>>,
    queries: AtomicUsize,
}

impl Others {
    /// Returns how often the list was read.
    pub(crate) fn queries(&self) -> usize {
        self.queries.load(SeqCst)
    }
}

impl Interceptor for Others {
    fn parts<'a>(&'a self, parts: Parts<'a>) -> Parts<'a> {
        Parts { processes: Some(self), ..parts }
    }
}

impl Processes for Others {
    fn list(&self) -> DriverResult<Vec<ProcessUsage>> {
        self.queries.fetch_add(1, SeqCst);
        self.list.clone()
    }
}
