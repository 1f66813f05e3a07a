//! Copies between the blocks of a tag and host memory, and the pinned memory for them.
//!
//! A kept backup is pinned: each run is copied straight to its place. The contents of any other backup pass
//! through small pinned buffers. Several threads copy between these and ordinary memory or files, because the
//! system provides and clears a page when it is first written, which takes longer than the bus.
//!
//! No lock is held during copies. The stream and the buffers stay with the engine for the next pause or
//! resume.

use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::thread::{self, Builder, available_parallelism};
use std::vec;

use parking_lot::{Mutex, MutexGuard};

use super::backup::{Run, SavedContents, UnkeptBytes, check_available, index, parts};
use super::engine::Engine;
use super::files::Files;
use super::growth::Growth;
use crate::allocator::{SleepError, TagOptions};
use crate::driver::{Driver, PinnedId, PinnedMemory, PinnedRange, synchronize_outside_captures};
use crate::error::{DriverError, DriverErrorKind};
use crate::ids::{EventId, StreamId};
use crate::size::MIB;

/// The size of a buffer. On the bus it takes less than a millisecond.
pub(super) const BUFFER_BYTES: u64 = 4 * MIB;
/// The number of buffers of each copying thread: one is on the bus while the thread copies the other.
const BUFFERS_EACH: usize = 2;
/// The most threads that copy for one pause or resume.
const THREADS_MAX: usize = 16;

/// Bytes and number of copies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Copied {
    pub(super) bytes: u64,
    pub(super) copies: u64,
}

/// The direction of copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    /// From the device to host memory.
    Out,
    /// From host memory to the device.
    In,
}

/// The stream of copies, and the buffers.
#[derive(Debug)]
pub(super) struct Copier {
    stream: StreamId,
    buffers: Vec<Buffer>,
}

/// A pinned buffer. Its event follows the last copy that uses it.
#[derive(Clone, Copy, Debug)]
struct Buffer {
    pinned: PinnedId,
    event: EventId,
}

/// The copies of a kept backup to the device that are not submitted yet, in address order.
#[derive(Debug)]
pub(super) struct KeptCopies {
    stream: StreamId,
    stores: Vec<(PinnedId, Range<u64>)>,
    runs: VecDeque<Run>,
}

impl KeptCopies {
    /// Returns the copies of a backup: none if it is not pinned.
    pub(super) fn new(saved: &SavedContents, copier: &Copier) -> Self {
        let stores: Vec<_> = saved.stores().collect();
        let runs = if saved.is_pinned() { saved.runs().into() } else { VecDeque::new() };
        Self { stream: copier.stream, stores, runs }
    }

    /// Waits for the submitted copies. Returns false if that fails.
    pub(super) fn is_over(&self, driver: &dyn Driver) -> bool {
        driver.synchronize_stream(self.stream).is_ok()
    }
}

/// A range of positions of a backup that is copied through one buffer.
#[derive(Debug)]
struct Share<'a> {
    start: u64,
    parts: Vec<Run>,
    place: SharePlace<'a>,
}

/// The host memory of a share, or the files of its parts.
#[derive(Debug)]
enum SharePlace<'a> {
    Memory(&'a mut [u8]),
    Files(&'a Files),
}

impl<'a> Share<'a> {
    /// Divides the positions of a backup into shares. Leaves out those without runs.
    fn of(bytes: UnkeptBytes<'a>, runs: &[Run]) -> Vec<Self> {
        let starts = (0..).step_by(index(BUFFER_BYTES));
        let share = |(start, place)| {
            let parts = parts(runs, start..start + BUFFER_BYTES).collect();
            Share { start, parts, place }
        };
        let shares: Vec<_> = match bytes {
            UnkeptBytes::Memory(bytes) => {
                let chunks = bytes.chunks_mut(index(BUFFER_BYTES)).map(SharePlace::Memory);
                starts.zip(chunks).map(share).collect()
            }
            UnkeptBytes::Files(files) => {
                let end = runs.last().map_or(0, Run::end);
                let starts = starts.take_while(|start| *start < end);
                starts.map(|start| share((start, SharePlace::Files(files)))).collect()
            }
        };
        shares.into_iter().filter(|share| !share.parts.is_empty()).collect()
    }

    /// Returns the place of a part in the buffer.
    fn place(&self, buffer: Buffer, part: &Run) -> PinnedRange {
        PinnedRange {
            pinned: buffer.pinned,
            offset_bytes: part.position - self.start,
            size_bytes: part.size_bytes,
        }
    }

    /// Copies this share's bytes from the pinned buffer to its place. Memory gets one copy, from the start of
    /// the first part to the end of the last one; files get only the parts. For files, `scratch` has the size
    /// of a buffer.
    fn store(
        &mut self,
        memory: &dyn PinnedMemory,
        buffer: Buffer,
        scratch: &mut [u8],
    ) -> Result<(), SleepError> {
        let span = self.span();
        match &mut self.place {
            SharePlace::Memory(bytes) => {
                let offset_bytes = span.start as u64;
                memory.read_pinned(buffer.pinned, offset_bytes, &mut bytes[span])?;
            }
            SharePlace::Files(files) => {
                memory.read_pinned(buffer.pinned, span.start as u64, &mut scratch[span])?;
                for part in &self.parts {
                    let at = index(part.position - self.start);
                    files.write(part.position, &scratch[at..at + index(part.size_bytes)])?;
                }
            }
        }
        Ok(())
    }

    /// Copies this share's bytes from its place to the pinned buffer. See [`store`](Self::store).
    fn load(
        &self,
        memory: &dyn PinnedMemory,
        buffer: Buffer,
        scratch: &mut [u8],
    ) -> Result<(), SleepError> {
        let span = self.span();
        let offset_bytes = span.start as u64;
        match &self.place {
            SharePlace::Memory(bytes) => {
                memory.write_pinned(buffer.pinned, offset_bytes, &bytes[span])?;
            }
            SharePlace::Files(files) => {
                for part in &self.parts {
                    let at = index(part.position - self.start);
                    files.read(part.position, &mut scratch[at..at + index(part.size_bytes)])?;
                }
                memory.write_pinned(buffer.pinned, offset_bytes, &scratch[span])?;
            }
        }
        Ok(())
    }

    /// Returns the range in the buffer from the first part's start to the last one's end.
    fn span(&self) -> Range<usize> {
        let (first, last) = (self.parts.first(), self.parts.last());
        let start = first.map_or(0, |part| part.position - self.start);
        let end = last.map_or(0, |part| part.end() - self.start);
        index(start)..index(end)
    }
}

impl Engine {
    /// Returns the calls for pinned memory.
    pub(super) fn pinned_memory(&self) -> Result<&dyn PinnedMemory, DriverError> {
        self.driver.pinned_memory().ok_or_else(|| {
            let message = "this device has no pinned memory, which tags need";
            DriverError::new(DriverErrorKind::NotSupported, "pinned_memory", 0, message)
        })
    }

    /// Calls `copy` with a stream for copies. Waits for the stream if `copy` fails, so that no copy
    /// runs afterwards; the second value is true unless this wait fails.
    pub(super) fn with_copier<T>(
        &self,
        copy: impl FnOnce(&mut Copier) -> Result<T, SleepError>,
    ) -> (Result<T, SleepError>, bool) {
        let kept = self.copier.lock().take();
        let mut copier = match kept {
            Some(copier) => copier,
            None => match self.driver.create_stream() {
                Ok(stream) => Copier { stream, buffers: Vec::new() },
                Err(error) => return (Err(error.into()), true),
            },
        };
        // A user's function may panic during the copies.
        let copied = catch_unwind(AssertUnwindSafe(|| copy(&mut copier)));
        let is_over =
            matches!(copied, Ok(Ok(_))) || self.driver.synchronize_stream(copier.stream).is_ok();
        // A copy that may still run uses the buffers, so they are given up then.
        let unused = {
            let mut kept = self.copier.lock();
            if is_over && kept.is_none() { kept.replace(copier) } else { Some(copier) }
        };
        if let Some(copier) = unused {
            let kept = self.drop_copier(copier, is_over);
            self.growth.lock().leftovers.pinned.extend(kept);
        }
        (copied.unwrap_or_else(|panic| resume_unwind(panic)), is_over)
    }

    /// Copies blocks (address and size, in address order) to the backup of a tag with these options. Calls
    /// `during` while copies run or before they start. Waits for the copies.
    pub(super) fn save(
        &self,
        saved: &mut SavedContents,
        copier: &mut Copier,
        blocks: impl IntoIterator<Item = (u64, u64)>,
        tag: &TagOptions,
        during: impl FnOnce(),
    ) -> Result<Copied, SleepError> {
        saved.place(blocks);
        let runs = saved.runs();
        let bytes = runs.last().map_or(0, Run::end);
        let copies = match &tag.directory {
            None if tag.keep_backup => self.save_kept(saved, copier, &runs, during)?,
            place => {
                match place {
                    Some(directory) => saved.provide_files(directory, &runs)?,
                    None => saved.provide_memory(bytes)?,
                }
                self.copy_through_buffers(Direction::Out, saved, copier, &runs, during)?
            }
        };
        if let Some(UnkeptBytes::Files(files)) = saved.unkept_bytes() {
            files.finish()?;
        }
        Ok(Copied { bytes, copies })
    }

    fn save_kept(
        &self,
        saved: &mut SavedContents,
        copier: &Copier,
        runs: &[Run],
        during: impl FnOnce(),
    ) -> Result<u64, SleepError> {
        let memory = self.pinned_memory()?;
        let bytes = runs.last().map_or(0, Run::end);
        let size_bytes = bytes.saturating_sub(saved.kept_bytes());
        if size_bytes > 0 {
            check_available(size_bytes)?;
            let pinned = memory.pin(size_bytes).map_err(|error| no_memory(size_bytes, error))?;
            saved.add_store(pinned, size_bytes);
        }
        let mut copies = 0;
        for (pinned, positions) in saved.stores() {
            for part in parts(runs, positions.clone()) {
                let offset_bytes = part.position - positions.start;
                let to = PinnedRange { pinned, offset_bytes, size_bytes: part.size_bytes };
                memory.copy_out(to, part.address, copier.stream)?;
                copies += 1;
            }
        }
        during();
        self.driver.synchronize_stream(copier.stream)?;
        Ok(copies)
    }

    /// Submits the copies to addresses below `end`, all of which are mapped.
    pub(super) fn submit_below(&self, copies: &mut KeptCopies, end: u64) -> Result<(), SleepError> {
        let memory = self.pinned_memory()?;
        while let Some(run) = copies.runs.front_mut() {
            let size_bytes = run.size_bytes.min(end.saturating_sub(run.address));
            if size_bytes == 0 {
                break;
            }
            let head = Run { size_bytes, ..*run };
            run.address += size_bytes;
            run.position += size_bytes;
            run.size_bytes -= size_bytes;
            if run.size_bytes == 0 {
                copies.runs.pop_front();
            }
            for (pinned, positions) in &copies.stores {
                let Some(part) = head.within(positions) else { continue };
                let offset_bytes = part.position - positions.start;
                let from =
                    PinnedRange { pinned: *pinned, offset_bytes, size_bytes: part.size_bytes };
                memory.copy_in(part.address, from, copies.stream)?;
            }
        }
        Ok(())
    }

    /// Copies all saved blocks back to their addresses, or waits for the copies of a kept backup, which were
    /// submitted. Returns the bytes.
    pub(super) fn finish_load(
        &self,
        saved: &mut SavedContents,
        copier: &mut Copier,
    ) -> Result<u64, SleepError> {
        let runs = saved.runs();
        if saved.is_pinned() {
            self.driver.synchronize_stream(copier.stream)?;
        } else {
            self.copy_through_buffers(Direction::In, saved, copier, &runs, || ())?;
        }
        Ok(saved.bytes())
    }

    /// Copies the runs between the device and a backup that is not kept, if it is not empty. Calls `during`
    /// while other threads copy. Waits for the copies, and returns their number.
    fn copy_through_buffers(
        &self,
        direction: Direction,
        saved: &mut SavedContents,
        copier: &mut Copier,
        runs: &[Run],
        during: impl FnOnce(),
    ) -> Result<u64, SleepError> {
        let shares = saved.unkept_bytes().map(|bytes| Share::of(bytes, runs)).unwrap_or_default();
        let processors = available_parallelism().map_or(1, usize::from).min(THREADS_MAX);
        let threads = processors.min(shares.len().div_ceil(BUFFERS_EACH));
        self.add_buffers(copier, shares.len().min(threads * BUFFERS_EACH))?;
        let todo = Mutex::new(shares.into_iter());
        let copy = |buffers: &[Buffer]| {
            let copied = self.copy_shares(direction, buffers, copier.stream, &todo);
            if copied.is_err() {
                // The other threads stop.
                *todo.lock() = Vec::new().into_iter();
            }
            copied
        };
        let mut rings = copier.buffers.chunks(BUFFERS_EACH).take(threads);
        let own = rings.next().unwrap_or_default();
        thread::scope(|scope| {
            // Shares of a thread that cannot be started are copied by the others.
            let start = |ring| Builder::new().spawn_scoped(scope, move || copy(ring)).ok();
            let others: Vec<_> = rings.filter_map(start).collect();
            during();
            let mut copied = copy(own);
            for other in others {
                let other = other.join().unwrap_or_else(|panic| resume_unwind(panic));
                copied = copied.and_then(|copies| Ok(copies + other?));
            }
            copied
        })
    }

    /// Takes shares and copies each through one of these buffers, until none is left. Waits for the copies.
    fn copy_shares(
        &self,
        direction: Direction,
        buffers: &[Buffer],
        stream: StreamId,
        todo: &Mutex<vec::IntoIter<Share<'_>>>,
    ) -> Result<u64, SleepError> {
        let memory = self.pinned_memory()?;
        let mut scratch = Vec::new();
        let finish = |(buffer, mut share): (Buffer, Share<'_>), scratch: &mut [u8]| {
            self.driver.synchronize_event(buffer.event)?;
            if direction == Direction::Out {
                share.store(memory, buffer, scratch)?;
            }
            Ok::<_, SleepError>(buffer)
        };
        let (mut copies, mut unused, mut in_flight) = (0, buffers.to_vec(), VecDeque::new());
        loop {
            let Some(share) = todo.lock().next() else { break };
            if matches!(share.place, SharePlace::Files(_)) {
                scratch.resize(index(BUFFER_BYTES), 0);
            }
            let buffer = match (unused.pop(), in_flight.pop_front()) {
                (Some(buffer), oldest) => {
                    in_flight.extend(oldest);
                    buffer
                }
                (None, Some(oldest)) => finish(oldest, &mut scratch)?,
                (None, None) => break,
            };
            if direction == Direction::In {
                share.load(memory, buffer, &mut scratch)?;
            }
            for part in &share.parts {
                let place = share.place(buffer, part);
                match direction {
                    Direction::Out => memory.copy_out(place, part.address, stream)?,
                    Direction::In => memory.copy_in(part.address, place, stream)?,
                }
                copies += 1;
            }
            self.driver.record_event(buffer.event, stream)?;
            in_flight.push_back((buffer, share));
        }
        in_flight.into_iter().try_for_each(|one| finish(one, &mut scratch).map(drop))?;
        Ok(copies)
    }

    /// Adds buffers until there are `count`. If memory is short, one is enough: copies then take longer.
    fn add_buffers(&self, copier: &mut Copier, count: usize) -> Result<(), SleepError> {
        let memory = self.pinned_memory()?;
        while copier.buffers.len() < count {
            match self.new_buffer(memory, copier.stream) {
                Ok(buffer) => copier.buffers.push(buffer),
                Err(error) if copier.buffers.is_empty() => return Err(error),
                Err(_) => break,
            }
        }
        Ok(())
    }

    fn new_buffer(
        &self,
        memory: &dyn PinnedMemory,
        stream: StreamId,
    ) -> Result<Buffer, SleepError> {
        let event = self.driver.create_event()?;
        let pinned = memory.pin(BUFFER_BYTES).inspect_err(|_| {
            self.events.return_unused(&[(event, stream)]);
        });
        let pinned = pinned.map_err(|error| no_memory(BUFFER_BYTES, error))?;
        Ok(Buffer { pinned, event })
    }

    /// Reads the saved bytes from `address + at` on, if those from `address` to `address + size_bytes` are
    /// all in one saved block. `None` if they are not.
    pub(super) fn read_saved(
        &self,
        saved: &mut SavedContents,
        (address, size_bytes): (u64, u64),
        at: u64,
        into: &mut [u8],
    ) -> Option<Result<(), SleepError>> {
        let from = saved.position_of(address, size_bytes)? + at;
        Some(match saved.unkept_bytes() {
            Some(UnkeptBytes::Memory(bytes)) => {
                let start = index(from);
                into.copy_from_slice(bytes.get(start..start.checked_add(into.len())?)?);
                Ok(())
            }
            Some(UnkeptBytes::Files(files)) => files.read(from, into),
            None => self.read_stores(saved, from, into).map_err(SleepError::from),
        })
    }

    fn read_stores(
        &self,
        saved: &SavedContents,
        from: u64,
        into: &mut [u8],
    ) -> Result<(), DriverError> {
        let memory = self.pinned_memory()?;
        let whole = Run { address: 0, size_bytes: into.len() as u64, position: from };
        for (pinned, positions) in saved.stores() {
            let Some(part) = whole.within(&positions) else { continue };
            // The run's addresses count from 0, so they are indices here.
            let [start, size] = [part.address, part.size_bytes].map(index);
            let to = &mut into[start..start + size];
            memory.read_pinned(pinned, part.position - positions.start, to)?;
        }
        Ok(())
    }

    /// Releases pinned memory, which takes time in proportion to its size. Returns what the driver failed to
    /// release.
    pub(super) fn unpin(&self, mut stores: Vec<PinnedId>) -> Vec<PinnedId> {
        stores.retain(|store| match self.driver.pinned_memory() {
            Some(memory) => memory.unpin(*store).is_err(),
            None => true,
        });
        stores
    }

    /// Releases the stream and the buffers for copies, unless a pause or a resume uses them. Releases other
    /// pinned memory that is not used any more, after a wait for copies that may still use it. Releases the
    /// growth lock during these calls.
    pub(super) fn release_copier(&self, growth: &mut MutexGuard<'_, Growth>) {
        let stores = std::mem::take(&mut growth.leftovers.pinned);
        let kept = MutexGuard::unlocked(growth, || {
            let copier = self.copier.lock().take();
            let mut kept = copier.map(|copier| self.drop_copier(copier, true)).unwrap_or_default();
            let may_unpin =
                !stores.is_empty() && synchronize_outside_captures(&*self.driver).is_ok();
            kept.extend(if may_unpin { self.unpin(stores) } else { stores });
            kept
        });
        growth.leftovers.pinned.extend(kept);
    }

    /// Releases the stream and the buffers for copies. Returns the pinned memory that stays: all of it if
    /// copies may still run, otherwise what the driver failed to release.
    fn drop_copier(&self, copier: Copier, is_over: bool) -> Vec<PinnedId> {
        let pinned = copier.buffers.iter().map(|buffer| buffer.pinned).collect();
        let kept = if is_over { self.unpin(pinned) } else { pinned };
        let events: Vec<_> =
            copier.buffers.iter().map(|buffer| (buffer.event, copier.stream)).collect();
        self.events.return_unused(&events);
        // A stream that the driver fails to destroy is destroyed with its context.
        let _ = self.driver.destroy_stream(copier.stream);
        kept
    }

    /// Releases the backups of all tags when the engine is dropped. Memory that copies may still use leaks
    /// if the wait for them fails.
    pub(super) fn drop_backups(&self) {
        let mut growth = self.growth.lock();
        let stores = growth.pools.take_stores();
        let kept = self.unpin(stores);
        growth.leftovers.pinned.extend(kept);
        self.release_copier(&mut growth);
    }
}

fn no_memory(size_bytes: u64, error: DriverError) -> SleepError {
    if error.is_out_of_memory() {
        SleepError::HostMemory { size_bytes, available_bytes: None, driver: Some(error) }
    } else {
        error.into()
    }
}
