//! Combining the counters of all heaps into the public statistics, and resetting them.

use super::cell::HeapGuard;
use super::engine::Engine;
use super::growth::Growth;
use crate::allocator::Counters;
use crate::size::PoolKind;
use crate::stats::{
    ALL, Accumulated, Counter, CounterIndex, CounterValues, HeapCounters, PerPool, Statistics,
};

#[derive(Default)]
struct Fold {
    current: [CounterValues; 3],
    sums: [Accumulated; 2],
}

impl Fold {
    fn add(&mut self, counters: &HeapCounters) {
        for (class, sum) in self.current.iter_mut().enumerate() {
            *sum = plus(*sum, counters.current(class));
        }
        for kind in [PoolKind::Small, PoolKind::Large] {
            let own = counters.accumulated(kind);
            let sum = &mut self.sums[kind.index()];
            sum.allocated = plus(sum.allocated, own.allocated);
            sum.freed = plus(sum.freed, own.freed);
        }
    }

    fn per_pool(&self, counter: CounterIndex, peaks: &[CounterValues; 3]) -> PerPool {
        let of_kind = |kind: PoolKind| {
            let sums = self.sums[kind.index()];
            Counter {
                current: self.current[kind.index()].of(counter),
                peak: peaks[kind.index()].of(counter),
                allocated: sums.allocated.of(counter),
                freed: sums.freed.of(counter),
            }
        };
        let (small, large) = (of_kind(PoolKind::Small), of_kind(PoolKind::Large));
        let all = Counter {
            current: self.current[ALL].of(counter),
            peak: peaks[ALL].of(counter),
            allocated: small.allocated.wrapping_add(large.allocated),
            freed: small.freed.wrapping_add(large.freed),
        };
        PerPool { all, large, small }
    }
}

fn plus(a: CounterValues, b: CounterValues) -> CounterValues {
    a.zip(b, i64::wrapping_add)
}

impl Growth {
    /// Resets the reserved-byte counters of private pools, and removes those that are then zero.
    fn reset_pools(&mut self, reset: fn(&mut PerPool)) {
        self.reserved_by_pool.values_mut().for_each(reset);
        self.reserved_by_pool.retain(|_, reserved| reserved.all != Counter::default());
    }
}

impl Counters for Engine {
    /// Returns all counters. Exact if no call overlaps. With overlapping calls each heap is read at a
    /// different moment, and peaks may be too high, never too low.
    fn statistics(&self) -> Statistics {
        let growth = self.growth.lock();
        let mut fold = Fold::default();
        let mut statistics = growth.counters.clone();
        for cell in self.heaps.all() {
            let state = cell.lock();
            fold.add(&state.counters);
            statistics.hits += state.counters.hits;
            statistics.misses += state.counters.misses;
            // Every block is active, free or unmapped, so this needs no walk over the free blocks.
            let active = state.counters.current(ALL).of(CounterIndex::Active).unsigned_abs();
            let known = state.heap.block_count() - state.heap.unmapped_count();
            statistics.free_blocks += known as u64 - active;
        }
        statistics.paused_bytes = growth.pools.tags().map(|(_, tag)| tag.asleep_bytes()).sum();
        let peaks = self.ledger.peaks();
        for (family, counter) in [
            (&mut statistics.allocation, CounterIndex::Allocation),
            (&mut statistics.allocated_bytes, CounterIndex::AllocatedBytes),
            (&mut statistics.active, CounterIndex::Active),
            (&mut statistics.active_bytes, CounterIndex::ActiveBytes),
            (&mut statistics.requested_bytes, CounterIndex::RequestedBytes),
            (&mut statistics.inactive_split, CounterIndex::InactiveSplit),
            (&mut statistics.inactive_split_bytes, CounterIndex::InactiveSplitBytes),
        ] {
            *family = fold.per_pool(counter, &peaks);
        }
        statistics.oversize_allocations = fold.per_pool(CounterIndex::Oversize, &peaks).all;
        let by_pool = growth.reserved_by_pool.iter();
        statistics.reserved_by_pool = by_pool.map(|(pool, reserved)| (*pool, *reserved)).collect();
        statistics
    }

    /// Sets every peak to its current value. Holds the locks of all heaps at once.
    fn reset_peaks(&self) {
        let mut growth = self.growth.lock();
        let mut states: Vec<HeapGuard<'_>> = self.heaps.all().map(|cell| cell.lock()).collect();
        self.ledger.reset_peaks(states.iter_mut().map(|state| &mut state.counters));
        growth.counters.reset_peaks();
        growth.reset_pools(PerPool::reset_peaks);
        growth.reserved.store(growth.counters.reserved_bytes.all);
    }

    /// Sets accumulated counters to zero; current values and peaks stay.
    fn reset_accumulated(&self) {
        let mut growth = self.growth.lock();
        for cell in self.heaps.all() {
            cell.lock().counters.reset_accumulated();
        }
        growth.reset_pools(PerPool::reset_accumulated);
        growth.counters.reset_accumulated();
    }
}
