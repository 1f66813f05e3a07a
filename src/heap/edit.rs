//! All operations that change blocks: allocate and split, free and coalesce, add and remove segments.
//!
//! All invariants hold before and after each operation. Changes that the caller must count are returned.

use super::block::{Block, FIXED};
use super::uses::StreamUse;
use super::{BlockId, BlockState, Heap, Slot};
use crate::size::{LARGE_REST_MIN_BYTES, MIN_BLOCK_BYTES, PoolKind};

/// Decides which free block may serve a request, and when it is split. Sizes in bytes.
///
/// Source: PyTorch's `max_split_size_mb` and `max_non_split_rounding_mb`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FitRules {
    /// Blocks of this size or more are oversize: they are not split. `u64::MAX` disables the rule.
    pub(crate) max_split_bytes: u64,
    /// An oversize request uses an oversize block only if the block is larger by less than this.
    pub(crate) oversize_slack_bytes: u64,
    /// True if new segments are expandable. Then blocks of expandable segments may be allocated, and
    /// remainders are split off down to 512 B.
    pub(crate) expandable: bool,
    /// True if the oversize rules also apply to expandable segments, as in PyTorch. There they make
    /// memory grow without bound.
    pub(crate) oversize_in_expandable: bool,
    /// True if blocks are never split.
    pub(crate) no_split: bool,
}

impl FitRules {
    /// No block is oversize.
    pub(crate) const NONE: Self = Self {
        max_split_bytes: u64::MAX,
        oversize_slack_bytes: 0,
        expandable: false,
        oversize_in_expandable: true,
        no_split: false,
    };

    /// Splits off every remainder of any block: for placing a block at an exact address.
    pub(crate) const CUT: Self = Self { expandable: true, ..Self::NONE };

    /// Returns true if a block of `block_bytes`, which is large enough, may serve a request of
    /// `rounded_bytes`.
    #[inline]
    #[must_use]
    pub(crate) const fn allow(&self, rounded_bytes: u64, block_bytes: u64) -> bool {
        if rounded_bytes < self.max_split_bytes {
            block_bytes < self.max_split_bytes
        } else {
            block_bytes < rounded_bytes.saturating_add(self.oversize_slack_bytes)
        }
    }

    /// Returns true if the `rest_bytes` behind a request of `rounded_bytes` become a separate free
    /// block.
    #[inline]
    #[must_use]
    pub(crate) const fn splits(&self, kind: PoolKind, rounded_bytes: u64, rest_bytes: u64) -> bool {
        match kind {
            _ if self.no_split => false,
            PoolKind::Small => rest_bytes >= MIN_BLOCK_BYTES,
            PoolKind::Large if self.expandable => rest_bytes >= MIN_BLOCK_BYTES,
            PoolKind::Large => {
                rounded_bytes < self.max_split_bytes && rest_bytes > LARGE_REST_MIN_BYTES
            }
        }
    }
}

/// The change in the number and size of inactive splits: free blocks that are only a part of their
/// segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SplitChange {
    /// The change in their number.
    pub(crate) count: i64,
    /// The change in their total bytes.
    pub(crate) bytes: i64,
}

impl SplitChange {
    /// Returns the sum of two changes.
    #[must_use]
    pub(crate) const fn plus(self, other: Self) -> Self {
        Self { count: self.count + other.count, bytes: self.bytes + other.bytes }
    }
}

/// A block that was allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AllocatedBlock {
    pub(crate) id: BlockId,
    pub(crate) address: u64,
    pub(crate) size_bytes: u64,
    pub(crate) kind: PoolKind,
    /// The change in inactive splits.
    pub(crate) inactive: SplitChange,
}

/// A block that became free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Completed {
    /// Its address before it was joined with its neighbours.
    pub(crate) address: u64,
    /// Its size before it was joined.
    pub(crate) size_bytes: u64,
    /// The bytes that its caller had requested.
    pub(crate) requested_bytes: u64,
    pub(crate) kind: PoolKind,
    /// The change in inactive splits.
    pub(crate) inactive: SplitChange,
}

#[expect(clippy::cast_possible_wrap, reason = "segments are smaller than 2^63 bytes")]
#[inline]
fn signed(bytes: u64) -> i64 {
    bytes as i64
}

impl Heap {
    /// Returns the smallest free block that is large enough for `rounded_bytes`, with the lowest key
    /// among equal sizes. If the rules refuse it, the result is `None`: later blocks are larger and are
    /// refused too. Exception: the rules may exempt later blocks of expandable segments.
    #[inline(always)]
    #[must_use]
    pub(crate) fn best_fit(
        &self,
        kind: PoolKind,
        rounded_bytes: u64,
        rules: &FitRules,
    ) -> Option<Slot> {
        let slot = self.free[kind.index()].first_at_least(&self.slab, rounded_bytes)?;
        if rules.max_split_bytes == u64::MAX && !self.expandable.was_ever_used() {
            return Some(slot);
        }
        if self.slab.get(slot).is_expandable() {
            return self.best_fit_among_expandable(slot, rounded_bytes, rules);
        }
        if rules.allow(rounded_bytes, self.slab.get(slot).size_bytes) {
            return Some(slot);
        }
        if rules.oversize_in_expandable || !self.expandable.is_used() {
            return None;
        }
        self.best_fit_among_expandable(slot, rounded_bytes, rules)
    }

    /// Allocates the free block at `slot` for `requested_bytes`, rounded to `rounded_bytes`, and splits
    /// off the remainder if the rules allow it. `clock` is the time at which the remainder became free.
    #[inline(always)]
    pub(crate) fn allocate(
        &mut self,
        slot: Slot,
        rounded_bytes: u64,
        requested_bytes: u64,
        rules: &FitRules,
        clock: impl FnOnce() -> u64,
    ) -> AllocatedBlock {
        let whole = *self.slab.get(slot);
        debug_assert!(whole.state == BlockState::Free, "I3: only free blocks are allocated");
        debug_assert!(whole.size_bytes >= rounded_bytes);
        let rest_bytes = whole.size_bytes - rounded_bytes;
        let index = &mut self.free[whole.kind.index()];
        index.remove(&mut self.slab, slot, &whole);
        let mut inactive = SplitChange::default();
        let (front, size_bytes, generation) = if rules.splits(whole.kind, rounded_bytes, rest_bytes)
        {
            let id = self.cut_front(slot, &whole, rounded_bytes, requested_bytes);
            let mut rest_key = whole.key.wrapping_add(rounded_bytes);
            if self.order.updates_on_hit() {
                self.update_keys_of_split(id.slot, slot, whole.key);
                self.order.note_birth(slot, clock());
                rest_key = self.slab.get(slot).key;
            }
            let index = &mut self.free[whole.kind.index()];
            index.insert(&mut self.slab, slot, rest_bytes, rest_key);
            inactive = if whole.is_split() {
                SplitChange { count: 0, bytes: -signed(rounded_bytes) }
            } else {
                SplitChange { count: 1, bytes: signed(rest_bytes) }
            };
            (id.slot, rounded_bytes, id.generation)
        } else {
            let block = self.slab.get_mut(slot);
            block.state = BlockState::Live;
            block.requested_bytes = requested_bytes;
            block.links[0] = Slot::NONE;
            if whole.is_split() {
                inactive = SplitChange { count: -1, bytes: -signed(whole.size_bytes) };
            }
            (slot, whole.size_bytes, whole.generation)
        };
        // Parts of expandable segments are not counted: they are not fragmentation.
        if whole.is_expandable() {
            inactive = SplitChange::default();
        }
        if let Some(starts) = &mut self.starts {
            starts.insert(&mut self.slab, front, whole.address);
        }
        let id = BlockId { slot: front, generation };
        AllocatedBlock { id, address: whole.address, size_bytes, kind: whole.kind, inactive }
    }

    /// Splits `front_bytes` off the front of the block at `slot`, which is in no index; `whole` is a
    /// copy of it. The front becomes live with `requested_bytes`, but is not added to the table of
    /// starts. The remainder keeps the slot and all fields except links. The keys are correct for every
    /// rule except `BlockAge`.
    #[inline(always)]
    pub(super) fn cut_front(
        &mut self,
        slot: Slot,
        whole: &Block,
        front_bytes: u64,
        requested_bytes: u64,
    ) -> BlockId {
        let (front, block) = self.slab.occupy();
        block.address = whole.address;
        block.size_bytes = front_bytes;
        block.key = whole.key;
        block.requested_bytes = requested_bytes;
        block.previous = whole.previous;
        block.next = slot;
        block.links[0] = Slot::NONE;
        block.kind = whole.kind;
        block.reservation = whole.reservation;
        block.state = BlockState::Live;
        let generation = block.generation;
        let rest = self.slab.get_mut(slot);
        rest.address = whole.address + front_bytes;
        rest.size_bytes = whole.size_bytes - front_bytes;
        rest.key = whole.key.wrapping_add(front_bytes);
        rest.previous = front;
        rest.unlink();
        if !whole.previous.is_none() {
            self.slab.get_mut(whole.previous).next = front;
        }
        BlockId { slot: front, generation }
    }

    /// Records that a stream uses the live block at `slot`.
    pub(crate) fn record_use(&mut self, slot: Slot, by: StreamUse) {
        let block = self.slab.get_mut(slot);
        debug_assert!(block.state == BlockState::Live);
        block.links[0] = self.uses.add(block.links[0], by);
    }

    /// Returns the current id of the block at `slot`.
    #[must_use]
    pub(crate) fn id(&self, slot: Slot) -> BlockId {
        BlockId { slot, generation: self.slab.get(slot).generation }
    }

    /// Removes all stream uses of the live block at `slot`. The caller knows that their work is done.
    pub(crate) fn forget_uses(&mut self, slot: Slot) {
        let uses = std::mem::replace(&mut self.slab.get_mut(slot).links[0], Slot::NONE);
        self.uses.clear(uses);
    }

    /// Returns the other streams that use the live block at `slot`.
    #[inline]
    pub(crate) fn uses(&self, slot: Slot) -> impl Iterator<Item = StreamUse> + '_ {
        self.uses.of(self.slab.get(slot).links[0])
    }

    /// Returns true if other streams use the live block at `slot`.
    #[inline]
    #[must_use]
    pub(crate) fn is_used_by_other_streams(&self, slot: Slot) -> bool {
        !self.slab.get(slot).links[0].is_none()
    }

    /// Retires a live block that other streams use. It becomes free when `events` (at least 1) have
    /// passed. Its id is stale from now on.
    #[inline]
    pub(crate) fn drain(&mut self, slot: Slot, events: u32) {
        debug_assert!(events > 0, "I5: a draining block waits for something");
        let mut done = *self.slab.get(slot);
        self.retire(slot, &mut done);
        let block = self.slab.get_mut(slot);
        block.generation = done.generation;
        let uses = std::mem::replace(&mut block.links[0], Slot(events));
        block.state = BlockState::Draining;
        self.uses.clear(uses);
    }

    /// Sets the number of events (at least 1) for which the draining block at `slot` waits.
    pub(crate) fn wait_for(&mut self, slot: Slot, events: u32) {
        debug_assert!(events > 0, "I5: a draining block waits for something");
        let block = self.slab.get_mut(slot);
        debug_assert!(block.state == BlockState::Draining);
        block.links[0] = Slot(events);
    }

    /// Counts one passed event of a draining block. Returns true if it was the last; the caller then
    /// calls [`complete`](Self::complete).
    pub(crate) fn event_passed(&mut self, slot: Slot) -> bool {
        let block = self.slab.get_mut(slot);
        debug_assert!(block.state == BlockState::Draining && block.links[0].0 > 0, "I5");
        block.links[0].0 -= 1;
        block.links[0].0 == 0
    }

    /// Frees a live block that no other stream uses, and joins it with its free neighbours. `clock` is
    /// the time at which it became free. Its id is stale from now on.
    #[inline(always)]
    pub(crate) fn free(&mut self, slot: Slot, clock: impl FnOnce() -> u64) -> Completed {
        debug_assert!(!self.is_used_by_other_streams(slot), "blocks in use elsewhere drain first");
        let mut done = *self.slab.get(slot);
        self.retire(slot, &mut done);
        self.make_free(slot, &done, clock)
    }

    /// Retires the live block at `slot`: increments the generation in the copy, which the caller stores.
    #[inline(always)]
    fn retire(&mut self, slot: Slot, block: &mut Block) {
        debug_assert!(block.state == BlockState::Live, "only live blocks are freed");
        if let Some(starts) = &mut self.starts {
            starts.remove(&mut self.slab, slot, block);
        }
        block.generation = block.generation.wrapping_add(1);
    }

    /// Makes a retired or drained block free, and joins it with its free neighbours.
    #[inline]
    pub(crate) fn complete(&mut self, slot: Slot, clock: u64) -> Completed {
        let done = *self.slab.get(slot);
        self.make_free(slot, &done, || clock)
    }

    /// Makes the block at `slot` free. `done` is a copy of it with the new generation.
    #[inline(always)]
    fn make_free(&mut self, slot: Slot, done: &Block, clock: impl FnOnce() -> u64) -> Completed {
        let mut inactive = SplitChange::default();
        let (mut address, mut size_bytes) = (done.address, done.size_bytes);
        let (mut previous, mut next, mut key) = (done.previous, done.next, done.key);
        if let Some(removed) = self.take_free(previous, &mut inactive) {
            address = removed.address;
            size_bytes += removed.size_bytes;
            key = removed.key;
            previous = removed.previous;
            if !previous.is_none() {
                self.slab.get_mut(previous).next = slot;
            }
        }
        if let Some(removed) = self.take_free(next, &mut inactive) {
            size_bytes += removed.size_bytes;
            next = removed.next;
            if !next.is_none() {
                self.slab.get_mut(next).previous = slot;
            }
        }
        if self.order.updates_on_hit() {
            key = self.key_of_freed(slot, done.key, key, clock());
        }
        let block = self.slab.get_mut(slot);
        block.address = address;
        block.size_bytes = size_bytes;
        block.previous = previous;
        block.next = next;
        block.key = key;
        block.state = BlockState::Free;
        block.generation = done.generation;
        block.unlink();
        if done.is_expandable() {
            inactive = SplitChange::default();
        } else if block.is_split() {
            inactive.count += 1;
            inactive.bytes += signed(size_bytes);
        }
        self.free[done.kind.index()].insert(&mut self.slab, slot, size_bytes, key);
        Completed {
            address: done.address,
            size_bytes: done.size_bytes,
            requested_bytes: done.requested_bytes,
            kind: done.kind,
            inactive,
        }
    }

    /// Removes a neighbour from its index and vacates its slot, if it is free. Returns a copy of it.
    #[inline(always)]
    fn take_free(&mut self, neighbour: Slot, inactive: &mut SplitChange) -> Option<Block> {
        if neighbour.is_none() || self.slab.get(neighbour).state != BlockState::Free {
            return None;
        }
        let removed = self.slab.vacate(neighbour);
        self.free[removed.kind.index()].remove(&mut self.slab, neighbour, &removed);
        inactive.count -= 1;
        inactive.bytes -= signed(removed.size_bytes);
        Some(removed)
    }

    /// Joins a neighbour into the block at `slot`. Neither is in an index. The neighbour's slot is
    /// vacated.
    pub(super) fn join(&mut self, slot: Slot, neighbour: Slot) {
        let removed = self.slab.get(neighbour);
        let (address, size_bytes) = (removed.address, removed.size_bytes);
        let key = self.joined_key(removed.key, self.slab.get(slot).key);
        let (before, behind) = (removed.previous, removed.next);
        let block = self.slab.get_mut(slot);
        block.size_bytes += size_bytes;
        if block.previous == neighbour {
            block.address = address;
            block.key = key;
            block.previous = before;
            if !before.is_none() {
                self.slab.get_mut(before).next = slot;
            }
        } else {
            block.next = behind;
            if !behind.is_none() {
                self.slab.get_mut(behind).previous = slot;
            }
        }
        self.slab.vacate(neighbour);
    }

    /// Adds a segment as one free block, the youngest of the heap. `size_bytes` is a multiple of 512.
    pub(crate) fn add_segment(
        &mut self,
        kind: PoolKind,
        address: u64,
        size_bytes: u64,
        clock: u64,
    ) -> Slot {
        let key = self.key_of_segment(address, size_bytes);
        let (requested_bytes, birth) = (0, clock);
        self.restore_segment(Segment { address, size_bytes, kind, requested_bytes, key, birth })
    }

    /// Restores a segment that could not be released, with its former age.
    pub(crate) fn restore_segment(&mut self, segment: Segment) -> Slot {
        let Segment { size_bytes, kind, key, birth, .. } = segment;
        debug_assert!(size_bytes > 0 && size_bytes.is_multiple_of(MIN_BLOCK_BYTES), "I6");
        let slot = self.occupy_alone(&segment, FIXED, BlockState::Free);
        self.order.note_birth(slot, birth);
        self.free[kind.index()].insert(&mut self.slab, slot, size_bytes, key);
        slot
    }

    /// Adds a block without neighbours. It is in no index.
    pub(super) fn occupy_alone(
        &mut self,
        segment: &Segment,
        reservation: u16,
        state: BlockState,
    ) -> Slot {
        let (slot, block) = self.slab.occupy();
        *block = Block {
            address: segment.address,
            size_bytes: segment.size_bytes,
            requested_bytes: segment.requested_bytes,
            key: segment.key,
            kind: segment.kind,
            generation: block.generation,
            priority: block.priority,
            reservation,
            state,
            ..Block::VACANT
        };
        slot
    }

    /// Returns true if the block at `slot` is still the free segment of `size_bytes` at `address`.
    #[must_use]
    pub(crate) fn is_idle_segment(&self, slot: Slot, address: u64, size_bytes: u64) -> bool {
        self.slab.try_get(slot).is_some_and(|block| {
            block.state == BlockState::Free
                && !block.is_split()
                && !block.is_expandable()
                && block.address == address
                && block.size_bytes == size_bytes
        })
    }

    /// Removes a segment that is one free block.
    pub(crate) fn remove_segment(&mut self, slot: Slot) -> Segment {
        let removed = self.slab.vacate(slot);
        debug_assert!(removed.state == BlockState::Free, "only idle segments are removed");
        debug_assert!(!removed.is_split(), "only whole segments are removed");
        self.free[removed.kind.index()].remove(&mut self.slab, slot, &removed);
        Segment {
            address: removed.address,
            size_bytes: removed.size_bytes,
            kind: removed.kind,
            requested_bytes: removed.requested_bytes,
            key: removed.key,
            birth: self.order.birth_of(slot),
        }
    }
}

/// A free segment that was removed from the heap to be released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) address: u64,
    pub(crate) size_bytes: u64,
    pub(crate) kind: PoolKind,
    pub(super) requested_bytes: u64,
    pub(super) key: u64,
    pub(super) birth: u64,
}
