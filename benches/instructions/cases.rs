//! Cases for counting instructions: replays of recordings with a warm cache, and loops over the hot
//! path.
//!
//! A case has a preparation and a round that can be repeated. It runs once with few rounds and once with
//! many. The difference, divided by the operations of the additional rounds, is the cost of one
//! operation. So the costs of the preparation and of the first, cold round cancel out.

#[cfg(feature = "count")]
mod prepared;

#[cfg(feature = "count")]
pub use prepared::Prepared;

/// How often the round of a case runs.
#[derive(Clone, Copy, Debug)]
pub enum Rounds {
    /// Twice.
    Few,
    /// Four times.
    Many,
}

impl Rounds {
    /// Returns the number of rounds.
    #[must_use]
    pub const fn count(self) -> u32 {
        match self {
            Self::Few => 2,
            Self::Many => 4,
        }
    }
}

/// The number of rounds by which many exceed few.
pub const ROUNDS_BETWEEN: u32 = Rounds::Many.count() - Rounds::Few.count();

/// One row of the table.
#[derive(Clone, Copy, Debug)]
pub enum Case {
    /// A recording in `tests/traces`, with the recorded configuration.
    Replay {
        /// The recording.
        name: &'static str,
        /// The number of requests and frees in the recording.
        operations: u64,
    },
    /// Allocates and frees 512 bytes with a handle, on one stream.
    Pair,
    /// Allocates and frees 512 bytes with the address, on one stream.
    PairRaw,
    /// Allocates and frees 512 bytes through the handle that can switch to another strategy.
    PairSwitchable,
    /// Allocates and frees 512 bytes with a handle, through one layer.
    PairLayered {
        /// The layer's name in the table.
        name: &'static str,
        /// The configuration of the layer.
        conf: &'static str,
    },
    /// Replaces one of 4,096 live blocks of mixed sizes.
    Mix,
    /// Allocates 64 KiB, records a use by another stream, and frees the block.
    RecordStream,
    /// Allocates and frees 512 bytes on this many streams in turn.
    Streams(u32),
    /// Allocates and frees 512 bytes on this many streams in turn, and reads the usage.
    Usage(u32),
    /// Allocates and frees 512 bytes in the default pool while this many scopes are open.
    Scopes(u32),
    /// Creates and releases a pool while there are this many others.
    Pools(u32),
    /// Records one of the uses of a block by [`STEPS`] streams, and waits for it after the free.
    Uses,
}

/// All cases, in the order of the table.
pub const CASES: [Case; 20] = [
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
    Case::Streams(16_384),
    Case::Usage(4096),
    Case::Scopes(1000),
    Case::Pools(4000),
    Case::Uses,
];

/// The number of steps in each round of every case except replays.
const STEPS: u32 = 8192;

impl Case {
    /// Returns the name in the table.
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
            Self::Usage(streams) => format!("usage:{streams}"),
            Self::Scopes(scopes) => format!("scopes:{scopes}"),
            Self::Pools(pools) => format!("pools:{pools}"),
            Self::Uses => format!("uses:{STEPS}"),
        }
    }

    /// Returns how many times the stored figure a count may be. Cases over large hash tables vary, because
    /// the seed of the hash differs between builds. They show growth, which would be a multiple.
    #[must_use]
    pub fn most(self) -> f64 {
        match self {
            Self::Scopes(_) | Self::Pools(_) | Self::Uses => 1.5,
            _ => 1.02,
        }
    }

    /// Returns the operations in a round: requests and frees for a replay, steps for all other cases.
    #[must_use]
    pub fn operations(self) -> u64 {
        match self {
            Self::Replay { operations, .. } => operations,
            _ => STEPS.into(),
        }
    }
}
