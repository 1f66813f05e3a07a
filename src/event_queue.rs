//! Events that somebody waits for.
//!
//! Who must wait for streams records one event on each, and says what waits ([`EventQueue::push`]); each
//! event that has passed is told once. Events of a stream pass in order, so the oldest one answers for all
//! later ones. A stream that is another one on each thread counts as many. Events are used again.
//!
//! Source: PyTorch's `record_stream` rules.

use std::collections::VecDeque;

use parking_lot::Mutex;
use smallvec::SmallVec;

use crate::driver::{
    Driver, DriverResult, Timeline, record_outside_graphs, synchronize_outside_captures,
    timeline_of,
};
use crate::error::{DriverError, DriverErrorKind};
use crate::ids::{EventId, StreamId};

/// Recorded events, each with its stream.
pub(crate) type Recorded = SmallVec<[(EventId, StreamId); 4]>;

/// An event, and what waits for it.
#[derive(Clone, Copy, Debug)]
struct Pending<T> {
    event: EventId,
    on: Timeline,
    what: T,
    /// Grows with each call of [`EventQueue::push`].
    sequence: u64,
}

/// The events of one allocator. `T` names what waits.
#[derive(Debug)]
pub(crate) struct EventQueue<T> {
    queues: Mutex<Queues<T>>,
}

#[derive(Debug)]
struct Queues<T> {
    /// Timelines with pending events, oldest event first in each.
    active: Vec<VecDeque<Pending<T>>>,
    /// Empty queues, kept for their capacity.
    idle: Vec<VecDeque<Pending<T>>>,
    /// Events that nothing waits for.
    spare: Vec<EventId>,
    next_sequence: u64,
}

impl<T> Queues<T> {
    #[inline]
    fn push(&mut self, pending: Pending<T>) {
        let same = |queue: &&mut VecDeque<Pending<T>>| {
            queue.front().is_some_and(|first| first.on == pending.on)
        };
        match self.active.iter_mut().find(same) {
            Some(queue) => queue.push_back(pending),
            None => {
                let mut queue = self.idle.pop().unwrap_or_default();
                queue.push_back(pending);
                self.active.push(queue);
            }
        }
    }
}

impl<T> Default for EventQueue<T> {
    fn default() -> Self {
        let (active, idle, spare) = (Vec::new(), Vec::new(), Vec::new());
        Self { queues: Mutex::new(Queues { active, idle, spare, next_sequence: 0 }) }
    }
}

impl<T: Copy> EventQueue<T> {
    /// Records an event on each stream. Streams that are gone have none: the device was waited for. All or
    /// none.
    ///
    /// # Errors
    ///
    /// [`DriverError`]; of the kind `CaptureActive` when a capture is in the way.
    pub(crate) fn record(
        &self,
        driver: &dyn Driver,
        streams: impl IntoIterator<Item = StreamId>,
    ) -> DriverResult<Recorded> {
        let mut recorded = Recorded::new();
        for stream in streams {
            let failed = match self.record_one(driver, stream) {
                Ok(event) => {
                    recorded.push((event, stream));
                    continue;
                }
                // The stream is gone, and nothing can be recorded on it: wait for its work.
                Err(error) if error.kind() == DriverErrorKind::InvalidValue => {
                    synchronize_outside_captures(driver)
                }
                Err(error) => Err(error),
            };
            if let Err(error) = failed {
                self.give_back(&recorded);
                return Err(error);
            }
        }
        Ok(recorded)
    }

    #[inline]
    fn record_one(&self, driver: &dyn Driver, stream: StreamId) -> DriverResult<EventId> {
        let spare = self.queues.lock().spare.pop();
        let event = match spare {
            Some(event) => event,
            None => driver.create_event()?,
        };
        if let Err(error) = record_outside_graphs(driver, event, stream) {
            self.queues.lock().spare.push(event);
            return Err(error);
        }
        Ok(event)
    }

    /// Events that nothing waits for after all.
    pub(crate) fn give_back(&self, recorded: &[(EventId, StreamId)]) {
        self.queues.lock().spare.extend(recorded.iter().map(|(event, _)| *event));
    }

    /// Lets `what` wait for these events. They were recorded by the calling thread.
    pub(crate) fn push(&self, driver: &dyn Driver, recorded: &[(EventId, StreamId)], what: T) {
        let mut queues = self.queues.lock();
        let sequence = queues.next_sequence;
        queues.next_sequence += 1;
        for &(event, stream) in recorded {
            queues.push(Pending { event, on: timeline_of(driver, stream), what, sequence });
        }
    }

    /// Calls `passed` for each event that has passed, with the queue locked. Waits for another thread that
    /// is at it, and for no work of the device.
    ///
    /// # Errors
    ///
    /// [`DriverError`]: the first event that cannot be asked, unless a capture
    /// keeps it from that. Its stream is passed over, and goes on waiting.
    pub(crate) fn poll(&self, driver: &dyn Driver, passed: impl FnMut(T)) -> DriverResult<()> {
        poll(&mut self.queues.lock(), driver, passed)
    }

    /// Like [`poll`](Self::poll), unless another thread is at it.
    ///
    /// # Errors
    ///
    /// As [`poll`](Self::poll).
    pub(crate) fn try_poll(&self, driver: &dyn Driver, passed: impl FnMut(T)) -> DriverResult<()> {
        match self.queues.try_lock() {
            Some(mut queues) => poll(&mut queues, driver, passed),
            None => Ok(()),
        }
    }

    /// Waits for the events of what is `wanted`, in the order in which it was pushed, and calls `passed` for
    /// each, with the queue unlocked.
    ///
    /// # Errors
    ///
    /// [`DriverError`]: the first event that cannot be waited for; of the kind
    /// `CaptureActive` only where nothing else was in the way. What waits for it goes on waiting.
    pub(crate) fn drain(
        &self,
        driver: &dyn Driver,
        wanted: impl Fn(T) -> bool,
        mut passed: impl FnMut(T),
    ) -> DriverResult<()> {
        let mut failed = None;
        for pending in self.take_all() {
            if !wanted(pending.what) {
                self.queues.lock().push(pending);
                continue;
            }
            if let Err(error) = driver.synchronize_event(pending.event) {
                self.queues.lock().push(pending);
                failed = match failed {
                    Some(first) if !is_captures(&first) || is_captures(&error) => Some(first),
                    _ => Some(error),
                };
                continue;
            }
            self.queues.lock().spare.push(pending.event);
            passed(pending.what);
        }
        failed.map_or(Ok(()), Err)
    }

    /// Takes all pending events, in the order in which they were pushed.
    fn take_all(&self) -> Vec<Pending<T>> {
        let mut queues = self.queues.lock();
        let mut all = Vec::new();
        while let Some(mut queue) = queues.active.pop() {
            all.extend(queue.drain(..));
            queues.idle.push(queue);
        }
        all.sort_by_key(|pending| pending.sequence);
        all
    }

    /// Destroys the events that nothing waits for. Waits for no work of the device.
    ///
    /// # Errors
    ///
    /// [`DriverError`]: the first event that the driver does not destroy. It is kept, as are the rest.
    pub(crate) fn destroy_spare(&self, driver: &dyn Driver) -> DriverResult<()> {
        let count = self.queues.lock().spare.len();
        for _ in 0..count {
            let spare = self.queues.lock().spare.pop();
            let Some(event) = spare else { break };
            if let Err(error) = driver.destroy_event(event) {
                self.queues.lock().spare.push(event);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Gives all events back to the driver, when the allocator goes.
    pub(crate) fn destroy(&self, driver: &dyn Driver) {
        let pending = self.take_all().into_iter().map(|pending| pending.event);
        for event in std::mem::take(&mut self.queues.lock().spare).into_iter().chain(pending) {
            // Nobody is left who could be told; the driver drops its events with its context.
            let _ = driver.destroy_event(event);
        }
    }
}

/// Whether it failed for a capture's sake.
fn is_captures(error: &DriverError) -> bool {
    error.kind() == DriverErrorKind::CaptureActive
}

fn poll<T: Copy>(
    queues: &mut Queues<T>,
    driver: &dyn Driver,
    mut passed: impl FnMut(T),
) -> DriverResult<()> {
    let mut failed = None;
    let mut at = 0;
    while at < queues.active.len() {
        let queue = &mut queues.active[at];
        while let Some(&first) = queue.front() {
            match driver.query_event(first.event) {
                Ok(true) => {}
                Ok(false) => break,
                // A capture keeps it from being asked.
                Err(error) if is_captures(&error) => break,
                Err(error) => {
                    failed = failed.or(Some(error));
                    break;
                }
            }
            queue.pop_front();
            queues.spare.push(first.event);
            passed(first.what);
        }
        if queue.is_empty() {
            let queue = queues.active.swap_remove(at);
            queues.idle.push(queue);
        } else {
            at += 1;
        }
    }
    failed.map_or(Ok(()), Err)
}
