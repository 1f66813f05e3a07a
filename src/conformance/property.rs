//! What must hold of every allocator, by name. How it is tested: see `suite`.

use std::fmt;

/// Something that must hold of every allocator.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Property {
    /// No byte belongs to two live blocks.
    LiveBlocksNeverOverlap,
    /// A block has all the bytes that were asked for.
    BlocksAreAsLargeAsAsked,
    /// What is written into a block stays.
    BytesStayIntact,
    /// Memory that work still uses is handed out to nobody whom that work could disturb.
    ReuseWaitsForWork,
    /// Requests of no bytes, or of more than any device has, are errors and change nothing.
    IllegalRequestsAreRefused,
    /// Handles that are not live here are refused and given back.
    WrongHandlesAreRefused,
    /// Counters equal a recount.
    CountersEqualARecount,
    /// Emptying the cache leaves live blocks as they are, and nothing idle.
    EmptyingTheCacheKeepsLiveBlocks,
    /// An allocator that goes gives everything back to the driver.
    EverythingIsGivenBack,
    /// Too little memory is an error with numbers, and after frees the same requests work again.
    RunningOutIsAnError,
    /// Hooks for memory pressure hear of it.
    PressureHooksAreCalled,
    /// A driver that fails once costs one request and no memory, whichever call it was.
    DriverFailuresLoseNothing,
    /// No more is reserved than the limit allows.
    LimitsAreRespected,
    /// Bare addresses are found when a live block starts there, and refused otherwise.
    BareAddressesAreChecked,
    /// What a private pool took nobody else gets, scopes route what they say, and its last user ends it.
    PrivatePoolsAreApart,
    /// Threads that allocate and free at once get blocks of their own, and counters stay right.
    ThreadsGetBlocksOfTheirOwn,
}

impl Property {
    /// All of them.
    pub const ALL: &[Self] = &[
        Self::LiveBlocksNeverOverlap,
        Self::BlocksAreAsLargeAsAsked,
        Self::BytesStayIntact,
        Self::ReuseWaitsForWork,
        Self::IllegalRequestsAreRefused,
        Self::WrongHandlesAreRefused,
        Self::CountersEqualARecount,
        Self::EmptyingTheCacheKeepsLiveBlocks,
        Self::EverythingIsGivenBack,
        Self::RunningOutIsAnError,
        Self::PressureHooksAreCalled,
        Self::DriverFailuresLoseNothing,
        Self::LimitsAreRespected,
        Self::BareAddressesAreChecked,
        Self::PrivatePoolsAreApart,
        Self::ThreadsGetBlocksOfTheirOwn,
    ];

    /// It in words.
    #[must_use]
    pub const fn words(self) -> &'static str {
        match self {
            Self::LiveBlocksNeverOverlap => "live blocks never overlap",
            Self::BlocksAreAsLargeAsAsked => "blocks are as large as asked",
            Self::BytesStayIntact => "bytes stay intact",
            Self::ReuseWaitsForWork => "reuse waits for work",
            Self::IllegalRequestsAreRefused => "illegal requests are refused",
            Self::WrongHandlesAreRefused => "wrong handles are refused",
            Self::CountersEqualARecount => "counters equal a recount",
            Self::EmptyingTheCacheKeepsLiveBlocks => "emptying the cache keeps live blocks",
            Self::EverythingIsGivenBack => "everything is given back",
            Self::RunningOutIsAnError => "running out is an error",
            Self::PressureHooksAreCalled => "pressure hooks are called",
            Self::DriverFailuresLoseNothing => "driver failures lose nothing",
            Self::LimitsAreRespected => "limits are respected",
            Self::BareAddressesAreChecked => "bare addresses are checked",
            Self::PrivatePoolsAreApart => "private pools are apart",
            Self::ThreadsGetBlocksOfTheirOwn => "threads get blocks of their own",
        }
    }
}

impl fmt::Display for Property {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.words())
    }
}
