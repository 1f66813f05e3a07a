//! The version of PyTorch that advised settings must suit.
//!
//! A recording does not contain this version, but its fields and its configuration show the oldest version
//! that can have made it. Advice for PyTorch contains only configuration keys that this version knows,
//! because an unknown key stops a program.

use std::fmt;
use std::str::FromStr;

use super::recording::Recording;
use stratalloc::config::{Config, TorchVersion};

/// A build of PyTorch: its version and its platform.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TorchBuild {
    /// The version.
    pub version: TorchVersion,
    /// Whether it is built for ROCm.
    pub is_rocm: bool,
}

impl FromStr for TorchBuild {
    type Err = String;

    /// Parses the text of `torch.__version__`: `2.8`, `2.8.0+cu128`, `2.8.0+rocm6.4`.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(Self { version: text.parse()?, is_rocm: text.contains("+rocm") })
    }
}

/// The first version for ROCm that has expandable segments. Earlier ones print a warning and ignore the key.
/// Source: <https://github.com/pytorch/pytorch/pull/177974>.
pub(super) const ROCM_EXPANDABLE: &str = "2.12";

/// Parts of the names and files of functions that only builds for ROCm have.
const OF_ROCM: &[&str] =
    &["c10::hip::", "at::hip::", "HIPCachingAllocator", "miopen", "libamdhip64", "hipMalloc"];

/// Returns true if PyTorch for ROCm made the recording: a function or a key that only it has is in it. Stacks
/// of Python alone do not show it.
pub(super) fn is_of_rocm(recording: &Recording) -> bool {
    let trace = &recording.trace;
    let is_of_it = |text: &str| OF_ROCM.iter().any(|part| text.contains(part));
    let mut frames = (0..trace.stacks.frame_count()).map(|number| trace.stacks.frame(number));
    ["hipmalloc", "hipMallocAsync", "use_hip"].iter().any(|key| trace.conf.contains(key))
        || frames.any(|frame| {
            !frame.file.ends_with(".py") && (is_of_it(frame.function) || is_of_it(frame.file))
        })
}

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
