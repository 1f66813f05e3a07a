//! A driver whose allocations wait for company: it shows which misses may overlap.
//!
//! An allocation lets other threads run until a second one is inside, or for a bounded number of
//! turns. Everything else goes straight to the simulated device.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::thread::yield_now;

use stratalloc::driver::{CaptureStatus, DeviceInfo, Driver, DriverResult, MemoryInfo, Sim};
use stratalloc::ids::{EventId, StreamId};

use super::plain::straight;

/// The simulated device with allocations that wait for company.
#[derive(Debug)]
pub(crate) struct Meeting {
    pub(crate) sim: Arc<Sim>,
    inside: AtomicUsize,
    most_inside: AtomicUsize,
    /// How often an allocation that is alone lets others run.
    turns: u64,
}

impl Meeting {
    pub(crate) fn new(sim: Arc<Sim>, turns: u64) -> Self {
        Self { sim, inside: AtomicUsize::new(0), most_inside: AtomicUsize::new(0), turns }
    }

    /// How many allocations were inside at once, at most.
    pub(crate) fn most_inside(&self) -> usize {
        self.most_inside.load(SeqCst)
    }
}

impl Driver for Meeting {
    fn allocate(&self, size_bytes: u64) -> DriverResult<u64> {
        let inside = self.inside.fetch_add(1, SeqCst) + 1;
        self.most_inside.fetch_max(inside, SeqCst);
        for _ in 0..self.turns {
            if self.most_inside() > 1 {
                break;
            }
            yield_now();
        }
        let address = self.sim.allocate(size_bytes);
        self.inside.fetch_sub(1, SeqCst);
        address
    }

    straight!(sim);
}
