//! Counters of live blocks.
//!
//! Only the values that change with each block are stored; the others are computed on demand. So an
//! allocation costs two additions and a comparison for the count and for the bytes each, and a free one
//! subtraction each.
//!
//! A block that waits for the end of a capture counts as active but not as allocated.

use crate::stats::Counter;

/// A number of blocks and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Amount {
    pub(super) blocks: i64,
    pub(super) bytes: i64,
}

/// Arithmetic is modulo 2^64, because the sum of all bytes ever allocated may exceed 2^63.
impl Amount {
    /// Returns the amount of one block.
    #[inline]
    pub(super) fn of(bytes: u64) -> Self {
        Self { blocks: 1, bytes: i64::try_from(bytes).expect("requests are at most 1 EiB") }
    }

    #[inline]
    fn plus(self, other: Self) -> Self {
        let bytes = self.bytes.wrapping_add(other.bytes);
        Self { blocks: self.blocks + other.blocks, bytes }
    }

    #[inline]
    fn minus(self, other: Self) -> Self {
        let bytes = self.bytes.wrapping_sub(other.bytes);
        Self { blocks: self.blocks - other.blocks, bytes }
    }

    #[inline]
    fn max(self, other: Self) -> Self {
        Self { blocks: self.blocks.max(other.blocks), bytes: self.bytes.max(other.bytes) }
    }
}

/// Counts and bytes of blocks.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sums {
    /// Live blocks.
    live: Amount,
    /// The peak of `live`.
    live_peak: Amount,
    /// All blocks allocated since the last reset of the accumulated counters.
    taken: Amount,
    /// The value of `live` at that reset.
    live_at_reset: Amount,
    /// Blocks that were freed by their callers and wait for the end of a capture.
    waiting: Amount,
    /// The peak of `live` plus `waiting` while any block waited.
    active_peak: Amount,
    /// The value of `live` plus `waiting` at that reset.
    active_at_reset: Amount,
    pub(super) num_ooms: i64,
    pub(super) num_retries: i64,
}

impl Sums {
    /// Counts an allocated block.
    #[inline]
    pub(super) fn enter(&mut self, bytes: u64) {
        self.taken = self.taken.plus(Amount::of(bytes));
        self.undo_leave(bytes);
    }

    /// Counts a block that its caller freed.
    #[inline]
    pub(super) fn leave(&mut self, bytes: u64) {
        self.live = self.live.minus(Amount::of(bytes));
    }

    /// Undoes [`leave`](Self::leave). Other blocks may have been allocated in between.
    #[inline]
    pub(super) fn undo_leave(&mut self, bytes: u64) {
        self.live = self.live.plus(Amount::of(bytes));
        self.live_peak = self.live_peak.max(self.live);
        if self.waiting.blocks != 0 {
            self.active_peak = self.active_peak.max(self.active());
        }
    }

    /// Counts a freed block that starts to wait for the end of a capture.
    pub(super) fn begin_to_wait(&mut self, bytes: u64) {
        self.waiting = self.waiting.plus(Amount::of(bytes));
        self.active_peak = self.active_peak.max(self.active());
    }

    /// Counts a waiting block that was freed in the driver.
    pub(super) fn end_to_wait(&mut self, bytes: u64) {
        self.waiting = self.waiting.minus(Amount::of(bytes));
    }

    /// Returns the live and the waiting blocks.
    pub(super) fn active(&self) -> Amount {
        self.live.plus(self.waiting)
    }

    /// Returns the bytes of live blocks.
    pub(super) fn live_bytes(&self) -> u64 {
        self.live.bytes.unsigned_abs()
    }

    /// Returns the bytes that wait for the end of a capture.
    pub(super) fn waiting_bytes(&self) -> u64 {
        self.waiting.bytes.unsigned_abs()
    }

    /// Returns the counter of live blocks, and that of their bytes.
    pub(super) fn allocated(&self) -> [Counter; 2] {
        counters(self.live, self.live_peak, self.taken, self.live_at_reset)
    }

    /// Returns the same counters including waiting blocks.
    pub(super) fn with_waiting(&self) -> [Counter; 2] {
        let peak = self.active_peak.max(self.live_peak);
        counters(self.active(), peak, self.taken, self.active_at_reset)
    }

    pub(super) fn reset_peaks(&mut self) {
        (self.live_peak, self.active_peak) = (self.live, self.active());
    }

    pub(super) fn reset_accumulated(&mut self) {
        self.taken = Amount::default();
        (self.live_at_reset, self.active_at_reset) = (self.live, self.active());
        (self.num_ooms, self.num_retries) = (0, 0);
    }
}

/// Returns the counters. The number freed is computed: blocks at the reset, plus those allocated since,
/// minus those present now.
fn counters(now: Amount, peak: Amount, taken: Amount, at_reset: Amount) -> [Counter; 2] {
    let freed = at_reset.plus(taken).minus(now);
    let counter = |current, peak, allocated, freed| Counter { current, peak, allocated, freed };
    [
        counter(now.blocks, peak.blocks, taken.blocks, freed.blocks),
        counter(now.bytes, peak.bytes, taken.bytes, freed.bytes),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A reference implementation that maintains every counter separately.
    #[derive(Default)]
    struct Plain {
        allocated: [Counter; 2],
        active: [Counter; 2],
    }

    impl Plain {
        fn increase(counters: &mut [Counter; 2], bytes: i64) {
            counters[0].increase(1);
            counters[1].increase(bytes);
        }

        fn decrease(counters: &mut [Counter; 2], bytes: i64) {
            counters[0].decrease(1);
            counters[1].decrease(bytes);
        }

        fn undo_decrease(counters: &mut [Counter; 2], bytes: i64) {
            for (counter, n) in counters.iter_mut().zip([1, bytes]) {
                counter.current += n;
                counter.freed -= n;
                counter.peak = counter.peak.max(counter.current);
            }
        }

        fn reset_accumulated(&mut self) {
            for counter in self.allocated.iter_mut().chain(&mut self.active) {
                (counter.allocated, counter.freed) = (0, 0);
            }
        }

        fn reset_peaks(&mut self) {
            for counter in self.allocated.iter_mut().chain(&mut self.active) {
                counter.peak = counter.current;
            }
        }
    }

    quickcheck::quickcheck! {
        fn derived_counters_equal_plain_counters(ops: Vec<(u8, u16)>) -> bool {
            let (mut sums, mut plain) = (Sums::default(), Plain::default());
            let (mut live, mut left, mut waiting) = (Vec::new(), Vec::new(), Vec::new());
            ops.into_iter().all(|(op, size)| {
                let (bytes, amount) = (u64::from(size), i64::from(size));
                match op % 8 {
                    0..=2 => {
                        live.push(bytes);
                        sums.enter(bytes);
                        Plain::increase(&mut plain.allocated, amount);
                        Plain::increase(&mut plain.active, amount);
                    }
                    3 => if let Some(bytes) = live.pop() {
                        left.push(bytes);
                        sums.leave(bytes);
                        Plain::decrease(&mut plain.allocated, Amount::of(bytes).bytes);
                        Plain::decrease(&mut plain.active, Amount::of(bytes).bytes);
                    },
                    4 => if let Some(bytes) = left.pop() {
                        live.push(bytes);
                        sums.undo_leave(bytes);
                        Plain::undo_decrease(&mut plain.allocated, Amount::of(bytes).bytes);
                        Plain::undo_decrease(&mut plain.active, Amount::of(bytes).bytes);
                    },
                    5 => if let Some(bytes) = left.pop() {
                        waiting.push(bytes);
                        sums.begin_to_wait(bytes);
                        Plain::undo_decrease(&mut plain.active, Amount::of(bytes).bytes);
                    },
                    6 => if let Some(bytes) = waiting.pop() {
                        sums.end_to_wait(bytes);
                        Plain::decrease(&mut plain.active, Amount::of(bytes).bytes);
                    },
                    _ if size % 2 == 0 => {
                        sums.reset_peaks();
                        plain.reset_peaks();
                    }
                    _ => {
                        sums.reset_accumulated();
                        plain.reset_accumulated();
                    }
                }
                sums.allocated() == plain.allocated
                    && sums.with_waiting() == plain.active
                    && sums.waiting_bytes() == waiting.iter().sum::<u64>()
            })
        }
    }

    #[test]
    fn sums_go_on_past_their_end() {
        const EIB: u64 = 1 << 60;
        let mut sums = Sums::default();
        for _ in 0..20 {
            sums.enter(EIB);
            sums.leave(EIB);
        }
        let [blocks, bytes] = sums.allocated();
        assert_eq!((blocks.current, blocks.allocated, blocks.freed), (0, 20, 20));
        let all = 20u64.wrapping_mul(EIB).cast_signed();
        assert_eq!((bytes.current, bytes.allocated, bytes.freed), (0, all, all));
    }
}
