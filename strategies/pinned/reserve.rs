//! The reserved segment (`pinned_reserve_segment_size_mb`): one allocation of the driver, made when the
//! allocator is built, from which requests are served before the driver is called.
//!
//! Its bytes are allocated in address order. A part that is freed stays a block of its size. When the
//! cache is emptied or memory runs out and all parts are free, the whole segment is unused again. It is
//! released when the allocator is dropped.

use super::blocks::Origin;
use crate::history::{BlockLayout, BlockStateName, SegmentLayout};
use crate::ids::{PoolId, StreamId};

#[derive(Debug)]
pub(super) struct Reserve {
    pub(super) address: u64,
    pub(super) bytes: u64,
    pub(super) origin: Origin,
    /// The addresses of the blocks that were taken from the segment, in ascending order. They cover it from
    /// its start to `used_bytes`.
    pub(super) parts: Vec<u64>,
    used_bytes: u64,
}

impl Reserve {
    pub(super) const fn new(address: u64, bytes: u64, origin: Origin) -> Self {
        Self { address, bytes, origin, parts: Vec::new(), used_bytes: 0 }
    }

    /// Takes `bytes` of the unused end of the segment and returns their address, if there is room.
    pub(super) fn take(&mut self, bytes: u64) -> Option<u64> {
        let used_bytes = if self.parts.is_empty() { 0 } else { self.used_bytes };
        if bytes > self.bytes - used_bytes {
            return None;
        }
        let address = self.address + used_bytes;
        self.used_bytes = used_bytes + bytes;
        self.parts.push(address);
        Some(address)
    }

    /// Returns the segment, given its parts. Its unused end is a free block.
    pub(super) fn layout(&self, mut parts: Vec<BlockLayout>) -> SegmentLayout {
        let used_bytes: u64 = parts.iter().map(|part| part.size_bytes).sum();
        let whole = BlockLayout {
            address: self.address,
            size_bytes: self.bytes,
            requested_bytes: 0,
            state: BlockStateName::Inactive,
        };
        if used_bytes < self.bytes {
            let (address, size_bytes) = (self.address + used_bytes, self.bytes - used_bytes);
            parts.push(BlockLayout { address, size_bytes, ..whole });
        }
        let segment = SegmentLayout::of_block(whole, StreamId::DEFAULT, PoolId::DEFAULT);
        SegmentLayout { blocks: parts, ..segment }
    }
}
