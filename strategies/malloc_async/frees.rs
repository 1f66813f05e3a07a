//! The paths of a free: on the block's own stream, after other streams, inside a capture, or deferred.
//!
//! A block that other streams used is freed on an internal stream, the joining stream, after that stream
//! waits for all of them. So no stream of the program waits, and the driver reuses the block's memory
//! only after their work has completed.

use super::blocks::{Block, Use};
use super::{Joins, MallocAsyncAllocator, Note};
use crate::driver::{captured, synchronize_outside_captures};
use crate::error::{DriverError, DriverErrorKind, HandleError};
use crate::history::{Action, Event, Moment};
use crate::ids::{EventId, StreamId};
use crate::live_blocks::{BlockName, Live};
use crate::tracepoints;

impl MallocAsyncAllocator {
    /// Frees a live block, or defers its free, and returns its size. On an error the block is unchanged.
    pub(super) fn free_block(&self, name: BlockName) -> Result<u64, HandleError> {
        let _context = self.history.of_free();
        // The time is taken before the driver frees the address. As soon as it is freed, another thread
        // may allocate it, and the history entry of that allocation must have a later time.
        let moment = self.history.moment();
        let shared = self.addresses.read();
        let block = self.blocks.lock().leave(name)?;
        tracepoints::free(name.address);
        let bytes = block.bytes;
        if block.capture().is_some() {
            drop(shared);
            let _alone = self.addresses.write();
            let outcome = self.free_of_capture(&block);
            return self.finish_free(block, outcome, moment).map(|()| bytes);
        }
        let outcome = if !block.is_plain() || self.scopes.any() {
            self.free_checked(&block)
        } else {
            let freed = self.memory_pools().free_async(block.address, block.stream);
            freed.map(|()| FreeOutcome::Freed).or_else(|error| self.after_refusal(&block, error))
        };
        self.finish_free(block, outcome, moment).map(|()| bytes)
    }

    /// Updates the table, counters and history by the outcome of a free: records a finished free, queues
    /// a deferred one, or restores the live block on an error.
    fn finish_free(
        &self,
        block: Live<Block>,
        outcome: Result<FreeOutcome, DriverError>,
        moment: Option<Moment>,
    ) -> Result<(), HandleError> {
        match or_later(outcome) {
            Err(error) => {
                let replaced = self.blocks.lock().undo_leave(block);
                self.end_charge(replaced.as_ref());
                return Err(error.into());
            }
            Ok(FreeOutcome::Freed) => {
                self.end_charge(Some(&block));
                self.record_freed(&block, moment);
            }
            Ok(FreeOutcome::Deferred) => {
                self.record_block(Action::FreeRequested, &block, moment);
                // Counted before the block is in the queue. As soon as it is, another thread may free
                // the block and subtract it.
                self.captures.add_deferred();
                let mut blocks = self.blocks.lock();
                blocks.counters.note(Note::DeferredFree);
                blocks.defer(block);
            }
        }
        Ok(())
    }

    /// Records the driver's free with the time of the caller's free.
    #[inline]
    fn record_freed(&self, block: &Live<Block>, moment: Option<Moment>) {
        self.record_block(Action::FreeRequested, block, moment);
        self.record_block(Action::FreeCompleted, block, moment.map(Moment::next));
    }

    #[inline]
    fn record_block(&self, action: Action, block: &Live<Block>, moment: Option<Moment>) {
        if let Some(moment) = moment {
            let Live { address, value: Block { bytes: size_bytes, stream, pool, .. }, .. } = *block;
            let event = Event { action, address, size_bytes, stream, pool };
            self.history.push(stream.0, moment, event);
        }
    }

    /// Handles a failed free of a block without uses and captures. If the stream is being captured
    /// without a scope, the free is deferred until the capture ends. If the stream no longer exists, the
    /// block is freed on the joining stream after a synchronization of the device.
    #[cold]
    fn after_refusal(
        &self,
        block: &Live<Block>,
        error: DriverError,
    ) -> Result<FreeOutcome, DriverError> {
        if self.capture_of(block.stream)?.is_some() {
            return Ok(FreeOutcome::Deferred);
        }
        if error.kind() != DriverErrorKind::InvalidValue {
            return Err(error);
        }
        self.free_after_all(block).map(|()| FreeOutcome::Freed)
    }

    /// Frees a block that was allocated in a capture. The caller has locked `addresses` exclusively.
    #[cold]
    fn free_of_capture(&self, block: &Live<Block>) -> Result<FreeOutcome, DriverError> {
        // If a newer block has the address, the driver has allocated the memory of a destroyed graph again.
        // Then this block has no memory of its own to free.
        let is_reused = self.blocks.lock().is_reused(block);
        if is_reused { Ok(FreeOutcome::Freed) } else { self.free_checked(block) }
    }

    /// Frees a block that may have uses, may have been allocated in a capture, or is freed while a scope
    /// is open. Frees that must wait for the end of a capture are deferred.
    #[cold]
    pub(super) fn free_checked(&self, block: &Live<Block>) -> Result<FreeOutcome, DriverError> {
        let of_captures =
            block.capture().is_some() || block.uses().iter().any(|by| by.capture.is_some());
        if !of_captures && !self.scopes.any() {
            // No scope is open, but a capture without a scope may be active. If other streams use the
            // block, `join` queries their capture status and detects that.
            return self.free_in_driver(block).map(|()| FreeOutcome::Freed);
        }
        let mut now = self.capture_of(block.stream)?;
        if let Some(capture) = block.capture().filter(|own| now == Some(*own)) {
            let outcome = self.free_inside(block, capture);
            now = match &outcome {
                Err(error) if error.kind() == DriverErrorKind::InvalidValue => {
                    self.capture_of(block.stream)?
                }
                _ => return outcome,
            };
            if now == Some(capture) {
                return outcome;
            }
            // Another thread ended the capture during the call.
        }
        for by in block.uses() {
            if by.capture.is_none() && self.capture_of(by.stream)?.is_some() {
                return Ok(FreeOutcome::Deferred);
            }
        }
        // A use inside a capture that is still active ends with the capture, so the free waits for that.
        if now.is_some() || self.any_use_active(block.uses())? {
            return Ok(FreeOutcome::Deferred);
        }
        self.free_in_driver(block)?;
        if block.capture().is_some() {
            self.blocks.lock().counters.note(Note::FreeAfterCapture);
        }
        Ok(FreeOutcome::Freed)
    }

    fn any_use_active(&self, uses: &[Use]) -> Result<bool, DriverError> {
        for by in uses.iter().filter(|by| by.capture.is_some()) {
            if self.capture_of(by.stream)? == by.capture {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Frees a block in the driver, outside of any capture, after all work that uses it in stream order.
    /// Uses recorded in captures need no wait, because those captures have ended.
    fn free_in_driver(&self, block: &Live<Block>) -> Result<(), DriverError> {
        if block.uses().iter().any(|by| by.capture.is_none()) {
            return self.free_after_all(block);
        }
        match self.memory_pools().free_async(block.address, block.stream) {
            Err(error) if error.kind() == DriverErrorKind::InvalidValue => {
                self.free_after_all(block)
            }
            done => done,
        }
    }

    /// Frees on the joining stream, after every stream that uses the block.
    ///
    /// The joining stream is internal and always valid. So if the driver reports the free as invalid,
    /// the address is unknown to the driver. The block belonged to a graph that never ran, or that was
    /// destroyed together with its memory; the capture may have had no scope. There is nothing to free
    /// then.
    fn free_after_all(&self, block: &Live<Block>) -> Result<(), DriverError> {
        let (join, event) = self.joining_stream()?;
        let joined = block.streams().try_for_each(|stream| self.join(join, event, stream));
        let freed = joined.map(|()| self.memory_pools().free_async(block.address, join));
        self.joins.lock().spare.push(event);
        freed?.or_else(|error| match error.kind() {
            DriverErrorKind::InvalidValue => Ok(()),
            _ => Err(error),
        })
    }

    /// Makes `join` wait for the work submitted to `stream` so far.
    fn join(&self, join: StreamId, event: EventId, stream: StreamId) -> Result<(), DriverError> {
        match self.driver.record_event(event, stream) {
            // Another thread may have begun a capture on the stream before the event was recorded.
            // Waiting for such an event would make the joining stream part of the capture. The error
            // defers the free.
            Ok(()) if self.capture_of(stream)?.is_some() => Err(captured(stream)),
            Ok(()) => self.driver.wait_event(join, event).map_err(|error| match error.kind() {
                // The event was recorded in a capture, and that capture has ended by now.
                DriverErrorKind::InvalidValue => captured(stream),
                _ => error,
            }),
            // The stream no longer exists, so no event can be recorded on it: wait for its work.
            Err(error) if error.kind() == DriverErrorKind::InvalidValue => {
                synchronize_outside_captures(&*self.driver)
            }
            Err(error) => Err(error),
        }
    }

    /// Returns the joining stream and an event for it.
    fn joining_stream(&self) -> Result<(StreamId, EventId), DriverError> {
        let Joins { stream, spare } = &mut *self.joins.lock();
        let join = match *stream {
            Some(join) => join,
            None => *stream.insert(self.driver.create_stream()?),
        };
        let event = match spare.pop() {
            Some(event) => event,
            None => self.driver.create_event()?,
        };
        Ok((join, event))
    }

    /// Frees the deferred blocks whose captures have ended. The others, and those that the driver fails
    /// to free, stay deferred.
    ///
    /// # Errors
    ///
    /// [`DriverError`]: the first failure.
    pub(super) fn free_deferred(&self) -> Result<(), DriverError> {
        if self.captures.deferred() == 0 {
            return Ok(());
        }
        let _alone = self.addresses.write();
        let mut done = Ok(());
        let count = self.blocks.lock().deferred.len();
        for _ in 0..count {
            done = done.and(self.free_next_deferred().map(drop));
        }
        done
    }

    /// Tries to free one deferred block, and if that succeeds, all of them. Every request calls this
    /// while blocks are deferred, and checking all of them each time would be too slow.
    pub(super) fn try_free_deferred(&self) {
        let freed = {
            let _alone = self.addresses.write();
            self.free_next_deferred()
        };
        if freed == Ok(FreeOutcome::Freed) {
            // A block that the driver fails to free stays deferred; `process_events` reports the error.
            let _ = self.free_deferred();
        }
    }

    /// Frees the front one of the deferred blocks, if its captures have ended. Otherwise it becomes the last
    /// one. The caller has locked `addresses` exclusively.
    fn free_next_deferred(&self) -> Result<FreeOutcome, DriverError> {
        let next = self.blocks.lock().deferred.pop_front();
        let Some(block) = next else { return Ok(FreeOutcome::Deferred) };
        let moment = self.history.moment();
        let outcome = or_later(match block.capture() {
            Some(_) => self.free_of_capture(&block),
            None => self.free_checked(&block),
        });
        if outcome == Ok(FreeOutcome::Freed) {
            self.captures.remove_deferred();
            self.blocks.lock().counters.end_to_wait(block.bytes);
            self.end_charge(Some(&block));
            self.record_block(Action::FreeCompleted, &block, moment);
        } else {
            self.blocks.lock().deferred.push_back(block);
        }
        outcome
    }
}

/// Turns an error that a capture caused into a deferral. Either a stream of the block is captured, or it
/// no longer exists: that requires a synchronization of the device, which would break the capture.
fn or_later(outcome: Result<FreeOutcome, DriverError>) -> Result<FreeOutcome, DriverError> {
    outcome.or_else(|error| match error.kind() {
        DriverErrorKind::CaptureActive => Ok(FreeOutcome::Deferred),
        _ => Err(error),
    })
}

/// The outcome of a free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FreeOutcome {
    /// The driver has freed the block.
    Freed,
    /// The block waits for the end of a capture.
    Deferred,
}
