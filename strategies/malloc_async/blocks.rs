//! The account of live blocks.
//!
//! One small lock guards it; no driver call is made under that lock. A block leaves the account
//! before the driver is told of its free, because the driver may give its address to another thread
//! at once; if the driver refuses, the block comes back. All blocks are found by address, also those
//! with a handle: memory of a graph that is gone may be given out again while the old block is held,
//! and only its address tells. What few blocks have, uses and captures, lies outside the table.

use std::collections::VecDeque;

use hashbrown::HashSet;

use super::Route;
use super::sums::Sums;
use crate::error::HandleError;
use crate::ids::{PoolId, StreamId};
use crate::live_blocks::{BlockName, Live, LiveBlocks};

/// A stream, other than its own, that uses a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Use {
    pub(super) stream: StreamId,
    /// The capture inside which it was announced: such a use ends with the capture.
    pub(super) capture: Option<u64>,
}

/// A block in a caller's hands.
#[derive(Debug)]
pub(super) struct Block {
    pub(super) bytes: u64,
    pub(super) stream: StreamId,
    pub(super) pool: PoolId,
    rare: Option<Box<Rare>>,
}

/// What most blocks do not have.
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

    /// Whether no other stream uses it and no capture asked for it.
    #[inline]
    pub(super) fn is_plain(&self) -> bool {
        self.rare.is_none()
    }

    /// The capture that asked for it.
    pub(super) fn capture(&self) -> Option<u64> {
        self.rare.as_ref().and_then(|rare| rare.capture)
    }

    /// Other streams that use it.
    pub(super) fn uses(&self) -> &[Use] {
        self.rare.as_ref().map_or(&[], |rare| &rare.uses)
    }

    /// Notes a use, once.
    pub(super) fn add_use(&mut self, by: Use) {
        let uses = &mut self.rare.get_or_insert_default().uses;
        if !uses.contains(&by) {
            uses.push(by);
        }
    }

    /// All streams that the block's free comes after, its own first.
    pub(super) fn streams(&self) -> impl Iterator<Item = StreamId> {
        std::iter::once(self.stream).chain(self.uses().iter().map(|by| by.stream))
    }
}

/// Live blocks by address, those that wait for the end of a capture, and the sums.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    live: LiveBlocks<Block>,
    /// Freed by their holders, and waiting for the ends of captures; the one that was not looked at for the
    /// longest time first.
    pub(super) deferred: VecDeque<Live<Block>>,
    /// Bytes of requests under a limit that no block has yet, and of frees that may yet turn out to wait.
    pub(super) reserved_bytes: u64,
    /// Streams on which blocks were freed, and the last of them.
    freed_on: HashSet<StreamId>,
    last_freed_on: Option<StreamId>,
    pub(super) sums: Sums,
}

impl Blocks {
    /// Enters a new block and returns its serial number, which no other block ever has.
    ///
    /// A live block may have the address already: one of a graph that is gone, whose memory the driver
    /// gives out again. It leaves, and its holder's handle is stale.
    #[inline]
    pub(super) fn enter(&mut self, address: u64, block: Block) -> u64 {
        self.sums.hand_out(block.bytes);
        let (serial, gone) = self.live.enter(address, block);
        if let Some(gone) = gone {
            self.sums.leave(gone.kept.bytes);
        }
        serial
    }

    /// Keeps bytes for a request that the driver will be asked for, if the limit has room for them.
    pub(super) fn reserve(&mut self, bytes: u64, limit_bytes: u64) -> bool {
        let fits = bytes <= limit_bytes.saturating_sub(self.charged_bytes());
        self.reserved_bytes += if fits { bytes } else { 0 };
        fits
    }

    /// What counts against a limit: blocks that the driver was not told to free, and requests and frees under
    /// way.
    pub(super) fn charged_bytes(&self) -> u64 {
        self.sums.live_bytes() + self.sums.waiting_bytes() + self.reserved_bytes
    }

    /// Whether a live block starts there.
    pub(super) fn is_live(&self, address: u64) -> bool {
        self.live.contains(address)
    }

    /// The live block of this name.
    pub(super) fn find(&mut self, name: BlockName) -> Result<&mut Block, HandleError> {
        self.live.find_mut(name)
    }

    /// Takes a block out of its holder's hands.
    #[inline]
    pub(super) fn leave(&mut self, name: BlockName) -> Result<Live<Block>, HandleError> {
        let left = self.live.take(name)?;
        self.sums.leave(left.kept.bytes);
        if self.last_freed_on != Some(left.kept.stream) {
            self.last_freed_on = Some(left.kept.stream);
            self.freed_on.insert(left.kept.stream);
        }
        Ok(left)
    }

    /// All streams on which blocks were freed, ascending.
    pub(super) fn freed_on(&self) -> Vec<StreamId> {
        let mut streams: Vec<_> = self.freed_on.iter().copied().collect();
        streams.sort_unstable();
        streams
    }

    /// A stream is gone, and its work was waited for.
    pub(super) fn forget_stream(&mut self, stream: StreamId) {
        self.freed_on.remove(&stream);
        self.last_freed_on = None;
    }

    /// Undoes [`leave`](Self::leave): the driver refused the free.
    pub(super) fn come_back(&mut self, block: Live<Block>) {
        self.sums.come_back(block.kept.bytes);
        if let Some(gone) = self.live.put_back(block) {
            self.sums.leave(gone.kept.bytes);
        }
    }

    /// Keeps a block that has left until a capture has ended.
    pub(super) fn defer(&mut self, block: Live<Block>) {
        self.sums.begin_to_wait(block.kept.bytes);
        self.deferred.push_back(block);
    }

    /// Whether none was ever entered.
    pub(super) fn is_unused(&self) -> bool {
        self.live.is_unused()
    }

    /// Everything, when the allocator goes.
    pub(super) fn take_all(&mut self) -> Vec<Live<Block>> {
        self.live.drain().chain(self.deferred.drain(..)).collect()
    }

    /// Live blocks of one pool, or of all.
    pub(super) fn of(&self, pool: Option<PoolId>) -> impl Iterator<Item = &Live<Block>> {
        self.live.iter().filter(move |live| pool.is_none_or(|pool| live.kept.pool == pool))
    }

    /// Whether any block of the pool is live or deferred.
    pub(super) fn any_of(&self, pool: PoolId) -> bool {
        self.of(Some(pool)).next().is_some()
            || self.deferred.iter().any(|block| block.kept.pool == pool)
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
    fn a_free_that_the_driver_refused_leaves_the_sums_as_they_were() {
        let mut blocks = Blocks::default();
        blocks.enter(0x100, block(5));
        let before = format!("{:?}", blocks.sums);
        let left = blocks.leave(AT).unwrap();
        blocks.come_back(left);
        assert_eq!(format!("{:?}", blocks.sums), before);
        assert!(blocks.find(BlockName { serial: Some(1), ..AT }).is_ok());
    }

    #[test]
    fn peaks_are_never_below_what_a_refused_free_brings_back() {
        let mut blocks = Blocks::default();
        blocks.enter(0x100, block(5));
        let left = blocks.leave(AT).unwrap();
        blocks.enter(0x200, block(5));
        blocks.come_back(left);
        let ([_, bytes], [active, _]) = (blocks.sums.allocated(), blocks.sums.with_waiting());
        assert_eq!((bytes.current, bytes.peak), (10, 10));
        assert_eq!((active.current, active.peak), (2, 2));
    }

    #[test]
    fn a_block_whose_address_comes_back_has_left() {
        let mut blocks = Blocks::default();
        let gone = blocks.enter(0x100, block(5));
        blocks.enter(0x100, block(6));
        assert!(blocks.find(BlockName { serial: Some(gone), ..AT }).is_err());
        assert_eq!(blocks.sums.allocated()[0].current, 1);
        assert_eq!((blocks.sums.with_waiting()[1].current, blocks.charged_bytes()), (6, 6));
    }

    #[test]
    fn a_deferred_block_is_active_until_the_driver_has_it() {
        let mut blocks = Blocks::default();
        blocks.enter(0x100, block(5));
        let left = blocks.leave(AT).unwrap();
        blocks.defer(left);
        let bytes = |blocks: &Blocks| (blocks.sums.live_bytes(), blocks.charged_bytes());
        assert_eq!(bytes(&blocks), (0, 5));
        assert_eq!(std::mem::take(&mut blocks.deferred).len(), 1);
        blocks.sums.end_to_wait(5);
        assert_eq!(bytes(&blocks), (0, 0));
        let active = blocks.sums.with_waiting()[1];
        assert_eq!((active.allocated, active.freed), (5, 5));
    }

    #[test]
    fn requests_under_way_count_against_the_limit() {
        let mut blocks = Blocks::default();
        blocks.enter(0x100, block(5));
        assert!(blocks.reserve(4, 10));
        assert!(!blocks.reserve(2, 10));
        assert!(!blocks.reserve(u64::MAX, 10));
        assert!(blocks.reserve(1, 10));
        blocks.reserved_bytes -= 4;
        assert!(!blocks.reserve(5, 10));
        assert!(!blocks.reserve(1, 3), "a limit that was lowered below what is there");
    }
}
