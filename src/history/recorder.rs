//! Keeps the newest events while somebody wants them.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::Event;

/// A ring of events. Off at first.
#[derive(Debug, Default)]
pub struct Recorder {
    on: AtomicBool,
    ring: Mutex<Ring>,
}

#[derive(Debug, Default)]
struct Ring {
    events: VecDeque<Event>,
    most: usize,
}

impl Recorder {
    /// Starts recording; the newest `most` events are kept (at least 1).
    pub fn start(&self, most: usize) {
        let mut ring = self.ring.lock();
        ring.most = most.max(1);
        let excess = ring.events.len().saturating_sub(ring.most);
        ring.events.drain(..excess);
        drop(ring);
        self.on.store(true, Ordering::Release);
    }

    /// Stops recording and forgets.
    pub fn stop(&self) {
        self.on.store(false, Ordering::Release);
        self.ring.lock().events = VecDeque::new();
    }

    /// Takes the events recorded so far into `into`, oldest first.
    pub fn drain_into(&self, into: &mut Vec<Event>) {
        into.extend(self.ring.lock().events.drain(..));
    }

    /// Whether events are kept now.
    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// Adds an event if recording is on. The event is built only then.
    #[inline]
    pub(crate) fn record(&self, event: impl FnOnce() -> Event) {
        if self.is_on() {
            self.push(event());
        }
    }

    #[cold]
    fn push(&self, event: Event) {
        let mut ring = self.ring.lock();
        if ring.events.len() >= ring.most {
            ring.events.pop_front();
        }
        ring.events.push_back(event);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::Action;
    use crate::ids::{PoolId, StreamId};

    fn event(size_bytes: u64) -> Event {
        let (stream, pool) = (StreamId(0), PoolId::DEFAULT);
        Event { action: Action::Alloc, address: 0, size_bytes, stream, pool }
    }

    #[test]
    fn only_the_newest_events_are_kept_and_only_while_on() {
        let recorder = Recorder::default();
        recorder.record(|| event(1));
        recorder.start(2);
        (2..=4).for_each(|n| recorder.record(|| event(n)));
        let mut seen = Vec::new();
        recorder.drain_into(&mut seen);
        assert_eq!(seen, [event(3), event(4)]);
        recorder.stop();
        recorder.record(|| event(5));
        seen.clear();
        recorder.drain_into(&mut seen);
        assert_eq!(seen, []);
    }
}
