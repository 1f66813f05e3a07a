//! The address ranges of paused tags while the events of a recording are applied, and the live blocks in
//! them.

use std::collections::BTreeMap;

use super::Block;

/// The ranges that pauses have unmapped and no resume has mapped since.
#[derive(Debug, Default)]
pub(crate) struct Paused {
    /// Sizes by address. Ranges do not overlap.
    ranges: BTreeMap<u64, u64>,
    blocks: BTreeMap<u64, Block>,
    bytes: u64,
}

impl Paused {
    /// Returns the bytes of all ranges.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Adds a range.
    pub(crate) fn add(&mut self, address: u64, size_bytes: u64) {
        self.cut(address, size_bytes);
        if size_bytes > 0 {
            self.ranges.insert(address, size_bytes);
            self.bytes = self.bytes.saturating_add(size_bytes);
        }
    }

    /// Adds a live block of a range.
    pub(crate) fn add_block(&mut self, block: Block) {
        self.blocks.insert(block.address, block);
    }

    /// Removes a block that was freed.
    pub(crate) fn remove_block(&mut self, address: u64) {
        self.blocks.remove(&address);
    }

    /// Removes a range. Returns the blocks in it, in address order.
    pub(crate) fn remove(&mut self, address: u64, size_bytes: u64) -> Vec<Block> {
        self.cut(address, size_bytes);
        let end = address.saturating_add(size_bytes);
        let inside: Vec<_> = self.blocks.range(address..end).map(|(at, _)| *at).collect();
        inside.into_iter().filter_map(|at| self.blocks.remove(&at)).collect()
    }

    /// Removes these addresses from the ranges.
    fn cut(&mut self, address: u64, size_bytes: u64) {
        let end = address.saturating_add(size_bytes);
        while let Some((&start, &size)) = self.ranges.range(..end).next_back() {
            let range_end = start.saturating_add(size);
            if range_end <= address {
                return;
            }
            self.ranges.remove(&start);
            self.bytes = self.bytes.saturating_sub(size);
            for (from, to) in [(start, address), (end, range_end)] {
                if from < to {
                    self.ranges.insert(from, to - from);
                    self.bytes = self.bytes.saturating_add(to - from);
                }
            }
        }
    }
}
