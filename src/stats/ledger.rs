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
//! Therefore the cost of an operation does not depend on the number of heaps. A thread that cycles over
//! any number of streams checks one heap for each pair of allocate and free (`ledger/tests.rs` counts
//! the checks). The heap of each stream then takes the place of the previous one in the list. Sharing also
//! keeps concurrent threads from taking all spare from each other in turn.
//!
//! Peaks are exact if calls do not overlap. A heap that another call has locked counts at its limit. So a
//! peak is never too low; it is too high by at most the spare of such heaps, for each call that found
//! them locked.

use std::collections::VecDeque;

use parking_lot::Mutex;

use super::heap_counters::{ALL, CLASSES, CounterValues, HeapCounters, Taken};
use crate::size::PoolKind;

/// Access of the ledger to the heaps of a device.
pub(crate) trait Heaps {
    /// Calls `read` with the counters of a heap. Returns `None` if the heap is locked.
    fn with_counters<R>(&self, heap: u32, read: impl FnOnce(&mut HeapCounters) -> R) -> Option<R>;
}

/// The peaks of one device.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    peak: [CounterValues; CLASSES],
    /// The first of the heaps that may have spare. Each heap stores whether it is listed.
    first: Option<u32>,
    /// The heaps listed behind the first.
    others: VecDeque<u32>,
}

impl Ledger {
    /// Returns the peaks of each kind of pool and of both together.
    #[must_use]
    pub(crate) fn peaks(&self) -> [CounterValues; CLASSES] {
        self.state.lock().peak
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

    /// Makes the limits of heap `own` cover its current values, because it has passed one of `kind`. Lists
    /// the heap. The caller holds the heap's lock. Does not wait for other heaps.
    #[cold]
    #[inline(never)]
    pub(crate) fn raise_limits<H: Heaps>(
        &self,
        own: u32,
        kind: PoolKind,
        counters: &mut HeapCounters,
        heaps: &H,
    ) {
        if counters.covers_itself(kind) {
            return;
        }
        let state = &mut *self.state.lock();
        if !state.check_first::<false, H>(own, kind, counters, heaps) {
            state.check_others(own, kind, counters, heaps);
        }
    }

    /// Sets each peak to the current value. The caller holds the locks of all heaps.
    pub(crate) fn reset_peaks<'a>(&self, heaps: impl Iterator<Item = &'a mut HeapCounters>) {
        let state = &mut *self.state.lock();
        state.peak = Default::default();
        state.first = None;
        state.others.clear();
        for counters in heaps {
            for (class, peak) in state.peak.iter_mut().enumerate() {
                *peak = peak.zip(counters.current(class), |peak, current| peak + current);
            }
            counters.forget_spare();
        }
    }
}

impl State {
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
