//! The other streams that use a live block: short lists in one slab, so that `record_stream` allocates
//! no memory in the steady state. A use that was recorded only during graph captures is marked: it ends
//! with the capture. A table finds the streams of lists that are not short.

use hashbrown::HashMap;

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
    /// All entries of lists with more than [`SEARCHED_MAX`] of them, by block and stream.
    long: HashMap<(Slot, StreamId), Slot>,
}

/// The number of entries up to which a list is searched one by one.
const SEARCHED_MAX: usize = 16;

impl Default for Uses {
    fn default() -> Self {
        Self { entries: Vec::new(), vacant: Slot::NONE, long: HashMap::new() }
    }
}

impl Uses {
    /// Adds a stream to the list at `head`, which belongs to `block`, if it is missing. Returns the new head.
    #[inline]
    pub(super) fn add(&mut self, block: Slot, head: Slot, new: StreamUse) -> Slot {
        let (mut at, mut len) = (head, 0);
        while let Some(known) = self.entries.get_mut(index_of(at)) {
            if len == SEARCHED_MAX {
                return self.add_to_long(block, head, new);
            }
            if known.by.stream == new.stream {
                known.by.captured &= new.captured;
                return head;
            }
            at = known.next;
            len += 1;
        }
        let added = self.push(Use { by: new, next: head });
        if len == SEARCHED_MAX {
            self.note_long(block, added);
        }
        added
    }

    /// Stores an entry and returns its slot.
    #[inline]
    fn push(&mut self, entry: Use) -> Slot {
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

    /// As [`add`](Self::add), for a list with more than [`SEARCHED_MAX`] entries.
    #[cold]
    fn add_to_long(&mut self, block: Slot, head: Slot, new: StreamUse) -> Slot {
        if let Some(known) = self.long.get(&(block, new.stream)) {
            self.entries[index_of(*known)].by.captured &= new.captured;
            return head;
        }
        let added = self.push(Use { by: new, next: head });
        self.long.insert((block, new.stream), added);
        added
    }

    /// Notes all entries of a list that is no longer short.
    #[cold]
    fn note_long(&mut self, block: Slot, head: Slot) {
        let mut at = head;
        while let Some(entry) = self.entries.get(index_of(at)) {
            self.long.insert((block, entry.by.stream), at);
            at = entry.next;
        }
    }

    #[inline]
    pub(super) fn of(&self, head: Slot) -> impl Iterator<Item = StreamUse> + '_ {
        let entry = |slot: Slot| self.entries.get(index_of(slot));
        std::iter::successors(entry(head), move |at| entry(at.next)).map(|at| at.by)
    }

    /// Clears the list at `head`, which belongs to `block`.
    #[inline]
    pub(super) fn clear(&mut self, block: Slot, head: Slot) {
        if !self.long.is_empty() {
            self.forget_long(block, head);
        }
        let mut at = head;
        while !at.is_none() {
            let entry = &mut self.entries[index_of(at)];
            let next = std::mem::replace(&mut entry.next, self.vacant);
            self.vacant = at;
            at = next;
        }
    }

    #[cold]
    fn forget_long(&mut self, block: Slot, head: Slot) {
        let mut at = head;
        while let Some(entry) = self.entries.get(index_of(at)) {
            self.long.remove(&(block, entry.by.stream));
            at = entry.next;
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.entries.capacity() * size_of::<Use>() + self.long.allocation_size()
    }
}

/// Returns the index of the entry with this number. No entry has the number of `Slot::NONE`.
#[inline]
fn index_of(entry: Slot) -> usize {
    (entry.0 as usize).wrapping_sub(1)
}
