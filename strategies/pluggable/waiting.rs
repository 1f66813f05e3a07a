//! Freed blocks that wait for work of other streams, or of a per-thread default stream.
//!
//! Blocks do not wait for other streams here if the user's functions do that themselves
//! (`on_record_stream`).
//!
//! Freeing a block that must wait records one event per stream and returns. Later requests query the
//! events (`event_queue`), and the user's `free` is called once all have passed.
//!
//! While a stream is captured, no event can be recorded on it, so the block waits for the end of the
//! capture first. For a per-thread default stream, only the thread that freed the block can check for
//! that end. If that thread does not call again, a later drain synchronizes the device instead.
//!
//! Lock order: `captured`, `queue`, a shard, `passed`. No user's function runs while one of these is
//! held.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use smallvec::SmallVec;

use super::PluggableAllocator;
use super::table::State;
use crate::driver::{captured, expects_captures, may_be_captured, thread_of};
use crate::error::{DriverError, DriverErrorKind, HandleError};
use crate::event_queue::{EventQueue, Recorded};
use crate::history::Action;
use crate::ids::{PoolId, StreamId, ThreadNumber};
use crate::live_blocks::BlockName;

/// Identifies a waiting block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Name {
    address: u64,
    serial: u64,
    pool: PoolId,
}

/// A block that waits until none of these streams is captured.
#[derive(Debug)]
struct Captured {
    name: Name,
    streams: SmallVec<[StreamId; 2]>,
    /// The only thread that can check the streams, if one is a per-thread default stream.
    thread: Option<ThreadNumber>,
}

impl Captured {
    fn is_another_threads(&self) -> bool {
        self.thread.is_some_and(|thread| thread != ThreadNumber::current())
    }
}

#[derive(Debug, Default)]
pub(super) struct Waiting {
    /// The number of blocks that wait, for any reason.
    count: AtomicUsize,
    captured: Mutex<VecDeque<Captured>>,
    pub(super) queue: EventQueue<Name>,
    /// Blocks whose events have passed; the user's `free` must still be called for them.
    passed: Mutex<VecDeque<Name>>,
    /// Held while waiting for events. A second thread that drains then returns only after the first has
    /// handled them.
    draining: Mutex<()>,
}

impl Waiting {
    /// Returns true if any block waits. One relaxed load.
    pub(super) fn any(&self) -> bool {
        self.count.load(Ordering::Relaxed) != 0
    }
}

impl PluggableAllocator {
    /// Starts the free of a block that other streams use, or whose stream `own` is a per-thread default
    /// stream. Events are recorded first, so that the block stays live if the driver fails.
    pub(super) fn free_when_drained(
        &self,
        address: u64,
        serial: u64,
        own: StreamId,
        uses: &[StreamId],
    ) -> Result<(), HandleError> {
        let mut streams = SmallVec::<[StreamId; 2]>::from_slice(uses);
        if self.driver.is_per_thread_stream(own) && !streams.contains(&own) {
            streams.push(own);
        }
        let recorded = match streams.iter().find(|stream| self.may_be_captured(**stream)) {
            Some(stream) => Err(captured(*stream)),
            None => self.record_events(&streams),
        };
        let recorded = match recorded {
            Err(error) if error.kind() == DriverErrorKind::CaptureActive => None,
            recorded => Some(recorded?),
        };
        let mut shard = self.table.lock(address);
        let name = BlockName { address, serial: Some(serial) };
        let Some(block) = shard.live(name).ok().filter(|block| block.uses.as_slice() == uses)
        else {
            // Another thread has freed the block or recorded another stream in the meantime: start
            // again.
            drop(shard);
            self.waiting.queue.return_unused(&recorded.unwrap_or_default());
            return self.free_block(name).map(drop);
        };
        let (stream, pool, requested) = (block.stream, block.pool, block.requested_bytes);
        shard.drain(address);
        drop(shard);
        self.record(Action::FreeRequested, address, requested, (stream, pool));
        self.waiting.count.fetch_add(1, Ordering::Relaxed);
        let name = Name { address, serial, pool };
        match recorded {
            Some(recorded) => self.wait_for_events(name, &recorded),
            None => {
                let thread = streams.iter().find_map(|stream| thread_of(&*self.driver, *stream));
                self.waiting.captured.lock().push_back(Captured { name, streams, thread });
            }
        }
        Ok(())
    }

    /// Returns true if work submitted to the stream now may become part of a graph.
    pub(super) fn may_be_captured(&self, stream: StreamId) -> bool {
        may_be_captured(&*self.driver, stream)
    }

    fn record_events(&self, streams: &[StreamId]) -> Result<Recorded, DriverError> {
        self.waiting.queue.record(&*self.driver, streams.iter().copied())
    }

    /// Makes a draining block wait for these events.
    fn wait_for_events(&self, name: Name, recorded: &Recorded) {
        if recorded.is_empty() {
            self.waiting.passed.lock().push_back(name);
            return;
        }
        if let Some(block) = self.table.lock(name.address).get_mut(name.address) {
            block.events = recorded.len();
        }
        self.waiting.queue.push(&*self.driver, recorded, name);
    }

    /// Handles one completed event of a draining block. After the last event, the block is ready to be freed.
    fn event_passed(&self, name: Name) {
        if self.table.lock(name.address).event_passed(name.address) {
            self.waiting.passed.lock().push_back(name);
        }
    }

    /// Frees the blocks whose events have passed. If a user's function panics, the remaining blocks are
    /// freed by the next call.
    fn free_passed(&self) {
        loop {
            let Some(name) = self.waiting.passed.lock().pop_front() else { return };
            self.waiting.count.fetch_sub(1, Ordering::Relaxed);
            self.retire(name.address, name.serial, State::Draining, name.pool);
        }
    }

    /// Returns true if a request on `stream` may query and wait for events, which is so if no capture is
    /// known and the stream is not captured.
    pub(super) fn may_wait_for(&self, stream: StreamId) -> bool {
        !self.pools.any_capture_known() && !self.may_be_captured(stream)
    }

    /// Frees the blocks whose events have passed. Does not wait for events.
    pub(super) fn poll(&self) -> Result<(), DriverError> {
        let drained = self.drain_captured();
        let polled = self.waiting.queue.poll(&*self.driver, |name| self.event_passed(name));
        self.free_passed();
        drained.and(polled)
    }

    /// Records events for blocks whose captures have ended. Skips blocks that only another thread can
    /// check.
    fn drain_captured(&self) -> Result<(), DriverError> {
        let mut failed = None;
        self.waiting.captured.lock().retain(|block| {
            // For a per-thread default stream, this thread would query and record its own stream instead
            // of the other thread's.
            if block.is_another_threads()
                || block.streams.iter().any(|stream| self.may_be_captured(*stream))
            {
                return true;
            }
            match self.record_events(&block.streams) {
                Ok(recorded) => {
                    self.wait_for_events(block.name, &recorded);
                    return false;
                }
                // Another thread began a capture after the check.
                Err(error) if error.kind() == DriverErrorKind::CaptureActive => {}
                Err(error) => _ = failed.get_or_insert(error),
            }
            true
        });
        failed.map_or(Ok(()), Err)
    }

    /// Synchronizes the device for blocks that only other threads can check, because of their per-thread
    /// default streams. A synchronization that succeeds proves that those streams have neither a capture
    /// nor unfinished work. Does nothing if captures are expected.
    fn wait_for_other_threads(&self) -> Result<(), DriverError> {
        let theirs: Vec<_> = {
            let captured = self.waiting.captured.lock();
            captured.iter().filter(|block| block.is_another_threads()).map(|b| b.name).collect()
        };
        if theirs.is_empty() || expects_captures(&*self.driver) {
            return Ok(());
        }
        self.driver.synchronize_device()?;
        for block in self.waiting.captured.lock().iter_mut() {
            if theirs.contains(&block.name) {
                block.streams.retain(|stream| !self.driver.is_per_thread_stream(*stream));
                block.thread = None;
            }
        }
        Ok(())
    }

    /// Waits for the pending events of all blocks and frees these blocks. Blocks that wait for the end
    /// of a capture stay.
    ///
    /// # Errors
    ///
    /// The first [`DriverError`]; blocks that could not be waited for continue to wait.
    pub(super) fn drain(&self) -> Result<(), DriverError> {
        let waited = self.wait_for_other_threads();
        // First record events for blocks whose captures have ended, so that the wait below includes
        // them.
        let polled = self.poll();
        let drained = {
            let _alone = self.waiting.draining.lock();
            let passed = |name| self.event_passed(name);
            self.waiting.queue.drain(&*self.driver, |_| true, passed)
        };
        self.free_passed();
        waited.and(polled).and(drained)
    }
}
