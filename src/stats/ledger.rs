//! The peaks over all heaps, without a shared lock on a hit.
//!
//! Each heap has limits for each counter; the sum of all limits is the peak. So a heap at or below its
//! limits cannot raise a peak. The difference between limit and current value is the heap's **spare**; a
//! hit reduces it. A heap that passes a limit of the sum of both kinds first uses the spare of its other
//! kind. If that does not suffice, it takes the ledger's lock, and takes what it lacks from the spare of
//! other heaps, by `try_lock`. If that does not suffice either, the peak rises.
//!
//! The ledger lists the heaps that may have spare, and checks them in that order. A heap
//! that was not used since its last check, or has too little spare, gives all of it. It leaves the list
//! until it is used again. Any other heap shares its spare evenly, and the search ends there. So each
//! check except the last of a search is paid for by an operation of the heap that is checked.
//!
//! A heap without spare is not listed. When one of its blocks is freed, it *parks* the spare with the ledger,
//! from which the next heap takes it without a lock of another heap. So heaps that are used in turn, one
//! pair of allocate and free each, exchange their spare at the ledger. A heap that parks twice in succession
//! enters the list instead and keeps its spare.
//!
//! Therefore the cost of an operation does not depend on the number of heaps. A thread that cycles over
//! any number of streams checks at most one heap for each pair of allocate and free (`ledger/tests.rs` counts
//! the checks). Sharing also keeps concurrent threads from taking all spare from each other in turn.
//!
//! The number of live blocks and their bytes are the peak less all spare, so a check of the listed heaps
//! suffices to count them. A heap that was not used since its last check leaves the list: its spare goes to
//! the ledger's *rest*, from which the next search takes it. So each check is paid for by an operation here
//! too.
//!
//! Peaks are exact if calls do not overlap. A heap that another call has locked counts at its limit. So a
//! peak is never too low; it is too high by at most the spare of such heaps, for each call that found
//! them locked.

use std::collections::VecDeque;

use super::heap_counters::{
    ALL, CLASSES, CounterIndex, CounterValues, HeapCounters, LiveBlocks, Parked, Taken,
};
use crate::size::PoolKind;
use crate::sync::{ShortGuard, ShortLock};

/// Access of the ledger to the heaps of a device.
pub(crate) trait Heaps {
    /// Calls `read` with the counters of a heap. Returns `None` if the heap is locked.
    fn with_counters<R>(&self, heap: u32, read: impl FnOnce(&mut HeapCounters) -> R) -> Option<R>;
}

/// The peaks of one device.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    state: ShortLock<State>,
}

#[derive(Debug, Default)]
struct State {
    peak: [CounterValues; CLASSES],
    /// The first of the heaps that may have spare. Each heap stores whether it is listed.
    first: Option<u32>,
    /// The heaps listed behind the first.
    others: VecDeque<u32>,
    /// Spare that belongs to no heap.
    parked: Parked,
    /// The spare of heaps that were unused when live blocks were counted. No heap: it counts no blocks.
    rest: HeapCounters,
    /// Whether the rest has spare.
    has_rest: bool,
    /// The heap that parked last. Before any has, heap 0, which then enters the list at its first free.
    parked_by: u32,
}

impl Ledger {
    /// Returns the peaks of each kind of pool and of both together.
    #[must_use]
    pub(crate) fn peaks(&self) -> [CounterValues; CLASSES] {
        self.state.lock().peak
    }

    /// Returns the number of live blocks of all heaps and their bytes, or `None` if a listed heap is locked.
    /// Checks each heap at most twice after its last use.
    pub(crate) fn live<H: Heaps>(&self, heaps: &H) -> Option<LiveBlocks> {
        let State { peak, first, others, parked, rest, has_rest, .. } = &mut *self.state.lock();
        let limits = LiveBlocks {
            count: peak[ALL].of(CounterIndex::Allocation),
            bytes: peak[ALL].of(CounterIndex::AllocatedBytes),
        };
        let mut live = Some(limits.minus(parked.live()).minus(rest.spare_of_live()));
        let mut stays_listed = |heap: u32| {
            let Some(sum) = live else { return true };
            let check = |counters: &mut HeapCounters| {
                let left = sum.minus(counters.spare_of_live());
                rest.take_if_unused(counters);
                (left, counters.is_listed())
            };
            let checked = heaps.with_counters(heap, check);
            live = checked.map(|(left, _)| left);
            checked.is_none_or(|(_, is_listed)| is_listed)
        };
        others.retain(|heap| stays_listed(*heap));
        if first.is_some_and(|heap| !stays_listed(heap)) {
            *first = others.pop_front();
        }
        *has_rest = rest.has_spare();
        live
    }

    /// Lists heap `own` after a call that gave it spare. Raises its limits of `kind` if one is passed. The
    /// caller holds the heap's lock.
    #[cold]
    #[inline(never)]
    pub(crate) fn list<H: Heaps>(
        &self,
        own: u32,
        kind: PoolKind,
        counters: &mut HeapCounters,
        heaps: &H,
    ) {
        if counters.is_covered(kind) {
            if counters.enter_list() {
                self.state.lock().list(own);
            }
        } else {
            self.raise_limits(own, kind, counters, heaps);
        }
    }

    /// As [`list`](Self::list), after a free of a block of `kind`, for a heap that is not listed or has
    /// passed a limit. Parks the room of the heap instead, unless it was the last one to do so.
    #[cold]
    #[inline(never)]
    pub(crate) fn park<H: Heaps>(
        &self,
        own: u32,
        kind: PoolKind,
        counters: &mut HeapCounters,
        heaps: &H,
    ) {
        // Every path ends in a tail call, so that this function needs no stack frame. If another thread holds
        // the lock, the heap keeps its room, because several threads would contend for it here.
        if counters.is_covered(kind)
            && !counters.is_listed()
            && let Some(mut state) = self.state.try_lock()
        {
            if state.parked_by == own {
                return State::enter(state, own, counters);
            }
            state.parked_by = own;
            counters.park(kind, &mut state.parked);
        } else {
            self.list(own, kind, counters, heaps);
        }
    }

    /// Makes the limits of heap `own` cover its current values, because it has passed one of `kind`. Lists
    /// the heap if it has spare then. The caller holds the heap's lock. Does not wait for other heaps.
    #[cold]
    #[inline(never)]
    pub(crate) fn raise_limits<H: Heaps>(
        &self,
        own: u32,
        kind: PoolKind,
        counters: &mut HeapCounters,
        heaps: &H,
    ) {
        // As in `park`, every path ends in a tail call.
        if counters.is_listed() {
            self.raise_listed(own, kind, counters, heaps);
        } else if let Some(mut state) = self.state.try_lock() {
            if !counters.take_parked(kind, &mut state.parked) {
                State::search(state, own, kind, counters, heaps);
            }
        } else {
            self.raise_in_turn(own, kind, counters, heaps);
        }
    }

    /// As [`raise_limits`](Self::raise_limits), for a heap that is listed.
    #[inline(never)]
    fn raise_listed<H: Heaps>(
        &self,
        own: u32,
        kind: PoolKind,
        counters: &mut HeapCounters,
        heaps: &H,
    ) {
        if !counters.exchanges_blocks(kind) {
            self.raise_in_turn(own, kind, counters, heaps);
        }
    }

    /// As [`raise_limits`](Self::raise_limits), for a heap that is listed, or if another thread holds the
    /// ledger's lock.
    #[inline(never)]
    fn raise_in_turn<H: Heaps>(
        &self,
        own: u32,
        kind: PoolKind,
        counters: &mut HeapCounters,
        heaps: &H,
    ) {
        if !counters.covers_itself(kind) {
            let mut state = self.state.lock();
            counters.take_parked(kind, &mut state.parked);
            State::search(state, own, kind, counters, heaps);
        }
    }

    /// Sets each peak to the current value. The caller holds the locks of all heaps.
    pub(crate) fn reset_peaks<'a>(&self, heaps: impl Iterator<Item = &'a mut HeapCounters>) {
        let state = &mut *self.state.lock();
        state.peak = Default::default();
        state.first = None;
        state.others.clear();
        state.parked = Parked::default();
        state.rest = HeapCounters::default();
        state.has_rest = false;
        for counters in heaps {
            for (class, peak) in state.peak.iter_mut().enumerate() {
                *peak = peak.zip(counters.current(class), |peak, current| peak + current);
            }
            counters.forget_spare();
        }
    }
}

impl State {
    /// Covers heap `own`, which has taken the parked room of `kind`, from the rest or from other heaps, or
    /// raises the peaks.
    #[inline(never)]
    fn search<H: Heaps>(
        mut state: ShortGuard<'_, Self>,
        own: u32,
        kind: PoolKind,
        counters: &mut HeapCounters,
        heaps: &H,
    ) {
        if state.has_rest {
            state.take_rest(kind, counters);
        }
        if counters.is_covered(kind) {
            Self::enter(state, own, counters);
        } else if !state.check_first::<false, H>(own, kind, counters, heaps) {
            state.check_others(own, kind, counters, heaps);
        }
    }

    #[cold]
    #[inline(never)]
    fn take_rest(&mut self, kind: PoolKind, counters: &mut HeapCounters) {
        counters.take_all(kind, &mut self.rest);
        self.has_rest = false;
    }

    /// Lists heap `own` if it has spare.
    #[inline(never)]
    fn enter(mut state: ShortGuard<'_, Self>, own: u32, counters: &mut HeapCounters) {
        if counters.enter_list() {
            state.list(own);
        }
    }

    #[inline]
    fn list(&mut self, heap: u32) {
        if self.others.capacity() <= heap as usize {
            self.reserve(heap);
        }
        match self.first {
            None => self.first = Some(heap),
            Some(_) => self.others.push_back(heap),
        }
    }

    /// Reserves space for all heaps up to this one, so that the list does not grow on a hit.
    #[cold]
    #[inline(never)]
    fn reserve(&mut self, heap: u32) {
        self.others.reserve(heap as usize + 1 - self.others.len());
    }

    /// Checks the first heap of the list. Returns true if its spare suffices for heap `own`. Otherwise the
    /// first heap is the last one now, or no longer listed. Lists heap `own` unless the list is empty.
    /// `AGAIN` changes nothing: it gives each caller a copy of its own, so that the first check is inlined.
    #[inline(always)]
    fn check_first<const AGAIN: bool, H: Heaps>(
        &mut self,
        own: u32,
        kind: PoolKind,
        counters: &mut HeapCounters,
        heaps: &H,
    ) -> bool {
        let Some(first) = self.first else { return false };
        let taken = match first == own {
            true => None,
            false => heaps.with_counters(first, |other| counters.take_spare(kind, other)),
        };
        let Some(Taken { is_left: false, is_enough }) = taken else {
            self.rotate(own, counters);
            return taken.is_some_and(|taken| taken.is_enough);
        };
        if counters.enter_list() {
            // Heap `own` takes the place of the other one.
            self.first = Some(own);
        } else {
            self.first = self.others.pop_front();
        }
        is_enough
    }

    /// Moves the first heap to the end of the list, behind heap `own` if that was not listed.
    #[inline(never)]
    fn rotate(&mut self, own: u32, counters: &mut HeapCounters) {
        if counters.enter_list() {
            self.list(own);
        }
        if let Some(next) = self.others.pop_front() {
            self.others.extend(self.first.replace(next));
        }
    }

    /// Checks the other heaps until their spare suffices for heap `own`. Otherwise raises the peaks.
    #[inline(never)]
    fn check_others<H: Heaps>(
        &mut self,
        own: u32,
        kind: PoolKind,
        counters: &mut HeapCounters,
        heaps: &H,
    ) {
        for _ in 0..self.others.len() + usize::from(self.first.is_some()) {
            if self.check_first::<true, H>(own, kind, counters, heaps) {
                return;
            }
        }
        if counters.enter_list() {
            self.list(own);
        }
        if counters.take_parked_of_other_kind(kind, &mut self.parked) {
            return;
        }
        // No other heap has spare that helps, except those that are locked.
        if !counters.take_from_other_kind(kind) {
            for (class, risen) in [kind.index(), ALL].into_iter().zip(counters.cover(kind)) {
                self.peak[class] = self.peak[class].zip(risen, |peak, risen| peak + risen);
            }
        }
    }
}

#[cfg(test)]
mod tests;
