//! All blocks of a heap, in slots that are reused, last vacated first.
//!
//! The first 262,144 blocks are one contiguous array, so that a lookup needs no table of chunks. The
//! array grows by a quarter while it is at most 256 KiB; growth moves the blocks. It then grows once
//! more, to its final capacity of 16 MiB of address space; the system backs only the part that is used.
//! Blocks beyond the array are in chunks that never move.

use super::block::{Block, BlockState, Slot};

const CHUNK_BLOCKS: usize = 256;
const CHUNK_SLOTS: u32 = 256;
const _: () = assert!(CHUNK_SLOTS as usize == CHUNK_BLOCKS);

/// The number of blocks in the contiguous array: 16 MiB, more than most programs have.
const NEAR_BLOCKS: usize = 262_144;
/// The array grows in steps up to this number (256 KiB), so that small heaps stay small.
const STEPPED_BLOCKS: usize = 4_096;
const _: () = assert!(NEAR_BLOCKS.is_multiple_of(CHUNK_BLOCKS) && STEPPED_BLOCKS < NEAR_BLOCKS);

type Chunk = Box<[Block; CHUNK_BLOCKS]>;

#[derive(Debug)]
pub(super) struct Slab {
    near: Vec<Block>,
    far: Vec<Chunk>,
    vacant: Slot,
    occupied: usize,
}

impl Default for Slab {
    fn default() -> Self {
        Self { near: Vec::new(), far: Vec::new(), vacant: Slot::NONE, occupied: 0 }
    }
}

impl Slab {
    #[inline]
    pub(super) fn get(&self, slot: Slot) -> &Block {
        match self.try_get(slot) {
            Some(block) => block,
            None => no_such_slot(),
        }
    }

    #[inline]
    pub(super) fn get_mut(&mut self, slot: Slot) -> &mut Block {
        at_mut(&mut self.near, &mut self.far, slot)
    }

    /// Returns the block at a slot that may be invalid.
    #[inline]
    pub(super) fn try_get(&self, slot: Slot) -> Option<&Block> {
        match self.near.get(slot.0 as usize) {
            Some(block) => Some(block),
            None => far(&self.far, slot),
        }
    }

    /// Returns a slot for a new block. Its generation and priority are kept; the caller sets all other
    /// fields.
    #[inline(always)]
    pub(super) fn occupy(&mut self) -> (Slot, &mut Block) {
        if self.vacant.is_none() {
            self.grow();
        }
        let slot = self.vacant;
        let block = at_mut(&mut self.near, &mut self.far, slot);
        self.vacant = block.links[0];
        self.occupied += 1;
        (slot, block)
    }

    /// Vacates `slot` and returns a copy of its block.
    #[inline]
    pub(super) fn vacate(&mut self, slot: Slot) -> Block {
        let vacant = self.vacant;
        let block = self.get_mut(slot);
        let removed = *block;
        debug_assert!(block.state != BlockState::Vacant, "a slot is vacated once");
        block.state = BlockState::Vacant;
        block.links[0] = vacant;
        self.vacant = slot;
        self.occupied -= 1;
        removed
    }

    #[cold]
    fn grow(&mut self) {
        let start = self.slots();
        let end = u32::try_from(start + CHUNK_BLOCKS).expect("a heap has fewer than 2^32 blocks");
        let mut chunk = [const { Block::VACANT }; CHUNK_BLOCKS];
        for (block, next) in chunk.iter_mut().zip(end - CHUNK_SLOTS + 1..) {
            block.priority = priority_of(next - 1);
            block.links[0] = if next == end { self.vacant } else { Slot(next) };
        }
        self.vacant = Slot(end - CHUNK_SLOTS);
        if start < NEAR_BLOCKS {
            if self.near.capacity() < start + CHUNK_BLOCKS {
                let quarter = (start / 4).next_multiple_of(CHUNK_BLOCKS).max(CHUNK_BLOCKS);
                let is_small = start + quarter <= STEPPED_BLOCKS;
                self.near.reserve_exact(if is_small { quarter } else { NEAR_BLOCKS - start });
            }
            self.near.extend_from_slice(&chunk);
        } else {
            self.far.push(Box::new(chunk));
        }
    }

    /// Returns the number of slots, including vacant ones.
    fn slots(&self) -> usize {
        self.near.len() + self.far.len() * CHUNK_BLOCKS
    }

    pub(super) fn len(&self) -> usize {
        self.occupied
    }

    pub(super) fn occupied(&self) -> impl Iterator<Item = Slot> + '_ {
        let blocks = self.near.iter().chain(self.far.iter().flat_map(|chunk| chunk.iter()));
        (0..)
            .map(Slot)
            .zip(blocks)
            .filter(|(_, block)| block.state != BlockState::Vacant)
            .map(|(slot, _)| slot)
    }

    /// Returns the bytes of memory in use. Reserved capacity without blocks does not count.
    pub(super) fn bytes(&self) -> usize {
        self.near.len() * size_of::<Block>()
            + self.far.len() * size_of::<[Block; CHUNK_BLOCKS]>()
            + self.far.capacity() * size_of::<Chunk>()
    }
}

/// Returns the chunk of a slot beyond the array, and the index within it.
#[inline]
fn chunk_of(slot: Slot) -> (usize, usize) {
    let behind = (slot.0 as usize).wrapping_sub(NEAR_BLOCKS);
    (behind / CHUNK_BLOCKS, behind % CHUNK_BLOCKS)
}

#[inline(always)]
fn far(chunks: &[Chunk], slot: Slot) -> Option<&Block> {
    let (chunk, at) = chunk_of(slot);
    Some(&chunks.get(chunk)?[at])
}

/// Returns the block at a slot. Borrows only the two tables, so that the caller may change other fields.
#[inline(always)]
fn at_mut<'s>(near: &'s mut [Block], chunks: &'s mut [Chunk], slot: Slot) -> &'s mut Block {
    if let Some(block) = near.get_mut(slot.0 as usize) {
        return block;
    }
    let (chunk, at) = chunk_of(slot);
    match chunks.get_mut(chunk) {
        Some(chunk) => &mut chunk[at],
        None => no_such_slot(),
    }
}

/// The panic of every lookup. It takes no arguments, to keep code out of the hit path.
#[cold]
#[inline(never)]
fn no_such_slot() -> ! {
    panic!("slots are named by their slab")
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
    fn blocks_near_and_far_are_found_as_they_were_left() {
        let mut slab = Slab::default();
        let count = u32::try_from(NEAR_BLOCKS + 3 * CHUNK_BLOCKS).unwrap();
        for n in 0..count {
            let (slot, block) = slab.occupy();
            block.address = n.into();
            block.state = BlockState::Live;
            assert_eq!(slot, Slot(n), "slots are taken in order");
        }
        assert_eq!((slab.len(), slab.slots()), (count as usize, count as usize));
        assert!((0..count).all(|n| slab.get(Slot(n)).address == u64::from(n)));
        assert!(slab.occupied().eq((0..count).map(Slot)));
        for beyond in [count, count + 1, 1 << 31, u32::MAX - 1] {
            assert!(slab.try_get(Slot(beyond)).is_none(), "{beyond}");
        }
        assert_eq!(slab.near.capacity(), NEAR_BLOCKS);
        // Vacates one slot on each side of the border; they are reused in reverse order.
        let border = u32::try_from(NEAR_BLOCKS).unwrap();
        for n in [border - 1, border] {
            assert_eq!(slab.vacate(Slot(n)).address, u64::from(n));
        }
        assert_eq!(slab.len(), count as usize - 2);
        assert_eq!([slab.occupy().0, slab.occupy().0], [Slot(border), Slot(border - 1)]);
        slab.get_mut(Slot(border)).address = 7;
        assert_eq!(slab.get(Slot(border)).address, 7);
        assert_eq!(slab.occupy().0, Slot(count));
    }

    #[test]
    fn blocks_move_while_there_are_few() {
        let mut slab = Slab::default();
        let (mut stood, mut moved) = (slab.near.as_ptr(), Vec::new());
        for count in 0..NEAR_BLOCKS {
            slab.occupy();
            if slab.near.as_ptr() != stood {
                (stood, _) = (slab.near.as_ptr(), moved.push(count));
            }
        }
        assert!(moved.iter().all(|count| *count <= STEPPED_BLOCKS), "{moved:?}");
        assert!(slab.far.is_empty());
    }

    #[test]
    fn a_slot_of_an_empty_slab_is_invalid() {
        let slab = Slab::default();
        assert!([0, 1, 255, 16_384].iter().all(|n| slab.try_get(Slot(*n)).is_none()));
    }
}
