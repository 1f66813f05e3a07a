//! Conditions: `--assert` and `--fits` of `advise`, such as `needs<=24GiB`, and `--assert` of `diff`, such as
//! `needs<=+2%`.

use std::str::FromStr;

use serde_json::{Value, json};

use crate::analysis::{Advice, Diff, Recording, Tried, counted_as, difference};
use stratalloc::size::human_bytes;

use super::outcome::{Outcome, Result};
use super::show::mib;
use super::size::{percent, size};

/// A quantity of a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Quantity {
    /// The smallest need among the recorded configuration and the settings that were tried.
    Needs,
    /// The peak of live bytes.
    LivePeak,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operator {
    Less,
    AtMost,
    More,
    AtLeast,
}

impl Operator {
    fn holds<T: PartialOrd>(self, value: T, bound: T) -> bool {
        match self {
            Self::Less => value < bound,
            Self::AtMost => value <= bound,
            Self::More => value > bound,
            Self::AtLeast => value >= bound,
        }
    }
}

/// A condition on a quantity. The bound is a size or a [`Difference`].
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Condition<B> {
    text: String,
    quantity: Quantity,
    operator: Operator,
    bound: B,
}

/// A condition on a quantity of one recording.
pub(crate) type Assertion = Condition<u64>;

/// A bound of a condition.
pub(crate) trait Bound: Sized {
    /// The end of the message for a text that is not a condition.
    const EXPECTED: &str;

    fn parse(text: &str) -> Result<Self, String>;
}

impl Bound for u64 {
    const EXPECTED: &str = "a size, as needs<=24GiB";

    fn parse(text: &str) -> Result<Self, String> {
        size(text)
    }
}

impl<B: Bound> FromStr for Condition<B> {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let expected =
            || format!("expected needs or live_peak, one of < <= > >=, and {}", B::EXPECTED);
        let at = text.find(['<', '>']).ok_or_else(expected)?;
        let (name, rest) = text.split_at(at);
        let quantity = match name.trim() {
            "needs" => Quantity::Needs,
            "live_peak" => Quantity::LivePeak,
            _ => return Err(expected()),
        };
        let operators = [
            ("<=", Operator::AtMost),
            (">=", Operator::AtLeast),
            ("<", Operator::Less),
            (">", Operator::More),
        ];
        let known = operators.into_iter().find_map(|(sign, operator)| {
            rest.strip_prefix(sign).map(|bound| (operator, bound.trim()))
        });
        let (operator, bound) = known.ok_or_else(expected)?;
        Ok(Self { text: text.to_owned(), quantity, operator, bound: B::parse(bound)? })
    }
}

/// Parses the size of `--fits`: `--fits 24GiB` is the same as `--assert "needs<=24GiB"`.
pub(crate) fn fits(size: &str) -> Result<Assertion, String> {
    format!("needs<={size}").parse()
}

/// Whether a condition holds, and why.
#[derive(Clone, Debug, Default)]
pub(crate) struct Answer {
    /// The condition, as the user gave it.
    pub(crate) condition: String,
    pub(crate) outcome: Outcome,
    /// The figures, or the reason why the condition cannot be judged.
    pub(crate) sentence: String,
}

impl Answer {
    /// Returns the answer for a condition that cannot be judged. `why` is a clause without a full stop.
    pub(crate) fn unjudged(condition: &str, why: &str) -> Self {
        let sentence = format!("It cannot be judged: {why}.");
        Self { condition: condition.to_owned(), outcome: Outcome::Unjudged, sentence }
    }
}

/// The answer for a condition on one recording.
#[derive(Clone, Debug, Default)]
pub(crate) struct Verdict {
    pub(crate) answer: Answer,
    value_bytes: Option<u64>,
    /// If the condition is an upper bound of the need: the cheapest setting with which the condition
    /// holds.
    pub(crate) setting: Option<Tried>,
    is_recorded: bool,
}

impl<B> Condition<B> {
    /// Returns the answer if the condition cannot be judged. `why` is a clause without a full stop.
    pub(crate) fn unjudged(&self, why: &str) -> Answer {
        Answer::unjudged(&self.text, why)
    }

    fn answer(&self, holds: bool, sentence: String) -> Answer {
        Answer { condition: self.text.clone(), outcome: Outcome::of(holds), sentence }
    }
}

impl Assertion {
    /// Returns the bytes such that if the recorded configuration needs at most these, no other setting
    /// must be tried.
    pub(crate) fn enough_bytes(&self) -> Option<u64> {
        match (self.quantity, self.operator) {
            (Quantity::LivePeak, _) => Some(u64::MAX),
            (Quantity::Needs, Operator::AtMost) => Some(self.bound),
            (Quantity::Needs, Operator::Less) => Some(self.bound.saturating_sub(1)),
            (Quantity::Needs, Operator::More | Operator::AtLeast) => None,
        }
    }

    /// Checks the condition.
    pub(crate) fn check(&self, recording: &Recording, advice: &mut Advice) -> Result<Verdict> {
        match self.quantity {
            Quantity::LivePeak => Ok(self.check_live_peak(recording)),
            Quantity::Needs => self.check_needs(recording, advice),
        }
    }

    fn check_live_peak(&self, recording: &Recording) -> Verdict {
        let value = recording.live_peak_bytes;
        let holds = self.operator.holds(value, self.bound);
        let sentence = format!("{}: {} MiB are live at once.", yes(holds), mib(value as f64));
        let answer = self.answer(holds, sentence);
        Verdict { answer, value_bytes: Some(value), ..Verdict::default() }
    }

    fn check_needs(&self, recording: &Recording, advice: &mut Advice) -> Result<Verdict> {
        let setting = match self.enough_bytes() {
            Some(bytes) => advice.cheapest_within(recording, bytes)?,
            None => None,
        };
        let value_bytes = advice.best().and_then(|tried| tried.need.needs_bytes);
        let holds = match self.enough_bytes() {
            Some(_) => setting.is_some(),
            // No device suffices, so the need is larger than any bound.
            None => self.operator.holds(value_bytes.unwrap_or(u64::MAX), self.bound),
        };
        let is_recorded = setting.as_ref().is_some_and(|tried| tried.conf == advice.recorded.conf);
        let tried = counted_as(advice.tried.len() as u64, "setting", "settings");
        let size = human_bytes(self.bound);
        let needs = |tried: &Tried| tried.need.in_mib();
        let sentence = match (&setting, value_bytes) {
            (Some(setting), _) if is_recorded => {
                format!("Yes: the recording needs {} MiB as it is; {size} suffice.", needs(setting))
            }
            (Some(setting), _) => format!(
                "Yes: with the setting below the recording needs {} MiB; {size} suffice. As it is, it needs \
                 {} MiB.",
                needs(setting),
                needs(&advice.recorded)
            ),
            (None, Some(least)) => format!(
                "{}: the least need of {tried} that were searched is {} MiB, and the live bytes alone take {} MiB.",
                yes(holds),
                mib(least as f64),
                mib(recording.live_peak_bytes as f64)
            ),
            (None, None) => format!("{}: no device suffices for {tried}.", yes(holds)),
        };
        let answer = self.answer(holds, sentence);
        Ok(Verdict { answer, value_bytes, setting, is_recorded })
    }
}

fn yes(holds: bool) -> &'static str {
    if holds { "Yes" } else { "No" }
}

impl Verdict {
    /// Returns the setting that meets the condition, if it is not the recorded one.
    pub(crate) fn to_set(&self) -> Option<&Tried> {
        self.setting.as_ref().filter(|_| !self.is_recorded)
    }

    pub(crate) fn json(&self) -> Value {
        json!({
            "assertion": self.answer.condition,
            "holds": self.answer.outcome.holds(),
            "value_bytes": self.value_bytes,
            "conf": self.setting.as_ref().map(|tried| &tried.conf),
            "is_recorded": self.is_recorded,
            "needs_bytes": self.setting.as_ref().and_then(|tried| tried.need.needs_bytes),
        })
    }
}

/// The difference of a quantity between two recordings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Difference {
    Bytes(i64),
    /// A percentage of the first recording's value.
    Percent(f64),
}

impl Bound for Difference {
    const EXPECTED: &str = "a difference with its sign, as needs<=+1GiB or live_peak<=+2%";

    fn parse(text: &str) -> Result<Self, String> {
        let expected = || format!("expected {}", Self::EXPECTED);
        let (is_negative, rest) = match (text.strip_prefix('+'), text.strip_prefix('-')) {
            (Some(rest), _) => (false, rest),
            (_, Some(rest)) => (true, rest),
            _ => return Err(expected()),
        };
        if let Some(number) = rest.strip_suffix('%') {
            let percent = percent(number).ok_or_else(expected)?;
            return Ok(Self::Percent(if is_negative { -percent } else { percent }));
        }
        let bytes = if rest == "0" { 0 } else { size(rest)? };
        let bytes = i64::try_from(bytes).map_err(|_| expected())?;
        Ok(Self::Bytes(if is_negative { -bytes } else { bytes }))
    }
}

impl Condition<Difference> {
    /// Checks the condition on the difference between the second recording and the first.
    pub(crate) fn check_difference(&self, diff: &Diff<'_>) -> DifferenceVerdict {
        let values = diff.sides().map(|side| match self.quantity {
            Quantity::Needs => side.need.needs_bytes,
            Quantity::LivePeak => Some(side.recording.live_peak_bytes),
        });
        // If no device suffices, the need is larger than any bound.
        let [a, b] = values.map(|value| value.unwrap_or(u64::MAX));
        let difference = i128::from(b) - i128::from(a);
        let holds = match self.bound {
            Difference::Bytes(bytes) => self.operator.holds(difference, i128::from(bytes)),
            Difference::Percent(percent) => {
                self.operator.holds(difference as f64, a as f64 * percent / 100.0)
            }
        };
        let what = match self.quantity {
            Quantity::Needs => "needs",
            Quantity::LivePeak => "has live bytes of",
        };
        let mib = |value: Option<u64>| match value {
            Some(bytes) => format!("{} MiB", mib(bytes as f64)),
            None => "more than any device".to_owned(),
        };
        let change = match values {
            [Some(a), Some(b)] => format!(" ({})", super::diff::change([a, b])),
            _ => String::new(),
        };
        let sentence =
            format!("{}: B {what} {}, A {}{change}.", yes(holds), mib(values[1]), mib(values[0]));
        DifferenceVerdict { answer: self.answer(holds, sentence), values }
    }
}

/// The answer for a condition on a difference, and the values.
#[derive(Clone, Debug)]
pub(crate) struct DifferenceVerdict {
    pub(crate) answer: Answer,
    /// The values of the two recordings; `None` if no device suffices.
    values: [Option<u64>; 2],
}

impl DifferenceVerdict {
    pub(crate) fn json(&self) -> Value {
        let [a, b] = self.values;
        json!({
            "assertion": self.answer.condition,
            "holds": self.answer.outcome.holds(),
            "a_bytes": a,
            "b_bytes": b,
            "difference_bytes": a.zip(b).map(|(a, b)| difference([a, b])),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn assertions_have_a_quantity_an_operator_and_a_size() {
        let parsed: Assertion = "needs<=24GiB".parse().unwrap();
        assert_eq!(parsed, fits("24GiB").unwrap());
        assert_eq!((parsed.operator, parsed.bound), (Operator::AtMost, 24 << 30));
        let parsed: Assertion = "live_peak > 512MiB".parse().unwrap();
        assert_eq!((parsed.quantity, parsed.operator), (Quantity::LivePeak, Operator::More));
        assert_eq!(parsed.bound, 512 << 20);
        for wrong in ["", "needs", "needs=24GiB", "need<=24GiB", "needs<=24", "needs<=", "<=1GiB"] {
            assert!(wrong.parse::<Assertion>().is_err(), "{wrong}");
        }
        assert!(fits("much").is_err());
    }

    #[test]
    fn conditions_on_differences_have_a_sign_and_a_size_or_a_percentage() {
        let bound = |text: &str| text.parse::<Condition<Difference>>().map(|parsed| parsed.bound);
        assert_eq!(bound("live_peak<=+2%"), Ok(Difference::Percent(2.0)));
        assert_eq!(bound("needs < -0.5%"), Ok(Difference::Percent(-0.5)));
        assert_eq!(bound("needs<=+1GiB"), Ok(Difference::Bytes(1 << 30)));
        assert_eq!(bound("needs<=+0"), Ok(Difference::Bytes(0)));
        assert_eq!(bound("needs>=-512MiB"), Ok(Difference::Bytes(-512 << 20)));
        for wrong in [
            "needs<=1GiB",
            "needs<=2%",
            "needs<=+%",
            "needs<=+inf%",
            "needs<=+-2%",
            "needs<=+1e3%",
            "needs<=+2",
            "needs<=+",
        ] {
            assert!(bound(wrong).is_err(), "{wrong}");
        }
        assert!("needs<=+1GiB".parse::<Assertion>().is_err());
    }
}
