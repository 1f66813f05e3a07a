//! Finds the limit on reserved bytes under which a recording was made.
//!
//! PyTorch's recordings do not contain the program's limit. But each failed request shows how much memory
//! the device had free. And the program compared its reserved bytes with the limit at each release under
//! pressure, each garbage collection, each failure and each new segment. Two things can limit a program:
//!
//! - **The device was full.** A request failed, and less was free on the device than the request needed.
//!   Then the sum of reserved and free bytes is all that the program could have, even if other processes
//!   share the device.
//! - **A memory fraction.** More was free, or requests released memory before they grew. [`Refusals`] bounds
//!   the limit. A replay under a guessed limit makes the same comparisons. The first difference from the
//!   recording shows whether the guess is too high or too low. All limits of an interval explain every
//!   decision; its lower end is usually the lower bound, which takes one replay to confirm. Only the
//!   decisions of the garbage collector need a bisection.

use std::ops::Range;

use super::figures::Figures;
use super::recording::{Evidence, Limit, LimitSource};
use super::refusals::Refusals;
use stratalloc::config::Config;
use stratalloc::size::{MIB, fraction_of_limit};
use stratalloc_recording::{Misfit, Progress, Trace, Until, Verification, started, verify_until};

/// A limit that explains every recorded decision, and the replay that confirmed it.
pub(super) struct Inferred {
    pub(super) limit: Limit,
    pub(super) verification: Verification,
}

/// The result of a replay under a guessed limit.
enum Guess {
    Exact(Box<Verification>),
    Off(Misfit),
    Unknown,
}

/// The kind of limit that a replay uses.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Bound {
    /// The size of the device.
    Device,
    /// A memory fraction of a device of this many bytes.
    Fraction { total_bytes: u64 },
}

impl Bound {
    /// Returns the size of the device, and the fraction of it that may be reserved, for a limit of
    /// `limit_bytes`.
    fn device_memory(self, limit_bytes: u64) -> (u64, Option<f64>) {
        match self {
            Self::Device => (limit_bytes, None),
            Self::Fraction { total_bytes } => {
                (total_bytes, Some(fraction_of_limit(limit_bytes, total_bytes)))
            }
        }
    }
}

/// Finds the limit of a recording that no replay without a limit repeats. `config` is the recorded
/// configuration, with the recording's compatibility setting. Returns `None` if no limit explains all
/// decisions of the recording, or if `progress` cancels.
pub(super) fn infer(
    trace: &Trace,
    config: &Config,
    total_bytes: u64,
    figures: &Figures,
    refusals: &Refusals,
    progress: &dyn Progress,
) -> Option<Inferred> {
    let ooms = figures.ooms;
    if let Some(most_bytes) = refusals.device_bytes {
        let search = LimitSearch { progress, trace, config, bound: Bound::Device };
        let found = search.device(refusals.least_bytes, most_bytes);
        if let Some((bytes, verification)) = found.filter(|_| !progress.is_cancelled()) {
            let limit = Limit::exactly(bytes, LimitSource::DeviceFull { ooms });
            return Some(Inferred { limit, verification });
        }
    }
    let search = LimitSearch { progress, trace, config, bound: Bound::Fraction { total_bytes } };
    let most_bytes = refusals.device_bytes.unwrap_or(total_bytes);
    let most_bytes = refusals.below_bytes.map_or(most_bytes, |below| below.min(most_bytes));
    let Bracket { exact_bytes, mut verification, mib } =
        search.bracket(refusals.least_bytes, most_bytes)?;
    // Where the collector acts, a release before a request does not show that the request was refused. But an
    // exact replay of it shows the limit near which the collector acted.
    let collector = config.settings().garbage_collection_threshold.is_some();
    let retries = match collector {
        true => Vec::new(),
        false => Refusals::without_calls(&refusals.retries, &verification.workload),
    };
    let collected = collector
        && !Refusals::without_calls(&refusals.releases, &verification.workload).is_empty();
    let mut bytes = exact_bytes;
    if bytes > refusals.least_bytes {
        let edge = search.edge(exact_bytes / MIB, mib.start, 1);
        if let Some(found) = edge.verification {
            (bytes, verification) = (edge.exact_mib * MIB, found);
        }
    }
    let refused = refusals.below_with(&retries, exact_bytes);
    let highest_bytes = refused.unwrap_or(most_bytes).min(most_bytes);
    let below_bytes = search.below(exact_bytes, highest_bytes, mib.end);
    let (retried, collections) = (retries_of(&verification, ooms), verification.collections);
    let releases = verification.limit_releases.saturating_sub(retried);
    let evidence = Evidence { ooms, retries: retried, releases, collections };
    let source = refusals.source(evidence, &retries, Some(below_bytes), collected);
    let limit = Limit { bytes, below_bytes: Some(below_bytes), source };
    // Without all replays, the interval may be too narrow.
    (!progress.is_cancelled()).then_some(Inferred { limit, verification })
}

/// Finds the limit of a recording that a replay without a limit repeats, in which no request failed but
/// some may have been retried. Such a replay reads each retry as a call of `empty_cache`. Returns `None`
/// if the recording suggests no limit.
pub(super) fn infer_from_retries(
    trace: &Trace,
    config: &Config,
    total_bytes: u64,
    refusals: &Refusals,
    progress: &dyn Progress,
) -> Option<Inferred> {
    if !Refusals::suggest_limit(&refusals.retries) {
        return None;
    }
    let search = LimitSearch { progress, trace, config, bound: Bound::Fraction { total_bytes } };
    let Guess::Exact(verification) = search.guess(refusals.least_bytes) else { return None };
    let retries = Refusals::without_calls(&refusals.retries, &verification.workload);
    let evidence = Evidence { retries: retries_of(&verification, 0), ..Evidence::default() };
    // A collection before a request looks like a retry too.
    let least = if retries.iter().any(|retry| retry.is_proved) { 1 } else { 2 };
    if !Refusals::suggest_limit(&retries) || evidence.retries < least {
        return None;
    }
    let limit = Limit {
        bytes: refusals.least_bytes,
        below_bytes: refusals.below_with(&retries, refusals.least_bytes),
        source: LimitSource::Probable(evidence),
    };
    Some(Inferred { limit, verification: *verification })
}

/// Returns how often a replay released the cache to serve a request, and could serve it then.
fn retries_of(verification: &Verification, ooms: u64) -> u64 {
    let retries = verification.run.statistics.num_alloc_retries;
    u64::try_from(retries).unwrap_or(0).saturating_sub(ooms)
}

/// Replays a recording under limits of one kind.
struct LimitSearch<'a> {
    progress: &'a dyn Progress,
    trace: &'a Trace,
    config: &'a Config,
    bound: Bound,
}

/// A limit that explains every decision, and the range of limits, in MiB, that may do so too.
struct Bracket {
    exact_bytes: u64,
    verification: Verification,
    mib: Range<u64>,
}

impl LimitSearch<'_> {
    /// Replays until the first difference from the recording. If the replay fails with an error, the limit
    /// is treated as too low. After a cancellation nothing is known.
    fn guess(&self, limit_bytes: u64) -> Guess {
        if self.progress.is_cancelled() {
            return Guess::Unknown;
        }
        let (total_bytes, fraction) = self.bound.device_memory(limit_bytes);
        let until = Until::FirstDifference;
        match verify_until(
            self.trace,
            self.config,
            total_bytes,
            fraction,
            until,
            &started,
            self.progress,
        ) {
            Ok(found) if found.is_exact() => Guess::Exact(Box::new(found)),
            Ok(found) => found.limit.map_or(Guess::Unknown, Guess::Off),
            Err(_) => Guess::Off(Misfit::TooLow),
        }
    }

    /// Finds the largest memory of a device, at most `most_bytes`, that explains every decision.
    fn device(&self, least_bytes: u64, most_bytes: u64) -> Option<(u64, Verification)> {
        if let Guess::Exact(found) = self.guess(most_bytes) {
            return Some((most_bytes, *found));
        }
        let Bracket { exact_bytes, verification, mib } = self.bracket(least_bytes, most_bytes)?;
        let edge = self.edge(exact_bytes / MIB, mib.end, 1);
        Some(match edge.verification {
            Some(found) => (edge.exact_mib * MIB, found),
            None => (exact_bytes, verification),
        })
    }

    /// Finds a limit of at most `most_bytes` that explains every decision.
    fn bracket(&self, least_bytes: u64, most_bytes: u64) -> Option<Bracket> {
        // Mapped pages may exceed a limit by less than one page, so the limit may be below the reserved
        // bytes.
        let slack_bytes = 64 * MIB;
        let mut mib = least_bytes.saturating_sub(slack_bytes) / MIB..most_bytes.div_ceil(MIB);
        let (mut next_bytes, mut is_first) = (least_bytes, true);
        loop {
            match self.guess(next_bytes) {
                Guess::Exact(found) => {
                    return Some(Bracket { exact_bytes: next_bytes, verification: *found, mib });
                }
                Guess::Off(Misfit::TooLow) => mib.start = next_bytes / MIB,
                Guess::Off(Misfit::TooHigh) => mib.end = next_bytes.div_ceil(MIB),
                // The lower bound itself is only the first guess.
                Guess::Unknown if is_first => {}
                Guess::Unknown => return None,
            }
            is_first = false;
            let middle = mib.start + mib.end.checked_sub(mib.start)? / 2;
            if middle == mib.start {
                return None;
            }
            next_bytes = middle * MIB;
        }
    }

    /// Bisects between a limit that explains every decision and one that may not, in MiB, until they differ
    /// by at most `apart_mib`.
    fn edge(&self, exact_mib: u64, off_mib: u64, apart_mib: u64) -> Edge {
        let mut edge = Edge { exact_mib, off_mib, verification: None };
        while edge.exact_mib.abs_diff(edge.off_mib) > apart_mib {
            let middle = edge.exact_mib.midpoint(edge.off_mib);
            match self.guess(middle * MIB) {
                Guess::Exact(found) => {
                    (edge.exact_mib, edge.verification) = (middle, Some(*found));
                }
                Guess::Off(_) | Guess::Unknown => edge.off_mib = middle,
            }
        }
        edge
    }

    /// Returns the end of the limits that explain every decision, at most `highest_bytes`. `exact_bytes`
    /// explains every decision; `off_mib` may not.
    fn below(&self, exact_bytes: u64, highest_bytes: u64, off_mib: u64) -> u64 {
        let last_bytes = highest_bytes.saturating_sub(1);
        let is_open = off_mib >= highest_bytes.div_ceil(MIB);
        let is_exact = || matches!(self.guess(last_bytes), Guess::Exact(_));
        if last_bytes <= exact_bytes || (is_open && is_exact()) {
            return highest_bytes;
        }
        let (exact_mib, off_mib) = (exact_bytes / MIB, off_mib.min(highest_bytes.div_ceil(MIB)));
        let edge = self.edge(exact_mib, off_mib, exact_mib / PRECISION + 1);
        highest_bytes.min(edge.off_mib * MIB)
    }
}

/// The result of a bisection: a limit that explains every decision, with its replay if there was one, and a
/// limit close to it that does not.
struct Edge {
    exact_mib: u64,
    off_mib: u64,
    verification: Option<Verification>,
}

/// The high end of the interval is found to this part of the limit.
const PRECISION: u64 = 1000;
