//! Resources that callers of a driver hold, for tests that look for leaks.
//!
//! Each simulated device keeps its own list, so tests that run in parallel in one process do not affect each
//! other. The list is no part of the driver interface, because a real device has no such list.

/// Resources that a device has allocated and that were not freed. Ranges are (start, bytes), in address
/// order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeldResources {
    /// Memory from `allocate`.
    pub segments: Vec<(u64, u64)>,
    /// Reserved address space.
    pub reservations: Vec<(u64, u64)>,
    /// Mappings of pieces of physical memory, by address.
    pub mapped: Vec<(u64, u64)>,
    /// Number of pieces of physical memory that are referenced or mapped.
    pub pieces: u64,
    /// Number of allocations from stream-ordered pools.
    pub pool_ranges: u64,
    /// Bytes of pinned memory of the program, including registered memory.
    pub pinned_bytes: u64,
    /// Number of events that were created and not destroyed.
    pub events: u64,
}

impl HeldResources {
    /// Returns whether no resources are held.
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
