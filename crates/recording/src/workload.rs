//! The requests of a recording, without the decisions of its allocator.
//!
//! Events become operations: allocations, frees, frees of blocks that other streams still use, the
//! completion of those streams' work, and explicit calls of `empty_cache`. These calls leave no event of
//! their own and are inferred from releases. Blocks from before the recording are allocated first.
//!
//! Recordings do not contain the streams that delay a free. **Lanes** replace them: a lane is a made-up
//! stream, and frees that wait for the same lane complete in order.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::ops::{Op, Ops};
use super::pools::PoolRouting;
use super::start::Start;
use super::trace::{Trace, TraceEvent};
use stratalloc::history::Action;
use stratalloc::ids::{PoolId, StreamId};

/// All requests of a recording, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Workload {
    /// The operations.
    pub ops: Ops,
    /// The number of blocks. Every `id` is below it.
    pub blocks: u32,
    /// The number of these blocks that existed before the recording began.
    pub seeded: u32,
    /// The number of explicit calls of `empty_cache`.
    pub empty_caches: u32,
    /// The private pools that blocks came from.
    pub pools: Vec<PoolId>,
}

/// The events of one operation of the recorded allocator. The allocator holds its lock throughout an
/// operation, so the events of different operations never interleave.
#[derive(Clone, Copy, Debug)]
pub(super) enum EventGroup<'a> {
    /// The free of a block. `at_once` is true if the block became free immediately.
    Free { requested: &'a TraceEvent, at_once: bool },
    /// A request and the events before it that belong to its operation. Without a request, an explicit
    /// `empty_cache` caused the events.
    Request {
        /// `FreeCompleted` events and segment events.
        events: &'a [TraceEvent],
        /// The number of `FreeCompleted` events at the start of `events`.
        completions: usize,
        request: Option<&'a TraceEvent>,
    },
}

impl EventGroup<'_> {
    /// Returns true for a request that failed, or that released memory and then allocated a segment: it may
    /// have waited for events.
    pub(super) fn may_have_waited(&self) -> bool {
        let Self::Request { events, completions, request: Some(request) } = self else {
            return false;
        };
        let changes = |event: Option<&TraceEvent>| event.map_or(0, TraceEvent::reserved_change);
        let segments = &events[*completions..];
        request.action == Action::OutOfMemory
            || changes(segments.first()) < 0 && changes(segments.last()) > 0
    }
}

/// Returns true if the freed block becomes free immediately, which the next event shows.
fn is_at_once(free: &TraceEvent, next: Option<&TraceEvent>) -> bool {
    next.is_some_and(|e| e.action == Action::FreeCompleted && e.address == free.address)
}

/// Splits the events into groups, one for each operation. Returns each with the index of its first event.
pub(super) fn groups(events: &[TraceEvent]) -> impl Iterator<Item = (usize, EventGroup<'_>)> {
    let mut next = 0;
    std::iter::from_fn(move || {
        let (at, rest) = (next, &events[next..]);
        let first = rest.first()?;
        if first.action == Action::FreeRequested {
            let at_once = is_at_once(first, rest.get(1));
            next += 1 + usize::from(at_once);
            return Some((at, EventGroup::Free { requested: first, at_once }));
        }
        let run = rest
            .iter()
            .take_while(|e| e.action.is_segment() || e.action == Action::FreeCompleted)
            .count();
        let events = &rest[..run];
        let completions = leading_completions(events);
        let request = rest.get(run).filter(|e| e.action != Action::FreeRequested);
        next += run + usize::from(request.is_some());
        Some((at, EventGroup::Request { events, completions, request }))
    })
}

/// Returns the number of `FreeCompleted` events at the start of `events`.
pub(super) fn leading_completions(events: &[TraceEvent]) -> usize {
    events.iter().take_while(|event| event.action == Action::FreeCompleted).count()
}

/// The maximum number of lanes of a recording.
const LANES_MAX: usize = 4096;

/// Assigns a lane to each delayed free, with as few lanes as can explain when the blocks became free.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    /// The lane of each delayed free, by the index of its event.
    lane_of: HashMap<usize, StreamId>,
}

impl Lanes {
    pub(super) fn of(events: &[TraceEvent]) -> Self {
        let mut open: HashMap<u64, usize> = HashMap::new();
        let mut spans = Vec::new();
        for (at, event) in events.iter().enumerate() {
            match event.action {
                Action::FreeRequested if !is_at_once(event, events.get(at + 1)) => {
                    open.insert(event.address, spans.len());
                    spans.push((at, usize::MAX));
                }
                Action::FreeCompleted => {
                    if let Some(span) = open.remove(&event.address) {
                        spans[span].1 = at;
                    }
                }
                _ => {}
            }
        }
        let mut ends: Vec<usize> = Vec::new();
        let mut lane_of = HashMap::new();
        for (start, end) in spans {
            // `ends` decreases from lane to lane. If a recording needs more than `LANES_MAX` lanes, the
            // last lane is shared.
            let lane = ends.partition_point(|&last| last > end).min(LANES_MAX - 1);
            if lane == ends.len() {
                ends.push(end);
            } else {
                ends[lane] = end;
            }
            lane_of.insert(start, StreamId(u64::MAX - lane as u64));
        }
        Self { lane_of }
    }

    /// Returns the lane of the delayed free whose event is number `at`.
    pub(super) fn lane(&self, at: usize) -> StreamId {
        self.lane_of.get(&at).copied().unwrap_or(StreamId(u64::MAX))
    }
}

impl Workload {
    /// Returns the number of operations up to the request with this number, which counts from 1; 0 stands for
    /// the start of the recording.
    #[must_use]
    pub fn operations_until(&self, requests: u32) -> usize {
        let before = self.seeded.saturating_add(requests);
        let is_before = |op: Op| op.is_request() && op.block().is_some_and(|id| id < before);
        self.ops.iter().rposition(is_before).map_or(0, |at| at + 1)
    }

    /// The lane of blocks that were freed before the recording began but had not become free.
    pub const LANE_BEFORE: StreamId = StreamId(u64::MAX - LANES_MAX as u64);

    /// Returns the operations of a recording.
    ///
    /// A release counts as an explicit call of `empty_cache` if it has that label, or if the following
    /// request neither allocated a segment nor failed. `verify` infers these calls more precisely from the
    /// engine's state. `total_bytes` is the memory of the recorded device.
    #[must_use]
    pub fn of(trace: &Trace, total_bytes: u64) -> Self {
        if let Some(log) = &trace.log {
            return Self::clone(log.workload());
        }
        let mut builder = WorkloadBuilder::new(trace, &Start::of(trace), total_bytes);
        for (at, group) in groups(&trace.events) {
            match group {
                EventGroup::Free { requested, at_once } => builder.free(at, requested, at_once),
                EventGroup::Request { events, completions, request } => {
                    let (completions, segments) = events.split_at(completions);
                    completions.iter().for_each(|event| builder.finished(event));
                    if is_explicit(segments, request) {
                        builder.empty_cache();
                    }
                    builder.segments(at + completions.len(), segments);
                    let late = segments.iter().filter(|e| e.action == Action::FreeCompleted);
                    late.for_each(|event| builder.finished(event));
                    if let Some(request) = request {
                        builder.request(request);
                    }
                }
            }
        }
        builder.workload
    }

    /// Does the same as [`of`](Self::of), without a copy of the operations of a log.
    #[must_use]
    pub fn shared(trace: &Trace, total_bytes: u64) -> Arc<Self> {
        let logged = trace.log.as_ref().map(|log| Arc::clone(log.workload()));
        logged.unwrap_or_else(|| Arc::new(Self::of(trace, total_bytes)))
    }

    /// Returns the streams of requests and the lanes of frees, each once.
    #[must_use]
    pub fn streams(&self) -> Vec<StreamId> {
        self.ops.streams()
    }

    /// Renames every stream, for devices on which only certain stream handles are valid.
    pub fn rename_streams(&mut self, rename: impl Fn(StreamId) -> StreamId) {
        self.ops.rename_streams(rename);
    }
}

/// Returns true if an explicit `empty_cache`, not the request that follows, caused the segment releases at
/// the start of an operation's events. The end of a private pool releases the pool's memory alone.
fn is_explicit(segments: &[TraceEvent], request: Option<&TraceEvent>) -> bool {
    let Some(first) = segments.first().filter(|event| event.reserved_change() < 0) else {
        return false;
    };
    let grew = segments.iter().any(|event| event.reserved_change() > 0);
    let failed = request.is_some_and(|e| e.action == Action::OutOfMemory);
    let ends_pool = first.named_pool().is_some_and(|pool| pool != PoolId::DEFAULT);
    first.empty_cache || !(grew || failed || ends_pool)
}

/// Collects operations and numbers the blocks.
#[derive(Debug)]
pub(super) struct WorkloadBuilder {
    pub(super) workload: Workload,
    pub(super) lanes: Lanes,
    pub(super) routing: PoolRouting,
    /// The pools in `workload.pools`, for lookups.
    known_pools: HashSet<PoolId>,
    live: HashMap<u64, u32>,
    draining: HashMap<u64, u32>,
}

impl WorkloadBuilder {
    pub(super) fn new(trace: &Trace, start: &Start, total_bytes: u64) -> Self {
        let mut builder = Self {
            workload: Workload::default(),
            lanes: Lanes::of(&trace.events),
            routing: PoolRouting::of(trace, total_bytes),
            known_pools: HashSet::new(),
            live: HashMap::new(),
            draining: HashMap::new(),
        };
        builder.seed(trace, start);
        builder
    }

    /// Adds the blocks from before the first event. Allocates each of them, then frees those that waited
    /// for other streams, in the order in which they became free. Those that never did come last.
    fn seed(&mut self, trace: &Trace, start: &Start) {
        let mut draining = HashMap::new();
        for block in &start.blocks {
            let id = self.new_block();
            let (bytes, stream, pool) = (block.requested_bytes, block.stream, block.pool);
            self.add_pool(pool);
            self.workload.ops.push(Op::Allocate { id, bytes, stream, pool });
            self.workload.seeded += 1;
            match block.draining {
                true => draining.insert(block.address, id),
                false => self.live.insert(block.address, id),
            };
        }
        for event in trace.events.iter().filter(|e| e.action == Action::FreeCompleted) {
            if let Some(id) = draining.remove(&event.address) {
                self.workload.ops.push(Op::FreeInUse { id, lane: Workload::LANE_BEFORE });
                self.draining.insert(event.address, id);
            }
        }
        let mut never: Vec<u32> = draining.into_values().collect();
        never.sort_unstable();
        let never = never.into_iter().map(|id| Op::FreeInUse { id, lane: Workload::LANE_BEFORE });
        self.workload.ops.extend(never);
    }

    fn add_pool(&mut self, pool: PoolId) {
        if pool != PoolId::DEFAULT && self.known_pools.insert(pool) {
            self.workload.pools.push(pool);
        }
    }

    fn new_block(&mut self) -> u32 {
        let id = self.workload.blocks;
        self.workload.blocks += 1;
        id
    }

    /// Applies segment events; the first of them is event number `at`.
    pub(super) fn segments(&mut self, at: usize, events: &[TraceEvent]) {
        for (at, event) in (at..).zip(events) {
            self.routing.see(at, event);
        }
    }

    pub(super) fn request(&mut self, event: &TraceEvent) {
        let (bytes, stream) = (event.size_bytes, event.stream);
        let id = self.new_block();
        if event.action == Action::OutOfMemory {
            self.workload.ops.push(Op::AllocateFailing { id, bytes, stream });
        } else {
            self.live.insert(event.address, id);
            let pool = self.routing.pool_of(event);
            self.add_pool(pool);
            self.workload.ops.push(Op::Allocate { id, bytes, stream, pool });
        }
    }

    pub(super) fn free(&mut self, at: usize, event: &TraceEvent, at_once: bool) {
        let Some(id) = self.live.remove(&event.address) else {
            return;
        };
        self.workload.ops.push(if at_once {
            Op::Free { id }
        } else {
            self.draining.insert(event.address, id);
            Op::FreeInUse { id, lane: self.lanes.lane(at) }
        });
    }

    pub(super) fn finished(&mut self, event: &TraceEvent) {
        if let Some(id) = self.draining.remove(&event.address) {
            self.workload.ops.push(Op::Finished { id });
        }
    }

    pub(super) fn empty_cache(&mut self) {
        self.workload.ops.push(Op::EmptyCache);
        self.workload.empty_caches += 1;
    }

    /// Returns the blocks that waited for other streams when the recording began, as indices into
    /// `Start::blocks`.
    pub(super) fn freed_before(&self) -> Vec<u32> {
        let behind = self.workload.ops.iter().skip(self.workload.seeded as usize);
        let freed = behind.map_while(|op| match op {
            Op::FreeInUse { id, .. } => Some(id),
            _ => None,
        });
        freed.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOTAL_BYTES: u64 = 1 << 37;

    fn event(action: Action, address: u64, size_bytes: u64) -> TraceEvent {
        TraceEvent::new(action, address, size_bytes, StreamId(0))
    }

    fn ops(events: Vec<TraceEvent>) -> Vec<Op> {
        Workload::of(&Trace { events, ..Trace::default() }, TOTAL_BYTES).ops.iter().collect()
    }

    #[test]
    fn a_free_that_completes_later_is_in_use_until_then() {
        let (stream, pool) = (StreamId(0), PoolId::DEFAULT);
        let found = ops(vec![
            event(Action::Alloc, 512, 10),
            event(Action::FreeRequested, 512, 10),
            event(Action::Alloc, 1024, 20),
            event(Action::FreeCompleted, 512, 10),
            event(Action::Alloc, 512, 30),
        ]);
        let lane = StreamId(u64::MAX);
        assert_eq!(
            found,
            [
                Op::Allocate { id: 0, bytes: 10, stream, pool },
                Op::FreeInUse { id: 0, lane },
                Op::Allocate { id: 1, bytes: 20, stream, pool },
                Op::Finished { id: 0 },
                Op::Allocate { id: 2, bytes: 30, stream, pool },
            ]
        );
    }

    #[test]
    fn segments_released_for_no_request_show_an_empty_cache() {
        let found = ops(vec![event(Action::SegmentFree, 0, 512), event(Action::Alloc, 512, 1)]);
        assert_eq!(found[0], Op::EmptyCache);
        let under_pressure = ops(vec![
            event(Action::SegmentFree, 0, 512),
            event(Action::SegmentAlloc, 0, 512),
            event(Action::Alloc, 0, 1),
        ]);
        assert_eq!(under_pressure.len(), 1);
    }

    #[test]
    fn blocks_that_were_never_allocated_lived_before() {
        let trace = Trace {
            events: vec![
                event(Action::FreeRequested, 512, 7),
                event(Action::FreeCompleted, 512, 7),
            ],
            ..Trace::default()
        };
        let workload = Workload::of(&trace, TOTAL_BYTES);
        assert_eq!(workload.seeded, 1);
        let (stream, pool) = (StreamId(0), PoolId::DEFAULT);
        assert_eq!(
            workload.ops,
            Ops::from(vec![Op::Allocate { id: 0, bytes: 7, stream, pool }, Op::Free { id: 0 }])
        );
    }

    #[test]
    fn overtaking_frees_get_lanes_of_their_own() {
        let found = ops(vec![
            event(Action::Alloc, 512, 1),
            event(Action::Alloc, 1024, 1),
            event(Action::FreeRequested, 512, 1),
            event(Action::FreeRequested, 1024, 1),
            event(Action::Alloc, 2048, 1),
            event(Action::FreeCompleted, 1024, 1),
            event(Action::FreeCompleted, 512, 1),
            event(Action::Alloc, 512, 1),
        ]);
        assert_eq!(found[2], Op::FreeInUse { id: 0, lane: StreamId(u64::MAX) });
        assert_eq!(found[3], Op::FreeInUse { id: 1, lane: StreamId(u64::MAX - 1) });
    }
}
