//! The account of live blocks.
//!
//! One small lock guards it; no driver call is made under that lock. A block leaves the account
//! before the driver is told of its free, because the driver may give its address to another thread
//! at once; if the driver refuses, the block comes back. All blocks are found by address, also those
//! with a handle: memory of a graph that is gone may be given out again while the old block is held,
//! and only its address tells. What few blocks have, uses and captures, lies outside the table.

use std::collections::VecDeque;

use hashbrown::hash_table::Entry;
use hashbrown::{HashSet, HashTable};

use super::Route;
use super::sums::Sums;
use crate::error::HandleError;
use crate::ids::{PoolId, StreamId};

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
    serial: u64,
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
        Self { bytes, stream, pool: route.pool, serial: 0, rare }
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
    live: HashTable<Live>,
    /// Freed by their holders; the driver was not told yet.
    deferred: VecDeque<(u64, Block)>,
    /// Bytes of requests under a limit that no block has yet, and of frees that may yet turn out to wait.
    reserved_bytes: u64,
    last_serial: u64,
    /// Streams on which blocks were freed, and the last of them.
    freed_on: HashSet<StreamId>,
    last_freed_on: Option<StreamId>,
    pub(super) sums: Sums,
}

#[derive(Debug)]
struct Live {
    address: u64,
    block: Block,
}

impl Live {
    fn hash(&self) -> u64 {
        hash_of(self.address)
    }
}

/// Addresses are multiples of some power of two: both halves of a product with an odd number count.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "the two halves of a product")]
fn hash_of(address: u64) -> u64 {
    let product = u128::from(address) * 0x9E37_79B9_7F4A_7C15;
    product as u64 ^ (product >> 64) as u64
}

impl Blocks {
    /// Enters a new block and returns its serial number, which no other block ever has.
    ///
    /// A live block may have the address already: one of a graph that is gone, whose memory the driver
    /// gives out again. It leaves, and its holder's handle is stale.
    #[inline]
    pub(super) fn enter(&mut self, address: u64, block: Block) -> u64 {
        self.last_serial += 1;
        let serial = self.last_serial;
        self.sums.hand_out(block.bytes);
        let live = Live { address, block: Block { serial, ..block } };
        match self.live.entry(live.hash(), |other| other.address == address, Live::hash) {
            Entry::Vacant(room) => {
                room.insert(live);
            }
            Entry::Occupied(mut found) => {
                let gone = std::mem::replace(found.get_mut(), live);
                self.sums.leave(gone.block.bytes);
            }
        }
        serial
    }

    /// Keeps bytes for a request that the driver will be asked for, if the limit has room for them.
    pub(super) fn reserve(&mut self, bytes: u64, limit_bytes: u64) -> bool {
        let fits = bytes <= limit_bytes.saturating_sub(self.charged_bytes());
        self.reserved_bytes += if fits { bytes } else { 0 };
        fits
    }

    /// Keeps the bytes of a block that has left and may have to wait or come back.
    pub(super) fn keep_reserved(&mut self, bytes: u64) {
        self.reserved_bytes += bytes;
    }

    /// The request has its block now, or it failed; the free has ended, one way or another.
    pub(super) fn unreserve(&mut self, bytes: u64) {
        self.reserved_bytes -= bytes;
    }

    /// What counts against a limit: blocks that the driver was not told to free, and requests and frees under
    /// way.
    pub(super) fn charged_bytes(&self) -> u64 {
        self.sums.live_bytes() + self.sums.waiting_bytes() + self.reserved_bytes
    }

    /// Whether a live block starts there.
    pub(super) fn is_live(&self, address: u64) -> bool {
        self.live.find(hash_of(address), |live| live.address == address).is_some()
    }

    /// The live block at an address; with a serial number only the very block that has it.
    pub(super) fn find(
        &mut self,
        address: u64,
        serial: Option<u64>,
    ) -> Result<&mut Block, HandleError> {
        let found = self.live.find_mut(hash_of(address), |live| is_it(live, address, serial));
        found.map(|live| &mut live.block).ok_or(refusal(address, serial))
    }

    /// Takes a block out of its holder's hands.
    #[inline]
    pub(super) fn leave(
        &mut self,
        address: u64,
        serial: Option<u64>,
    ) -> Result<Block, HandleError> {
        let found = self.live.find_entry(hash_of(address), |live| is_it(live, address, serial));
        let Ok(found) = found else { return Err(refusal(address, serial)) };
        let block = found.remove().0.block;
        self.sums.leave(block.bytes);
        if self.last_freed_on != Some(block.stream) {
            self.last_freed_on = Some(block.stream);
            self.freed_on.insert(block.stream);
        }
        Ok(block)
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
    pub(super) fn come_back(&mut self, address: u64, block: Block) {
        self.sums.come_back(block.bytes);
        let live = Live { address, block };
        self.live.insert_unique(live.hash(), live, Live::hash);
    }

    /// Keeps a block that has left until a capture has ended.
    pub(super) fn defer(&mut self, address: u64, block: Block) {
        self.sums.begin_to_wait(block.bytes);
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
        self.sums.end_to_wait(bytes);
    }

    /// Whether none was ever entered.
    pub(super) fn is_unused(&self) -> bool {
        self.last_serial == 0
    }

    /// Everything, when the allocator goes.
    pub(super) fn take_all(&mut self) -> Vec<(u64, Block)> {
        let deferred = self.take_deferred();
        self.live.drain().map(|live| (live.address, live.block)).chain(deferred).collect()
    }

    /// Live blocks of one pool, or of all.
    pub(super) fn of(&self, pool: Option<PoolId>) -> impl Iterator<Item = (u64, &Block)> {
        let own = move |live: &&Live| pool.is_none_or(|pool| live.block.pool == pool);
        self.live.iter().filter(own).map(|live| (live.address, &live.block))
    }

    /// Whether any block of the pool is live or deferred.
    pub(super) fn any_of(&self, pool: PoolId) -> bool {
        self.of(Some(pool)).next().is_some() || self.deferred.iter().any(|(_, b)| b.pool == pool)
    }
}

#[inline]
fn is_it(live: &Live, address: u64, serial: Option<u64>) -> bool {
    live.address == address && serial.is_none_or(|serial| live.block.serial == serial)
}

#[cold]
fn refusal(address: u64, serial: Option<u64>) -> HandleError {
    match serial {
        Some(_) => HandleError::Stale { address },
        None => HandleError::UnknownAddress { address },
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
        let ([_, bytes], [active, _]) = (blocks.sums.allocated(), blocks.sums.with_waiting());
        assert_eq!((bytes.current, bytes.peak), (10, 10));
        assert_eq!((active.current, active.peak), (2, 2));
    }

    #[test]
    fn a_block_that_reuses_an_address_is_not_the_one_before() {
        let mut blocks = Blocks::default();
        let first = blocks.enter(0x100, block(5));
        blocks.leave(0x100, Some(first)).unwrap();
        let second = blocks.enter(0x100, block(6));
        assert_eq!(
            blocks.leave(0x100, Some(first)).unwrap_err(),
            HandleError::Stale { address: 0x100 }
        );
        assert_eq!(blocks.leave(0x100, Some(second)).unwrap().bytes, 6);
    }

    #[test]
    fn a_block_whose_address_comes_back_has_left() {
        let mut blocks = Blocks::default();
        let gone = blocks.enter(0x100, block(5));
        blocks.enter(0x100, block(6));
        assert!(blocks.find(0x100, Some(gone)).is_err());
        assert_eq!(blocks.sums.allocated()[0].current, 1);
        assert_eq!((blocks.sums.with_waiting()[1].current, blocks.charged_bytes()), (6, 6));
    }

    #[test]
    fn a_deferred_block_is_active_until_the_driver_has_it() {
        let mut blocks = Blocks::default();
        blocks.enter(0x100, block(5));
        let left = blocks.leave(0x100, None).unwrap();
        blocks.defer(0x100, left);
        let bytes = |blocks: &Blocks| (blocks.sums.live_bytes(), blocks.charged_bytes());
        assert_eq!(bytes(&blocks), (0, 5));
        assert_eq!(blocks.take_deferred().len(), 1);
        blocks.deferred_is_free(5);
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
        blocks.unreserve(4);
        assert!(!blocks.reserve(5, 10));
        assert!(!blocks.reserve(1, 3), "a limit that was lowered below what is there");
    }

    #[test]
    fn addresses_that_differ_in_few_bits_do_not_meet() {
        for step in [256u64, 512, 2 << 20, 1 << 32] {
            let places = (0..1024).map(|n| hash_of(0x7000_0000_0000 + n * step) % 4096);
            let low: std::collections::HashSet<u64> = places.collect();
            assert!(low.len() > 800, "{step}: {} of 1024 places", low.len());
        }
    }
}
