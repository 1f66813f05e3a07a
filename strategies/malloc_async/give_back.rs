//! The ways of a free: on the block's own stream, after other streams, inside a capture, or later.
//!
//! A block that other streams used is freed on a stream of our own that first waits for all of
//! them, so that none of the users' streams waits. The driver then reuses its memory only when it
//! sees that the work has finished.

use super::blocks::{Block, Use};
use super::{Joins, MallocAsyncAllocator, Note};
use crate::driver::{captured, synchronize_outside_captures};
use crate::error::{DriverError, DriverErrorKind, HandleError};
use crate::history::{Action, Event, Moment};
use crate::ids::{EventId, StreamId};
use crate::live_blocks::{BlockName, Live};
use crate::tracepoints;

impl MallocAsyncAllocator {
    /// Takes a live block back. On an error the block is as it was.
    pub(super) fn give_back(&self, name: BlockName) -> Result<u64, HandleError> {
        let _asks = self.history.of_free();
        // Another thread may have the address, and say so, as soon as the driver has it.
        let moment = self.history.moment();
        let (block, is_plain, is_charged) = {
            let mut blocks = self.blocks.lock();
            let block = blocks.leave(name)?;
            let is_plain = block.is_plain() && !self.captures.any_scope();
            // Under a limit, or if it may have to wait, until the driver has it.
            let is_charged = !is_plain || self.limit.get().is_some();
            if is_charged {
                blocks.reserved_bytes += block.bytes;
            }
            (block, is_plain, is_charged)
        };
        tracepoints::free(name.address);
        let bytes = block.bytes;
        if !is_plain {
            let given = self.free_with_care(&block);
            return self.settle_free(block, given, moment).map(|()| bytes);
        }
        let given = match self.memory_pools().free_async(block.address, block.stream) {
            Ok(()) if !is_charged => {
                self.is_freed(&block, moment);
                return Ok(bytes);
            }
            Ok(()) => Ok(Given::Freed),
            Err(error) => {
                if !is_charged {
                    self.blocks.lock().reserved_bytes += bytes;
                }
                self.after_refusal(&block, error)
            }
        };
        self.settle_free(block, given, moment).map(|()| bytes)
    }

    /// What a free of a charged block leaves behind.
    #[cold]
    fn settle_free(
        &self,
        block: Live<Block>,
        given: Result<Given, DriverError>,
        moment: Option<Moment>,
    ) -> Result<(), HandleError> {
        match or_later(given) {
            Err(error) => {
                let mut blocks = self.blocks.lock();
                blocks.reserved_bytes -= block.bytes;
                blocks.come_back(block);
                return Err(error.into());
            }
            Ok(Given::Freed) => {
                self.blocks.lock().reserved_bytes -= block.bytes;
                self.is_freed(&block, moment);
            }
            Ok(Given::Deferred) => {
                self.record_block(Action::FreeRequested, &block, moment);
                self.notes.count(Note::DeferredFree);
                // Counted first: another thread may settle it at once.
                self.captures.add_deferred();
                let mut blocks = self.blocks.lock();
                blocks.reserved_bytes -= block.bytes;
                blocks.defer(block);
            }
        }
        Ok(())
    }

    /// The driver has the block, as soon as its holder gave it back.
    #[inline]
    fn is_freed(&self, block: &Live<Block>, moment: Option<Moment>) {
        self.record_block(Action::FreeRequested, block, moment);
        self.record_block(Action::FreeCompleted, block, moment.map(Moment::next));
    }

    #[inline]
    fn record_block(&self, action: Action, block: &Live<Block>, moment: Option<Moment>) {
        if let Some(moment) = moment {
            let Live { address, kept: Block { bytes: size_bytes, stream, pool, .. }, .. } = *block;
            let event = Event { action, address, size_bytes, stream, pool };
            self.history.push(stream.0, moment, event);
        }
    }

    /// The plain free failed. If the stream belongs to a capture that nobody told of, the free waits
    /// for its end; if the stream is gone, it has no work left once the device was waited for.
    #[cold]
    fn after_refusal(&self, block: &Live<Block>, error: DriverError) -> Result<Given, DriverError> {
        if self.capture_of(block.stream)?.is_some() {
            return Ok(Given::Deferred);
        }
        if error.kind() != DriverErrorKind::InvalidValue {
            return Err(error);
        }
        self.free_after_all(block).map(|()| Given::Freed)
    }

    /// Where captures or other streams are involved.
    #[cold]
    pub(super) fn free_with_care(&self, block: &Live<Block>) -> Result<Given, DriverError> {
        let of_captures =
            block.capture().is_some() || block.uses().iter().any(|by| by.capture.is_some());
        if !of_captures && !self.captures.any_scope() {
            // Each stream is asked once, when it is joined: a capture that nobody told of shows there.
            return self.give_to_driver(block).map(|()| Given::Freed);
        }
        let mut now = self.capture_of(block.stream)?;
        if let Some(capture) = block.capture().filter(|own| now == Some(*own)) {
            let given = self.free_inside(block, capture);
            now = match &given {
                Err(error) if error.kind() == DriverErrorKind::InvalidValue => {
                    self.capture_of(block.stream)?
                }
                _ => return given,
            };
            if now == Some(capture) {
                return given;
            }
            // Another thread has ended the capture meanwhile.
        }
        for by in block.uses() {
            if by.capture.is_none() && self.capture_of(by.stream)?.is_some() {
                return Ok(Given::Deferred);
            }
        }
        // A use from inside a capture that goes on is over when the capture is.
        if now.is_some() || self.any_use_goes_on(block.uses())? {
            return Ok(Given::Deferred);
        }
        self.give_to_driver(block)?;
        if block.capture().is_some() {
            self.notes.count(Note::FreeAfterCapture);
        }
        Ok(Given::Freed)
    }

    fn any_use_goes_on(&self, uses: &[Use]) -> Result<bool, DriverError> {
        for by in uses.iter().filter(|by| by.capture.is_some()) {
            if self.capture_of(by.stream)? == by.capture {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Tells the driver of a free outside captures, after all streams that use the block. Uses from
    /// inside captures have ended with those.
    fn give_to_driver(&self, block: &Live<Block>) -> Result<(), DriverError> {
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

    /// Frees on the joining stream, behind every stream that uses the block.
    ///
    /// That stream is ours and in order, so if the driver calls the free invalid it knows no such block:
    /// it was part of a graph, perhaps of a capture that nobody told of, which never ran or is gone
    /// with its memory. Then nothing is left to free.
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

    /// Makes `join` wait for what was submitted to `stream` so far.
    fn join(&self, join: StreamId, event: EventId, stream: StreamId) -> Result<(), DriverError> {
        match self.driver.record_event(event, stream) {
            // Another thread may have begun a capture on the stream. Its event would draw the joining
            // stream into the capture; what was recorded before it began is as good as ever.
            Ok(()) if self.capture_of(stream)?.is_some() => Err(captured(stream)),
            Ok(()) => self.driver.wait_event(join, event).map_err(|error| match error.kind() {
                // That capture has ended meanwhile.
                DriverErrorKind::InvalidValue => captured(stream),
                _ => error,
            }),
            // The stream is gone, and nothing can be recorded on it: wait for its work.
            Err(error) if error.kind() == DriverErrorKind::InvalidValue => {
                synchronize_outside_captures(&*self.driver)
            }
            Err(error) => Err(error),
        }
    }

    /// The joining stream and an event for it.
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

    /// Offers the driver again what it refused to take back. On our own stream, because the block's may have
    /// gone; what it was given was waited for.
    fn offer_leftovers(&self) -> Result<(), DriverError> {
        if self.leftovers.lock().is_empty() {
            return Ok(());
        }
        let (join, event) = self.joining_stream()?;
        self.joins.lock().spare.push(event);
        let leftovers = std::mem::take(&mut *self.leftovers.lock());
        let mut done = Ok(());
        for address in leftovers {
            let freed = self.memory_pools().free_async(address, join);
            if freed.is_err() {
                self.leftovers.lock().push(address);
            }
            done = done.and(freed);
        }
        done
    }

    /// Tells the driver of the frees that waited for captures which have ended. Others go on
    /// waiting, and so does what the driver refuses.
    ///
    /// # Errors
    ///
    /// [`DriverError`]: the first refusal.
    pub(super) fn settle_deferred(&self) -> Result<(), DriverError> {
        let mut done = self.offer_leftovers();
        if self.captures.deferred() == 0 {
            return done;
        }
        let blocks = std::mem::take(&mut self.blocks.lock().deferred);
        let mut waiting = Vec::new();
        for block in blocks {
            let settled = self.settle(&block);
            if settled != Ok(Given::Freed) {
                waiting.push(block);
            }
            done = done.and(settled.map(drop));
        }
        self.blocks.lock().deferred.extend(waiting);
        done
    }

    /// Looks at one free that waits, and at all of them when that one need not wait any more: a
    /// request inside a capture must not ask for every block again.
    pub(super) fn settle_if_one_may(&self) {
        let Some(block) = self.blocks.lock().deferred.pop_front() else { return };
        match self.settle(&block) {
            // What the driver refuses goes on waiting; `process_events` tells of it.
            Ok(Given::Freed) => drop(self.settle_deferred()),
            _ => self.blocks.lock().deferred.push_back(block),
        }
    }

    /// One free that waited.
    fn settle(&self, block: &Live<Block>) -> Result<Given, DriverError> {
        // An address that came back after a graph had gone belongs to the block that has it now.
        let moment = self.history.moment();
        let gone = block.capture().is_some() && self.blocks.lock().is_live(block.address);
        let given = if gone { Given::Freed } else { or_later(self.free_with_care(block))? };
        if given == Given::Freed {
            self.captures.remove_deferred();
            self.blocks.lock().sums.end_to_wait(block.bytes);
            self.record_block(Action::FreeCompleted, block, moment);
        }
        Ok(given)
    }
}

/// A block whose stream is captured cannot be freed behind it. A block whose stream is gone comes after all
/// work of the device, and to wait for that would break a capture that is under way: its free waits for the
/// end, too.
fn or_later(given: Result<Given, DriverError>) -> Result<Given, DriverError> {
    given.or_else(|error| match error.kind() {
        DriverErrorKind::CaptureActive => Ok(Given::Deferred),
        _ => Err(error),
    })
}

/// What became of a free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Given {
    /// The driver has the block.
    Freed,
    /// It waits for the end of a capture.
    Deferred,
}
