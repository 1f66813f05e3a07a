//! Blocks that wait for other streams, when the user's functions do not wait themselves, and for the
//! freeing thread's own one.
//!
//! A free of such a block records one event per stream and returns; later requests ask whether the
//! events have passed, and then the user's `free` is called. Events of a stream pass in order, so one
//! that has not passed answers for all later ones. While a stream is captured no event of it is
//! recorded: the block waits for the capture's end first. Of a stream that is another one on each thread
//! only the thread that freed the block can tell; for a thread that does not come back the device is
//! waited for.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::ThreadId;

use parking_lot::Mutex;
use smallvec::SmallVec;

use super::PluggableAllocator;
use super::table::{Mark, State};
use crate::driver::{
    Timeline, captured, expects_captures, may_be_captured, record_outside_graphs,
    synchronize_outside_captures, thread_of, timeline_of,
};
use crate::error::{DriverError, DriverErrorKind, HandleError};
use crate::history::Action;
use crate::ids::{EventId, PoolId, StreamId};

type Streams = SmallVec<[StreamId; 2]>;
type Events = SmallVec<[(EventId, Timeline); 2]>;

/// What has to happen before a block is free.
#[derive(Clone, Debug)]
enum Until {
    /// The captures that these streams are in end; only this thread can tell, if there is one.
    CapturesEnd(Streams, Option<ThreadId>),
    /// These events pass.
    Passed(Events),
}

impl Until {
    /// Whether only another thread can tell.
    fn is_asked_elsewhere(&self) -> bool {
        match self {
            Self::CapturesEnd(_, Some(thread)) => *thread != std::thread::current().id(),
            Self::CapturesEnd(_, None) | Self::Passed(_) => false,
        }
    }
}

#[derive(Clone, Debug)]
struct Entry {
    address: u64,
    mark: Mark,
    pool: PoolId,
    until: Until,
}

#[derive(Debug, Default)]
pub(super) struct Waiting {
    count: AtomicUsize,
    /// In the order in which they were freed.
    entries: Mutex<VecDeque<Entry>>,
    /// Events that nothing waits for.
    spare: Mutex<Vec<EventId>>,
}

impl Waiting {
    /// Whether any block waits. One relaxed load.
    pub(super) fn any(&self) -> bool {
        self.count.load(Ordering::Relaxed) != 0
    }
}

/// Blocks whose waiting has ended, on their way back. What is not reached, because a user's function
/// panics, waits again, for nothing.
struct Ready<'a> {
    of: &'a PluggableAllocator,
    entries: VecDeque<Entry>,
}

impl Ready<'_> {
    fn complete(mut self) {
        while let Some(entry) = self.entries.pop_front() {
            self.of.waiting.count.fetch_sub(1, Ordering::Relaxed);
            self.of.retire(entry.address, entry.mark, State::Draining, entry.pool);
        }
    }
}

impl Drop for Ready<'_> {
    fn drop(&mut self) {
        if !self.entries.is_empty() {
            self.of.waiting.entries.lock().extend(self.entries.drain(..));
        }
    }
}

impl PluggableAllocator {
    /// Takes back a block of `own` that other streams use, or that is of another stream on each thread.
    /// Events are recorded first, so that a driver's failure leaves the block in the caller's hands.
    pub(super) fn free_when_drained(
        &self,
        address: u64,
        mark: Mark,
        own: StreamId,
        uses: &[StreamId],
    ) -> Result<(), HandleError> {
        let mut streams = Streams::from_slice(uses);
        if self.driver.is_per_thread_stream(own) && !streams.contains(&own) {
            streams.push(own);
        }
        let recorded = match streams.iter().find(|stream| self.may_be_captured(**stream)) {
            Some(stream) => Err(captured(*stream)),
            None => self.record_events(&streams),
        };
        let until = match recorded {
            Err(error) if error.kind == DriverErrorKind::CaptureActive => {
                let thread = streams.iter().find_map(|stream| thread_of(&*self.driver, *stream));
                Until::CapturesEnd(streams, thread)
            }
            recorded => Until::Passed(recorded?),
        };
        let mut shard = self.table.lock(address);
        let same = |block: &&super::Block| block.uses.as_slice() == uses;
        let Some(block) = shard.live(address, Some(mark)).filter(same) else {
            // Another thread freed it or announced a stream meanwhile.
            let again = shard.live(address, Some(mark)).is_some();
            drop(shard);
            self.put_back(until);
            return match again {
                true => self.free_block(address, Some(mark)).map(drop),
                false => Err(HandleError::Stale { address }),
            };
        };
        let (stream, pool, requested) = (block.stream, block.pool, block.requested_bytes);
        shard.drain(address);
        drop(shard);
        self.record(Action::FreeRequested, address, requested, (stream, pool));
        self.waiting.entries.lock().push_back(Entry { address, mark, pool, until });
        self.waiting.count.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn put_back(&self, until: Until) {
        if let Until::Passed(events) = until {
            self.waiting.spare.lock().extend(events.into_iter().map(|(event, _)| event));
        }
    }

    /// Whether work on the stream may go into a graph.
    pub(super) fn may_be_captured(&self, stream: StreamId) -> bool {
        may_be_captured(&*self.driver, stream)
    }

    /// One event on each stream, all or none. A stream that is gone has none: the device was waited
    /// for. `CaptureActive` when a capture is in the way of either.
    fn record_events(&self, streams: &[StreamId]) -> Result<Events, DriverError> {
        let mut events = Events::new();
        for &stream in streams {
            let failed = match self.record_new_event(stream) {
                Ok(event) => {
                    events.push((event, timeline_of(&*self.driver, stream)));
                    continue;
                }
                Err(error) if error.kind == DriverErrorKind::InvalidValue => {
                    synchronize_outside_captures(&*self.driver)
                }
                Err(error) => Err(error),
            };
            if let Err(error) = failed {
                self.put_back(Until::Passed(events));
                return Err(error);
            }
        }
        Ok(events)
    }

    fn record_new_event(&self, stream: StreamId) -> Result<EventId, DriverError> {
        let spare = self.waiting.spare.lock().pop();
        let event = spare.map_or_else(|| self.driver.create_event(), Ok)?;
        if let Err(error) = record_outside_graphs(&*self.driver, event, stream) {
            self.waiting.spare.lock().push(event);
            return Err(error);
        }
        Ok(event)
    }

    /// Whether events may be asked and waited for on behalf of a request: no capture is known.
    pub(super) fn may_wait_for(&self, stream: StreamId) -> bool {
        !self.pools.know_a_capture() && !self.may_be_captured(stream)
    }

    /// Gives back what has been waited for, before a request on a stream. Skipped where events must
    /// not be asked; what an event answers with an error goes on waiting.
    pub(super) fn poll_for(&self, stream: StreamId) {
        if self.may_wait_for(stream) {
            // The request itself is sound; `process_events` tells of failures.
            let _ = self.poll();
        }
    }

    /// Gives back what has been waited for. Never waits for the device.
    pub(super) fn poll(&self) -> Result<(), DriverError> {
        let mut failed = None;
        let mut busy = Vec::new();
        let mut ready = Ready { of: self, entries: VecDeque::new() };
        self.waiting.entries.lock().retain_mut(|entry| {
            let passed = self.advance(&mut entry.until, &mut busy).unwrap_or_else(|error| {
                failed.get_or_insert(error);
                false
            });
            if passed {
                ready.entries.push_back(entry.clone());
            }
            !passed
        });
        ready.complete();
        failed.map_or(Ok(()), Err)
    }

    /// Whether the waiting has ended. `busy` are streams whose events are known to be unfinished.
    fn advance(&self, until: &mut Until, busy: &mut Vec<Timeline>) -> Result<bool, DriverError> {
        // This thread would ask of its own stream, and record on that.
        if until.is_asked_elsewhere() {
            return Ok(false);
        }
        if let Until::CapturesEnd(streams, _) = until {
            if streams.iter().any(|stream| self.may_be_captured(*stream)) {
                return Ok(false);
            }
            match self.record_events(streams) {
                // One has begun meanwhile.
                Err(error) if error.kind == DriverErrorKind::CaptureActive => return Ok(false),
                recorded => *until = Until::Passed(recorded?),
            }
        }
        let Until::Passed(events) = until else { return Ok(false) };
        while let Some(&(event, on)) = events.last() {
            if busy.contains(&on) {
                return Ok(false);
            }
            if !self.driver.query_event(event)? {
                busy.push(on);
                return Ok(false);
            }
            events.pop();
            self.waiting.spare.lock().push(event);
        }
        Ok(true)
    }

    /// Waits in the place of other threads, which alone can tell whether their own streams' captures
    /// have ended: a device that was waited for has no capture, and no work of theirs.
    fn wait_for_other_threads(&self) -> Result<(), DriverError> {
        let theirs: Vec<_> = {
            let entries = self.waiting.entries.lock();
            let foreign = entries.iter().filter(|entry| entry.until.is_asked_elsewhere());
            foreign.map(|entry| (entry.address, entry.mark)).collect()
        };
        if theirs.is_empty() || expects_captures(&*self.driver) {
            return Ok(());
        }
        self.driver.synchronize_device()?;
        for entry in self.waiting.entries.lock().iter_mut() {
            if let Until::CapturesEnd(streams, thread) = &mut entry.until
                && theirs.contains(&(entry.address, entry.mark))
            {
                streams.retain(|stream| !self.driver.is_per_thread_stream(*stream));
                *thread = None;
            }
        }
        Ok(())
    }

    /// Waits for every stream that a block waits for, and gives the blocks back. Blocks that wait for
    /// the end of a capture stay.
    ///
    /// # Errors
    ///
    /// The first [`DriverError`]; blocks that could not be waited for go on waiting.
    pub(super) fn drain(&self) -> Result<(), DriverError> {
        let mut failed = self.wait_for_other_threads().err();
        // Blocks whose captures have ended get their events first; what fails here fails again below.
        let _ = self.poll();
        let waiting: Vec<_> = {
            let entries = self.waiting.entries.lock();
            let events = entries.iter().filter_map(|entry| match &entry.until {
                Until::Passed(events) => Some(events.clone()),
                Until::CapturesEnd(..) => None,
            });
            events.flatten().collect()
        };
        for (event, _) in waiting {
            // An event that another thread has used again by now is waited for longer than needed.
            failed = failed.or(self.driver.synchronize_event(event).err());
        }
        failed.map_or_else(|| self.poll(), Err)
    }

    /// Gives the events back to the driver, when the allocator goes.
    pub(super) fn destroy_events(&self) {
        let entries = std::mem::take(&mut *self.waiting.entries.lock());
        let waiting = entries.into_iter().flat_map(|entry| match entry.until {
            Until::Passed(events) => events,
            Until::CapturesEnd(..) => Events::new(),
        });
        let mut events = std::mem::take(&mut *self.waiting.spare.lock());
        events.extend(waiting.map(|(event, _)| event));
        for event in events {
            // Nobody is left who could be told; the driver drops its events with its context.
            let _ = self.driver.destroy_event(event);
        }
    }
}
