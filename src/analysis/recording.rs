//! A recording with everything that is known of it, read once.

use std::fmt;

use super::figures::{Figures, live_peak_bytes};
use super::limit::infer;
use crate::config::Config;
use crate::driver::sim::SimOptions;
use crate::history::SegmentLayout;
use crate::replay::{self, MadeHere, Start, Trace, Verification, Workload};
use crate::size::{fraction_of_limit, limit_of_fraction};

/// How much memory a recorded program had, as far as somebody says.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Memory {
    /// What the device has, in bytes.
    pub total_bytes: Option<u64>,
    /// The part of it that may be reserved, from 0 to 1; 1 is no limit.
    pub fraction: Option<f64>,
}

/// A recording: what was asked for, and what is known of the program that asked.
#[derive(Clone, Debug)]
pub struct Recording {
    /// The file's events, final layout and configuration.
    pub trace: Trace,
    /// The recorded configuration, where it is one that can be repeated.
    pub config: Option<Config>,
    /// What was asked for, free of what the recorded allocator decided.
    pub workload: Workload,
    /// The file's own figures.
    pub figures: Figures,
    /// What may be reserved, where something limits it.
    pub limit: Option<Limit>,
    /// What the recorded program could reserve, where the recording shows it and nobody said it.
    pub inferred_limit: Option<Limit>,
    /// A replay of the recorded configuration, where it makes every recorded decision. Its workload is
    /// this recording's.
    pub exact: Option<Verification>,
    /// What was there before the first event, where the recording begins late and tells it.
    pub start: Option<Beginning>,
    /// The most bytes that callers held at once, as they asked for them: nothing runs on less.
    pub live_peak_bytes: u64,
    /// What was said of the memory.
    pub memory: Memory,
}

/// What was there when a recording began.
#[derive(Clone, Debug, PartialEq)]
pub struct Beginning {
    /// Bytes that were reserved.
    pub reserved_bytes: u64,
    /// Bytes that were in callers' hands, as they asked for them.
    pub requested_bytes: u64,
    /// Where the blocks lay that lived, in the order of the workload's first operations.
    pub live_addresses: Vec<u64>,
    /// All of it, under the recorded configuration; without it replays start from the live blocks alone.
    pub layout: Option<Vec<SegmentLayout>>,
}

/// The most that may be reserved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// In bytes.
    pub bytes: u64,
    /// Where it comes from.
    pub source: LimitSource,
}

/// Who says what may be reserved.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitSource {
    /// The caller, as a part of the device.
    Fraction,
    /// The caller: it is all that the device has.
    TotalMemory,
    /// The recording says it, because this library made it.
    Recorded,
    /// The recording: under it a replay makes every recorded decision.
    Inferred {
        /// Requests that failed there, which is what tells it; without any, releases do.
        ooms: u64,
    },
}

impl fmt::Display for LimitSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Fraction => f.write_str("a fraction of the device, as said"),
            Self::TotalMemory => f.write_str("all that the device has, as said"),
            Self::Recorded => f.write_str("as recorded"),
            Self::Inferred { ooms: 0 } => {
                f.write_str("inferred: under it the recorded releases come out")
            }
            Self::Inferred { ooms: 1 } => f.write_str("inferred from 1 request that failed"),
            Self::Inferred { ooms } => write!(f, "inferred from {ooms} requests that failed"),
        }
    }
}

impl Beginning {
    fn of(trace: &Trace, config: Option<&Config>) -> Option<Self> {
        let start = Start::of(trace);
        (!start.is_empty()).then(|| Self {
            reserved_bytes: start.reserved_bytes(),
            requested_bytes: start.requested_bytes(),
            live_addresses: start.blocks.iter().map(|block| block.address).collect(),
            layout: config.and_then(|config| start.layout(config.settings())),
        })
    }
}

impl Recording {
    /// Reads what a trace asked for. `config` is the recorded configuration, if it can be repeated.
    ///
    /// Repeats the recording, so it takes as long as a replay of every event.
    #[must_use]
    pub fn new(trace: Trace, config: Option<Config>, memory: Memory) -> Self {
        let made_here = trace.made_here.filter(|_| memory == Memory::default());
        let memory = match made_here {
            Some(MadeHere { total_bytes, .. }) => Memory { total_bytes, ..memory },
            None => memory,
        };
        let total_bytes = total_bytes(&memory);
        let mut figures = Figures::of(&trace);
        let (mut limit, mut inferred_limit) = (said_limit(&memory), None);
        if let Some(MadeHere { limit_bytes, .. }) = made_here {
            limit = limit_bytes.map(|bytes| Limit { bytes, source: LimitSource::Recorded });
        }
        let recorded_fraction = limit.filter(|limit| limit.source == LimitSource::Recorded);
        let recorded_fraction = recorded_fraction.map(|l| fraction_of_limit(l.bytes, total_bytes));
        let fraction = memory.fraction.or(recorded_fraction);
        let own = config.as_ref().map(|config| trace.as_recorded(config.clone()));
        let exactly = |total_bytes, fraction| {
            let found = replay::verify(&trace, own.as_ref()?, total_bytes, fraction);
            found.ok().filter(Verification::is_exact)
        };
        let mut exact = exactly(total_bytes, fraction);
        let mut workload = None;
        if let (None, Some(own)) = (&exact, &own) {
            // What was asked for is read on the recorded device, whichever is described.
            let recorded_bytes = total_bytes.max(SimOptions::default().total_bytes);
            if memory != Memory::default()
                && let Some(found) = exactly(recorded_bytes, None)
            {
                workload = Some(found.workload);
            } else if let Some(found) = infer(&trace, own, recorded_bytes, &figures) {
                if memory.fraction.is_none() {
                    exact = Some(found.verification);
                    inferred_limit = Some(found.limit);
                } else {
                    workload = Some(found.verification.workload);
                }
            } else if memory.fraction.is_none()
                && figures.ooms > 0
                && figures.peak_reserved_bytes > 0
            {
                // Not every decision comes out, as in recordings that begin late: the most that was
                // reserved is the least that the limit can be.
                let source = LimitSource::Inferred { ooms: figures.ooms };
                inferred_limit = Some(Limit { bytes: figures.peak_reserved_bytes, source });
            }
            if inferred_limit.is_some() && is_recorded_device(&memory, &figures) {
                limit = inferred_limit;
            }
        }
        if let Some(exact) = &exact {
            let counters = &exact.statistics;
            figures.retries = u64::try_from(counters.num_alloc_retries).ok();
            figures.peak_allocated_bytes = u64::try_from(counters.allocated_bytes.all.peak).ok();
        }
        let workload = match &mut exact {
            Some(exact) => std::mem::take(&mut exact.workload),
            None => workload.unwrap_or_else(|| Workload::of(&trace, total_bytes)),
        };
        let start = Beginning::of(&trace, config.as_ref());
        let live_peak_bytes = live_peak_bytes(&workload);
        Self {
            trace,
            config,
            workload,
            figures,
            limit,
            inferred_limit,
            exact,
            start,
            live_peak_bytes,
            memory,
        }
    }

    /// Whether the limit was found in the recording.
    #[must_use]
    pub fn limit_is_inferred(&self) -> bool {
        self.limit.is_some_and(|limit| matches!(limit.source, LimitSource::Inferred { .. }))
    }

    /// The part of a device with `total_bytes` that a replay may reserve; `None` where it may take all.
    #[must_use]
    pub fn fraction_of(&self, total_bytes: u64) -> Option<f64> {
        let limit = self.limit?;
        match limit.source {
            LimitSource::Fraction => self.memory.fraction,
            LimitSource::TotalMemory => None,
            LimitSource::Recorded | LimitSource::Inferred { .. } => {
                Some(fraction_of_limit(limit.bytes, total_bytes))
            }
        }
    }

    /// The layout from which a replay under `config` starts: the recorded one under the recorded
    /// configuration, whatever the compatibility; nothing under any other.
    #[must_use]
    pub fn layout_for(&self, config: &Config) -> Option<&[SegmentLayout]> {
        let (layout, own) = (self.start.as_ref()?.layout.as_deref()?, self.config.as_ref()?);
        let compat = config.settings().compat;
        (own.clone().with_compat(compat).settings() == config.settings()).then_some(layout)
    }

    /// What the device of a replay has, in bytes: as said, or an H200's memory.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        total_bytes(&self.memory)
    }
}

fn total_bytes(memory: &Memory) -> u64 {
    memory.total_bytes.unwrap_or(SimOptions::default().total_bytes)
}

/// Whether the device that somebody described may be the recorded one, whose limit then holds. A device
/// that is smaller than the recorded one, or a recording that does not tell how large that was, is another:
/// a replay has all of it.
fn is_recorded_device(memory: &Memory, figures: &Figures) -> bool {
    memory.total_bytes.is_none_or(|total_bytes| {
        figures.device_at_least_bytes.is_some_and(|at_least| total_bytes >= at_least)
    })
}

fn said_limit(memory: &Memory) -> Option<Limit> {
    let total_bytes = total_bytes(memory);
    let part = memory.fraction.and_then(|fraction| limit_of_fraction(fraction, total_bytes));
    let by_fraction = part.map(|bytes| Limit { bytes, source: LimitSource::Fraction });
    let by_total =
        memory.total_bytes.map(|bytes| Limit { bytes, source: LimitSource::TotalMemory });
    by_fraction.or(by_total)
}
