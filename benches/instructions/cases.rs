//! What is counted: warm replays of recordings, and the loops of the hot path.
//!
//! A case is a preparation and a round that may be repeated. What one operation costs is the difference
//! between many rounds and few, over the operations in between: preparation and the first, cold round
//! fall out of it.

#[cfg(feature = "count")]
mod prepared;

#[cfg(feature = "count")]
pub use prepared::Prepared;

/// How often a case's round is repeated.
#[derive(Clone, Copy, Debug)]
pub enum Rounds {
    /// Twice.
    Few,
    /// Four times.
    Many,
}

impl Rounds {
    /// The number.
    #[must_use]
    pub const fn count(self) -> u32 {
        match self {
            Self::Few => 2,
            Self::Many => 4,
        }
    }
}

/// Rounds between few and many.
pub const ROUNDS_BETWEEN: u32 = Rounds::Many.count() - Rounds::Few.count();

/// One row of the table.
#[derive(Clone, Copy, Debug)]
pub enum Case {
    /// A recording of `tests/traces`, under the configuration that was recorded.
    Replay {
        /// The recording.
        name: &'static str,
        /// Its requests and frees.
        operations: u64,
    },
    /// Allocate and free 512 bytes by handle, on one stream.
    Pair,
    /// The same by address.
    PairRaw,
    /// The same through the handle that can be switched to another strategy.
    PairSwitchable,
    /// The same under one layer.
    PairLayered {
        /// As the table names it.
        name: &'static str,
        /// The layer.
        conf: &'static str,
    },
    /// Replace one of 4,096 live blocks of mixed sizes.
    Mix,
    /// Allocate 64 KiB, announce another stream, free.
    RecordStream,
    /// Allocate and free 512 bytes on so many streams in turn.
    Streams(u32),
}

/// All cases, in the order of the table.
pub const CASES: [Case; 15] = [
    Case::Replay { name: "llama_var.default", operations: 47_180 },
    Case::Replay { name: "resnet50.default", operations: 10_169 },
    Case::Replay { name: "serve.default", operations: 10_100 },
    Case::Replay { name: "llama_var.expandable", operations: 47_180 },
    Case::Replay { name: "unet.expandable", operations: 17_504 },
    Case::Pair,
    Case::PairRaw,
    Case::PairSwitchable,
    Case::PairLayered { name: "pair_limit:512B", conf: "layers:[limit:8GiB]" },
    Case::Mix,
    Case::RecordStream,
    Case::Streams(1),
    Case::Streams(2),
    Case::Streams(8),
    Case::Streams(128),
];

/// Steps in a round of every case that is no replay.
const STEPS: u32 = 8192;

impl Case {
    /// As the table names it.
    #[must_use]
    pub fn name(self) -> String {
        match self {
            Self::Replay { name, .. } | Self::PairLayered { name, .. } => name.to_owned(),
            Self::Pair => "pair:512B".to_owned(),
            Self::PairRaw => "pair_raw:512B".to_owned(),
            Self::PairSwitchable => "pair_handle:512B".to_owned(),
            Self::Mix => "mix:4096live".to_owned(),
            Self::RecordStream => "record_stream:64KiB".to_owned(),
            Self::Streams(streams) => format!("streams:{streams}"),
        }
    }

    /// What a round is divided by: requests and frees of a replay, steps of everything else.
    #[must_use]
    pub fn operations(self) -> u64 {
        match self {
            Self::Replay { operations, .. } => operations,
            _ => STEPS.into(),
        }
    }
}
