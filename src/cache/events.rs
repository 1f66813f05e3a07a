//! Blocks that wait for other streams.
//!
//! A free of such a block records one event per stream and returns. Every later allocation asks the
//! oldest event of each stream whether it has finished, and stops at the first that has not, so a
//! stream's events are answered in order. Events are reused.
//!
//! Source: PyTorch's `record_stream` rules.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use smallvec::SmallVec;

use super::cell::HeapCell;
use super::engine::Engine;
use crate::error::{DriverError, DriverErrorKind, HandleError};
use crate::heap::{BlockId, Heap, Slot};
use crate::history::Action;
use crate::ids::{EventId, StreamId};

/// One event that one draining block waits for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pending {
    event: EventId,
    stream: StreamId,
    heap: u32,
    slot: Slot,
    /// Events are drained in the order in which blocks were freed.
    sequence: u64,
}

#[derive(Debug, Default)]
pub(super) struct EventQueue {
    pending: AtomicUsize,
    queues: Mutex<Queues>,
}

#[derive(Debug, Default)]
struct Queues {
    /// Streams with pending events, oldest event first in each.
    active: Vec<VecDeque<Pending>>,
    /// Empty queues, kept for their capacity.
    idle: Vec<VecDeque<Pending>>,
    /// Events that nothing waits for.
    spare: Vec<EventId>,
    next_sequence: u64,
}

impl Queues {
    fn push(&mut self, pending: Pending) {
        let same = |queue: &&mut VecDeque<Pending>| {
            queue.front().is_some_and(|first| first.stream == pending.stream)
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

impl EventQueue {
    /// Whether any block waits for an event. One relaxed load.
    #[inline]
    pub(super) fn any_pending(&self) -> bool {
        self.pending.load(Ordering::Relaxed) != 0
    }

    /// Takes all pending events, in the order in which their blocks were freed.
    fn take_all(&self) -> Vec<Pending> {
        let mut queues = self.queues.lock();
        let mut all = Vec::new();
        while let Some(mut queue) = queues.active.pop() {
            all.extend(queue.drain(..));
            queues.idle.push(queue);
        }
        all.sort_by_key(|pending| pending.sequence);
        all
    }
}

impl Engine {
    /// Takes back a block that other streams use. The events are recorded first, so that a driver's
    /// failure leaves the block in the caller's hands.
    #[cold]
    pub(super) fn free_when_drained(
        &self,
        cell: &HeapCell,
        address: u64,
        find: &dyn Fn(&Heap) -> Option<Slot>,
    ) -> Result<(), HandleError> {
        let stale = HandleError::Stale { address };
        let (id, streams): (BlockId, SmallVec<[StreamId; 4]>) = {
            let state = cell.lock();
            let slot = find(&state.heap).ok_or(stale.clone())?;
            (state.heap.id(slot), state.heap.streams_using(slot).collect())
        };
        let mut waits: SmallVec<[(EventId, StreamId); 4]> = SmallVec::new();
        for &stream in &streams {
            match self.record_new_event(stream) {
                Ok(event) => waits.push((event, stream)),
                // The stream is gone, and nothing can be recorded on it: wait for its work.
                Err(error) if error.kind == DriverErrorKind::InvalidValue => {
                    if let Err(error) = self.driver.synchronize_device() {
                        self.give_events_back(waits);
                        return Err(HandleError::Driver(error));
                    }
                }
                Err(error) => {
                    self.give_events_back(waits);
                    return Err(HandleError::Driver(error));
                }
            }
        }
        let slot = {
            let mut state = cell.lock();
            // Between the two looks another thread may have freed the address or announced a
            // further stream: then this is not the block whose events were recorded.
            let same = state.heap.live(id, address).filter(|&slot| {
                let now: SmallVec<[StreamId; 4]> = state.heap.streams_using(slot).collect();
                now == streams
            });
            let Some(slot) = same else {
                drop(state);
                self.give_events_back(waits);
                return self.free_block(cell, address, find);
            };
            if waits.is_empty() {
                state.heap.forget_uses(slot);
                drop(state);
                return self.free_block(cell, address, |heap| heap.live(id, address));
            }
            let count = u32::try_from(waits.len()).expect("streams of a block are few");
            let block = state.heap.view(slot);
            state.heap.drain(slot, count);
            let oversize = state.policy.is_oversize(block.size_bytes);
            state.counters.given_back(block.kind, block.size_bytes, oversize);
            cell.mark_moved();
            self.record(Action::FreeRequested, block.address, block.requested_bytes, cell.stream);
            slot
        };
        let mut queues = self.events.queues.lock();
        let sequence = queues.next_sequence;
        queues.next_sequence += 1;
        for (event, stream) in waits {
            queues.push(Pending { event, stream, heap: cell.number, slot, sequence });
            self.events.pending.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Events that nothing waits for after all.
    fn give_events_back(&self, waits: SmallVec<[(EventId, StreamId); 4]>) {
        self.events.queues.lock().spare.extend(waits.into_iter().map(|(event, _)| event));
    }

    fn record_new_event(&self, stream: StreamId) -> Result<EventId, DriverError> {
        let spare = self.events.queues.lock().spare.pop();
        let event = match spare {
            Some(event) => event,
            None => self.driver.create_event()?,
        };
        if let Err(error) = self.driver.record_event(event, stream) {
            self.events.queues.lock().spare.push(event);
            return Err(error);
        }
        Ok(event)
    }

    /// Frees blocks whose events have finished. Skipped when another thread is at it.
    ///
    /// # Errors
    ///
    /// [`DriverError`] when an event cannot be queried; its block goes on waiting.
    #[cold]
    pub fn poll_events(&self) -> Result<(), DriverError> {
        match self.events.queues.try_lock() {
            Some(mut queues) => self.poll(&mut queues),
            None => Ok(()),
        }
    }

    /// Like [`poll_events`](Self::poll_events), but waits for another thread that is at it.
    pub(super) fn poll_events_surely(&self) -> Result<(), DriverError> {
        self.poll(&mut self.events.queues.lock())
    }

    /// A stream whose event cannot be queried is passed over; the first error is told.
    fn poll(&self, queues: &mut Queues) -> Result<(), DriverError> {
        let mut failed = None;
        let mut at = 0;
        while at < queues.active.len() {
            let queue = &mut queues.active[at];
            while let Some(&first) = queue.front() {
                match self.driver.query_event(first.event) {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(error) => {
                        failed = failed.or(Some(error));
                        break;
                    }
                }
                queue.pop_front();
                queues.spare.push(first.event);
                self.pass(first);
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

    /// Waits for every pending event and frees the blocks. May wait for running work.
    ///
    /// # Errors
    ///
    /// [`DriverError`]; blocks whose events could not be waited for go on waiting.
    pub(super) fn drain_events(&self) -> Result<(), DriverError> {
        let mut failed = None;
        for pending in self.events.take_all() {
            if let Err(error) = self.driver.synchronize_event(pending.event) {
                self.events.queues.lock().push(pending);
                failed = failed.or(Some(error));
                continue;
            }
            self.events.queues.lock().spare.push(pending.event);
            self.pass(pending);
        }
        failed.map_or(Ok(()), Err)
    }

    /// One event of a block has passed.
    fn pass(&self, pending: Pending) {
        self.events.pending.fetch_sub(1, Ordering::Relaxed);
        let cell = self.heaps.get(pending.heap).expect("heaps are never removed");
        self.complete(cell, pending.slot);
    }

    /// Gives the events back to the driver, when the engine goes.
    pub(super) fn destroy_events(&self) {
        for pending in self.events.take_all() {
            self.events.queues.lock().spare.push(pending.event);
        }
        for event in std::mem::take(&mut self.events.queues.lock().spare) {
            // Nobody is left who could be told; the driver drops its events with its context.
            let _ = self.driver.destroy_event(event);
        }
    }
}
