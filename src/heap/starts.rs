//! Live blocks by address: a hash table that grows by one bucket at a time.
//!
//! Linear hashing, with chains threaded through the blocks: a new bucket takes blocks from one other bucket
//! only, so that no insertion rehashes the whole table. The table never shrinks. It is kept only for callers
//! that free by address.
//!
//! Source of the scheme: W. Litwin, "Linear Hashing", VLDB 1980.

use super::at::{block_at, block_at_mut};
use super::block::{Block, Slot};

#[derive(Debug)]
pub(super) struct Starts {
    /// False for callers that never free by address. Then the table stays empty.
    pub(super) is_kept: bool,
    /// The first block of each bucket's chain.
    heads: Vec<Slot>,
    /// The least power of two that is not below the number of buckets, minus one.
    mask: usize,
}

impl Starts {
    pub(super) fn new(is_kept: bool) -> Self {
        Self { is_kept, heads: Vec::new(), mask: 0 }
    }

    #[inline(always)]
    pub(super) fn find(&self, blocks: &[Block], address: u64) -> Option<Slot> {
        // Without buckets there is no head either.
        let mut at = *self.heads.get(self.bucket_of(address))?;
        while !at.is_none() {
            let block = block_at(blocks, at);
            if block.address == address {
                return Some(at);
            }
            at = block.over;
        }
        None
    }

    #[inline(always)]
    pub(super) fn insert(&mut self, blocks: &mut [Block], slot: Slot, address: u64) {
        if !self.is_kept {
            return;
        }
        if !self.has_buckets_for(slot) {
            self.grow(blocks, slot);
        }
        self.push(blocks, self.bucket_of(address), slot);
    }

    /// Removes the block at `slot`.
    #[inline(always)]
    pub(super) fn remove(&mut self, blocks: &mut [Block], slot: Slot) {
        if !self.is_kept {
            return;
        }
        let Block { address, over: next, .. } = *block_at(blocks, slot);
        let bucket = self.bucket_of(address);
        let head = &mut self.heads[bucket];
        if *head == slot {
            *head = next;
        } else {
            let first = *head;
            remove_behind(blocks, first, slot, next);
        }
    }

    /// Returns true if there are at least two buckets for each slot up to this one. That keeps most chains at
    /// length one.
    #[inline(always)]
    fn has_buckets_for(&self, slot: Slot) -> bool {
        self.heads.len() * (Slot::STEP as usize / 2) > slot.0 as usize
    }

    /// Adds buckets for all slots up to `last`. Moves to each the blocks that now belong there, which all
    /// come from a single bucket.
    #[cold]
    #[inline(never)]
    fn grow(&mut self, blocks: &mut [Block], last: Slot) {
        while !self.has_buckets_for(last) {
            let new = self.heads.len();
            self.heads.push(Slot::NONE);
            self.mask = self.heads.len().next_power_of_two() - 1;
            if new == 0 {
                continue;
            }
            let from = new - (1 << new.ilog2());
            let mut at = std::mem::replace(&mut self.heads[from], Slot::NONE);
            while !at.is_none() {
                let Block { address, over, .. } = *block_at(blocks, at);
                self.push(blocks, self.bucket_of(address), at);
                at = over;
            }
        }
    }

    #[inline(always)]
    fn push(&mut self, blocks: &mut [Block], bucket: usize, slot: Slot) {
        let head = &mut self.heads[bucket];
        block_at_mut(blocks, slot).over = *head;
        *head = slot;
    }

    #[inline(always)]
    fn bucket_of(&self, address: u64) -> usize {
        // The high bits of the product depend on most bits of the address. A heap has fewer than 2^28 blocks.
        let hash = (address.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 36) as usize;
        let bucket = hash & self.mask;
        // Between two powers of two a branch here would be unpredictable.
        bucket & self.mask >> u32::from(bucket >= self.heads.len())
    }

    /// Returns the number of blocks. Visits all. For checks.
    pub(super) fn count(&self, blocks: &[Block]) -> usize {
        let next = |slot: &Slot| Some(block_at(blocks, *slot).over).filter(|next| !next.is_none());
        let first = self.heads.iter().filter(|head| !head.is_none());
        first.map(|head| std::iter::successors(Some(*head), next).count()).sum()
    }

    pub(super) fn bytes(&self) -> usize {
        self.heads.len() * size_of::<Slot>()
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
