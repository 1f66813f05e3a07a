//! The free blocks of one kind in (size, key) order; `order` defines the keys.
//!
//! `bins` divides sizes into bins, and each `bin` keeps its blocks in order.

use super::at::block_at;
use super::bin::Bin;
use super::bins::{BINS, BinSet, bin_of};
use super::block::{Block, Slot};

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
        let here = bins.bins[bin].first_at_least(blocks, size_bytes);
        here.or_else(|| bins.first_behind(bin))
    }

    /// Returns all blocks in order.
    pub(super) fn in_order<'a>(&'a self, blocks: &'a [Block]) -> impl Iterator<Item = Slot> + 'a {
        self.0.iter().flat_map(|bins| {
            let next = |from| bins.filled.first_from(from);
            let filled = std::iter::successors(next(0), move |bin| next(bin + 1));
            filled.flat_map(|bin| bins.bins[bin].in_order(blocks))
        })
    }

    /// Returns `slot`, which is in this index, and all blocks behind it, in order. For a few steps: see
    /// [`Bin::next_after`].
    pub(super) fn in_order_from<'a>(
        &'a self,
        blocks: &'a [Block],
        slot: Slot,
    ) -> impl Iterator<Item = Slot> + 'a {
        std::iter::successors(Some(slot), |slot| {
            let (bins, bin) = (self.0.as_ref()?, bin_of(block_at(blocks, *slot).size_bytes));
            let next = bins.bins[bin].next_after(blocks, *slot);
            next.or_else(|| bins.first_behind(bin))
        })
    }

    /// Returns true if the bitmap and the bins agree. For checks.
    pub(super) fn is_sound(&self, blocks: &[Block]) -> bool {
        self.0.as_ref().is_none_or(|bins| {
            bins.bins.iter().enumerate().all(|(at, bin)| {
                let is_filled = bins.filled.contains(at);
                // Most bins are empty.
                if bin.is_empty() { !is_filled } else { is_filled && bin.is_sound(blocks) }
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

    /// Returns true if no block is behind the only one of `bin`, which is not the last bin.
    #[inline(always)]
    pub(super) fn is_last(&self, bin: usize) -> bool {
        self.bins[bin % BINS].is_single() && self.filled.first_from(bin + 1).is_none()
    }

    /// Returns the first block of the bins behind `bin`, which is not the last one.
    fn first_behind(&self, bin: usize) -> Option<Slot> {
        self.filled.first_from(bin + 1).map(|found| self.first_of(found))
    }

    /// Inserts a block that is in no index into the bin for its size.
    #[inline(always)]
    pub(super) fn insert(&mut self, blocks: &mut [Block], bin: usize, new: Slot) {
        let others = &mut self.bins[bin % BINS];
        if others.first().is_none() {
            others.set_only(new);
            self.filled.insert(bin);
        } else {
            others.insert(blocks, new);
        }
    }

    /// Removes a block from its bin.
    #[inline(always)]
    pub(super) fn remove(&mut self, blocks: &mut [Block], bin: usize, old: Slot) {
        let others = &mut self.bins[bin % BINS];
        if others.is_single() {
            others.clear();
            self.filled.remove(bin);
        } else {
            others.remove(blocks, old);
        }
    }

    /// Removes `old`, which is in `bin`, and inserts `new`, which has this size and is in no index.
    #[inline(always)]
    pub(super) fn replace(
        &mut self,
        blocks: &mut [Block],
        bin: usize,
        old: Slot,
        new: Slot,
        size_bytes: u64,
    ) {
        let new_bin = bin_of(size_bytes);
        let others = &mut self.bins[bin % BINS];
        if new_bin == bin && others.is_single() {
            others.set_only(new);
        } else {
            self.remove(blocks, bin, old);
            self.insert(blocks, new_bin, new);
        }
    }
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
                self.index.bins_mut().remove(self.slab.parts().0, bin_of(size_bytes), slot);
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
