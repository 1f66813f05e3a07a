//! Conditions on the need of a recording, such as `needs<=24GiB`: `--assert` and `--fits` of `advise`.

use std::str::FromStr;

use serde_json::{Value, json};

use crate::analysis::{Advice, Recording, Tried, counted_as};
use stratalloc::config::Size;
use stratalloc::size::human_bytes;

use super::outcome::Result;
use super::show::mib;

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
    fn holds(self, value: u64, bytes: u64) -> bool {
        match self {
            Self::Less => value < bytes,
            Self::AtMost => value <= bytes,
            Self::More => value > bytes,
            Self::AtLeast => value >= bytes,
        }
    }
}

/// A condition on a quantity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Assertion {
    text: String,
    quantity: Quantity,
    operator: Operator,
    bytes: u64,
}

const EXPECTED: &str = "expected needs or live_peak, one of < <= > >=, and a size, as needs<=24GiB";

impl FromStr for Assertion {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let at = text.find(['<', '>']).ok_or(EXPECTED)?;
        let (name, rest) = text.split_at(at);
        let quantity = match name.trim() {
            "needs" => Quantity::Needs,
            "live_peak" => Quantity::LivePeak,
            _ => return Err(EXPECTED.to_owned()),
        };
        let operators = [
            ("<=", Operator::AtMost),
            (">=", Operator::AtLeast),
            ("<", Operator::Less),
            (">", Operator::More),
        ];
        let known = operators.into_iter().find_map(|(sign, operator)| {
            rest.strip_prefix(sign).map(|size| (operator, size.trim()))
        });
        let (operator, size) = known.ok_or(EXPECTED)?;
        let bytes = Size::in_bytes(size).map_err(|error| error.to_string())?;
        Ok(Self { text: text.to_owned(), quantity, operator, bytes })
    }
}

/// Parses the size of `--fits`: `--fits 24GiB` is the same as `--assert "needs<=24GiB"`.
pub(crate) fn fits(size: &str) -> Result<Assertion, String> {
    format!("needs<={size}").parse()
}

/// Whether a condition holds, and why.
#[derive(Clone, Debug, Default)]
pub(crate) struct Verdict {
    text: String,
    pub(crate) holds: bool,
    value_bytes: Option<u64>,
    /// If the condition is an upper bound of the need: the cheapest setting with which the condition
    /// holds.
    pub(crate) setting: Option<Tried>,
    is_recorded: bool,
    pub(crate) sentence: String,
}

impl Assertion {
    /// Returns the bytes such that if the recorded configuration needs at most these, no other setting
    /// must be tried.
    pub(crate) fn enough_bytes(&self) -> Option<u64> {
        match (self.quantity, self.operator) {
            (Quantity::LivePeak, _) => Some(u64::MAX),
            (Quantity::Needs, Operator::AtMost) => Some(self.bytes),
            (Quantity::Needs, Operator::Less) => Some(self.bytes.saturating_sub(1)),
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
        let holds = self.operator.holds(value, self.bytes);
        let sentence = format!("{}: {} MiB are live at once.", yes(holds), mib(value as f64));
        let (text, value_bytes) = (self.text.clone(), Some(value));
        Verdict { text, holds, value_bytes, sentence, ..Verdict::default() }
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
            None => self.operator.holds(value_bytes.unwrap_or(u64::MAX), self.bytes),
        };
        let is_recorded = setting.as_ref().is_some_and(|tried| tried.conf == advice.recorded.conf);
        let tried = counted_as(advice.tried.len() as u64, "setting", "settings");
        let size = human_bytes(self.bytes);
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
        Ok(Verdict { text: self.text.clone(), holds, value_bytes, setting, is_recorded, sentence })
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
            "assertion": self.text,
            "holds": self.holds,
            "value_bytes": self.value_bytes,
            "conf": self.setting.as_ref().map(|tried| &tried.conf),
            "is_recorded": self.is_recorded,
            "needs_bytes": self.setting.as_ref().and_then(|tried| tried.need.needs_bytes),
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
        assert_eq!((parsed.operator, parsed.bytes), (Operator::AtMost, 24 << 30));
        let parsed: Assertion = "live_peak > 512MiB".parse().unwrap();
        assert_eq!((parsed.quantity, parsed.operator), (Quantity::LivePeak, Operator::More));
        assert_eq!(parsed.bytes, 512 << 20);
        for wrong in ["", "needs", "needs=24GiB", "need<=24GiB", "needs<=24GB", "needs<=", "<=1GiB"]
        {
            assert!(wrong.parse::<Assertion>().is_err(), "{wrong}");
        }
        assert!(fits("much").is_err());
    }
}
