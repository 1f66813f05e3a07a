//! The blocks of one instance: their states, free ones by exact size, and counters.
//!
//! Bookkeeping only: the caller holds the lock, and releases removed blocks to the system after
//! unlocking. Slots are linked to one another, and a bin keeps its capacity, so that a hit and a free
//! allocate no memory. The free blocks of one size form a stack with the most recently freed block on
//! top. All free blocks together form a list from the oldest to the newest; trimming takes from the old
//! end.

use std::collections::VecDeque;

use hashbrown::HashMap;

use crate::history::{BlockLayout, BlockStateName, SegmentLayout};
use crate::ids::{PoolId, StreamId};
use crate::size::PoolKind;
use crate::stats::Statistics;
use crate::system::SystemBlock;

/// The state of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// The slot is empty.
    Vacant,
    /// Allocated; the caller has its address.
    Live,
    /// Allocated; the caller owns the [`SystemBlock`] itself, so the slot does not hold it.
    Lent,
    /// Free.
    Idle,
}

/// Identifies one allocation: a slot, and a generation number that detects stale handles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlockId {
    pub(super) slot: u32,
    /// The generation of the slot: incremented each time its block is freed.
    pub(super) life: u64,
}

/// An allocated block.
#[derive(Clone, Copy, Debug)]
pub(super) struct AllocatedBlock {
    pub(super) address: u64,
    pub(super) id: BlockId,
}

/// A block that was removed, and its stream.
pub(super) type RemovedBlock = (SystemBlock, StreamId);

#[derive(Debug)]
struct Slot {
    address: u64,
    bytes: u64,
    life: u64,
    /// The time when the block was last freed, in nanoseconds of the allocator's clock.
    freed_at_ns: u64,
    stream: StreamId,
    state: State,
    /// Links in the list of all free blocks of the instance.
    older: Option<u32>,
    newer: Option<u32>,
    block: Option<SystemBlock>,
}

/// The blocks of one size.
#[derive(Debug, Default)]
struct Bin {
    /// The free blocks, oldest first.
    idle: VecDeque<u32>,
    /// The number of blocks, allocated or free. The bin is removed with its last block.
    blocks: u32,
}

#[derive(Debug, Default)]
pub(super) struct Blocks {
    slots: Vec<Slot>,
    vacant: Vec<u32>,
    bins: HashMap<u64, Bin>,
    oldest: Option<u32>,
    newest: Option<u32>,
    idle_bytes: u64,
    /// True once the allocator was dropped. Freed blocks are then released to the system.
    pub(super) retired: bool,
    /// The counters that are stored. The others are computed: see [`statistics`](Self::statistics).
    pub(super) counters: Statistics,
}

impl Blocks {
    fn at(&mut self, slot: u32) -> &mut Slot {
        &mut self.slots[slot as usize]
    }

    /// Allocates the most recently freed block of this size.
    #[inline]
    pub(super) fn reuse(&mut self, bytes: u64, stream: StreamId) -> Option<AllocatedBlock> {
        let slot = self.bins.get_mut(&bytes)?.idle.pop_back()?;
        self.unlink(slot);
        self.counters.hits += 1;
        self.counters.count_alloc(PoolKind::of(bytes), bytes.cast_signed());
        let own = self.at(slot);
        (own.state, own.stream) = (State::Live, stream);
        Some(AllocatedBlock { address: own.address, id: BlockId { slot, life: own.life } })
    }

    /// Adds a new block from the system, as a live block.
    pub(super) fn enter(&mut self, block: SystemBlock, stream: StreamId) -> AllocatedBlock {
        let (address, bytes) = (block.address(), block.size_bytes());
        self.bins.entry(bytes).or_default().blocks += 1;
        let vacant = self.vacant.pop();
        let life = vacant.map_or(0, |slot| self.at(slot).life);
        let fresh = Slot {
            address,
            bytes,
            life,
            freed_at_ns: 0,
            stream,
            state: State::Live,
            older: None,
            newer: None,
            block: Some(block),
        };
        let slot = match vacant {
            Some(slot) => {
                *self.at(slot) = fresh;
                slot
            }
            None => {
                self.slots.push(fresh);
                u32::try_from(self.slots.len() - 1).expect("fewer than 2^32 blocks")
            }
        };
        self.counters.misses += 1;
        self.counters.count_alloc(PoolKind::of(bytes), bytes.cast_signed());
        self.counters.segment.increase(PoolKind::of(bytes), 1);
        self.counters.reserved_bytes.increase(PoolKind::of(bytes), bytes.cast_signed());
        AllocatedBlock { address, id: BlockId { slot, life } }
    }

    /// Returns true if the slot has a block at `address` in this state. If `life` is given, the slot's
    /// generation must equal it.
    #[inline]
    fn is(&self, slot: u32, address: u64, life: Option<u64>, state: State) -> bool {
        self.slots.get(slot as usize).is_some_and(|own| {
            own.state == state && own.address == address && life.is_none_or(|l| l == own.life)
        })
    }

    /// Returns the size of the live block in this slot.
    pub(super) fn live_bytes_at(&self, slot: u32, address: u64, life: Option<u64>) -> Option<u64> {
        let is = |state| self.is(slot, address, life, state);
        let there = is(State::Live) || is(State::Lent);
        there.then(|| self.slots[slot as usize].bytes)
    }

    /// Returns the memory of the live block in this slot.
    pub(super) fn live_block(
        &mut self,
        slot: u32,
        address: u64,
        life: u64,
    ) -> Option<&mut SystemBlock> {
        let is_live = self.is(slot, address, Some(life), State::Live);
        is_live.then(|| self.at(slot).block.as_mut()).flatten()
    }

    /// Frees a live block. Returns its size, its stream and the slot's new generation, or `None` if that
    /// block is not live in the slot.
    #[inline]
    pub(super) fn free(
        &mut self,
        slot: u32,
        address: u64,
        life: Option<u64>,
        now_ns: u64,
    ) -> Option<(u64, StreamId, u64)> {
        if !self.is(slot, address, life, State::Live) {
            return None;
        }
        let (newest, own) = (self.newest, self.at(slot));
        let (bytes, stream) = (own.bytes, own.stream);
        own.state = State::Idle;
        own.life += 1;
        if let Some(block) = &mut own.block {
            // The caller had its address and may have written to it.
            block.mark_touched();
        }
        own.freed_at_ns = now_ns;
        (own.older, own.newer) = (newest, None);
        self.bins.entry(bytes).or_default().idle.push_back(slot);
        match newest {
            None => self.oldest = Some(slot),
            Some(newest) => self.at(newest).newer = Some(slot),
        }
        self.newest = Some(slot);
        self.counters.free_blocks += 1;
        self.idle_bytes += bytes;
        self.counters.count_free(PoolKind::of(bytes), bytes.cast_signed());
        Some((bytes, stream, self.slots[slot as usize].life))
    }

    /// Removes a free block, which is no longer in its stack, from the list.
    #[inline]
    fn unlink(&mut self, slot: u32) {
        let own = self.at(slot);
        let (bytes, older, newer) = (own.bytes, own.older, own.newer);
        match older {
            None => self.oldest = newer,
            Some(older) => self.at(older).newer = newer,
        }
        match newer {
            None => self.newest = older,
            Some(newer) => self.at(newer).older = older,
        }
        self.counters.free_blocks -= 1;
        self.idle_bytes -= bytes;
    }

    /// Moves the block out of a live slot: from now on its caller owns the memory itself.
    pub(super) fn lend(&mut self, id: BlockId, address: u64) -> Option<SystemBlock> {
        if !self.is(id.slot, address, Some(id.life), State::Live) {
            return None;
        }
        let own = self.at(id.slot);
        own.state = State::Lent;
        own.block.take()
    }

    /// Puts a lent block back; it is live again.
    pub(super) fn restore(&mut self, id: BlockId, block: SystemBlock) {
        let own = self.at(id.slot);
        debug_assert!(own.state == State::Lent && own.life == id.life);
        own.state = State::Live;
        own.block = Some(block);
    }

    /// Removes a live block without freeing its memory.
    pub(super) fn forget(&mut self, slot: u32, address: u64) -> Option<RemovedBlock> {
        if !self.is(slot, address, None, State::Live) {
            return None;
        }
        let bytes = self.at(slot).bytes;
        self.counters.count_free(PoolKind::of(bytes), bytes.cast_signed());
        self.vacate(slot)
    }

    /// Empties a slot. Its block must not be in the stack or the list.
    fn vacate(&mut self, slot: u32) -> Option<RemovedBlock> {
        self.vacant.push(slot);
        let own = self.at(slot);
        own.state = State::Vacant;
        own.life += 1;
        let (bytes, stream, block) = (own.bytes, own.stream, own.block.take());
        self.counters.segment.decrease(PoolKind::of(bytes), 1);
        self.counters.reserved_bytes.decrease(PoolKind::of(bytes), bytes.cast_signed());
        if let Some(bin) = self.bins.get_mut(&bytes) {
            bin.blocks -= 1;
            if bin.blocks == 0 {
                self.bins.remove(&bytes);
            }
        }
        block.map(|block| (block, stream))
    }

    /// Removes the block that has been free longest, if both functions return true. `may_release` gets the
    /// block's address, `should_evict` the time when the block was freed and the sum of all free bytes.
    pub(super) fn evict(
        &mut self,
        may_release: impl FnOnce(u64) -> bool,
        should_evict: impl FnOnce(u64, u64) -> bool,
    ) -> Option<RemovedBlock> {
        let slot = self.oldest?;
        let idle_bytes = self.idle_bytes;
        let own = self.at(slot);
        if !should_evict(own.freed_at_ns, idle_bytes) || !may_release(own.address) {
            return None;
        }
        self.remove_idle(slot)
    }

    /// Removes the free block in this slot if it is larger than `most_bytes`.
    pub(super) fn evict_if_larger(
        &mut self,
        slot: u32,
        address: u64,
        life: u64,
        most_bytes: u64,
    ) -> Option<RemovedBlock> {
        if !self.is(slot, address, Some(life), State::Idle) || self.at(slot).bytes <= most_bytes {
            return None;
        }
        self.remove_idle(slot)
    }

    /// Removes a free block: in most cases the oldest of its size.
    fn remove_idle(&mut self, slot: u32) -> Option<RemovedBlock> {
        let bytes = self.at(slot).bytes;
        let idle = &mut self.bins.get_mut(&bytes)?.idle;
        let at = idle.iter().position(|own| *own == slot)?;
        idle.remove(at);
        self.unlink(slot);
        self.vacate(slot)
    }

    /// Sets the time of the last free of all free blocks to `now_ns`.
    pub(super) fn date_all_idle(&mut self, now_ns: u64) {
        let idle = self.slots.iter_mut().filter(|own| own.state == State::Idle);
        idle.for_each(|own| own.freed_at_ns = now_ns);
    }

    pub(super) fn idle_bytes(&self) -> u64 {
        self.idle_bytes
    }

    /// Returns the number of allocated blocks.
    pub(super) fn live_blocks(&self) -> i64 {
        self.counters.allocation.all.current
    }

    /// Returns the number of free blocks, and the size of the largest.
    pub(super) fn idle(&self) -> (u64, u64) {
        let idle = self.bins.iter().filter(|(_, bin)| !bin.idle.is_empty());
        (self.counters.free_blocks, idle.map(|(bytes, _)| *bytes).max().unwrap_or(0))
    }

    /// Returns every block, as a segment of its own.
    pub(super) fn layout(&self) -> Vec<SegmentLayout> {
        let there = self.slots.iter().filter(|own| own.state != State::Vacant);
        let layout = there.map(|own| {
            let state = match own.state {
                State::Idle => BlockStateName::Inactive,
                _ => BlockStateName::ActiveAllocated,
            };
            let (address, size_bytes) = (own.address, own.bytes);
            let block = BlockLayout { address, size_bytes, requested_bytes: size_bytes, state };
            SegmentLayout::of_block(block, own.stream, PoolId::DEFAULT)
        });
        let mut segments: Vec<_> = layout.collect();
        SegmentLayout::sort(&mut segments);
        segments
    }

    /// Returns all counters. Requested bytes equal allocated bytes here, and no block waits for streams.
    pub(super) fn statistics(&self) -> Statistics {
        let own = self.counters.clone();
        Statistics {
            active: own.allocation,
            active_bytes: own.allocated_bytes,
            requested_bytes: own.allocated_bytes,
            num_device_alloc: own.segment.all.allocated,
            num_device_free: own.segment.all.freed,
            ..own
        }
    }
}
