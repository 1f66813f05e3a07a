//! The other streams that use a live block: short lists in one slab, so that `record_stream` allocates
//! no memory in the steady state. A use that was recorded only during graph captures is marked: it ends
//! with the capture.

use super::block::Slot;
use crate::ids::StreamId;

#[derive(Debug)]
struct Use {
    by: StreamUse,
    next: Slot,
}

/// A stream that uses a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StreamUse {
    pub(crate) stream: StreamId,
    /// True if it was recorded during captures only.
    pub(crate) captured: bool,
}

impl StreamUse {
    /// Marks a live block of a tag that is not awake, so that a free takes the path of blocks that other
    /// streams use. It is not a real stream: no event is recorded on it.
    pub(crate) const BACKED_UP: Self = Self { stream: StreamId(u64::MAX), captured: true };
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
    /// Adds `stream` to the list at `head` if it is missing, and returns the new head.
    #[inline]
    pub(super) fn add(&mut self, head: Slot, new: StreamUse) -> Slot {
        let mut at = head;
        while let Some(known) = self.entries.get_mut(index_of(at)) {
            if known.by.stream == new.stream {
                known.by.captured &= new.captured;
                return head;
            }
            at = known.next;
        }
        let entry = Use { by: new, next: head };
        if self.vacant.is_none() {
            self.entries.push(entry);
            return Slot(u32::try_from(self.entries.len()).expect("uses are fewer than 2^32"));
        }
        let slot = self.vacant;
        let vacant = &mut self.entries[index_of(slot)];
        self.vacant = vacant.next;
        *vacant = entry;
        slot
    }

    #[inline]
    pub(super) fn of(&self, head: Slot) -> impl Iterator<Item = StreamUse> + '_ {
        let entry = |slot: Slot| self.entries.get(index_of(slot));
        std::iter::successors(entry(head), move |at| entry(at.next)).map(|at| at.by)
    }

    /// Clears the list at `head`.
    #[inline]
    pub(super) fn clear(&mut self, head: Slot) {
        let mut at = head;
        while !at.is_none() {
            let entry = &mut self.entries[index_of(at)];
            let next = std::mem::replace(&mut entry.next, self.vacant);
            self.vacant = at;
            at = next;
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.entries.capacity() * size_of::<Use>()
    }
}

/// Returns the index of the entry with this number. No entry has the number of `Slot::NONE`.
#[inline]
fn index_of(entry: Slot) -> usize {
    (entry.0 as usize).wrapping_sub(1)
}
