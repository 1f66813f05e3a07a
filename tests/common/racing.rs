//! The simulated device where another thread begins a capture between two calls of this one.

use std::sync::{Arc, Mutex};

use stratalloc::driver::sim::{CallCosts, EventMode, SimOptions};
use stratalloc::driver::{
    Capture, CaptureStatus, DeviceInfo, Driver, DriverResult, MemoryInfo, Sim,
};
use stratalloc::ids::{EventId, StreamId};

use super::plain::{forward, straight_but_records};

/// Work finishes when a test says so.
#[derive(Debug)]
pub(crate) struct Racing {
    pub(crate) sim: Sim,
    /// Captured just before the next event is recorded.
    next: Mutex<Option<StreamId>>,
}

impl Racing {
    pub(crate) fn new(total_bytes: u64) -> Arc<Self> {
        let (event_mode, costs) = (EventMode::Manual, CallCosts::NONE);
        let sim = SimOptions { total_bytes, event_mode, costs, ..SimOptions::default() };
        Arc::new(Self { sim: Sim::new(sim), next: Mutex::default() })
    }

    /// Another thread begins to capture `stream` just before the next event is recorded.
    pub(crate) fn capture_before_next_event(&self, stream: StreamId) {
        *self.next.lock().expect("no test panics under it") = Some(stream);
    }

    /// Ends a capture of another thread.
    pub(crate) fn end_capture(&self, stream: StreamId) {
        self.elsewhere(|| Capture::end(&self.sim, stream).expect("nobody broke it"));
    }

    fn elsewhere(&self, act: impl FnOnce() + Send) {
        std::thread::scope(|scope| scope.spawn(act).join().expect("it does not panic"));
    }
}

impl Driver for Racing {
    fn allocate(&self, size_bytes: u64) -> DriverResult<u64> {
        self.sim.allocate(size_bytes)
    }

    fn record_event(&self, event: EventId, stream: StreamId) -> DriverResult<()> {
        let next = self.next.lock().expect("no test panics under it").take();
        if let Some(next) = next {
            self.elsewhere(|| {
                Capture::begin(&self.sim, next).expect("it is not captured");
            });
        }
        self.sim.record_event(event, stream)
    }

    straight_but_records!(sim);
    forward! { sim:
        capture_status(stream: StreamId) -> DriverResult<CaptureStatus>;
    }
}
