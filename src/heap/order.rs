//! The order among free blocks of one size: the one with the lowest key is allocated first.
//!
//! A key is a u64 in the block itself. The index compares size, then key, and depends on nothing else.
//! The tie rule only decides how keys are assigned:
//!
//! | | `Address` | `SegmentAge` | `BlockAge` |
//! |---|---|---|---|
//! | a new segment | its address | its position | the next number |
//! | the front of a split | the key of the whole | the same | the next number |
//! | the rest of a split | that plus the bytes of the front | the same | the key of the whole |
//! | blocks that are joined | the key of the lower one | the same | the key of the one being freed |
//!
//! **Positions.** Under `SegmentAge`, a heap assigns its segments and reservations consecutive ranges of
//! a virtual address space, in order of arrival. Ranges are never reused. The key of a block is its
//! position in that space. Keys thus order blocks by age of the segment, then by address, and splitting
//! and joining use the same arithmetic as addresses.
//!
//! **Numbers.** Under `BlockAge`, each block gets a number when it is created. A request splits a free
//! block so that the front is new. Mapping pages splits a gap the other way: the mapped front keeps the
//! number and the rest of the gap is new. Unmapping leaves the number with the gap; the parts before and
//! behind it are new.
//!
//! Each heap counts positions and numbers for itself. Only blocks of one heap are ever compared, so the
//! order equals that of a single counter for the allocator, and threads share no counter. Numbers cannot
//! run out. Positions run out after 2^64 bytes of segments and reservations; then the heap reassigns
//! them in the same order.
//!
//! Memory without a known age is ordered by address. When the rule of a heap changes, its segments and,
//! under `BlockAge`, its blocks get ages in address order. The segments of an installed layout are added
//! in address order, and its blocks are split off front to back, as for requests.

use super::at::block_at_mut;
use super::block::{Block, BlockState, Slot};
use super::index::FreeIndex;
use super::{Heap, check};

#[cfg(test)]
mod tests;

/// The rule that orders free blocks of one size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum TieRule {
    /// The lowest address first.
    #[default]
    Address,
    /// The oldest segment first, then the lowest address.
    SegmentAge,
    /// The oldest block first, in whichever segment.
    BlockAge,
}

/// Assigns keys and records birth times. One flag covers everything a hit does beyond the common case.
#[derive(Debug, Default)]
pub(super) struct Order {
    rule: TieRule,
    /// True if the rule is [`TieRule::BlockAge`] or birth times are recorded.
    updates_on_hit: bool,
    /// The next position or number.
    next: u64,
    /// The time at which each block became free, by the garbage collector's clock, from the moment the
    /// collector is enabled. By index; later blocks have no time yet. Apart from the blocks, because few
    /// programs set `garbage_collection_threshold`.
    births: Option<Vec<u64>>,
}

impl Order {
    pub(super) fn of(rule: TieRule) -> Self {
        Self { rule, updates_on_hit: rule == TieRule::BlockAge, next: 0, births: None }
    }

    /// Returns true if [`note_split`](Self::note_split) and [`note_birth`](Self::note_birth) must be called.
    #[inline(always)]
    pub(super) fn updates_on_hit(&self) -> bool {
        self.updates_on_hit
    }

    fn numbers_blocks(&self) -> bool {
        self.rule == TieRule::BlockAge
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Records that the block at `slot` became free at `clock`.
    #[cold]
    #[inline(never)]
    pub(super) fn note_birth(&mut self, slot: Slot, clock: u64) {
        let Some(births) = &mut self.births else { return };
        let index = slot.index() as usize;
        if births.len() <= index {
            births.resize(index + 1, 0);
        }
        births[index] = clock;
    }

    /// Returns the time at which the free block at `slot` became free; 0 if times are not recorded.
    pub(super) fn birth_of(&self, slot: Slot) -> u64 {
        let births = self.births.as_ref();
        births.and_then(|births| births.get(slot.index() as usize)).copied().unwrap_or(0)
    }

    pub(super) fn bytes(&self) -> usize {
        self.births.as_ref().map_or(0, |births| births.capacity() * size_of::<u64>())
    }

    /// Records that the block at `rest` was split off behind the one at `front`, whose key both have
    /// yet, and became free at `clock`. Sets their keys under `BlockAge`.
    #[cold]
    #[inline(never)]
    pub(super) fn note_split(&mut self, blocks: &mut [Block], front: Slot, rest: Slot, clock: u64) {
        self.update_keys_of_split(blocks, front, rest);
        self.note_birth(rest, clock);
    }

    /// Sets the keys under `BlockAge` after the block at `front` was cut: the front becomes new, and the
    /// rest gets the key of the whole.
    pub(super) fn update_keys_of_split(&mut self, blocks: &mut [Block], front: Slot, rest: Slot) {
        if self.numbers_blocks() {
            let whole = std::mem::replace(&mut block_at_mut(blocks, front).key, self.number());
            block_at_mut(blocks, rest).key = whole;
        }
    }

    /// Returns the key of a block with the key `own` that absorbs the block before it, which has the key
    /// `before`.
    #[inline]
    pub(super) fn joined_key(&self, before: u64, own: u64) -> u64 {
        if self.numbers_blocks() { own } else { before }
    }

    /// Returns the key of a new segment, or `None` when positions have run out.
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
    /// Returns the key of a segment or reservation that is being added.
    pub(super) fn key_of_segment(&mut self, address: u64, size_bytes: u64) -> u64 {
        if let Some(key) = self.order.of_segment(address, size_bytes) {
            return key;
        }
        self.assign_keys(|heap, head| heap.slab.get(head).key);
        // Segments cannot total 2^64 bytes: the next one is the youngest with any key.
        self.order.of_segment(address, size_bytes).unwrap_or(u64::MAX - size_bytes)
    }

    /// Changes the tie rule. Existing segments and blocks get ages in address order. Visits every block.
    pub(crate) fn set_tie_rule(&mut self, rule: TieRule) {
        if self.order.rule != rule {
            let births = self.order.births.take();
            let updates_on_hit = births.is_some() || rule == TieRule::BlockAge;
            self.order = Order { births, updates_on_hit, ..Order::of(rule) };
            self.assign_keys(|heap, head| heap.slab.get(head).address);
        }
    }

    /// Starts to record the times at which blocks become free.
    pub(crate) fn keep_births(&mut self) {
        self.order.births.get_or_insert_default();
        self.order.updates_on_hit = true;
    }

    /// Exchanges the ages of the two parts of a split block, so that the front keeps the age of the
    /// whole.
    pub(super) fn swap_ages(&mut self, front: Slot, rest: Slot) {
        if self.order.numbers_blocks() {
            let age = self.slab.get(front).key;
            let older = std::mem::replace(&mut self.slab.get_mut(rest).key, age);
            self.slab.get_mut(front).key = older;
        }
    }

    /// Reassigns all keys, to segments in the order of `rank`, and rebuilds the index of free blocks.
    fn assign_keys(&mut self, rank: impl Fn(&Self, Slot) -> u64) {
        let mut heads: Vec<Slot> = self.chain_heads().collect();
        heads.sort_by_key(|&head| rank(self, head));
        self.free = [FreeIndex::default(), FreeIndex::default()];
        self.order.next = 0;
        for head in heads {
            let mut at = head;
            while !at.is_none() {
                let block = *self.slab.get(at);
                // The blocks of a chain are contiguous: each gets the next position, as segments do.
                let key = self.order.of_segment(block.address, block.size_bytes);
                let key = key.unwrap_or(u64::MAX - block.size_bytes);
                self.slab.get_mut(at).key = key;
                if block.state == BlockState::Free {
                    self.index(at);
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
