//! What was handed out: address to size, stream and pool, and the counters.
//!
//! Sharded by address, so that threads seldom meet. The counters stand together under one lock, which is
//! held for a few additions: shared like the engine's, they would wander from shard to shard with the
//! addresses, and cost ten times as much. Calls no function of a user and no driver. Lock order: a
//! shard, then the counters; nobody takes another lock under these.

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use smallvec::SmallVec;

use crate::allocator::SegmentAllocator;
use crate::error::HandleError;
use crate::ids::{PoolId, StreamId};
use crate::live_blocks::{BlockName, Live, LiveBlocks, Sharded};
use crate::size::PoolKind;
use crate::stats::Statistics;

/// Where a block is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Live,
    /// Freed by the caller; other streams' work is waited for.
    Draining,
    /// Kept for its private pool.
    Idle,
}

#[derive(Clone, Debug)]
pub(super) struct Block {
    /// What the user's function was asked for.
    pub(super) size_bytes: u64,
    /// What the last holder asked for.
    pub(super) requested_bytes: u64,
    pub(super) stream: StreamId,
    pub(super) pool: PoolId,
    pub(super) state: State,
    /// Other streams that were announced.
    pub(super) uses: SmallVec<[StreamId; 2]>,
    /// How many events it waits for while it drains.
    pub(super) events: usize,
    /// Who gets it back, if it is not the user's `free`.
    pub(super) source: Option<Arc<dyn SegmentAllocator>>,
}

#[derive(Debug, Default)]
pub(super) struct Table {
    blocks: Sharded<Block>,
    counters: Mutex<Statistics>,
}

/// A shard under its lock.
pub(super) struct Locked<'t> {
    counters: &'t Mutex<Statistics>,
    shard: MutexGuard<'t, LiveBlocks<Block>>,
}

impl Table {
    /// Locks the shard of an address.
    pub(super) fn lock(&self, address: u64) -> Locked<'_> {
        Locked { counters: &self.counters, shard: self.blocks.lock(address) }
    }

    /// Locks every shard.
    pub(super) fn lock_all(&self) -> Vec<MutexGuard<'_, LiveBlocks<Block>>> {
        self.blocks.lock_all()
    }

    /// The counters that change by themselves: see [`statistics`](Self::statistics).
    pub(super) fn counters(&self) -> MutexGuard<'_, Statistics> {
        self.counters.lock()
    }

    /// Every counter.
    pub(super) fn statistics(&self) -> Statistics {
        let mut statistics = self.counters.lock().clone();
        statistics.num_device_alloc = statistics.segment.all.allocated;
        statistics.num_device_free = statistics.segment.all.freed;
        let idle = statistics.segment.all.current - statistics.active.all.current;
        statistics.free_blocks = u64::try_from(idle).unwrap_or(0);
        statistics
    }
}

impl Locked<'_> {
    /// The block at an address, whatever its state.
    pub(super) fn get(&self, address: u64) -> Option<&Live<Block>> {
        self.shard.get(address)
    }

    pub(super) fn get_mut(&mut self, address: u64) -> Option<&mut Block> {
        self.shard.get_mut(address).map(|live| &mut live.kept)
    }

    /// The block of this name that is in its caller's hands.
    pub(super) fn live(&self, name: BlockName) -> Result<&Live<Block>, HandleError> {
        let is_it = |live: &&Live<Block>| live.state == State::Live && live.has(name.serial);
        self.get(name.address).filter(is_it).ok_or_else(|| name.missing())
    }

    /// Adds a block that is in the caller's hands, and returns its serial number. `None`, and nothing
    /// changes, when the address is known.
    pub(super) fn insert(&mut self, address: u64, block: Block) -> Option<u64> {
        if self.shard.contains(address) {
            return None;
        }
        {
            let mut counters = self.counters.lock();
            counters.misses += 1;
            count_handed_out(&mut counters, &block);
            counters.segment.increase(block.kind(), 1);
            counters.reserved_bytes.increase(block.kind(), block.size_bytes.cast_signed());
        }
        Some(self.shard.enter(address, block).0)
    }

    /// Hands an idle block out again, under a new serial number.
    pub(super) fn revive(&mut self, address: u64, requested_bytes: u64) -> Option<u64> {
        self.get(address).filter(|block| block.state == State::Idle)?;
        let (serial, block) = self.shard.renew(address)?;
        (block.state, block.requested_bytes) = (State::Live, requested_bytes);
        let mut counters = self.counters.lock();
        counters.hits += 1;
        count_handed_out(&mut counters, block);
        Some(serial)
    }

    /// One event of a draining block has passed; whether it was the last.
    pub(super) fn event_passed(&mut self, address: u64) -> bool {
        self.get_mut(address).is_some_and(|block| {
            block.events = block.events.checked_sub(1).expect("each event passes once");
            block.events == 0
        })
    }

    /// The caller gave a live block back that still drains.
    pub(super) fn drain(&mut self, address: u64) {
        let Some(live) = self.shard.get_mut(address) else { return };
        live.kept.state = State::Draining;
        self.counters.lock().given_back(live.kind(), live.size_bytes.cast_signed());
    }

    /// A live or draining block becomes idle.
    pub(super) fn keep(&mut self, address: u64) {
        let Some(live) = self.shard.get_mut(address) else { return };
        count_free(&mut self.counters.lock(), live);
        live.kept.state = State::Idle;
        live.kept.uses.clear();
    }

    /// Forgets a block, whatever its state.
    pub(super) fn remove(&mut self, address: u64) -> Option<Block> {
        let block = self.shard.take_if(address, |_| true)?.kept;
        let mut counters = self.counters.lock();
        count_free(&mut counters, &block);
        counters.segment.decrease(block.kind(), 1);
        counters.reserved_bytes.decrease(block.kind(), block.size_bytes.cast_signed());
        Some(block)
    }
}

impl Block {
    fn kind(&self) -> PoolKind {
        PoolKind::of(self.size_bytes)
    }
}

fn count_handed_out(counters: &mut Statistics, block: &Block) {
    let (kind, bytes) = (block.kind(), block.size_bytes.cast_signed());
    counters.handed_out(kind, bytes);
    counters.active.increase(kind, 1);
    counters.active_bytes.increase(kind, bytes);
    counters.requested_bytes.increase(kind, block.requested_bytes.cast_signed());
}

/// It is not in use any more.
fn count_free(counters: &mut Statistics, block: &Block) {
    if block.state == State::Idle {
        return;
    }
    let (kind, bytes) = (block.kind(), block.size_bytes.cast_signed());
    if block.state == State::Live {
        counters.given_back(kind, bytes);
    }
    counters.active.decrease(kind, 1);
    counters.active_bytes.decrease(kind, bytes);
    counters.requested_bytes.decrease(kind, block.requested_bytes.cast_signed());
}
