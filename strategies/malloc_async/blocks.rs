//! The table of live blocks.
//!
//! One lock protects it; no driver call is made under that lock. A block is removed before the driver
//! frees it, because the driver may give its address to another thread at once. If the driver fails, the
//! block is put back.
//!
//! Blocks are always looked up by address, even if the caller passes a handle. After a graph is
//! destroyed, the driver may allocate the graph's memory again while the old block is still in the table.
//! Only the address reveals that. Data that few blocks have (uses and captures) is boxed.

use std::collections::{BTreeSet, VecDeque};

use super::Route;
use super::counters::BlockCounters;
use crate::error::HandleError;
use crate::ids::{PoolId, StreamId};
use crate::live_blocks::{BlockName, Live, LiveBlocks};

/// A use of a block by a stream other than the block's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Use {
    pub(super) stream: StreamId,
    /// The capture in which the use was recorded, if any. Such a use ends when its capture ends.
    pub(super) capture: Option<u64>,
}

#[derive(Debug)]
pub(super) struct Block {
    pub(super) bytes: u64,
    pub(super) stream: StreamId,
    pub(super) pool: PoolId,
    rare: Option<Box<Rare>>,
}

/// Data that most blocks do not have.
#[derive(Debug, Default)]
struct Rare {
    capture: Option<u64>,
    uses: Vec<Use>,
}

impl Block {
    #[inline]
    pub(super) fn new(bytes: u64, stream: StreamId, route: &Route) -> Self {
        let rare = route.capture.map(|id| Box::new(Rare { capture: Some(id), uses: Vec::new() }));
        Self { bytes, stream, pool: route.pool, rare }
    }

    /// Returns true if no other stream uses the block and it was not allocated in a capture.
    #[inline]
    pub(super) fn is_plain(&self) -> bool {
        self.rare.is_none()
    }

    /// Returns the capture in which the block was allocated, if any.
    pub(super) fn capture(&self) -> Option<u64> {
        self.rare.as_ref().and_then(|rare| rare.capture)
    }

    pub(super) fn uses(&self) -> &[Use] {
        self.rare.as_ref().map_or(&[], |rare| &rare.uses)
    }

    /// Records a use, unless it is recorded already.
    pub(super) fn add_use(&mut self, by: Use) {
        let uses = &mut self.rare.get_or_insert_default().uses;
        if !uses.contains(&by) {
            uses.push(by);
        }
    }

    /// Returns the block's own stream, then those of its uses.
    pub(super) fn streams(&self) -> impl Iterator<Item = StreamId> {
        std::iter::once(self.stream).chain(self.uses().iter().map(|by| by.stream))
    }
}

/// Live blocks by address, blocks that wait for the end of a capture, and the counters of both.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    live: LiveBlocks<Block>,
    /// Blocks that their callers have freed and that wait for a capture to end. The front block is the
    /// next one to be checked.
    pub(super) deferred: VecDeque<Live<Block>>,
    /// Streams on which blocks were freed.
    pub(super) freed_on: BTreeSet<StreamId>,
    pub(super) counters: BlockCounters,
}

impl Blocks {
    /// Adds a new block. Returns its serial number, which is unique, and the block that it replaces.
    ///
    /// The address may belong to a live block already: a block of a destroyed graph, whose memory the
    /// driver has allocated again. That block is removed, and its handle becomes stale.
    #[inline]
    pub(super) fn enter(&mut self, address: u64, block: Block) -> (u64, Option<Live<Block>>) {
        self.counters.enter(block.bytes);
        let (serial, replaced) = self.live.enter(address, block);
        self.count_replaced(replaced.as_ref());
        (serial, replaced)
    }

    fn count_replaced(&mut self, replaced: Option<&Live<Block>>) {
        if let Some(replaced) = replaced {
            self.counters.leave(replaced.bytes);
        }
    }

    /// Returns true if the driver has given the address of a block that has left to a newer block.
    pub(super) fn is_reused(&self, block: &Live<Block>) -> bool {
        let newer = |own: &Live<Block>| own.address == block.address && own.serial > block.serial;
        self.live.get(block.address).is_some_and(newer) || self.deferred.iter().any(newer)
    }

    /// Returns the live block with this name.
    pub(super) fn find(&mut self, name: BlockName) -> Result<&mut Block, HandleError> {
        self.live.find_mut(name)
    }

    /// Removes a block that its caller frees.
    #[inline]
    pub(super) fn leave(&mut self, name: BlockName) -> Result<Live<Block>, HandleError> {
        let left = self.live.take(name)?;
        self.counters.leave(left.bytes);
        self.freed_on.insert(left.stream);
        Ok(left)
    }

    /// Undoes [`leave`](Self::leave) after the driver failed to free the block. Returns the block that
    /// was allocated at the same address since, which leaves the table.
    pub(super) fn undo_leave(&mut self, block: Live<Block>) -> Option<Live<Block>> {
        self.counters.undo_leave(block.bytes);
        let replaced = self.live.put_back(block);
        self.count_replaced(replaced.as_ref());
        replaced
    }

    /// Keeps a removed block in `deferred` until a capture has ended.
    pub(super) fn defer(&mut self, block: Live<Block>) {
        self.counters.begin_to_wait(block.bytes);
        self.deferred.push_back(block);
    }

    /// Returns true if no block was ever added.
    pub(super) fn is_unused(&self) -> bool {
        self.live.is_unused()
    }

    /// Removes and returns all blocks, when the allocator is dropped.
    pub(super) fn take_all(&mut self) -> Vec<Live<Block>> {
        self.live.drain().chain(self.deferred.drain(..)).collect()
    }

    /// Returns the live blocks of one pool, or of all.
    pub(super) fn of(&self, pool: Option<PoolId>) -> impl Iterator<Item = &Live<Block>> {
        self.live.iter().filter(move |live| pool.is_none_or(|pool| live.value.pool == pool))
    }

    /// Returns true if a block of the pool is live or deferred.
    pub(super) fn any_of(&self, pool: PoolId) -> bool {
        self.of(Some(pool)).next().is_some()
            || self.deferred.iter().any(|block| block.value.pool == pool)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::DriverPoolId;

    const AT: BlockName = BlockName::at(0x100);

    fn block(bytes: u64) -> Block {
        let route = Route { pool: PoolId::DEFAULT, driver_pool: DriverPoolId(0), capture: None };
        Block::new(bytes, StreamId(1), &route)
    }

    #[test]
    fn a_free_that_the_driver_refused_leaves_the_counters_as_they_were() {
        let mut blocks = Blocks::default();
        blocks.enter(0x100, block(5));
        let before = format!("{:?}", blocks.counters);
        let left = blocks.leave(AT).unwrap();
        assert!(blocks.undo_leave(left).is_none());
        assert_eq!(format!("{:?}", blocks.counters), before);
        assert!(blocks.find(BlockName { serial: Some(1), ..AT }).is_ok());
    }

    #[test]
    fn peaks_are_never_below_what_a_refused_free_restores() {
        let mut blocks = Blocks::default();
        blocks.enter(0x100, block(5));
        let left = blocks.leave(AT).unwrap();
        blocks.enter(0x200, block(5));
        blocks.undo_leave(left);
        let ([_, bytes], [active, _]) = (blocks.counters.allocated, blocks.counters.active);
        assert_eq!((bytes.current, bytes.peak), (10, 10));
        assert_eq!((active.current, active.peak), (2, 2));
    }

    #[test]
    fn a_block_whose_address_is_reused_has_left() {
        let mut blocks = Blocks::default();
        let (first, _) = blocks.enter(0x100, block(5));
        let (_, replaced) = blocks.enter(0x100, block(6));
        assert_eq!(replaced.map(|live| live.bytes), Some(5));
        assert!(blocks.find(BlockName { serial: Some(first), ..AT }).is_err());
        assert_eq!(blocks.counters.allocated[0].current, 1);
        assert_eq!(blocks.counters.active[1].current, 6);
    }

    #[test]
    fn a_deferred_block_is_active_until_the_driver_has_it() {
        let mut blocks = Blocks::default();
        blocks.enter(0x100, block(5));
        let left = blocks.leave(AT).unwrap();
        blocks.defer(left);
        assert_eq!((blocks.counters.live_bytes(), blocks.counters.waiting_bytes()), (0, 5));
        assert_eq!(std::mem::take(&mut blocks.deferred).len(), 1);
        blocks.counters.end_to_wait(5);
        assert_eq!(blocks.counters.waiting_bytes(), 0);
        let active = blocks.counters.active[1];
        assert_eq!((active.allocated, active.freed), (5, 5));
    }
}
