//! A recording with everything that is known of it, read once.

use std::fmt;

use super::figures::{Figures, live_peak_bytes};
use crate::config::{Compat, Config};
use crate::driver::sim::SimOptions;
use crate::replay::{self, Trace, Verification, Workload};
use crate::size::limit_of_fraction;

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
    /// Whether a replay of the recorded configuration makes every recorded decision.
    pub is_exact: bool,
    /// The most bytes that callers held at once, as they asked for them: nothing runs on less.
    pub live_peak_bytes: u64,
    /// What was said of the memory.
    pub memory: Memory,
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
            Self::Inferred { ooms: 0 } => {
                f.write_str("inferred: under it the recorded releases come out")
            }
            Self::Inferred { ooms: 1 } => f.write_str("inferred from 1 request that failed"),
            Self::Inferred { ooms } => write!(f, "inferred from {ooms} requests that failed"),
        }
    }
}

impl Recording {
    /// Reads what a trace asked for. `config` is the recorded configuration, if it can be repeated.
    ///
    /// Repeats the recording, so it takes as long as a replay of every event.
    #[must_use]
    pub fn new(trace: Trace, config: Option<Config>, memory: Memory) -> Self {
        let total_bytes = total_bytes(&memory);
        let mut figures = Figures::of(&trace);
        let exact = config.as_ref().and_then(|config| {
            let config = config.clone().with_compat(Compat::PyTorch);
            let found = replay::verify(&trace, &config, total_bytes, memory.fraction);
            found.ok().filter(Verification::is_exact)
        });
        if let Some(exact) = &exact {
            let counters = &exact.statistics;
            figures.retries = u64::try_from(counters.num_alloc_retries).ok();
            figures.peak_allocated_bytes = u64::try_from(counters.allocated_bytes.all.peak).ok();
        }
        let is_exact = exact.is_some();
        let workload = exact.map_or_else(
            || Workload::of(&trace, total_bytes),
            |verification| verification.workload,
        );
        let live_peak_bytes = live_peak_bytes(&workload);
        let limit = said_limit(&memory);
        Self { trace, config, workload, figures, limit, is_exact, live_peak_bytes, memory }
    }

    /// Whether the limit was found in the recording.
    #[must_use]
    pub fn limit_is_inferred(&self) -> bool {
        self.limit.is_some_and(|limit| matches!(limit.source, LimitSource::Inferred { .. }))
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

fn said_limit(memory: &Memory) -> Option<Limit> {
    let total_bytes = total_bytes(memory);
    let part = memory.fraction.and_then(|fraction| limit_of_fraction(fraction, total_bytes));
    let by_fraction = part.map(|bytes| Limit { bytes, source: LimitSource::Fraction });
    let by_total =
        memory.total_bytes.map(|bytes| Limit { bytes, source: LimitSource::TotalMemory });
    by_fraction.or(by_total)
}
