//! Runs operations on an allocator, updates the model, and records a line of text about each.
//!
//! Each operation returns its effect as a [`Step`], which `invariants` checks. A failure is returned as an
//! error only if no invariant can be checked after it, such as a live block that cannot be freed. Read next:
//! `invariants`.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::machine::Machine;
use super::model::{Freed, Live, Model, twin};
use super::script::{Misuse, Op};
use super::search::NOT_BUILT;
use super::{Build, Checked};
use stratalloc::allocator::{Allocation, Counters, DeviceAllocator, Request, Token};
use stratalloc::driver::Driver;
use stratalloc::error::{AllocError, DriverError, FreeError, HandleError, OutOfMemory};
use stratalloc::ids::{EventId, OwnerId, StreamId};
use stratalloc::size::REQUEST_MAX_BYTES;
use stratalloc::stats::Statistics;
use stratalloc_sim::HeldResources;

/// The number of streams of a script.
const STREAMS: usize = 3;

/// The effect of an operation.
#[derive(Debug)]
pub(super) enum Step {
    /// A block was allocated. It is the last element of `Model::live`.
    Got,
    /// Cached free memory was released to the driver.
    Emptied,
    /// Peaks were reset to the current values.
    PeaksReset,
    /// An illegal call was made. `Err` describes how the allocator failed to refuse it correctly.
    Misused(Checked),
    /// Any other effect, or none: a block was freed, there was not enough memory, or a driver call failed as
    /// the test wanted.
    Other,
    /// The script is over.
    Ended,
}

/// An allocator under test, with the device and the model (the state that the allocator should have).
#[derive(Debug)]
pub(super) struct Fixture<'m> {
    /// The device.
    pub(super) machine: &'m dyn Machine,
    /// The device's driver without injected faults, for the test's own calls.
    pub(super) device: Arc<dyn Driver>,
    /// The allocator under test.
    pub(super) allocator: Box<dyn DeviceAllocator>,
    /// The streams of the test.
    pub(super) streams: Vec<StreamId>,
    /// The state that the allocator should have.
    pub(super) model: Model,
    /// Whether faults are injected into driver calls.
    pub(super) faulty: bool,
    /// Whether the first block was memory of the driver; `None` before the first block.
    pub(super) from_driver: Option<bool>,
    /// The operations so far, one line each.
    pub(super) lines: Vec<String>,
    /// The report of the last request that was out of memory.
    pub(super) report: Option<Box<OutOfMemory>>,
    /// The counters before the last illegal call or reset of the peaks, for comparison.
    pub(super) before: Option<Statistics>,
    /// Whether the allocator has ever counted reserved bytes.
    pub(super) reserved_is_counted: bool,
    /// Whether every block so far was inside a segment or mapping that the machine lists, and no pool was
    /// used.
    pub(super) is_held: bool,
    held_before: HeldResources,
    used_before: u64,
    foreign_owner: OwnerId,
    waited: u64,
}

impl<'m> Fixture<'m> {
    /// Builds the allocator over `driver`, which is the machine's driver or a wrapper of it.
    ///
    /// # Errors
    ///
    /// The error of the constructor.
    pub(super) fn new(
        machine: &'m dyn Machine,
        driver: Arc<dyn Driver>,
        build: &Build<'_>,
    ) -> Result<Self, String> {
        let held_before = machine.held();
        let allocator = build(driver).map_err(|error| format!("{NOT_BUILT}{error}"))?;
        let used_before = machine.used_bytes();
        Ok(Self {
            machine,
            device: machine.driver(),
            allocator,
            streams: machine.streams(STREAMS),
            model: Model::default(),
            faulty: false,
            from_driver: None,
            lines: Vec::new(),
            report: None,
            before: None,
            reserved_is_counted: false,
            is_held: true,
            held_before,
            used_before,
            foreign_owner: OwnerId::next(),
            waited: machine.waits_owed(),
        })
    }

    fn stream(&self, number: u8) -> StreamId {
        self.streams[usize::from(number) % self.streams.len()]
    }

    fn pick(&self, pick: u16) -> Option<usize> {
        (!self.model.live.is_empty()).then(|| usize::from(pick) % self.model.live.len())
    }

    /// Runs one operation and returns its effect.
    ///
    /// # Errors
    ///
    /// A failure after which no invariant can be checked.
    pub(super) fn perform(&mut self, op: &Op) -> Result<Step, String> {
        let step = match *op {
            Op::Allocate { bytes, stream } => self.allocate(bytes, self.stream(stream)),
            Op::Free { pick } => match self.pick(pick) {
                Some(at) => self.free(at),
                None => Ok(Step::Other),
            },
            Op::RecordStream { pick, stream } => self.record(pick, self.stream(stream)),
            Op::Finish { stream } => {
                let stream = self.stream(stream);
                self.lines.push(format!("the work of stream {stream} finishes"));
                self.machine.finish_stream(stream);
                Ok(Step::Other)
            }
            Op::EmptyCache => self.empty_cache(),
            Op::ResetPeaks => Ok(self.reset_peaks()),
            Op::Misuse { what, pick } => Ok(self.misuse(what, pick)),
        }?;
        self.forget_finished()?;
        self.machine.step();
        Ok(step)
    }

    /// Allocates a block.
    ///
    /// # Errors
    ///
    /// When the request fails for a reason other than lack of memory or an injected fault.
    pub(super) fn allocate(&mut self, bytes: u64, stream: StreamId) -> Result<Step, String> {
        let name = self.model.handed_out;
        let call = format!("allocate {bytes} bytes on stream {stream}");
        self.lines.push(call.clone());
        let answer = self.allocator.allocate(Request::new(bytes, stream));
        let line = self.lines.len() - 1;
        let allocation = match answer {
            Ok(allocation) => allocation,
            Err(AllocError::OutOfMemory(report)) => {
                self.report = Some(report);
                self.lines[line] = format!("{call}: out of memory");
                return Ok(Step::Other);
            }
            Err(AllocError::Driver(_)) if self.faulty => {
                self.lines[line] = format!("{call}: the driver fails");
                return Ok(Step::Other);
            }
            Err(other) => return Err(format!("a plain request was refused: {other}")),
        };
        let start = allocation.address();
        self.lines[line] = format!("{call}: block {name} at {start:#x}");
        let others = BTreeSet::new();
        self.model.hand_out(Live { name, allocation, bytes, stream, others, seed: None });
        let held = self.machine.held();
        self.is_held &= held.pool_ranges == 0 && is_within(&held, start);
        if self.from_driver.is_none() {
            let apart = HeldResources { events: 0, ..held }
                != HeldResources { events: 0, ..self.held_before.clone() };
            self.from_driver = Some(apart);
        }
        Ok(Step::Got)
    }

    /// Returns the bytes of the segments and mappings that the driver has allocated since the allocator was
    /// built. Returns `None` if blocks come from elsewhere, if physical allocations of unknown size exist, or
    /// if the device had allocations before.
    pub(super) fn provided_bytes(&self) -> Option<u64> {
        let (held, before) = (self.machine.held(), &self.held_before);
        let known =
            |held: &HeldResources| held.pool_ranges == 0 && held.pieces <= held.mapped.len() as u64;
        if !self.is_held || !known(&held) || !before.is_nothing() {
            return None;
        }
        Some(held.segments.iter().map(|(_, bytes)| bytes).sum::<u64>() + held.mapped_bytes())
    }

    /// Returns true if no work of the device can use the blocks: they are not device memory, and the
    /// allocator has no interface for other streams. Returns false before the first allocation.
    pub(super) fn is_streamless(&self) -> bool {
        self.from_driver == Some(false) && self.allocator.control().cross_stream.is_none()
    }

    /// Frees a live block.
    ///
    /// # Errors
    ///
    /// When the free is refused for a reason other than an injected fault, when bytes of the block have
    /// changed, or when the device fails.
    pub(super) fn free(&mut self, at: usize) -> Result<Step, String> {
        let mut live = self.model.live.swap_remove(at);
        self.lines.push(format!("free block {}", live.name));
        if let Some(seed) = live.seed {
            let found = self.machine.verify(live.start(), live.bytes, seed, live.stream);
            found.map_err(|wrong| format!("block {}: {wrong}", live.name))?;
        }
        // On a device that runs work by itself, submits work that still uses the block after the free: on the
        // streams recorded on it, and for every second block on its own stream.
        if self.from_driver == Some(true) {
            live.seed = None;
            let own = live.name.is_multiple_of(2).then_some(live.stream);
            for stream in own.into_iter().chain(live.others.iter().copied()) {
                self.machine.spoil_later(live.start(), live.bytes, stream)?;
            }
        }
        let mut uses = Vec::new();
        for stream in std::iter::once(live.stream).chain(live.others.iter().copied()) {
            uses.push((stream, self.mark(stream)?));
        }
        let freed =
            Freed { name: live.name, start: live.start(), bytes: live.bytes, uses, excused: false };
        let stale = twin(&live.allocation);
        match self.allocator.free(live.allocation) {
            Ok(()) => {
                self.model.retire(freed, stale);
                Ok(Step::Other)
            }
            Err(refused) if self.faulty && matches!(refused.reason, HandleError::Driver(_)) => {
                self.model.live.push(Live { allocation: refused.allocation, ..live });
                self.unmark(freed)?;
                Ok(Step::Other)
            }
            Err(refused) => Err(format!("a live block could not be freed: {}", refused.reason)),
        }
    }

    fn record(&mut self, pick: u16, stream: StreamId) -> Result<Step, String> {
        let (Some(at), Some(cross)) = (self.pick(pick), self.allocator.control().cross_stream)
        else {
            return Ok(Step::Other);
        };
        let live = &mut self.model.live[at];
        self.lines.push(format!("stream {stream} uses block {}", live.name));
        match cross.record_stream(&live.allocation, stream) {
            Ok(()) => {}
            Err(HandleError::Driver(_)) if self.faulty => return Ok(Step::Other),
            Err(error) => return Err(format!("use by another stream was refused: {error}")),
        }
        if stream != live.stream {
            live.others.insert(stream);
            if self.from_driver == Some(true) {
                live.seed = None;
                self.machine.spoil_later(live.start(), live.bytes, stream)?;
            }
        }
        Ok(Step::Other)
    }

    fn empty_cache(&mut self) -> Result<Step, String> {
        let Some(caching) = self.allocator.control().caching else { return Ok(Step::Other) };
        self.lines.push("empty the cache".to_owned());
        match caching.empty_cache() {
            Ok(()) => Ok(Step::Emptied),
            Err(_) if self.faulty => Ok(Step::Other),
            Err(error) => Err(format!("the cache could not be emptied: {error}")),
        }
    }

    fn reset_peaks(&mut self) -> Step {
        let Some(counters) = self.allocator.control().counters else { return Step::Other };
        self.lines.push("reset the peaks".to_owned());
        self.before = Some(counters.statistics());
        counters.reset_peaks();
        self.model.most_live = self.model.live.len();
        Step::PeaksReset
    }

    fn misuse(&mut self, what: Misuse, pick: u16) -> Step {
        self.before = self.statistics();
        let done = match what {
            Misuse::Freed => self.freed_block(pick).map(|twin| self.use_illegally(twin)),
            Misuse::Foreign => {
                let as_if = "as if another allocator had made it";
                self.forged(pick, as_if, |fixture, block| (fixture.foreign_owner, block.token()))
            }
            Misuse::MadeUp => {
                let made_up = Token([[u32::MAX, 1 << 20][usize::from(pick % 2)]; 3]);
                let how = "with a token of no allocation";
                self.forged(pick, how, |_, block| (block.owner(), made_up))
            }
            Misuse::ZeroBytes => Some(self.request_illegally(0)),
            Misuse::AbsurdBytes => {
                let most = REQUEST_MAX_BYTES;
                let absurd = [most + 1, u64::MAX / 2 + 1, u64::MAX - 511, u64::MAX];
                Some(self.request_illegally(absurd[usize::from(pick) % absurd.len()]))
            }
        };
        done.map_or(Step::Other, Step::Misused)
    }

    /// Returns a handle of a block that was freed, if there is one.
    fn freed_block(&mut self, pick: u16) -> Option<Allocation> {
        let stale = &self.model.stale;
        let (name, handle) = stale.get(usize::from(pick) % stale.len().max(1))?;
        self.lines.push(format!("free block {name}, which was freed before"));
        Some(twin(handle))
    }

    /// Uses a handle of a live block in which the owner or the token is replaced.
    fn forged(
        &mut self,
        pick: u16,
        how: &str,
        change: impl FnOnce(&Self, &Allocation) -> (OwnerId, Token),
    ) -> Option<Checked> {
        let Live { name, allocation, .. } = &self.model.live[self.pick(pick)?];
        let (owner, token) = change(self, allocation);
        let twin = Allocation::new(allocation.address(), allocation.size_bytes(), owner, token);
        self.lines.push(format!("free block {name} {how}"));
        Some(self.use_illegally(twin))
    }

    fn request_illegally(&mut self, bytes: u64) -> Checked {
        self.lines.push(format!("allocate {bytes} bytes"));
        match self.allocator.allocate(Request::new(bytes, self.streams[0])) {
            Err(AllocError::ZeroBytes) if bytes == 0 => Ok(()),
            Err(AllocError::TooLarge { requested_bytes }) if requested_bytes == bytes => Ok(()),
            // A limit may refuse the request before its size is checked.
            Err(AllocError::OutOfMemory(_)) if bytes > 0 => Ok(()),
            Err(error) => Err(format!("{bytes} bytes were refused as: {error}")),
            Ok(block) => Err(format!("{bytes} bytes were allocated at {:#x}", block.address())),
        }
    }

    /// Checks that calls with a handle that is not live are refused for the right reason, and that the
    /// refused free returns the handle.
    fn use_illegally(&self, twin: Allocation) -> Checked {
        let (address, owner, token) = (twin.address(), twin.owner(), twin.token());
        let control = self.allocator.control();
        let recorded = control.cross_stream.map(|c| c.record_stream(&twin, self.streams[0]));
        let is_based = control.caching.is_some_and(|c| c.base_allocation(&twin).is_ok());
        let (freed, back) = match self.allocator.free(twin) {
            Ok(()) => return Err(format!("a handle that is not live was freed at {address:#x}")),
            Err(FreeError { reason, allocation }) => (Err(reason), allocation),
        };
        if (back.address(), back.owner(), back.token()) != (address, owner, token) {
            return Err(format!("the free at {address:#x} returned another allocation: {back:?}"));
        }
        let is_right = |done: &Result<(), HandleError>| match done {
            Err(HandleError::Foreign { owner: named, .. }) => {
                owner == self.foreign_owner && *named == owner
            }
            Err(HandleError::Stale { address: named }) => {
                owner != self.foreign_owner && *named == address
            }
            _ => false,
        };
        // For `record_stream`, "unknown address" is a right reason too: an allocator that contains several
        // others may look up by address which of them has the block.
        let unknown = HandleError::UnknownAddress { address }.to_string();
        let recorded = recorded.filter(|done| {
            done.as_ref().err().is_none_or(|refused| refused.to_string() != unknown)
        });
        match [Some(freed), recorded].into_iter().flatten().find(|done| !is_right(done)) {
            Some(wrong) => Err(format!("a call with a wrong handle at {address:#x}: {wrong:?}")),
            None if is_based => Err(format!("a wrong handle at {address:#x} has a base")),
            None => Ok(()),
        }
    }

    /// Returns the allocator's counters, if it has any.
    #[must_use]
    pub(super) fn statistics(&self) -> Option<Statistics> {
        self.allocator.control().counters.map(Counters::statistics)
    }

    /// Returns the bytes that the allocator holds. Uses its counters if it ever counted reserved bytes;
    /// otherwise the difference in the device's used bytes since it was built.
    pub(super) fn reserved_bytes(&self) -> i64 {
        match self.statistics() {
            Some(counted) if counted.reserved_bytes.all.peak > 0 => counted.memory_reserved(),
            _ => self.machine.used_bytes().saturating_sub(self.used_before).cast_signed(),
        }
    }

    /// Checks that no bytes are reserved after everything was freed and the cache was emptied.
    ///
    /// # Errors
    ///
    /// The number of reserved bytes.
    pub(super) fn check_nothing_is_reserved(&self) -> Checked {
        match self.reserved_bytes() {
            0 => Ok(()),
            left => {
                Err(format!("nothing is live and the cache is empty; {left} bytes are reserved"))
            }
        }
    }

    /// Records an event on a stream, after all work submitted to it so far.
    fn mark(&self, stream: StreamId) -> Result<EventId, String> {
        let event = self.device.create_event().map_err(own)?;
        self.device.record_event(event, stream).map_err(own)?;
        Ok(event)
    }

    fn unmark(&self, freed: Freed) -> Checked {
        freed
            .uses
            .into_iter()
            .try_for_each(|(_, event)| self.device.destroy_event(event))
            .map_err(own)
    }

    /// Returns true if later work on `stream` is ordered after `event`. First finishes all work that
    /// `stream` waits for: if `event` has then passed, `stream` waited for it.
    ///
    /// # Errors
    ///
    /// When the device fails.
    pub(super) fn comes_after(&self, stream: StreamId, event: EventId) -> Result<bool, String> {
        let here = self.mark(stream)?;
        self.device.synchronize_event(here).map_err(own)?;
        let finished = self.device.query_event(event).map_err(own)?;
        self.device.destroy_event(here).map_err(own)?;
        Ok(finished)
    }

    /// Removes from the model the uses of freed memory whose work has finished. Excuses all others if the
    /// allocator has freed memory to the driver since the last call.
    fn forget_finished(&mut self) -> Checked {
        let owed = self.machine.waits_owed();
        let excused = owed != self.waited;
        self.waited = owed;
        for freed in &mut self.model.freed {
            freed.excused |= excused;
            let mut unfinished = Vec::new();
            for (stream, event) in freed.uses.drain(..) {
                if self.device.query_event(event).map_err(own)? {
                    self.device.destroy_event(event).map_err(own)?;
                } else {
                    unfinished.push((stream, event));
                }
            }
            freed.uses = unfinished;
        }
        self.model.freed.retain(|freed| !freed.uses.is_empty());
        Ok(())
    }

    /// Removes all uses of freed memory from the model, and destroys their events.
    ///
    /// # Errors
    ///
    /// When the device fails.
    pub(super) fn forget_all(&mut self) -> Checked {
        std::mem::take(&mut self.model.freed).into_iter().try_for_each(|freed| self.unmark(freed))
    }

    /// Frees every live block and finishes the work of every stream.
    ///
    /// # Errors
    ///
    /// When a live block cannot be freed, or the device fails.
    pub(super) fn free_everything(&mut self) -> Checked {
        let (lines, count) = (self.lines.len(), self.model.live.len());
        while let Some(last) = self.model.live.len().checked_sub(1) {
            self.free(last)?;
        }
        self.lines.truncate(lines);
        self.lines.push(format!("free all {count} blocks, and all work finishes"));
        self.finish_all()
    }

    /// Finishes the work of every stream and calls the allocator's `process_events`.
    ///
    /// # Errors
    ///
    /// When the device fails.
    pub(super) fn finish_all(&mut self) -> Checked {
        self.streams.iter().for_each(|stream| self.machine.finish_stream(*stream));
        if let Some(cross) = self.allocator.control().cross_stream {
            cross.process_events().map_err(|error| error.to_string())?;
        }
        self.forget_finished()
    }
}

/// Returns true if an address lies in a segment or in a mapped range.
fn is_within(held: &HeldResources, address: u64) -> bool {
    let mut ranges = held.segments.iter().chain(&held.mapped);
    ranges.any(|(start, bytes)| (*start..start.saturating_add(*bytes)).contains(&address))
}

/// Describes the failure of a call that the test itself made.
fn own(error: DriverError) -> String {
    format!("the device failed under the test itself: {error}")
}
