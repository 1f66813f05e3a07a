//! Compares the engine's decisions with those of the recorded allocator.
//!
//! The recorded requests and frees are sent to a native engine whose driver returns the recorded segment
//! addresses. The engine's decisions are compared: the address of every block, every segment event and
//! every completed free in order, and the final layout. Two decisions that depend on unrecorded state are
//! taken from the recording: blocks of a restored checkpoint (`answer`), and retries (`is_retry`).
//!
//! Explicit `empty_cache` calls have a label or are inferred. If the recording has a release before a
//! request, and the engine would not begin that request with this release (`Engine::predict`), an explicit
//! call caused it, or the end of a private pool. A call that released nothing leaves no event and cannot be
//! inferred. A call and the retry of a request that found no memory leave the same events if the request
//! then allocates a segment; it is taken for a retry. So counts of retries and of calls are not exact.
//!
//! The moments at which other streams' work finished are taken from the recording, because they depend
//! on the timing of the recorded device.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::addresses::{heap_of, held, ranges, starts};
use super::describe;
use super::lanes::LaneWork;
use super::progress::{Progress, Silent};
use super::run::{ReplayError, Run, check_heaps};
use super::start::Start;
use super::trace::{Trace, TraceEvent};
use super::workload::{EventGroup, Workload, WorkloadBuilder, groups, leading_completions};
use stratalloc::allocator::{
    Allocation, Caching, Counters, CrossStream, DeviceAllocator, PoolScope, PrivatePools,
    Recording, Request, ScopeFilter,
};
use stratalloc::config::Config;
use stratalloc::driver::Driver;
use stratalloc::error::AllocError;
use stratalloc::history::{Action, BlockStateName, Event, History, RecordOptions, SegmentLayout};
use stratalloc::ids::{PoolId, StreamId};
use stratalloc::registry::{self, BuildOptions};
use stratalloc::size::PoolKind;
use stratalloc::strategies::native::{Engine, Prediction};
use stratalloc_sim::{EventMode, Recorded, RecordedAddresses, Sim, SimOptions};

mod inference;

use inference::{misfit, private_pool};

/// The result of comparing the replay's decisions with the recorded ones.
#[derive(Clone, Debug, Default)]
pub struct Verification {
    /// Counters, and the duration of the replay if there was a clock. The time per operation is not measured.
    pub run: Run,
    /// The number of requests with another address or result, and of frees of blocks that are not live.
    pub address_mismatches: u64,
    /// The number of segment events and `FreeCompleted` events that differ in order, action, size, address
    /// or stream.
    pub segment_mismatches: u64,
    /// The number of segments in the final layout that differ.
    pub layout_mismatches: u64,
    /// A description of the first difference.
    pub first_mismatch: Option<String>,
    /// The recorded requests, and the inferred calls of `empty_cache`.
    pub workload: Workload,
    /// The allocator's layout after the last replayed event.
    pub layout: Vec<SegmentLayout>,
    /// The number of requests for which the garbage collector released segments.
    pub collections: u64,
    /// The number of requests that released segments because of the limit, and then got memory.
    pub limit_releases: u64,
    /// Whether the limit on reserved bytes is too low or too high, if the first difference shows that.
    pub limit: Option<Misfit>,
}

/// How the limit on reserved bytes in a replay differs from the one in the recorded program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Misfit {
    /// The replay released memory or failed where the recorded allocator allocated a segment.
    TooLow,
    /// The replay kept or allocated memory that the recorded allocator released or could not allocate.
    TooHigh,
}

impl Verification {
    /// Returns true if nothing differs.
    #[must_use]
    pub fn is_exact(&self) -> bool {
        self.address_mismatches + self.segment_mismatches + self.layout_mismatches == 0
    }
}

/// Replays a recording and compares every decision. `memory_fraction` is that of the recorded process.
/// With `compat:pytorch` the rules are those of the recording's PyTorch version. The time is not measured.
///
/// # Errors
///
/// [`ReplayError`] when the recording cannot be replayed: for example, it is a log of requests, the
/// configuration builds no engine, the state before the first event is unknown, or there are more pairs of
/// stream and pool than in any program.
pub fn verify(
    trace: &Trace,
    config: &Config,
    total_bytes: u64,
    memory_fraction: Option<f64>,
) -> Result<Verification, ReplayError> {
    verify_until(trace, config, total_bytes, memory_fraction, Until::End, &started, &Silent)
}

/// Starts a history that records all entries.
pub fn started(history: &History) {
    history.start(&RecordOptions::default());
}

/// How far a recording is replayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// To its end, or until the recording has no more addresses for the driver.
    End,
    /// To the first difference.
    FirstDifference,
}

/// Does the same as [`verify`], but may stop early. `start_history` starts the history, for example with
/// stacks. It must record all entries of all actions. `progress` measures the time.
///
/// # Errors
///
/// The same as [`verify`].
pub fn verify_until(
    trace: &Trace,
    config: &Config,
    total_bytes: u64,
    memory_fraction: Option<f64>,
    until: Until,
    start_history: &dyn Fn(&History),
    progress: &dyn Progress,
) -> Result<Verification, ReplayError> {
    if trace.requests_only {
        return Err(ReplayError::RequestsOnly);
    }
    check_heaps(trace.events.iter().map(|event| (event.stream, event.named_pool())))?;
    let config = &trace.resolved(config);
    let begin = progress.elapsed();
    let sim = Arc::new(Sim::new(SimOptions {
        total_bytes,
        event_mode: EventMode::Manual,
        ..SimOptions::default()
    }));
    let start = Start::of(trace);
    let layout = start.layout(config.settings());
    let layout = layout.ok_or_else(|| ReplayError::LiveBefore { blocks: start.blocks.len() })?;
    let segments = ranges(trace, Action::SegmentAlloc, held(&layout, false, total_bytes));
    let addresses = RecordedAddresses {
        segments: starts(&segments),
        mappings: ranges(trace, Action::SegmentMap, held(&layout, true, total_bytes)),
    };
    let device = Arc::new(addresses.before(Arc::clone(&sim)));
    let driver = Arc::clone(&device) as Arc<dyn Driver>;
    let strategy = registry::build(config, driver, BuildOptions::default())?;
    let engine = strategy.engine().ok_or(ReplayError::NotVerifiable)?;
    let installed = engine.install(&layout)?;
    if let Some(fraction) = memory_fraction {
        engine.set_memory_fraction(fraction)?;
    }
    engine.count_scopes_as_captures();
    let builder = WorkloadBuilder::new(trace, &start, total_bytes);
    let mut verifier = Verifier {
        engine,
        device: &device,
        routing_is_capture: config.settings().compat.decisions().routing_is_capture,
        lanes: LaneWork::new(sim),
        builder,
        live: installed.into_iter().map(|block| (block.address, block.allocation)).collect(),
        pools: HashSet::new(),
        unfinished: None,
        seen: Vec::new(),
        lost: false,
        result: Verification::default(),
    };
    verifier.free_before(&start)?;
    if !start.is_empty() {
        engine.reset_peaks();
        engine.reset_accumulated();
    }
    start_history(engine.history());
    let mut groups = groups(&trace.events).peekable();
    while let Some((at, group)) = groups.next() {
        let next = groups.peek().map(|(_, next)| *next);
        let mut rest = Some((at, group));
        while let Some((at, group)) = rest {
            rest = verifier.step(at, group, next)?;
        }
        let differs = until == Until::FirstDifference && !verifier.result.is_exact();
        if verifier.lost || differs {
            break;
        }
    }
    if until == Until::End || verifier.result.is_exact() {
        verifier.compare_layout(trace, !start.is_empty());
    }
    let Verifier { mut result, builder, .. } = verifier;
    result.layout = engine.layout();
    result.workload = builder.workload;
    result.run.wall_s = progress.elapsed().saturating_sub(begin).as_secs_f64();
    result.run.statistics = engine.statistics();
    Ok(result)
}

struct Verifier<'a> {
    engine: &'a Engine,
    device: &'a Recorded<Arc<Sim>>,
    /// True if an open scope of a private pool counts as a capture in the recording's version of PyTorch.
    routing_is_capture: bool,
    lanes: LaneWork,
    builder: WorkloadBuilder,
    /// The live blocks, by recorded address.
    live: HashMap<u64, Allocation>,
    /// The private pools that were created and have users.
    pools: HashSet<PoolId>,
    /// A block whose free completed at once, or only when the next request waited for events. It is freed
    /// with that request.
    unfinished: Option<Allocation>,
    /// The engine's events during the current operation.
    seen: Vec<Event>,
    /// Whether the replay needs addresses that the recording does not have, because decisions diverged.
    lost: bool,
    result: Verification,
}

impl Verifier<'_> {
    /// Frees the blocks that waited for other streams when the recording began.
    fn free_before(&mut self, start: &Start) -> Result<(), ReplayError> {
        for id in self.builder.freed_before() {
            let address = start.blocks[id as usize].address;
            if let Some(allocation) = self.live.remove(&address) {
                self.free_in_use(allocation, Workload::LANE_BEFORE, address)?;
            }
        }
        Ok(())
    }

    /// Frees a block that the lane still uses. `address` is the block's recorded address.
    fn free_in_use(
        &mut self,
        allocation: Allocation,
        lane: StreamId,
        address: u64,
    ) -> Result<(), ReplayError> {
        self.engine.record_stream(&allocation, lane)?;
        self.engine.free(allocation)?;
        self.lanes.freed(lane, address)?;
        Ok(())
    }

    /// Replays one group of events, before the group `next`. Returns the rest of the group, and the index of
    /// its first event, if the group begins with the end of a private pool.
    fn step<'e>(
        &mut self,
        at: usize,
        group: EventGroup<'e>,
        next: Option<EventGroup<'_>>,
    ) -> Result<Option<(usize, EventGroup<'e>)>, ReplayError> {
        match group {
            EventGroup::Free { requested, at_once } => self.free(at, requested, at_once, next)?,
            EventGroup::Request { events, completions, request } => {
                let (completed, segments) = events.split_at(completions);
                self.builder.segments(at + completions, segments);
                let pool =
                    request.map_or(PoolId::DEFAULT, |event| self.builder.routing.pool_of(event));
                self.add_pool(pool)?;
                self.release_pools(segments, pool)?;
                let waits = completions > 0 || self.unfinished.is_some();
                let waits = request.filter(|event| {
                    waits && group.may_have_waited() && !self.is_captured(event, segments)
                });
                let before = waits.map(|event| self.engine.predict(pool, asked_by(event)));
                if let Some(allocation) = self.unfinished.take() {
                    self.engine.free(allocation)?;
                    self.take_seen();
                }
                self.complete(at, completed)?;
                let is_retry = request.is_some_and(|event| self.is_retry(before, pool, event));
                let mut rest = segments;
                while !is_retry && self.is_explicit(rest, pool, request) {
                    let taken = self.release_explicitly(at, rest)?;
                    rest = &rest[taken..];
                    // The end of a pool waits only for events of that pool. So the request may find other
                    // events passed, as at the start of a group.
                    let completions = leading_completions(rest);
                    if completions > 0 {
                        let group = EventGroup::Request { events: rest, completions, request };
                        return Ok(Some((at + events.len() - rest.len(), group)));
                    }
                }
                match request {
                    Some(request) => self.request(at, rest, pool, request, is_retry)?,
                    None => self.compare(at, "unexplained", &[], rest),
                }
            }
        }
        Ok(None)
    }

    fn free(
        &mut self,
        at: usize,
        event: &TraceEvent,
        at_once: bool,
        next: Option<EventGroup<'_>>,
    ) -> Result<(), ReplayError> {
        self.builder.free(at, event, at_once);
        let Some(allocation) = self.live.remove(&event.address) else {
            self.differ(at, || format!("{:#x} was freed and is not live", event.address));
            self.result.address_mismatches += 1;
            return Ok(());
        };
        self.result.run.frees += 1;
        match at_once {
            true if next.is_some_and(|next| next.may_have_waited()) => {
                self.unfinished = Some(allocation);
                return Ok(());
            }
            true => self.engine.free(allocation)?,
            false => self.free_in_use(allocation, self.builder.lanes.lane(at), event.address)?,
        }
        self.take_seen();
        Ok(())
    }

    /// Applies the `FreeCompleted` events at the start of a group, one by one.
    fn complete(&mut self, at: usize, completions: &[TraceEvent]) -> Result<(), ReplayError> {
        for event in completions {
            self.builder.finished(event);
            self.lanes.finish(event.address)?;
            self.engine.poll_events()?;
        }
        let seen = self.take_seen();
        self.compare(at, "completions", &seen, completions);
        Ok(())
    }

    /// Returns the engine's result for a recorded request. If a request to a private pool allocated no
    /// segment, and best fit would not choose its recorded address, the program had restored a checkpoint
    /// of the pool. The block is then placed at the recorded address, if it is free there.
    fn answer(
        &self,
        segments: &[TraceEvent],
        pool: PoolId,
        event: &TraceEvent,
    ) -> Result<Allocation, AllocError> {
        let request = asked_by(event);
        if pool == PoolId::DEFAULT {
            return self.engine.allocate(request);
        }
        let pools: &dyn PrivatePools = self.engine;
        let scope = || PoolScope::open(pools, pool, ScopeFilter::this_thread());
        let _scope = match self.is_captured(event, segments) {
            true => Some(scope().map_err(AllocError::from)?),
            false => None,
        };
        let grew = !segments.is_empty();
        let explained =
            grew || self.engine.predict(pool, request) == Prediction::Hit(event.address);
        if !explained && event.action == Action::Alloc {
            let placed = self.engine.replace(pool, event.stream, event.address, event.size_bytes);
            if let Some(placed) = placed {
                return Ok(placed);
            }
        }
        self.engine.allocate(request.in_pool(pool))
    }

    /// Replays an explicit call of `empty_cache`. If the first release is that of a private pool, the pool
    /// ended instead, which releases its memory alone. Returns how many of the recorded events belong to it.
    fn release_explicitly(&mut self, at: usize, rest: &[TraceEvent]) -> Result<usize, ReplayError> {
        let pools: &dyn PrivatePools = self.engine;
        let first = rest.first().filter(|event| !event.empty_cache);
        let ended = first.and_then(private_pool);
        match ended.filter(|pool| pools.pool_users(*pool) == Some(0)) {
            Some(pool) => {
                pools.empty_pool(pool).map_err(|error| ReplayError::Alloc(error.into()))?;
            }
            None => {
                self.builder.empty_cache();
                self.engine.empty_cache()?;
            }
        }
        let seen = self.take_seen();
        // If the call released nothing, all remaining events count as differing, so that the caller's
        // loop ends.
        let taken = if seen.is_empty() { rest.len() } else { seen.len().min(rest.len()) };
        // If the events differ, a request that reached the limit or started the garbage collector caused
        // them, not an explicit call. So the limit of this replay is too high.
        self.suspect(Some(Misfit::TooHigh), |me| {
            me.compare(at, "empty_cache", &seen, &rest[..taken]);
        });
        for event in &rest[..taken] {
            self.builder.finished(event);
            self.lanes.waited_for(event.address);
        }
        Ok(taken)
    }

    fn request(
        &mut self,
        at: usize,
        rest: &[TraceEvent],
        pool: PoolId,
        event: &TraceEvent,
        is_retry: bool,
    ) -> Result<(), ReplayError> {
        for event in rest {
            self.builder.finished(event);
            self.lanes.waited_for(event.address);
        }
        self.builder.request(event);
        let is_small = PoolKind::of(event.size_bytes) == PoolKind::Small;
        self.device.interceptor().set_heap(Some(heap_of(event, is_small)));
        let answer = match is_retry {
            true => self.engine.allocate_by_retry(pool, asked_by(event)),
            false => self.answer(rest, pool, event),
        };
        let mut seen = self.take_seen();
        let last = seen.pop();
        let failed = last.is_some_and(|last| last.action == Action::OutOfMemory);
        let misfit = misfit(&seen, rest, failed).or_else(|| {
            match (failed, event.action == Action::OutOfMemory) {
                (true, false) => Some(Misfit::TooLow),
                (false, true) => Some(Misfit::TooHigh),
                _ => None,
            }
        });
        // The recording has no address for a driver call of the replay. Nothing after that can be compared.
        if let Err(AllocError::Driver(error)) = &answer {
            self.suspect(misfit.or(Some(Misfit::TooHigh)), |me| {
                me.differ(at, || format!("{error}, after {}", describe::done(&seen)));
            });
            self.lost = true;
        }
        self.suspect(misfit, |me| me.compare(at, "segments", &seen, rest));
        let same = last.is_some_and(|last| {
            let address = last.address == event.address || event.action == Action::OutOfMemory;
            (last.action, last.size_bytes, last.stream)
                == (event.action, event.size_bytes, event.stream)
                && address
        });
        if !same {
            self.result.address_mismatches += 1;
            self.suspect(misfit, |me| {
                me.differ(at, || {
                    let (last, event) =
                        (describe::done(last.as_slice()), describe::recorded(&[*event]));
                    format!("{last} instead of {event}")
                });
            });
        }
        match answer {
            Ok(allocation) if event.action == Action::OutOfMemory => {
                self.result.run.ooms += 1;
                self.engine.free(allocation)?;
                self.take_seen();
            }
            Ok(allocation) => {
                self.result.run.allocations += 1;
                self.live.insert(event.address, allocation);
            }
            Err(AllocError::OutOfMemory(_)) => self.result.run.ooms += 1,
            // Counted above, because the request left no event.
            Err(AllocError::Driver(_)) => {}
            Err(error) => return Err(ReplayError::Alloc(error)),
        }
        Ok(())
    }

    fn take_seen(&mut self) -> Vec<Event> {
        self.seen.clear();
        self.engine.history().drain_into(&mut self.seen);
        std::mem::take(&mut self.seen)
    }

    /// Compares events, some of them in any order (`in_any_order`).
    fn compare(&mut self, at: usize, what: &str, seen: &[Event], recorded: &[TraceEvent]) {
        let names_pools = recorded.iter().any(|event| event.names_pool);
        let ours = seen.iter().map(|e| {
            let pool = if names_pools { e.pool } else { PoolId::DEFAULT };
            (pool, (e.action, e.address, e.size_bytes, e.stream))
        });
        let theirs = recorded.iter().map(|e| {
            let pool = e.named_pool().unwrap_or_default();
            (pool, (e.action, e.address, e.size_bytes, e.stream))
        });
        let (ours, theirs) = (in_any_order(ours.collect()), in_any_order(theirs.collect()));
        let equal = ours.iter().zip(&theirs).filter(|(a, b)| a.1 == b.1).count();
        let differing = seen.len().max(recorded.len()) - equal;
        if differing > 0 {
            self.result.segment_mismatches += differing as u64;
            self.differ(at, || {
                format!(
                    "{what}: {} instead of {}",
                    describe::done(seen),
                    describe::recorded(recorded)
                )
            });
        }
    }

    /// Runs `differ`. If that finds the first difference, stores `misfit`, the direction of the wrong
    /// limit.
    fn suspect(&mut self, misfit: Option<Misfit>, differ: impl FnOnce(&mut Self)) {
        let first = self.result.first_mismatch.is_none();
        differ(self);
        if first && self.result.first_mismatch.is_some() {
            self.result.limit = misfit;
        }
    }

    fn differ(&mut self, at: usize, how: impl Fn() -> String) {
        self.result.first_mismatch.get_or_insert_with(|| format!("at event {at}: {}", how()));
    }

    /// Compares the final layouts. `is_late` is true if memory existed before the first event.
    fn compare_layout(&mut self, trace: &Trace, is_late: bool) {
        let ours = self.engine.layout();
        let events = trace.events.len();
        // A free block keeps the requested size of the last request that it served. A late recording may
        // not contain this request. So requested sizes of free blocks are then not compared.
        let same = |(a, b): &(&SegmentLayout, &SegmentLayout)| match is_late {
            false => a == b,
            true => without_old_requests(a) == without_old_requests(b),
        };
        let pairs = || ours.iter().zip(&trace.segments);
        let differing =
            pairs().filter(|pair| !same(pair)).count() + ours.len().abs_diff(trace.segments.len());
        self.result.layout_mismatches = differing as u64;
        let first = pairs().find(|pair| !same(pair));
        if let Some((a, b)) = first {
            self.differ(events, || {
                format!("layout: {} instead of {}", describe::layout(a), describe::layout(b))
            });
        } else if differing > 0 {
            self.differ(events, || {
                format!("layout: {} segments instead of {}", ours.len(), trace.segments.len())
            });
        }
    }
}

fn asked_by(event: &TraceEvent) -> Request {
    Request::new(event.size_bytes, event.stream)
}

/// Action, address, size and stream of an event, and its pool.
type InPool = (PoolId, (Action, u64, u64, StreamId));

/// Sorts adjacent events whose order PyTorch takes from a hash table: `FreeCompleted` events of one wait,
/// which visits the streams, and the private pools of a release. Within a pool the order is kept.
fn in_any_order(mut events: Vec<InPool>) -> Vec<InPool> {
    let is_completion = |(_, (action, ..)): &InPool| *action == Action::FreeCompleted;
    let is_private_release = |(pool, (action, ..)): &InPool| {
        *pool != PoolId::DEFAULT && matches!(action, Action::SegmentFree | Action::SegmentUnmap)
    };
    for run in events.chunk_by_mut(|a, b| is_completion(a) && is_completion(b)) {
        run.sort_unstable_by_key(|(_, (_, address, ..))| *address);
    }
    for run in events.chunk_by_mut(|a, b| is_private_release(a) && is_private_release(b)) {
        run.sort_by_key(|(pool, _)| *pool);
    }
    events
}

/// Returns the layout with the requested sizes of free blocks set to 0.
fn without_old_requests(segment: &SegmentLayout) -> SegmentLayout {
    let mut plain = segment.clone();
    for block in plain.blocks.iter_mut().filter(|b| b.state == BlockStateName::Inactive) {
        block.requested_bytes = 0;
    }
    plain
}
