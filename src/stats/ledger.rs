//! The peaks of all heaps together, exact without a shared lock on a hit.
//!
//! Each heap holds a limit per counter, and all limits together are the peak: a heap at or below its
//! limits cannot make a new one. What a limit leaves above what is held is the heap's **spare**. A heap
//! that passes a limit comes here and takes what it lacks from the spare of others, by `try_lock`; only
//! where that is not enough the peak rises.
//!
//! Heaps that may have spare are listed, and are looked at in that order. One that was not used since the
//! last look, or has too little, gives all its spare and leaves the list, until it is used again. So every
//! look but the last of a call is paid for by a call of the heap that is looked at, and calls cost the
//! same however many heaps there are. The last one shares what it has, so that threads that work
//! at once do not take all from each other in turn.
//!
//! Exact as long as calls do not overlap. A heap that is busy in another call counts at its limit,
//! so otherwise a peak is never too low, and too high by at most the spare of such heaps.

use std::collections::VecDeque;

use parking_lot::Mutex;

use super::lanes::{CLASSES, HeapCounters, Lanes, Spare};

/// The heaps of a device, as the ledger sees them.
pub(crate) trait Heaps {
    /// Shows the counters of a heap to `look`, unless the heap is busy: then `None`.
    fn try_look<R>(&self, heap: u32, look: impl FnOnce(&mut HeapCounters) -> R) -> Option<R>;
}

/// Peaks of one device.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    peak: [Lanes; CLASSES],
    /// The heaps that may have spare; each knows whether it is here.
    listed: VecDeque<u32>,
}

impl Ledger {
    /// The peaks for each kind of pool and for both.
    #[must_use]
    pub(crate) fn peaks(&self) -> [Lanes; CLASSES] {
        self.state.lock().peak
    }

    /// Lists heap `own`, and gives it limits that cover what it holds: a heap that is listed already has
    /// passed one. The caller holds the heap's lock; no other heap is waited for.
    #[cold]
    pub(crate) fn settle<H: Heaps>(&self, own: u32, counters: &mut HeapCounters, heaps: &H) {
        let state = &mut *self.state.lock();
        if counters.enter_list() {
            // Room for all heaps up to this one: the list does not grow where a cached block is handed out.
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

    /// Sets every peak to what is held now. The caller holds all heaps.
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
    /// Takes spare of other heaps until heap `own` passes no limit. False when that was not enough.
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
            match heaps.try_look(heap, |other| counters.take_spare(other)) {
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
