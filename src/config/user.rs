//! Keys of user-defined strategies. They are declared once, and then parsed as strictly as built-in
//! keys.
//!
//! A key has a name, a range of values and a meaning. Its value is kept as text, and the strategy
//! interprets it ([`Settings::user_value`](super::Settings::user_value)). A value outside the range is
//! a [`ConfigError`](super::ConfigError) with its position.

use std::fmt;
use std::ops::RangeInclusive;
use std::sync::Arc;

/// Returns whether a value is accepted. Receives the value as written.
type Check = Arc<dyn Fn(&str) -> bool + Send + Sync>;

/// One key of a user-defined strategy.
#[derive(Clone)]
pub struct UserKey {
    name: String,
    range: String,
    meaning: String,
    /// The strategy that registered the key, if any.
    owner: Option<String>,
    accepts_lists: bool,
    check: Check,
}

impl UserKey {
    fn new(
        name: impl Into<String>,
        range: impl Into<String>,
        meaning: impl Into<String>,
        check: impl Fn(&str) -> bool + Send + Sync + 'static,
    ) -> Self {
        Self {
            name: name.into(),
            range: range.into(),
            meaning: meaning.into(),
            owner: None,
            accepts_lists: false,
            check: Arc::new(check),
        }
    }

    /// Declares a key that accepts `True` and `False`, in upper or lower case.
    #[must_use]
    pub fn flag(name: impl Into<String>, meaning: impl Into<String>) -> Self {
        let check =
            |text: &str| ["true", "false"].iter().any(|word| text.eq_ignore_ascii_case(word));
        Self::new(name, "True or False", meaning, check)
    }

    /// Declares a key that accepts a whole number, written in digits only.
    #[must_use]
    pub fn whole(
        name: impl Into<String>,
        legal: RangeInclusive<u64>,
        meaning: impl Into<String>,
    ) -> Self {
        let range = format!("a whole number from {} to {}", legal.start(), legal.end());
        Self::new(name, range, meaning, move |text| {
            let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            digits && text.parse().is_ok_and(|number| legal.contains(&number))
        })
    }

    /// Declares a key that accepts a number, with or without a fraction.
    #[must_use]
    pub fn number(
        name: impl Into<String>,
        legal: RangeInclusive<f64>,
        meaning: impl Into<String>,
    ) -> Self {
        let range = format!("a number from {} to {}", legal.start(), legal.end());
        Self::new(name, range, meaning, move |text| {
            text.parse().is_ok_and(|number: f64| legal.contains(&number))
        })
    }

    /// Declares a key that accepts one of these words.
    #[must_use]
    pub fn one_of(name: impl Into<String>, words: &[&str], meaning: impl Into<String>) -> Self {
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        let range = words.join(" or ");
        Self::new(name, range, meaning, move |text| words.iter().any(|word| word == text))
    }

    /// Declares a key that accepts a word or a bracketed list for which `check` returns true. `range`
    /// describes these values in errors.
    ///
    /// `check` receives the value as written, without the quotes around a word.
    #[must_use]
    pub fn checked(
        name: impl Into<String>,
        range: impl Into<String>,
        meaning: impl Into<String>,
        check: impl Fn(&str) -> bool + Send + Sync + 'static,
    ) -> Self {
        Self { accepts_lists: true, ..Self::new(name, range, meaning, check) }
    }

    /// Declares a key that accepts any word or list.
    #[must_use]
    pub fn anything(name: impl Into<String>, meaning: impl Into<String>) -> Self {
        Self::checked(name, "a value", meaning, |_| true)
    }

    /// Sets the strategy that the key belongs to.
    #[must_use]
    pub(crate) fn owned_by(mut self, strategy: &str) -> Self {
        self.owner = Some(strategy.to_owned());
        self
    }

    /// Returns the name of the key.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns a description of the values that the key accepts.
    #[must_use]
    pub fn range(&self) -> &str {
        &self.range
    }

    /// Returns the meaning of the key, in one line.
    #[must_use]
    pub fn meaning(&self) -> &str {
        &self.meaning
    }

    /// Returns the strategy that registered the key.
    #[must_use]
    pub fn owner(&self) -> Option<&str> {
        self.owner.as_deref()
    }

    pub(super) fn accepts(&self, text: &str, is_list: bool) -> bool {
        (self.accepts_lists || !is_list) && (self.check)(text)
    }
}

impl fmt::Debug for UserKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, range, owner, .. } = self;
        f.debug_struct("UserKey")
            .field("name", name)
            .field("range", range)
            .field("owner", owner)
            .finish_non_exhaustive()
    }
}
