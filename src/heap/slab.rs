//! All blocks of a heap, in chunks that never move.
//!
//! Growing adds one chunk; nothing is copied. Vacant slots are reused, last vacated first.

use super::block::{Block, BlockState, Slot};

const CHUNK_BLOCKS: usize = 256;
const CHUNK_SLOTS: u32 = 256;
const _: () = assert!(CHUNK_SLOTS as usize == CHUNK_BLOCKS);

type Chunk = Box<[Block; CHUNK_BLOCKS]>;

#[derive(Debug)]
pub(super) struct Slab {
    chunks: Vec<Chunk>,
    vacant: Slot,
    occupied: usize,
}

impl Default for Slab {
    fn default() -> Self {
        Self { chunks: Vec::new(), vacant: Slot::NONE, occupied: 0 }
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
        match self.chunks.get_mut(slot.0 as usize / CHUNK_BLOCKS) {
            Some(chunk) => &mut chunk[slot.0 as usize % CHUNK_BLOCKS],
            None => no_such_slot(),
        }
    }

    /// The block at a slot that a caller made up, perhaps.
    #[inline]
    pub(super) fn try_get(&self, slot: Slot) -> Option<&Block> {
        let chunk = self.chunks.get(slot.0 as usize / CHUNK_BLOCKS)?;
        Some(&chunk[slot.0 as usize % CHUNK_BLOCKS])
    }

    /// A slot for a new block. Its generation stays; everything else is the caller's to set.
    #[inline]
    pub(super) fn occupy(&mut self) -> (Slot, &mut Block) {
        if self.vacant.is_none() {
            self.grow();
        }
        let slot = self.vacant;
        let Some(chunk) = self.chunks.get_mut(slot.0 as usize / CHUNK_BLOCKS) else {
            no_such_slot()
        };
        let block = &mut chunk[slot.0 as usize % CHUNK_BLOCKS];
        self.vacant = block.links[0];
        self.occupied += 1;
        (slot, block)
    }

    /// Ends the block at `slot`. Says what it was.
    #[inline]
    pub(super) fn vacate(&mut self, slot: Slot) -> Block {
        let vacant = self.vacant;
        let block = self.get_mut(slot);
        let gone = *block;
        debug_assert!(block.state != BlockState::Vacant, "a slot is vacated once");
        block.state = BlockState::Vacant;
        block.links[0] = vacant;
        self.vacant = slot;
        self.occupied -= 1;
        gone
    }

    #[cold]
    fn grow(&mut self) {
        let start = self.chunks.len() * CHUNK_BLOCKS;
        let end = u32::try_from(start + CHUNK_BLOCKS).expect("a heap has fewer than 2^32 blocks");
        let mut chunk: Chunk = Box::new([const { Block::VACANT }; CHUNK_BLOCKS]);
        for (block, next) in chunk.iter_mut().zip(end - CHUNK_SLOTS + 1..) {
            block.priority = priority_of(next - 1);
            block.links[0] = if next == end { self.vacant } else { Slot(next) };
        }
        self.vacant = Slot(end - CHUNK_SLOTS);
        self.chunks.push(chunk);
    }

    pub(super) fn len(&self) -> usize {
        self.occupied
    }

    pub(super) fn occupied(&self) -> impl Iterator<Item = Slot> + '_ {
        let blocks = self.chunks.iter().flat_map(|chunk| chunk.iter());
        (0..)
            .map(Slot)
            .zip(blocks)
            .filter(|(_, block)| block.state != BlockState::Vacant)
            .map(|(slot, _)| slot)
    }

    pub(super) fn bytes(&self) -> usize {
        self.chunks.len() * size_of::<[Block; CHUNK_BLOCKS]>()
            + self.chunks.capacity() * size_of::<Chunk>()
    }
}

/// The panic of every look-up: one without arguments keeps them out of the way of hits.
#[cold]
#[inline(never)]
fn no_such_slot() -> ! {
    panic!("slots are named by their slab")
}

/// A fixed hash of the slot's number: equal only for equal slots, and unrelated to addresses.
fn priority_of(slot: u32) -> u32 {
    let mixed = (slot ^ slot >> 16).wrapping_mul(0x85EB_CA6B);
    (mixed ^ mixed >> 13).wrapping_mul(0xC2B2_AE35)
}
