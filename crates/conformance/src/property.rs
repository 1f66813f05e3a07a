//! The requirements on every allocator, by name. See `suite` for how each is tested.

use std::fmt::{self, Write};

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
    /// Emptying the cache keeps live blocks, and without live blocks it releases all memory.
    EmptyingTheCacheKeepsLiveBlocks,
    /// A dropped allocator releases all its memory to the driver.
    EverythingIsReleased,
    /// An out-of-memory error contains the requested size, and after frees the same requests succeed again.
    RunningOutIsAnError,
    /// Hooks for memory pressure are called until they are removed.
    PressureHooksAreCalled,
    /// If any one driver call fails once, no memory is lost, and later requests succeed.
    DriverFailuresLoseNothing,
    /// The allocator never reserves more than its limit in bytes.
    LimitsAreRespected,
    /// Calls by address instead of by handle are accepted where a live block starts, and refused elsewhere.
    BareAddressesAreChecked,
    /// Memory of a private pool serves no other request, an open scope routes the requests that its filter
    /// accepts to its pool, and the pool ends with its last user.
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
}

impl fmt::Display for Property {
    /// Writes the variant's name as words, such as "live blocks never overlap".
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, letter) in format!("{self:?}").char_indices() {
            if at > 0 && letter.is_uppercase() {
                f.write_char(' ')?;
            }
            f.write_char(letter.to_ascii_lowercase())?;
        }
        Ok(())
    }
}
