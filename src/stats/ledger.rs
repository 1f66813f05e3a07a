//! The peaks over all heaps, without a shared lock on a hit.
//!
//! Each heap has a limit for each counter; the sum of all limits is the peak. So a heap at or below its
//! limits cannot raise a peak. The difference between limit and current value is the heap's **spare**; a
//! hit reduces it. Only a heap that passes a limit takes the ledger's lock, and takes what it lacks from
//! the spare of other heaps, by `try_lock`. If that does not suffice, the peak rises.
//!
//! The ledger lists the heaps that may have spare, and checks them in that order. A heap
//! that was not used since its last check, or has too little spare, gives all of it. It leaves the list
//! until it is used again. Any other heap shares its spare evenly, and the search ends there. So each
//! check except the last of a search is paid for by an operation of the heap that is checked.
//!
//! Therefore the cost of an operation does not depend on the number of heaps. A thread that cycles over
//! any number of streams checks one heap for each pair of allocate and free (`ledger/tests.rs` counts
//! the checks). Sharing also keeps concurrent threads from taking all spare from each other in turn.
//!
//! Peaks are exact if calls do not overlap. A heap that another call has locked counts at its limit. So a
//! peak is never too low; it is too high by at most the spare of such heaps, for each call that found
//! them locked.

use std::collections::VecDeque;

use parking_lot::Mutex;

use super::heap_counters::{CLASSES, CounterValues, HeapCounters, Spare};

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
    /// The heaps that may have spare. Each heap stores whether it is listed.
    listed: VecDeque<u32>,
}

impl Ledger {
    /// Returns the peaks of each kind of pool and of both together.
    #[must_use]
    pub(crate) fn peaks(&self) -> [CounterValues; CLASSES] {
        self.state.lock().peak
    }

    /// Lists heap `own` if it is not listed, and makes its limits cover its current values. A heap that is
    /// listed already has passed one. The caller holds the heap's lock. Does not wait for other heaps.
    #[cold]
    pub(crate) fn raise_limits<H: Heaps>(&self, own: u32, counters: &mut HeapCounters, heaps: &H) {
        let state = &mut *self.state.lock();
        if counters.enter_list() {
            // Reserves space for all heaps up to this one, so that the list does not grow on a hit.
            if state.listed.capacity() <= own as usize {
                state.listed.reserve(own as usize + 1 - state.listed.len());
            }
            state.listed.push_back(own);
            if counters.is_covered() {
                return;
            }
        }
        if !state.take_from_others(own, counters, heaps) {
            for (peak, risen) in state.peak.iter_mut().zip(counters.cover()) {
                *peak = peak.zip(risen, |peak, risen| peak + risen);
            }
        }
    }

    /// Sets each peak to the current value. The caller holds the locks of all heaps.
    pub(crate) fn reset_peaks<'a>(&self, heaps: impl Iterator<Item = &'a mut HeapCounters>) {
        let state = &mut *self.state.lock();
        state.peak = Default::default();
        state.listed.clear();
        for counters in heaps {
            for (class, peak) in state.peak.iter_mut().enumerate() {
                *peak = peak.zip(counters.current(class), |peak, current| peak + current);
            }
            counters.forget_spare();
        }
    }
}

impl State {
    /// Takes spare from other heaps until heap `own` passes no limit. Returns false if that did not
    /// suffice.
    fn take_from_others<H: Heaps>(
        &mut self,
        own: u32,
        counters: &mut HeapCounters,
        heaps: &H,
    ) -> bool {
        for _ in 0..self.listed.len() {
            let Some(heap) = self.listed.pop_front() else { break };
            if heap == own {
                self.listed.push_back(heap);
                continue;
            }
            match heaps.with_counters(heap, |other| counters.take_spare(other)) {
                Some(Spare::Shared { is_left }) => {
                    if is_left {
                        self.listed.push_back(heap);
                    }
                    return true;
                }
                Some(Spare::All) => {
                    if counters.is_covered() {
                        return true;
                    }
                }
                None => self.listed.push_back(heap),
            }
        }
        false
    }
}

#[cfg(test)]
mod tests;
