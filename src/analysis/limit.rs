//! The limit under which a recording was made, found in the recording.
//!
//! No recording says what its program was allowed to reserve. But each release under pressure, each
//! collection and each failure was a comparison with the limit, and so was every growth that came
//! without one: with the recorded state at hand each of them bounds the limit from one side. A replay
//! under a guess makes the same comparisons, and the first that comes out differently says which side
//! the guess is on. So a bisection finds a limit under which every decision is as recorded.

use super::figures::Figures;
use super::recording::{Limit, LimitSource};
use crate::config::Config;
use crate::replay::{Misfit, Trace, Until, Verification, verify, verify_until};
use crate::size::{MIB, fraction_of_limit};

/// A limit that makes every recorded decision, and the replay that showed it.
pub(super) struct Inferred {
    pub(super) limit: Limit,
    pub(super) verification: Verification,
}

/// What a replay under a guessed limit showed.
enum Guess {
    Exact,
    Off(Misfit),
    Unknown,
}

/// Finds the limit of a recording that no replay without one repeats exactly. `config` is the recorded
/// one to PyTorch's letter. Nothing where no limit explains the recording.
pub(super) fn infer(
    trace: &Trace,
    config: &Config,
    total_bytes: u64,
    figures: &Figures,
) -> Option<Inferred> {
    // A release that the recorded addresses do not bear was none of the recorded ones.
    let replay = |limit_mib: u64| {
        let fraction = Some(fraction_of_limit(limit_mib * MIB, total_bytes));
        match verify_until(trace, config, total_bytes, fraction, Until::FirstDifference) {
            Ok(found) if found.is_exact() => Guess::Exact,
            Ok(found) => found.limit.map_or(Guess::Unknown, Guess::Off),
            Err(_) => Guess::Off(Misfit::TooLow),
        }
    };
    // Pages may pass a limit by less than one of them.
    let slack_bytes = 64 * MIB;
    let mut too_low = figures.peak_reserved_bytes.saturating_sub(slack_bytes) / MIB;
    let mut too_high = total_bytes.div_ceil(MIB);
    let exact_mib = loop {
        let middle = too_low + too_high.checked_sub(too_low)? / 2;
        if middle == too_low {
            return None;
        }
        match replay(middle) {
            Guess::Exact => break middle,
            Guess::Off(Misfit::TooLow) => too_low = middle,
            Guess::Off(Misfit::TooHigh) => too_high = middle,
            Guess::Unknown => return None,
        }
    };
    // The smallest that explains it: whatever fits under that one fitted then.
    let mut limit_mib = exact_mib;
    while limit_mib - too_low > 1 {
        let middle = too_low + (limit_mib - too_low) / 2;
        match replay(middle) {
            Guess::Exact => limit_mib = middle,
            Guess::Off(_) | Guess::Unknown => too_low = middle,
        }
    }
    let source = LimitSource::Inferred { ooms: figures.ooms };
    let limit = Limit { bytes: limit_mib * MIB, source };
    let fraction = fraction_of_limit(limit.bytes, total_bytes);
    let verification = verify(trace, config, total_bytes, Some(fraction)).ok()?;
    verification.is_exact().then_some(Inferred { limit, verification })
}
