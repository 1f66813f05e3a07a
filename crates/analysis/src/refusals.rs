//! The requests that a limit refused, as far as the events of a recording show it without a replay.
//!
//! PyTorch refuses a segment if the reserved bytes and the segment together exceed the limit. Each segment
//! that was allocated is therefore a lower bound of the limit. Each refused request is an upper bound: a
//! request that failed, and a request that allocated a segment only after it had released the cache (a
//! retry). An explicit `empty_cache` before a request leaves the same events as a retry, unless a released
//! segment could have served the request.
//!
//! A request that failed although the device had enough free memory does not prove a limit: drivers refuse
//! for other reasons too. The limit counts as proved if requests were refused more than once, with memory
//! allocated in between, and the bounds are close to each other or requests were retried.

use super::figures::Figures;
use super::recording::{Evidence, Limit, LimitSource, RefusedWithFree};
use stratalloc::config::{Config, Settings};
use stratalloc::history::Action;
use stratalloc::size::{PoolKind, align_up, segment_bytes};
use stratalloc_recording::{Op, Trace, TraceEvent, Workload};

/// The bounds on the limit of a recording, in bytes, and the refused requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Refusals {
    /// Reserved plus free bytes when a request failed because the device was full, the smallest of all such
    /// sums. `None` if no request failed for this reason.
    pub(super) device_bytes: Option<u64>,
    /// A lower bound: under a lower limit a recorded segment would have been refused.
    pub(super) least_bytes: u64,
    /// An upper bound: the limit was below this. `None` if no request failed.
    pub(super) below_bytes: Option<u64>,
    /// The first request that failed although the device had enough free memory.
    pub(super) with_free: Option<RefusedWithFree>,
    /// The requests that failed with enough free memory, each as the number of segments allocated before.
    failures: Vec<u64>,
    /// The requests that allocated a segment after cached memory had been released, in order.
    pub(super) releases: Vec<Retry>,
    /// Those of them that may have been retried.
    pub(super) retries: Vec<Retry>,
}

/// A request that allocated a segment after cached memory had been released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Retry {
    /// The number of requests before it.
    request: u64,
    /// The number of segments allocated before it.
    grown: u64,
    /// An upper bound of the limit, if the request itself released the memory.
    need_bytes: u64,
    /// Whether the stacks prove that the request itself released the memory.
    pub(super) is_proved: bool,
}

/// Failures alone prove a limit only if its bounds differ by at most this part of the lower one.
const CLOSE: u64 = 10;

impl Refusals {
    /// Computes the bounds from the events. The recorded `settings` decide how much a request needs. A log of
    /// requests shows none, because neither reserved nor free bytes are in it.
    pub(super) fn of(trace: &Trace, settings: &Settings, figures: &Figures) -> Self {
        if trace.requests_only {
            return Self::default();
        }
        let reserved = i128::from(figures.reserved_before_bytes);
        let mut walk = RefusalWalk {
            settings,
            reserved,
            requests: 0,
            grown: 0,
            run: RunOfRefusals::default(),
        };
        let mut found = Self { least_bytes: figures.reserved_before_bytes, ..Self::default() };
        for event in &trace.events {
            match event.action {
                Action::FreeRequested => walk.run = RunOfRefusals::default(),
                Action::Alloc | Action::OutOfMemory => {
                    walk.request(event, &mut found);
                    walk.run = RunOfRefusals::default();
                    walk.requests += 1;
                }
                _ => walk.segment(event, &mut found),
            }
        }
        let may_be_retry = |retry: &&Retry| retry.need_bytes > found.least_bytes;
        found.retries = found.releases.iter().filter(may_be_retry).copied().collect();
        found
    }

    /// Returns those of the `candidates` that an exact replay explains without an explicit call of
    /// `empty_cache`. `workload` is that of the replay.
    pub(super) fn without_calls(candidates: &[Retry], workload: &Workload) -> Vec<Retry> {
        let (mut requests, mut is_emptied) = (0_u64, false);
        let mut candidates = candidates.iter().peekable();
        let mut found = Vec::new();
        for op in workload.ops.range(workload.seeded as usize..workload.ops.len()) {
            match op {
                Op::EmptyCache => is_emptied = true,
                Op::Finished { .. } => {}
                Op::Free { .. } | Op::FreeInUse { .. } => is_emptied = false,
                Op::Allocate { .. } | Op::AllocateFailing { .. } => {
                    let retry = candidates.next_if(|retry| retry.request == requests);
                    found.extend(retry.filter(|_| !is_emptied));
                    (requests, is_emptied) = (requests + 1, false);
                }
            }
        }
        found
    }

    /// Returns true if the retries suggest a limit without any failed request. One may be an explicit call of
    /// `empty_cache` that happened at the peak; two at the same bound hardly are.
    pub(super) fn suggest_limit(retries: &[Retry]) -> bool {
        retries.len() >= 2 || retries.iter().any(|retry| retry.is_proved)
    }

    /// Returns the upper bound that follows from failed requests and, if there are enough, from `retries`. A
    /// limit of `exact_bytes` explains all decisions, so lower bounds are wrong.
    pub(super) fn below_with(&self, retries: &[Retry], exact_bytes: u64) -> Option<u64> {
        let needs = retries.iter().map(|retry| retry.need_bytes).filter(|need| *need > exact_bytes);
        let retried = needs.min().filter(|_| Self::suggest_limit(retries));
        self.below_bytes.into_iter().chain(retried).min()
    }

    /// Returns true if no limit explains all events: more had been reserved than a refused request needed.
    pub(super) fn contradict(&self) -> bool {
        self.below_bytes.is_some_and(|below| below <= self.least_bytes)
    }

    /// Returns true if the failed requests and `retries` prove a limit below `below_bytes`.
    fn prove(&self, retries: &[Retry], below_bytes: Option<u64>) -> bool {
        let retried = retries.iter().map(|retry| retry.grown);
        let mut moments: Vec<u64> = self.failures.iter().copied().chain(retried).collect();
        moments.sort_unstable();
        moments.dedup();
        let is_close =
            |below: u64| below.saturating_sub(self.least_bytes) <= self.least_bytes / CLOSE;
        let is_bounded = below_bytes.is_some_and(is_close) || Self::suggest_limit(retries);
        moments.len() >= 2 && is_bounded
    }

    /// Returns the source of a limit below `below_bytes` that is no full device. `is_decided` is true if
    /// other decisions, such as those of the garbage collector, prove it.
    pub(super) fn source(
        &self,
        evidence: Evidence,
        retries: &[Retry],
        below_bytes: Option<u64>,
        is_decided: bool,
    ) -> LimitSource {
        match self.with_free {
            Some(refused) if !is_decided && !self.prove(retries, below_bytes) => {
                LimitSource::Possible(refused)
            }
            _ => LimitSource::Inferred(evidence),
        }
    }

    /// Returns the limit of a recording that no replay repeats exactly: the bytes of the full device, or
    /// else the bounds of a memory fraction. `None` if no request failed, or no limit explains the failures.
    pub(super) fn limit(&self, figures: &Figures) -> Option<Limit> {
        let ooms = figures.ooms;
        if let Some(bytes) = self.device_bytes {
            return Some(Limit::exactly(bytes, LimitSource::DeviceFull { ooms }));
        }
        if ooms == 0 || self.least_bytes == 0 || self.contradict() {
            return None;
        }
        let below_bytes = self.below_with(&self.retries, self.least_bytes);
        let evidence = Evidence { ooms, ..Evidence::default() };
        let source = self.source(evidence, &self.retries, below_bytes, false);
        Some(Limit { bytes: self.least_bytes, below_bytes, source })
    }
}

impl Limit {
    /// Returns the limit that the failed requests of a recording show, without a replay. `config` is the
    /// recorded configuration.
    pub fn shown_by_failures(trace: &Trace, config: Option<&Config>) -> Option<Self> {
        let settings = config.map(|config| config.settings().clone()).unwrap_or_default();
        let figures = Figures::of(trace);
        Refusals::of(trace, &settings, &figures).limit(&figures)
    }
}

/// The state of the walk through the events.
struct RefusalWalk<'a> {
    settings: &'a Settings,
    reserved: i128,
    requests: u64,
    grown: u64,
    run: RunOfRefusals,
}

/// The segment events before a request.
#[derive(Default)]
struct RunOfRefusals {
    /// The reserved bytes before the first release, if the run begins with one.
    before_release: Option<u64>,
    /// The reserved bytes before the first new segment.
    before_growth: Option<u64>,
    /// The number of new segments.
    new: u64,
    /// The bytes of the first new segment that is not expandable.
    fixed_bytes: Option<u64>,
    releases: Vec<TraceEvent>,
}

impl RefusalWalk<'_> {
    fn reserved(&self) -> u64 {
        u64::try_from(self.reserved).unwrap_or(u64::MAX)
    }

    fn segment(&mut self, event: &TraceEvent, found: &mut Refusals) {
        let change = event.reserved_change();
        let before = self.reserved();
        self.reserved = (self.reserved + change).max(0);
        if change < 0 && self.run.before_growth.is_none() {
            self.run.before_release.get_or_insert(before);
            self.run.releases.push(*event);
        }
        if change > 0 {
            self.run.before_growth.get_or_insert(before);
            self.run.new += 1;
            self.grown += 1;
            if event.action == Action::SegmentAlloc {
                self.run.fixed_bytes.get_or_insert(event.size_bytes);
                found.least_bytes = found.least_bytes.max(self.reserved());
            }
        }
    }

    fn request(&mut self, event: &TraceEvent, found: &mut Refusals) {
        let run = std::mem::take(&mut self.run);
        let tested_bytes = run.fixed_bytes.unwrap_or(tested_bytes(event.size_bytes, self.settings));
        if event.action == Action::OutOfMemory {
            self.failure(event, tested_bytes, found);
        } else if let Some(before) = run.before_growth {
            found.least_bytes = found.least_bytes.max(before.saturating_add(tested_bytes));
            let is_own = run.is_own(event);
            let is_call = is_own.map_or_else(|| run.could_serve(event, self.settings), |own| !own);
            if let Some(before) = run.before_release.filter(|_| !is_call) {
                found.releases.push(Retry {
                    request: self.requests,
                    grown: self.grown - run.new,
                    need_bytes: before.saturating_add(tested_bytes),
                    is_proved: is_own == Some(true),
                });
            }
        }
    }

    fn failure(&self, event: &TraceEvent, tested_bytes: u64, found: &mut Refusals) {
        let least = |known: &mut Option<u64>, bytes| {
            *known = Some(known.map_or(bytes, |known: u64| known.min(bytes)));
        };
        let (reserved, free_bytes) = (self.reserved(), event.address);
        if free_bytes < needed_bytes(event.size_bytes, self.settings) {
            least(&mut found.device_bytes, reserved.saturating_add(free_bytes));
        } else {
            let requested_bytes = event.size_bytes;
            found.with_free.get_or_insert(RefusedWithFree { requested_bytes, free_bytes });
            found.failures.push(self.grown);
        }
        least(&mut found.below_bytes, reserved.saturating_add(tested_bytes));
    }
}

impl RunOfRefusals {
    /// Returns whether the request itself released the memory. PyTorch records a release by a request with
    /// the stack of the request, and a call of `empty_cache` with another stack. `None` without stacks.
    fn is_own(&self, request: &TraceEvent) -> Option<bool> {
        if self.releases.iter().any(|release| release.empty_cache) {
            return Some(false);
        }
        let stack = request.stack?;
        self.releases.iter().try_fold(true, |own, event| Some(own && event.stack? == stack))
    }

    /// Returns true if a released segment could have served the request. The request would then have taken
    /// it, so a call of `empty_cache` released it. Under `max_split_size_mb` a free block may be too large.
    fn could_serve(&self, request: &TraceEvent, settings: &Settings) -> bool {
        let fits = |released: &&TraceEvent| {
            (released.stream, released.pool) == (request.stream, request.pool)
                && PoolKind::of_segment(released.size_bytes) == PoolKind::of(request.size_bytes)
                && released.size_bytes >= request.size_bytes
        };
        settings.max_split_bytes.is_none() && self.releases.iter().any(|event| fits(&event))
    }
}

/// Returns the bytes that PyTorch adds to the reserved bytes when it compares a request of `bytes` with the
/// limit: those of a segment, even if only pages are mapped. If `bytes` is too large for any segment, returns
/// `bytes`.
fn tested_bytes(bytes: u64, settings: &Settings) -> u64 {
    match bytes > i64::MAX.unsigned_abs() {
        true => bytes,
        false => segment_bytes(bytes, settings.large_segment_bytes),
    }
}

/// Returns the most bytes that a request of `bytes` may allocate from the device.
fn needed_bytes(bytes: u64, settings: &Settings) -> u64 {
    let segment = tested_bytes(bytes, settings);
    match settings.expandable_segments && bytes <= i64::MAX.unsigned_abs() {
        true => align_up(segment, settings.large_segment_bytes.min(segment)),
        false => segment,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stratalloc::ids::StreamId;
    use stratalloc::size::MIB;

    fn event(action: Action, mib: u64) -> TraceEvent {
        TraceEvent::new(action, 0, mib * MIB, StreamId(0))
    }

    fn refusals(events: Vec<TraceEvent>) -> Refusals {
        let trace = Trace { events, ..Trace::default() };
        Refusals::of(&trace, &Settings::default(), &Figures::default())
    }

    #[test]
    fn a_release_before_a_new_segment_may_be_a_retry_if_it_was_needed_at_the_peak() {
        let grow = |mib| [event(Action::SegmentAlloc, mib), event(Action::Alloc, mib)];
        let release = |mib| event(Action::SegmentFree, mib);
        let needs = |events: Vec<TraceEvent>| -> Vec<u64> {
            refusals(events).retries.iter().map(|retry| retry.need_bytes / MIB).collect()
        };
        let mut events = [grow(100), grow(60)].concat();
        events.push(release(60));
        events.extend(grow(80));
        assert_eq!(needs(events.clone()), [240]);
        let labelled = TraceEvent { empty_cache: true, ..release(60) };
        let explicit = [&events[..4], &[labelled], &grow(80)].concat();
        assert_eq!(needs(explicit), [0; 0], "the label shows an explicit call");
        events.extend(grow(70));
        assert_eq!(needs(events), [0; 0], "250 MiB were reserved later");
    }

    #[test]
    fn an_upper_bound_is_above_a_limit_that_explains_all_decisions() {
        let retry = |mib| Retry { request: 0, grown: 0, need_bytes: mib * MIB, is_proved: true };
        let found = Refusals { below_bytes: Some(300 * MIB), ..Refusals::default() };
        let below = |retries: &[Retry]| found.below_with(retries, 250 * MIB).map(|b| b / MIB);
        assert_eq!(below(&[]), Some(300));
        assert_eq!(below(&[retry(240), retry(280)]), Some(280));
        assert_eq!(below(&[retry(240)]), Some(300));
    }

    #[test]
    fn one_failure_with_free_memory_proves_no_limit_and_two_at_the_same_bound_do() {
        let grow = |mib| [event(Action::SegmentAlloc, mib), event(Action::Alloc, mib)];
        let fail = |mib| TraceEvent { address: 9000 * MIB, ..event(Action::OutOfMemory, mib) };
        let source = |events: Vec<TraceEvent>| {
            let found = refusals(events);
            let figures = Figures { ooms: 1, ..Figures::default() };
            found.limit(&figures).map(|limit| {
                let bounds = (limit.bytes / MIB, limit.below_bytes.map(|bytes| bytes / MIB));
                (bounds, limit.known().is_some())
            })
        };
        let mut events = grow(800).to_vec();
        events.push(fail(40));
        assert_eq!(source(events.clone()), Some(((800, Some(840)), false)));
        events.push(fail(30));
        assert_eq!(source(events.clone()), Some(((800, Some(830)), false)), "nothing in between");
        events.extend(grow(20));
        events.push(fail(20));
        assert_eq!(source(events.clone()), Some(((820, Some(830)), true)));
        events.extend(grow(100));
        assert_eq!(source(events), None, "more was reserved than a failed request needed");
    }
}
