//! All keys: their names, their meanings and the values that they accept.
//!
//! User-defined strategies add their own keys. The parser gets all keys as a [`KeyTable`].

use super::error::{ConfigError, Span};
use super::read::Reader;
use super::rows::{BUILT_IN, BUILT_IN_BACKENDS};
use super::settings::Settings;
use super::user::UserKey;
use super::versions::TorchVersion;
use super::{Config, Origin};
use crate::size::MIB;

/// Returns true if `backend` is built in.
pub(super) fn is_built_in(backend: &str) -> bool {
    BUILT_IN_BACKENDS.contains(&backend)
}

/// One key.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Key {
    /// The name.
    pub name: &'static str,
    /// Other names of the same key.
    pub aliases: &'static [&'static str],
    /// A description of the values that the key accepts.
    pub range: &'static str,
    /// The meaning, in one line.
    pub meaning: &'static str,
    /// The backends that read the key. Empty if all do, or if none does yet.
    pub backends: &'static [&'static str],
    /// Whether the key is read only when an allocator is built. A change of its value then needs
    /// another allocator.
    pub is_fixed: bool,
    /// The first version of PyTorch that accepts the key. 2.1 stands for 2.1 or older. `None` if
    /// PyTorch has no such key.
    pub since: Option<TorchVersion>,
    /// Parses a value and stores it in the settings.
    pub(super) read: fn(&mut Settings, &Reader<'_, '_>) -> Result<(), ConfigError>,
    /// Formats the value as it is written in a configuration string: `unlimited`, `off` or `unset` if
    /// there is none.
    pub(super) show: fn(&Settings) -> String,
    /// Returns whether two settings differ in this key.
    pub(super) differs: fn(&Settings, &Settings) -> bool,
    /// Restores the default value if a later string does not contain the key. `None` if the value is
    /// kept.
    pub(super) reset: Option<fn(&mut Settings)>,
    /// Returns the reason why the key has no effect with these settings, if so.
    pub(super) idle: fn(&Settings) -> Option<&'static str>,
}

impl Settings {
    /// Returns the first key whose value in `other` differs, among the keys that only `backend` reads,
    /// and only when an allocator is built.
    pub(crate) fn fixed_key_that_differs(&self, other: &Self, backend: &str) -> Option<&str> {
        let mut fixed = BUILT_IN.iter().filter(|key| key.is_fixed && key.backends == [backend]);
        fixed.find(|key| (key.differs)(self, other)).map(|key| key.name)
    }

    /// Returns true if an allocator built from these settings can apply `other` without being built
    /// again. For a registered backend, all keys that are read only at building count, because its
    /// constructor may read any of them.
    pub(crate) fn is_built_alike(&self, other: &Self) -> bool {
        let reads = |key: &Key| {
            key.backends.is_empty()
                || key.backends.contains(&&*self.backend)
                || !is_built_in(&self.backend)
        };
        !BUILT_IN.iter().any(|key| key.is_fixed && reads(key) && (key.differs)(self, other))
    }
}

impl Config {
    /// Returns the first version of PyTorch whose allocator accepts all keys that the string of this
    /// configuration sets, except `compat`. `None` if PyTorch lacks one of the keys.
    #[must_use]
    #[doc(hidden)]
    pub fn oldest_torch(&self) -> Option<TorchVersion> {
        // Before PyTorch 2.10, `max_split_size_mb` had to be larger than 20.
        let is_least = self.settings.max_split_bytes == Some(20 * MIB);
        let least = if is_least { TorchVersion::minor(10) } else { TorchVersion::V2_1 };
        let is_set = |key: &&Key| matches!(self.origin(key.name), Origin::Text { .. });
        let set = BUILT_IN.iter().filter(is_set).filter(|key| key.name != "compat");
        let has_extra = !self.settings.extra.is_empty();
        set.map(|key| key.since).fold((!has_extra).then_some(least), |oldest, since| {
            oldest.zip(since).map(|(oldest, since)| oldest.max(since))
        })
    }

    /// Returns true if this `version` of PyTorch accepts all keys that the string of this configuration
    /// sets, except `compat`.
    #[must_use]
    pub fn is_accepted_by(&self, version: TorchVersion) -> bool {
        self.oldest_torch().is_some_and(|oldest| oldest <= version)
    }
}

/// The known keys: the built-in ones and those of user-defined strategies.
#[derive(Clone, Debug, Default)]
pub struct KeyTable {
    extra: Vec<UserKey>,
}

/// A known key.
#[derive(Clone, Copy, Debug)]
pub(super) enum Known<'t> {
    BuiltIn(&'static Key),
    Extra(&'t UserKey),
}

impl Known<'_> {
    pub(super) fn name(&self) -> &str {
        match self {
            Self::BuiltIn(key) => key.name,
            Self::Extra(key) => key.name(),
        }
    }
}

impl KeyTable {
    /// Adds a key of a user-defined strategy. Does nothing if the name is already known.
    #[must_use]
    pub fn with(mut self, key: UserKey) -> Self {
        if !self.contains(key.name()) {
            self.extra.push(key);
        }
        self
    }

    /// Returns the user-defined keys.
    #[must_use]
    pub(crate) fn extra(&self) -> &[UserKey] {
        &self.extra
    }

    /// Returns all names that a text may contain: the keys, their aliases and the user-defined keys.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let built_in =
            BUILT_IN.iter().flat_map(|key| key.aliases.iter().chain([&key.name]).copied());
        built_in.chain(self.extra.iter().map(UserKey::name))
    }

    /// Returns true if a key or an alias has this name.
    #[must_use]
    pub(crate) fn contains(&self, name: &str) -> bool {
        self.look_up(name).is_some()
    }

    fn look_up(&self, name: &str) -> Option<Known<'_>> {
        let is_called = |key: &&Key| key.name == name || key.aliases.contains(&name);
        let built_in = BUILT_IN.iter().find(is_called).map(Known::BuiltIn);
        let extra = || self.extra.iter().find(|extra| extra.name() == name).map(Known::Extra);
        built_in.or_else(extra)
    }

    pub(super) fn find(&self, name: &str, span: Span) -> Result<Known<'_>, ConfigError> {
        if let Some(known) = self.look_up(name) {
            return Ok(known);
        }
        if let Some((key, _)) = name.split_once('=')
            && let Some(known) = self.look_up(key)
        {
            let sign = Span { at: span.at + key.len(), len: 1 };
            return Err(ConfigError::new(known.name(), sign, "a colon instead of ="));
        }
        let mut error = ConfigError::new(name, span, "a known key");
        error.nearest = match is_built_in(name) {
            true => Some(format!("backend:{name}")),
            false => self.nearest(name),
        };
        Err(error)
    }

    /// Returns the known name most similar to `name`, if any is similar.
    fn nearest(&self, name: &str) -> Option<String> {
        nearest_of(name, self.names())
    }
}

/// Returns the name in `known` most similar to `name`, if any is similar.
pub fn nearest_of<'k>(name: &str, known: impl Iterator<Item = &'k str>) -> Option<String> {
    let name: Vec<char> = name.chars().take(64).flat_map(char::to_lowercase).collect();
    let (distance, nearest) =
        known.map(|known| (edits(&name, known), known)).min_by_key(|(d, _)| *d)?;
    (distance <= name.len().max(nearest.len()) / 3 + 1).then(|| nearest.to_owned())
}

/// Returns the edit distance: the least number of insertions, deletions and replacements.
fn edits(name: &[char], known: &str) -> usize {
    let known: Vec<char> = known.chars().flat_map(char::to_lowercase).collect();
    let mut row: Vec<usize> = (0..=known.len()).collect();
    for (i, a) in name.iter().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, b) in known.iter().enumerate() {
            let replaced = diagonal + usize::from(a != b);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[known.len()]
}
