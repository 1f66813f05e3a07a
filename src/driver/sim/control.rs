//! What a test may do to a simulated device: see its clock, count its calls, finish its work.
//!
//! None of these is a driver call: they cost no simulated time and are not counted.

use super::{Event, Sim};
use crate::driver::call::Call;
use crate::driver::{Brake, DriverResult, Held};
use crate::ids::{DeviceId, EventId, StreamId};

#[doc(hidden)]
impl Sim {
    /// Nanoseconds on the simulated clock: the cost of all calls so far, plus what was waited for.
    #[must_use]
    pub fn elapsed_ns(&self) -> u64 {
        self.state.lock().now_ns
    }

    /// The most bytes that were ever taken at once: segments, pages and pools.
    #[must_use]
    pub fn peak_used_bytes(&self) -> u64 {
        self.state.lock().budget.peak_used_bytes
    }

    /// The bytes that are taken now: segments, pages and pools.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.state.lock().budget.used_bytes
    }

    /// Moves the clock on.
    pub fn advance_ns(&self, ns: u64) {
        self.state.lock().pass(ns);
    }

    /// How often the driver's method `name` was called; failed calls count too.
    ///
    /// # Panics
    ///
    /// When no method has that name.
    #[must_use]
    pub fn calls(&self, name: &str) -> u64 {
        self.state.lock().counts[Call::named(name) as usize]
    }

    /// How often any method was called; failed calls count too.
    #[must_use]
    pub fn total_calls(&self) -> u64 {
        self.state.lock().counts.iter().sum()
    }

    /// Methods that were called at least once and how often, in the order of the traits' text.
    #[must_use]
    pub fn call_counts(&self) -> Vec<(&'static str, u64)> {
        let counts = self.state.lock().counts;
        let named = Call::ALL.into_iter().map(Call::name).zip(counts);
        named.filter(|(_, count)| *count > 0).collect()
    }

    /// Of [`Held::mapped_bytes`], those that another device may access.
    #[must_use]
    pub fn mapped_bytes_open_to(&self, device: DeviceId) -> u64 {
        self.state.lock().mappings.peer_bytes(device)
    }

    /// How often pieces of virtual memory are held: one for each `create` and `import` that no
    /// `release` took back.
    #[must_use]
    pub fn piece_holds(&self) -> u64 {
        self.state.lock().mappings.holds_of_pieces()
    }

    /// What the device has given out and not taken back.
    #[must_use]
    pub fn held(&self) -> Held {
        let state = self.state.lock();
        let mut held = Held {
            segments: state.memory.live().collect(),
            pool_ranges: state.pools.ranges(),
            events: state.work.events_alive(),
            ..Held::default()
        };
        state.mappings.tell(&mut held);
        held
    }

    /// Finishes the work before an event's mark, and only that: earlier marks of its stream stay
    /// as they are. No device does this; it is for tests of code that must not rely on order.
    ///
    /// # Panics
    ///
    /// When there is no such event.
    pub fn complete_event(&self, event: EventId) {
        let mut state = self.state.lock();
        match state.work.event(event) {
            Ok(Event::Marked(mark)) => state.work.finish_early(mark),
            Ok(Event::Fresh | Event::Captured { .. }) => {}
            Err(refusal) => panic!("complete_event: {}", refusal.message()),
        }
    }

    /// Finishes all that was submitted to a stream, and what that waited for on other streams.
    /// A stream that was never used has nothing to finish.
    pub fn complete_stream(&self, stream: StreamId) {
        let mut state = self.state.lock();
        if let Some(index) = state.work.known_stream(stream) {
            state.work.finish_stream(index);
        }
    }

    /// A name for this moment: everything submitted so far is before it.
    #[must_use]
    pub fn submitted(&self) -> u64 {
        self.state.lock().work.position()
    }

    /// Finishes what was submitted to a stream before a moment that [`submitted`](Self::submitted)
    /// named, and nothing later.
    pub fn complete_until(&self, stream: StreamId, moment: u64) {
        let mut state = self.state.lock();
        if let Some(index) = state.work.known_stream(stream) {
            state.work.finish_until(index, moment);
        }
    }

    /// Finishes all that was submitted to any stream.
    pub fn complete_all(&self) {
        self.state.lock().work.finish_all();
    }

    /// How often somebody said that there may be captures, and not that they are over.
    #[must_use]
    pub fn captures_expected(&self) -> u64 {
        self.state.lock().graphs.expected
    }

    /// Breaks the capture that a stream belongs to, if any: what an illegal call does on a real
    /// device.
    pub fn invalidate_capture(&self, stream: StreamId) {
        self.state.lock().graphs.break_on(stream);
    }

    /// Events that have not finished, with their streams, in the order in which they were recorded.
    #[must_use]
    pub fn pending_events(&self) -> Vec<(EventId, StreamId)> {
        let state = self.state.lock();
        state.work.pending(state.now_ns)
    }
}

/// In `EventMode::Manual` all work is held until somebody lets it go.
impl Brake for Sim {
    fn hold(&self, _stream: StreamId) -> DriverResult<()> {
        Ok(())
    }

    fn mark(&self, _stream: StreamId) -> DriverResult<u64> {
        Ok(self.submitted())
    }

    fn finish_until(&self, stream: StreamId, mark: u64) -> DriverResult<()> {
        self.complete_until(stream, mark);
        Ok(())
    }

    fn finish_all(&self) -> DriverResult<()> {
        self.complete_all();
        Ok(())
    }
}
