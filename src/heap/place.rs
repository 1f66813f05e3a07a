//! Where a block lies: the segment, or the mapped range of a reservation, that it is part of.

use super::{BlockState, Heap, Reservation, Slot};

/// The surroundings of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// Where its segment starts; in a reservation, where the mapped range around it starts.
    pub(crate) address: u64,
    /// The size of that segment or range.
    pub(crate) size_bytes: u64,
    /// The reservation it is part of, if its segment is expandable.
    pub(crate) reservation: Option<Reservation>,
}

impl Heap {
    /// The surroundings of the block at `slot`, which is mapped. Walks over the blocks of its
    /// segment.
    #[must_use]
    pub(crate) fn place_of(&self, slot: Slot) -> Place {
        let before = |slot: &Slot| {
            let previous = self.slab.get(*slot).previous;
            let block = self.slab.try_get(previous)?;
            (block.state != BlockState::Unmapped).then_some(previous)
        };
        let head = std::iter::successors(Some(slot), before).last().unwrap_or(slot);
        Place {
            address: self.slab.get(head).address,
            size_bytes: self.segment_blocks(head).map(|block| block.size_bytes).sum(),
            reservation: self.reservation(self.slab.get(slot).reservation),
        }
    }
}
