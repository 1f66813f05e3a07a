//! CUDA events that must complete before freed memory can be reused.
//!
//! An item, such as a freed block, may have to wait for work of several streams. The allocator records
//! one event on each stream and pushes the events together with the item ([`EventQueue::push`]). The
//! queue reports each completed event once. Events of one stream complete in order, so only the
//! oldest is queried. Each thread's per-thread default stream has a queue of its own. Completed events are
//! reused. A push finds the queue of its stream among any number of streams in constant time.
//!
//! Source: the rules of PyTorch's `record_stream`.

use std::collections::VecDeque;

use hashbrown::HashMap;
use smallvec::SmallVec;

use crate::driver::{
    Driver, DriverResult, Timeline, record_outside_graphs, synchronize_outside_captures,
    timeline_of,
};
use crate::error::{DriverError, DriverErrorKind};
use crate::ids::{EventId, StreamId};
use crate::sync::ShortLock;

/// Recorded events, each with its stream.
pub(crate) type Recorded = SmallVec<[(EventId, StreamId); 4]>;

/// An event, and the item that waits for the event.
#[derive(Clone, Copy, Debug)]
struct Pending<T> {
    event: EventId,
    on: Timeline,
    what: T,
    /// Increases with each call of [`EventQueue::push`].
    sequence: u64,
}

/// The events of one allocator. `T` identifies the item that waits.
#[derive(Debug)]
pub(crate) struct EventQueue<T> {
    queues: ShortLock<Queues<T>>,
}

#[derive(Debug)]
struct Queues<T> {
    /// The timelines that may have pending events, in no particular order. At most [`SEARCHED_MAX`] of
    /// them have none: the next event of a timeline is then pushed without another queue.
    active: Vec<Active<T>>,
    /// The index in `active` of each timeline, while there are more than [`SEARCHED_MAX`]. Otherwise
    /// empty: a search is faster then.
    places: HashMap<Timeline, usize>,
    /// Empty queues, kept for their capacity.
    idle: Vec<VecDeque<Pending<T>>>,
    /// Events that are not in use.
    spare: Vec<EventId>,
    next_sequence: u64,
}

/// The pending events of a timeline, oldest event first.
#[derive(Debug)]
struct Active<T> {
    on: Timeline,
    pending: VecDeque<Pending<T>>,
}

/// The number of timelines up to which a push searches all of them.
const SEARCHED_MAX: usize = 16;

impl<T> Queues<T> {
    #[inline]
    fn push(&mut self, pending: Pending<T>) {
        match self.place_of(pending.on) {
            Some(place) => self.active[place].pending.push_back(pending),
            None => self.activate(pending),
        }
    }

    #[inline]
    fn place_of(&self, on: Timeline) -> Option<usize> {
        if self.active.len() <= SEARCHED_MAX {
            return self.active.iter().position(|queue| queue.on == on);
        }
        self.places.get(&on).copied()
    }

    /// Adds the queue of a timeline that has none.
    #[inline]
    fn activate(&mut self, first: Pending<T>) {
        let on = first.on;
        let mut pending = self.idle.pop().unwrap_or_default();
        pending.push_back(first);
        self.active.push(Active { on, pending });
        if self.active.len() > SEARCHED_MAX {
            self.note_last_places();
        }
    }

    /// Adds to `places` the timelines that it lacks: the last one, or all.
    #[cold]
    fn note_last_places(&mut self) {
        let first = self.places.len();
        let last = self.active.iter().enumerate().skip(first);
        self.places.extend(last.map(|(place, queue)| (queue.on, place)));
    }

    /// Removes a queue that has become empty. The last queue takes its place.
    #[inline]
    fn deactivate(&mut self, place: usize) {
        let Active { on, pending } = self.active.swap_remove(place);
        self.idle.push(pending);
        if !self.places.is_empty() {
            self.forget_place(on, place);
        }
    }

    #[cold]
    fn forget_place(&mut self, on: Timeline, place: usize) {
        self.places.remove(&on);
        if let Some(moved) = self.active.get(place) {
            self.places.insert(moved.on, place);
        }
        if self.active.len() <= SEARCHED_MAX {
            self.places.clear();
        }
    }
}

impl<T> Default for EventQueue<T> {
    fn default() -> Self {
        Self {
            queues: ShortLock::new(Queues {
                active: Vec::new(),
                places: HashMap::new(),
                idle: Vec::new(),
                spare: Vec::new(),
                next_sequence: 0,
            }),
        }
    }
}

impl<T: Copy> EventQueue<T> {
    /// Records an event on each stream and returns the events. If one record fails, returns none of
    /// them. For a stream that no longer exists, synchronizes the device instead.
    ///
    /// # Errors
    ///
    /// [`DriverError`]. Of the kind `CaptureActive` when a capture prevents the call.
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
                // The stream no longer exists, so no event can be recorded on it. Wait for its work
                // instead.
                Err(error) if error.kind() == DriverErrorKind::InvalidValue => {
                    synchronize_outside_captures(driver)
                }
                Err(error) => Err(error),
            };
            if let Err(error) = failed {
                self.return_unused(&recorded);
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

    /// Returns recorded events that nothing waits for, so that they can be reused.
    pub(crate) fn return_unused(&self, recorded: &[(EventId, StreamId)]) {
        self.queues.lock().spare.extend(recorded.iter().map(|(event, _)| *event));
    }

    /// Makes `what` wait for these events, which the calling thread has recorded.
    pub(crate) fn push(&self, driver: &dyn Driver, recorded: &[(EventId, StreamId)], what: T) {
        let mut queues = self.queues.lock();
        let sequence = queues.next_sequence;
        queues.next_sequence += 1;
        for &(event, stream) in recorded {
            queues.push(Pending { event, on: timeline_of(driver, stream), what, sequence });
        }
    }

    /// Calls `passed` for each event that has passed, while the queue is locked. Waits if another
    /// thread is polling. Does not wait for work of the device.
    ///
    /// # Errors
    ///
    /// [`DriverError`] of the first event that cannot be queried, unless a capture prevents the query.
    /// The remaining events of that stream stay queued.
    pub(crate) fn poll(&self, driver: &dyn Driver, passed: impl FnMut(T)) -> DriverResult<()> {
        poll(&mut self.queues.lock(), driver, passed)
    }

    /// Polls as [`poll`](Self::poll) does, but returns at once if another thread has locked the queue.
    ///
    /// # Errors
    ///
    /// Those of [`poll`](Self::poll).
    pub(crate) fn try_poll(&self, driver: &dyn Driver, passed: impl FnMut(T)) -> DriverResult<()> {
        match self.queues.try_lock() {
            Some(mut queues) => poll(&mut queues, driver, passed),
            None => Ok(()),
        }
    }

    /// Waits for the events of all items for which `wanted` returns true, in the order in which they
    /// were pushed. Calls `passed` for each event, while the queue is unlocked.
    ///
    /// # Errors
    ///
    /// [`DriverError`] of the first event that cannot be waited for. Of the kind `CaptureActive` only
    /// if there was no other error. Events that failed stay queued.
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

    /// Removes and returns all pending events, in the order in which they were pushed.
    fn take_all(&self) -> Vec<Pending<T>> {
        let queues = &mut *self.queues.lock();
        let mut all = Vec::new();
        for mut queue in queues.active.drain(..) {
            all.extend(queue.pending.drain(..));
            queues.idle.push(queue.pending);
        }
        queues.places.clear();
        all.sort_by_key(|pending| pending.sequence);
        all
    }

    /// Destroys the events that are not in use. Does not wait for work of the device.
    ///
    /// # Errors
    ///
    /// [`DriverError`] of the first event that the driver fails to destroy. This event and the rest are
    /// kept.
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

    /// Destroys all events when the allocator is dropped.
    pub(crate) fn destroy(&self, driver: &dyn Driver) {
        let pending = self.take_all().into_iter().map(|pending| pending.event);
        for event in std::mem::take(&mut self.queues.lock().spare).into_iter().chain(pending) {
            // An error cannot be returned to any caller. The event is then destroyed together with its
            // context.
            let _ = driver.destroy_event(event);
        }
    }
}

/// Returns true if the call failed because a stream capture is active.
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
        let queue = &mut queues.active[at].pending;
        while let Some(&first) = queue.front() {
            match driver.query_event(first.event) {
                Ok(true) => {}
                Ok(false) => break,
                // A capture prevents the query: try again at a later poll.
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
        if queue.is_empty() && queues.active.len() > SEARCHED_MAX {
            queues.deactivate(at);
        } else {
            at += 1;
        }
    }
    failed.map_or(Ok(()), Err)
}
