//! The free blocks of one kind in (size, key) order; `order` defines the keys.
//!
//! `bins` divides sizes into bins. The blocks of a bin of one size form a `pairing` heap; `bin` keeps those
//! of other bins in order.

use super::at::block_at;
use super::bin::Bin;
use super::bins::{BINS, BinSet, EXACT_MAX_BYTES, bin_of};
use super::block::{Block, Slot};
use super::pairing;

/// Allocated when the first block is inserted.
#[derive(Debug, Default)]
pub(super) struct FreeIndex(Option<Box<Bins>>);

#[derive(Debug)]
pub(super) struct Bins {
    filled: BinSet,
    bins: [Bin; BINS],
}

impl FreeIndex {
    /// Returns the bins; allocates them if there are none.
    #[inline(always)]
    pub(super) fn bins_mut(&mut self) -> &mut Bins {
        self.0.get_or_insert_with(Bins::boxed)
    }

    /// Returns the bins, or `None` if no block was ever inserted.
    #[inline(always)]
    pub(super) fn bins(&mut self) -> Option<&mut Bins> {
        self.0.as_deref_mut()
    }

    /// Returns the first block with at least `size_bytes`, which must be at least 512.
    pub(super) fn first_at_least(&self, blocks: &[Block], size_bytes: u64) -> Option<Slot> {
        let bins = self.0.as_ref()?;
        let bin = bins.first_from(size_bytes)?;
        let here = match has_one_size(bin) {
            true => Some(bins.first_of(bin)),
            false => bins.bins[bin].first_at_least(blocks, size_bytes),
        };
        here.or_else(|| bins.first_behind(bin))
    }

    /// Returns all blocks in order.
    pub(super) fn in_order<'a>(&'a self, blocks: &'a [Block]) -> impl Iterator<Item = Slot> + 'a {
        self.0.iter().flat_map(|bins| {
            let next = |from| bins.filled.first_from(from);
            let filled = std::iter::successors(next(0), move |bin| next(bin + 1));
            filled.flat_map(|bin| bins.in_order_of(blocks, bin))
        })
    }

    /// Returns `slot`, which is in this index, and all blocks behind it, in order. For a few steps: see
    /// [`pairing::next_after`].
    pub(super) fn in_order_from<'a>(
        &'a self,
        blocks: &'a [Block],
        slot: Slot,
    ) -> impl Iterator<Item = Slot> + 'a {
        std::iter::successors(Some(slot), |slot| {
            let (bins, bin) = (self.0.as_ref()?, bin_of(block_at(blocks, *slot).size_bytes));
            let next = bins.next_after(blocks, bin, *slot);
            next.or_else(|| bins.first_behind(bin))
        })
    }

    /// Returns true if the bitmap and the bins agree. For checks.
    pub(super) fn is_sound(&self, blocks: &[Block]) -> bool {
        self.0.as_ref().is_none_or(|bins| {
            (0..BINS).all(|bin| {
                let (blocks_of_bin, is_filled) = (bins.bins[bin], bins.filled.contains(bin));
                // Most bins are empty.
                if blocks_of_bin.first().is_none() {
                    return !is_filled && blocks_of_bin.is_single();
                }
                let is_sound = match has_one_size(bin) {
                    true => pairing::is_sound(blocks, blocks_of_bin.first()),
                    false => blocks_of_bin.is_sound(blocks),
                };
                is_filled && is_sound
            })
        })
    }

    /// Returns the number of blocks of the longest list.
    #[cfg(test)]
    pub(super) fn longest_list(&self) -> u32 {
        let bins = self.0.iter().flat_map(|bins| bins.bins.iter());
        bins.map(|bin| bin.list_len()).max().unwrap_or(0)
    }

    pub(super) fn bytes(&self) -> usize {
        if self.0.is_some() { size_of::<Bins>() } else { 0 }
    }
}

impl Bins {
    #[cold]
    #[inline(never)]
    fn boxed() -> Box<Self> {
        Box::new(Self { filled: BinSet::default(), bins: [Bin::EMPTY; BINS] })
    }

    /// Returns the first non-empty bin that may hold a block with at least `size_bytes`, which must be at
    /// least 512.
    #[inline(always)]
    pub(super) fn first_from(&self, size_bytes: u64) -> Option<usize> {
        self.filled.first_from(bin_of(size_bytes))
    }

    /// Returns the first block of a non-empty bin.
    #[inline(always)]
    pub(super) fn first_of(&self, bin: usize) -> Slot {
        self.bins[bin % BINS].first()
    }

    /// Returns true only if `bin` has several sizes but a single block, and no block is behind that. `bin` is
    /// not the last bin.
    #[inline(always)]
    pub(super) fn is_last(&self, bin: usize) -> bool {
        !has_one_size(bin)
            && self.bins[bin % BINS].is_single()
            && self.filled.first_from(bin + 1).is_none()
    }

    /// Returns the first block of the bins behind `bin`, which is not the last one.
    fn first_behind(&self, bin: usize) -> Option<Slot> {
        self.filled.first_from(bin + 1).map(|found| self.first_of(found))
    }

    /// Returns the block behind `slot`, which is in `bin`.
    fn next_after(&self, blocks: &[Block], bin: usize, slot: Slot) -> Option<Slot> {
        match has_one_size(bin) {
            true => pairing::next_after(blocks, self.first_of(bin), slot),
            false => self.bins[bin].next_after(blocks, slot),
        }
    }

    /// Returns all blocks of a non-empty bin in order.
    fn in_order_of(&self, blocks: &[Block], bin: usize) -> Vec<Slot> {
        match has_one_size(bin) {
            true => pairing::in_order(blocks, self.first_of(bin)),
            false => self.bins[bin].in_order(blocks),
        }
    }

    /// Inserts a block that is in no index into the bin for its size.
    #[inline(always)]
    pub(super) fn insert(&mut self, blocks: &mut [Block], bin: usize, new: Slot) {
        if has_one_size(bin) {
            // Also if it was not empty: see `pairing`.
            pairing::insert(blocks, self.bins[bin % BINS].first_mut(), new);
            self.filled.insert(bin);
            return;
        }
        let others = &mut self.bins[bin % BINS];
        if others.first().is_none() {
            *others.first_mut() = new;
            self.filled.insert(bin);
        } else {
            others.insert(blocks, new);
        }
    }

    /// Removes a block from its bin. `IS_FIRST` is true only for the first block of a bin, and saves steps.
    #[inline(always)]
    pub(super) fn remove<const IS_FIRST: bool>(
        &mut self,
        blocks: &mut [Block],
        bin: usize,
        old: Slot,
    ) {
        let others = &mut self.bins[bin % BINS];
        debug_assert!(!IS_FIRST || others.first() == old, "the first block of its bin");
        if has_one_size(bin) {
            match IS_FIRST {
                true => pairing::remove_first(blocks, others.first_mut()),
                false => pairing::remove(blocks, others.first_mut(), old),
            }
            if others.first().is_none() {
                self.filled.remove(bin);
            }
        } else if others.is_single() {
            *others.first_mut() = Slot::NONE;
            self.filled.remove(bin);
        } else {
            others.remove(blocks, old);
        }
    }

    /// Removes `old`, which is in `bin`, and inserts `new`, which is in no index and has this size, another
    /// one than `old`. See [`remove`](Self::remove) about `IS_FIRST`.
    #[inline(always)]
    pub(super) fn replace<const IS_FIRST: bool>(
        &mut self,
        blocks: &mut [Block],
        bin: usize,
        old: Slot,
        new: Slot,
        size_bytes: u64,
    ) {
        let new_bin = bin_of(size_bytes);
        debug_assert!(new_bin != bin || !has_one_size(bin), "another size");
        if new_bin == bin && self.bins[bin % BINS].is_single() {
            *self.bins[bin % BINS].first_mut() = new;
        } else {
            self.remove::<IS_FIRST>(blocks, bin, old);
            self.insert(blocks, new_bin, new);
        }
    }
}

/// Returns true if all blocks of the bin have the same size.
#[inline(always)]
const fn has_one_size(bin: usize) -> bool {
    bin <= bin_of(EXACT_MAX_BYTES)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::heap::slab::Slab;
    use crate::size::{KIB, MIB};

    /// Sizes around every border of the bins.
    const SIZES: [u64; 12] = [
        512,
        1024,
        1536,
        512 * KIB - 512,
        512 * KIB,
        512 * KIB + 512,
        2 * MIB - 512,
        2 * MIB,
        2 * MIB + 512,
        4 * MIB,
        1 << 62,
        (1 << 63) - 512,
    ];

    /// The index, and an ordered map from (size, key) as its model.
    #[derive(Default)]
    struct Both {
        slab: Slab,
        index: FreeIndex,
        model: BTreeMap<(u64, u64), Slot>,
    }

    impl Both {
        fn toggle(&mut self, size_bytes: u64, key: u64) {
            if let Some(slot) = self.model.remove(&(size_bytes, key)) {
                let (bins, bin) = (self.index.bins_mut(), bin_of(size_bytes));
                let blocks = self.slab.parts().0;
                match bins.first_of(bin) == slot {
                    true => bins.remove::<true>(blocks, bin, slot),
                    false => bins.remove::<false>(blocks, bin, slot),
                }
                self.slab.vacate(slot);
                return;
            }
            let slot = self.slab.occupy();
            let block = self.slab.get_mut(slot);
            (block.key, block.size_bytes) = (key, size_bytes);
            block.state = crate::heap::BlockState::Free;
            self.index.bins_mut().insert(self.slab.parts().0, bin_of(size_bytes), slot);
            self.model.insert((size_bytes, key), slot);
        }

        fn agree(&self) -> bool {
            let first_of = |size: &u64| {
                let expected = self.model.range((*size, 0)..).next().map(|(_, slot)| *slot);
                self.index.first_at_least(self.slab.blocks(), *size) == expected
            };
            let in_order_from = |(key, slot): (&(u64, u64), &Slot)| {
                let expected = self.model.range(*key..).map(|(_, slot)| *slot);
                self.index.in_order_from(self.slab.blocks(), *slot).eq(expected)
            };
            self.index.in_order(self.slab.blocks()).eq(self.model.values().copied())
                && self.index.is_sound(self.slab.blocks())
                && SIZES.iter().all(first_of)
                && self.model.iter().all(in_order_from)
        }
    }

    quickcheck::quickcheck! {
        fn blocks_are_in_the_order_of_an_ordered_map(changes: Vec<(u8, u8)>) -> bool {
            let mut both = Both::default();
            changes.into_iter().all(|(size, at)| {
                let key = u64::from(at % 40) * 12 * KIB;
                both.toggle(SIZES[usize::from(size) % SIZES.len()], key);
                both.agree()
            })
        }
    }
}
