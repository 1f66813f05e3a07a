//! Whether the engine makes the recorded allocator's very decisions.
//!
//! The recorded requests go to an engine whose driver answers with the recorded segment addresses.
//! Everything else follows and is compared: every address handed out, every segment event and every
//! completion in order, and the final layout. Which explicit `empty_cache` calls there were is
//! inferred on the way from the engine's own state: a release at the head of a request that would
//! not begin with one was somebody's call.
//!
//! When other streams' work finished is an input: it is timing of the recorded device.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use super::run::{Lanes, ReplayError, check_heaps};
use super::told;
use super::trace::{Trace, TraceEvent};
use super::workload::{Builder, Group, Workload, groups};
use crate::allocator::{Allocation, PoolOptions, PrivatePools, Request};
use crate::cache::{Engine, Foresight};
use crate::config::Config;
use crate::driver::sim::{EventMode, SimOptions};
use crate::driver::{Recorded, RecordedAddresses, Sim};
use crate::error::AllocError;
use crate::history::{Action, Event};
use crate::ids::PoolId;
use crate::registry::{self, BuildOptions};
use crate::stats::Statistics;

/// How recorded and repeated decisions compare.
#[derive(Clone, Debug, Default)]
pub struct Verification {
    /// Requests that were served.
    pub allocations: u64,
    /// Blocks that were given back.
    pub frees: u64,
    /// Requests that failed.
    pub ooms: u64,
    /// Addresses, and failures, that differ.
    pub address_mismatches: u64,
    /// Segment events and completions that differ in order, size, address or stream.
    pub segment_mismatches: u64,
    /// Segments of the final layout that differ.
    pub layout_mismatches: u64,
    /// The first difference, for people.
    pub first_mismatch: Option<String>,
    /// The counters at the end.
    pub statistics: Statistics,
    /// What the recording asked for, with the inferred calls of `empty_cache`.
    pub workload: Workload,
    /// Seconds it took.
    pub wall_s: f64,
}

impl Verification {
    /// Whether nothing differs.
    #[must_use]
    pub fn is_exact(&self) -> bool {
        self.address_mismatches + self.segment_mismatches + self.layout_mismatches == 0
    }
}

/// Repeats a recording decision by decision. `memory_fraction` is the recorded process's.
///
/// # Errors
///
/// [`ReplayError`] when the recording cannot be repeated: the configuration builds no engine, blocks
/// lived before it began, or it names more streams and pools than programs have.
pub fn verify(
    trace: &Trace,
    config: &Config,
    total_bytes: u64,
    memory_fraction: Option<f64>,
) -> Result<Verification, ReplayError> {
    if trace.requests_only {
        return Err(ReplayError::RequestsOnly);
    }
    check_heaps(trace.events.iter().map(|event| (event.stream, event.pool)))?;
    let begin = Instant::now();
    let sim = Arc::new(Sim::new(SimOptions {
        total_bytes,
        event_mode: EventMode::Manual,
        ..SimOptions::default()
    }));
    let recorded = Recorded::new(
        Arc::clone(&sim),
        RecordedAddresses {
            segments: addresses(trace, Action::SegmentAlloc),
            mappings: addresses(trace, Action::SegmentMap),
        },
    );
    let strategy = registry::build(config, Arc::new(recorded), BuildOptions::default())?;
    let engine = strategy.engine().ok_or(ReplayError::NotVerifiable)?;
    if let Some(fraction) = memory_fraction {
        engine.set_memory_fraction(fraction)?;
    }
    engine.history().start(usize::MAX);
    let builder = Builder::new(trace, total_bytes);
    if builder.seeded() > 0 {
        return Err(ReplayError::LiveBefore { blocks: builder.seeded() });
    }
    let mut verifier = Verifier {
        engine,
        lanes: Lanes::new(sim),
        builder,
        live: HashMap::new(),
        pools: HashSet::new(),
        seen: Vec::new(),
        lost: false,
        result: Verification::default(),
    };
    let mut at = 0;
    for group in groups(&trace.events) {
        at += verifier.step(at, group)?;
        if verifier.lost {
            break;
        }
    }
    verifier.compare_layout(trace);
    let Verifier { mut result, builder, .. } = verifier;
    result.workload = builder.finish();
    result.wall_s = begin.elapsed().as_secs_f64();
    result.statistics = engine.statistics();
    Ok(result)
}

fn addresses(trace: &Trace, action: Action) -> Vec<u64> {
    trace.events.iter().filter(|e| e.action == action).map(|e| e.address).collect()
}

struct Verifier<'a> {
    engine: &'a Engine,
    lanes: Lanes,
    builder: Builder,
    /// Live blocks by recorded address.
    live: HashMap<u64, Allocation>,
    /// Private pools that were made.
    pools: HashSet<PoolId>,
    /// Events of the operation at hand.
    seen: Vec<Event>,
    /// Whether decisions went so far apart that the recording has no further answers.
    lost: bool,
    result: Verification,
}

impl Verifier<'_> {
    /// Repeats one group; returns how many events it has.
    fn step(&mut self, at: usize, group: Group<'_>) -> Result<usize, ReplayError> {
        match group {
            Group::Free { requested, at_once } => {
                self.free(at, requested, at_once)?;
                Ok(1 + usize::from(at_once))
            }
            Group::Request { completions, segments, request } => {
                self.complete(at, completions)?;
                self.builder.segments(at + completions.len(), segments);
                let pool = request.map_or(PoolId::DEFAULT, |event| self.builder.pool_of(event));
                self.know(pool)?;
                let mut rest = segments;
                while self.is_explicit(rest, pool, request) {
                    let taken = self.empty_cache(at, rest)?;
                    rest = &rest[taken..];
                }
                match request {
                    Some(request) => self.request(at, rest, pool, request)?,
                    None => self.compare(at, "unexplained", &[], rest),
                }
                Ok(completions.len() + segments.len() + usize::from(request.is_some()))
            }
        }
    }

    fn free(&mut self, at: usize, event: &TraceEvent, at_once: bool) -> Result<(), ReplayError> {
        self.builder.free(at, event, at_once);
        let Some(allocation) = self.live.remove(&event.address) else {
            self.differ(at, || format!("{:#x} was freed and is not live", event.address));
            self.result.address_mismatches += 1;
            return Ok(());
        };
        let lane = (!at_once).then(|| self.builder.lane(at));
        if let Some(lane) = lane {
            self.engine.record_stream(&allocation, lane).map_err(ReplayError::Handle)?;
        }
        self.engine.free(allocation).map_err(|error| ReplayError::Handle(error.reason))?;
        if let Some(lane) = lane {
            self.lanes.freed(lane, event.address)?;
        }
        self.result.frees += 1;
        self.take_seen();
        Ok(())
    }

    /// Completions at the head of a group, one by one in their order.
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

    /// Whether the releases at the head of `rest` are an explicit call's.
    fn is_explicit(&self, rest: &[TraceEvent], pool: PoolId, request: Option<&TraceEvent>) -> bool {
        let Some(first) = rest.first() else {
            return false;
        };
        if !matches!(first.action, Action::SegmentFree | Action::SegmentUnmap) {
            return false;
        }
        if first.empty_cache {
            return true;
        }
        request.is_none_or(|request| {
            let request = Request::new(request.size_bytes, request.stream);
            let begins = self.engine.foresee(pool, request);
            !matches!(begins, Foresight::Collect | Foresight::Limit)
        })
    }

    /// Makes a private pool when it is first asked for.
    fn know(&mut self, pool: PoolId) -> Result<(), ReplayError> {
        if pool == PoolId::DEFAULT || !self.pools.insert(pool) {
            return Ok(());
        }
        let pools: &dyn PrivatePools = self.engine;
        let made = pools.create_pool(pool, PoolOptions::default());
        made.map_err(|error| ReplayError::Alloc(error.into()))
    }

    /// The answer of the engine. A request to a private pool that best fit does not explain, and that
    /// grew nothing, was a block of a checkpoint on its way back: it is placed where it was recorded.
    fn answer(
        &self,
        grew: bool,
        pool: PoolId,
        event: &TraceEvent,
    ) -> Result<Allocation, AllocError> {
        let request = Request::new(event.size_bytes, event.stream);
        if pool == PoolId::DEFAULT {
            return self.engine.allocate(request);
        }
        let explained = grew || self.engine.foresee(pool, request) == Foresight::Hit(event.address);
        if !explained && event.action == Action::Alloc {
            let placed = self.engine.replace(pool, event.stream, event.address, event.size_bytes);
            if let Some(placed) = placed {
                return Ok(placed);
            }
        }
        let pools: &dyn PrivatePools = self.engine;
        pools.allocate_in(pool, request)
    }

    /// An explicit call; returns how many of the recorded events were its own.
    fn empty_cache(&mut self, at: usize, rest: &[TraceEvent]) -> Result<usize, ReplayError> {
        self.builder.empty_cache();
        self.engine.empty_cache()?;
        let seen = self.take_seen();
        // A call that finds nothing to release explains nothing: do not ask forever.
        let taken = if seen.is_empty() { rest.len() } else { seen.len().min(rest.len()) };
        self.compare(at, "empty_cache", &seen, &rest[..taken]);
        for event in &rest[..taken] {
            self.builder.finished(event);
        }
        Ok(taken)
    }

    fn request(
        &mut self,
        at: usize,
        rest: &[TraceEvent],
        pool: PoolId,
        event: &TraceEvent,
    ) -> Result<(), ReplayError> {
        for event in rest {
            self.builder.finished(event);
        }
        self.builder.request(event);
        let answer = self.answer(!rest.is_empty(), pool, event);
        let mut seen = self.take_seen();
        let last = seen.pop();
        self.compare(at, "segments", &seen, rest);
        let same = last.is_some_and(|last| {
            let address = last.address == event.address || event.action == Action::OutOfMemory;
            (last.action, last.size_bytes, last.stream)
                == (event.action, event.size_bytes, event.stream)
                && address
        });
        if !same {
            self.result.address_mismatches += 1;
            self.differ(at, || {
                let (last, event) = (told::done(last.as_slice()), told::recorded(&[*event]));
                format!("{last} instead of {event}")
            });
        }
        match answer {
            Ok(allocation) if event.action == Action::OutOfMemory => {
                self.result.ooms += 1;
                self.engine.free(allocation).map_err(|error| ReplayError::Handle(error.reason))?;
                self.take_seen();
            }
            Ok(allocation) => {
                self.result.allocations += 1;
                self.live.insert(event.address, allocation);
            }
            Err(AllocError::OutOfMemory(_)) => self.result.ooms += 1,
            // The recording has no answer to what was asked of the driver: nothing that follows
            // could be compared.
            Err(AllocError::Driver(error)) => {
                self.result.address_mismatches += 1;
                self.differ(at, || error.to_string());
                self.lost = true;
            }
            Err(error) => return Err(ReplayError::Alloc(error)),
        }
        Ok(())
    }

    fn take_seen(&mut self) -> Vec<Event> {
        self.seen.clear();
        self.engine.history().drain_into(&mut self.seen);
        std::mem::take(&mut self.seen)
    }

    fn compare(&mut self, at: usize, what: &str, seen: &[Event], recorded: &[TraceEvent]) {
        let same = |(seen, recorded): (&Event, &TraceEvent)| {
            (seen.action, seen.address, seen.size_bytes, seen.stream)
                == (recorded.action, recorded.address, recorded.size_bytes, recorded.stream)
        };
        let equal = seen.iter().zip(recorded).filter(|pair| same(*pair)).count();
        let differing = seen.len().max(recorded.len()) - equal;
        if differing > 0 {
            self.result.segment_mismatches += differing as u64;
            self.differ(at, || {
                format!("{what}: {} instead of {}", told::done(seen), told::recorded(recorded))
            });
        }
    }

    fn differ(&mut self, at: usize, how: impl Fn() -> String) {
        self.result.first_mismatch.get_or_insert_with(|| format!("at event {at}: {}", how()));
    }

    fn compare_layout(&mut self, trace: &Trace) {
        let ours = self.engine.layout();
        let events = trace.events.len();
        let differing = ours.iter().zip(&trace.segments).filter(|(a, b)| a != b).count()
            + ours.len().abs_diff(trace.segments.len());
        self.result.layout_mismatches = differing as u64;
        let first = ours.iter().zip(&trace.segments).find(|(a, b)| a != b);
        if let Some((a, b)) = first {
            self.differ(events, || {
                format!("layout: {} instead of {}", told::layout(a), told::layout(b))
            });
        } else if differing > 0 {
            self.differ(events, || {
                format!("layout: {} segments instead of {}", ours.len(), trace.segments.len())
            });
        }
    }
}
