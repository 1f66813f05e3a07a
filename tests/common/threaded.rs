//! The simulated device with a per-thread default stream: as in CUDA, stream 2 is another stream on each
//! thread.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;

use stratalloc::driver::{Driver, DriverResult, Intercepted, Interceptor};
use stratalloc::ids::StreamId;
use stratalloc_sim::{HeldResources, Sim};

use super::base::Base;

/// The per-thread default stream.
pub(crate) const OWN: StreamId = StreamId(2);

/// The device. Its work finishes when the test completes it or when a call waits for it.
pub(crate) type Threaded = Intercepted<Arc<Sim>, OwnStreams>;

pub(crate) fn threaded(total_bytes: u64) -> Arc<Threaded> {
    Arc::new(Base::with_bytes(total_bytes))
}

impl Base for Threaded {
    fn with_bytes(total_bytes: u64) -> Self {
        let sim = Arc::new(Sim::with_bytes(total_bytes));
        let (own, order) = (Mutex::default(), Mutex::default());
        Intercepted::with(Arc::clone(&sim), OwnStreams { sim, own, order })
    }

    fn finish_all(&self) {
        self.inner().complete_all();
    }

    fn held(&self) -> HeldResources {
        self.inner().held()
    }
}

/// The stream of each thread, and the calls whose order is checked.
#[derive(Debug)]
pub(crate) struct OwnStreams {
    sim: Arc<Sim>,
    own: Mutex<HashMap<ThreadId, StreamId>>,
    /// The device synchronizations and unmaps, in order.
    order: Mutex<Vec<&'static str>>,
}

impl OwnStreams {
    /// Returns the device synchronizations and unmaps since the last call, in order.
    pub(crate) fn take_order(&self) -> Vec<&'static str> {
        std::mem::take(&mut *self.order.lock().expect("no test panics under it"))
    }

    /// Finishes the work of the calling thread's own stream.
    pub(crate) fn finish_own(&self) {
        self.sim.complete_stream(self.stream(OWN).expect("it has one"));
    }
}

impl Interceptor for OwnStreams {
    fn around<T>(
        &self,
        call: &'static str,
        act: impl FnOnce() -> DriverResult<T>,
    ) -> DriverResult<T> {
        if ["synchronize_device", "unmap"].contains(&call) {
            self.order.lock().expect("no test panics under it").push(call);
        }
        act()
    }

    fn stream(&self, stream: StreamId) -> DriverResult<StreamId> {
        if stream != OWN {
            return Ok(stream);
        }
        let mut own = self.own.lock().expect("no test panics under it");
        let new = || self.sim.create_stream().expect("sim has streams");
        Ok(*own.entry(std::thread::current().id()).or_insert_with(new))
    }

    fn is_per_thread_stream(&self, _: &dyn Driver, stream: StreamId) -> bool {
        stream == OWN
    }
}
