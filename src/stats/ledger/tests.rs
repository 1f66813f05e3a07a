//! Compares the ledger with one plain counter, and counts its checks of other heaps.

use std::cell::{Cell, RefCell};

use super::*;
use crate::heap::{AllocatedBlock, Completed, Slot, SplitChange};
use crate::size::PoolKind;
use crate::stats::heap_counters::{ALL, COUNTERS, CounterIndex};

/// The heaps of one thread. A borrowed heap counts as locked.
struct Model {
    ledger: Ledger,
    counters: Vec<RefCell<HeapCounters>>,
    checks: Cell<u64>,
}

/// A block of a heap, and how its allocation changes the free parts of its segment.
#[derive(Clone, Copy, Debug)]
struct Block {
    heap: u8,
    kind: PoolKind,
    size_bytes: u64,
    inactive: SplitChange,
    /// Whether it joins two free parts when it becomes free.
    joins: bool,
    oversize: bool,
}

impl Block {
    fn small(heap: u8, size_bytes: u64) -> Self {
        let bytes = -i64::try_from(size_bytes).unwrap();
        let inactive = SplitChange { count: 0, bytes };
        Self { heap, kind: PoolKind::Small, size_bytes, inactive, joins: false, oversize: false }
    }

    /// Returns how it changes the free parts when it becomes free.
    fn freed_parts(&self) -> SplitChange {
        let SplitChange { count, bytes } = self.inactive;
        SplitChange { count: if self.joins { -1 } else { -count }, bytes: -bytes }
    }

    fn completed(&self) -> Completed {
        Completed {
            size_bytes: self.size_bytes,
            requested_bytes: self.size_bytes / 2,
            kind: self.kind,
            inactive: self.freed_parts(),
        }
    }
}

impl Heaps for Model {
    fn with_counters<R>(&self, heap: u32, read: impl FnOnce(&mut HeapCounters) -> R) -> Option<R> {
        self.checks.set(self.checks.get() + 1);
        let mut counters = self.counters[heap as usize].try_borrow_mut().ok()?;
        Some(read(&mut counters))
    }
}

impl Model {
    fn of(heaps: usize) -> Self {
        let counters = (0..heaps).map(|_| RefCell::default()).collect();
        Self { ledger: Ledger::default(), counters, checks: Cell::new(0) }
    }

    fn change(&self, block: Block, change: impl FnOnce(&mut HeapCounters) -> bool) {
        let counters = &mut *self.counters[usize::from(block.heap)].borrow_mut();
        if change(counters) {
            self.ledger.list(block.heap.into(), block.kind, counters, self);
        }
    }

    fn take(&self, block: Block) -> Block {
        let Block { kind, size_bytes, inactive, oversize, .. } = block;
        let out = AllocatedBlock { slot: Slot::NONE, address: 0, size_bytes, kind, inactive };
        let counters = &mut *self.counters[usize::from(block.heap)].borrow_mut();
        let parts = counters.count_parts(kind, inactive);
        if counters.allocated(&out, parts, size_bytes / 2, oversize) {
            self.ledger.raise_limits(block.heap.into(), kind, counters, self);
        }
        block
    }

    fn free(&self, block: Block) {
        let done = block.completed();
        let counters = &mut *self.counters[usize::from(block.heap)].borrow_mut();
        let parts = counters.count_parts(done.kind, done.inactive);
        if counters.freed(&done, parts, block.oversize) {
            self.ledger.park(block.heap.into(), block.kind, counters, self);
        }
    }

    fn drain(&self, block: Block) {
        let Block { kind, size_bytes, oversize, .. } = block;
        self.change(block, |counters| counters.began_draining(kind, size_bytes, oversize));
    }

    fn complete(&self, block: Block) {
        self.change(block, |counters| counters.drained(&block.completed()));
    }

    fn peaks(&self) -> [[i64; COUNTERS]; CLASSES] {
        self.ledger.peaks().map(|peaks| peaks.0)
    }

    fn held(&self) -> [[i64; COUNTERS]; CLASSES] {
        let mut held = [[0; COUNTERS]; CLASSES];
        for counters in &self.counters {
            for (class, held) in held.iter_mut().enumerate() {
                let current = counters.borrow().current(class).0;
                held.iter_mut().zip(current).for_each(|(held, current)| *held += current);
            }
        }
        held
    }

    /// Returns the sums of all limits.
    fn limits(&self) -> [[i64; COUNTERS]; CLASSES] {
        let mut sums = [CounterValues::default(); CLASSES];
        let state = self.ledger.state.lock();
        for kind in [PoolKind::Small, PoolKind::Large] {
            let [rest, rest_of_both] = state.rest.limits(kind);
            for (class, rest) in [(kind.index(), rest), (ALL, rest_of_both)] {
                for more in [state.parked.of(kind), rest] {
                    sums[class] = sums[class].zip(more, |sum, limit| sum + limit);
                }
            }
        }
        for counters in &self.counters {
            for kind in [PoolKind::Small, PoolKind::Large] {
                let limits = counters.borrow().limits(kind);
                for (class, limits) in [kind.index(), ALL].into_iter().zip(limits) {
                    sums[class] = sums[class].zip(limits, |sum, limit| sum + limit);
                }
            }
        }
        sums.map(|sums| sums.0)
    }

    /// Returns the number of checks of heaps since the last call.
    fn checks(&self) -> u64 {
        self.checks.replace(0)
    }
}

/// One counter for all blocks, without heaps.
#[derive(Default)]
struct Plain {
    held: [[i64; COUNTERS]; CLASSES],
    peak: [[i64; COUNTERS]; CLASSES],
}

impl Plain {
    /// Adds a block. The four factors are for live, active, free parts and oversize counters.
    fn add(&mut self, block: Block, [live, active, parts, oversize]: [i64; 4]) {
        let size = i64::try_from(block.size_bytes).unwrap();
        let SplitChange { count, bytes } = match parts {
            1 => block.inactive,
            -1 => block.freed_parts(),
            _ => SplitChange::default(),
        };
        let change = [
            live,
            live * size,
            active,
            active * size,
            active * (size / 2),
            count,
            bytes,
            oversize * i64::from(block.oversize),
        ];
        for class in [block.kind.index(), ALL] {
            for (counter, change) in change.into_iter().enumerate() {
                let held = &mut self.held[class][counter];
                *held += change;
                self.peak[class][counter] = self.peak[class][counter].max(*held);
            }
        }
    }
}

quickcheck::quickcheck! {
    fn peaks_equal_one_plain_counter(steps: Vec<(u8, u8, u16, i8)>) -> bool {
        const HEAPS: u8 = 5;
        let (model, mut plain) = (Model::of(HEAPS.into()), Plain::default());
        let (mut live, mut draining): (Vec<Block>, Vec<Block>) = (Vec::new(), Vec::new());
        for (n, what, size, split) in steps {
            match (what % 8, live.pop(), draining.pop()) {
                (0..=2, Some(block), kept) => {
                    draining.extend(kept);
                    model.free(block);
                    plain.add(block, [-1, -1, -1, -1]);
                }
                (3, Some(block), kept) => {
                    draining.extend(kept);
                    model.drain(block);
                    plain.add(block, [-1, 0, 0, -1]);
                    draining.insert(0, block);
                }
                (4, kept, Some(block)) => {
                    live.extend(kept);
                    model.complete(block);
                    plain.add(block, [0, -1, -1, 0]);
                }
                (6, kept, other) if n & 3 == 0 => {
                    live.extend(kept);
                    draining.extend(other);
                    let [count, bytes, ..] = plain.held[ALL];
                    assert_eq!(model.ledger.live(&model), Some(LiveBlocks { count, bytes }));
                }
                (5, kept, other) if n < 8 => {
                    live.extend(kept);
                    draining.extend(other);
                    let mut heaps: Vec<_> = model.counters.iter().map(|c| c.borrow_mut()).collect();
                    model.ledger.reset_peaks(heaps.iter_mut().map(|heap| &mut **heap));
                    plain.peak = plain.held;
                }
                (_, kept, other) => {
                    live.extend(kept);
                    draining.extend(other);
                    let kind = if n & 16 == 0 { PoolKind::Small } else { PoolKind::Large };
                    let mut inactive = SplitChange { count: split.signum().into(), bytes: split.into() };
                    if what & 8 != 0 && split < 0 {
                        // Placed inside a free part.
                        inactive.count = 1;
                    }
                    let (joins, oversize) = (n & 64 != 0, n & 32 != 0);
                    // Some blocks have more than 1 TiB.
                    let size_bytes = u64::from(size) << if n & 128 == 0 { 0 } else { 36 };
                    let block = Block { heap: n % HEAPS, kind, size_bytes, inactive, joins, oversize };
                    live.insert(0, model.take(block));
                    plain.add(block, [1, 1, 1, 1]);
                }
            }
            assert_eq!(model.limits(), model.peaks());
            assert_eq!((model.held(), model.peaks()), (plain.held, plain.peak));
        }
        true
    }
}

/// Allocates and frees 20 blocks of mixed sizes per request, on each heap in turn.
fn serve(model: &Model, heaps: u8, requests: u64) {
    for request in 0..requests {
        let heap = u8::try_from(request % u64::from(heaps)).unwrap();
        let size = |n| 512 * (1 + (request * 20 + n) * 7919 % 199);
        let blocks: Vec<_> = (0..20).map(|n| model.take(Block::small(heap, size(n)))).collect();
        blocks.into_iter().for_each(|block| model.free(block));
    }
}

#[test]
fn a_thread_that_cycles_over_128_heaps_checks_one_a_pair_and_two_a_request() {
    let model = Model::of(128);
    // Raises all peaks, except that of the number of blocks, far above the values that follow.
    let large: Vec<_> = (0..4).map(|heap| model.take(Block::small(heap, 1 << 20))).collect();
    large.into_iter().for_each(|block| model.free(block));
    let pairs = |rounds: u64| {
        for _ in 0..rounds {
            (0..128).for_each(|heap| model.free(model.take(Block::small(heap, 512))));
        }
    };
    pairs(3);
    model.checks();
    pairs(10);
    assert!(model.checks() <= 10 * 128 * 2, "pairs");

    serve(&model, 128, 128 * 3);
    model.checks();
    serve(&model, 128, 128 * 10);
    let checks = model.checks();
    assert!(checks <= 128 * 10 * 4, "{checks} checks for {} requests", 128 * 10);
}

#[test]
fn heaps_that_are_used_at_once_are_checked_less_than_once_a_call() {
    const HEAPS: u8 = 16;
    let model = Model::of(HEAPS.into());
    let mut held: Vec<Vec<Block>> = vec![Vec::new(); HEAPS.into()];
    let mut random = 1u64;
    let mut steps = |count: u64| {
        for _ in 0..count {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let heap = u8::try_from(random >> 60).unwrap();
            let blocks = &mut held[usize::from(heap)];
            if blocks.len() == 8 {
                model.free(blocks.remove(0));
            } else {
                let size = 512 * (1 + (random >> 40) % 512);
                blocks.push(model.take(Block::small(heap, size)));
            }
        }
    };
    steps(10_000);
    model.checks();
    steps(10_000);
    let checks = model.checks();
    assert!(checks <= 5_000, "{checks} checks for 10,000 calls");
}

#[test]
fn live_blocks_are_counted_without_a_check_of_unused_heaps() {
    let model = Model::of(128);
    let mut held = Vec::new();
    for heap in 0..128 {
        // Spare of both kinds, beyond the room, and of a block that still waits for a stream.
        let large = Block { kind: PoolKind::Large, ..Block::small(heap, 4096) };
        let all = [Block::small(heap, 512), large, Block::small(heap, 1024), large];
        let [small, large, waiting, kept] = all.map(|block| model.take(block));
        model.free(small);
        model.free(large);
        model.drain(waiting);
        held.push(kept);
    }
    let live = || model.ledger.live(&model);
    let expected = Some(LiveBlocks { count: 128, bytes: 128 * 4096 });
    assert_eq!([live(), live()], [expected; 2]);
    model.checks();
    assert_eq!((live(), model.checks()), (expected, 0));
    model.free(model.take(Block::small(7, 512)));
    model.checks();
    assert_eq!(live(), expected);
    assert!(model.checks() <= 2, "only of heaps that were used since");
    assert_eq!(model.limits(), model.peaks());

    let busy = model.counters[0].borrow_mut();
    assert_eq!(live(), expected, "an unlisted heap is not visited");
    drop(busy);
    model.free(held.swap_remove(0));
    let _busy = model.counters[0].borrow_mut();
    assert_eq!(live(), None, "a busy heap that may have spare");
}

#[test]
fn a_heap_that_alternates_between_kinds_checks_no_other() {
    let model = Model::of(2);
    let pair = |heap, kind| {
        let block = Block { kind, ..Block::small(heap, 512) };
        model.free(model.take(block));
    };
    pair(1, PoolKind::Small);
    for _ in 0..3 {
        pair(0, PoolKind::Small);
        pair(0, PoolKind::Large);
    }
    model.checks();
    for _ in 0..10 {
        pair(0, PoolKind::Small);
        pair(0, PoolKind::Large);
    }
    assert_eq!(model.checks(), 0);
    let [small, large, all] = model.peaks();
    assert_eq!([small[0], large[0], all[0]], [1, 1, 1]);
}

#[test]
fn a_block_placed_inside_a_free_part_leaves_one_part_more_and_fewer_bytes() {
    let (model, mut plain) = (Model::of(1), Plain::default());
    let front = SplitChange { count: 1, bytes: 4096 };
    let middle = SplitChange { count: 1, bytes: -1024 };
    for inactive in [front, middle] {
        let block = Block { inactive, ..Block::small(0, 1024) };
        model.take(block);
        plain.add(block, [1, 1, 1, 1]);
        assert_eq!((model.held(), model.peaks()), (plain.held, plain.peak));
    }
    let sums = model.counters[0].borrow().accumulated(PoolKind::Small);
    let of = |counter| [sums.allocated.of(counter), sums.freed.of(counter)];
    assert_eq!(of(CounterIndex::InactiveSplit), [2, 0]);
    assert_eq!(of(CounterIndex::InactiveSplitBytes), [4096, 1024]);
}

#[test]
fn a_heap_that_is_busy_counts_at_its_limit() {
    let model = Model::of(2);
    model.free(model.take(Block::small(0, 4096)));
    let busy = model.counters[0].borrow_mut();
    let block = model.take(Block::small(1, 1024));
    let bytes = |peaks: [[i64; COUNTERS]; CLASSES]| peaks[ALL][1];
    assert_eq!(bytes(model.peaks()), 4096 + 1024, "too high by what the busy one may hold");
    drop(busy);
    let another = model.take(Block::small(1, 4096));
    assert_eq!(bytes(model.peaks()), 4096 + 1024, "exact again: both together are as much");
    let third = model.take(Block::small(0, 512));
    assert_eq!(bytes(model.peaks()), 4096 + 1024 + 512);
    [block, another, third].into_iter().for_each(|block| model.free(block));
    assert_eq!(model.held(), [[0; COUNTERS]; CLASSES]);
}
