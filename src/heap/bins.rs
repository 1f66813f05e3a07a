//! The bins of free blocks by size, and the set of bins that are not empty.
//!
//! Every multiple of 512 B up to 2 MiB has its own bin; above that, each power of two is divided into 64
//! bins. Sizes up to 32 KiB have eight bins each, called lanes, chosen by key (see `order`). A bitmap of
//! the bins and a bitmap of its words find the next non-empty bin in a few steps.

use std::hint::select_unpredictable;

use crate::size::{KIB, MIB, MIN_BLOCK_BYTES};

const EXACT_MAX_BYTES: u64 = 2 * MIB;
const EXACT_SIZES: usize = 4096;
/// Sizes up to this one have lanes.
const LANED_MAX_BYTES: u64 = 32 * KIB;
const LANED_SIZES: usize = 64;
/// Keys this far apart are in different lanes, except at multiples of eight times the distance.
const LANE_KEYS: u64 = 32 * KIB;
pub(super) const LANES: usize = 8;
/// The number of bins, from the first on, that are lanes. Those of size 0 are never used: that way the
/// index is a size in units of 512 B, without a subtraction.
pub(super) const LANED_BINS: usize = (LANED_SIZES + 1) * LANES;
/// The number of bins in excess of sizes, before the first size without lanes.
const SHIFT: usize = LANED_BINS - LANED_SIZES - 1;
/// The number of bins, from the first on, that hold blocks of a single size.
pub(super) const EXACT_BINS: usize = EXACT_SIZES + 1 + SHIFT;
const PARTS_LOG2: u32 = 6;
const FIRST_DOUBLING: u32 = EXACT_MAX_BYTES.ilog2();

/// The total number of bins.
pub(super) const BINS: usize =
    EXACT_BINS + ((u64::BITS - FIRST_DOUBLING) as usize) * (1 << PARTS_LOG2);
const WORDS: usize = BINS.div_ceil(64);

const _: () = assert!(EXACT_SIZES as u64 * MIN_BLOCK_BYTES == EXACT_MAX_BYTES);
const _: () = assert!(LANED_SIZES as u64 * MIN_BLOCK_BYTES == LANED_MAX_BYTES);
const _: () = assert!(WORDS <= 128, "two words summarise them all");
const _: () = assert!(LANES == 8, "the lanes of a size are one byte of the bitmap");

/// Returns the first bin for blocks of `size_bytes`, a multiple of 512 and at least 512.
#[inline]
pub(super) fn first_bin_of(size_bytes: u64) -> usize {
    lane_of(size_bytes, 0)
}

/// Returns the bin of a block. The lane is the 32 Ki part of its key modulo 256 Ki.
#[inline]
pub(super) fn bin_of(size_bytes: u64, key: u64) -> usize {
    lane_of(size_bytes, (key / LANE_KEYS) as usize % LANES)
}

#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "bins are fewer than 2^16")]
fn lane_of(size_bytes: u64, lane: usize) -> usize {
    if size_bytes <= EXACT_MAX_BYTES {
        let size = (size_bytes / MIN_BLOCK_BYTES) as usize;
        let (laned, plain) = (size * LANES + lane, size + SHIFT);
        // The sizes a program requests are unpredictable, so avoid a branch.
        return select_unpredictable(size <= LANED_SIZES, laned, plain);
    }
    let doubling = size_bytes.ilog2();
    let part = (size_bytes >> (doubling - PARTS_LOG2)) as usize & ((1 << PARTS_LOG2) - 1);
    EXACT_BINS + ((doubling - FIRST_DOUBLING) as usize) * (1 << PARTS_LOG2) + part
}

/// The set of non-empty bins.
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
    #[inline(always)]
    pub(super) fn insert(&mut self, bin: usize) {
        let word = &mut self.words[bin / 64];
        if *word == 0 {
            self.summary[bin / 4096] |= 1 << (bin / 64 % 64);
        }
        *word |= 1 << (bin % 64);
    }

    #[inline(always)]
    pub(super) fn remove(&mut self, bin: usize) {
        let word = &mut self.words[bin / 64];
        *word &= !(1 << (bin % 64));
        if *word == 0 {
            self.summary[bin / 4096] &= !(1 << (bin / 64 % 64));
        }
    }

    /// Returns true if a later lane of the same size is not empty. `bin` is a lane.
    #[inline]
    pub(super) fn has_more_lanes(&self, bin: usize) -> bool {
        self.lanes(bin) & (!1 << (bin % LANES)) != 0
    }

    /// Returns the non-empty lanes of the same size, from `bin` on.
    #[inline]
    pub(super) fn lanes_from(&self, bin: usize) -> impl Iterator<Item = usize> + use<> {
        let mut left = self.lanes(bin) & (!0 << (bin % LANES));
        std::iter::from_fn(move || {
            let lane = (left != 0).then(|| left.trailing_zeros() as usize)?;
            left &= left - 1;
            Some(bin / LANES * LANES + lane)
        })
    }

    /// Returns the lanes of the size of `bin`, one bit each.
    #[inline]
    fn lanes(&self, bin: usize) -> u64 {
        self.words[bin / 64] >> (bin % 64 / LANES * LANES) & ((1 << LANES) - 1)
    }

    pub(super) fn contains(&self, bin: usize) -> bool {
        self.words[bin / 64] >> (bin % 64) & 1 == 1
    }

    /// Returns the first bin in the set at or after `bin`.
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
                let bin = first_bin_of(size);
                assert!(bin >= last && bin < BINS, "{size}: {last} {bin}");
                last = bin;
            }
        }
        assert_eq!(first_bin_of(512), LANES);
        assert_eq!(first_bin_of(2 * MIB), EXACT_BINS - 1);
        assert_eq!(first_bin_of(2 * MIB + 512), EXACT_BINS);
        assert_eq!(first_bin_of(u64::MAX - 511), BINS - 1);
        assert_eq!(first_bin_of(1 << 63), BINS - (1 << PARTS_LOG2));
    }

    #[test]
    fn lanes_of_one_size_lie_before_those_of_the_next() {
        for size in (1..80).map(|n| n * MIN_BLOCK_BYTES) {
            let bins: BTreeSet<_> = (0..16).map(|n| bin_of(size, n * LANE_KEYS)).collect();
            let (first, next) = (first_bin_of(size), first_bin_of(size + MIN_BLOCK_BYTES));
            assert!(bins.into_iter().eq(first..next));
            assert_eq!(next - first, if size <= LANED_MAX_BYTES { LANES } else { 1 });
        }
    }

    quickcheck::quickcheck! {
        fn the_set_finds_the_lanes_of_a_size(bins: Vec<u16>, ask: u16) -> bool {
            let (mut set, ask) = (BinSet::default(), ask as usize % LANED_BINS);
            let bins: BTreeSet<_> = bins.into_iter().map(|bin| bin as usize % LANED_BINS).collect();
            bins.iter().for_each(|bin| set.insert(*bin));
            let end = (ask / LANES + 1) * LANES;
            set.lanes_from(ask).eq(bins.range(ask..end).copied())
                && set.has_more_lanes(ask) == bins.range(ask + 1..end).next().is_some()
        }

        fn the_set_answers_like_an_ordered_set(changes: Vec<(u16, bool)>, ask: u16) -> bool {
            let (mut set, mut model) = (BinSet::default(), BTreeSet::new());
            for (bin, add) in changes {
                let bin = bin as usize % BINS;
                if add { set.insert(bin); model.insert(bin); }
                else { set.remove(bin); model.remove(&bin); }
            }
            let ask = ask as usize % (BINS + 2);
            set.first_from(ask) == model.range(ask..).next().copied()
        }
    }
}
