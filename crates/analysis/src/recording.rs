//! A recording, with everything that is computed from it once at the start.

use std::fmt;
use std::sync::Arc;

use serde::{Serialize, Serializer};

use super::figures::{Figures, live_peak_bytes};
use super::limit::{infer, infer_from_retries};
use super::refusals::Refusals;
use super::words::{counted_as, whole_or_near};
use stratalloc::config::Config;
use stratalloc::history::SegmentLayout;
use stratalloc::size::{FractionRounding, fraction_of_limit, limit_of_fraction};
use stratalloc_recording::{MadeHere, NoHistory, Progress, Silent, Start, Trace, Until};
use stratalloc_recording::{Verification, Workload, started, verify_until};
use stratalloc_sim::SimOptions;

/// The memory for replays, if the caller sets it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Memory {
    /// Memory of the device, in bytes.
    pub total_bytes: Option<u64>,
    /// The share of the device's memory that may be reserved, from 0 to 1; 1 means no limit.
    pub fraction: Option<f64>,
}

/// A recording: its requests, and the data about the recorded program.
#[derive(Clone, Debug)]
pub struct Recording {
    /// The file's events, final layout and configuration.
    pub trace: Trace,
    /// The recorded configuration, if it can be replayed.
    pub config: Option<Config>,
    /// Set if the entries do not show how much memory the program needed. Then no peak, need, age or setting
    /// follows from the recording, and the searches refuse it.
    pub no_history: Option<NoHistory>,
    /// The number of requests that no recorded segment contains. If there are any, entries of segments were
    /// left out (`skip_actions`), and the recorded reserved bytes at earlier moments are unknown.
    pub requests_outside: u64,
    /// The requests, without the recorded allocator's decisions.
    pub workload: Arc<Workload>,
    /// The figures of the recorded program.
    pub figures: Figures,
    /// The limit on reserved bytes, if any. A limit set by the caller overrides the one found in the
    /// recording.
    pub limit: Option<Limit>,
    /// The limit of the recorded program, if it was inferred from the events. It is not inferred if the
    /// caller sets a fraction.
    pub inferred_limit: Option<Limit>,
    /// The first request that failed with enough free memory, if no limit explains that.
    pub unexplained: Option<RefusedWithFree>,
    /// An exact replay of the recorded configuration, if there is one. Its `workload` was moved to this
    /// struct's.
    pub exact: Option<Verification>,
    /// Whether an exact replay was looked for.
    pub is_verified: bool,
    /// The memory before the first event, if any. The recording then began after the program's start.
    pub start: Option<Start>,
    /// The layout before the first event, under the recorded configuration. Without it, replays start with
    /// the live blocks only. The ages of its free blocks are not recorded, so in a replay the garbage
    /// collector may release other blocks than in the recorded program.
    pub start_layout: Option<Vec<SegmentLayout>>,
    /// Whether replays under every configuration start with `start_layout`, not only those under the recorded
    /// one.
    pub layout_for_all: bool,
    /// The peak of live bytes, as requested. No smaller device can suffice.
    pub live_peak_bytes: u64,
    /// The memory that the caller set or, if the caller set none, that this library recorded.
    pub memory: Memory,
    /// Whether the caller set the memory. Moments are then those of a replay with that memory.
    pub is_memory_set: bool,
}

/// The most bytes that may be reserved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Limit {
    /// In bytes. If only an interval is known, its low end: every request that fits under it also fitted when
    /// the recording was made. Replays use this end.
    pub bytes: u64,
    /// The high end of the interval, in bytes: the limit is below this. `None` if the limit is known exactly.
    pub below_bytes: Option<u64>,
    /// The source of the limit.
    pub source: LimitSource,
}

/// The source of a limit.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitSource {
    /// The caller set a fraction of the device.
    Fraction,
    /// The caller set the memory of the device.
    TotalMemory,
    /// The recording contains the limit, because this library made it.
    Recorded,
    /// The recorded device was full when requests failed. The limit is the sum of its reserved and free
    /// bytes at that time.
    DeviceFull {
        /// The number of requests that failed.
        ooms: u64,
    },
    /// The recorded decisions prove the limit.
    Inferred(Evidence),
    /// Retries suggest the limit. The program may also have called `empty_cache` at these moments.
    Probable(Evidence),
    /// A request failed although the device had enough free memory, and nothing else shows a limit. Either a
    /// memory fraction was set, or the driver refused for another reason.
    Possible(RefusedWithFree),
}

/// The recorded decisions from which a limit was inferred.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Evidence {
    /// The number of requests that failed.
    pub ooms: u64,
    /// The number of requests that allocated a segment only after they had released memory.
    pub retries: u64,
    /// The number of other requests that released segments because of the limit, such as those with oversize
    /// blocks.
    pub releases: u64,
    /// The number of requests for which the garbage collector released segments.
    pub collections: u64,
}

/// A request that failed although the device had enough free memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RefusedWithFree {
    /// The requested bytes.
    pub requested_bytes: u64,
    /// The free bytes that the device reported.
    pub free_bytes: u64,
}

impl LimitSource {
    /// Returns the recorded decisions that the limit rests on; `None` if it does not rest on any. `ooms` is
    /// the number of requests that failed in the recording.
    pub(crate) fn evidence(&self, ooms: u64) -> Option<Evidence> {
        match *self {
            Self::Fraction | Self::TotalMemory | Self::Recorded => None,
            Self::Inferred(evidence) | Self::Probable(evidence) => Some(evidence),
            Self::DeviceFull { ooms } => Some(Evidence { ooms, ..Evidence::default() }),
            Self::Possible(_) => Some(Evidence { ooms, ..Evidence::default() }),
        }
    }

    /// Returns how certain the limit is, for JSON.
    pub fn certainty(&self) -> &'static str {
        match self {
            Self::Fraction | Self::TotalMemory => "set",
            Self::Recorded => "recorded",
            Self::DeviceFull { .. } | Self::Inferred(_) => "inferred",
            Self::Probable(_) => "probable",
            Self::Possible(_) => "possible",
        }
    }
}

impl Serialize for LimitSource {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl fmt::Display for LimitSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fraction => f.write_str("set as a fraction of the device"),
            Self::TotalMemory => f.write_str("set as the memory of the device"),
            Self::Recorded => f.write_str("as recorded"),
            Self::DeviceFull { ooms } => {
                let requests = counted_as(*ooms, FAILED[0], FAILED[1]);
                write!(f, "the device was full, from what was reserved and free at {requests}")
            }
            Self::Inferred(evidence) => write!(f, "inferred from {evidence}"),
            Self::Probable(evidence) => write!(f, "probable, from {evidence}"),
            Self::Possible(refused) => {
                write!(f, "{refused}: {EITHER}; no allocator setting helps then")
            }
        }
    }
}

const FAILED: [&str; 2] = ["request that failed", "requests that failed"];

/// The two possible causes of a request that failed with enough free memory.
pub(super) const EITHER: &str =
    "either a memory fraction is set, or the driver refused for another reason";

impl fmt::Display for Evidence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ooms, retries, releases, collections } = *self;
        let mut parts = Vec::new();
        if ooms > 0 {
            parts.push(counted_as(ooms, FAILED[0], FAILED[1]));
        }
        if retries > 0 {
            parts.push(counted_as(retries, "retry", "retries"));
        }
        if releases > 0 {
            parts.push(counted_as(releases, "release at the limit", "releases at the limit"));
        }
        if collections > 0 {
            parts.push(counted_as(collections, "garbage collection", "garbage collections"));
        }
        match parts.split_last() {
            None => f.write_str("the recorded decisions"),
            Some((last, [])) => f.write_str(last),
            Some((last, others)) => write!(f, "{} and {last}", others.join(", ")),
        }
    }
}

impl fmt::Display for RefusedWithFree {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [free, requested] = [self.free_bytes, self.requested_bytes].map(whole_or_near);
        write!(f, "the device reported {free} MiB free when {requested} MiB were refused")
    }
}

impl Recording {
    /// Reads the requests of a trace. `config` is the recorded configuration, if it can be replayed.
    ///
    /// Replays the recording once, or many times if its limit must be inferred; never without `config` or
    /// without a history.
    #[must_use]
    pub fn new(trace: Trace, config: Option<Config>, memory: Memory) -> Self {
        let no_history = NoHistory::of(&trace);
        Self::with_history(no_history, trace, config, memory, true, &Silent)
    }

    /// Does the same as [`new`](Self::new). `progress` measures the duration of the replay in `exact`, and
    /// may cancel the replays that infer a limit; the limit is then known only as without a replay.
    #[must_use]
    pub fn timed(
        trace: Trace,
        config: Option<Config>,
        memory: Memory,
        progress: &dyn Progress,
    ) -> Self {
        let no_history = NoHistory::of(&trace);
        Self::with_history(no_history, trace, config, memory, true, progress)
    }

    /// Does the same as [`new`](Self::new) without a replay, so that a limit is known only if the caller set
    /// it, or if failed requests show it.
    #[must_use]
    pub fn unverified(trace: Trace, config: Option<Config>, memory: Memory) -> Self {
        let no_history = NoHistory::of(&trace);
        Self::with_history(no_history, trace, config, memory, false, &Silent)
    }

    fn with_history(
        no_history: Option<NoHistory>,
        trace: Trace,
        config: Option<Config>,
        memory: Memory,
        is_verified: bool,
        progress: &dyn Progress,
    ) -> Self {
        let is_set = memory != Memory::default();
        let made_here = trace.made_here.filter(|_| !is_set);
        let memory = match made_here {
            Some(MadeHere { total_bytes, .. }) => Memory { total_bytes, ..memory },
            None => memory,
        };
        let total_bytes = total_bytes(&memory);
        let mut figures = Figures::of(&trace);
        let own = config.as_ref().map(|config| trace.as_recorded(config.clone()));
        let mut limit = memory.limit(own.as_ref());
        if let Some(MadeHere { limit_bytes, .. }) = made_here {
            limit = limit_bytes.map(|bytes| Limit::exactly(bytes, LimitSource::Recorded));
        }
        let recorded_fraction = limit.filter(|limit| limit.source == LimitSource::Recorded);
        let recorded_fraction = recorded_fraction.map(|l| fraction_of_limit(l.bytes, total_bytes));
        let fraction = memory.fraction.or(recorded_fraction);
        let settings = own.as_ref().map(|own| own.settings().clone()).unwrap_or_default();
        let start = Start::of(&trace);
        let mut refusals = Refusals::of(&trace, &settings, &figures);
        // If other processes used the device too, it can be full below the recorded limit. Only then is
        // the full device what limited the program.
        refusals.device_bytes =
            refusals.device_bytes.filter(|bytes| is_set || limit.is_none_or(|l| *bytes < l.bytes));
        let exactly = |total_bytes, fraction| {
            let (own, until) = (own.as_ref()?, Until::End);
            let found = verify_until(&trace, own, total_bytes, fraction, until, &started, progress);
            found.ok().filter(Verification::is_exact)
        };
        let was_full = !is_set && refusals.device_bytes.is_some();
        // Without the entries of segments no limit follows, because reserved bytes are unknown.
        let is_replayed = no_history.is_none() && start.outside == 0;
        let is_tried = is_verified && is_replayed && !was_full;
        let mut exact = if is_tried { exactly(total_bytes, fraction) } else { None };
        let (mut workload, mut inferred_limit) = (None, None);
        if exact.is_none() && is_replayed {
            // If the caller set the memory of a device, it may be less than the recorded program had. The
            // requests are then read from an exact replay without a limit, or under the inferred limit.
            let ample_bytes = total_bytes.max(SimOptions::default().total_bytes);
            let found = || infer(&trace, own.as_ref()?, ample_bytes, &figures, &refusals, progress);
            if !is_verified {
                inferred_limit = refusals.limit(&figures).filter(|_| memory.fraction.is_none());
            } else if is_set && let Some(found) = exactly(ample_bytes, None) {
                workload = Some(found.workload);
            } else if let Some(found) = found() {
                if memory.fraction.is_none() {
                    exact = Some(found.verification);
                    inferred_limit = Some(found.limit);
                } else {
                    workload = Some(found.verification.workload);
                }
            } else if memory.fraction.is_none() {
                // No replay is exact, as with recordings that begin after the program's start.
                inferred_limit = refusals.limit(&figures);
            }
        } else if is_replayed
            && !is_set
            && made_here.is_none()
            && let Some(own) = &own
            && let Some(found) = infer_from_retries(&trace, own, total_bytes, &refusals, progress)
        {
            (exact, inferred_limit) = (Some(found.verification), Some(found.limit));
        }
        if !is_set {
            limit = inferred_limit.or(limit);
        }
        let is_refused = limit.is_none() && memory.fraction.is_none();
        let unexplained = refusals.with_free.filter(|_| is_refused);
        if let Some(exact) = &exact {
            let counters = &exact.run.statistics;
            figures.retries = u64::try_from(counters.num_alloc_retries).ok();
            figures.peak_allocated_bytes = u64::try_from(counters.allocated_bytes.all.peak).ok();
        }
        let workload = match &mut exact {
            Some(exact) => Arc::new(std::mem::take(&mut exact.workload)),
            None => {
                let read = || Workload::shared(&trace, total_bytes);
                workload.map_or_else(read, Arc::new)
            }
        };
        let requests_outside = start.outside;
        let start = Some(start).filter(|start| !start.is_empty());
        // A log of requests has no segments, so no layout either.
        let start_layout = start.as_ref().zip(config.as_ref()).filter(|_| !trace.requests_only);
        let start_layout = start_layout.and_then(|(start, own)| start.layout(own.settings()));
        let live_peak_bytes = live_peak_bytes(&workload);
        Self {
            trace,
            config,
            no_history,
            requests_outside,
            workload,
            figures,
            limit,
            inferred_limit,
            unexplained,
            exact,
            is_verified: is_verified && !progress.is_cancelled(),
            start,
            start_layout,
            layout_for_all: false,
            live_peak_bytes,
            memory,
            is_memory_set: is_set,
        }
    }

    /// Returns the part of a recording behind its first `events` events, with the limit of the whole. Replays
    /// start with the layout then, as if the program had changed its settings at that moment.
    ///
    /// Replays the recording as [`timed`](Self::timed) does.
    #[must_use]
    pub fn begun_at(
        events: usize,
        trace: Trace,
        config: Option<Config>,
        memory: Memory,
        progress: &dyn Progress,
    ) -> Self {
        let Self { mut trace, no_history, limit, inferred_limit, unexplained, .. } =
            Self::timed(trace, config.clone(), memory, progress);
        trace.events.drain(..events.min(trace.events.len()));
        trace.marks.clear();
        let mut rest = Self::with_history(no_history, trace, config, memory, true, progress);
        rest.layout_for_all = true;
        (rest.limit, rest.inferred_limit) = (limit, inferred_limit);
        rest.unexplained = unexplained;
        rest
    }

    /// Returns true if the limit was derived from the recorded events.
    #[must_use]
    pub fn limit_is_inferred(&self) -> bool {
        self.limit.is_some_and(|limit| match limit.source {
            LimitSource::DeviceFull { .. }
            | LimitSource::Inferred(_)
            | LimitSource::Probable(_)
            | LimitSource::Possible(_) => true,
            LimitSource::Fraction | LimitSource::TotalMemory | LimitSource::Recorded => false,
        })
    }

    /// Returns the share of a device with `total_bytes` that a replay may reserve; `None` for all of it.
    #[must_use]
    pub fn fraction_of(&self, total_bytes: u64) -> Option<f64> {
        let limit = self.limit?;
        match limit.source {
            LimitSource::Fraction => self.memory.fraction,
            LimitSource::TotalMemory => None,
            LimitSource::DeviceFull { .. } if limit.bytes >= total_bytes => None,
            LimitSource::DeviceFull { .. }
            | LimitSource::Recorded
            | LimitSource::Inferred(_)
            | LimitSource::Probable(_)
            | LimitSource::Possible(_) => Some(fraction_of_limit(limit.bytes, total_bytes)),
        }
    }

    /// Returns the layout from which a replay under `config` starts. Unless `layout_for_all` is set, exists
    /// only for the recorded configuration, with any compatibility setting.
    #[must_use]
    pub fn layout_for(&self, config: &Config) -> Option<&[SegmentLayout]> {
        let (layout, own) = (self.start_layout.as_deref()?, self.config.as_ref()?);
        let compat = config.settings().compat;
        let is_own = || own.clone().with_compat(compat).settings() == config.settings();
        (self.layout_for_all || is_own()).then_some(layout)
    }

    /// Returns the memory of the replay's device, in bytes. If the limit is that of a
    /// [full device](LimitSource::DeviceFull), this is the limit. Otherwise it is the size that the caller
    /// set, or the size that the recording contains, or that of an H200.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        match self.limit {
            Some(Limit { bytes, source: LimitSource::DeviceFull { .. }, .. }) => bytes,
            _ => total_bytes(&self.memory),
        }
    }
}

impl Limit {
    /// Returns a limit that is known exactly.
    pub fn exactly(bytes: u64, source: LimitSource) -> Self {
        Self { bytes, below_bytes: None, source }
    }

    /// Returns the largest whole number of bytes that the limit may have.
    pub(super) fn highest_bytes(&self) -> u64 {
        self.below_bytes.map_or(self.bytes, |below| self.bytes.max(below.saturating_sub(1)))
    }

    /// Returns the limit, unless it is only [possible](LimitSource::Possible).
    pub fn known(self) -> Option<Self> {
        let is_known = !matches!(self.source, LimitSource::Possible(_));
        is_known.then_some(self)
    }
}

fn total_bytes(memory: &Memory) -> u64 {
    memory.total_bytes.unwrap_or(SimOptions::default().total_bytes)
}

impl Memory {
    /// Returns the limit that the caller set. `config` is the recorded configuration, if it is known.
    pub fn limit(&self, config: Option<&Config>) -> Option<Limit> {
        let rounding = config.map_or(FractionRounding::Nearest, |config| {
            config.settings().compat.decisions().limit_rounding
        });
        let bytes = |part| limit_of_fraction(part, total_bytes(self), rounding);
        let part = self.fraction.and_then(bytes);
        let by_fraction = part.map(|bytes| Limit::exactly(bytes, LimitSource::Fraction));
        let by_total =
            self.total_bytes.map(|bytes| Limit::exactly(bytes, LimitSource::TotalMemory));
        by_fraction.or(by_total)
    }
}
