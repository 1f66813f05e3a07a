//! Which of several free blocks of one size is taken first: the one with the lowest key.
//!
//! A key is a u64 in the block itself. The index compares size, then key, and never looks at the segment or
//! at the rule. The rule decides only how keys are assigned:
//!
//! | | `Address` | `SegmentAge` | `BlockAge` |
//! |---|---|---|---|
//! | a new segment | its address | its position | the next number |
//! | the front of a split | the key of the whole | the same | the next number |
//! | the rest of a split | that plus the bytes of the front | the same | the key of the whole |
//! | blocks that are joined | the key of the lower one | the same | the key of the one being freed |
//!
//! **Positions.** Under `SegmentAge` all segments and reservations of a heap stand one behind the other, in
//! the order in which they came, in an address space of their own that is never used twice. The position of
//! a block is its key. It orders by age of the segment, then by address, and a block inherits the age without
//! a look at its segment: splitting and joining do the same arithmetic as with addresses.
//!
//! **Numbers.** Under `BlockAge` each block structure gets a number when it is made. Mapping pages cuts a gap
//! the other way round than a request cuts a free block: the mapped front keeps the number and the rest of
//! the gap is new. Unmapping leaves the number with the gap; the pieces before and behind it are new.
//!
//! Positions and numbers are counted in each heap. Only blocks of one heap are ever compared, so the order is
//! that of a counter for the whole allocator, and no counter is shared between threads. Numbers cannot run
//! out. Positions run out after 2^64 bytes of segments and reservations; then the heap assigns them again, in
//! the same order.
//!
//! Memory without a history gets ages by address. When the rule of a heap changes, its segments and, under
//! `BlockAge`, its blocks count as old as their addresses are low. The segments of a layout that is installed
//! come in address order, and its blocks are cut front to back, as by requests.

use super::births::Births;
use super::block::{BlockState, Slot};
use super::index::FreeIndex;
use super::{Heap, check};

#[cfg(test)]
mod tests;

/// What decides between free blocks of one size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum TieRule {
    /// The lowest address.
    #[default]
    Address,
    /// The segment that came first, then the lowest address.
    SegmentAge,
    /// The block that was made first, wherever it is.
    BlockAge,
}

/// Assigns keys, and births with them: what a hit does besides the common case is behind one flag.
#[derive(Debug, Default)]
pub(super) struct Order {
    rule: TieRule,
    /// Whether the rule is [`TieRule::BlockAge`] or births are kept.
    takes_care: bool,
    /// The next position or number.
    next: u64,
    /// When blocks became free, while the collector needs it.
    births: Option<Births>,
}

impl Order {
    pub(super) fn of(rule: TieRule) -> Self {
        Self { rule, takes_care: rule == TieRule::BlockAge, next: 0, births: None }
    }

    /// Whether more than the common case is to be done: [`Heap::cut_with_care`], [`Heap::free_with_care`].
    #[inline(always)]
    pub(super) fn takes_care(&self) -> bool {
        self.takes_care
    }

    fn numbers_blocks(&self) -> bool {
        self.rule == TieRule::BlockAge
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Notes that the block at `slot` became free at `clock`.
    pub(super) fn note_birth(&mut self, slot: Slot, clock: u64) {
        if let Some(births) = &mut self.births {
            births.note(slot, clock);
        }
    }

    /// Returns when the free block at `slot` became free; 0 while nothing is kept.
    pub(super) fn birth_of(&self, slot: Slot) -> u64 {
        self.births.as_ref().map_or(0, |births| births.of(slot))
    }

    pub(super) fn bytes(&self) -> usize {
        self.births.as_ref().map_or(0, Births::bytes)
    }

    /// Returns the key of a new segment; `None` when positions have run out.
    fn of_segment(&mut self, address: u64, size_bytes: u64) -> Option<u64> {
        match self.rule {
            TieRule::Address => Some(address),
            TieRule::BlockAge => Some(self.number()),
            TieRule::SegmentAge => {
                let behind = self.next.checked_add(size_bytes)?;
                Some(std::mem::replace(&mut self.next, behind))
            }
        }
    }
}

impl Heap {
    /// Returns the key of a segment or reservation that comes now.
    pub(super) fn key_of_segment(&mut self, address: u64, size_bytes: u64) -> u64 {
        if let Some(key) = self.order.of_segment(address, size_bytes) {
            return key;
        }
        self.assign_keys(|heap, head| heap.slab.get(head).key);
        // Segments of 2^64 bytes in all do not exist: the next one is the youngest whatever its key.
        self.order.of_segment(address, size_bytes).unwrap_or(u64::MAX - size_bytes)
    }

    /// Orders free blocks of one size by another rule from now on. Ages count from now: the segments and
    /// blocks that are there are as old as their addresses are low. Looks at every block.
    pub(crate) fn set_tie_rule(&mut self, rule: TieRule) {
        if self.order.rule != rule {
            let births = self.order.births.take();
            let takes_care = births.is_some() || rule == TieRule::BlockAge;
            self.order = Order { births, takes_care, ..Order::of(rule) };
            self.assign_keys(|heap, head| heap.slab.get(head).address);
        }
    }

    /// Keeps from now on when blocks become free.
    pub(crate) fn keep_births(&mut self) {
        self.order.births.get_or_insert_default();
        self.order.takes_care = true;
    }

    /// The front of the block that had the key `whole` was just cut off: gives the parts the keys that they
    /// have under `BlockAge`.
    #[cold]
    #[inline(never)]
    pub(super) fn cut_with_care(&mut self, front: Slot, rest: Slot, whole: u64) {
        if self.order.numbers_blocks() {
            self.slab.get_mut(front).key = self.order.number();
            self.slab.get_mut(rest).key = whole;
        }
    }

    /// Returns the key of a block that becomes free at `clock`, has the key `own` and was joined with the
    /// blocks beside it: under other rules than `BlockAge` that is `joined`.
    #[cold]
    #[inline(never)]
    pub(super) fn free_with_care(&mut self, slot: Slot, own: u64, joined: u64, clock: u64) -> u64 {
        self.order.note_birth(slot, clock);
        if self.order.numbers_blocks() { own } else { joined }
    }

    /// Exchanges the ages of two parts of a block, of which the front is to keep the age of the whole.
    pub(super) fn swap_ages(&mut self, front: Slot, rest: Slot) {
        if self.order.numbers_blocks() {
            let age = self.slab.get(front).key;
            let older = std::mem::replace(&mut self.slab.get_mut(rest).key, age);
            self.slab.get_mut(front).key = older;
        }
    }

    /// Returns the key of a block of the key `own` that absorbs the block before it, of the key `before`.
    pub(super) fn joined_key(&self, before: u64, own: u64) -> u64 {
        if self.order.numbers_blocks() { own } else { before }
    }

    /// Assigns all keys again, to segments in the order of `rank`, and indexes the free blocks by them.
    fn assign_keys(&mut self, rank: impl Fn(&Self, Slot) -> u64) {
        let mut heads: Vec<Slot> = self.chain_heads().collect();
        heads.sort_by_key(|&head| rank(self, head));
        self.free = [FreeIndex::default(), FreeIndex::default()];
        self.order.next = 0;
        for head in heads {
            let mut at = head;
            while !at.is_none() {
                let block = *self.slab.get(at);
                // Blocks of a chain lie one behind the other: they get positions like segments.
                let key = self.order.of_segment(block.address, block.size_bytes);
                let key = key.unwrap_or(u64::MAX - block.size_bytes);
                let changed = self.slab.get_mut(at);
                changed.key = key;
                if changed.state == BlockState::Free {
                    changed.unlink();
                    let index = &mut self.free[block.kind.index()];
                    index.insert(&mut self.slab, at, block.size_bytes, key);
                }
                at = block.next;
            }
        }
    }

    /// Checks I10.
    pub(super) fn check_keys(&self) -> Result<(), check::Broken> {
        let mut ends = Vec::new();
        for head in self.chain_heads() {
            let first = *self.slab.get(head);
            for (slot, block) in self.chain(head) {
                let key = self.slab.get(slot).key;
                let expected = match self.order.rule {
                    TieRule::Address => block.address,
                    TieRule::SegmentAge => first.key + (block.address - first.address),
                    TieRule::BlockAge => key,
                };
                check::ensure(key == expected, "I10", || format!("{key}, not {expected}"))?;
                let bytes = if self.order.numbers_blocks() { 1 } else { block.size_bytes };
                ends.push((key, bytes));
            }
        }
        ends.sort_unstable();
        let apart = ends.windows(2).all(|two| two[1].0 - two[0].0 >= two[0].1);
        check::ensure(apart, "I10", || "two blocks share a key".to_owned())
    }
}
