//! What was handed out: address to size, stream and pool, and the counters.
//!
//! Sharded by address, so that threads wait for each other only when their addresses fall into one
//! shard. Counters live in the shards too and have exact peaks by the same means as the engine's
//! ([`stats`](crate::stats)): one set for blocks, one for what is held from the user's functions.
//! Calls no function of a user and no driver; the lock of a shard is the last that anybody takes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hashbrown::HashMap;
use parking_lot::{Mutex, MutexGuard};
use smallvec::SmallVec;

use crate::allocator::{SegmentAllocator, Token};
use crate::heap::{BlockId, Completed, HandOut, Slot, SplitChange};
use crate::ids::{PoolId, StreamId};
use crate::size::PoolKind;
use crate::stats::{
    ALL, Accumulated, Counter, HeapCounters, Heaps, Lane, Lanes, Ledger, PerPool, Statistics,
};

const SHARDS: usize = 64;
/// The counters of blocks in callers' hands.
const BLOCKS: usize = 0;
/// The counters of what is held: the same and what is idle in private pools.
const HELD: usize = 1;

/// Which life of an address it is: an old handle is refused, not misread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mark(u64);

impl Mark {
    #[expect(clippy::cast_possible_truncation, reason = "cut into two halves")]
    pub(super) fn token(self) -> Token {
        Token([self.0 as u32, (self.0 >> 32) as u32, 0])
    }

    pub(super) fn of(token: Token) -> Self {
        Self(u64::from(token.0[0]) | u64::from(token.0[1]) << 32)
    }
}

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
    pub(super) mark: Mark,
    /// Other streams that were announced.
    pub(super) uses: SmallVec<[StreamId; 2]>,
    /// Who gets it back, if it is not the user's `free`.
    pub(super) source: Option<Arc<dyn SegmentAllocator>>,
}

impl Block {
    fn kind(&self) -> PoolKind {
        PoolKind::of(self.size_bytes)
    }

    fn handed(&self, address: u64) -> HandOut {
        let id = BlockId { slot: Slot::NONE, generation: 0 };
        HandOut { id, address, size_bytes: self.size_bytes, inactive: SplitChange::default() }
    }

    fn completed(&self, address: u64) -> Completed {
        Completed {
            address,
            size_bytes: self.size_bytes,
            requested_bytes: self.requested_bytes,
            kind: self.kind(),
            inactive: SplitChange::default(),
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Shard {
    blocks: HashMap<u64, Block>,
    counters: [HeapCounters; 2],
    next_mark: u64,
}

#[derive(Debug, Default)]
#[repr(align(128))]
struct Cell {
    state: Mutex<Shard>,
    moved: [AtomicBool; 2],
}

#[derive(Debug)]
pub(super) struct Table {
    cells: Box<[Cell]>,
    ledgers: [Ledger; 2],
}

impl Default for Table {
    fn default() -> Self {
        Self {
            cells: (0..SHARDS).map(|_| Cell::default()).collect(),
            ledgers: [Ledger::default(), Ledger::default()],
        }
    }
}

/// The shards as one of the ledgers sees them.
struct View<'t> {
    cells: &'t [Cell],
    which: usize,
}

impl Heaps for View<'_> {
    fn moved(&self, heap: usize) -> bool {
        self.cells[heap].moved[self.which].load(Ordering::Relaxed)
    }

    fn try_visit(&self, heap: usize, visit: &mut dyn FnMut(&mut HeapCounters)) -> bool {
        let cell = &self.cells[heap];
        let Some(mut state) = cell.state.try_lock() else {
            return false;
        };
        visit(&mut state.counters[self.which]);
        cell.moved[self.which].store(false, Ordering::Relaxed);
        true
    }
}

/// A shard under its lock.
pub(super) struct Locked<'t> {
    table: &'t Table,
    number: usize,
    shard: MutexGuard<'t, Shard>,
}

impl Table {
    /// Locks the shard of an address.
    pub(super) fn lock(&self, address: u64) -> Locked<'_> {
        // Addresses are multiples of large powers of two: their low bits are equal.
        let hash = address.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 58;
        let number = usize::try_from(hash).unwrap_or(0) % SHARDS;
        Locked { table: self, number, shard: self.cells[number].state.lock() }
    }

    /// Calls `visit` with every block there is, in no order.
    pub(super) fn each(&self, mut visit: impl FnMut(u64, &Block)) {
        for cell in &self.cells {
            cell.state.lock().blocks.iter().for_each(|(address, block)| visit(*address, block));
        }
    }

    /// Adds the families that blocks have.
    pub(super) fn add_to(&self, statistics: &mut Statistics) {
        let mut fold = Fold::default();
        for cell in &self.cells {
            let shard = cell.state.lock();
            fold.add(&shard.counters);
            statistics.hits += shard.counters[BLOCKS].hits;
            statistics.misses += shard.counters[BLOCKS].misses;
        }
        let peaks = [self.ledgers[BLOCKS].peaks(), self.ledgers[HELD].peaks()];
        let family = |which: usize, lane| fold.family(which, lane, &peaks[which]);
        statistics.allocation = family(BLOCKS, Lane::Allocation);
        statistics.allocated_bytes = family(BLOCKS, Lane::AllocatedBytes);
        statistics.active = family(BLOCKS, Lane::Active);
        statistics.active_bytes = family(BLOCKS, Lane::ActiveBytes);
        statistics.requested_bytes = family(BLOCKS, Lane::RequestedBytes);
        statistics.segment = family(HELD, Lane::Allocation);
        statistics.reserved_bytes = family(HELD, Lane::AllocatedBytes);
        statistics.num_device_alloc = statistics.segment.all.allocated;
        statistics.num_device_free = statistics.segment.all.freed;
        let idle = statistics.segment.all.current - statistics.active.all.current;
        statistics.free_blocks = u64::try_from(idle).unwrap_or(0);
    }

    /// Sets every peak to its current value. Holds all shards for a moment.
    pub(super) fn reset_peaks(&self) {
        let mut shards: Vec<_> = self.cells.iter().map(|cell| cell.state.lock()).collect();
        for which in [BLOCKS, HELD] {
            let counters = shards.iter_mut().map(|shard| &mut shard.counters[which]);
            self.ledgers[which].reset_peaks(counters);
        }
    }

    pub(super) fn reset_accumulated(&self) {
        for cell in &self.cells {
            cell.state.lock().counters.iter_mut().for_each(HeapCounters::reset_accumulated);
        }
    }
}

impl Locked<'_> {
    pub(super) fn get(&self, address: u64) -> Option<&Block> {
        self.shard.blocks.get(&address)
    }

    pub(super) fn get_mut(&mut self, address: u64) -> Option<&mut Block> {
        self.shard.blocks.get_mut(&address)
    }

    /// The live block at an address, of that life if one is given.
    pub(super) fn live(&self, address: u64, mark: Option<Mark>) -> Option<&Block> {
        let fits = |block: &&Block| {
            block.state == State::Live && mark.is_none_or(|mark| mark == block.mark)
        };
        self.get(address).filter(fits)
    }

    fn next_mark(&mut self) -> Mark {
        self.shard.next_mark += 1;
        Mark(self.shard.next_mark)
    }

    /// Adds a block that is in the caller's hands. `None`, and nothing changes, when the address is
    /// known.
    pub(super) fn insert(&mut self, address: u64, mut block: Block) -> Option<Mark> {
        if self.shard.blocks.contains_key(&address) {
            return None;
        }
        let mark = self.next_mark();
        block.mark = mark;
        self.shard.counters[BLOCKS].misses += 1;
        for which in [BLOCKS, HELD] {
            self.count_out(which, address, &block);
        }
        self.shard.blocks.insert(address, block);
        Some(mark)
    }

    /// Hands an idle block out again.
    pub(super) fn revive(&mut self, address: u64, requested_bytes: u64) -> Option<Mark> {
        let mark = self.next_mark();
        let block = self.shard.blocks.get_mut(&address)?;
        (block.state, block.mark, block.requested_bytes) = (State::Live, mark, requested_bytes);
        let block = block.clone();
        self.shard.counters[BLOCKS].hits += 1;
        self.count_out(BLOCKS, address, &block);
        Some(mark)
    }

    /// The caller gave a live block back that still drains.
    pub(super) fn drain(&mut self, address: u64) {
        let Some(block) = self.shard.blocks.get_mut(&address) else { return };
        block.state = State::Draining;
        let (kind, size_bytes) = (block.kind(), block.size_bytes);
        self.shard.counters[BLOCKS].given_back(kind, size_bytes, false);
        self.mark_moved(BLOCKS);
    }

    /// A live or draining block becomes idle.
    pub(super) fn keep(&mut self, address: u64) {
        let Some(block) = self.shard.blocks.get_mut(&address) else { return };
        let was = std::mem::replace(&mut block.state, State::Idle);
        block.uses.clear();
        let block = block.clone();
        self.count_back(BLOCKS, was, address, &block);
    }

    /// Forgets a block, whatever its state.
    pub(super) fn remove(&mut self, address: u64) -> Option<Block> {
        let block = self.shard.blocks.remove(&address)?;
        if block.state != State::Idle {
            self.count_back(BLOCKS, block.state, address, &block);
        }
        self.count_back(HELD, State::Live, address, &block);
        Some(block)
    }

    fn mark_moved(&self, which: usize) {
        self.table.cells[self.number].moved[which].store(true, Ordering::Relaxed);
    }

    fn count_out(&mut self, which: usize, address: u64, block: &Block) {
        let handed = block.handed(address);
        let counters = &mut self.shard.counters[which];
        let requested_bytes = if which == HELD { 0 } else { block.requested_bytes };
        if counters.handed_out(block.kind(), &handed, requested_bytes, false) {
            self.raise(which);
        }
        self.mark_moved(which);
    }

    fn count_back(&mut self, which: usize, was: State, address: u64, block: &Block) {
        let mut done = block.completed(address);
        let counters = &mut self.shard.counters[which];
        // What is held was asked for by nobody in particular.
        if which == HELD {
            done.requested_bytes = 0;
        }
        let passed = match was {
            State::Draining => counters.drained(&done),
            _ => counters.freed(&done, false),
        };
        if passed {
            self.raise(which);
        }
        self.mark_moved(which);
    }

    fn raise(&mut self, which: usize) {
        let view = View { cells: &self.table.cells, which };
        let counters = &mut self.shard.counters[which];
        self.table.ledgers[which].raise(self.number, counters, &view);
    }
}

#[derive(Default)]
struct Fold {
    current: [[Lanes; 3]; 2],
    sums: [[Accumulated; 2]; 2],
}

impl Fold {
    fn add(&mut self, counters: &[HeapCounters; 2]) {
        for (which, own) in counters.iter().enumerate() {
            for (class, sum) in self.current[which].iter_mut().enumerate() {
                *sum = plus(*sum, own.current(class));
            }
            for kind in [PoolKind::Small, PoolKind::Large] {
                let (own, sum) = (own.accumulated(kind), &mut self.sums[which][kind.index()]);
                sum.allocated = plus(sum.allocated, own.allocated);
                sum.freed = plus(sum.freed, own.freed);
            }
        }
    }

    fn family(&self, which: usize, lane: Lane, peaks: &[Lanes; 3]) -> PerPool {
        let (current, sums) = (&self.current[which], &self.sums[which]);
        let of_kind = |kind: PoolKind| Counter {
            current: current[kind.index()].of(lane),
            peak: peaks[kind.index()].of(lane),
            allocated: sums[kind.index()].allocated.of(lane),
            freed: sums[kind.index()].freed.of(lane),
        };
        let (small, large) = (of_kind(PoolKind::Small), of_kind(PoolKind::Large));
        let all = Counter {
            current: current[ALL].of(lane),
            peak: peaks[ALL].of(lane),
            allocated: small.allocated + large.allocated,
            freed: small.freed + large.freed,
        };
        PerPool { all, large, small }
    }
}

fn plus(a: Lanes, b: Lanes) -> Lanes {
    a.zip(b, |a, b| a + b)
}
