//! The configuration string: text to tokens with positions to typed, in-range settings.
//!
//! Accepts every string that PyTorch accepts on purpose, with PyTorch's meaning, and is strict
//! where PyTorch is sloppy: an error names the key, the byte offset, what was expected and the
//! nearest known key, and nothing changes. Nothing here knows what a setting does.

mod settings;

pub use settings::{Compat, PinnedSettings, Reserve, Settings};

/// A parsed configuration: settings and where each came from.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Config {
    settings: Settings,
}

impl Config {
    /// A configuration made in code.
    #[must_use]
    pub fn from_settings(settings: Settings) -> Self {
        Self { settings }
    }

    /// The settings in force.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }
}
