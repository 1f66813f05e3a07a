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
use crate::error::{DriverError, HandleError};
use crate::heap::{Heap, Slot};
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
        find: impl Fn(&Heap) -> Option<Slot>,
    ) -> Result<(), HandleError> {
        let stale = HandleError::Stale { address };
        let streams: SmallVec<[StreamId; 4]> = {
            let state = cell.lock();
            let slot = find(&state.heap).ok_or(stale.clone())?;
            state.heap.streams_using(slot).collect()
        };
        let mut events: SmallVec<[EventId; 4]> = SmallVec::new();
        for &stream in &streams {
            match self.record_new_event(stream) {
                Ok(event) => events.push(event),
                Err(error) => {
                    self.events.queues.lock().spare.extend(events);
                    return Err(HandleError::Driver(error));
                }
            }
        }
        let slot = {
            let mut state = cell.lock();
            let Some(slot) = find(&state.heap) else {
                drop(state);
                self.events.queues.lock().spare.extend(events);
                return Err(stale);
            };
            let count = u32::try_from(events.len()).expect("streams of a block are few");
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
        for (event, stream) in events.into_iter().zip(streams) {
            queues.push(Pending { event, stream, heap: cell.number, slot, sequence });
            self.events.pending.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
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
        let Some(mut queues) = self.events.queues.try_lock() else {
            return Ok(());
        };
        let queues = &mut *queues;
        let mut at = 0;
        while at < queues.active.len() {
            let queue = &mut queues.active[at];
            while let Some(&first) = queue.front() {
                if !self.driver.query_event(first.event)? {
                    break;
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
        Ok(())
    }

    /// Waits for every pending event and frees the blocks. May wait for running work.
    ///
    /// # Errors
    ///
    /// [`DriverError`]; blocks whose events could not be waited for go on waiting.
    pub(super) fn drain_events(&self) -> Result<(), DriverError> {
        let all = self.events.take_all();
        for (done, &pending) in all.iter().enumerate() {
            if let Err(error) = self.driver.synchronize_event(pending.event) {
                let mut queues = self.events.queues.lock();
                all[done..].iter().for_each(|&rest| queues.push(rest));
                return Err(error);
            }
            self.events.queues.lock().spare.push(pending.event);
            self.pass(pending);
        }
        Ok(())
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
