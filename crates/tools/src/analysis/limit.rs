//! Finds the limit on reserved bytes under which a recording was made.
//!
//! PyTorch's recordings do not contain the program's limit. But each failed request shows how much memory
//! the device had free. And the program compared its reserved bytes with the limit at each release under
//! pressure, each garbage collection, each failure and each new segment. Two things can limit a program:
//!
//! - **The device was full.** A request failed, and less was free on the device than the request needed.
//!   Then the sum of reserved and free bytes is all that the program could have, even if other processes
//!   share the device.
//! - **A memory fraction.** A request failed, and more was free than it needed. A replay under a guessed
//!   limit makes the same comparisons. The first difference from the recording shows whether the guess
//!   is too high or too low. A bisection finds a limit under which every decision is as recorded.

use super::figures::Figures;
use super::recording::{Limit, LimitSource};
use crate::replay::{Misfit, Trace, Until, Verification, started, verify, verify_until};
use stratalloc::config::{Config, Settings};
use stratalloc::history::Action;
use stratalloc::size::{MIB, align_up, fraction_of_limit, segment_bytes};

/// A limit that explains every recorded decision, and the replay that confirmed it.
pub(super) struct Inferred {
    pub(super) limit: Limit,
    pub(super) verification: Verification,
}

/// The bounds on the limit of a recording that follow from its failed requests, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Failures {
    /// Reserved plus free bytes when a request failed because the device was full, the smallest of all such
    /// sums. `None` if no request failed for this reason.
    pub(super) device_bytes: Option<u64>,
    /// An upper bound: the limit was below this. `None` if no request failed.
    pub(super) below_bytes: Option<u64>,
}

impl Failures {
    /// Computes the bounds from the events. The recorded `settings` decide how much a request needs.
    pub(super) fn of(trace: &Trace, settings: &Settings, figures: &Figures) -> Self {
        let mut failures = Self::default();
        let least = |known: &mut Option<u64>, bytes| {
            *known = Some(known.map_or(bytes, |known: u64| known.min(bytes)));
        };
        let mut reserved = i128::from(figures.reserved_before_bytes);
        for event in &trace.events {
            reserved = (reserved + event.reserved_change()).max(0);
            if event.action == Action::OutOfMemory {
                let reserved_bytes = u64::try_from(reserved).unwrap_or(u64::MAX);
                let needed_bytes = needed_bytes(event.size_bytes, settings);
                let free_bytes = event.address;
                least(&mut failures.below_bytes, reserved_bytes.saturating_add(needed_bytes));
                if free_bytes < needed_bytes {
                    least(&mut failures.device_bytes, reserved_bytes.saturating_add(free_bytes));
                }
            }
        }
        failures
    }

    /// Returns the limit of a recording that no replay repeats exactly: the bytes of the full device, or
    /// else the peak of reserved bytes, which is the lowest possible limit. `None` if no request failed.
    pub(super) fn limit(&self, figures: &Figures) -> Option<Limit> {
        let (ooms, bytes) = (figures.ooms, figures.peak_reserved_bytes);
        let full = |bytes| Limit { bytes, source: LimitSource::DeviceFull { ooms } };
        let least = || Limit { bytes, source: self.source(bytes, ooms) };
        self.device_bytes.map(full).or_else(|| (ooms > 0 && bytes > 0).then(least))
    }

    /// Returns the source to report for a limit of `bytes`, after `ooms` failed requests.
    fn source(&self, bytes: u64, ooms: u64) -> LimitSource {
        let is_wide = |below: &u64| *below > bytes.saturating_add(bytes / 50);
        LimitSource::Inferred { ooms, below_bytes: self.below_bytes.filter(is_wide) }
    }
}

impl Limit {
    /// Returns the limit that the failed requests of a recording show, without a replay. `config` is the
    /// recorded configuration.
    pub(crate) fn shown_by_failures(trace: &Trace, config: Option<&Config>) -> Option<Self> {
        let settings = config.map(|config| config.settings().clone()).unwrap_or_default();
        let figures = Figures::of(trace);
        Failures::of(trace, &settings, &figures).limit(&figures)
    }
}

/// Returns the most bytes that a request of `bytes` may allocate from the device. If `bytes` is too large
/// for any segment, returns `bytes`.
fn needed_bytes(bytes: u64, settings: &Settings) -> u64 {
    if bytes > i64::MAX.unsigned_abs() {
        return bytes;
    }
    let segment = segment_bytes(bytes, settings.large_segment_bytes);
    match settings.expandable_segments {
        true => align_up(segment, settings.large_segment_bytes.min(segment)),
        false => segment,
    }
}

/// The result of a replay under a guessed limit.
enum Guess {
    Exact,
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

/// Finds the limit of a recording. `config` is the recorded configuration, with the recording's
/// compatibility setting. Returns `None` if no limit explains all decisions of the recording.
pub(super) fn infer(
    trace: &Trace,
    config: &Config,
    total_bytes: u64,
    figures: &Figures,
    failures: &Failures,
) -> Option<Inferred> {
    let search = |bound, most_bytes| {
        let search = Search { trace, config, bound };
        let limit_bytes = search.limit_bytes(figures.peak_reserved_bytes, most_bytes)?;
        let (total_bytes, fraction) = bound.device_memory(limit_bytes);
        let found = verify(trace, config, total_bytes, fraction).ok()?;
        let ooms = figures.ooms;
        let source = match bound {
            Bound::Device => LimitSource::DeviceFull { ooms },
            Bound::Fraction { .. } => failures.source(limit_bytes, ooms),
        };
        let limit = Limit { bytes: limit_bytes, source };
        found.is_exact().then_some(Inferred { limit, verification: found })
    };
    let on_device = failures.device_bytes.and_then(|bytes| search(Bound::Device, bytes));
    let most_bytes = failures.device_bytes.unwrap_or(total_bytes);
    on_device.or_else(|| search(Bound::Fraction { total_bytes }, most_bytes))
}

/// Replays a recording under limits of one kind.
struct Search<'a> {
    trace: &'a Trace,
    config: &'a Config,
    bound: Bound,
}

impl Search<'_> {
    /// Replays until the first difference from the recording. If the replay fails with an error, the limit
    /// is treated as too low.
    fn guess(&self, limit_bytes: u64) -> Guess {
        let (total_bytes, fraction) = self.bound.device_memory(limit_bytes);
        let until = Until::FirstDifference;
        match verify_until(self.trace, self.config, total_bytes, fraction, until, &started) {
            Ok(found) if found.is_exact() => Guess::Exact,
            Ok(found) => found.limit.map_or(Guess::Unknown, Guess::Off),
            Err(_) => Guess::Off(Misfit::TooLow),
        }
    }

    /// Returns a limit of at most `most_bytes` that explains every decision. If the device was full, it is
    /// the largest such limit that is found, because the device had `most_bytes`. Otherwise it is the
    /// smallest: every request that fits under the smallest also fitted when the recording was made.
    fn limit_bytes(&self, peak_reserved_bytes: u64, most_bytes: u64) -> Option<u64> {
        if self.bound == Bound::Device && matches!(self.guess(most_bytes), Guess::Exact) {
            return Some(most_bytes);
        }
        // Mapped pages may exceed a limit by less than one page, so the limit may be below the peak.
        let slack_bytes = 64 * MIB;
        let mut too_low = peak_reserved_bytes.saturating_sub(slack_bytes) / MIB;
        let mut too_high = most_bytes.div_ceil(MIB);
        let exact_mib = loop {
            let middle = too_low + too_high.checked_sub(too_low)? / 2;
            if middle == too_low {
                return None;
            }
            match self.guess(middle * MIB) {
                Guess::Exact => break middle,
                Guess::Off(Misfit::TooLow) => too_low = middle,
                Guess::Off(Misfit::TooHigh) => too_high = middle,
                Guess::Unknown => return None,
            }
        };
        let is_exact = |limit_mib: &u64| matches!(self.guess(*limit_mib * MIB), Guess::Exact);
        let edge_mib = match self.bound {
            Bound::Device => last_that_holds(exact_mib, too_high, is_exact),
            Bound::Fraction { .. } => last_that_holds(exact_mib, too_low, is_exact),
        };
        Some(edge_mib * MIB)
    }
}

/// Bisects between `holds` and `fails`. Returns the number nearest to `fails` for which the condition
/// was found to hold.
fn last_that_holds(mut holds: u64, mut fails: u64, condition: impl Fn(&u64) -> bool) -> u64 {
    while holds.abs_diff(fails) > 1 {
        let middle = holds.midpoint(fails);
        match condition(&middle) {
            true => holds = middle,
            false => fails = middle,
        }
    }
    holds
}
