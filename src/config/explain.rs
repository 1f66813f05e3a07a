//! A table of all keys with their values, origins and notes.

use super::keys::{Key, is_built_in};
use super::rows::BUILT_IN;
use super::settings::Settings;
use super::versions::TorchVersion;
use super::{Config, KeyTable, Origin};

/// One row of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExplainRow {
    /// The key.
    pub key: String,
    /// The value, as it is written in a configuration string.
    pub value: String,
    /// The origin of the value.
    pub origin: Origin,
    /// The meaning of the key. Followed by the reason if the key has no effect.
    pub note: String,
    /// The reason why the key is set but has no effect, if so.
    pub idle: Option<String>,
    /// The first version of PyTorch that accepts the key. 2.1 stands for 2.1 or older. `None` if
    /// PyTorch has no such key.
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
    /// Returns a row for each built-in key, and for each user-defined key in the text.
    #[must_use]
    pub fn explain(&self) -> Vec<ExplainRow> {
        self.explain_with(&KeyTable::default())
    }

    /// Returns a row for each key of the table.
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
        let undeclared = settings.extra.iter().filter(|(key, _)| !table.contains(key));
        let undeclared = undeclared.map(|(key, value)| {
            let meaning = "passed to the strategy that declares it";
            ExplainRow::new(key, value.clone(), self.origin(key), meaning, None)
        });
        built_in.chain(declared).chain(undeclared).collect()
    }

    /// Returns a configuration string with the same meaning. Keys with default values are left out.
    #[must_use]
    pub fn to_text(&self) -> String {
        self.to_text_over(&Settings::default())
    }

    /// Returns a configuration string with the same meaning for a parser whose default values are
    /// `defaults`.
    #[doc(hidden)]
    pub fn to_text_over(&self, defaults: &Settings) -> String {
        let set = BUILT_IN.iter().filter(|key| (key.differs)(&self.settings, defaults));
        let mut parts: Vec<String> =
            set.map(|key| format!("{}:{}", key.name, (key.show)(&self.settings))).collect();
        parts.extend(self.settings.extra.iter().map(|(key, value)| {
            // A value with a double quote can only be a list, which needs no quotes. All other values
            // are quoted, because a word may look like a list that is not closed.
            if value.contains('"') {
                format!("{key}:{value}")
            } else {
                format!("{key}:\"{value}\"")
            }
        }));
        parts.join(",")
    }
}

/// Returns the reason why a key has no effect, if it is set but has none.
fn idle(settings: &Settings, key: &Key) -> Option<String> {
    if (key.show)(settings) == (key.show)(&Settings::default()) {
        return None;
    }
    let backend = settings.backend.as_str();
    if key.backends.is_empty() || key.backends.contains(&backend) {
        return (key.idle)(settings).map(str::to_owned);
    }
    if !is_built_in(backend) {
        return Some("its strategy reads it".to_owned());
    }
    let own: Vec<_> = key.backends.iter().map(|name| format!("backend:{name}")).collect();
    Some(format!("{} only", own.join(" and ")))
}
