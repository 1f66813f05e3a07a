//! The simulated device, on which a test can make another thread act between two calls of the allocator.

use std::fmt;
use std::sync::{Arc, Mutex};

use stratalloc::driver::{Capture, DriverResult, Intercepted, Interceptor};
use stratalloc::ids::StreamId;
use stratalloc_sim::Sim;

use super::base::Base;

/// The device. Its work finishes when the test completes it or when a call waits for it.
pub(crate) type Racing = Intercepted<Arc<Sim>, Before>;

pub(crate) fn racing(total_bytes: u64) -> Arc<Racing> {
    Arc::new(Intercepted::with(Arc::new(Sim::with_bytes(total_bytes)), Before::default()))
}

/// Makes another thread begin a capture of `stream` just before the next event is recorded.
pub(crate) fn capture_before_next_event(device: &Racing, stream: StreamId) {
    let sim = Arc::clone(device.inner());
    let begin = move || _ = Capture::begin(&*sim, stream).expect("it is not captured");
    device.interceptor().next("record_event", || on_another_thread(begin));
}

/// Ends a capture on another thread.
pub(crate) fn end_capture(device: &Racing, stream: StreamId) {
    on_another_thread(|| Capture::end(&**device.inner(), stream).expect("the capture is intact"));
}

fn on_another_thread(act: impl FnOnce() + Send) {
    std::thread::scope(|scope| scope.spawn(act).join().expect("it does not panic"));
}

/// An action that runs right before the next call with the given name.
#[derive(Default)]
pub(crate) struct Before(Mutex<Option<(&'static str, Act)>>);

type Act = Box<dyn FnOnce() + Send>;

impl Before {
    pub(crate) fn next(&self, call: &'static str, act: impl FnOnce() + Send + 'static) {
        *self.0.lock().expect("no test panics under it") = Some((call, Box::new(act)));
    }
}

impl fmt::Debug for Before {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Before")
    }
}

impl Interceptor for Before {
    fn around<T>(
        &self,
        call: &'static str,
        act: impl FnOnce() -> DriverResult<T>,
    ) -> DriverResult<T> {
        let next =
            self.0.lock().expect("no test panics under it").take_if(|(name, _)| *name == call);
        if let Some((_, first)) = next {
            first();
        }
        act()
    }
}
