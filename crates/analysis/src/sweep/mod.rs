//! Analyses the recordings of many ranks. Those with equal requests form a group and are analysed once.
//!
//! [`Scanned`] has the fingerprint of one recording. [`Difference`] compares a recording of each group with
//! that of the largest group, and [`Advised`] has the settings for it. [`Found`] combines the results. All of
//! them are data that can be stored, so that a sweep can be interrupted and its work distributed. Files are
//! read and stored by the caller.
//!
//! Read next: `fingerprint`, then `difference`.

mod difference;
mod fingerprint;
mod found;

use serde::{Deserialize, Serialize};

use super::advice::{Advice, AdviceOptions};
use super::recording::{Limit, LimitSource, Memory, Recording};
pub use difference::{Difference, Rank};
pub use fingerprint::Fingerprint;
pub use found::{Found, Group};
use stratalloc::config::Config;
use stratalloc_recording::{DeviceFigures, Progress, ReplayError, Trace, Workload};
use stratalloc_sim::SimOptions;

/// The result of reading a recording.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scanned {
    pub(crate) fingerprint: Fingerprint,
    /// The number of requests.
    pub requests: u64,
    /// The peak of reserved bytes.
    pub peak_reserved_bytes: u64,
    /// The figures of its device, by which ranks are compared.
    pub figures: DeviceFigures,
    /// The number of further devices in the file. Only the first in the order of [`DeviceFigures::order`] is
    /// analysed.
    pub other_devices: u32,
}

/// The advice for a recording.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Advised {
    /// The need under the recorded configuration; `None` if no device suffices.
    pub needs_bytes: Option<u64>,
    /// The setting that is worth its cost. If there is none, the recorded one.
    pub best_conf: String,
    /// The least need of the settings that were tried, in bytes.
    pub best_needs_bytes: Option<u64>,
    /// The peak of live bytes.
    pub live_peak_bytes: u64,
    /// The result as a sentence.
    pub sentence: String,
    /// Why the recorded configuration is not that of `needs_bytes`, but PyTorch's default is.
    pub conf_error: Option<String>,
}

impl<'a> Rank<'a> {
    /// Reads what a fingerprint is made of. `own` is the recorded configuration, if it can be replayed, and
    /// `memory` the memory that the caller set.
    pub fn of(trace: &'a Trace, own: Option<&Config>, memory: &Memory) -> Self {
        let limit = Limit::shown_by_failures(trace, own);
        // The free bytes of a full device differ between ranks.
        let limit = limit.filter(|l| !matches!(l.source, LimitSource::DeviceFull { .. }));
        let recorded_bytes = trace.made_here.and_then(|made| made.total_bytes);
        let total_bytes = memory.total_bytes.or(recorded_bytes);
        let total_bytes = total_bytes.unwrap_or(SimOptions::default().total_bytes);
        let workload = Workload::shared(trace, total_bytes);
        Self { trace, workload, limit_bytes: limit.map(|limit| limit.bytes) }
    }
}

impl Scanned {
    /// Computes the figures of a recording that has a history.
    pub fn of(rank: &Rank<'_>) -> Self {
        let Rank { trace, workload, limit_bytes } = rank;
        let figures = DeviceFigures::of(trace);
        let others = trace.devices.len().saturating_sub(1);
        Self {
            fingerprint: Fingerprint::of(trace, workload, *limit_bytes),
            requests: trace.requests().count() as u64,
            peak_reserved_bytes: figures.reserved_peak_bytes,
            figures,
            other_devices: u32::try_from(others).unwrap_or(u32::MAX),
        }
    }
}

impl Advised {
    /// Searches settings for a recording. `conf_error` is the reason why its configuration cannot be
    /// replayed.
    ///
    /// # Errors
    ///
    /// The same as [`Advice::search`].
    pub fn of(
        recording: &Recording,
        options: &AdviceOptions,
        conf_error: Option<String>,
        progress: &dyn Progress,
    ) -> Result<Self, ReplayError> {
        let advice = Advice::search(recording, options, progress)?;
        let recorded = &advice.recorded;
        let best = advice.worth_it(recording).unwrap_or(recorded);
        Ok(Self {
            needs_bytes: recorded.need.needs_bytes,
            best_conf: best.conf.clone(),
            best_needs_bytes: best.need.needs_bytes,
            live_peak_bytes: recording.live_peak_bytes,
            sentence: advice.verdict(recording, None).setting_sentences().to_string(),
            conf_error,
        })
    }
}
