//! Every key, its value, where it came from, and what to know about it.

use super::keys::{Key, is_built_in};
use super::rows::BUILT_IN;
use super::settings::Settings;
use super::versions::TorchVersion;
use super::{Config, KeyTable, Origin};

/// One line of an explanation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExplainRow {
    /// The key.
    pub key: String,
    /// Its value in the syntax of the string.
    pub value: String,
    /// Where it came from.
    pub origin: Origin,
    /// What it does, and why it does nothing here if that is so.
    pub note: String,
    /// Why it does nothing here, though it is said.
    pub idle: Option<String>,
    /// The first version of PyTorch that accepts the key; 2.1 if an older one does. `None` if PyTorch has no
    /// such key.
    pub since: Option<TorchVersion>,
}

impl ExplainRow {
    fn new(key: &str, value: String, origin: Origin, meaning: &str, idle: Option<String>) -> Self {
        let why = idle.as_ref().map(|why| format!(" - not in effect as such: {why}"));
        let note = format!("{meaning}{}", why.unwrap_or_default());
        Self { key: key.to_owned(), value, origin, note, idle, since: None }
    }
}

impl Config {
    /// Every built-in key with its value, and users' keys that the text says.
    #[must_use]
    pub fn explain(&self) -> Vec<ExplainRow> {
        self.explain_with(&KeyTable::default())
    }

    /// Every key of the table with its value, what it means, and why it does nothing here if that is
    /// so.
    #[must_use]
    pub fn explain_with(&self, table: &KeyTable) -> Vec<ExplainRow> {
        let settings = &self.settings;
        let built_in = BUILT_IN.iter().map(|key| {
            let (value, origin) = ((key.show)(settings), self.origin(key.name));
            let once = if key.is_fixed { "; read once, when an allocator is built" } else { "" };
            let meaning = format!("{}{once}", key.meaning);
            let row = ExplainRow::new(key.name, value, origin, &meaning, idle(settings, key));
            ExplainRow { since: key.since, ..row }
        });
        let declared = table.extra().iter().map(|key| {
            let value = settings.user_value(key.name());
            let idle = value.and(key.owner()).filter(|owner| *owner != settings.backend);
            let idle = idle.map(|owner| format!("backend:{owner} only"));
            let (value, origin) = (value.unwrap_or("unset").to_owned(), self.origin(key.name()));
            ExplainRow::new(key.name(), value, origin, key.meaning(), idle)
        });
        let undeclared = settings.extra.iter().filter(|(key, _)| !table.knows(key));
        let undeclared = undeclared.map(|(key, value)| {
            let meaning = "handed to the strategy that knows it";
            ExplainRow::new(key, value.clone(), self.origin(key), meaning, None)
        });
        built_in.chain(declared).chain(undeclared).collect()
    }

    /// A string that says the same; what it does not mention has its default.
    #[must_use]
    pub fn to_text(&self) -> String {
        self.to_text_over(&Settings::default())
    }

    /// The same for a reader with these defaults.
    pub(crate) fn to_text_over(&self, defaults: &Settings) -> String {
        let told = BUILT_IN.iter().filter(|key| (key.differs)(&self.settings, defaults));
        let mut parts: Vec<String> =
            told.map(|key| format!("{}:{}", key.name, (key.show)(&self.settings))).collect();
        parts.extend(self.settings.extra.iter().map(|(key, value)| {
            // Only a list can hold a quote. Everything else is said as a word: a word may look like
            // a list, and be no list that is closed.
            if value.contains('"') {
                format!("{key}:{value}")
            } else {
                format!("{key}:\"{value}\"")
            }
        }));
        parts.join(",")
    }
}

/// Why a key that is set has no effect here.
fn idle(settings: &Settings, key: &Key) -> Option<String> {
    if (key.show)(settings) == (key.show)(&Settings::default()) {
        return None;
    }
    let backend = settings.backend.as_str();
    if key.backends.is_empty() || key.backends.contains(&backend) {
        return (key.idle)(settings).map(str::to_owned);
    }
    if !is_built_in(backend) {
        return Some("as its strategy reads it".to_owned());
    }
    let own: Vec<_> = key.backends.iter().map(|name| format!("backend:{name}")).collect();
    Some(format!("{} only", own.join(" and ")))
}
