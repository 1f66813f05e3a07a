//! Freed blocks that wait for the work of streams.
//!
//! Freeing a block that streams use records one event on each and returns. Later requests, or the background
//! thread, query the events (`event_queue`). While one of the streams is captured, no event can be recorded
//! on it, so the block waits for the end of the capture first.

use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{Condvar, Mutex};

use super::Core;
use super::blocks::{State, Uses};
use crate::driver::{CaptureStatus, capture_status_of, captured, may_be_captured, unless_captured};
use crate::error::{DriverError, DriverErrorKind, HandleError};
use crate::event_queue::{EventQueue, Recorded};
use crate::history::Action;
use crate::ids::StreamId;
use crate::live_blocks::BlockName;

#[derive(Debug, Default)]
pub(super) struct Waiting {
    /// The number of blocks that wait, apart from those of graphs.
    count: AtomicUsize,
    /// Blocks are identified by address, because a block that waits keeps its address.
    pub(super) queue: EventQueue<u64>,
    /// Blocks that wait for the end of a capture, with their streams.
    captured: Mutex<Vec<(u64, Uses)>>,
    /// Held while waiting for events, so that a second thread that drains returns only after the first has
    /// freed the blocks.
    draining: Mutex<()>,
    /// Whether the background thread must end.
    pub(super) is_over: Mutex<bool>,
    /// Signalled when a block begins to wait, and when the background thread must end.
    pub(super) changed: Condvar,
}

impl Waiting {
    /// Returns true if any block waits. One relaxed load.
    pub(super) fn any(&self) -> bool {
        self.count.load(Ordering::Relaxed) != 0
    }
}

impl Core {
    /// Announces that work on `stream` uses a live block.
    pub(super) fn record_use(&self, name: BlockName, stream: StreamId) -> Result<(), HandleError> {
        self.blocks.lock().live(name)?;
        let in_graph = match capture_status_of(&*self.driver, stream) {
            Ok(status) => status != CaptureStatus::None,
            // The legacy default stream is not captured itself. While a stream that synchronises with it is
            // captured, CUDA refuses the query.
            Err(error) if error.kind() == DriverErrorKind::CaptureActive => false,
            Err(error) => return Err(error.into()),
        };
        let mut blocks = self.blocks.lock();
        let block = blocks.live(name)?;
        block.in_graph |= in_graph;
        if !block.uses.contains(&stream) {
            block.uses.push(stream);
        }
        Ok(())
    }

    /// Makes a block that is being freed wait for these streams. If the driver fails, the block is live
    /// again.
    pub(super) fn free_when_drained(
        &self,
        address: u64,
        uses: Uses,
        in_graph: bool,
    ) -> Result<(), HandleError> {
        let recorded = if in_graph { Ok(None) } else { self.record_events(&uses) };
        let mut blocks = self.blocks.lock();
        let recorded = match recorded {
            Ok(recorded) => recorded,
            Err(error) => {
                blocks.at(address).expect("it is being freed").state = State::Live;
                return Err(error.into());
            }
        };
        // The events of a per-thread default stream can be recorded only by this thread, and its capture
        // has not ended yet. So the block is treated as one of the graph.
        let is_own_threads = |stream: &StreamId| self.driver.is_per_thread_stream(*stream);
        let state = match &recorded {
            Some(recorded) => State::Draining { events: recorded.len() },
            None if in_graph || uses.iter().any(is_own_threads) => State::InGraph,
            None => State::Draining { events: 0 },
        };
        blocks.drain(address, state);
        let block = blocks.at(address).expect("it is being freed");
        self.record(Action::FreeRequested, address, block.requested_bytes, block.stream);
        drop(blocks);
        if state == State::InGraph {
            return Ok(());
        }
        self.waiting.count.fetch_add(1, Ordering::Relaxed);
        match recorded {
            Some(recorded) => self.wait_for_events(address, &recorded),
            None => self.waiting.captured.lock().push((address, uses)),
        }
        if self.built.pinned.use_background_threads {
            let _is_over = self.waiting.is_over.lock();
            self.waiting.changed.notify_one();
        }
        Ok(())
    }

    /// Records an event on each stream. Returns `None` if one of them is being captured.
    fn record_events(&self, uses: &Uses) -> Result<Option<Recorded>, DriverError> {
        let driver = &*self.driver;
        let recorded = match uses.iter().find(|stream| may_be_captured(driver, **stream)) {
            Some(stream) => Err(captured(*stream)),
            None => self.waiting.queue.record(driver, uses.iter().copied()),
        };
        match recorded {
            Err(error) if error.kind() == DriverErrorKind::CaptureActive => Ok(None),
            recorded => recorded.map(Some),
        }
    }

    fn wait_for_events(&self, address: u64, recorded: &Recorded) {
        if recorded.is_empty() {
            // All streams were destroyed, and their work was waited for.
            self.drained(address);
            return self.after_free(address);
        }
        self.waiting.queue.push(&*self.driver, recorded, address);
    }

    /// Makes a draining block free. The caller calls `after_free` once it holds no lock.
    fn drained(&self, address: u64) {
        let now_ns = self.now_ns();
        let mut blocks = self.blocks.lock();
        let Some(block) = blocks.at(address) else { return };
        let (requested_bytes, stream) = (block.requested_bytes, block.stream);
        blocks.make_idle(address, now_ns);
        self.record(Action::FreeCompleted, address, requested_bytes, stream);
        drop(blocks);
        self.waiting.count.fetch_sub(1, Ordering::Relaxed);
    }

    /// Handles one completed event of a draining block. Adds the block to `freed` if it was the last.
    fn event_passed(&self, address: u64, freed: &mut Vec<u64>) {
        if self.blocks.lock().event_passed(address) {
            self.drained(address);
            freed.push(address);
        }
    }

    /// Makes the blocks free whose events have passed. Does not wait for work of the device.
    pub(super) fn poll(&self) -> Result<(), DriverError> {
        let recorded = self.record_after_captures();
        let mut freed = Vec::new();
        let passed = |address| self.event_passed(address, &mut freed);
        let polled = self.waiting.queue.poll(&*self.driver, passed);
        freed.into_iter().for_each(|address| self.after_free(address));
        recorded.and(polled)
    }

    /// Records events for the blocks whose captures have ended.
    fn record_after_captures(&self) -> Result<(), DriverError> {
        let mut done = Ok(());
        let waiting = std::mem::take(&mut *self.waiting.captured.lock());
        for (address, uses) in waiting {
            match self.record_events(&uses) {
                Ok(Some(recorded)) => {
                    if let Some(block) = self.blocks.lock().at(address) {
                        block.state = State::Draining { events: recorded.len() };
                    }
                    self.wait_for_events(address, &recorded);
                    continue;
                }
                Ok(None) => {}
                Err(error) => done = done.and(Err(error)),
            }
            self.waiting.captured.lock().push((address, uses));
        }
        done
    }

    /// Waits for the events of all freed blocks, and makes these blocks free. Blocks that wait for the end
    /// of a capture stay.
    ///
    /// # Errors
    ///
    /// The first [`DriverError`], unless a capture prevents the wait. Blocks that could not be waited for
    /// continue to wait.
    pub(super) fn drain(&self) -> Result<(), DriverError> {
        let recorded = self.record_after_captures();
        let mut freed = Vec::new();
        let drained = {
            let _alone = self.waiting.draining.lock();
            let passed = |address| self.event_passed(address, &mut freed);
            self.waiting.queue.drain(&*self.driver, |_| true, passed)
        };
        freed.into_iter().for_each(|address| self.after_free(address));
        recorded.and(unless_captured(drained))
    }
}
