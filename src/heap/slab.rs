//! All blocks of a heap, in slots that are reused, last vacated first.
//!
//! The blocks are one contiguous array, so that a lookup needs no table of chunks. The array doubles from
//! 1 KiB to 16 KiB and grows by a quarter up to 256 KiB, then once to 16 MiB of address space, of which the
//! system backs only the part that is used. Beyond that it doubles. Growth moves the blocks.

use super::at::{block_at, block_at_mut};
use super::block::{Block, BlockState, Slot};

/// The most blocks that become vacant at once.
const CHUNK_BLOCKS: usize = 256;
/// The blocks of a new array. Few, because many programs have a heap for each of thousands of streams: the
/// less memory a heap takes, the more of it stays in the processor's caches.
const FIRST_BLOCKS: usize = 16;
/// All slots are below this number.
pub(super) const SLOTS_MAX: u32 = BLOCKS_MAX * Slot::STEP;
const BLOCKS_MAX: u32 = 1 << 28;
/// The number of blocks in 16 MiB, more than most programs have.
const AMPLE_BLOCKS: usize = 262_144;
/// The array grows in steps up to this number (256 KiB), so that small heaps stay small.
const STEPPED_BLOCKS: usize = 4_096;

#[derive(Debug)]
pub(super) struct Slab {
    /// Empty until the first block is added. Then the first one is never used: see [`Slot::NONE`].
    blocks: Vec<Block>,
    vacant: Vacant,
}

/// The vacant slots: a list through their first links.
#[derive(Debug)]
pub(super) struct Vacant {
    first: Slot,
    /// The number of slots that are not vacant.
    occupied: usize,
}

impl Default for Slab {
    fn default() -> Self {
        Self { blocks: Vec::new(), vacant: Vacant { first: Slot::NONE, occupied: 0 } }
    }
}

impl Vacant {
    /// Takes a slot from the list, unless it is empty. See [`Slab::occupy`].
    #[inline(always)]
    pub(super) fn occupy(&mut self, blocks: &[Block]) -> Option<Slot> {
        let slot = self.first;
        if slot.is_none() {
            return None;
        }
        self.first = block_at(blocks, slot).links[0];
        self.occupied += 1;
        Some(slot)
    }

    /// Vacates `slot`.
    #[inline(always)]
    pub(super) fn vacate(&mut self, blocks: &mut [Block], slot: Slot) {
        let block = block_at_mut(blocks, slot);
        debug_assert!(block.state != BlockState::Vacant, "a slot is vacated once");
        block.state = BlockState::Vacant;
        block.links[0] = self.first;
        self.first = slot;
        self.occupied -= 1;
    }
}

impl Slab {
    #[inline]
    pub(super) fn get(&self, slot: Slot) -> &Block {
        &self.blocks[slot.index() as usize]
    }

    #[inline]
    pub(super) fn get_mut(&mut self, slot: Slot) -> &mut Block {
        &mut self.blocks[slot.index() as usize]
    }

    /// Returns all blocks by slot. A hit uses this view throughout, because the compiler reloads address
    /// and length of the array after each store to a block otherwise.
    #[inline(always)]
    pub(super) fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// Returns the block at a slot that may be invalid.
    #[inline(always)]
    pub(super) fn try_get(&self, slot: Slot) -> Option<&Block> {
        self.blocks.get(slot.index() as usize).filter(|_| !slot.is_none())
    }

    /// Returns the slot with an index that may be invalid.
    #[inline(always)]
    pub(super) fn slot_at(&self, index: u32) -> Option<Slot> {
        ((index as usize) < self.blocks.len()).then(|| Slot::at(index))
    }

    /// Returns all blocks by slot, and the list of vacant ones.
    #[inline(always)]
    pub(super) fn parts(&mut self) -> (&mut [Block], &mut Vacant) {
        (&mut self.blocks, &mut self.vacant)
    }

    /// Returns a slot for a new block. Its generation and priority are kept; the caller sets all other
    /// fields.
    pub(super) fn occupy(&mut self) -> Slot {
        loop {
            if let Some(slot) = self.vacant.occupy(&self.blocks) {
                return slot;
            }
            self.grow();
        }
    }

    /// Vacates `slot` and returns a copy of its block.
    pub(super) fn vacate(&mut self, slot: Slot) -> Block {
        let (blocks, vacant) = self.parts();
        let removed = *block_at(blocks, slot);
        vacant.vacate(blocks, slot);
        removed
    }

    #[cold]
    #[inline(never)]
    fn grow(&mut self) {
        let start = self.blocks.len();
        let chunk = start.clamp(FIRST_BLOCKS, CHUNK_BLOCKS);
        if self.blocks.capacity() < start + chunk {
            let quarter = (start / 4).next_multiple_of(chunk).max(chunk);
            self.blocks.reserve_exact(match start + quarter {
                ..=STEPPED_BLOCKS => quarter,
                _ if start < AMPLE_BLOCKS => AMPLE_BLOCKS - start,
                _ => start,
            });
        }
        let first = u32::try_from(start).ok().filter(|first| *first < BLOCKS_MAX);
        let first = first.expect("a heap has fewer than 2^28 blocks");
        #[expect(clippy::cast_possible_truncation, reason = "at most 256")]
        let end = first + chunk as u32;
        for index in first..end {
            let is_last = index + 1 == end;
            let next = if is_last { Slot::NONE } else { Slot::at(index + 1) };
            let (links, priority) = ([next, Slot::NONE], priority_of(index));
            self.blocks.push(Block { links, priority, ..Block::VACANT });
        }
        self.blocks[Slot::NONE.index() as usize].key = u64::MAX;
        self.vacant.first = Slot::at(first.max(1));
    }

    pub(super) fn len(&self) -> usize {
        self.vacant.occupied
    }

    pub(super) fn occupied(&self) -> impl Iterator<Item = Slot> + '_ {
        let blocks = (0..).map(Slot::at).zip(&self.blocks);
        blocks.filter(|(_, block)| block.state != BlockState::Vacant).map(|(slot, _)| slot)
    }

    /// Returns the bytes of memory in use. Reserved capacity without blocks does not count.
    pub(super) fn bytes(&self) -> usize {
        self.blocks.len() * size_of::<Block>()
    }
}

/// Returns a fixed hash of the slot number: unique for each slot and unrelated to addresses.
fn priority_of(slot: u32) -> u32 {
    let mixed = (slot ^ slot >> 16).wrapping_mul(0x85EB_CA6B);
    (mixed ^ mixed >> 13).wrapping_mul(0xC2B2_AE35)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_found_as_they_were_left_while_the_array_grows() {
        let mut slab = Slab::default();
        let count = u32::try_from(AMPLE_BLOCKS + 3 * CHUNK_BLOCKS).unwrap();
        let (mut address, mut moved) = (std::ptr::null(), Vec::new());
        for n in 1..count {
            let slot = slab.occupy();
            let block = slab.get_mut(slot);
            (block.address, block.state) = (n.into(), BlockState::Live);
            assert_eq!(slot, Slot::at(n), "slots are taken in order");
            if slab.blocks.as_ptr() != address {
                address = slab.blocks.as_ptr();
                moved.push(n as usize);
            }
        }
        let few = |n: &usize| *n <= STEPPED_BLOCKS || *n == AMPLE_BLOCKS;
        assert!(moved.iter().all(few), "{moved:?}");
        assert_eq!(slab.len(), count as usize - 1);
        assert!((1..count).all(|n| slab.get(Slot::at(n)).address == u64::from(n)));
        assert!(slab.occupied().eq((1..count).map(Slot::at)));
        for invalid in
            [Slot::NONE, Slot::at(count), Slot::at(count + 1), Slot(1 << 31), Slot(u32::MAX)]
        {
            assert!(slab.try_get(invalid).is_none(), "{invalid:?}");
        }
        for n in [7, 9] {
            assert_eq!(slab.vacate(Slot::at(n)).address, u64::from(n));
        }
        assert_eq!([slab.occupy(), slab.occupy(), slab.occupy()], [9, 7, count].map(Slot::at));
    }

    #[test]
    fn a_slot_of_an_empty_slab_is_invalid() {
        let slab = Slab::default();
        assert!([0, 1, 255, 16_384].iter().all(|n| slab.try_get(Slot(*n)).is_none()));
    }
}
