//! Freed blocks that wait for work of other streams.
//!
//! Freeing a block that other streams use records one event on each of these streams and returns. The
//! block is then **draining**: it is no longer live, and becomes free when all its events have passed.
//! Every later allocation outside of captures queries the events of each stream, oldest first, up to the
//! first that has not completed (`event_queue`).
//!
//! Source: PyTorch's `record_stream` rules.

use std::sync::atomic::{AtomicU64, Ordering};

use smallvec::SmallVec;

use super::cell::{HeapCell, HeapGuard};
use super::engine::Engine;
use crate::driver::{may_be_captured, unless_captured};
use crate::error::{DriverError, DriverErrorKind, HandleError};
use crate::event_queue::Recorded;
use crate::heap::{BlockId, Heap, Slot, StreamUse};
use crate::history::{Action, Listener};
use crate::ids::{EventId, PoolId, StreamId};

/// Indicates whether a request needs more than a search of its heap. Counts pending events, and open
/// scopes plus deferred blocks; one bit is set while the history records. All are in one number, so that
/// a hit needs a single load.
#[derive(Debug, Default)]
pub(super) struct Attention(AtomicU64);

const EVENTS: u64 = (1 << 40) - 1;
const ONE_OTHER: u64 = 1 << 40;
const RECORDS: u64 = 1 << 63;

impl Attention {
    /// Returns true if any count is above zero or the history records. One relaxed load.
    #[inline]
    pub(super) fn any(&self) -> bool {
        self.0.load(Ordering::Relaxed) != 0
    }

    /// Returns true if the history records and both counts are zero.
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

/// A draining block, as an entry of the event queue.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waiting {
    heap: u32,
    slot: Slot,
}

impl Engine {
    /// Frees the live block at `slot` and `address` after the work of the streams that use it. Unlocks
    /// the heap first. Records events while the block is live, so that it stays live if the driver fails.
    /// During a capture defers the free.
    #[cold]
    pub(super) fn free_when_drained(
        &self,
        cell: &HeapCell,
        state: HeapGuard<'_>,
        slot: Slot,
        address: u64,
    ) -> Result<(), HandleError> {
        let id = state.heap.id(slot);
        let uses: SmallVec<[StreamUse; 4]> = state.heap.uses(slot).collect();
        if state.policy.asleep && uses.contains(&StreamUse::BACKED_UP) {
            drop(state);
            return self.free_asleep(cell, id, address);
        }
        drop(state);
        let _context = self.history.of_free();
        // If all uses are by this thread's per-thread default stream, events must be recorded now,
        // because no other thread can do that. A use inside a capture does not count, because it may be
        // by another thread.
        let is_ours = |by: &StreamUse| !by.captured && self.driver.is_per_thread_stream(by.stream);
        let may_wait = !self.scopes.any_capture() || uses.iter().all(is_ours);
        // The streams are checked even if no scope is open, because a capture need not have a scope. An
        // event recorded in a capture never passes, even after the capture has ended.
        if !may_wait || uses.iter().any(|by| may_be_captured(&*self.driver, by.stream)) {
            return self.defer_free(cell, address, id, uses);
        }
        let waits = match self.record_events(&uses) {
            // Another thread began a capture after the check.
            Err(error) if error.kind() == DriverErrorKind::CaptureActive => {
                return self.defer_free(cell, address, id, uses);
            }
            recorded => recorded?,
        };
        if waits.is_empty() {
            let mut state = cell.lock();
            if let Some(slot) = same_block(&state.heap, id, address, &uses) {
                state.heap.forget_uses(slot);
            }
            drop(state);
            return self.free_unused(cell, address, id);
        }
        let count = u32::try_from(waits.len()).expect("streams of a block are few");
        match self.start_draining(cell, address, id, &uses, count) {
            Some(slot) => self.wait_for_events(&waits, cell, slot),
            None => {
                self.events.return_unused(&waits);
                return self.free_unused(cell, address, id);
            }
        }
        Ok(())
    }

    /// Turns a live block into a draining one. Returns `None` if the block has changed since `uses` was
    /// read: another thread may have freed it or recorded another stream.
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
        if state.counters.began_draining(block.kind, block.size_bytes, oversize) {
            self.ledger.list(cell.number, block.kind, &mut state.counters, &self.heaps);
        }
        self.record(Action::FreeRequested, block.address, block.requested_bytes, cell);
        Some(slot)
    }

    /// Makes the draining block at `slot` free when these events have passed.
    pub(super) fn wait_for_events(
        &self,
        waits: &[(EventId, StreamId)],
        cell: &HeapCell,
        slot: Slot,
    ) {
        // Counted before the events are in the queue. As soon as they are, another thread may see them
        // pass and subtract them.
        self.attention.0.fetch_add(waits.len() as u64, Ordering::Relaxed);
        self.events.push(&*self.driver, waits, Waiting { heap: cell.number, slot });
    }

    /// Records an event on the stream of each use. If one fails, none remains recorded. For a stream
    /// that no longer exists, the device is synchronized instead.
    pub(super) fn record_events(&self, uses: &[StreamUse]) -> Result<Recorded, DriverError> {
        self.events.record(&*self.driver, uses.iter().map(|by| by.stream))
    }

    /// Frees blocks whose events have completed. Does nothing while another thread does the same.
    ///
    /// # Errors
    ///
    /// [`DriverError`] when an event cannot be queried; its block continues to wait.
    #[cold]
    #[doc(hidden)]
    pub fn poll_events(&self) -> Result<(), DriverError> {
        self.events.try_poll(&*self.driver, |block| self.pass(block))
    }

    /// Finishes deferred blocks. Then waits for all pending events, or for those of one pool, and frees
    /// the blocks.
    ///
    /// # Errors
    ///
    /// [`DriverError`], unless a capture prevented the wait. Blocks whose events did not pass still wait.
    pub(super) fn drain_events(&self, pool: Option<PoolId>) -> Result<(), DriverError> {
        let finished = self.finish_deferred_or_wait();
        let of = |block: Waiting| self.heaps.get(block.heap).map(|cell| cell.pool());
        let wanted = |block| pool.is_none() || of(block) == pool;
        let drained = self.events.drain(&*self.driver, wanted, |block| self.pass(block));
        finished.and(unless_captured(drained))
    }

    /// Counts one completed event of a block that waits to become free. The last event frees the block.
    #[inline]
    pub(super) fn pass(&self, block: Waiting) {
        self.attention.0.fetch_sub(1, Ordering::Relaxed);
        let cell = self.heaps.get(block.heap).expect("heaps are never removed");
        self.complete(cell, block.slot);
    }
}

/// Returns the slot of the block with this id, if it is live at `address` and used by exactly these
/// streams.
fn same_block(heap: &Heap, id: BlockId, address: u64, uses: &[StreamUse]) -> Option<Slot> {
    heap.live(id, address).filter(|&slot| heap.uses(slot).eq(uses.iter().copied()))
}
