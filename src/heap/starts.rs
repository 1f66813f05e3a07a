//! Live blocks by address: a hash table that grows by one bucket at a time.
//!
//! Linear hashing, with chains threaded through the blocks: an insertion never moves more than one
//! bucket and never copies the table. The table never shrinks. It exists only for callers that free by
//! address.
//!
//! Source of the scheme: W. Litwin, "Linear Hashing", VLDB 1980.

use super::at::{block_at, block_at_mut};
use super::block::{Block, Slot};

const CHUNK_BUCKETS: usize = 1024;

#[derive(Debug, Default)]
pub(super) struct Starts {
    /// The heads of the chains, in chunks that never move.
    chunks: Vec<Box<[Slot; CHUNK_BUCKETS]>>,
    buckets: usize,
    /// The least power of two that is not below `buckets`, minus one.
    mask: usize,
    entries: usize,
}

impl Starts {
    #[inline]
    pub(super) fn find(&self, blocks: &[Block], address: u64) -> Option<Slot> {
        let bucket = self.bucket_of(address);
        // Without buckets there is no chunk either.
        let mut at = self.chunks.get(bucket / CHUNK_BUCKETS)?[bucket % CHUNK_BUCKETS];
        while !at.is_none() {
            let block = block_at(blocks, at);
            if block.address == address {
                return Some(at);
            }
            at = block.over;
        }
        None
    }

    #[inline]
    pub(super) fn insert(&mut self, blocks: &mut [Block], slot: Slot, address: u64) {
        // Twice as many buckets as blocks keep most chains at length one.
        while self.buckets <= 2 * self.entries {
            self.split_one(blocks);
        }
        self.entries += 1;
        self.push(blocks, self.bucket_of(address), slot);
    }

    /// Removes the block at `slot`, which starts at `address`; `next` is the block behind it in its chain.
    #[inline]
    pub(super) fn remove(&mut self, blocks: &mut [Block], slot: Slot, address: u64, next: Slot) {
        self.entries -= 1;
        let bucket = self.bucket_of(address);
        let head = self.head_mut(bucket);
        if *head == slot {
            *head = next;
        } else {
            let first = *head;
            remove_behind(blocks, first, slot, next);
        }
    }

    /// Adds a bucket and moves to it the blocks that now belong there. All come from a single bucket.
    #[cold]
    fn split_one(&mut self, blocks: &mut [Block]) {
        let new = self.buckets;
        if new / CHUNK_BUCKETS == self.chunks.len() {
            self.chunks.push(Box::new([Slot::NONE; CHUNK_BUCKETS]));
        }
        self.buckets += 1;
        self.mask = self.buckets.next_power_of_two() - 1;
        if new == 0 {
            return;
        }
        let from = new - (1 << new.ilog2());
        let mut at = std::mem::replace(self.head_mut(from), Slot::NONE);
        while !at.is_none() {
            let next = block_at(blocks, at).over;
            self.push(blocks, self.bucket_of(block_at(blocks, at).address), at);
            at = next;
        }
    }

    #[inline]
    fn push(&mut self, blocks: &mut [Block], bucket: usize, slot: Slot) {
        let head = self.head_mut(bucket);
        block_at_mut(blocks, slot).over = *head;
        *head = slot;
    }

    #[inline]
    fn bucket_of(&self, address: u64) -> usize {
        let hash = (address >> 9).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
        let hash = hash as usize;
        let bucket = hash & self.mask;
        // Between two powers of two a branch here would be unpredictable.
        bucket & self.mask >> u32::from(bucket >= self.buckets)
    }

    #[inline]
    fn head_mut(&mut self, bucket: usize) -> &mut Slot {
        &mut self.chunks[bucket / CHUNK_BUCKETS][bucket % CHUNK_BUCKETS]
    }

    pub(super) fn len(&self) -> usize {
        self.entries
    }

    pub(super) fn bytes(&self) -> usize {
        self.chunks.len() * size_of::<[Slot; CHUNK_BUCKETS]>()
    }
}

/// Removes `slot` from the chain that starts with another block, `first`; `rest` is the block behind it.
#[inline(never)]
fn remove_behind(blocks: &mut [Block], first: Slot, slot: Slot, rest: Slot) {
    let mut at = first;
    while block_at(blocks, at).over != slot {
        at = block_at(blocks, at).over;
    }
    block_at_mut(blocks, at).over = rest;
}
