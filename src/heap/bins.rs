//! The bins of free blocks by size, and the set of bins that are not empty.
//!
//! Every multiple of 512 B up to 512 KiB has its own bin. Above that, each power of two is divided into
//! 64 bins, which include their upper border: the remainder of a whole segment often has the same bin as
//! the segment. A bitmap of the bins and a bitmap of its words find the next non-empty bin in a few steps.

use crate::size::{KIB, MIN_BLOCK_BYTES};

/// The largest size that has a bin of its own.
pub(super) const EXACT_MAX_BYTES: u64 = 512 * KIB;
/// Shifts a `f64` so that its exponent and the first 6 bits of its mantissa remain.
const FLOAT_SHIFT: u32 = f64::MANTISSA_DIGITS - 1 - 6;

/// The number of bins, some of which are never used.
pub(super) const BINS: usize = 4096;
const WORDS: usize = BINS / 64;

const _: () = assert!(WORDS <= 64, "one word summarises them all");
const _: () = assert!(bin_of(EXACT_MAX_BYTES) < bin_of(EXACT_MAX_BYTES + MIN_BLOCK_BYTES));

/// Returns the bin for blocks of `size_bytes`, a multiple of 512 and at least 512. It never falls when the
/// size grows, up to 2^63. No block has bin 0: that way the bin of a size up to 512 KiB is the size in units
/// of 512 B, without a subtraction.
#[inline(always)]
#[expect(clippy::cast_precision_loss, reason = "above 2^53, the borders are rounded")]
pub(super) const fn bin_of(size_bytes: u64) -> usize {
    if size_bytes <= EXACT_MAX_BYTES {
        return (size_bytes / MIN_BLOCK_BYTES) as usize % BINS;
    }
    // A float's bits are the logarithm that divides powers of two evenly, and cost one instruction. The
    // conversion of signed numbers is the cheap one. Modulo the number of bins, the result is at least 1152
    // for all these sizes, so it needs no offset.
    (((size_bytes - 1) as i64 as f64).to_bits() >> FLOAT_SHIFT) as usize % BINS
}

/// The set of non-empty bins.
#[derive(Debug)]
pub(super) struct BinSet {
    words: [u64; WORDS],
    summary: u64,
}

impl Default for BinSet {
    fn default() -> Self {
        Self { words: [0; WORDS], summary: 0 }
    }
}

impl BinSet {
    #[inline(always)]
    pub(super) fn insert(&mut self, bin: usize) {
        self.words[bin / 64 % WORDS] |= 1 << (bin % 64);
        self.summary |= 1 << (bin / 64 % WORDS);
    }

    #[inline(always)]
    pub(super) fn remove(&mut self, bin: usize) {
        let word = &mut self.words[bin / 64 % WORDS];
        *word &= !(1 << (bin % 64));
        if *word == 0 {
            self.summary &= !(1 << (bin / 64 % WORDS));
        }
    }

    pub(super) fn contains(&self, bin: usize) -> bool {
        self.words[bin / 64] >> (bin % 64) & 1 == 1
    }

    /// Returns the first bin in the set at or after `bin`, which must be below [`BINS`].
    #[inline(always)]
    pub(super) fn first_from(&self, bin: usize) -> Option<usize> {
        let word = bin / 64 % WORDS;
        let here = self.words[word] & (!0 << (bin % 64));
        if here != 0 {
            return Some((word * 64 + here.trailing_zeros() as usize) % BINS);
        }
        let later = self.summary & (!1 << word);
        if later == 0 {
            return None;
        }
        let word = later.trailing_zeros() as usize % WORDS;
        Some((word * 64 + self.words[word].trailing_zeros() as usize) % BINS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::size::MIB;
    use std::collections::BTreeSet;

    #[test]
    fn bins_grow_with_size_and_cover_every_size() {
        let mut last = 0;
        for shift in 9..63 {
            for part in 0..64u64 {
                let size = ((1u64 << shift) + part * ((1 << shift) / 64)) & !(MIN_BLOCK_BYTES - 1);
                let bin = bin_of(size);
                assert!(bin >= last && bin < BINS, "{size}: {last} {bin}");
                // Larger blocks have a bin for each part.
                let is_exact = (MIB..=1 << 53).contains(&size);
                assert!(!is_exact || bin == last + 1, "{size}: {last} {bin}");
                last = bin;
            }
        }
        assert_eq!([512, 512 * KIB, 512 * KIB + 512].map(bin_of), [1, 1024, 1152]);
        assert_eq!(bin_of(2 * MIB - 512), bin_of(2 * MIB));
        assert!(bin_of(2 * MIB) < bin_of(2 * MIB + 512) && bin_of((1 << 63) - 512) < BINS);
    }

    quickcheck::quickcheck! {
        fn the_set_answers_like_an_ordered_set(changes: Vec<(u16, bool)>, ask: u16) -> bool {
            let (mut set, mut model) = (BinSet::default(), BTreeSet::new());
            for (bin, add) in changes {
                let bin = bin as usize % BINS;
                if add { set.insert(bin); model.insert(bin); }
                else { set.remove(bin); model.remove(&bin); }
            }
            let ask = ask as usize % BINS;
            set.first_from(ask) == model.range(ask..).next().copied()
        }
    }
}
