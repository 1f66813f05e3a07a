//! When blocks became free, by the collector's clock.
//!
//! Apart from the blocks, because few programs have a collector: a heap keeps births from the moment on at
//! which the clock runs. It stood at 0 before.

use super::block::Slot;

const CHUNK_SLOTS: usize = 512;

#[derive(Debug, Default)]
pub(super) struct Births {
    /// By slot, in chunks that never move. A slot beyond them was never noted.
    chunks: Vec<Box<[u64; CHUNK_SLOTS]>>,
}

impl Births {
    /// Notes that the block at `slot` became free at `clock`.
    pub(super) fn note(&mut self, slot: Slot, clock: u64) {
        let (chunk, at) = place_of(slot);
        while self.chunks.len() <= chunk {
            self.chunks.push(Box::new([0; CHUNK_SLOTS]));
        }
        self.chunks[chunk][at] = clock;
    }

    /// Returns when the free block at `slot` became free.
    pub(super) fn of(&self, slot: Slot) -> u64 {
        let (chunk, at) = place_of(slot);
        self.chunks.get(chunk).map_or(0, |chunk| chunk[at])
    }

    pub(super) fn bytes(&self) -> usize {
        self.chunks.len() * size_of::<[u64; CHUNK_SLOTS]>()
            + self.chunks.capacity() * size_of::<Box<[u64; CHUNK_SLOTS]>>()
    }
}

fn place_of(slot: Slot) -> (usize, usize) {
    (slot.0 as usize / CHUNK_SLOTS, slot.0 as usize % CHUNK_SLOTS)
}
