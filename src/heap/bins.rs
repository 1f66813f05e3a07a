//! Which bin a size belongs to, and which bins hold anything.
//!
//! Bins are ordered by size. Every multiple of 512 B up to 2 MiB has its own; above, each power of
//! two is cut in 16. A bitmap of bins and a bitmap of its words find the next one in a few steps.

use crate::size::{MIB, MIN_BLOCK_BYTES};

const EXACT_MAX_BYTES: u64 = 2 * MIB;
/// How many bins, from the first on, hold blocks of one size only.
pub(super) const EXACT_BINS: usize = 4096;
const PARTS_LOG2: u32 = 6;
const FIRST_DOUBLING: u32 = EXACT_MAX_BYTES.ilog2();

/// How many bins there are.
pub(super) const BINS: usize =
    EXACT_BINS + ((u64::BITS - FIRST_DOUBLING) as usize) * (1 << PARTS_LOG2);
const WORDS: usize = BINS.div_ceil(64);

const _: () = assert!(EXACT_BINS as u64 * MIN_BLOCK_BYTES == EXACT_MAX_BYTES);
const _: () = assert!(WORDS <= 128, "two words summarise them all");

/// The bin of blocks of `size_bytes`, a multiple of 512 and at least 512.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "bins are fewer than 2^16")]
pub(super) const fn bin_of(size_bytes: u64) -> usize {
    if size_bytes <= EXACT_MAX_BYTES {
        return (size_bytes / MIN_BLOCK_BYTES) as usize - 1;
    }
    let doubling = size_bytes.ilog2();
    let part = (size_bytes >> (doubling - PARTS_LOG2)) as usize & ((1 << PARTS_LOG2) - 1);
    EXACT_BINS + ((doubling - FIRST_DOUBLING) as usize) * (1 << PARTS_LOG2) + part
}

/// The set of bins that hold anything.
#[derive(Debug)]
pub(super) struct BinSet {
    words: [u64; WORDS],
    summary: [u64; 2],
}

impl Default for BinSet {
    fn default() -> Self {
        Self { words: [0; WORDS], summary: [0; 2] }
    }
}

impl BinSet {
    #[inline]
    pub(super) fn insert(&mut self, bin: usize) {
        let word = &mut self.words[bin / 64];
        if *word == 0 {
            self.summary[bin / 4096] |= 1 << (bin / 64 % 64);
        }
        *word |= 1 << (bin % 64);
    }

    #[inline]
    pub(super) fn remove(&mut self, bin: usize) {
        let word = &mut self.words[bin / 64];
        *word &= !(1 << (bin % 64));
        if *word == 0 {
            self.summary[bin / 4096] &= !(1 << (bin / 64 % 64));
        }
    }

    pub(super) fn contains(&self, bin: usize) -> bool {
        self.words[bin / 64] >> (bin % 64) & 1 == 1
    }

    /// The first bin of the set from `bin` on.
    #[inline]
    pub(super) fn first_from(&self, bin: usize) -> Option<usize> {
        if bin >= BINS {
            return None;
        }
        let word = bin / 64;
        let here = self.words[word] & (!0 << (bin % 64));
        if here != 0 {
            return Some(word * 64 + here.trailing_zeros() as usize);
        }
        let word = self.first_word_after(word)?;
        Some(word * 64 + self.words[word].trailing_zeros() as usize)
    }

    #[inline]
    fn first_word_after(&self, word: usize) -> Option<usize> {
        let next = word + 1;
        let half = next / 64;
        if half >= 2 {
            return None;
        }
        let here = self.summary[half] & (!0 << (next % 64));
        if here != 0 {
            return Some(half * 64 + here.trailing_zeros() as usize);
        }
        let other = self.summary[1];
        (half == 0 && other != 0).then(|| 64 + other.trailing_zeros() as usize)
    }

    /// The last bin of the set.
    pub(super) fn last(&self) -> Option<usize> {
        let half = if self.summary[1] != 0 { 1 } else { 0 };
        if self.summary[half] == 0 {
            return None;
        }
        let word = half * 64 + self.summary[half].ilog2() as usize;
        Some(word * 64 + self.words[word].ilog2() as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn bins_grow_with_size_and_cover_every_size() {
        let mut last = 0;
        for shift in 9..63 {
            for part in 0..64u64 {
                let size = ((1u64 << shift) + part * ((1 << shift) / 64)) & !(MIN_BLOCK_BYTES - 1);
                let bin = bin_of(size);
                assert!(bin >= last && bin < BINS, "{size}: {last} {bin}");
                last = bin;
            }
        }
        assert_eq!(bin_of(512), 0);
        assert_eq!(bin_of(2 * MIB), 4095);
        assert_eq!(bin_of(2 * MIB + 512), 4096);
        assert!(bin_of(u64::MAX - 511) < BINS);
    }

    quickcheck::quickcheck! {
        fn the_set_answers_like_an_ordered_set(changes: Vec<(u16, bool)>, ask: u16) -> bool {
            let (mut set, mut model) = (BinSet::default(), BTreeSet::new());
            for (bin, add) in changes {
                let bin = bin as usize % BINS;
                if add { set.insert(bin); model.insert(bin); }
                else { set.remove(bin); model.remove(&bin); }
            }
            let ask = ask as usize % (BINS + 2);
            set.first_from(ask) == model.range(ask..).next().copied()
                && set.last() == model.last().copied()
        }
    }
}
