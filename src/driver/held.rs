//! What a driver has given out and not taken back, for tests that look for leaks.
//!
//! `sim` and `host` count for themselves, so tests that run beside each other in one process do not
//! disturb each other's numbers. No part of the contract: a real device cannot tell.

/// What a device has given out and not taken back. Ranges are (start, bytes), in address order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// What `allocate` returned.
    pub segments: Vec<(u64, u64)>,
    /// Reserved address space.
    pub reservations: Vec<(u64, u64)>,
    /// Pieces where they are mapped.
    pub mapped: Vec<(u64, u64)>,
    /// Physical pieces that are held or mapped.
    pub pieces: u64,
    /// Ranges from stream-ordered pools.
    pub pool_ranges: u64,
    /// Events that were created and not destroyed.
    pub events: u64,
}

impl Held {
    /// Whether nothing is out.
    #[must_use]
    pub fn is_nothing(&self) -> bool {
        *self == Self::default()
    }

    /// Bytes of all mapped pieces. A piece that is mapped twice counts twice.
    #[must_use]
    pub fn mapped_bytes(&self) -> u64 {
        self.mapped.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Bytes of address space that are reserved.
    #[must_use]
    pub fn reserved_bytes(&self) -> u64 {
        self.reservations.iter().map(|(_, bytes)| bytes).sum()
    }
}
