//! The counters of live blocks. A block that waits for the end of a capture counts as active but not as
//! allocated.

use super::Note;
use crate::stats::{Counter, OwnCounter, signed};

/// The counters that this strategy stores. The driver counts the reserved bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct BlockCounters {
    /// Live blocks, and their bytes.
    pub(super) allocated: [Counter; 2],
    /// Live and waiting blocks together, and their bytes.
    pub(super) active: [Counter; 2],
    pub(super) num_ooms: i64,
    pub(super) num_retries: i64,
    /// The number of each [`Note`].
    notes: [i64; Note::NAMES.len()],
}

impl BlockCounters {
    /// Counts an allocated block.
    #[inline]
    pub(super) fn enter(&mut self, bytes: u64) {
        increase(&mut self.allocated, bytes);
        increase(&mut self.active, bytes);
    }

    /// Counts a block that leaves the table.
    #[inline]
    pub(super) fn leave(&mut self, bytes: u64) {
        decrease(&mut self.allocated, bytes);
        decrease(&mut self.active, bytes);
    }

    /// Undoes [`leave`](Self::leave). Other blocks may have been allocated in between.
    pub(super) fn undo_leave(&mut self, bytes: u64) {
        undo_decrease(&mut self.allocated, bytes);
        undo_decrease(&mut self.active, bytes);
    }

    /// Undoes [`leave`](Self::leave) for `active` only, when the freed block starts to wait for the end
    /// of a capture.
    pub(super) fn begin_to_wait(&mut self, bytes: u64) {
        undo_decrease(&mut self.active, bytes);
    }

    /// Counts a waiting block that was freed in the driver.
    pub(super) fn end_to_wait(&mut self, bytes: u64) {
        decrease(&mut self.active, bytes);
    }

    pub(super) fn live_bytes(&self) -> u64 {
        self.allocated[1].current.unsigned_abs()
    }

    /// Returns the bytes that wait for the end of a capture.
    pub(super) fn waiting_bytes(&self) -> u64 {
        (self.active[1].current - self.allocated[1].current).unsigned_abs()
    }

    pub(super) fn note(&mut self, note: Note) {
        self.notes[note as usize] += 1;
    }

    /// Returns the number of each [`Note`], with its name.
    pub(super) fn own(&self) -> Vec<OwnCounter> {
        let named = Note::NAMES.into_iter().zip(self.notes);
        named.map(|(name, count)| OwnCounter { name, count }).collect()
    }

    pub(super) fn reset_peaks(&mut self) {
        for counter in self.allocated.iter_mut().chain(&mut self.active) {
            counter.peak = counter.current;
        }
    }

    pub(super) fn reset_accumulated(&mut self) {
        for counter in self.allocated.iter_mut().chain(&mut self.active) {
            (counter.allocated, counter.freed) = (0, 0);
        }
        *self = Self { allocated: self.allocated, active: self.active, ..Self::default() };
    }
}

#[inline]
fn increase(counters: &mut [Counter; 2], bytes: u64) {
    counters[0].increase(1);
    counters[1].increase(signed(bytes));
}

#[inline]
fn decrease(counters: &mut [Counter; 2], bytes: u64) {
    counters[0].decrease(1);
    counters[1].decrease(signed(bytes));
}

fn undo_decrease(counters: &mut [Counter; 2], bytes: u64) {
    for (counter, n) in counters.iter_mut().zip([1, signed(bytes)]) {
        counter.current += n;
        counter.freed = counter.freed.wrapping_sub(n);
        counter.peak = counter.peak.max(counter.current);
    }
}
