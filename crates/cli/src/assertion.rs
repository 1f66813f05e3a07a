//! Conditions: `--assert` and `--fits` of `advise`, such as `needs<=24GiB`, and `--assert` of `diff`, such as
//! `needs<=+2%`.

mod difference;

pub(crate) use difference::{DifferenceBound, DifferenceVerdict};

use std::str::FromStr;

use serde_json::{Value, json};

use stratalloc::size::human_bytes;
use stratalloc_analysis::{Answer, Setting, counted_as, fields, near};

use super::outcome::{Outcome, Result};
use super::show::tenths;
use super::size::Amount;

/// A quantity of a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Quantity {
    /// The need under the recorded configuration. Does not depend on a search for settings.
    Needs,
    /// The smallest need among the recorded configuration and the settings that were tried.
    LeastNeed,
    /// The peak of live bytes.
    LivePeak,
    /// The number of requests that got no memory.
    Failures,
    /// A number of the answer's JSON, by its name.
    Field,
}

impl Quantity {
    const NAMES: [(&str, Self); 4] = [
        ("needs", Self::Needs),
        ("least_need", Self::LeastNeed),
        ("live_peak", Self::LivePeak),
        ("failures", Self::Failures),
    ];
    /// The names of the same quantities in the answer's JSON.
    const FIELDS: [(&str, Self); 3] = [
        ("recorded.needs_bytes", Self::Needs),
        ("least_need_bytes", Self::LeastNeed),
        ("live_peak_bytes", Self::LivePeak),
    ];
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operator {
    Less,
    AtMost,
    More,
    AtLeast,
    Equal,
    NotEqual,
}

impl Operator {
    /// The signs; of two with the same beginning, the longer one is first.
    const SIGNS: [(&str, Self); 6] = [
        ("<=", Self::AtMost),
        (">=", Self::AtLeast),
        ("==", Self::Equal),
        ("!=", Self::NotEqual),
        ("<", Self::Less),
        (">", Self::More),
    ];

    fn holds<T: PartialOrd>(self, value: T, bound: T) -> bool {
        match self {
            Self::Less => value < bound,
            Self::AtMost => value <= bound,
            Self::More => value > bound,
            Self::AtLeast => value >= bound,
            Self::Equal => value == bound,
            Self::NotEqual => value != bound,
        }
    }
}

/// A condition on a quantity. The bound is an [`Absolute`] one or a [`DifferenceBound`].
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Condition<B> {
    text: String,
    /// The name of the quantity.
    name: String,
    quantity: Quantity,
    operator: Operator,
    bound: B,
    /// Whether the condition is that of `--fits`, which also requires that no request failed.
    is_fits: bool,
}

/// A condition on a quantity of one recording.
pub(crate) type Assertion = Condition<Absolute>;

/// A bound of a condition.
pub(crate) trait ConditionBound: Clone + Send + Sync + Sized + 'static {
    /// The text of `--assert`.
    const HELP: &str;
    /// Whether the quantity may be any number of the answer's JSON.
    const TAKES_FIELDS: bool;
    /// The names of the quantities, and the bound of a size.
    const EXPECTED: [&str; 2];

    /// Parses the bound of a size.
    fn of_bytes(text: &str) -> Result<Self, String>;

    /// Parses the bound of a number of requests.
    fn of_count(text: &str) -> Result<Self, String>;

    /// Parses the bound of another number.
    fn of_number(text: &str) -> Result<Self, String> {
        Self::of_count(text)
    }
}

/// The bound of a quantity of one recording.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Absolute {
    Size(Amount),
    Count(u64),
    Number(f64),
}

impl ConditionBound for Absolute {
    const HELP: &str = "Check a condition, such as needs<=24GiB, live_peak<20GiB or failures==0. The exit code is 1 if \
        it does not hold. Can be given several times. needs is the need as recorded, least_need the smallest of all \
        settings that are tried, failures the number of failed requests";
    const EXPECTED: [&str; 2] =
        ["needs, least_need, live_peak or failures", "a size, as needs<=24GiB"];
    const TAKES_FIELDS: bool = true;

    fn of_bytes(text: &str) -> Result<Self, String> {
        Amount::parse(text).map(Self::Size)
    }

    fn of_count(text: &str) -> Result<Self, String> {
        let count = text.parse().map_err(|_| "expected a number, as failures==0")?;
        Ok(Self::Count(count))
    }

    fn of_number(text: &str) -> Result<Self, String> {
        let number: Option<f64> = text.parse().ok().filter(|number: &f64| number.is_finite());
        number.map(Self::Number).ok_or_else(|| "expected a number, as best.retries<=10".to_owned())
    }
}

impl<B: ConditionBound> FromStr for Condition<B> {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let [names, bound] = B::EXPECTED;
        let expected = || format!("expected {names}, one of < <= > >=, and {bound}");
        let at = text.find(['<', '>', '=', '!']).ok_or_else(expected)?;
        let (name, rest) = text.split_at(at);
        let name = name.trim();
        let mut named = Quantity::NAMES.iter().filter(|(known, _)| names.contains(known));
        let quantity = named.find(|(known, _)| *known == name).map(|(_, quantity)| *quantity);
        let same = Quantity::FIELDS.iter().find(|(known, _)| B::TAKES_FIELDS && *known == name);
        let quantity = quantity.or(same.map(|(_, quantity)| *quantity));
        let is_field = || B::TAKES_FIELDS && fields().iter().any(|field| field.name == name);
        let quantity = quantity.or_else(|| is_field().then_some(Quantity::Field));
        let quantity = quantity.ok_or_else(expected)?;
        let mut known = Operator::SIGNS.iter();
        let known = known.find_map(|(sign, operator)| Some((operator, rest.strip_prefix(sign)?)));
        let (operator, bound) = known.ok_or_else(expected)?;
        let is_equality = matches!(operator, Operator::Equal | Operator::NotEqual);
        let is_count = match quantity {
            Quantity::Field => !name.ends_with(BYTES),
            _ => quantity == Quantity::Failures,
        };
        let bound = match quantity {
            Quantity::Field if is_count => B::of_number(bound.trim())?,
            _ if is_count => B::of_count(bound.trim())?,
            _ if is_equality => {
                return Err(format!("== and != are for numbers; {}", expected()));
            }
            _ => B::of_bytes(bound.trim())?,
        };
        let (text, name) = (text.to_owned(), name.to_owned());
        Ok(Self { text, name, quantity, operator: *operator, bound, is_fits: false })
    }
}

/// The end of the names of numbers that are in bytes.
const BYTES: &str = "_bytes";

/// Parses the size of `--fits`: `--fits 24GiB` is `needs<=24GiB` and, if requests failed, `failures==0`.
pub(crate) fn fits(size: &str) -> Result<Assertion, String> {
    let condition: Assertion = format!("needs<={size}").parse()?;
    Ok(Condition { is_fits: true, ..condition })
}

/// Whether a condition holds, and why.
#[derive(Clone, Debug, Default)]
pub(crate) struct Judgement {
    /// The condition, as the user gave it.
    pub(crate) condition: String,
    pub(crate) outcome: Outcome,
    /// The figures, or the reason why the condition cannot be judged.
    pub(crate) sentence: String,
}

impl Judgement {
    /// Returns the answer for a condition that cannot be judged. `why` is a clause without a full stop.
    pub(crate) fn unjudged(condition: &str, why: &str) -> Self {
        let sentence = format!("It cannot be judged: {why}.");
        Self { condition: condition.to_owned(), outcome: Outcome::Unjudged, sentence }
    }
}

/// The judgement for a condition on one recording.
#[derive(Clone, Debug, Default)]
pub(crate) struct AssertionVerdict {
    pub(crate) judgement: Judgement,
    /// The value of a quantity in bytes; `None` if no device suffices.
    value_bytes: Option<u64>,
    /// The value of `failures`.
    failures: Option<u64>,
    /// The value of a number that has no name of its own.
    value: Option<f64>,
    /// If the condition is an upper bound of a need: the cheapest setting that needs no more, if one was
    /// found.
    setting: Option<Setting>,
    is_recorded: bool,
}

impl<B> Condition<B> {
    /// Returns the answer if the condition cannot be judged. `why` is a clause without a full stop.
    pub(crate) fn unjudged(&self, why: &str) -> Judgement {
        Judgement::unjudged(&self.text, why)
    }

    fn judgement(&self, holds: bool, sentence: String) -> Judgement {
        let sentence = format!("{}: {sentence}", if holds { "Yes" } else { "No" });
        Judgement { condition: self.text.clone(), outcome: Outcome::of(holds), sentence }
    }
}

impl Assertion {
    /// Returns the largest need that meets an upper bound of a need, in bytes. `None` for other conditions,
    /// and if the bound is not known.
    pub(crate) fn most_bytes(&self, total_bytes: Option<u64>) -> Option<u64> {
        let Absolute::Size(amount) = self.bound else { return None };
        match (self.quantity, self.operator) {
            (Quantity::LivePeak | Quantity::Failures | Quantity::Field, _) => None,
            (_, Operator::AtMost) => amount.bytes(total_bytes).ok(),
            (_, Operator::Less) => Some(amount.bytes(total_bytes).ok()?.saturating_sub(1)),
            _ => None,
        }
    }

    /// Returns the bytes such that if the recorded configuration needs at most these, no other setting
    /// must be tried. `None` if all must be.
    pub(crate) fn enough_bytes(&self, total_bytes: Option<u64>) -> Option<u64> {
        let is_searched = matches!(self.quantity, Quantity::LeastNeed | Quantity::Field);
        self.most_bytes(total_bytes).or((!is_searched).then_some(u64::MAX))
    }

    /// Checks the condition. `setting` is the cheapest one that meets an upper bound of a need.
    pub(crate) fn check(
        &self,
        found: &Answer,
        total_bytes: Option<u64>,
        setting: Option<Setting>,
    ) -> AssertionVerdict {
        let unjudged = |why: &str| AssertionVerdict {
            judgement: self.unjudged(why),
            ..AssertionVerdict::default()
        };
        if let Some(no_history) = found.no_history {
            return unjudged(&no_history.to_string());
        }
        let bound = match self.bound {
            Absolute::Size(amount) => match amount.bytes(total_bytes) {
                Ok(bound) => bound,
                Err(why) => return unjudged(&why),
            },
            Absolute::Count(count) => count,
            Absolute::Number(number) => return self.check_field(number, found),
        };
        match self.quantity {
            Quantity::Needs if found.recorded.is_default_instead => {
                unjudged("the recorded configuration cannot be replayed")
            }
            Quantity::Needs => {
                let verdict = self.check_needs(bound, total_bytes, found, setting);
                match self.is_fits && verdict.judgement.outcome == Outcome::Good {
                    true => without_failures(found).unwrap_or(verdict),
                    false => verdict,
                }
            }
            Quantity::LeastNeed => self.check_least_need(bound, total_bytes, found, setting),
            Quantity::LivePeak => self.check_live_peak(bound, found),
            Quantity::Failures => self.check_failures(bound, found),
            Quantity::Field => self.check_field(bound as f64, found),
        }
    }

    /// Checks a condition on any number of the answer.
    fn check_field(&self, bound: f64, found: &Answer) -> AssertionVerdict {
        let place = format!("/{}", self.name.replace('.', "/"));
        let value = json!(found).pointer(&place).and_then(Value::as_f64);
        let Some(value) = value else {
            let why = format!("{} is not known for this recording", self.name);
            return AssertionVerdict {
                judgement: self.unjudged(&why),
                ..AssertionVerdict::default()
            };
        };
        let is_bytes = self.name.ends_with(BYTES);
        let shown = if is_bytes { format!("{} MiB", tenths(value)) } else { value.to_string() };
        let sentence = format!("{} is {shown}.", self.name);
        let judgement = self.judgement(self.operator.holds(value, bound), sentence);
        AssertionVerdict { judgement, value: Some(value), ..AssertionVerdict::default() }
    }

    fn check_live_peak(&self, bound: u64, found: &Answer) -> AssertionVerdict {
        let value = found.live_peak_bytes.unwrap_or(0);
        let sentence = format!("{} MiB are live at once.", tenths(value as f64));
        let judgement = self.judgement(self.operator.holds(value, bound), sentence);
        AssertionVerdict { judgement, value_bytes: Some(value), ..AssertionVerdict::default() }
    }

    fn check_failures(&self, bound: u64, found: &Answer) -> AssertionVerdict {
        let count = found.failures.unwrap_or(0);
        let requests = match count {
            0 => "no request".to_owned(),
            count => counted_as(count, "request", "requests"),
        };
        let limit = found
            .limit
            .known_bytes()
            .map(|bytes| format!(", under the limit of {} MiB", near(bytes)));
        let limit = limit.unwrap_or_default();
        let sentence = match found.failures_are_replayed && found.limit.limit_bytes.is_some() {
            true => format!("{requests} would fail{limit} that is set."),
            false if found.failures_are_replayed => {
                format!("{requests} would fail without the limit.")
            }
            false => format!("{requests} failed when it was recorded{limit}."),
        };
        let judgement = self.judgement(self.operator.holds(count, bound), sentence);
        AssertionVerdict { judgement, failures: Some(count), ..AssertionVerdict::default() }
    }

    fn check_needs(
        &self,
        bound: u64,
        total_bytes: Option<u64>,
        found: &Answer,
        setting: Option<Setting>,
    ) -> AssertionVerdict {
        let value_bytes = found.recorded.needs_bytes;
        // If no device suffices, the need is larger than any bound.
        let holds = self.operator.holds(value_bytes.unwrap_or(u64::MAX), bound);
        let (size, as_it_is) = (human_bytes(bound), as_it_is(found));
        let sentence = match (&setting, self.most_bytes(total_bytes)) {
            (_, None) => format!("{as_it_is}."),
            (Some(_), _) if holds => format!("{as_it_is}; {size} suffice."),
            (Some(setting), _) => format!(
                "{as_it_is}; with {} it needs {} MiB and would fit in {size}.",
                setting.paste_text(),
                setting.needs_in_mib()
            ),
            (None, _) => format!("{as_it_is}. {}", least_of(found)),
        };
        let judgement = self.judgement(holds, sentence);
        let is_recorded = holds && setting.is_some();
        AssertionVerdict {
            judgement,
            value_bytes,
            setting,
            is_recorded,
            ..AssertionVerdict::default()
        }
    }

    fn check_least_need(
        &self,
        bound: u64,
        total_bytes: Option<u64>,
        found: &Answer,
        setting: Option<Setting>,
    ) -> AssertionVerdict {
        let value_bytes = found.least_need_bytes;
        let holds = match self.most_bytes(total_bytes) {
            Some(_) => setting.is_some(),
            None => self.operator.holds(value_bytes.unwrap_or(u64::MAX), bound),
        };
        let recorded = found.recorded.replayed.as_ref();
        let is_recorded = setting.as_ref().zip(recorded).is_some_and(|(a, b)| a.conf == b.conf);
        let (size, as_it_is) = (human_bytes(bound), as_it_is(found));
        let sentence = match &setting {
            Some(_) if is_recorded => format!("{as_it_is}; {size} suffice."),
            Some(setting) => format!(
                "with {} the recording needs {} MiB; {size} suffice. But {as_it_is}.",
                setting.paste_text(),
                setting.needs_in_mib()
            ),
            None => format!("{as_it_is}. {}", least_of(found)),
        };
        let judgement = self.judgement(holds, sentence);
        AssertionVerdict {
            judgement,
            value_bytes,
            setting,
            is_recorded,
            ..AssertionVerdict::default()
        }
    }
}

/// Returns the judgement of `--fits` for a recording in which requests failed, although its need is small
/// enough: its program fails as it is. `None` if no request failed.
fn without_failures(found: &Answer) -> Option<AssertionVerdict> {
    let condition: Assertion = "failures==0".parse().ok()?;
    let mut verdict = condition.check_failures(0, found);
    if found.limit.known_bytes().is_some() && !found.failures_are_replayed {
        let hint = " Without that limit it would fit: --memory-fraction 1 sets the limit aside.";
        verdict.judgement.sentence += hint;
    }
    Some(verdict).filter(|verdict| verdict.judgement.outcome != Outcome::Good)
}

/// Returns the need under the recorded configuration as a clause.
fn as_it_is(found: &Answer) -> String {
    match &found.recorded.replayed {
        Some(setting) if setting.needs_bytes.is_some() => {
            format!("the recording needs {} MiB as it is", setting.needs_in_mib())
        }
        _ => "no device suffices for the recording as it is".to_owned(),
    }
}

/// Returns the least need of the settings that were tried, as a sentence.
fn least_of(found: &Answer) -> String {
    let tried = counted_as(found.searched_count() as u64, "setting", "settings");
    let least = match found.least_need_bytes {
        Some(least) => {
            format!("The least need of {tried} that were searched is {} MiB", tenths(least as f64))
        }
        None => format!("No device suffices for any of {tried} that were searched"),
    };
    let live = tenths(found.live_peak_bytes.unwrap_or(0) as f64);
    format!("{least}, and the live bytes alone take {live} MiB.")
}

impl AssertionVerdict {
    pub(crate) fn json(&self) -> Value {
        let setting = self.setting.as_ref();
        json!({
            "assertion": self.judgement.condition,
            "holds": self.judgement.outcome.holds(),
            "sentence": self.judgement.sentence,
            "value_bytes": self.value_bytes,
            "failures": self.failures,
            "value": self.value,
            "conf": setting.map(|setting| &setting.conf),
            "paste": setting.filter(|_| !self.is_recorded).map(|setting| &setting.paste),
            "is_recorded": self.is_recorded,
            "needs_bytes": setting.and_then(|setting| setting.needs_bytes),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn assertions_have_a_quantity_an_operator_and_a_size() {
        let gib = |gib: u64| Absolute::Size(Amount::Bytes(gib << 30));
        let parsed: Assertion = "needs<=24GiB".parse().unwrap();
        let of_fits = fits("24GiB").unwrap();
        assert_eq!(of_fits, Condition { is_fits: true, ..parsed.clone() });
        assert_eq!(fits("24 gb").unwrap().bound, of_fits.bound);
        assert_eq!((parsed.operator, parsed.bound), (Operator::AtMost, gib(24)));
        let parsed: Assertion = "failures == 0".parse().unwrap();
        assert_eq!((parsed.quantity, parsed.operator), (Quantity::Failures, Operator::Equal));
        assert_eq!(parsed.bound, Absolute::Count(0));
        let parsed: Assertion = "least_need<80%".parse().unwrap();
        assert_eq!(parsed.bound, Absolute::Size(Amount::Percent(80.0)));
        let parsed: Assertion = "live_peak > 512MiB".parse().unwrap();
        assert_eq!((parsed.quantity, parsed.operator), (Quantity::LivePeak, Operator::More));
        assert_eq!(parsed.bound, Absolute::Size(Amount::Bytes(512 << 20)));
        let wrong = "needs, needs=24GiB, needs==24GiB, need<=24GiB, needs<=24, needs<=, <=1GiB, failures=0, \
                     failures<=1GiB";
        for wrong in wrong.split(", ").chain([""]) {
            assert!(wrong.parse::<Assertion>().is_err(), "{wrong}");
        }
        assert!(fits("much").is_err());
    }

    #[test]
    fn conditions_on_differences_have_a_sign_and_a_size_or_a_percentage() {
        let bound =
            |text: &str| text.parse::<Condition<DifferenceBound>>().map(|parsed| parsed.bound);
        assert_eq!(bound("live_peak<=+2%"), Ok(DifferenceBound::Percent(2.0)));
        assert_eq!(bound("needs < -0.5%"), Ok(DifferenceBound::Percent(-0.5)));
        assert_eq!(bound("needs<=+1GiB"), Ok(DifferenceBound::Bytes(1 << 30)));
        assert_eq!(bound("needs<=+0"), Ok(DifferenceBound::Bytes(0)));
        assert_eq!(bound("needs>=-512MiB"), Ok(DifferenceBound::Bytes(-512 << 20)));
        assert_eq!(bound("failures<=+0"), Ok(DifferenceBound::Count(0)));
        for wrong in [
            "failures<=0",
            "failures<=+1GiB",
            "least_need<=+1GiB",
            "needs==+0",
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
