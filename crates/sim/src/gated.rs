//! A driver that holds back the work of streams until a replay or a test lets it run.
//!
//! A stream without work reaches every mark at once, so a block that several streams used would be free too
//! early. A [`WorkGate`] delays the streams of a replay or a test. [`hold`](WorkGate::hold) puts a closed
//! gate into a stream, and later work waits behind it. [`mark`](WorkGate::mark) marks a point behind it, and
//! [`finish_until`](WorkGate::finish_until) opens the gates before a mark. [`Sim`](crate::Sim) runs no work
//! and finishes marks on request. [`Gated`] adds gates to a device that runs the work; on CUDA, a gate makes
//! the stream wait for a number in pinned memory.
//!
//! No wait lasts forever. A call that may wait for work (`WAITING`) opens all gates first. If gates are
//! closed and none was closed or opened for ten seconds, all gates open, because a call that is not in
//! `WAITING` probably waits for the work behind them. The next [`WorkGate::finish_all`] then returns an
//! error.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hashbrown::HashMap;
use parking_lot::{Condvar, Mutex, MutexGuard};

use stratalloc::driver::{DriverResult, HoldsWork, Intercepted, Interceptor};
use stratalloc::error::{DriverError, DriverErrorKind};
use stratalloc::ids::{EventId, StreamId};

/// Controls when the work of streams finishes.
pub trait WorkGate: fmt::Debug + Send + Sync {
    /// Holds back work that is submitted to `stream` from now on. Never waits.
    ///
    /// # Errors
    ///
    /// [`DriverError`] if the device cannot hold the work back.
    fn hold(&self, stream: StreamId) -> DriverResult<()>;

    /// Marks the point after all work submitted to `stream` so far, and returns the mark's number. Never
    /// waits.
    ///
    /// # Errors
    ///
    /// [`DriverError`] of the device.
    fn mark(&self, stream: StreamId) -> DriverResult<u64>;

    /// Lets the work of `stream` run up to a mark, and waits until the mark is reached.
    ///
    /// # Errors
    ///
    /// [`DriverError`] of the device, or if the mark was not reached within ten seconds.
    fn finish_until(&self, stream: StreamId, mark: u64) -> DriverResult<()>;

    /// Lets all work run, and waits for all marks.
    ///
    /// # Errors
    ///
    /// [`DriverError`] of the device, or if gates were opened because of the ten-second limit.
    fn finish_all(&self) -> DriverResult<()>;
}

/// How long gates stay closed while none is closed or opened, and how long a stream may take to reach a mark.
/// After that, all gates open.
const PATIENCE: Duration = Duration::from_secs(10);

/// Driver calls that may wait for earlier work.
const WAITING: [&str; 21] = [
    "free",
    "synchronize_stream",
    "synchronize_device",
    "synchronize_event",
    "copy_from_host",
    "copy_to_host",
    "destroy_stream",
    "unreserve",
    "release",
    "unmap",
    "destroy_pool",
    "trim",
    "close",
    "open",
    "enable_access",
    "pin",
    "unpin",
    "allocate_host",
    "free_host",
    "register_host",
    "unregister_host",
];

/// A gate or a mark of a stream.
#[derive(Debug)]
struct Marker<G> {
    /// The number of the gate or mark. Gates and marks that were added later have larger numbers.
    mark: u64,
    /// The closed gate, which opens when this value is dropped. `None` for an open gate, and for a mark.
    gate: Option<G>,
    /// The event that a mark recorded. `None` for a gate.
    event: Option<EventId>,
}

#[derive(Debug)]
struct GatedWork<G> {
    held: HashMap<StreamId, VecDeque<Marker<G>>>,
    last_mark: u64,
    closed: usize,
    /// Incremented by each operation that closes or opens gates.
    activity: u64,
    /// How often all gates were opened early: after too long without activity, or because a mark was not
    /// reached in time. `finish_all` resets it.
    forced: u64,
    ending: bool,
}

impl<G> GatedWork<G> {
    fn open_all(&mut self) {
        for held in self.held.values_mut().flatten() {
            held.gate = None;
        }
        self.closed = 0;
        self.activity += 1;
    }

    /// Removes the gates and marks of a stream up to a mark, in order, which opens the gates. Returns the
    /// events of the removed marks.
    fn open_until(&mut self, stream: StreamId, mark: u64) -> Vec<EventId> {
        let mut events = Vec::new();
        let Some(lane) = self.held.get_mut(&stream) else { return events };
        while let Some(mut held) = lane.pop_front_if(|held| held.mark <= mark) {
            self.closed -= usize::from(held.gate.take().is_some());
            events.extend(held.event);
        }
        self.activity += 1;
        events
    }
}

#[derive(Debug)]
struct Shared<G> {
    lanes: Mutex<GatedWork<G>>,
    /// Signalled when a gate is closed while all others are open, and when the driver is dropped.
    changed: Condvar,
}

impl<G> Shared<G> {
    /// Opens all gates after `patience` without activity. Runs on its own thread until the driver is dropped.
    fn watch(&self, patience: Duration) {
        let mut lanes = self.lanes.lock();
        while !lanes.ending {
            if lanes.closed == 0 {
                self.changed.wait(&mut lanes);
                continue;
            }
            let before = lanes.activity;
            let waited = self.changed.wait_for(&mut lanes, patience);
            if waited.timed_out() && lanes.activity == before && lanes.closed > 0 {
                lanes.open_all();
                lanes.forced += 1;
            }
        }
    }
}

/// A driver whose work can be held back. It implements [`WorkGate`].
pub type Gated<D> = Intercepted<Arc<D>, Gates<D>>;

/// The gates of a [`Gated`] driver. They open when it is dropped.
#[derive(Debug)]
pub struct Gates<D: HoldsWork> {
    driver: Arc<D>,
    shared: Arc<Shared<D::Gate>>,
    watchman: Mutex<Option<JoinHandle<()>>>,
    patience: Duration,
}

impl<D: HoldsWork> Gates<D> {
    /// Wraps a driver so that its work can be held back. No work is held back before [`WorkGate::hold`].
    #[must_use]
    pub fn before(inner: D) -> Gated<D> {
        Self::with_patience(inner, PATIENCE)
    }

    fn with_patience(inner: D, patience: Duration) -> Gated<D> {
        let driver = Arc::new(inner);
        let held = HashMap::new();
        let lanes =
            GatedWork { held, last_mark: 0, closed: 0, activity: 0, forced: 0, ending: false };
        let shared = Arc::new(Shared { lanes: Mutex::new(lanes), changed: Condvar::new() });
        let watchman = Mutex::new(None);
        let gates = Gates { driver: Arc::clone(&driver), shared, watchman, patience };
        Intercepted::with(driver, gates)
    }
}

impl<D: HoldsWork> Interceptor for Gates<D> {
    /// Opens all gates before a call that may wait for work behind them.
    fn around<T>(
        &self,
        call: &'static str,
        act: impl FnOnce() -> DriverResult<T>,
    ) -> DriverResult<T> {
        if WAITING.contains(&call) {
            let mut lanes = self.lanes();
            if lanes.closed > 0 {
                lanes.open_all();
            }
        }
        act()
    }
}

impl<D: HoldsWork> Gates<D> {
    fn lanes(&self) -> MutexGuard<'_, GatedWork<D::Gate>> {
        self.shared.lanes.lock()
    }

    fn start_watching(&self) {
        let mut watchman = self.watchman.lock();
        if watchman.is_none() {
            let (shared, patience) = (Arc::clone(&self.shared), self.patience);
            *watchman = Some(std::thread::spawn(move || shared.watch(patience)));
        }
    }

    /// Waits until an event is reached, and destroys it. The gates before it on its stream are open, but a
    /// device may run independent streams one after the other, so closed gates of other streams can still
    /// delay it. After `patience`, all gates are opened.
    fn reach(&self, event: EventId) -> DriverResult<()> {
        let begin = Instant::now();
        while !self.driver.query_event(event)? {
            if begin.elapsed() > self.patience {
                let mut lanes = self.lanes();
                lanes.open_all();
                lanes.forced += 1;
                drop(lanes);
                self.driver.synchronize_event(event)?;
                break;
            }
            std::thread::yield_now();
        }
        self.driver.destroy_event(event)
    }
}

fn check_forced(times: u64, patience: Duration) -> DriverResult<()> {
    if times == 0 {
        return Ok(());
    }
    let message = format!(
        "held work was released early {times} times: the device made no progress within \
         {patience:?} (CUDA_DEVICE_MAX_CONNECTIONS=32 lets more streams of a GPU run apart)"
    );
    Err(DriverError::new(DriverErrorKind::Other, "finish_all", 0, message))
}

impl<D: HoldsWork> WorkGate for Gated<D> {
    fn hold(&self, stream: StreamId) -> DriverResult<()> {
        let gates = self.interceptor();
        let gate = gates.driver.hold_back(stream)?;
        gates.start_watching();
        let mut lanes = gates.lanes();
        lanes.last_mark += 1;
        let held = Marker { mark: lanes.last_mark, gate: Some(gate), event: None };
        lanes.held.entry(stream).or_default().push_back(held);
        lanes.closed += 1;
        lanes.activity += 1;
        if lanes.closed == 1 {
            gates.shared.changed.notify_all();
        }
        Ok(())
    }

    fn mark(&self, stream: StreamId) -> DriverResult<u64> {
        let gates = self.interceptor();
        let event = gates.driver.create_event()?;
        if let Err(error) = gates.driver.record_event(event, stream) {
            gates.driver.destroy_event(event)?;
            return Err(error);
        }
        let mut lanes = gates.lanes();
        lanes.last_mark += 1;
        let mark = lanes.last_mark;
        let held = Marker { mark, gate: None, event: Some(event) };
        lanes.held.entry(stream).or_default().push_back(held);
        Ok(mark)
    }

    fn finish_until(&self, stream: StreamId, mark: u64) -> DriverResult<()> {
        let gates = self.interceptor();
        let events = gates.lanes().open_until(stream, mark);
        let before = gates.lanes().forced;
        events.into_iter().map(|event| gates.reach(event)).fold(Ok(()), Result::and)?;
        let times = gates.lanes().forced - before;
        check_forced(times, gates.patience)
    }

    fn finish_all(&self) -> DriverResult<()> {
        let gates = self.interceptor();
        let mut lanes = gates.lanes();
        lanes.open_all();
        let streams: Vec<_> = lanes.held.keys().copied().collect();
        let events: Vec<_> =
            streams.into_iter().flat_map(|stream| lanes.open_until(stream, u64::MAX)).collect();
        drop(lanes);
        events.into_iter().map(|event| gates.reach(event)).fold(Ok(()), Result::and)?;
        let times = std::mem::take(&mut gates.lanes().forced);
        check_forced(times, gates.patience)
    }
}

impl<D: HoldsWork> Drop for Gates<D> {
    /// Opens all gates, ends the watching thread, and destroys the events of the marks.
    fn drop(&mut self) {
        let mut lanes = self.lanes();
        lanes.open_all();
        lanes.ending = true;
        let events: Vec<_> =
            lanes.held.drain().flat_map(|(_, lane)| lane).filter_map(|held| held.event).collect();
        drop(lanes);
        self.shared.changed.notify_all();
        if let Some(watchman) = self.watchman.lock().take() {
            // The thread does not panic: it only waits and opens gates.
            let _ = watchman.join();
        }
        // If the call fails, the event leaks: `drop` cannot return the error.
        events.into_iter().for_each(|event| drop(self.driver.destroy_event(event)));
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests;
