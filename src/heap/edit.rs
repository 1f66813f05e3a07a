//! All operations that change blocks: allocate and split, free and coalesce, add and remove segments.
//!
//! All invariants hold before and after each operation. Changes that the caller must count are returned.

use super::at::{block_at, block_at_mut};
use super::bins::bin_of;
use super::block::{Block, FIXED};
use super::index::Bins;
use super::order::Order;
use super::splits::{CountParts, Report, SplitChange};
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
    /// The smallest remainder of each kind of pool that becomes a free block of its own: see
    /// [`rest_min_bytes`](Self::rest_min_bytes).
    pub(crate) rest_min_bytes: [u64; 2],
}

impl FitRules {
    /// No block is oversize.
    pub(crate) const NONE: Self = Self {
        max_split_bytes: u64::MAX,
        oversize_slack_bytes: 0,
        expandable: false,
        oversize_in_expandable: true,
        rest_min_bytes: Self::rest_min_bytes(false, false),
    };

    /// Splits off every remainder of any block: for placing a block at an exact address.
    pub(crate) const CUT: Self =
        Self { expandable: true, rest_min_bytes: Self::rest_min_bytes(true, false), ..Self::NONE };

    /// Returns the smallest remainder of each kind of pool that is split off. With `no_split`, none is.
    #[must_use]
    pub(crate) const fn rest_min_bytes(expandable: bool, no_split: bool) -> [u64; 2] {
        match (no_split, expandable) {
            (true, _) => [u64::MAX; 2],
            (false, true) => [MIN_BLOCK_BYTES; 2],
            (false, false) => [MIN_BLOCK_BYTES, LARGE_REST_MIN_BYTES + 1],
        }
    }

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
    #[inline(always)]
    #[must_use]
    pub(crate) fn splits(&self, kind: PoolKind, rounded_bytes: u64, rest_bytes: u64) -> bool {
        rest_bytes >= self.rest_min_bytes[kind.index()]
            && (rounded_bytes < self.max_split_bytes || self.splits_oversize(kind))
    }

    #[cold]
    #[inline(never)]
    fn splits_oversize(&self, kind: PoolKind) -> bool {
        self.expandable || kind == PoolKind::Small
    }
}

/// A block that was allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AllocatedBlock<C = SplitChange> {
    pub(crate) slot: Slot,
    pub(crate) address: u64,
    pub(crate) size_bytes: u64,
    pub(crate) kind: PoolKind,
    /// The change in inactive splits, or the result of counting it.
    pub(crate) inactive: C,
}

/// A block that became free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Completed<C = SplitChange> {
    /// Its size before it was joined with its neighbours.
    pub(crate) size_bytes: u64,
    /// The bytes that its caller had requested.
    pub(crate) requested_bytes: u64,
    pub(crate) kind: PoolKind,
    /// The change in inactive splits, or the result of counting it.
    pub(crate) inactive: C,
}

impl Heap {
    /// Allocates the best fit for a request, if `rules` have no oversize blocks and the order has no
    /// extras: the smallest free block that is large enough for `rounded_bytes`, with the lowest key among
    /// equal sizes. Returns `None` if [`best_fit`](Self::best_fit) must search further or finds nothing, or
    /// if no slot is vacant. `count` counts the change in inactive splits.
    #[inline(always)]
    pub(crate) fn take<C: CountParts>(
        &mut self,
        kind: PoolKind,
        rounded_bytes: u64,
        requested_bytes: u64,
        rules: &FitRules,
        count: C,
    ) -> Option<AllocatedBlock<C::Counted>> {
        debug_assert!(!self.order.updates_on_hit(), "`allocate` updates keys and birth times");
        let bins = self.free[kind.index()].bins()?;
        let bin = bins.first_from(rounded_bytes)?;
        let slot = bins.first_of(bin);
        let (blocks, vacant) = self.slab.parts();
        let block = block_at(blocks, slot);
        let may_grow = || block_at(blocks, block.next).state == BlockState::Unmapped;
        // A block that may grow is passed over for another one only if there is one behind it. For blocks up
        // to 512 KiB `is_last` does not search, and `best_fit` decides.
        let is_best = || !may_grow() || bins.is_last(bin);
        let may_serve = !block.is_expandable() || rules.expandable && is_best();
        if block.size_bytes < rounded_bytes || !may_serve {
            return None;
        }
        let rest_bytes = block.size_bytes - rounded_bytes;
        let splits = rest_bytes >= rules.rest_min_bytes[kind.index()];
        let rest = if splits { Some((vacant.occupy(blocks)?, rest_bytes)) } else { None };
        let mut parts = Parts { bins, blocks, order: None };
        let out =
            parts.allocate::<true, C>(kind, bin, slot, rounded_bytes, requested_bytes, rest, count);
        self.starts.insert(parts.blocks, slot, out.address);
        Some(out)
    }

    /// Returns the smallest free block that is large enough for `rounded_bytes`, with the lowest key
    /// among equal sizes. If the rules refuse it, returns `None`, because they refuse all larger blocks
    /// too. Expandable segments are an exception: if the rules do not allow their blocks, these are
    /// skipped. If they do, a block with no gap behind it may be preferred to a smaller one that could
    /// still grow, and the rules for oversize blocks may not apply to them.
    #[must_use]
    pub(crate) fn best_fit(
        &self,
        kind: PoolKind,
        rounded_bytes: u64,
        rules: &FitRules,
    ) -> Option<Slot> {
        let blocks = self.slab.blocks();
        let slot = self.free[kind.index()].first_at_least(blocks, rounded_bytes)?;
        let block = block_at(blocks, slot);
        if !block.is_expandable() {
            if rules.allow(rounded_bytes, block.size_bytes) {
                return Some(slot);
            }
            if rules.oversize_in_expandable || !self.expandable.is_used() {
                return None;
            }
        }
        self.best_fit_among_expandable(slot, rounded_bytes, rules)
    }

    /// Allocates the free block at `slot` for `requested_bytes`, rounded to `rounded_bytes`, and splits
    /// off the remainder if the rules allow it. `clock` is the time at which the remainder became free.
    pub(crate) fn allocate(
        &mut self,
        slot: Slot,
        rounded_bytes: u64,
        requested_bytes: u64,
        rules: &FitRules,
        clock: u64,
    ) -> AllocatedBlock {
        let block = self.slab.get(slot);
        assert!(block.state == BlockState::Free, "I3: only free blocks are allocated");
        let (kind, bin) = (block.kind, bin_of(block.size_bytes));
        let rest_bytes = block.size_bytes - rounded_bytes;
        let splits = rules.splits(kind, rounded_bytes, rest_bytes);
        let rest = splits.then(|| (self.slab.occupy(), rest_bytes));
        let order = self.order.updates_on_hit().then_some((&mut self.order, clock));
        let (blocks, bins) = (self.slab.parts().0, self.free[kind.index()].bins_mut());
        let mut parts = Parts { bins, blocks, order };
        let out = parts.allocate::<false, _>(
            kind,
            bin,
            slot,
            rounded_bytes,
            requested_bytes,
            rest,
            Report,
        );
        self.starts.insert(parts.blocks, slot, out.address);
        out
    }

    /// Records that a stream uses the live block at `slot`.
    pub(crate) fn record_use(&mut self, slot: Slot, by: StreamUse) {
        let block = self.slab.get_mut(slot);
        assert!(block.state == BlockState::Live, "only live blocks are used");
        block.links[0] = self.uses.add(slot, block.links[0], by);
    }

    /// Returns the current id of the block at `slot`.
    #[must_use]
    pub(crate) fn id(&self, slot: Slot) -> BlockId {
        BlockId { index: slot.index(), generation: self.slab.get(slot).generation }
    }

    /// Removes all stream uses of the live block at `slot`. The caller knows that their work is done.
    pub(crate) fn forget_uses(&mut self, slot: Slot) {
        let block = self.slab.get_mut(slot);
        assert!(block.state == BlockState::Live, "only live blocks are used");
        let uses = std::mem::replace(&mut block.links[0], Slot::NONE);
        self.uses.clear(slot, uses);
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
        !block_at(self.slab.blocks(), slot).links[0].is_none()
    }

    /// Retires a live block that other streams use. It becomes free when `events` (at least 1) have
    /// passed. Its id is stale from now on.
    #[inline]
    pub(crate) fn drain(&mut self, slot: Slot, events: u32) {
        debug_assert!(events > 0, "I5: a draining block waits for something");
        assert!(self.slab.get(slot).state == BlockState::Live, "only live blocks are freed");
        self.forget_start(slot);
        let block = self.slab.get_mut(slot);
        block.generation = block.generation.wrapping_add(1);
        let uses = std::mem::replace(&mut block.links[0], Slot(events));
        block.state = BlockState::Draining;
        self.uses.clear(slot, uses);
    }

    /// Sets the number of events (at least 1) for which the draining block at `slot` waits.
    pub(crate) fn wait_for(&mut self, slot: Slot, events: u32) {
        debug_assert!(events > 0, "I5: a draining block waits for something");
        let block = self.slab.get_mut(slot);
        assert!(block.state == BlockState::Draining, "only draining blocks wait");
        block.links[0] = Slot(events);
    }

    /// Counts one completed event of a draining block. Returns true if it was the last; the caller then
    /// calls [`complete`](Self::complete).
    pub(crate) fn event_passed(&mut self, slot: Slot) -> bool {
        let block = self.slab.get_mut(slot);
        assert!(block.state == BlockState::Draining && block.links[0].0 > 0, "I5");
        block.links[0].0 -= 1;
        block.links[0].0 == 0
    }

    /// Frees a live block that no other stream uses, and joins it with its free neighbours. `clock` is the
    /// time at which it became free. Its id is stale from now on. The caller has just allocated the block or
    /// found it with [`live`](Self::live) or the like, which is not checked here.
    pub(crate) fn free(&mut self, slot: Slot, clock: u64) -> Completed {
        debug_assert!(!self.is_used_by_other_streams(slot), "blocks in use elsewhere drain first");
        self.forget_start(slot);
        self.make_free(slot, Some(clock), |_| Report)
    }

    /// As [`free`](Self::free), if the order has no extras. The result of `count` for the kind of the block
    /// counts the change in inactive splits.
    #[inline(always)]
    pub(crate) fn put_back<C: CountParts>(
        &mut self,
        slot: Slot,
        count: impl FnOnce(PoolKind) -> C,
    ) -> Completed<C::Counted> {
        debug_assert!(!self.order.updates_on_hit(), "`free` updates keys and birth times");
        debug_assert!(!self.is_used_by_other_streams(slot), "blocks in use elsewhere drain first");
        self.forget_start(slot);
        self.make_free(slot, None, count)
    }

    /// Removes the live block at `slot` from the table of starts. This comes before any change of the block,
    /// so that a search by address and this compute the bucket once.
    #[inline(always)]
    fn forget_start(&mut self, slot: Slot) {
        let (blocks, _) = self.slab.parts();
        debug_assert!(block_at(blocks, slot).state == BlockState::Live, "the block is live");
        self.starts.remove(blocks, slot);
    }

    /// Makes a drained block free, and joins it with its free neighbours.
    #[inline]
    pub(crate) fn complete(&mut self, slot: Slot, clock: u64) -> Completed {
        assert!(self.slab.get(slot).state == BlockState::Draining, "only drained blocks complete");
        self.make_free(slot, Some(clock), |_| Report)
    }

    /// Makes the block at `slot`, which is in no index nor in the table of starts, free, and joins it with
    /// its free neighbours. Its id is stale from now on. `clock` is given unless the order has no extras.
    #[inline(always)]
    fn make_free<C: CountParts>(
        &mut self,
        slot: Slot,
        clock: Option<u64>,
        count: impl FnOnce(PoolKind) -> C,
    ) -> Completed<C::Counted> {
        let (blocks, vacant) = self.slab.parts();
        let block = block_at_mut(blocks, slot);
        block.state = BlockState::Free;
        block.generation = block.generation.wrapping_add(1);
        let Block { kind, previous, size_bytes: own_bytes, .. } = *block;
        let (bins, count) = (self.free[kind.index()].bins_mut(), count(kind));
        let (mut size_bytes, mut joined) = (own_bytes, 0);
        if block_at(blocks, previous).state == BlockState::Free {
            let removed = *block_at(blocks, previous);
            bins.remove::<false>(blocks, bin_of(removed.size_bytes), previous);
            vacant.vacate(blocks, previous);
            size_bytes += removed.size_bytes;
            joined += 1;
            block_at_mut(blocks, removed.previous).next = slot;
            let block = block_at_mut(blocks, slot);
            (block.address, block.previous) = (removed.address, removed.previous);
            block.key = match clock {
                Some(_) => self.order.joined_key(removed.key, block.key),
                None => removed.key,
            };
        }
        if let Some(clock) = clock {
            self.order.note_birth(slot, clock);
        }
        let next = block_at(blocks, slot).next;
        if block_at(blocks, next).state == BlockState::Free {
            let Block { size_bytes: next_bytes, next: behind, .. } = *block_at(blocks, next);
            size_bytes += next_bytes;
            joined += 1;
            let block = block_at_mut(blocks, slot);
            (block.size_bytes, block.next) = (size_bytes, behind);
            block_at_mut(blocks, behind).previous = slot;
            bins.replace::<false>(blocks, bin_of(next_bytes), next, slot, size_bytes);
            vacant.vacate(blocks, next);
        } else {
            block_at_mut(blocks, slot).size_bytes = size_bytes;
            bins.insert(blocks, bin_of(size_bytes), slot);
        }
        let block = block_at(blocks, slot);
        let inactive = if block.is_expandable() {
            count.less(0, 0)
        } else if block.is_split() {
            count.more(1 - joined, own_bytes)
        } else {
            count.less(-joined, size_bytes - own_bytes)
        };
        let Block { requested_bytes, .. } = *block;
        Completed { size_bytes: own_bytes, requested_bytes, kind, inactive }
    }

    /// Removes a free block from its index.
    pub(super) fn unindex(&mut self, slot: Slot) {
        let Block { kind, size_bytes, state, .. } = *self.slab.get(slot);
        assert!(state == BlockState::Free, "I3: only free blocks are in an index");
        let bins = self.free[kind.index()].bins_mut();
        bins.remove::<false>(self.slab.parts().0, bin_of(size_bytes), slot);
    }

    /// Adds a free block to its index.
    pub(super) fn index(&mut self, slot: Slot) {
        let Block { kind, size_bytes, .. } = *self.slab.get(slot);
        self.free[kind.index()].bins_mut().insert(self.slab.parts().0, bin_of(size_bytes), slot);
    }

    /// As the function [`cut`], for a block that is neither free nor live.
    pub(super) fn cut(&mut self, slot: Slot, front_bytes: u64) -> Slot {
        let rest = self.slab.occupy();
        let rest_bytes = self.slab.get(slot).size_bytes - front_bytes;
        cut(self.slab.parts().0, slot, rest, front_bytes, rest_bytes);
        rest
    }

    /// Joins a neighbour into the block at `slot`. Neither is in an index. The neighbour's slot is
    /// vacated.
    pub(super) fn join(&mut self, slot: Slot, neighbour: Slot) {
        let removed = self.slab.get(neighbour);
        let (address, size_bytes) = (removed.address, removed.size_bytes);
        let key = self.order.joined_key(removed.key, self.slab.get(slot).key);
        let (before, behind) = (removed.previous, removed.next);
        let block = self.slab.get_mut(slot);
        block.size_bytes += size_bytes;
        if block.previous == neighbour {
            block.address = address;
            block.key = key;
            block.previous = before;
            self.slab.get_mut(before).next = slot;
        } else {
            block.next = behind;
            self.slab.get_mut(behind).previous = slot;
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
        let Segment { size_bytes, birth, .. } = segment;
        debug_assert!(size_bytes > 0 && size_bytes.is_multiple_of(MIN_BLOCK_BYTES), "I6");
        let slot = self.occupy_alone(&segment, FIXED, BlockState::Free);
        self.order.note_birth(slot, birth);
        self.index(slot);
        slot
    }

    /// Adds a block without neighbours. It is in no index.
    pub(super) fn occupy_alone(
        &mut self,
        segment: &Segment,
        reservation: u16,
        state: BlockState,
    ) -> Slot {
        let slot = self.slab.occupy();
        let block = self.slab.get_mut(slot);
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
        self.unindex(slot);
        let removed = self.slab.vacate(slot);
        debug_assert!(!removed.is_split(), "only whole segments are removed");
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

/// The parts of a heap that an allocation changes.
struct Parts<'h> {
    bins: &'h mut Bins,
    blocks: &'h mut [Block],
    /// With the time, if the order has extras.
    order: Option<(&'h mut Order, u64)>,
}

impl Parts<'_> {
    /// Allocates the free block at `slot`, which has this kind and bin. If `rest` is given, the bytes behind
    /// `rounded_bytes` become a free block there: its slot and size. `IS_FIRST` is true only if the block is
    /// the first of its bin.
    #[inline(always)]
    #[expect(clippy::too_many_arguments, reason = "values in registers, on the path of a hit")]
    fn allocate<const IS_FIRST: bool, C: CountParts>(
        &mut self,
        kind: PoolKind,
        bin: usize,
        slot: Slot,
        rounded_bytes: u64,
        requested_bytes: u64,
        rest: Option<(Slot, u64)>,
        count: C,
    ) -> AllocatedBlock<C::Counted> {
        let blocks = &mut *self.blocks;
        let whole = block_at(blocks, slot);
        debug_assert!(whole.state == BlockState::Free, "I3: only free blocks are allocated");
        debug_assert!(whole.kind == kind && whole.size_bytes >= rounded_bytes);
        let inactive = if let Some((rest, rest_bytes)) = rest {
            cut(blocks, slot, rest, rounded_bytes, rest_bytes);
            if let Some((order, clock)) = &mut self.order {
                order.note_split(blocks, slot, rest, *clock);
            }
            self.bins.replace::<IS_FIRST>(blocks, bin, slot, rest, rest_bytes);
            let front = block_at(blocks, slot);
            // Parts of expandable segments are not counted: they are not fragmentation.
            if front.is_expandable() {
                count.less(0, 0)
            } else if front.previous.0 | block_at(blocks, rest).next.0 == 0 {
                count.more(1, rest_bytes)
            } else {
                count.less(0, rounded_bytes)
            }
        } else {
            self.bins.remove::<IS_FIRST>(blocks, bin, slot);
            let whole = block_at(blocks, slot);
            if !whole.is_expandable() && whole.is_split() {
                count.less(-1, whole.size_bytes)
            } else {
                count.less(0, 0)
            }
        };
        let block = block_at_mut(blocks, slot);
        block.state = BlockState::Live;
        block.requested_bytes = requested_bytes;
        block.links[0] = Slot::NONE;
        let Block { address, size_bytes, .. } = *block;
        AllocatedBlock { slot, address, size_bytes, kind, inactive }
    }
}

/// Cuts the block at `slot` behind its first `front_bytes`. The front keeps the slot, and its place in a
/// bin: the caller removes it by its links or replaces it. The `rest_bytes` behind it, at a slot of their
/// own, have the same state. The keys are correct for every rule except `BlockAge`.
#[inline(always)]
fn cut(blocks: &mut [Block], slot: Slot, rest: Slot, front_bytes: u64, rest_bytes: u64) {
    // Each field is copied before the next one is read, which needs fewer registers.
    block_at_mut(blocks, rest).size_bytes = rest_bytes;
    block_at_mut(blocks, rest).address = block_at(blocks, slot).address + front_bytes;
    block_at_mut(blocks, rest).key = block_at(blocks, slot).key.wrapping_add(front_bytes);
    block_at_mut(blocks, rest).requested_bytes = block_at(blocks, slot).requested_bytes;
    let Block { next: behind, kind, reservation, state, .. } = *block_at(blocks, slot);
    let block = block_at_mut(blocks, rest);
    (block.previous, block.next) = (slot, behind);
    (block.kind, block.reservation, block.state) = (kind, reservation, state);
    let front = block_at_mut(blocks, slot);
    (front.size_bytes, front.next) = (front_bytes, rest);
    block_at_mut(blocks, behind).previous = rest;
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
