//! Expandable segments: address space that is reserved once and mapped page by page.
//!
//! A reservation is a chain of blocks like a segment, some of which are unmapped. Growing maps whole
//! pages at the lowest gap that is long enough together with the adjacent free blocks. Shrinking unmaps
//! the whole pages inside a free block. This file makes no driver calls: the owner of the heap does so
//! between [`Heap::plan_growth`] and [`Heap::mapped`]. It also keeps the pages that the driver failed to
//! release.
//!
//! Source of the order of choices: PyTorch's expandable segments.

use std::collections::BTreeMap;

use super::edit::{FitRules, Segment};
use super::{BlockState, Heap, Slot};
use crate::size::{OWN_SEGMENT_MIN_BYTES, PoolKind, align_down, align_up};

/// A reserved range of address space, for one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reservation {
    pub(crate) address: u64,
    /// Its size, a multiple of the page.
    pub(crate) size_bytes: u64,
    /// The unit of mapping.
    pub(crate) page_bytes: u64,
    pub(crate) kind: PoolKind,
}

impl Reservation {
    /// Returns true if large blocks are mapped by smaller pages than usual. Usual pages for large blocks
    /// have at least the size of a segment for one request.
    fn has_fine_pages(&self) -> bool {
        self.kind == PoolKind::Large && self.page_bytes < OWN_SEGMENT_MIN_BYTES
    }
}

/// A range of whole pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageRun {
    /// The block that contains them.
    pub(crate) slot: Slot,
    pub(crate) address: u64,
    pub(crate) size_bytes: u64,
    /// The unit of mapping.
    pub(crate) page_bytes: u64,
    pub(crate) kind: PoolKind,
}

impl PageRun {
    /// Returns the last pages of the run that have `wanted_bytes` in total, or the whole run if it has
    /// fewer.
    pub(crate) fn last_bytes(&self, wanted_bytes: u64) -> Self {
        let wanted = wanted_bytes.min(self.size_bytes);
        let size_bytes = align_up(wanted, self.page_bytes).min(self.size_bytes);
        Self { address: self.address + self.size_bytes - size_bytes, size_bytes, ..*self }
    }
}

/// The next step of growing a block to a wanted size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Growing {
    /// The free block at this slot is large enough.
    Enough(Slot),
    /// These pages must be mapped first.
    Map(PageRun),
}

#[derive(Debug, Default)]
pub(super) struct Expandable {
    /// The unmapped blocks (gaps) of each kind, by address.
    pub(super) gaps: [BTreeMap<u64, Slot>; 2],
    /// Reservations by number. A number is reused after its reservation was removed.
    reservations: Vec<Option<Reservation>>,
}

impl Expandable {
    /// Returns true if there is a reservation.
    pub(super) fn is_used(&self) -> bool {
        self.reservations.iter().any(Option::is_some)
    }
}

impl Heap {
    /// Finds the best fit if `first`, the smallest block that is large enough, is expandable or refused by
    /// the rules. If the rules do not allow expandable blocks, these are skipped. If they do, an expandable
    /// block with a gap behind it is replaced by the next larger block while that one's
    /// [reach](Self::reach) is shorter. If the rules refuse the block chosen in this way, returns `None`, as
    /// PyTorch does. But if expandable blocks are allowed and exempt from the oversize rules, fixed blocks
    /// that the rules refuse are skipped.
    #[cold]
    pub(super) fn best_fit_among_expandable(
        &self,
        first: Slot,
        rounded_bytes: u64,
        rules: &FitRules,
    ) -> Option<Slot> {
        let serves = |slot: Slot| {
            let block = self.slab.get(slot);
            block.is_expandable() && !rules.oversize_in_expandable
                || rules.allow(rounded_bytes, block.size_bytes)
        };
        let passed_by = |slot: Slot| {
            let is_expandable = self.slab.get(slot).is_expandable();
            if rules.expandable {
                !rules.oversize_in_expandable && !serves(slot)
            } else {
                is_expandable
            }
        };
        let mut following = self.free_from(first).filter(|&slot| !passed_by(slot));
        let mut slot = following.next()?;
        // A block without a gap behind it has the shortest reach, since all later blocks are at least as
        // large.
        let has_gap = |slot: Slot| self.reach(slot) > self.slab.get(slot).size_bytes;
        while rules.expandable && self.slab.get(slot).is_expandable() && has_gap(slot) {
            match following.next() {
                Some(next) if self.reach(next) < self.reach(slot) => slot = next,
                _ => break,
            }
        }
        serves(slot).then_some(slot)
    }

    /// Returns the size a block could grow to: its own and that of the gap behind it.
    #[inline]
    fn reach(&self, slot: Slot) -> u64 {
        let block = self.slab.get(slot);
        let behind = self.slab.get(block.next);
        let gap_bytes = if behind.state == BlockState::Unmapped { behind.size_bytes } else { 0 };
        block.size_bytes + gap_bytes
    }

    /// Adds a reservation as one gap. Returns `None` when all numbers are in use.
    pub(crate) fn add_reservation(&mut self, reservation: Reservation) -> Option<u16> {
        let vacant = self.expandable.reservations.iter().position(Option::is_none);
        let at = vacant.unwrap_or(self.expandable.reservations.len());
        let number = u16::try_from(at).ok().filter(|n| *n != super::block::FIXED)?;
        if at == self.expandable.reservations.len() {
            self.expandable.reservations.push(None);
        }
        self.expandable.reservations[at] = Some(reservation);
        let Reservation { address, size_bytes, kind, .. } = reservation;
        let key = self.key_of_segment(address, size_bytes);
        let gap = Segment { address, size_bytes, kind, requested_bytes: 0, key, birth: 0 };
        let slot = self.occupy_alone(&gap, number, BlockState::Unmapped);
        self.expandable.gaps[kind.index()].insert(address, slot);
        Some(number)
    }

    /// Returns the reservation with this number.
    #[must_use]
    pub(crate) fn reservation(&self, number: u16) -> Option<Reservation> {
        self.expandable.reservations.get(usize::from(number)).copied().flatten()
    }

    /// Returns the number of unmapped bytes in a range.
    #[must_use]
    pub(crate) fn gap_bytes(&self, address: u64, size_bytes: u64) -> u64 {
        let range = address..address.saturating_add(size_bytes);
        let gaps = self.expandable.gaps.iter().flat_map(|gaps| gaps.range(range.clone()));
        gaps.map(|(_, slot)| self.slab.get(*slot).size_bytes).sum()
    }

    /// Returns the block at which mapping pages yields `bytes`, or `None`. It is the lowest gap that is
    /// long enough together with the adjacent free and unmapped blocks behind it, or the free block
    /// before that gap. `fine` selects the reservations with fine pages, or those with usual ones.
    #[must_use]
    pub(crate) fn room_for(&self, kind: PoolKind, bytes: u64, fine: bool) -> Option<Slot> {
        let gaps = self.expandable.gaps[kind.index()].values().copied();
        let mut gaps = gaps.filter(|gap| self.is_fine(*gap) == fine);
        gaps.find_map(|gap| {
            let before = self.slab.get(gap).previous;
            let is_free = self.slab.get(before).state == BlockState::Free;
            let start = if is_free { before } else { gap };
            let (mut sum, mut at) = (0u64, start);
            while sum < bytes && !at.is_none() {
                let block = self.slab.get(at);
                if !matches!(block.state, BlockState::Free | BlockState::Unmapped) {
                    break;
                }
                sum = sum.saturating_add(block.size_bytes);
                at = block.next;
            }
            (sum >= bytes).then_some(start)
        })
    }

    /// Returns true if the gap belongs to a reservation with fine pages.
    fn is_fine(&self, gap: Slot) -> bool {
        let own = self.reservation(self.slab.get(gap).reservation);
        own.is_some_and(|own| own.has_fine_pages())
    }

    /// Returns the next step of growing the block at `start` to `bytes`, or `None` when no gap is behind
    /// it. `start` is the result of [`room_for`](Self::room_for) or [`mapped`](Self::mapped).
    #[must_use]
    pub(crate) fn plan_growth(&self, start: Slot, bytes: u64) -> Option<Growing> {
        let block = self.slab.get(start);
        if block.state == BlockState::Free && block.size_bytes >= bytes {
            return Some(Growing::Enough(start));
        }
        let (gap, missing) = if block.state == BlockState::Unmapped {
            (start, bytes)
        } else {
            (block.next, bytes - block.size_bytes)
        };
        let block = self.slab.try_get(gap).filter(|block| block.state == BlockState::Unmapped)?;
        let Reservation { page_bytes, kind, .. } = self.reservation(block.reservation)?;
        let wanted = align_up(missing.min(block.size_bytes), page_bytes);
        let size_bytes = wanted.min(block.size_bytes);
        let address = block.address;
        Some(Growing::Map(PageRun { slot: gap, address, size_bytes, page_bytes, kind }))
    }

    /// Marks the pages at the front of a gap as mapped. Returns the block that contains them. It cannot
    /// be allocated until [`complete`](Self::complete) makes it free and joins it with its free
    /// neighbours.
    pub(crate) fn mapped(&mut self, run: PageRun) -> Slot {
        let whole = *self.slab.get(run.slot);
        assert!(whole.state == BlockState::Unmapped, "only gaps are mapped");
        self.expandable.gaps[whole.kind.index()].remove(&run.address);
        if whole.size_bytes > run.size_bytes {
            let rest = self.cut_off(run.slot, run.size_bytes);
            self.swap_ages(run.slot, rest);
            let gap = self.slab.get_mut(rest);
            gap.requested_bytes = 0;
            self.expandable.gaps[whole.kind.index()].insert(gap.address, rest);
        }
        self.put_out_of_reach(run.slot);
        run.slot
    }

    /// Returns the whole pages inside the free block at `slot`, if there are any.
    #[must_use]
    pub(crate) fn whole_pages(&self, slot: Slot) -> Option<PageRun> {
        let block = self.slab.try_get(slot).filter(|block| block.state == BlockState::Free)?;
        let Reservation { address: base, page_bytes, kind, .. } =
            self.reservation(block.reservation)?;
        let address = base + align_up(block.address - base, page_bytes);
        let end = base + align_down(block.address + block.size_bytes - base, page_bytes);
        let size_bytes = end.saturating_sub(address);
        (size_bytes > 0).then_some(PageRun { slot, address, size_bytes, page_bytes, kind })
    }

    /// Returns true if the pages are still whole and inside the free block at their slot.
    #[must_use]
    pub(crate) fn has_whole_pages(&self, run: &PageRun) -> bool {
        self.whole_pages(run.slot).is_some_and(|now| {
            let end = run.address + run.size_bytes;
            run.size_bytes > 0 && now.address <= run.address && end <= now.address + now.size_bytes
        })
    }

    /// Withholds the free block at `slot` from allocation while its pages are unmapped. Ends with
    /// [`unmapped`](Self::unmapped) or [`complete`](Self::complete).
    pub(crate) fn hold(&mut self, slot: Slot) {
        self.unindex(slot);
        self.put_out_of_reach(slot);
    }

    /// Marks a block as draining. Then it serves no request, and checkpoints do not treat it as live.
    fn put_out_of_reach(&mut self, slot: Slot) {
        self.slab.get_mut(slot).state = BlockState::Draining;
        self.wait_for(slot, 1);
    }

    /// Turns the whole pages of a held block into a gap and joins it with adjacent gaps. The parts of
    /// the block before and behind the pages become free. Returns the gap.
    pub(crate) fn unmapped(&mut self, run: PageRun, clock: u64) -> Slot {
        let block = self.slab.get(run.slot);
        assert!(block.state == BlockState::Draining, "the block is held");
        let (kind, address, end) = (block.kind, block.address, block.address + block.size_bytes);
        // The gap keeps the bytes requested last, as in PyTorch; the other parts do not.
        let requested_bytes = block.requested_bytes;
        let mut slot = run.slot;
        let mut left = [Slot::NONE; 2];
        if address < run.address {
            left[0] = slot;
            slot = self.cut_off(slot, run.address - address);
        }
        if run.address + run.size_bytes < end {
            left[1] = self.cut_off(slot, run.size_bytes);
            self.swap_ages(slot, left[1]);
        }
        let block = self.slab.get_mut(slot);
        block.state = BlockState::Unmapped;
        block.requested_bytes = requested_bytes;
        for piece in left.into_iter().filter(|piece| !piece.is_none()) {
            self.slab.get_mut(piece).requested_bytes = 0;
            self.complete(piece, clock);
        }
        let (previous, next) = (self.slab.get(slot).previous, self.slab.get(slot).next);
        for neighbour in [previous, next] {
            if !neighbour.is_none() && self.slab.get(neighbour).state == BlockState::Unmapped {
                let removed = self.slab.get(neighbour).address;
                self.expandable.gaps[kind.index()].remove(&removed);
                self.join(slot, neighbour);
            }
        }
        let start = self.slab.get(slot).address;
        self.expandable.gaps[kind.index()].insert(start, slot);
        slot
    }

    /// Cuts the block at `slot`, which is in no index, behind its first `front_bytes`. Returns the slot of
    /// the rest, which has the same state.
    fn cut_off(&mut self, slot: Slot, front_bytes: u64) -> Slot {
        let rest = self.cut(slot, front_bytes);
        self.order.update_keys_of_split(self.slab.parts().0, slot, rest);
        rest
    }

    /// Removes a reservation that is one gap. Returns `None` if any of it is mapped.
    pub(crate) fn remove_reservation(&mut self, gap: Slot) -> Option<Reservation> {
        let block = self.slab.get(gap);
        if block.state != BlockState::Unmapped || block.is_split() {
            return None;
        }
        let (kind, address, number) = (block.kind, block.address, block.reservation);
        let reservation = self.expandable.reservations.get_mut(usize::from(number))?.take()?;
        self.expandable.gaps[kind.index()].remove(&address);
        self.slab.vacate(gap);
        Some(reservation)
    }

    /// Returns address and size of every mapped range, in no particular order.
    #[must_use]
    pub(crate) fn mapped_ranges(&self) -> Vec<(u64, u64)> {
        let heads = self.segment_heads().filter(|&head| self.slab.get(head).is_expandable());
        let ranges = heads.map(|head| self.segment_of(head));
        ranges.map(|range| (range.address, range.size_bytes)).collect()
    }

    /// Removes and returns all reservations in which nothing is mapped, or only those with fine pages.
    pub(crate) fn remove_bare_reservations(&mut self, only_fine: bool) -> Vec<Reservation> {
        let gaps = self.expandable.gaps.iter().flat_map(|gaps| gaps.values().copied());
        let gaps: Vec<Slot> = gaps.filter(|gap| !only_fine || self.is_fine(*gap)).collect();
        gaps.into_iter().filter_map(|gap| self.remove_reservation(gap)).collect()
    }

    /// Returns all reservations.
    pub(crate) fn reservations(&self) -> impl Iterator<Item = Reservation> + '_ {
        self.expandable.reservations.iter().copied().flatten()
    }
}
