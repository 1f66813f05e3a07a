//! The account of live blocks and of what they add up to.
//!
//! One small lock guards it; no driver call is made under that lock. A block leaves the account
//! before the driver is told of its free, because the driver may give its address to another thread
//! at once; if the driver refuses, the block comes back.

use std::collections::VecDeque;

use hashbrown::HashMap;

use super::Route;
use crate::error::HandleError;
use crate::ids::{PoolId, StreamId};
use crate::stats::Counter;

/// A stream, other than its own, that uses a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Use {
    pub(super) stream: StreamId,
    /// The capture inside which it was announced: such a use ends with the capture.
    pub(super) capture: Option<u64>,
}

/// A block in a caller's hands.
#[derive(Clone, Debug)]
pub(super) struct Block {
    pub(super) bytes: u64,
    pub(super) stream: StreamId,
    pub(super) pool: PoolId,
    /// The capture that asked for it.
    pub(super) capture: Option<u64>,
    pub(super) uses: Vec<Use>,
    serial: u64,
}

impl Block {
    pub(super) fn new(bytes: u64, stream: StreamId, route: &Route) -> Self {
        Self {
            bytes,
            stream,
            pool: route.pool,
            capture: route.capture,
            uses: Vec::new(),
            serial: 0,
        }
    }

    /// All streams that the block's free comes after, its own first.
    pub(super) fn streams(&self) -> impl Iterator<Item = StreamId> {
        std::iter::once(self.stream).chain(self.uses.iter().map(|by| by.stream))
    }
}

/// Live blocks by address, those that wait for the end of a capture, and the sums.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    live: HashMap<u64, Block>,
    /// Freed by their holders; the driver was not told yet.
    deferred: VecDeque<(u64, Block)>,
    last_serial: u64,
    pub(super) sums: Sums,
}

/// Counts and bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sums {
    pub(super) allocation: Counter,
    pub(super) allocated_bytes: Counter,
    /// With what waits for the end of a capture.
    pub(super) active: Counter,
    pub(super) active_bytes: Counter,
    pub(super) num_ooms: i64,
    pub(super) num_retries: i64,
}

fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).expect("requests are at most 1 EiB")
}

impl Sums {
    fn counters(&mut self) -> [&mut Counter; 4] {
        let Self { allocation, allocated_bytes, active, active_bytes, .. } = self;
        [allocation, allocated_bytes, active, active_bytes]
    }

    pub(super) fn reset_peaks(&mut self) {
        self.counters().into_iter().for_each(|counter| counter.peak = counter.current);
    }

    pub(super) fn reset_accumulated(&mut self) {
        for counter in self.counters() {
            (counter.allocated, counter.freed) = (0, 0);
        }
        (self.num_ooms, self.num_retries) = (0, 0);
    }

    /// Takes a decrease back: it did not happen.
    fn undo_decrease(counter: &mut Counter, n: i64) {
        counter.current += n;
        counter.freed -= n;
        // Others may have been handed out meanwhile.
        counter.peak = counter.peak.max(counter.current);
    }
}

/// What [`Blocks::enter`] did.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entered {
    pub(super) serial: u64,
    /// The bytes of the block that had the address before, or 0.
    pub(super) gone_bytes: u64,
}

impl Blocks {
    /// Enters a new block and returns its serial number, which no other block ever has.
    ///
    /// A live block may have the address already: one of a graph that is gone, whose memory the driver
    /// gives out again. It leaves, and its holder's handle is stale.
    pub(super) fn enter(&mut self, address: u64, block: Block) -> Entered {
        self.last_serial += 1;
        let bytes = signed(block.bytes);
        self.sums.allocation.increase(1);
        self.sums.allocated_bytes.increase(bytes);
        self.sums.active.increase(1);
        self.sums.active_bytes.increase(bytes);
        let serial = self.last_serial;
        let replaced = self.live.insert(address, Block { serial, ..block });
        let gone_bytes = replaced.map_or(0, |gone| {
            self.count_out(gone.bytes);
            gone.bytes
        });
        Entered { serial, gone_bytes }
    }

    /// Whether a live block starts there.
    pub(super) fn is_live(&self, address: u64) -> bool {
        self.live.contains_key(&address)
    }

    fn count_out(&mut self, bytes: u64) {
        self.sums.allocation.decrease(1);
        self.sums.allocated_bytes.decrease(signed(bytes));
        self.sums.active.decrease(1);
        self.sums.active_bytes.decrease(signed(bytes));
    }

    /// The live block at an address; with a serial number only the very block that has it.
    pub(super) fn find(
        &mut self,
        address: u64,
        serial: Option<u64>,
    ) -> Result<&mut Block, HandleError> {
        let found = self.live.get_mut(&address);
        let same = |block: &&mut Block| serial.is_none_or(|serial| block.serial == serial);
        found.filter(same).ok_or(match serial {
            Some(_) => HandleError::Stale { address },
            None => HandleError::UnknownAddress { address },
        })
    }

    /// Takes a block out of its holder's hands.
    pub(super) fn leave(
        &mut self,
        address: u64,
        serial: Option<u64>,
    ) -> Result<Block, HandleError> {
        self.find(address, serial)?;
        let block = self.live.remove(&address).expect("found a moment ago");
        self.count_out(block.bytes);
        Ok(block)
    }

    /// Undoes [`leave`](Self::leave): the driver refused the free.
    pub(super) fn come_back(&mut self, address: u64, block: Block) {
        let bytes = signed(block.bytes);
        for (counter, n) in self.sums.counters().into_iter().zip([1, bytes, 1, bytes]) {
            Sums::undo_decrease(counter, n);
        }
        self.live.insert(address, block);
    }

    /// Keeps a block that has left until a capture has ended.
    pub(super) fn defer(&mut self, address: u64, block: Block) {
        Sums::undo_decrease(&mut self.sums.active, 1);
        Sums::undo_decrease(&mut self.sums.active_bytes, signed(block.bytes));
        self.deferred.push_back((address, block));
    }

    /// The block that waits for the end of a capture and was not looked at for the longest time. Who
    /// takes it puts it back if it goes on waiting.
    pub(super) fn take_one_deferred(&mut self) -> Option<(u64, Block)> {
        self.deferred.pop_front()
    }

    /// All of them.
    pub(super) fn take_deferred(&mut self) -> VecDeque<(u64, Block)> {
        std::mem::take(&mut self.deferred)
    }

    pub(super) fn put_back_deferred(&mut self, blocks: impl IntoIterator<Item = (u64, Block)>) {
        self.deferred.extend(blocks);
    }

    /// A deferred block has gone to the driver.
    pub(super) fn deferred_is_free(&mut self, bytes: u64) {
        self.sums.active.decrease(1);
        self.sums.active_bytes.decrease(signed(bytes));
    }

    /// Bytes that wait for the end of a capture.
    pub(super) fn deferred_bytes(&self) -> u64 {
        self.deferred.iter().map(|(_, block)| block.bytes).sum()
    }

    /// Everything, when the allocator goes.
    pub(super) fn take_all(&mut self) -> Vec<(u64, Block)> {
        let deferred = self.take_deferred();
        self.live.drain().chain(deferred).collect()
    }

    /// Live blocks of one pool, or of all.
    pub(super) fn of(&self, pool: Option<PoolId>) -> impl Iterator<Item = (u64, &Block)> {
        let own = move |block: &Block| pool.is_none_or(|pool| block.pool == pool);
        self.live.iter().filter(move |(_, block)| own(block)).map(|(at, block)| (*at, block))
    }

    /// Whether any block of the pool is live or deferred.
    pub(super) fn any_of(&self, pool: PoolId) -> bool {
        self.of(Some(pool)).next().is_some() || self.deferred.iter().any(|(_, b)| b.pool == pool)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::DriverPoolId;

    fn block(bytes: u64) -> Block {
        let route = Route { pool: PoolId::DEFAULT, driver_pool: DriverPoolId(0), capture: None };
        Block::new(bytes, StreamId(1), &route)
    }

    #[test]
    fn a_free_that_the_driver_refused_leaves_the_sums_as_they_were() {
        let mut blocks = Blocks::default();
        blocks.enter(0x100, block(5));
        let before = format!("{:?}", blocks.sums);
        let left = blocks.leave(0x100, None).unwrap();
        blocks.come_back(0x100, left);
        assert_eq!(format!("{:?}", blocks.sums), before);
        assert!(blocks.find(0x100, Some(1)).is_ok());
    }

    #[test]
    fn peaks_are_never_below_what_a_refused_free_brings_back() {
        let mut blocks = Blocks::default();
        blocks.enter(0x100, block(5));
        let left = blocks.leave(0x100, None).unwrap();
        blocks.enter(0x200, block(5));
        blocks.come_back(0x100, left);
        let sums = blocks.sums;
        assert_eq!((sums.allocated_bytes.current, sums.allocated_bytes.peak), (10, 10));
        assert_eq!((sums.active.current, sums.active.peak), (2, 2));
    }

    #[test]
    fn a_block_that_reuses_an_address_is_not_the_one_before() {
        let mut blocks = Blocks::default();
        let first = blocks.enter(0x100, block(5)).serial;
        blocks.leave(0x100, Some(first)).unwrap();
        let second = blocks.enter(0x100, block(6)).serial;
        assert_eq!(
            blocks.leave(0x100, Some(first)).unwrap_err(),
            HandleError::Stale { address: 0x100 }
        );
        assert_eq!(blocks.leave(0x100, Some(second)).unwrap().bytes, 6);
    }

    #[test]
    fn a_block_whose_address_comes_back_has_left() {
        let mut blocks = Blocks::default();
        let gone = blocks.enter(0x100, block(5)).serial;
        assert_eq!(blocks.enter(0x100, block(6)).gone_bytes, 5);
        assert!(blocks.find(0x100, Some(gone)).is_err());
        let sums = blocks.sums;
        assert_eq!((sums.allocation.current, sums.active_bytes.current), (1, 6));
    }

    #[test]
    fn a_deferred_block_is_active_until_the_driver_has_it() {
        let mut blocks = Blocks::default();
        blocks.enter(0x100, block(5));
        let left = blocks.leave(0x100, None).unwrap();
        blocks.defer(0x100, left);
        assert_eq!((blocks.sums.allocated_bytes.current, blocks.sums.active_bytes.current), (0, 5));
        assert_eq!(blocks.take_deferred().len(), 1);
        blocks.deferred_is_free(5);
        assert_eq!(blocks.sums.active_bytes.current, 0);
        assert_eq!((blocks.sums.active_bytes.allocated, blocks.sums.active_bytes.freed), (5, 5));
    }
}
