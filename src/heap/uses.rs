//! Which other streams use a live block: short lists in one slab, so that recording a stream
//! allocates nothing once warm.

use super::block::Slot;
use crate::ids::StreamId;

#[derive(Debug)]
struct Use {
    stream: StreamId,
    next: Slot,
}

#[derive(Debug)]
pub(super) struct Uses {
    entries: Vec<Use>,
    vacant: Slot,
}

impl Default for Uses {
    fn default() -> Self {
        Self { entries: Vec::new(), vacant: Slot::NONE }
    }
}

impl Uses {
    /// Adds `stream` to the list at `head` unless it is there; returns the new head.
    pub(super) fn add(&mut self, head: Slot, stream: StreamId) -> Slot {
        if self.streams(head).any(|known| known == stream) {
            return head;
        }
        let entry = Use { stream, next: head };
        if self.vacant.is_none() {
            let slot = u32::try_from(self.entries.len()).expect("uses are fewer than 2^32");
            self.entries.push(entry);
            return Slot(slot);
        }
        let slot = self.vacant;
        let place = &mut self.entries[slot.0 as usize];
        self.vacant = place.next;
        *place = entry;
        slot
    }

    pub(super) fn streams(&self, head: Slot) -> impl Iterator<Item = StreamId> + '_ {
        let entry = |slot: Slot| self.entries.get(slot.0 as usize);
        std::iter::successors(entry(head), move |at| entry(at.next)).map(|at| at.stream)
    }

    /// Forgets the list at `head`.
    pub(super) fn clear(&mut self, head: Slot) {
        let mut at = head;
        while !at.is_none() {
            let entry = &mut self.entries[at.0 as usize];
            let next = std::mem::replace(&mut entry.next, self.vacant);
            self.vacant = at;
            at = next;
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.entries.capacity() * size_of::<Use>()
    }
}
