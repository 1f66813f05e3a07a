//! The versions of PyTorch, and the decisions in which their allocators differ.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicU8, Ordering};

use crate::size::FractionRounding;

/// The choice among several free blocks of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ties {
    /// The block at the lowest address.
    Address,
    /// The block whose block structure was created first. A split creates a new structure for the front
    /// part and keeps the old one for the rest. When free neighbours are merged, the structure of the
    /// block that was freed last is kept.
    BlockAge,
    /// The block in the oldest segment. Within a segment, the block at the lowest address.
    SegmentAge,
}

/// The decisions that differ between versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Decisions {
    /// The choice among free blocks of one size.
    pub ties: Ties,
    /// Whether an open scope of a private pool counts as a capture, even if no graph is captured. If it
    /// does, requests query no events while the scope is open, and a request that finds no memory
    /// releases no free segments.
    pub routing_is_capture: bool,
    /// The limit in bytes of a memory fraction.
    pub limit_rounding: FractionRounding,
}

/// A version of PyTorch, from 2.1 on. Only the decisions of some versions are known. Any other version
/// decides as the nearest of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TorchVersion {
    /// The 2 of 2.x is not stored, because all versions have it.
    minor: u8,
}

/// For each version, oldest first: the value of `compat` and the decisions.
///
/// Ties were measured with the allocators of 2.11.0, 2.12.1, 2.13.0, 2.14.1 and 2.15.0. The recording
/// of each version has at least 200 ties, and each tie matches the rule of that version and no other
/// rule. The rules agree with PyTorch's pull requests: 178362 numbers each block; 183591 numbers each
/// segment, and blocks inherit the number of their segment. Queries of events while a scope is open
/// were measured with the same five versions; see issue 175015 and pull request 181830. The release of
/// segments in that case was measured with 2.12.1 and later. 2.10 and 2.12.0 were not measured. 2.10 is
/// assumed to decide as 2.11.
/// The rounding of limits is that of the sources: from 2.15 on to the nearest byte, truncated before.
const TABLE: [(&str, u8, Decisions); 6] = [
    ("pytorch-2.10", 10, decisions(Ties::Address, true, FractionRounding::Truncate)),
    ("pytorch-2.11", 11, decisions(Ties::Address, true, FractionRounding::Truncate)),
    ("pytorch-2.12", 12, decisions(Ties::BlockAge, true, FractionRounding::Truncate)),
    ("pytorch-2.13", 13, decisions(Ties::SegmentAge, false, FractionRounding::Truncate)),
    ("pytorch-2.14", 14, decisions(Ties::SegmentAge, false, FractionRounding::Truncate)),
    ("pytorch-2.15", 15, decisions(Ties::SegmentAge, false, FractionRounding::Nearest)),
];

const fn decisions(
    ties: Ties,
    routing_is_capture: bool,
    limit_rounding: FractionRounding,
) -> Decisions {
    Decisions { ties, routing_is_capture, limit_rounding }
}

/// The values of the key `compat`, as the description of its range.
pub(super) const COMPAT_VALUES: &str = "default, pytorch, or pytorch-2.10 to pytorch-2.15";

/// The minor version of the PyTorch in this process. 0 if there is none.
static RUNNING: AtomicU8 = AtomicU8::new(0);

impl TorchVersion {
    /// 2.1: the oldest version whose keys are known.
    #[doc(hidden)]
    pub const V2_1: Self = Self { minor: 1 };
    /// 2.11: assumed for recordings that show no sign of a newer version.
    #[doc(hidden)]
    pub const V2_11: Self = Self { minor: 11 };
    /// 2.12: the first version whose entries name a pool.
    pub const V2_12: Self = Self { minor: 12 };
    /// 2.13: the first version whose settings name `max_round_threshold`.
    pub const V2_13: Self = Self { minor: 13 };
    /// 2.14: the first version that records pinned memory.
    pub const V2_14: Self = Self { minor: 14 };

    /// Returns the version 2.`minor`.
    pub(super) const fn minor(minor: u8) -> Self {
        Self { minor }
    }

    /// Returns the version with known decisions that is nearest to the given release of PyTorch.
    #[must_use]
    pub fn nearest(major: u32, minor: u32) -> Self {
        let [(_, oldest, _), .., (_, newest, _)] = TABLE;
        match major {
            0 | 1 => Self { minor: oldest },
            2 => Self { minor: u8::try_from(minor).unwrap_or(newest).clamp(oldest, newest) },
            _ => Self { minor: newest },
        }
    }

    /// Sets this version as the meaning of `compat:pytorch` in this process, for configurations parsed
    /// from now on.
    pub fn set_running(self) {
        RUNNING.store(self.minor, Ordering::Relaxed);
    }

    /// Returns the decisions of this version's allocator.
    #[must_use]
    pub fn decisions(self) -> Decisions {
        self.row().2
    }

    /// Returns the value of `compat` that names this version.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.row().0
    }

    fn row(self) -> &'static (&'static str, u8, Decisions) {
        let [oldest, .., newest] = &TABLE;
        let row = TABLE.iter().find(|row| row.1 == self.minor);
        row.unwrap_or(if self.minor < oldest.1 { oldest } else { newest })
    }

    /// Returns the version of the PyTorch in this process, if there is one.
    pub(super) fn running() -> Option<Self> {
        let minor = RUNNING.load(Ordering::Relaxed);
        (minor != 0).then_some(Self { minor })
    }
}

impl fmt::Display for TorchVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "2.{}", self.minor)
    }
}

impl FromStr for TorchVersion {
    type Err = String;

    /// Parses a version as PyTorch prints it: `2.8`, `2.8.1` or `2.8.0+cu128`.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let minor = text.strip_prefix("2.").and_then(|rest| rest.split(['.', '+']).next());
        let minor = minor.and_then(|minor| minor.parse().ok()).filter(|minor| *minor > 0);
        let minor = minor.ok_or("expected a version of PyTorch from 2.1 on, as 2.8")?;
        Ok(Self { minor })
    }
}

/// Which decisions are made where PyTorch's rules are defects. All of them are safe.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compat {
    /// The decisions of this library.
    #[default]
    Default,
    /// Exactly the decisions of PyTorch. The version is the first that is known of: the PyTorch in this
    /// process when the configuration is parsed, the PyTorch that made the recording, 2.11.
    PyTorch,
    /// Exactly the decisions of one version of PyTorch.
    Version(TorchVersion),
}

impl Compat {
    /// Returns true if the decisions are those of PyTorch.
    #[must_use]
    pub(crate) fn is_pytorch(self) -> bool {
        self != Self::Default
    }

    /// Sets the version, if this is PyTorch without a version.
    #[must_use]
    #[doc(hidden)]
    pub fn or_version(self, version: TorchVersion) -> Self {
        if self == Self::PyTorch { Self::Version(version) } else { self }
    }

    /// Sets the version of the PyTorch in this process, if there is one and this is PyTorch without a
    /// version.
    pub(super) fn in_this_process(self) -> Self {
        TorchVersion::running().map_or(self, |version| self.or_version(version))
    }

    /// Returns the decisions that differ between versions. PyTorch without a version decides as 2.11.
    #[must_use]
    pub fn decisions(self) -> Decisions {
        match self {
            Self::Default => decisions(Ties::Address, false, FractionRounding::Nearest),
            Self::PyTorch => TorchVersion::V2_11.decisions(),
            Self::Version(version) => version.decisions(),
        }
    }

    /// Returns how fractions other than that of the limit become bytes. Every version of PyTorch truncates
    /// them.
    pub(crate) fn rounding(self) -> FractionRounding {
        if self.is_pytorch() { FractionRounding::Truncate } else { FractionRounding::Nearest }
    }

    /// Returns the value of the key `compat`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::PyTorch => "pytorch",
            Self::Version(version) => version.name(),
        }
    }

    /// Returns all values of the key `compat`, with the variants that they mean.
    pub(super) fn values() -> impl Iterator<Item = (&'static str, Self)> {
        let versions =
            TABLE.iter().map(|row| (row.0, Self::Version(TorchVersion { minor: row.1 })));
        [("default", Self::Default), ("pytorch", Self::PyTorch)].into_iter().chain(versions)
    }
}
