//! The peaks of all heaps together, exact without a shared lock on a hit.
//!
//! Each heap holds a limit per counter; what the limits leave of the peak is kept here unassigned.
//! All limits and the unassigned rest add up to the peak, so a heap at or below its limits cannot
//! make a new one. A heap that passes a limit comes here: it is served from the rest, or every heap
//! that moved is visited by `try_lock`, the true sum is taken and the spare is shared anew.
//!
//! Exact as long as calls do not overlap. A heap that is busy in another call counts at its limit,
//! so otherwise a peak is never too low, and too high by at most the spare of such heaps.

use parking_lot::Mutex;

use super::lanes::{ALL, CLASSES, HeapCounters, Lanes};

/// The heaps of a device, as the ledger sees them.
pub trait Heaps {
    /// Whether the heap's counters have changed since its mark was last cleared.
    fn moved(&self, heap: usize) -> bool;

    /// Calls `visit` with the heap's counters and clears its mark, unless the heap is busy. False
    /// when it was.
    fn try_visit(&self, heap: usize, visit: &mut dyn FnMut(&mut HeapCounters)) -> bool;
}

/// Peaks of one device.
#[derive(Debug, Default)]
pub struct Ledger {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    peak: [Lanes; CLASSES],
    unassigned: [Lanes; CLASSES],
    heaps: Vec<Entry>,
}

/// What the ledger knows of one heap.
#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    limit: [Lanes; CLASSES],
    /// Whether the limit may be above what the heap holds.
    has_spare: bool,
    visited: bool,
}

impl Ledger {
    /// The peaks for each kind of pool and for both.
    #[must_use]
    pub fn peaks(&self) -> [Lanes; CLASSES] {
        self.state.lock().peak
    }

    /// Gives heap `own`, which has passed a limit, limits that cover what it holds. The caller
    /// holds the heap's lock; no other heap is waited for.
    #[cold]
    pub fn raise(&self, own: usize, counters: &mut HeapCounters, heaps: &dyn Heaps) {
        let state = &mut *self.state.lock();
        state.know(own + 1);
        if !state.serve_from_unassigned(own, counters) {
            state.share_anew(own, counters, heaps);
        }
    }

    /// Sets every peak to what is held now. The caller holds all heaps and passes them in order.
    pub fn reset_peaks<'a>(&self, heaps: impl Iterator<Item = &'a mut HeapCounters>) {
        let state = &mut *self.state.lock();
        state.peak = Default::default();
        state.unassigned = Default::default();
        let heaps: Vec<_> = heaps.collect();
        state.know(heaps.len());
        for (entry, counters) in state.heaps.iter_mut().zip(heaps) {
            for class in 0..CLASSES {
                let current = counters.current(class);
                entry.limit[class] = current;
                state.peak[class] = add(state.peak[class], current);
            }
            counters.set_limits(entry.limit);
            entry.has_spare = false;
        }
    }
}

impl State {
    /// Makes room for so many heaps. A heap is known from its first raise on: until then it holds
    /// nothing.
    fn know(&mut self, heaps: usize) {
        if self.heaps.len() < heaps {
            self.heaps.resize(heaps, Entry::default());
        }
    }

    /// True when the unassigned rest covers what the heap lacks; half of what is left goes along.
    fn serve_from_unassigned(&mut self, own: usize, counters: &mut HeapCounters) -> bool {
        let mut lacks = [Lanes::default(); CLASSES];
        for (class, lack) in lacks.iter_mut().enumerate() {
            *lack = counters.current(class).zip(counters.limits()[class], |c, l| (c - l).max(0));
            if !subtract(self.unassigned[class], *lack).none_negative() {
                return false;
            }
        }
        for (class, lack) in lacks.into_iter().enumerate() {
            let grant = lack.zip(self.unassigned[class], |lack, rest| lack + (rest - lack) / 2);
            self.unassigned[class] = subtract(self.unassigned[class], grant);
            self.heaps[own].limit[class] = add(self.heaps[own].limit[class], grant);
        }
        self.heaps[own].has_spare = true;
        counters.set_limits(self.heaps[own].limit);
        true
    }

    fn share_anew(&mut self, own: usize, counters: &mut HeapCounters, heaps: &dyn Heaps) {
        let mut visited = 0;
        for (heap, entry) in self.heaps.iter_mut().enumerate() {
            entry.visited = heap != own
                && (entry.has_spare || heaps.moved(heap))
                && heaps.try_visit(heap, &mut |other| {
                    for class in 0..CLASSES {
                        entry.limit[class] = other.current(class);
                    }
                    other.set_limits(entry.limit);
                });
            if entry.visited {
                entry.has_spare = false;
                visited += 1;
            }
        }
        let mut shares = [Lanes::default(); CLASSES];
        for (class, share) in shares.iter_mut().enumerate() {
            self.heaps[own].limit[class] = counters.current(class);
            let sum = self.heaps.iter().fold(Lanes::default(), |sum, e| add(sum, e.limit[class]));
            self.peak[class] = self.peak[class].zip(sum, i64::max);
            let spare = subtract(self.peak[class], sum);
            let grant = spare.zip(spare, |n, _| n / 2);
            self.heaps[own].limit[class] = add(self.heaps[own].limit[class], grant);
            self.unassigned[class] = subtract(spare, grant);
            *share = grant.zip(grant, |n, _| n.checked_div(visited).unwrap_or(0));
        }
        self.heaps[own].has_spare = true;
        counters.set_limits(self.heaps[own].limit);
        if shares.iter().any(|share| *share != Lanes::default()) {
            self.hand_round(&shares, heaps);
        }
    }

    /// Gives each visited heap its share of the spare.
    fn hand_round(&mut self, shares: &[Lanes; CLASSES], heaps: &dyn Heaps) {
        for (heap, entry) in self.heaps.iter_mut().enumerate().filter(|(_, e)| e.visited) {
            let mut limit = entry.limit;
            for (limit, share) in limit.iter_mut().zip(shares) {
                *limit = add(*limit, *share);
            }
            if heaps.try_visit(heap, &mut |other| other.set_limits(limit)) {
                entry.limit = limit;
                entry.has_spare = true;
                for (rest, share) in self.unassigned.iter_mut().zip(shares) {
                    *rest = subtract(*rest, *share);
                }
            }
        }
    }
}

fn add(a: Lanes, b: Lanes) -> Lanes {
    a.zip(b, |a, b| a + b)
}

fn subtract(a: Lanes, b: Lanes) -> Lanes {
    a.zip(b, |a, b| a - b)
}

const _: () = assert!(ALL == CLASSES - 1, "kinds come first");

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use super::*;
    use crate::heap::{BlockId, Completed, HandOut, Slot, SplitChange};
    use crate::size::PoolKind;
    use crate::stats::lanes::LANES;

    struct Model {
        counters: Vec<RefCell<HeapCounters>>,
        moved: Vec<Cell<bool>>,
    }

    impl Heaps for Model {
        fn moved(&self, heap: usize) -> bool {
            self.moved[heap].get()
        }
        fn try_visit(&self, heap: usize, visit: &mut dyn FnMut(&mut HeapCounters)) -> bool {
            let Ok(mut counters) = self.counters[heap].try_borrow_mut() else {
                return false;
            };
            visit(&mut counters);
            self.moved[heap].set(false);
            true
        }
    }

    fn kind_of(n: u8) -> PoolKind {
        if n.is_multiple_of(2) { PoolKind::Small } else { PoolKind::Large }
    }

    quickcheck::quickcheck! {
        fn peaks_equal_one_plain_counter(steps: Vec<(u8, u8, u16, bool, i8)>) -> bool {
            const HEAPS: usize = 5;
            let ledger = Ledger::default();
            let model = Model {
                counters: (0..HEAPS).map(|_| RefCell::default()).collect(),
                moved: (0..HEAPS).map(|_| Cell::new(false)).collect(),
            };
            let mut plain = [[0i64; LANES]; CLASSES];
            let mut peak = [[0i64; LANES]; CLASSES];
            let mut live: Vec<(usize, PoolKind, u64)> = Vec::new();
            for (heap, kind, size, free, split) in steps {
                let inactive = SplitChange { count: split.signum().into(), bytes: split.into() };
                let (heap, kind, size, sign) = match live.pop() {
                    Some((heap, kind, size)) if free => (heap, kind, size, -1),
                    other => {
                        live.extend(other);
                        let new = (heap as usize % HEAPS, kind_of(kind), u64::from(size));
                        live.insert(0, new);
                        (new.0, new.1, new.2, 1)
                    }
                };
                let counters = &mut *model.counters[heap].borrow_mut();
                let over = if sign > 0 {
                    let id = BlockId { slot: Slot(0), generation: 0 };
                    let out = HandOut { id, address: 0, size_bytes: size, kind, inactive };
                    counters.handed_out(&out, size / 2, false)
                } else {
                    let done = Completed { address: 0, size_bytes: size,
                        requested_bytes: size / 2, kind, inactive };
                    counters.freed(&done, false)
                };
                model.moved[heap].set(true);
                if over { ledger.raise(heap, counters, &model); }
                let size = i64::try_from(size).unwrap();
                let change = [sign, sign * size, sign, sign * size, sign * (size / 2),
                    inactive.count, inactive.bytes, 0];
                for class in [kind.index(), ALL] {
                    for lane in 0..LANES {
                        plain[class][lane] += change[lane];
                        peak[class][lane] = peak[class][lane].max(plain[class][lane]);
                    }
                }
                assert_eq!(ledger.peaks().map(|l| l.0), peak);
            }
            true
        }
    }
}
