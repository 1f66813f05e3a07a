//! The configuration string: parsed from text to tokens with positions, and then to typed, validated
//! settings.
//!
//! All strings that PyTorch accepts on purpose are accepted, with PyTorch's meaning. Unlike PyTorch,
//! all other text is refused and changes nothing. The error has the key, the byte offset, the expected
//! text and the nearest known key. This module only parses settings. It does not apply them.
//!
//! `token` splits a text into tokens, `parse` looks up the keys in `rows`, and `read` parses their
//! values into `settings`. `environment` finds the text, and `explain` lists the settings.

mod bytes;
mod environment;
mod error;
mod explain;
mod keys;
mod layers;
mod parse;
mod read;
mod rows;
mod settings;
mod token;
mod torch;
mod user;
mod versions;

#[cfg(test)]
mod tests;

pub use bytes::Size;
pub(crate) use bytes::to_text as size_text;
pub use environment::{
    EnvironmentError, FromEnvironment, VARIABLES, from_environment, from_process,
};
#[doc(hidden)]
pub use error::shown;
pub use error::{ConfigError, ConfigWarning, Span};
pub use explain::ExplainRow;
#[doc(hidden)]
pub use keys::nearest_of;
pub use keys::{Key, KeyTable};
pub use layers::{FaultSetting, LayerSetting};
pub use rows::BUILT_IN;
#[cfg(test)]
pub(crate) use rows::BUILT_IN_BACKENDS;
pub use settings::{
    CpuSettings, HandleType, HistorySettings, PeersSetting, PinnedNuma, PinnedRounding,
    PinnedSettings, PluggableSettings, Reserve, Settings,
};
pub use torch::{TorchNote, torch_notes};
pub use user::UserKey;
pub use versions::{Compat, Decisions, Ties, TorchVersion};

/// The origin of a key's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The default value.
    Default,
    /// Set by the text at this position.
    Text {
        /// Byte offset of the key.
        at: usize,
    },
    /// Set by code. A field that [`Config::from_settings`] gets with its default value does not count
    /// as set.
    Code,
    /// Set by code or by an earlier text. The last text does not contain the key.
    Earlier,
}

/// A parsed configuration: the settings and their origins.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Config {
    settings: Settings,
    /// The keys that code or a text has set.
    origins: Vec<(String, Origin)>,
    warnings: Vec<ConfigWarning>,
}

impl Config {
    /// Creates a configuration from settings. Values outside the ranges of the configuration string are
    /// clamped. A field does not count as set if it equals its default (sizes are compared in whole
    /// MiB).
    #[must_use]
    pub fn from_settings(settings: Settings) -> Self {
        let settings = settings.in_range();
        let (defaults, extra) = (Settings::default(), settings.extra.iter());
        let set = BUILT_IN.iter().filter(|key| (key.differs)(&settings, &defaults));
        let built_in = set.map(|key| key.name.to_owned());
        let set = built_in.chain(extra.map(|(key, _)| key.clone()));
        let origins = set.map(|key| (key, Origin::Code)).collect();
        Self { settings, origins, warnings: Vec::new() }
    }

    /// Parses a configuration string.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] for the first error in the text.
    pub fn parse(text: &str, table: &KeyTable) -> Result<Self, ConfigError> {
        Self::default().updated(text, table)
    }

    /// Returns this configuration, changed by a further text as at run time. Four keys are reset to
    /// their defaults if `text` does not contain them: `max_split_size_mb`,
    /// `max_non_split_rounding_mb`, `garbage_collection_threshold` and `roundup_power2_divisions`. All
    /// other keys, including user-defined ones, keep their values.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] for the first error in the text. This configuration is unchanged then.
    pub fn updated(&self, text: &str, table: &KeyTable) -> Result<Self, ConfigError> {
        let entries = parse::entries(text, table)?;
        let mut settings = self.settings.clone();
        BUILT_IN.iter().filter_map(|key| key.reset).for_each(|reset| reset(&mut settings));
        parse::apply(&mut settings, &entries)?;
        settings.running_torch = TorchVersion::running();
        let kept = |key: &str| !BUILT_IN.iter().any(|own| own.name == key && own.reset.is_some());
        let kept = self.origins.iter().filter(|(key, _)| kept(key));
        let mut origins: Vec<(String, Origin)> =
            kept.map(|(key, _)| (key.clone(), Origin::Earlier)).collect();
        let mut warnings = Vec::new();
        for entry in &entries {
            let (key, at) = (entry.key.name(), entry.key_span.at);
            match origins.iter_mut().find(|(known, _)| known == key) {
                Some((_, origin)) => {
                    if let Origin::Text { at: earlier_at } = *origin {
                        let key = key.to_owned();
                        warnings.push(ConfigWarning::Repeated { key, earlier_at, last_at: at });
                    }
                    *origin = Origin::Text { at };
                }
                None => origins.push((key.to_owned(), Origin::Text { at })),
            }
        }
        Ok(Self { settings, origins, warnings })
    }

    /// Returns the settings.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Returns this configuration with `compat` set by code.
    #[must_use]
    pub fn with_compat(mut self, compat: Compat) -> Self {
        self.settings.compat = compat;
        self.origins.retain(|(key, _)| key != "compat");
        self.origins.push(("compat".to_owned(), Origin::Code));
        self
    }

    /// Returns warnings about valid but probably unintended text.
    #[must_use]
    pub fn warnings(&self) -> &[ConfigWarning] {
        &self.warnings
    }

    /// Returns the origin of a key's value.
    #[must_use]
    pub fn origin(&self, key: &str) -> Origin {
        let set = self.origins.iter().find(|(known, _)| known == key);
        set.map_or(Origin::Default, |(_, origin)| *origin)
    }
}
