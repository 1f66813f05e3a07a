//! Runs operations on an allocator and checks it after each one.
//!
//! The checks are the invariants of `common::invariants`, the model in `mirror`, and this module's own
//! list of live blocks. Work on other streams stays pending until an operation finishes it, so a block
//! that is reused too early is detected.

use stratalloc::registry::build;

use super::mirror::Mirror;
use super::ops::{Op, Tuning};
use crate::common::prelude::*;
use crate::common::stacks::LEVELS;

/// A live block.
#[derive(Debug)]
pub(crate) struct HeldBlock {
    /// `None` if the test keeps only the block's address.
    pub(crate) allocation: Option<Allocation>,
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) stream: StreamId,
    /// The other streams that use the block.
    pub(crate) others: BTreeSet<StreamId>,
    /// The seed of the bytes written to the block.
    seed: u64,
}

/// A handle of a block that was freed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stale {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) token: Token,
}

/// What an operation may change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Everything that the invariants allow.
    Done,
    /// Nothing.
    Refused,
}

/// An allocator under test and its expected state.
#[derive(Debug)]
pub(crate) struct Runner<'m, M> {
    pub(crate) machine: &'m M,
    pub(crate) strategy: Strategy,
    segments: Segments,
    mirror: Mirror,
    streams: Vec<StreamId>,
    pub(crate) held: Vec<HeldBlock>,
    pub(crate) stale: Vec<Stale>,
    /// The unfinished events that each draining block waits for, by the block's address.
    waits: BTreeMap<u64, Vec<EventId>>,
    /// The number of events for which the engine may still be waiting, finished or not, by the block's
    /// address.
    recorded: BTreeMap<u64, u64>,
    most_recorded: u64,
    pub(crate) stranger: OwnerId,
    next_seed: u64,
    before: (Vec<SegmentLayout>, Statistics),
    /// The number of stacks that were captured and not yet freed.
    stacks: Arc<AtomicI64>,
    stack_level: StackLevel,
}

/// Runs a whole history.
pub(crate) fn run<M: Machine>(machine: &M, ops: &[Op], segments: Segments) -> Checked {
    let mut runner = Runner::new(machine, ops, segments)?;
    for (at, op) in ops.iter().enumerate() {
        runner.step(op).map_err(|wrong| format!("operation {at}, {op:?}: {wrong}"))?;
    }
    runner.every_block_has_its_holder()?;
    // Half of the histories free all blocks at the end. The others drop the allocator while blocks are
    // live.
    if ops.len().is_multiple_of(2) {
        runner.hand_everything_back()?;
    }
    let stacks = Arc::clone(&runner.stacks);
    drop(runner);
    ensure_eq!(stacks.load(Ordering::Relaxed), 0, "stacks that were not released");
    ensure_eq!(machine.used_bytes(), 0, "memory left behind");
    let held = machine.held();
    ensure!(held.is_nothing(), "left behind: {held:?}");
    Ok(())
}

impl<'m, M: Machine> Runner<'m, M> {
    /// Builds the allocator. The length of the history selects the options. For three of five lengths,
    /// the allocator starts with the settings that the first `Apply` operation applies.
    fn new(machine: &'m M, ops: &[Op], segments: Segments) -> Result<Self, String> {
        let n = ops.len();
        let (raw_addresses, stack_level) =
            ((n / 2).is_multiple_of(2), LEVELS[n / 4 % LEVELS.len()]);
        let applied = ops.iter().find_map(|op| match op {
            Op::Apply { tuning } => Some(*tuning),
            _ => None,
        });
        let tuning = applied.filter(|_| n % 5 < 3).unwrap_or(Tuning::PLAIN);
        let settings = tuning.settings(segments);
        let options = BuildOptions { raw_addresses };
        let config = Config::from_settings(settings.clone());
        let strategy =
            build(&config, machine.driver(), options).map_err(|error| error.to_string())?;
        let total_bytes = machine.driver().info().total_bytes;
        let (provider, stacks) = Counted::provider("step");
        let mut runner = Self {
            machine,
            strategy,
            segments,
            mirror: Mirror::new(settings, total_bytes),
            streams: machine.streams([2, 3, 5][n % 3]),
            held: Vec::new(),
            stale: Vec::new(),
            waits: BTreeMap::new(),
            recorded: BTreeMap::new(),
            most_recorded: 0,
            stranger: OwnerId::next(),
            next_seed: 0,
            before: Default::default(),
            stacks,
            stack_level,
        };
        let history = runner.engine().history();
        history.set_stack_provider(Some(provider));
        history.start(&RecordOptions::at_most(100_000).with_stacks(stack_level));
        ensure_eq!(runner.raw().is_some(), raw_addresses, "raw addresses");
        runner.before = runner.observe();
        Ok(runner)
    }

    /// Checks that in a snapshot exactly the blocks in use have a stack, or no block if stacks are off.
    fn every_block_has_its_holder(&self) -> Checked {
        for segment in self.engine().snapshot().segments {
            for (block, holder) in segment.layout.blocks.iter().zip(&segment.holders) {
                let expected = self.stack_level != StackLevel::Never
                    && block.state != BlockStateName::Inactive;
                ensure_eq!(holder.is_some(), expected, "the holder of {block:?}");
            }
        }
        Ok(())
    }

    pub(crate) fn engine(&self) -> &Engine {
        self.strategy.engine().expect("the native strategy has an engine")
    }

    pub(crate) fn raw(&self) -> Option<&Strategy> {
        Some(&self.strategy).filter(|strategy| strategy.control().by_address)
    }

    pub(crate) fn caching(&self) -> &dyn Caching {
        self.strategy.caching()
    }

    fn counters(&self) -> &dyn Counters {
        self.strategy.counters()
    }

    pub(crate) fn cross_stream(&self) -> &dyn CrossStream {
        self.strategy.cross_stream()
    }

    fn observe(&self) -> (Vec<SegmentLayout>, Statistics) {
        (self.caching().layout(), self.counters().statistics())
    }

    pub(crate) fn stream(&self, index: u8) -> StreamId {
        self.streams[usize::from(index) % self.streams.len()]
    }

    fn step(&mut self, op: &Op) -> Checked {
        self.forget_finished();
        self.mirror.begin(None);
        let outcome = self.perform(op)?;
        self.machine.step();
        self.check(outcome)
    }

    fn perform(&mut self, op: &Op) -> Result<Outcome, String> {
        match *op {
            Op::Allocate { bytes, stream } => return self.allocate(bytes, self.stream(stream)),
            Op::Free { pick } => {
                if !self.held.is_empty() {
                    return self.free(usize::from(pick) % self.held.len());
                }
            }
            Op::RecordStream { pick, stream } => return self.record(pick, self.stream(stream)),
            Op::FinishStream { stream } => self.machine.finish_stream(self.stream(stream)),
            Op::FinishEvent { pick } => {
                let unfinished = self.machine.unfinished();
                if !unfinished.is_empty() {
                    self.machine.finish_event(unfinished[usize::from(pick) % unfinished.len()].0);
                }
            }
            Op::ProcessEvents => {
                self.cross_stream().process_events().map_err(|error| error.to_string())?;
                self.replay(false)?;
                self.check_polled()?;
            }
            Op::EmptyCache => {
                self.caching().empty_cache().map_err(|error| error.to_string())?;
                self.replay(true)?;
                self.mirror.any_draining_or_idle()?;
            }
            Op::SetLimitMib { mib } => {
                let limit = mib.map(|mib| u64::from(mib) * MIB);
                self.caching().set_limit_bytes(limit);
                ensure_eq!(self.caching().limit_bytes(), limit, "limit");
                self.mirror.limit = limit;
            }
            Op::SetFraction { percent } => self.set_fraction(percent)?,
            Op::Apply { tuning } => {
                let settings = tuning.settings(self.segments);
                self.mirror.settings = settings.clone();
                let applied = self.caching().apply(&Config::from_settings(settings));
                applied.map_err(|error| error.to_string())?;
            }
            Op::ResetPeaks => {
                self.counters().reset_peaks();
                self.mirror.reset_peaks();
            }
            Op::ResetAccumulated => {
                self.counters().reset_accumulated();
                self.mirror.reset_accumulated();
            }
            Op::Misuse { pick } => return self.misuse(pick),
        }
        Ok(Outcome::Done)
    }

    fn set_fraction(&mut self, percent: u8) -> Checked {
        let fraction = f64::from(percent) / 100.0;
        self.caching().set_memory_fraction(fraction).map_err(|error| error.to_string())?;
        let limit = self.caching().limit_bytes();
        let part = self.machine.driver().info().total_bytes / 100 * u64::from(percent);
        match limit {
            None => ensure_eq!(percent, 100, "no limit"),
            Some(limit) => ensure!(limit.abs_diff(part) <= 100, "{limit} is not {percent} %"),
        }
        self.mirror.limit = limit;
        Ok(())
    }

    fn allocate(&mut self, bytes: u64, stream: StreamId) -> Result<Outcome, String> {
        let request = Request::new(bytes, stream);
        self.mirror.begin(Some((bytes, stream)));
        // If the allocator supports frees by address, the runner keeps only the address of every other
        // block.
        let bare = self.next_seed % 2 == 1;
        let bare = bare && self.raw().is_some();
        let made = self.strategy.allocate(request);
        let made = made.map(|block| (block.address(), (!bare).then_some(block)));
        let waited = self.waited();
        let events = self.replay(waited)?;
        self.check_polled()?;
        let after = self.counters().statistics();
        let (hit, miss) = (after.hits - self.before.1.hits, after.misses - self.before.1.misses);
        ensure_eq!(hit + miss, 1, "a request is a hit or a miss");
        let quiet = !waited && !events.iter().any(|event| event.action.is_segment());
        match made {
            Ok((address, allocation)) => {
                let fitted = quiet && self.mirror.call.fitted;
                ensure_eq!(hit == 1, fitted, "a hit that changes nothing else");
                if after.num_alloc_retries > self.before.1.num_alloc_retries {
                    self.mirror.any_draining_or_idle()?;
                }
                let last = events.iter().rfind(|event| event.action == Action::Alloc);
                let last = last.map(|event| (event.address, event.size_bytes, event.stream));
                ensure_eq!(last, Some((address, bytes, stream)), "the block in the history");
                if let Some(made) = &allocation {
                    ensure_eq!(made.size_bytes(), bytes, "size of the handle");
                    ensure_eq!(made.owner(), self.engine().owner(), "owner of the handle");
                }
                let seed = self.next_seed;
                self.next_seed += 1;
                self.machine.write(address, bytes, seed, stream)?;
                let others = BTreeSet::new();
                self.held.push(HeldBlock { allocation, address, bytes, stream, others, seed });
            }
            Err(AllocError::OutOfMemory(report)) => {
                // A request that is refused in advance has its own counter and leaves no entry in the
                // history.
                let in_advance = !events.iter().any(|e| e.action == Action::OutOfMemory);
                self.mirror.book.num_oom_rejections += i64::from(in_advance);
                self.check_report(&report, bytes, stream)?;
            }
            Err(other) => return Err(format!("refused: {other}")),
        }
        Ok(Outcome::Done)
    }

    /// Checks that every number of the report equals the model's at the moment of failure.
    fn check_report(&self, report: &OutOfMemory, bytes: u64, stream: StreamId) -> Checked {
        let mirror = &self.mirror;
        let rounded = mirror.rounded(bytes);
        let numbers = (report.requested_bytes, report.rounded_bytes, report.segment_bytes);
        ensure_eq!(numbers, (bytes, rounded, mirror.least_growth(rounded)), "the request");
        ensure_eq!((report.stream, report.limit_bytes), (stream, mirror.limit), "stream, limit");
        ensure_eq!(report.reserved_bytes, mirror.reserved(), "reserved");
        for (bytes_reported, kind, state) in [
            (report.allocated_bytes, None, BlockStateName::ActiveAllocated),
            (report.draining_bytes, None, BlockStateName::ActivePendingFree),
            (report.cached_small_bytes, Some(PoolKind::Small), BlockStateName::Inactive),
            (report.cached_large_bytes, Some(PoolKind::Large), BlockStateName::Inactive),
        ] {
            ensure_eq!(
                bytes_reported,
                mirror.bytes_in(kind, state),
                "bytes {} {kind:?}",
                state.name()
            );
        }
        ensure!(!report.to_string().is_empty(), "the report is empty");
        Ok(())
    }

    fn free(&mut self, at: usize) -> Result<Outcome, String> {
        let block = self.held.swap_remove(at);
        self.machine.verify(block.address, block.bytes, block.seed, block.stream)?;
        for &stream in &block.others {
            self.machine.spoil_later(block.address, block.bytes, stream)?;
        }
        let before = self.machine.unfinished();
        match block.allocation {
            Some(allocation) => {
                let (address, bytes, token) =
                    (allocation.address(), allocation.size_bytes(), allocation.token());
                self.strategy.free(allocation).map_err(|error| error.to_string())?;
                self.stale.push(Stale { address, bytes, token });
            }
            None => {
                let raw = self.raw().ok_or("blocks without handles need addresses")?;
                raw.free_raw(block.address).map_err(|error| error.to_string())?;
            }
        }
        if !block.others.is_empty() {
            let mut new = self.machine.unfinished();
            new.retain(|event| !before.contains(event));
            if self.machine.holds_work() {
                let streams: BTreeSet<StreamId> = new.iter().map(|(_, stream)| *stream).collect();
                ensure_eq!(streams, block.others, "streams that are waited for");
                ensure_eq!(new.len(), block.others.len(), "one event for each stream");
            }
            self.waits.insert(block.address, new.into_iter().map(|(event, _)| event).collect());
            self.recorded.insert(block.address, block.others.len() as u64);
        }
        let events = self.replay(false)?;
        let actions: Vec<Action> = events.iter().map(|event| event.action).collect();
        let completed = block.others.is_empty().then_some(Action::FreeCompleted);
        let expected: Vec<Action> = [Action::FreeRequested].into_iter().chain(completed).collect();
        ensure_eq!(actions, expected, "events of a free");
        Ok(Outcome::Done)
    }

    fn record(&mut self, pick: u16, stream: StreamId) -> Result<Outcome, String> {
        if self.held.is_empty() {
            return Ok(Outcome::Refused);
        }
        let at = usize::from(pick) % self.held.len();
        let block = &self.held[at];
        match (&block.allocation, self.raw()) {
            (Some(allocation), None) => self.cross_stream().record_stream(allocation, stream),
            (Some(allocation), Some(_)) if pick.is_multiple_of(2) => {
                self.cross_stream().record_stream(allocation, stream)
            }
            (_, Some(raw)) => raw.record_stream_raw(block.address, stream),
            (None, None) => return Err("blocks without handles need addresses".into()),
        }
        .map_err(|error| error.to_string())?;
        let block = &mut self.held[at];
        if stream != block.stream {
            block.others.insert(stream);
        }
        // A recorded use has no visible effect until the free.
        Ok(Outcome::Refused)
    }

    /// Returns true if the engine has waited for all streams since the last check.
    fn waited(&self) -> bool {
        self.counters().statistics().num_sync_all_streams > self.before.1.num_sync_all_streams
    }

    /// Removes the waits for events that have finished, before the engine can reuse these events.
    fn forget_finished(&mut self) {
        let unfinished: BTreeSet<EventId> =
            self.machine.unfinished().into_iter().map(|(event, _)| event).collect();
        for events in self.waits.values_mut() {
            events.retain(|event| unfinished.contains(event));
        }
    }

    /// Applies the new events to the model. A block may become free only if all events that it waits for
    /// have finished, or if the engine has `waited` for all work.
    fn replay(&mut self, waited: bool) -> Result<Vec<Event>, String> {
        let mut events = Vec::new();
        self.engine().history().drain_into(&mut events);
        // The checks themselves take snapshots, which leave entries.
        events.retain(|event| event.action != Action::Snapshot);
        for event in &events {
            if event.action == Action::FreeCompleted
                && let Some(waits) = self.waits.remove(&event.address)
            {
                ensure!(waited || waits.is_empty(), "{event:?} comes before {waits:?} finished");
                self.recorded.remove(&event.address);
            }
        }
        self.mirror.call.waited |= waited;
        self.mirror.replay(&events)?;
        self.most_recorded = self.most_recorded.max(self.recorded.values().sum());
        Ok(events)
    }

    /// Checks, after events were queried, that no block is draining if all work has finished.
    fn check_polled(&self) -> Checked {
        let all_done = self.machine.holds_work() && self.machine.unfinished().is_empty();
        ensure!(!all_done || !self.mirror.any_draining(), "drains, and all work has finished");
        Ok(())
    }

    fn check(&mut self, outcome: Outcome) -> Checked {
        self.replay(false)?;
        invariants::check_all(self.engine(), self.machine.used_bytes())?;
        let (layout, statistics) = self.observe();
        if outcome == Outcome::Refused {
            ensure_eq!(layout, self.before.0, "layout around a refused call");
            ensure_eq!(statistics, self.before.1, "statistics around a refused call");
        }
        self.mirror.check_layout(&layout)?;
        self.mirror.check_statistics(&statistics)?;
        self.check_held(&layout)?;
        let held = self.machine.held();
        self.mirror.check_device(&held)?;
        let alive = held.events;
        ensure!(alive <= self.most_recorded, "{alive} events for {}", self.most_recorded);
        self.before = (layout, statistics);
        Ok(())
    }

    /// Checks that the live blocks of the layout are those of the runner, that they do not overlap, and
    /// that every block that waits for other streams is still draining.
    fn check_held(&self, layout: &[SegmentLayout]) -> Checked {
        let mut held: Vec<_> = self.held.iter().map(|b| (b.address, b.bytes)).collect();
        held.sort_unstable();
        ensure_eq!(invariants::live_blocks(layout), held, "live blocks");
        for pair in held.windows(2) {
            ensure!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:x?} overlap");
        }
        for (&address, waits) in self.waits.iter().filter(|(_, waits)| !waits.is_empty()) {
            let blocks = layout.iter().flat_map(|segment| &segment.blocks);
            let draining = blocks.filter(|b| b.state == BlockStateName::ActivePendingFree);
            let found = draining.map(|block| block.address).any(|start| start == address);
            ensure!(found, "{address:#x} no longer waits for {waits:?}");
        }
        Ok(())
    }

    fn hand_everything_back(&mut self) -> Checked {
        while let Some(last) = self.held.len().checked_sub(1) {
            self.forget_finished();
            let outcome = self.free(last)?;
            self.check(outcome)?;
        }
        for &stream in &self.streams {
            self.machine.finish_stream(stream);
        }
        self.step(&Op::ProcessEvents)?;
        ensure!(!self.machine.holds_work() || self.mirror.book.active.all.current == 0, "in use");
        self.step(&Op::EmptyCache)?;
        ensure_eq!(self.mirror.reserved(), 0, "reserved in the end");
        ensure_eq!(self.machine.used_bytes(), 0, "used in the end");
        Ok(())
    }
}
