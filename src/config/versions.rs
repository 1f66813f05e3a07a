//! PyTorch's versions, and where their allocators decide differently: one table.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicU8, Ordering};

/// Which of several free blocks of one size a version's allocator takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ties {
    /// The one at the lowest address.
    Address,
    /// The one whose block structure was made first. A split makes a new structure for the front and keeps
    /// the old one for the rest; joined blocks keep that of the block that is freed.
    BlockAge,
    /// The one whose segment came first, then the one at the lowest address.
    SegmentAge,
}

/// What a version's allocator decides in its own way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Decisions {
    /// Among free blocks of one size.
    pub ties: Ties,
    /// Whether a private pool that requests are routed to counts as a capture, although no graph is captured:
    /// then no request queries events, and one that finds no memory releases no free segments.
    pub routing_is_capture: bool,
}

/// A version of PyTorch, from 2.1 on. The decisions of some are known: the others count as the nearest of
/// those.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TorchVersion {
    /// The 2 in 2.x is not stored: all versions have it.
    minor: u8,
}

/// The value of `compat` and the decisions of each version, oldest first.
///
/// Ties were measured with the allocators of 2.11.0, 2.12.1, 2.13.0, 2.14.1 and 2.15.0: each of 200 and more
/// ties of a recording fits the rule of its version and not the others. They match PyTorch's pull requests:
/// 178362 numbers each block, 183591 numbers each segment and lets blocks inherit its number. Events
/// while a pool is routed to: measured with 2.11.0, 2.12.1, 2.13.0, 2.14.1 and 2.15.0; issue 175015 and pull
/// request 181830. What such a request releases: measured with 2.12.1 and later. 2.10 and 2.12.0 were not
/// measured so: 2.10 is taken to decide as 2.11 does.
const TABLE: [(&str, u8, Decisions); 6] = [
    ("pytorch-2.10", 10, Decisions { ties: Ties::Address, routing_is_capture: true }),
    ("pytorch-2.11", 11, Decisions { ties: Ties::Address, routing_is_capture: true }),
    ("pytorch-2.12", 12, Decisions { ties: Ties::BlockAge, routing_is_capture: true }),
    ("pytorch-2.13", 13, Decisions { ties: Ties::SegmentAge, routing_is_capture: false }),
    ("pytorch-2.14", 14, Decisions { ties: Ties::SegmentAge, routing_is_capture: false }),
    ("pytorch-2.15", 15, Decisions { ties: Ties::SegmentAge, routing_is_capture: false }),
];

/// What the key `compat` accepts, for its range.
pub(super) const COMPAT_VALUES: &str = "default, pytorch, or pytorch-2.10 to pytorch-2.15";

/// The minor version of the PyTorch that runs in this process; 0 if none does.
static RUNNING: AtomicU8 = AtomicU8::new(0);

impl TorchVersion {
    /// 2.1: the oldest version whose keys are known.
    pub(crate) const V2_1: Self = Self { minor: 1 };
    /// 2.11: the version of recordings that show no sign of a newer one.
    pub(crate) const V2_11: Self = Self { minor: 11 };
    /// 2.12: the first whose entries name a pool.
    pub const V2_12: Self = Self { minor: 12 };
    /// 2.13: the first whose settings name `max_round_threshold`.
    pub const V2_13: Self = Self { minor: 13 };
    /// 2.14: the first that records pinned memory.
    pub const V2_14: Self = Self { minor: 14 };

    /// Returns the version 2.`minor`.
    pub(super) const fn minor(minor: u8) -> Self {
        Self { minor }
    }

    /// Returns the version nearest to a release of PyTorch among those with known decisions.
    #[must_use]
    pub fn nearest(major: u32, minor: u32) -> Self {
        let [(_, oldest, _), .., (_, newest, _)] = TABLE;
        match major {
            0 | 1 => Self { minor: oldest },
            2 => Self { minor: u8::try_from(minor).unwrap_or(newest).clamp(oldest, newest) },
            _ => Self { minor: newest },
        }
    }

    /// Makes this the version that `compat:pytorch` means in this process, in configurations that are parsed
    /// from now on.
    pub fn set_running(self) {
        RUNNING.store(self.minor, Ordering::Relaxed);
    }

    /// Returns what this version's allocator decides.
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

    fn running() -> Option<Self> {
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

    /// Reads a version as PyTorch prints it: `2.8`, `2.8.1` or `2.8.0+cu128`.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let minor = text.strip_prefix("2.").and_then(|rest| rest.split(['.', '+']).next());
        let minor = minor.and_then(|minor| minor.parse().ok()).filter(|minor| *minor > 0);
        let minor = minor.ok_or("expected a version of PyTorch from 2.1 on, as 2.8")?;
        Ok(Self { minor })
    }
}

/// Which decisions are made where PyTorch's rules are defects. Safety is never at stake.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compat {
    /// Those of this library.
    #[default]
    Default,
    /// PyTorch's, exactly: of the version that made the recording, otherwise of 2.11. A configuration that is
    /// parsed where PyTorch runs names its version instead.
    PyTorch,
    /// Exactly those of one version of PyTorch.
    Version(TorchVersion),
}

impl Compat {
    /// Whether decisions are PyTorch's.
    #[must_use]
    pub(crate) fn is_pytorch(self) -> bool {
        self != Self::Default
    }

    /// Returns the same with a version, where PyTorch is named without one.
    #[must_use]
    pub(crate) fn or_version(self, version: TorchVersion) -> Self {
        if self == Self::PyTorch { Self::Version(version) } else { self }
    }

    /// Returns the same with the version that runs in this process, if one does and none is named.
    pub(super) fn in_this_process(self) -> Self {
        TorchVersion::running().map_or(self, |version| self.or_version(version))
    }

    /// Returns the decisions in which versions differ. PyTorch without a version decides as 2.11.
    #[must_use]
    pub fn decisions(self) -> Decisions {
        match self {
            Self::Default => Decisions { ties: Ties::Address, routing_is_capture: false },
            Self::PyTorch => TorchVersion::V2_11.decisions(),
            Self::Version(version) => version.decisions(),
        }
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

    /// Every value of the key `compat`, with its meaning.
    pub(super) fn values() -> impl Iterator<Item = (&'static str, Self)> {
        let versions =
            TABLE.iter().map(|row| (row.0, Self::Version(TorchVersion { minor: row.1 })));
        [("default", Self::Default), ("pytorch", Self::PyTorch)].into_iter().chain(versions)
    }
}
