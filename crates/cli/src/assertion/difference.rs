//! Conditions on the difference between two recordings, such as `needs<=+2%`.

use serde_json::{Value, json};

use stratalloc_analysis::{Diff, counted_as, difference, failed_requests};

use super::super::outcome::Result;
use super::super::show::tenths;
use super::super::size::{percent, size};
use super::{Condition, ConditionBound, Judgement, Quantity};

/// The difference of a quantity between two recordings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum DifferenceBound {
    Bytes(i64),
    /// A percentage of the first recording's value.
    Percent(f64),
    /// A number of requests.
    Count(i64),
}

/// Splits a difference into its sign and its number.
fn signed(text: &str) -> Option<(bool, &str)> {
    let negative = text.strip_prefix('-').map(|rest| (true, rest));
    text.strip_prefix('+').map(|rest| (false, rest)).or(negative)
}

impl ConditionBound for DifferenceBound {
    const HELP: &str = "Check a condition on the difference between B and A, such as live_peak<=+2%, needs<=+1GiB or \
        failures<=+0. The exit code is 1 if it does not hold. Can be given several times. needs is each recording's \
        need as recorded. A percentage is one of A's value";
    const EXPECTED: [&str; 2] = [
        "needs, live_peak or failures",
        "a difference with its sign, as needs<=+1GiB or live_peak<=+2%",
    ];
    const TAKES_FIELDS: bool = false;

    fn of_bytes(text: &str) -> Result<Self, String> {
        let expected = || format!("expected {}", Self::EXPECTED[1]);
        let (is_negative, rest) = signed(text).ok_or_else(expected)?;
        if let Some(number) = rest.strip_suffix('%') {
            let percent = percent(number).ok_or_else(expected)?;
            return Ok(Self::Percent(if is_negative { -percent } else { percent }));
        }
        let bytes = if rest == "0" { 0 } else { size(rest)? };
        let bytes = i64::try_from(bytes).map_err(|_| expected())?;
        Ok(Self::Bytes(if is_negative { -bytes } else { bytes }))
    }

    fn of_count(text: &str) -> Result<Self, String> {
        let (is_negative, rest) = signed(text).unwrap_or_default();
        let count: Option<u32> = rest.parse().ok();
        let count = count.ok_or("expected a difference with its sign, as failures<=+0")?;
        Ok(Self::Count(if is_negative { -i64::from(count) } else { count.into() }))
    }
}

impl Condition<DifferenceBound> {
    /// Checks the condition on the difference between the second recording and the first.
    pub(crate) fn check_difference(&self, diff: &Diff<'_>) -> Result<DifferenceVerdict> {
        let mut values = [None; 2];
        for (value, side) in values.iter_mut().zip(diff.sides()) {
            *value = match self.quantity {
                Quantity::Needs if side.recording.config.is_none() => {
                    let judgement = self.unjudged("a recorded configuration cannot be replayed");
                    return Ok(DifferenceVerdict { judgement, values: [None; 2], is_count: false });
                }
                Quantity::Needs | Quantity::LeastNeed => side.need.needs_bytes,
                Quantity::LivePeak => Some(side.recording.live_peak_bytes),
                Quantity::Failures => Some(failed_requests(&side.recording)?),
                Quantity::Field => None,
            };
        }
        let is_count = self.quantity == Quantity::Failures;
        if values == [None; 2] {
            let judgement = self.unjudged("no device suffices for either recording");
            return Ok(DifferenceVerdict { judgement, values, is_count });
        }
        // If no device suffices, the need is larger than any bound.
        let [a, b] = values.map(|value| value.unwrap_or(u64::MAX));
        let difference = i128::from(b) - i128::from(a);
        let holds = match self.bound {
            DifferenceBound::Bytes(most) | DifferenceBound::Count(most) => {
                self.operator.holds(difference, i128::from(most))
            }
            DifferenceBound::Percent(percent) => {
                self.operator.holds(difference as f64, a as f64 * percent / 100.0)
            }
        };
        let what = match self.quantity {
            Quantity::Needs | Quantity::LeastNeed => "needs",
            Quantity::LivePeak => "has live bytes of",
            Quantity::Failures | Quantity::Field => "has",
        };
        let shown = |value: Option<u64>| match value {
            Some(count) if is_count => counted_as(count, "failed request", "failed requests"),
            Some(bytes) => format!("{} MiB", tenths(bytes as f64)),
            None => "more than any device".to_owned(),
        };
        let change = match values {
            [Some(a), Some(b)] if !is_count => format!(" ({})", super::super::diff::change([a, b])),
            _ => String::new(),
        };
        let sentence = format!("B {what} {}, A {}{change}.", shown(values[1]), shown(values[0]));
        Ok(DifferenceVerdict { judgement: self.judgement(holds, sentence), values, is_count })
    }
}

/// The judgement for a condition on a difference, and the values.
#[derive(Clone, Debug)]
pub(crate) struct DifferenceVerdict {
    pub(crate) judgement: Judgement,
    /// The values of the two recordings; `None` if no device suffices.
    values: [Option<u64>; 2],
    /// Whether the values are numbers of requests, not bytes.
    is_count: bool,
}

impl DifferenceVerdict {
    pub(crate) fn json(&self) -> Value {
        let bytes = self.values.map(|value| value.filter(|_| !self.is_count));
        let counts = self.values.map(|value| value.filter(|_| self.is_count));
        json!({
            "assertion": self.judgement.condition,
            "holds": self.judgement.outcome.holds(),
            "sentence": self.judgement.sentence,
            "a_bytes": bytes[0],
            "b_bytes": bytes[1],
            "difference_bytes": bytes[0].zip(bytes[1]).map(|(a, b)| difference([a, b])),
            "a_failures": counts[0],
            "b_failures": counts[1],
        })
    }
}
