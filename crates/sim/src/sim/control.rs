//! Controls of a simulated device for tests: its clock, its counters, and when work finishes.
//!
//! These methods are not driver calls: they cost no simulated time and are not counted.

use super::{Event, Kind, Sim, SimulatedDevice};
use crate::{HeldResources, WorkGate};
use stratalloc::driver::DriverResult;
use stratalloc::driver::call::Call;
use stratalloc::ids::{DeviceId, EventId, StreamId};

#[doc(hidden)]
impl<K: Kind> SimulatedDevice<K> {
    /// Returns the simulated clock in nanoseconds. Calls advance it by their cost, calls that wait also to
    /// the end of the work, and [`advance_ns`](Self::advance_ns) by any time.
    #[must_use]
    pub fn elapsed_ns(&self) -> u64 {
        self.shared.state.lock().now_ns
    }

    /// Returns the maximum of [`used_bytes`](Self::used_bytes).
    #[must_use]
    pub fn peak_used_bytes(&self) -> u64 {
        self.shared.state.lock().budget.peak_used_bytes
    }

    /// Returns the bytes in use by segments, physical pieces and pools.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.shared.state.lock().budget.used_bytes
    }

    /// Advances the clock.
    pub fn advance_ns(&self, ns: u64) {
        self.shared.state.lock().pass(ns);
    }

    /// Returns how often the driver method `name` was called. Failed calls count too.
    ///
    /// # Panics
    ///
    /// When no method has that name.
    #[must_use]
    pub fn calls(&self, name: &str) -> u64 {
        self.shared.state.lock().counts[Call::named(name) as usize]
    }

    /// Returns the number of all driver calls. Failed calls count too.
    #[must_use]
    pub fn total_calls(&self) -> u64 {
        self.shared.state.lock().counts.iter().sum()
    }

    /// Returns the methods that were called at least once, with their counts, in the order of [`Call::ALL`].
    #[must_use]
    pub fn call_counts(&self) -> Vec<(&'static str, u64)> {
        let counts = self.shared.state.lock().counts;
        let named = Call::ALL.into_iter().map(Call::name).zip(counts);
        named.filter(|(_, count)| *count > 0).collect()
    }

    /// Returns how many of [`HeldResources::mapped_bytes`] another device may access.
    #[must_use]
    pub fn mapped_bytes_open_to(&self, device: DeviceId) -> u64 {
        self.shared.state.lock().mappings.peer_bytes(device)
    }

    /// Returns the number of references to pieces of virtual memory: one for each `create` and `import`,
    /// minus one for each `release`.
    #[must_use]
    pub fn piece_holds(&self) -> u64 {
        self.shared.state.lock().mappings.holds_of_pieces()
    }

    /// Returns the resources that callers hold.
    #[must_use]
    pub fn held(&self) -> HeldResources {
        let state = self.shared.state.lock();
        let mut held = HeldResources {
            segments: state.memory.live().collect(),
            pool_ranges: state.pools.live.len() as u64,
            pinned_bytes: state.pinned.bytes() + state.host.bytes(),
            events: state.work.events.len() as u64,
            ..HeldResources::default()
        };
        state.mappings.add_to(&mut held);
        held
    }

    /// Finishes all work of all streams. With worker threads, waits for it. Captures stay valid.
    pub fn complete_all(&self) {
        let mut locked = self.lock();
        if !locked.work.has_threads {
            return locked.work.finish_all();
        }
        let ends = locked.work.ends();
        locked.reach(&ends);
    }

    /// Returns how many captures [`expect_captures`](stratalloc::driver::Capture::expect_captures) has
    /// announced.
    #[must_use]
    pub fn captures_expected(&self) -> u64 {
        self.shared.state.lock().graphs.expected
    }

    /// Invalidates the capture that a stream belongs to, if any, as an illegal call does on a real
    /// device.
    pub fn invalidate_capture(&self, stream: StreamId) {
        self.shared.state.lock().graphs.break_on(stream);
    }

    /// Returns the unfinished events with their streams, in the order in which they were recorded.
    #[must_use]
    pub fn pending_events(&self) -> Vec<(EventId, StreamId)> {
        let state = self.shared.state.lock();
        state.work.pending(state.now_ns)
    }
}

/// Controls of when work finishes. No threads run it.
#[doc(hidden)]
impl Sim {
    /// Finishes an event alone: earlier marks of its stream stay unfinished. No device does this; it is for
    /// tests of code that must not rely on order. Events that were never recorded, or in a capture, do not
    /// change.
    ///
    /// # Panics
    ///
    /// When there is no such event.
    pub fn complete_event(&self, event: EventId) {
        let mut state = self.shared.state.lock();
        match state.work.event(event) {
            Ok(Event::Marked(mark)) => state.work.finish_early(mark),
            Ok(Event::Fresh | Event::Captured { .. }) => {}
            Err(refusal) => panic!("complete_event: {}", refusal.message()),
        }
    }

    /// Finishes all work submitted to a stream, and the work of other streams that it waits for. Does nothing
    /// if no call has named the stream.
    pub fn complete_stream(&self, stream: StreamId) {
        let mut state = self.shared.state.lock();
        if let Some(index) = state.work.known_stream(stream) {
            let end = state.work.end_of(index);
            state.work.finish(end);
        }
    }

    /// Returns the current position: all work submitted so far lies before it.
    #[must_use]
    pub fn submitted(&self) -> u64 {
        self.shared.state.lock().work.last_mark
    }

    /// Finishes the work of a stream up to a position that [`submitted`](Self::submitted) returned, and the
    /// work of other streams that it waits for.
    pub fn complete_until(&self, stream: StreamId, moment: u64) {
        let mut state = self.shared.state.lock();
        if let Some(index) = state.work.known_stream(stream) {
            state.work.finish_until(index, moment);
        }
    }
}

/// `hold` does nothing: in `EventMode::Manual`, all work is held back until a test finishes it.
impl WorkGate for Sim {
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
