//! The allocated blocks, by address, and the counters.
//!
//! The table is sharded by address to avoid contention. All counters share one lock, which is held for a
//! few additions. Counters per shard would cost more: successive blocks of one thread are in different
//! shards, so their counters would be in different cache lines. This module calls neither user functions
//! nor the driver. Lock order: a shard, then the counters; no other lock is taken while one of these is
//! held.

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use smallvec::SmallVec;

use crate::allocator::SegmentAllocator;
use crate::error::HandleError;
use crate::ids::{PoolId, StreamId};
use crate::live_blocks::{BlockName, Live, LiveBlocks, Sharded};
use crate::size::PoolKind;
use crate::stats::Statistics;

/// The state of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Live,
    /// Freed by the caller; work that uses it is still pending.
    Draining,
    /// Kept in its private pool for later requests.
    Idle,
}

#[derive(Clone, Debug)]
pub(super) struct Block {
    /// The size requested from the user's function.
    pub(super) size_bytes: u64,
    /// The bytes requested by the last caller.
    pub(super) requested_bytes: u64,
    pub(super) stream: StreamId,
    pub(super) pool: PoolId,
    pub(super) state: State,
    /// The other streams that use the block.
    pub(super) uses: SmallVec<[StreamId; 2]>,
    /// While the block drains, the number of events it still waits for.
    pub(super) events: usize,
    /// True while the block belongs to a request of the default pool (`use_on_oom`).
    pub(super) is_lent: bool,
    /// The allocator that frees the block, if not the user's `free`.
    pub(super) source: Option<Arc<dyn SegmentAllocator>>,
}

#[derive(Debug, Default)]
pub(super) struct Table {
    blocks: Sharded<Block>,
    counters: Mutex<Statistics>,
}

/// A locked shard.
pub(super) struct Locked<'t> {
    counters: &'t Mutex<Statistics>,
    shard: MutexGuard<'t, LiveBlocks<Block>>,
}

impl Table {
    pub(super) fn lock(&self, address: u64) -> Locked<'_> {
        Locked { counters: &self.counters, shard: self.blocks.lock(address) }
    }

    pub(super) fn lock_all(&self) -> Vec<MutexGuard<'_, LiveBlocks<Block>>> {
        self.blocks.lock_all()
    }

    /// Locks the stored counters. Some are computed on demand instead: see
    /// [`statistics`](Self::statistics).
    pub(super) fn counters(&self) -> MutexGuard<'_, Statistics> {
        self.counters.lock()
    }

    /// Returns all counters, stored and computed.
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
    /// Returns the block at an address, in any state.
    pub(super) fn get(&self, address: u64) -> Option<&Live<Block>> {
        self.shard.get(address)
    }

    pub(super) fn get_mut(&mut self, address: u64) -> Option<&mut Block> {
        self.shard.get_mut(address).map(|live| &mut live.value)
    }

    /// Returns the live block with this name.
    pub(super) fn live(&self, name: BlockName) -> Result<&Live<Block>, HandleError> {
        let is_it = |live: &&Live<Block>| live.state == State::Live && live.has(name.serial);
        self.get(name.address).filter(is_it).ok_or_else(|| name.missing())
    }

    /// Adds a live block and returns its serial number. Returns `None` and changes nothing if the
    /// address is in the table.
    pub(super) fn insert(&mut self, address: u64, block: Block) -> Option<u64> {
        if self.shard.contains(address) {
            return None;
        }
        {
            let mut counters = self.counters.lock();
            counters.misses += 1;
            count_allocated(&mut counters, &block);
            counters.segment.increase(block.kind(), 1);
            counters.reserved_bytes.increase(block.kind(), block.size_bytes.cast_signed());
        }
        Some(self.shard.enter(address, block).0)
    }

    /// Makes an idle block live again, and returns its new serial number.
    pub(super) fn revive(&mut self, address: u64, requested_bytes: u64) -> Option<u64> {
        self.get(address).filter(|block| block.state == State::Idle)?;
        let (serial, block) = self.shard.renew(address)?;
        (block.state, block.requested_bytes) = (State::Live, requested_bytes);
        block.is_lent = false;
        let mut counters = self.counters.lock();
        counters.hits += 1;
        count_allocated(&mut counters, block);
        Some(serial)
    }

    /// Counts one completed event of a draining block. Returns true if it was the last.
    pub(super) fn event_passed(&mut self, address: u64) -> bool {
        self.get_mut(address).is_some_and(|block| {
            block.events = block.events.checked_sub(1).expect("each event passes once");
            block.events == 0
        })
    }

    /// Turns a live block into a draining one, when its caller frees it.
    pub(super) fn drain(&mut self, address: u64) {
        let Some(live) = self.shard.get_mut(address) else { return };
        live.value.state = State::Draining;
        self.counters.lock().count_free(live.kind(), live.size_bytes.cast_signed());
    }

    /// Turns a live or draining block into an idle one.
    pub(super) fn keep(&mut self, address: u64) {
        let Some(live) = self.shard.get_mut(address) else { return };
        count_free(&mut self.counters.lock(), live);
        live.value.state = State::Idle;
        live.value.uses.clear();
    }

    /// Removes a block in any state.
    pub(super) fn remove(&mut self, address: u64) -> Option<Block> {
        let block = self.shard.take_if(address, |_| true)?.value;
        let mut counters = self.counters.lock();
        count_free(&mut counters, &block);
        counters.segment.decrease(block.kind(), 1);
        counters.reserved_bytes.decrease(block.kind(), block.size_bytes.cast_signed());
        Some(block)
    }
}

impl Block {
    /// Returns true if the block is live, and for a request to its own pool.
    pub(super) fn is_owned_by_pool(&self) -> bool {
        self.state == State::Live && !self.is_lent
    }

    /// Returns true if the block is live, and for a request to the default pool.
    pub(super) fn is_lent_now(&self) -> bool {
        self.state == State::Live && self.is_lent
    }

    fn kind(&self) -> PoolKind {
        PoolKind::of(self.size_bytes)
    }
}

fn count_allocated(counters: &mut Statistics, block: &Block) {
    let (kind, bytes) = (block.kind(), block.size_bytes.cast_signed());
    counters.count_alloc(kind, bytes);
    counters.active.increase(kind, 1);
    counters.active_bytes.increase(kind, bytes);
    counters.requested_bytes.increase(kind, block.requested_bytes.cast_signed());
}

/// Counts a block that turns idle or is removed, unless it was idle already.
fn count_free(counters: &mut Statistics, block: &Block) {
    if block.state == State::Idle {
        return;
    }
    let (kind, bytes) = (block.kind(), block.size_bytes.cast_signed());
    if block.state == State::Live {
        counters.count_free(kind, bytes);
    }
    counters.active.decrease(kind, 1);
    counters.active_bytes.decrease(kind, bytes);
    counters.requested_bytes.decrease(kind, block.requested_bytes.cast_signed());
}
