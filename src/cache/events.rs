//! Blocks that wait for other streams.
//!
//! A free of such a block records one event per stream and returns. Every later allocation asks the
//! oldest event of each stream whether it has finished, and stops at the first that has not, so a
//! stream's events are answered in order. A stream that is another one on each thread counts as many.
//! Events are reused.
//!
//! Source: PyTorch's `record_stream` rules.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use smallvec::SmallVec;

use super::cell::HeapCell;
use super::engine::Engine;
use crate::driver::{
    Timeline, may_be_captured, record_outside_graphs, synchronize_outside_captures, timeline_of,
};
use crate::error::{DriverError, DriverErrorKind, HandleError};
use crate::heap::{BlockId, Heap, Slot, StreamUse};
use crate::history::{Action, Listener};
use crate::ids::{EventId, PoolId, StreamId};

/// Whether a request must look at more than its heap: how many events are waited for, how many scopes are
/// open or blocks deferred, and whether somebody records. One number, so that a hit asks once.
#[derive(Debug, Default)]
pub(super) struct Attention(AtomicU64);

const EVENTS: u64 = (1 << 40) - 1;
const ONE_OTHER: u64 = 1 << 40;
const RECORDS: u64 = 1 << 63;

impl Attention {
    /// Whether anything asks for it. One relaxed load.
    #[inline]
    pub(super) fn any(&self) -> bool {
        self.0.load(Ordering::Relaxed) != 0
    }

    /// Whether nothing asks for it but somebody who records.
    pub(super) fn only_records(&self) -> bool {
        self.0.load(Ordering::Relaxed) == RECORDS
    }

    pub(super) fn any_event(&self) -> bool {
        self.0.load(Ordering::Relaxed) & EVENTS != 0
    }

    pub(super) fn any_other(&self) -> bool {
        self.0.load(Ordering::Relaxed) & !RECORDS > EVENTS
    }

    pub(super) fn add_other(&self) {
        self.0.fetch_add(ONE_OTHER, Ordering::Relaxed);
    }

    pub(super) fn remove_other(&self) {
        self.0.fetch_sub(ONE_OTHER, Ordering::Relaxed);
    }
}

impl Listener for Attention {
    fn records(&self, on: bool) {
        match on {
            true => self.0.fetch_or(RECORDS, Ordering::Relaxed),
            false => self.0.fetch_and(!RECORDS, Ordering::Relaxed),
        };
    }
}

/// One event that one draining block waits for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pending {
    event: EventId,
    on: Timeline,
    heap: u32,
    slot: Slot,
    /// Events are drained in the order in which blocks were freed.
    sequence: u64,
}

#[derive(Debug, Default)]
pub(super) struct EventQueue {
    queues: Mutex<Queues>,
}

/// Recorded events, each with its stream.
pub(super) type Waits = SmallVec<[(EventId, StreamId); 4]>;

#[derive(Debug, Default)]
struct Queues {
    /// Timelines with pending events, oldest event first in each.
    active: Vec<VecDeque<Pending>>,
    /// Empty queues, kept for their capacity.
    idle: Vec<VecDeque<Pending>>,
    /// Events that nothing waits for.
    spare: Vec<EventId>,
    next_sequence: u64,
}

impl Queues {
    #[inline]
    fn push(&mut self, pending: Pending) {
        let same = |queue: &&mut VecDeque<Pending>| {
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

impl EventQueue {
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
        let _asks = self.history.of_free();
        let mut uses = SmallVec::<[StreamUse; 4]>::new();
        let id = {
            let state = cell.lock();
            let slot = find(&state.heap).ok_or(HandleError::Stale { address })?;
            state.heap.uses(slot).for_each(|by| uses.push(by));
            state.heap.id(slot)
        };
        // Nobody else can record the events of this thread's own streams later. A captured use may be of
        // another thread's.
        let is_ours = |by: &StreamUse| !by.captured && self.driver.is_per_thread_stream(by.stream);
        let now = || uses.iter().all(is_ours);
        if self.scopes.any_capture() && !now() {
            return self.defer_free(cell, address, find);
        }
        // An event that is recorded in a capture never passes, also if nobody told of the capture, nor when
        // the capture has ended.
        if uses.iter().any(|by| may_be_captured(&*self.driver, by.stream)) {
            return self.defer_free(cell, address, find);
        }
        let waits = match self.record_events(&uses) {
            // One has begun meanwhile.
            Err(error) if error.kind == DriverErrorKind::CaptureActive => {
                return self.defer_free(cell, address, find);
            }
            recorded => recorded?,
        };
        if waits.is_empty() {
            let mut state = cell.lock();
            if let Some(slot) = same_block(&state.heap, id, address, &uses) {
                state.heap.forget_uses(slot);
            }
            drop(state);
            return self.free_block(cell, address, find).map(drop);
        }
        let count = u32::try_from(waits.len()).expect("streams of a block are few");
        match self.start_draining(cell, address, id, &uses, count) {
            Some(slot) => self.wait_for_events(waits, cell, slot),
            None => {
                self.give_events_back(waits);
                return self.free_block(cell, address, find).map(drop);
            }
        }
        Ok(())
    }

    /// Turns a live block into a draining one. `None` when it is not the block that `uses` was read
    /// from: between two looks another thread may have freed the address or announced a stream.
    pub(super) fn start_draining(
        &self,
        cell: &HeapCell,
        address: u64,
        id: BlockId,
        uses: &[StreamUse],
        count: u32,
    ) -> Option<Slot> {
        let mut state = cell.lock();
        let slot = same_block(&state.heap, id, address, uses)?;
        let block = state.heap.view(slot);
        state.heap.drain(slot, count);
        let oversize = state.policy.is_oversize(block.size_bytes);
        if state.counters.given_back(block.kind, block.size_bytes, oversize) {
            self.ledger.settle(cell.number, &mut state.counters, &self.heaps);
        }
        self.record(Action::FreeRequested, block.address, block.requested_bytes, cell);
        Some(slot)
    }

    /// Makes the draining block at `slot` free when these events have passed.
    pub(super) fn wait_for_events(&self, waits: Waits, cell: &HeapCell, slot: Slot) {
        let mut queues = self.events.queues.lock();
        let sequence = queues.next_sequence;
        queues.next_sequence += 1;
        for (event, stream) in waits {
            let on = timeline_of(&*self.driver, stream);
            queues.push(Pending { event, on, heap: cell.number, slot, sequence });
            self.attention.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Records an event on each use's stream. Streams that are gone have none: the device was waited for.
    /// All or none.
    pub(super) fn record_events(&self, uses: &[StreamUse]) -> Result<Waits, DriverError> {
        let mut waits = Waits::new();
        for &StreamUse { stream, .. } in uses {
            let failed = match self.record_new_event(stream) {
                Ok(event) => {
                    waits.push((event, stream));
                    continue;
                }
                // The stream is gone, and nothing can be recorded on it: wait for its work.
                Err(error) if error.kind == DriverErrorKind::InvalidValue => {
                    synchronize_outside_captures(&*self.driver)
                }
                Err(error) => Err(error),
            };
            if let Err(error) = failed {
                self.give_events_back(waits);
                return Err(error);
            }
        }
        Ok(waits)
    }

    /// Events that nothing waits for after all.
    fn give_events_back(&self, waits: Waits) {
        self.events.queues.lock().spare.extend(waits.into_iter().map(|(event, _)| event));
    }

    #[inline]
    fn record_new_event(&self, stream: StreamId) -> Result<EventId, DriverError> {
        let spare = self.events.queues.lock().spare.pop();
        let event = match spare {
            Some(event) => event,
            None => self.driver.create_event()?,
        };
        if let Err(error) = record_outside_graphs(&*self.driver, event, stream) {
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

    /// A stream whose event cannot be queried is passed over; the first error is told, unless a capture is
    /// the reason.
    fn poll(&self, queues: &mut Queues) -> Result<(), DriverError> {
        let mut failed = None;
        let mut at = 0;
        while at < queues.active.len() {
            let queue = &mut queues.active[at];
            while let Some(&first) = queue.front() {
                match self.driver.query_event(first.event) {
                    Ok(true) => {}
                    Ok(false) => break,
                    // A capture keeps it from being asked.
                    Err(error) if error.kind == DriverErrorKind::CaptureActive => break,
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
        self.drain_events_of(None)
    }

    /// Like [`drain_events`](Self::drain_events), for the blocks of one pool only.
    pub(super) fn drain_events_of(&self, pool: Option<PoolId>) -> Result<(), DriverError> {
        let mut failed = self.settle_deferred_surely().err();
        for pending in self.events.take_all() {
            let of = self.heaps.get(pending.heap).map(|cell| cell.pool());
            if pool.is_some() && of != pool {
                self.events.queues.lock().push(pending);
                continue;
            }
            if let Err(error) = self.driver.synchronize_event(pending.event) {
                self.events.queues.lock().push(pending);
                // A capture may keep it from being waited for.
                if error.kind != DriverErrorKind::CaptureActive {
                    failed = failed.or(Some(error));
                }
                continue;
            }
            self.events.queues.lock().spare.push(pending.event);
            self.pass(pending);
        }
        failed.map_or(Ok(()), Err)
    }

    /// One event of a block has passed.
    #[inline]
    fn pass(&self, pending: Pending) {
        self.attention.0.fetch_sub(1, Ordering::Relaxed);
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

/// The block that `id` names, if it is live at `address` and used by exactly these streams.
fn same_block(heap: &Heap, id: BlockId, address: u64, uses: &[StreamUse]) -> Option<Slot> {
    heap.live(id, address).filter(|&slot| heap.uses(slot).eq(uses.iter().copied()))
}
