//! The time at which each block became free, by the garbage collector's clock.
//!
//! Kept apart from the blocks, because few programs set `garbage_collection_threshold`. A heap records
//! these times from the moment the collector is enabled; the clock is 0 until then.

use super::block::Slot;

const CHUNK_SLOTS: usize = 512;

#[derive(Debug, Default)]
pub(super) struct Births {
    /// Indexed by slot, in chunks that never move. Slots beyond the last chunk have no recorded time.
    chunks: Vec<Box<[u64; CHUNK_SLOTS]>>,
}

impl Births {
    /// Records that the block at `slot` became free at `clock`.
    pub(super) fn note(&mut self, slot: Slot, clock: u64) {
        let (chunk, at) = chunk_of(slot);
        while self.chunks.len() <= chunk {
            self.chunks.push(Box::new([0; CHUNK_SLOTS]));
        }
        self.chunks[chunk][at] = clock;
    }

    /// Returns the time at which the free block at `slot` became free.
    pub(super) fn of(&self, slot: Slot) -> u64 {
        let (chunk, at) = chunk_of(slot);
        self.chunks.get(chunk).map_or(0, |chunk| chunk[at])
    }

    pub(super) fn bytes(&self) -> usize {
        self.chunks.len() * size_of::<[u64; CHUNK_SLOTS]>()
            + self.chunks.capacity() * size_of::<Box<[u64; CHUNK_SLOTS]>>()
    }
}

fn chunk_of(slot: Slot) -> (usize, usize) {
    let index = slot.index() as usize;
    (index / CHUNK_SLOTS, index % CHUNK_SLOTS)
}
