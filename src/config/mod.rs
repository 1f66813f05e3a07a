//! The configuration string: text to tokens with positions to typed, in-range settings.
//!
//! Accepts every string that PyTorch accepts on purpose, with PyTorch's meaning, and is strict
//! where PyTorch is sloppy: an error names the key, the byte offset, what was expected and the
//! nearest known key, and nothing changes. Nothing here does what a setting says.
//!
//! A text passes `token`, then `parse`, which looks keys up in `rows` and reads their values (`read`) into
//! `settings`. `environment` finds the text, `explain` shows the settings.

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
mod user;
mod versions;

#[cfg(test)]
mod tests;

pub use bytes::Size;
pub(crate) use bytes::told as told_size;
pub use environment::{
    EnvironmentError, FromEnvironment, VARIABLES, from_environment, from_process,
};
#[cfg(feature = "cli")]
pub(crate) use error::shown;
pub use error::{ConfigError, ConfigWarning, Span};
pub use explain::ExplainRow;
#[cfg(feature = "cli")]
pub(crate) use keys::nearest_of;
pub use keys::{Key, KeyTable};
pub use layers::{FaultSetting, LayerSetting};
pub use rows::BUILT_IN;
pub use settings::{
    CpuSettings, HandleType, HistorySettings, PeersSetting, PinnedSettings, PluggableSettings,
    Reserve, Settings,
};
pub use user::UserKey;
pub use versions::{Compat, Decisions, Ties, TorchVersion};

/// Where a key's value came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Nobody said anything.
    Default,
    /// The text said so, at this byte.
    Text {
        /// Byte offset of the key.
        at: usize,
    },
    /// Code said so. Of [`Config::from_settings`], what is the default counts as not said.
    Code,
    /// Code or a text said so before the last text, and the key sticks.
    Earlier,
}

/// A parsed configuration: settings and where each came from.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Config {
    settings: Settings,
    /// Keys that code or a text has set.
    origins: Vec<(String, Origin)>,
    warnings: Vec<ConfigWarning>,
}

impl Config {
    /// A configuration made in code. Values that no string could say are brought into range. What the
    /// string would say as the default (sizes in whole MiB) counts as not said.
    #[must_use]
    pub fn from_settings(settings: Settings) -> Self {
        let settings = settings.in_range();
        let (defaults, extra) = (Settings::default(), settings.extra.iter());
        let said = BUILT_IN.iter().filter(|key| (key.differs)(&settings, &defaults));
        let built_in = said.map(|key| key.name.to_owned());
        let said = built_in.chain(extra.map(|(key, _)| key.clone()));
        let origins = said.map(|key| (key, Origin::Code)).collect();
        Self { settings, origins, warnings: Vec::new() }
    }

    /// The configuration that `text` says.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] for the first thing that is wrong.
    pub fn parse(text: &str, table: &KeyTable) -> Result<Self, ConfigError> {
        Self::default().updated(text, table)
    }

    /// This configuration after a further text, as at run time: what `text` does not mention is
    /// reset (`max_split_size_mb`, `max_non_split_rounding_mb`, `garbage_collection_threshold`,
    /// `roundup_power2_divisions`) or sticks (everything else, users' keys too).
    ///
    /// # Errors
    ///
    /// [`ConfigError`] for the first thing that is wrong; this configuration is as it was.
    pub fn updated(&self, text: &str, table: &KeyTable) -> Result<Self, ConfigError> {
        let entries = parse::entries(text, table)?;
        let mut settings = self.settings.clone();
        BUILT_IN.iter().filter_map(|key| key.reset).for_each(|reset| reset(&mut settings));
        parse::apply(&mut settings, &entries)?;
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

    /// The settings in force.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Returns the same with these decisions where PyTorch's and ours differ. The origin is code then.
    #[must_use]
    pub fn with_compat(mut self, compat: Compat) -> Self {
        self.settings.compat = compat;
        self.origins.retain(|(key, _)| key != "compat");
        self.origins.push(("compat".to_owned(), Origin::Code));
        self
    }

    /// What is legal and probably not meant.
    #[must_use]
    pub fn warnings(&self) -> &[ConfigWarning] {
        &self.warnings
    }

    /// Where a key's value came from.
    #[must_use]
    pub fn origin(&self, key: &str) -> Origin {
        let said = self.origins.iter().find(|(known, _)| known == key);
        said.map_or(Origin::Default, |(_, origin)| *origin)
    }
}
