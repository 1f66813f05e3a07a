//! The version of PyTorch that advised settings must suit.
//!
//! A recording does not contain this version, but its fields and its configuration show the oldest version
//! that can have made it. Advice for PyTorch contains only configuration keys that this version knows,
//! because an unknown key stops a program.

use std::fmt;

use super::recording::Recording;
use stratalloc::config::{Config, TorchVersion};

/// A version of PyTorch, and whether the caller set it or the recording shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ForTorch {
    /// The caller set the version.
    Set(TorchVersion),
    /// The oldest version that can have made the recording, if later than 2.1.
    Shown(TorchVersion),
    /// The recording does not show the version, and the caller set none: any version from 2.1 on.
    Unknown,
}

impl ForTorch {
    /// Returns the version for a recording. `set` is the version that the caller set, if any.
    #[must_use]
    pub fn of(recording: &Recording, set: Option<TorchVersion>) -> Self {
        if let Some(version) = set {
            return Self::Set(version);
        }
        let conf = recording.config.as_ref().and_then(Config::oldest_torch);
        let trace = &recording.trace;
        // A snapshot made by this library has the fields of a new version, whichever PyTorch was running.
        let by_keys = Some(trace.torch_version()).filter(|_| trace.made_here.is_none());
        let by_keys = by_keys.filter(|version| *version > TorchVersion::V2_11);
        match conf.max(by_keys) {
            Some(version) if version > TorchVersion::V2_1 => Self::Shown(version),
            _ => Self::Unknown,
        }
    }

    /// Returns the version whose keys may be used.
    #[must_use]
    pub fn version(self) -> TorchVersion {
        match self {
            Self::Set(version) | Self::Shown(version) => version,
            Self::Unknown => TorchVersion::V2_1,
        }
    }
}

impl fmt::Display for ForTorch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Set(version) => write!(f, "PyTorch {version}"),
            Self::Shown(_) | Self::Unknown => write!(f, "PyTorch {} or later", self.version()),
        }
    }
}
