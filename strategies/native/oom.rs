//! The report of a request that failed. The hints are in `hints`.

use std::cmp::Reverse;

use super::cell::HeapCell;
use super::engine::Engine;
use super::growth::{Growth, Refusal};
use super::hints::{HeapSummary, Why};
use super::policy::Plan;
use crate::driver::name_holders;
use crate::error::{FreeRanges, OutOfMemory};
use crate::heap::{BlockState, BlockView, Heap};
use crate::history::Action;
use crate::ids::PoolId;
use crate::size::PoolKind;
use crate::stats::{ALL, CounterIndex};

impl Engine {
    /// Counts the failure and collects all numbers that explain it. The caller holds the growth lock and
    /// no heap's lock.
    pub(super) fn report_out_of_memory(
        &self,
        growth: &mut Growth,
        cell: &HeapCell,
        plan: &Plan,
        refusal: Refusal,
    ) -> OutOfMemory {
        let info = self.driver.memory_info().ok();
        let device_free_bytes = info.map(|info| info.free_bytes);
        if matches!(refusal, Refusal::Forbidden) {
            growth.counters.num_oom_rejections += 1;
        } else {
            growth.counters.num_ooms += 1;
            let free = device_free_bytes.unwrap_or(0);
            self.record(Action::OutOfMemory, free, plan.rounded_bytes, cell);
        }
        let least = self.least_growth(growth, cell.pool(), plan);
        // PyTorch compares the limit with a fixed segment, even if pages are mapped.
        let segment_bytes = if growth.is_exact() { plan.segment_bytes } else { least.bytes };
        let mut report = OutOfMemory {
            device: self.device.device,
            stream: cell.stream(),
            pool: cell.pool(),
            requested_bytes: plan.requested_bytes,
            rounded_bytes: plan.rounded_bytes,
            segment_bytes,
            device_free_bytes,
            device_total_bytes: info.map(|info| info.total_bytes),
            limit_bytes: growth.limit_bytes,
            reserved_bytes: growth.reserved_bytes(),
            ..OutOfMemory::default()
        };
        let can_expand =
            self.driver.virtual_memory().is_some() && !growth.settings.expandable_segments;
        let page_bytes = growth.settings.large_segment_bytes;
        let mut summary = HeapSummary::new(can_expand.then_some(page_bytes));
        for other in self.all_heaps(growth) {
            self.add_heap_to_report(&mut report, &mut summary, other, cell, plan);
        }
        report.free.sort_unstable_by_key(|free| Reverse(free.largest_bytes));
        report.hints = Why { report: &report, refusal: &refusal, summary, growth, least }.hints();
        report.free.truncate(OutOfMemory::FREE_MAX);
        if let Refusal::Driver(error) = refusal {
            report.driver = Some(error);
            name_holders(&mut report, &*self.driver);
        }
        report
    }

    fn add_heap_to_report(
        &self,
        report: &mut OutOfMemory,
        summary: &mut HeapSummary,
        other: &HeapCell,
        cell: &HeapCell,
        plan: &Plan,
    ) {
        let state = other.lock();
        // The blocks of a tag that sleeps hold no memory of the device.
        if state.policy.asleep {
            return;
        }
        let now = state.counters.current(ALL);
        let bytes = |counter| u64::try_from(now.of(counter)).unwrap_or(0);
        report.allocated_bytes += bytes(CounterIndex::AllocatedBytes);
        report.draining_bytes +=
            bytes(CounterIndex::ActiveBytes) - bytes(CounterIndex::AllocatedBytes);
        let own = other.number == cell.number;
        let releases = other.pool() == PoolId::DEFAULT || own;
        summary.add_heap(&state.heap, releases, bytes(CounterIndex::RequestedBytes));
        if own {
            let rules = &state.policy.rules;
            summary.fits_now = state.heap.best_fit(plan.kind, plan.rounded_bytes, rules).is_some();
            summary.add_cut_segments(&state.heap);
        }
        report.free.extend(free_ranges(&state.heap, other));
        for kind in [PoolKind::Small, PoolKind::Large] {
            let blocks = state.heap.free_blocks(kind);
            let (cached, largest) =
                blocks.fold((0, 0), |(sum, _), (_, b)| (sum + b.size_bytes, b.size_bytes));
            match kind {
                PoolKind::Small => report.cached_small_bytes += cached,
                PoolKind::Large => report.cached_large_bytes += cached,
            }
            if other.pool() != PoolId::DEFAULT {
                report.cached_private_bytes += cached;
            }
            if !own {
                let same_pool = other.pool() == cell.pool();
                let there = if same_pool { &mut summary.streams } else { &mut summary.pools };
                there.cached_bytes += cached;
                let reaches = same_pool || other.stream() == cell.stream();
                there.fits |= reaches && kind == plan.kind && largest >= plan.rounded_bytes;
            }
        }
    }
}

/// Returns the free bytes of a heap, if any, and the other bytes of the same segments.
fn free_ranges(heap: &Heap, cell: &HeapCell) -> Option<FreeRanges> {
    let mut all = FreeRanges { stream: cell.stream(), pool: cell.pool(), ..FreeRanges::default() };
    for head in heap.segment_heads() {
        let is_free = |block: &BlockView| block.state == BlockState::Free;
        if !heap.segment_blocks(head).any(|block| is_free(&block)) {
            continue;
        }
        for block in heap.segment_blocks(head) {
            if is_free(&block) {
                all.bytes += block.size_bytes;
                all.ranges += 1;
                all.largest_bytes = all.largest_bytes.max(block.size_bytes);
            } else {
                all.between_blocks += 1;
                all.between_bytes += block.size_bytes;
            }
        }
    }
    (all.ranges > 0).then_some(all)
}
