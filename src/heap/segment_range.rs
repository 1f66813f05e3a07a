//! The segment, or the mapped range of a reservation, that a block belongs to.

use super::{BlockState, Heap, Reservation, Slot};

/// The segment around a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SegmentRange {
    /// The address of its segment; in a reservation, of the mapped range around the block.
    pub(crate) address: u64,
    /// The size of that segment or range.
    pub(crate) size_bytes: u64,
    /// The reservation that it belongs to, if its segment is expandable.
    pub(crate) reservation: Option<Reservation>,
}

impl Heap {
    /// Returns the segment around the mapped block at `slot`. Visits the blocks of that segment.
    #[must_use]
    pub(crate) fn segment_of(&self, slot: Slot) -> SegmentRange {
        let before = |slot: &Slot| {
            let previous = self.slab.get(*slot).previous;
            let block = self.slab.try_get(previous)?;
            (block.state != BlockState::Unmapped).then_some(previous)
        };
        let head = std::iter::successors(Some(slot), before).last().unwrap_or(slot);
        SegmentRange {
            address: self.slab.get(head).address,
            size_bytes: self.segment_blocks(head).map(|block| block.size_bytes).sum(),
            reservation: self.reservation(self.slab.get(slot).reservation),
        }
    }
}
