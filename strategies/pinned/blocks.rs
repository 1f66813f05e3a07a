//! The blocks of one allocator: their states, the free ones by size and by age, and the counters.
//!
//! Bookkeeping only: the caller holds the lock, and calls the driver after unlocking.

use std::collections::BTreeMap;

use smallvec::SmallVec;

use super::reserve::Reserve;
use super::times::Times;
use crate::error::HandleError;
use crate::history::{BlockLayout, BlockStateName, SegmentLayout};
use crate::ids::{PoolId, StreamId};
use crate::live_blocks::{BlockName, Live, LiveBlocks};
use crate::size::PoolKind;
use crate::stats::Statistics;
use crate::system::SystemBlock;

/// The streams that use a block.
pub(super) type Uses = SmallVec<[StreamId; 2]>;

/// The state of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// The caller has it.
    Live,
    /// The caller has freed it, and events are being recorded for it.
    Freeing,
    /// Freed; `events` is the number of events to wait for, and 0 until a capture ends.
    Draining { events: usize },
    /// Freed after it was used in a capture. The graph may use it at each launch, so it is never reused.
    InGraph,
    /// Free since `freed_at_ns`. Numbers increase from one free to the next.
    Idle { number: u64, freed_at_ns: u64 },
}

/// The origin of a block's memory.
#[derive(Debug)]
pub(super) enum Origin {
    /// The driver allocated it.
    Driver,
    /// The system's pages, registered with the driver. Dropping them releases them to the system.
    #[expect(dead_code, reason = "the value owns the pages")]
    Registered(SystemBlock),
    /// A part of the reserved segment.
    Reserve,
}

#[derive(Debug)]
pub(super) struct Block {
    pub(super) bytes: u64,
    pub(super) requested_bytes: u64,
    /// The stream of the request. It does not affect reuse.
    pub(super) stream: StreamId,
    pub(super) state: State,
    /// The streams that were recorded since the block was allocated.
    pub(super) uses: Uses,
    /// Whether one of these streams was being captured when it was recorded.
    pub(super) in_graph: bool,
    pub(super) origin: Origin,
}

impl Block {
    fn kind(&self) -> PoolKind {
        PoolKind::of(self.bytes)
    }

    fn is_idle(&self) -> bool {
        matches!(self.state, State::Idle { .. })
    }
}

/// A free block that can be released.
#[derive(Clone, Copy, Debug)]
pub(super) struct Idle {
    pub(super) address: u64,
    pub(super) bytes: u64,
    /// The time when the block became free, in nanoseconds of the allocator's clock.
    pub(super) freed_at_ns: u64,
}

/// An allocated block, as its caller gets it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Served {
    pub(super) address: u64,
    pub(super) serial: u64,
}

#[derive(Debug, Default)]
pub(super) struct Blocks {
    table: LiveBlocks<Block>,
    /// The addresses of all free blocks, by size and number.
    by_size: BTreeMap<(u64, u64), u64>,
    /// The addresses of the free blocks that can be released, by number: the oldest first.
    by_age: BTreeMap<u64, u64>,
    last_number: u64,
    pub(super) reserve: Option<Reserve>,
    /// The counters that are stored. The others are computed: see [`statistics`](Self::statistics).
    pub(super) counters: Statistics,
    pub(super) times: Times,
}

impl Blocks {
    /// Makes a free block of `least_bytes` to `most_bytes` live: one of the smallest such size, and of
    /// these the one that was freed last.
    pub(super) fn reuse(
        &mut self,
        (least_bytes, most_bytes): (u64, u64),
        requested_bytes: u64,
        stream: StreamId,
    ) -> Option<Served> {
        let ((bytes, _), _) =
            self.by_size.range((least_bytes, 0)..=(most_bytes, u64::MAX)).next()?;
        let (_, &address) = self.by_size.range((*bytes, 0)..=(*bytes, u64::MAX)).next_back()?;
        self.unlist(address);
        let (serial, block) = self.table.renew(address)?;
        (block.requested_bytes, block.stream, block.state) = (requested_bytes, stream, State::Live);
        block.in_graph = false;
        block.uses.clear();
        let bytes = block.bytes;
        self.counters.hits += 1;
        self.count_live(bytes, requested_bytes);
        Some(Served { address, serial })
    }

    /// Adds a new live block. Returns `None` and changes nothing if a block is at this address.
    pub(super) fn enter(&mut self, address: u64, block: Block) -> Option<Served> {
        if self.table.contains(address) {
            return None;
        }
        let (bytes, requested_bytes) = (block.bytes, block.requested_bytes);
        if !matches!(block.origin, Origin::Reserve) {
            self.count_segment(bytes);
        }
        let (serial, _) = self.table.enter(address, block);
        self.counters.misses += 1;
        self.count_live(bytes, requested_bytes);
        Some(Served { address, serial })
    }

    /// Returns the live block with this name.
    pub(super) fn live(&mut self, name: BlockName) -> Result<&mut Block, HandleError> {
        let found = self.table.get_mut(name.address);
        let is_it = |live: &&mut Live<Block>| live.state == State::Live && live.has(name.serial);
        found.filter(is_it).map(|live| &mut live.value).ok_or_else(|| name.missing())
    }

    /// Returns the block at an address, in any state.
    pub(super) fn at(&mut self, address: u64) -> Option<&mut Block> {
        self.table.get_mut(address).map(|live| &mut live.value)
    }

    /// Ends the caller's use of a block, which is not reusable yet.
    pub(super) fn drain(&mut self, address: u64, state: State) {
        let block = self.at(address).expect("a block that is being freed is in the table");
        block.state = state;
        let (kind, bytes) = (block.kind(), block.bytes.cast_signed());
        self.counters.count_free(kind, bytes);
    }

    /// Makes a live or draining block free.
    pub(super) fn make_idle(&mut self, address: u64, freed_at_ns: u64) {
        self.last_number += 1;
        let number = self.last_number;
        let block = self.at(address).expect("a block that becomes free is in the table");
        let was = std::mem::replace(&mut block.state, State::Idle { number, freed_at_ns });
        let (kind, bytes) = (block.kind(), block.bytes.cast_signed());
        let requested = block.requested_bytes.cast_signed();
        if was == State::Live {
            self.counters.count_free(kind, bytes);
        }
        self.counters.active.decrease(kind, 1);
        self.counters.active_bytes.decrease(kind, bytes);
        self.counters.requested_bytes.decrease(kind, requested);
        self.list(address);
    }

    /// Counts one completed event of a draining block. Returns true if it was the last.
    pub(super) fn event_passed(&mut self, address: u64) -> bool {
        match self.at(address).map(|block| &mut block.state) {
            Some(State::Draining { events }) => {
                *events = events.checked_sub(1).expect("each event passes once");
                *events == 0
            }
            _ => false,
        }
    }

    fn list(&mut self, address: u64) {
        let Some(block) = self.table.get(address) else { return };
        let State::Idle { number, .. } = block.state else { return };
        self.by_size.insert((block.bytes, number), address);
        if !matches!(block.origin, Origin::Reserve) {
            self.by_age.insert(number, address);
        }
        self.counters.free_blocks += 1;
    }

    fn unlist(&mut self, address: u64) {
        let Some(block) = self.table.get(address) else { return };
        let State::Idle { number, .. } = block.state else { return };
        self.by_size.remove(&(block.bytes, number));
        self.by_age.remove(&number);
        self.counters.free_blocks -= 1;
    }

    /// Returns the block that has been free longest, among those that can be released.
    pub(super) fn oldest(&self) -> Option<Idle> {
        self.by_age.first_key_value().and_then(|(_, address)| self.idle_at(*address))
    }

    /// Returns the free block at an address, if it can be released.
    pub(super) fn idle_at(&self, address: u64) -> Option<Idle> {
        let block = self.table.get(address)?;
        match (block.state, &block.origin) {
            (State::Idle { .. }, Origin::Reserve) => None,
            (State::Idle { freed_at_ns, .. }, _) => {
                Some(Idle { address, bytes: block.bytes, freed_at_ns })
            }
            _ => None,
        }
    }

    /// Removes a free block.
    pub(super) fn remove(&mut self, idle: Idle) -> Option<Live<Block>> {
        self.unlist(idle.address);
        self.table.take_if(idle.address, |_| true)
    }

    /// Adds a removed block again, because it could not be released, as the one that was freed last.
    pub(super) fn put_back(&mut self, mut block: Live<Block>) {
        let address = block.address;
        if let State::Idle { number, .. } = &mut block.value.state {
            self.last_number += 1;
            *number = self.last_number;
        }
        self.table.put_back(block);
        self.list(address);
    }

    /// Removes and returns all blocks that are not part of the reserved segment, in any state.
    pub(super) fn take_all(&mut self) -> Vec<Live<Block>> {
        self.by_size.clear();
        self.by_age.clear();
        self.counters.free_blocks = 0;
        let all = self.table.drain();
        all.filter(|block| !matches!(block.origin, Origin::Reserve)).collect()
    }

    /// Makes the whole reserved segment unused if all its blocks are free.
    pub(super) fn reset_reserve(&mut self) {
        let Some(reserve) = &self.reserve else { return };
        let parts = reserve.parts.clone();
        if !parts.iter().all(|at| self.table.get(*at).is_some_and(|own| own.is_idle())) {
            return;
        }
        for address in parts {
            self.unlist(address);
            self.table.take_if(address, |_| true);
        }
        self.reserve.as_mut().expect("checked above").parts.clear();
    }

    pub(super) fn count_segment(&mut self, bytes: u64) {
        let kind = PoolKind::of(bytes);
        self.counters.segment.increase(kind, 1);
        self.counters.reserved_bytes.increase(kind, bytes.cast_signed());
    }

    /// Counts memory that was released to the driver.
    pub(super) fn uncount_segment(&mut self, bytes: u64) {
        let kind = PoolKind::of(bytes);
        self.counters.segment.decrease(kind, 1);
        self.counters.reserved_bytes.decrease(kind, bytes.cast_signed());
    }

    fn count_live(&mut self, bytes: u64, requested_bytes: u64) {
        let kind = PoolKind::of(bytes);
        self.counters.count_alloc(kind, bytes.cast_signed());
        self.counters.active.increase(kind, 1);
        self.counters.active_bytes.increase(kind, bytes.cast_signed());
        self.counters.requested_bytes.increase(kind, requested_bytes.cast_signed());
    }

    /// Returns all counters, stored and computed.
    pub(super) fn statistics(&self) -> Statistics {
        let own = self.counters.clone();
        Statistics {
            num_device_alloc: own.segment.all.allocated,
            num_device_free: own.segment.all.freed,
            own: self.times.own(),
            ..own
        }
    }

    /// Returns the sizes of all free blocks.
    pub(super) fn idle_sizes(&self) -> impl Iterator<Item = u64> {
        self.by_size.keys().map(|(bytes, _)| *bytes)
    }

    /// Returns each block as a segment of its own, and the reserved segment with its blocks.
    pub(super) fn layout(&self) -> Vec<SegmentLayout> {
        let own = self.table.iter().filter(|block| !matches!(block.origin, Origin::Reserve));
        let mut segments: Vec<_> = own
            .map(|own| SegmentLayout::of_block(layout_of(own), own.stream, PoolId::DEFAULT))
            .collect();
        segments.extend(self.reserve.as_ref().map(|reserve| {
            let parts = reserve.parts.iter().filter_map(|at| self.table.get(*at)).map(layout_of);
            reserve.layout(parts.collect())
        }));
        SegmentLayout::sort(&mut segments);
        segments
    }
}

fn layout_of(block: &Live<Block>) -> BlockLayout {
    let state = match block.state {
        State::Live | State::Freeing => BlockStateName::ActiveAllocated,
        State::Draining { .. } | State::InGraph => BlockStateName::ActivePendingFree,
        State::Idle { .. } => BlockStateName::Inactive,
    };
    let requested_bytes = if state == BlockStateName::Inactive { 0 } else { block.requested_bytes };
    BlockLayout { address: block.address, size_bytes: block.bytes, requested_bytes, state }
}
