//! Resources that callers of a driver hold, for tests that look for leaks. Random histories of the tests
//! must end with none.
//!
//! Each `sim` and `host` device counts for itself, so tests that run in parallel in one process do not
//! affect each other's numbers. It is not part of the contract: a real device has no such list.

/// Resources that a device has provided and that were not returned to it. Ranges are (start, bytes), in
/// address order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeldResources {
    /// Memory from `allocate`.
    pub segments: Vec<(u64, u64)>,
    /// Reserved address space.
    pub reservations: Vec<(u64, u64)>,
    /// Mapped pieces, by address.
    pub mapped: Vec<(u64, u64)>,
    /// Number of physical pieces that are referenced or mapped.
    pub pieces: u64,
    /// Number of allocations from stream-ordered pools.
    pub pool_ranges: u64,
    /// Number of events that were created and not destroyed.
    pub events: u64,
}

impl HeldResources {
    /// Returns whether there are no such resources.
    #[must_use]
    pub fn is_nothing(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the bytes of all mapped pieces. A piece that is mapped twice counts twice.
    #[must_use]
    pub fn mapped_bytes(&self) -> u64 {
        self.mapped.iter().map(|(_, bytes)| bytes).sum()
    }
}
