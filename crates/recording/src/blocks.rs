//! The live blocks of a replay.

use hashbrown::HashMap;

use super::workload::Workload;
use stratalloc::allocator::Allocation;

/// The live blocks of a replay, by their numbers in the workload.
pub trait Blocks {
    /// Returns a block, if it is live.
    fn get(&self, id: u32) -> Option<&Allocation>;

    /// Adds a block.
    fn put(&mut self, id: u32, block: Allocation);

    /// Removes a block.
    fn take(&mut self, id: u32) -> Option<Allocation>;

    /// Removes any block, the one with the least number first where that takes no search.
    fn take_any(&mut self) -> Option<Allocation>;
}

/// The most blocks of a workload for which a replay of one pass has a place for each. Of longer workloads
/// only the live blocks are kept, in a table that is slower.
pub(crate) const DENSE_MAX: u32 = 1 << 20;

/// A place for each block, live or not.
pub(crate) struct EveryBlock {
    blocks: Vec<Option<Allocation>>,
    /// No block before this place is live when blocks are taken at the end of a pass.
    taken: usize,
}

/// The live blocks only.
pub(crate) type LiveBlocks = HashMap<u32, Allocation>;

impl EveryBlock {
    pub(crate) fn of(workload: &Workload) -> Self {
        Self { blocks: (0..workload.blocks).map(|_| None).collect(), taken: 0 }
    }
}

impl Blocks for EveryBlock {
    fn get(&self, id: u32) -> Option<&Allocation> {
        self.blocks.get(id as usize)?.as_ref()
    }

    #[inline]
    fn put(&mut self, id: u32, block: Allocation) {
        self.blocks[id as usize] = Some(block);
    }

    #[inline]
    fn take(&mut self, id: u32) -> Option<Allocation> {
        self.blocks[id as usize].take()
    }

    fn take_any(&mut self) -> Option<Allocation> {
        let rest = self.blocks.get_mut(self.taken..)?;
        let Some(at) = rest.iter().position(Option::is_some) else {
            self.taken = 0;
            return None;
        };
        self.taken += at;
        rest[at].take()
    }
}

impl Blocks for LiveBlocks {
    fn get(&self, id: u32) -> Option<&Allocation> {
        self.get(&id)
    }

    fn put(&mut self, id: u32, block: Allocation) {
        self.insert(id, block);
    }

    fn take(&mut self, id: u32) -> Option<Allocation> {
        self.remove(&id)
    }

    fn take_any(&mut self) -> Option<Allocation> {
        let id = *self.keys().next()?;
        self.remove(&id)
    }
}
