//! The requirements on every allocator, by name. See `suite` for how each is tested.

use std::fmt;

/// A requirement on every allocator.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Property {
    /// No byte belongs to two live blocks.
    LiveBlocksNeverOverlap,
    /// A block has all the requested bytes.
    BlocksAreLargeEnough,
    /// Bytes written into a block stay until the block is freed.
    BytesStayIntact,
    /// Memory is allocated again only when earlier work can no longer overwrite it.
    ReuseWaitsForWork,
    /// Requests of zero bytes, or of more than any device has, are errors and change nothing.
    IllegalRequestsAreRefused,
    /// Handles that are not live in this allocator are refused, and a refused free returns the handle.
    WrongHandlesAreRefused,
    /// Counters equal the test's own count.
    CountersEqualARecount,
    /// Emptying the cache keeps live blocks and releases all idle memory.
    EmptyingTheCacheKeepsLiveBlocks,
    /// A dropped allocator releases all its memory to the driver.
    EverythingIsReleased,
    /// An out-of-memory error contains the numbers, and after frees the same requests succeed again.
    RunningOutIsAnError,
    /// Hooks for memory pressure are called.
    PressureHooksAreCalled,
    /// If any one driver call fails once, at most one request fails and no memory is lost.
    DriverFailuresLoseNothing,
    /// The allocator never reserves more than the limit allows.
    LimitsAreRespected,
    /// Bare addresses are accepted where a live block starts, and refused otherwise.
    BareAddressesAreChecked,
    /// Memory of a private pool serves no other request, scopes route requests by their filter, and the
    /// pool ends with its last user.
    PrivatePoolsAreApart,
    /// Threads that allocate and free concurrently get separate blocks, and counters stay right.
    ThreadsGetBlocksOfTheirOwn,
}

impl Property {
    /// All properties.
    pub const ALL: &[Self] = &[
        Self::LiveBlocksNeverOverlap,
        Self::BlocksAreLargeEnough,
        Self::BytesStayIntact,
        Self::ReuseWaitsForWork,
        Self::IllegalRequestsAreRefused,
        Self::WrongHandlesAreRefused,
        Self::CountersEqualARecount,
        Self::EmptyingTheCacheKeepsLiveBlocks,
        Self::EverythingIsReleased,
        Self::RunningOutIsAnError,
        Self::PressureHooksAreCalled,
        Self::DriverFailuresLoseNothing,
        Self::LimitsAreRespected,
        Self::BareAddressesAreChecked,
        Self::PrivatePoolsAreApart,
        Self::ThreadsGetBlocksOfTheirOwn,
    ];

    /// Returns the property in words.
    #[must_use]
    pub const fn words(self) -> &'static str {
        match self {
            Self::LiveBlocksNeverOverlap => "live blocks never overlap",
            Self::BlocksAreLargeEnough => "blocks are large enough",
            Self::BytesStayIntact => "bytes stay intact",
            Self::ReuseWaitsForWork => "reuse waits for work",
            Self::IllegalRequestsAreRefused => "illegal requests are refused",
            Self::WrongHandlesAreRefused => "wrong handles are refused",
            Self::CountersEqualARecount => "counters equal a recount",
            Self::EmptyingTheCacheKeepsLiveBlocks => "emptying the cache keeps live blocks",
            Self::EverythingIsReleased => "everything is released",
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
