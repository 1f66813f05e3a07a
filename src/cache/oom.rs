//! Why nothing helped: the report of a failed request, and what would have.
//!
//! Who else holds the device is told by [`name_holders`], for every strategy that asks a driver.

use std::cmp::Reverse;

use super::cell::HeapCell;
use super::engine::Engine;
use super::growth::{Growth, Refusal};
use super::policy::Plan;
use crate::driver::{Driver, ProcessUsage};
use crate::error::{Holder, LargestFree, OutOfMemory};
use crate::history::Action;
use crate::ids::PoolId;
use crate::size::{PoolKind, human_bytes};
use crate::stats::{ALL, Lane};

/// What the heaps hold that explains the failure.
#[derive(Clone, Copy, Debug, Default)]
struct Held {
    /// Free in other heaps than the request's.
    elsewhere_bytes: u64,
    /// Whether a free block in another heap is large enough.
    elsewhere_fits: bool,
    /// Whether the request's own heap has a fitting block by now.
    fits_now: bool,
    /// Whether the device has virtual memory and expandable segments are off.
    can_expand: bool,
    /// Heaps with segments: expandable ones would leave up to a page of each unused.
    heaps: u64,
}

impl Engine {
    /// Counts the failure and collects every number that explains it. The caller holds the growth
    /// lock and no heap.
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
        let mut report = OutOfMemory {
            device: self.device.device,
            stream: cell.stream(),
            pool: cell.pool(),
            requested_bytes: plan.requested_bytes,
            rounded_bytes: plan.rounded_bytes,
            segment_bytes: plan.segment_bytes,
            device_free_bytes,
            device_total_bytes: info.map(|info| info.total_bytes),
            limit_bytes: growth.limit_bytes,
            reserved_bytes: growth.reserved_bytes(),
            ..OutOfMemory::default()
        };
        let can_expand = self.driver.virtual_memory().is_some() && !growth.miss_policy.expandable;
        let mut held = Held { can_expand, ..Held::default() };
        for other in self.all_heaps(growth) {
            self.add_heap_to_report(&mut report, &mut held, other, cell, plan);
        }
        report.hints = hints(&report, &refusal, held, growth);
        if let Refusal::Driver(error) = refusal {
            report.driver = Some(error);
            name_holders(&mut report, &*self.driver);
        }
        report
    }

    fn add_heap_to_report(
        &self,
        report: &mut OutOfMemory,
        held: &mut Held,
        other: &HeapCell,
        cell: &HeapCell,
        plan: &Plan,
    ) {
        let state = other.lock();
        let now = state.counters.current(ALL);
        let bytes = |lane| u64::try_from(now.of(lane)).unwrap_or(0);
        report.allocated_bytes += bytes(Lane::AllocatedBytes);
        report.draining_bytes += bytes(Lane::ActiveBytes) - bytes(Lane::AllocatedBytes);
        let own = other.number == cell.number;
        held.heaps += u64::from(state.heap.block_count() > 0);
        if own {
            let rules = &state.policy.rules;
            held.fits_now = state.heap.best_fit(plan.kind, plan.rounded_bytes, rules).is_some();
        }
        for kind in [PoolKind::Small, PoolKind::Large] {
            let cached: u64 = state.heap.free_blocks(kind).map(|(_, b)| b.size_bytes).sum();
            match kind {
                PoolKind::Small => report.cached_small_bytes += cached,
                PoolKind::Large => report.cached_large_bytes += cached,
            }
            if other.pool() != PoolId::DEFAULT {
                report.cached_private_bytes += cached;
            }
            let Some(slot) = state.heap.largest_free(kind) else {
                continue;
            };
            let size_bytes = state.heap.view(slot).size_bytes;
            if report.largest_free.is_none_or(|largest| largest.size_bytes < size_bytes) {
                let (stream, pool) = (other.stream(), other.pool());
                report.largest_free = Some(LargestFree { size_bytes, stream, pool });
            }
            if !own {
                held.elsewhere_bytes += cached;
                held.elsewhere_fits |= kind == plan.kind && size_bytes >= plan.rounded_bytes;
            }
        }
    }
}

/// What is cached and what could still be reserved, if segments that give single pages back may serve the
/// request: what is live and what was asked for have room, and a page of each heap besides. Live blocks that
/// lie far apart can keep more.
fn joined(
    report: &OutOfMemory,
    refusal: &Refusal,
    held: Held,
    growth: &Growth,
) -> Option<(u64, u64)> {
    if !held.can_expand || matches!(refusal, Refusal::Forbidden) {
        return None;
    }
    let below_limit = |limit: u64| limit.saturating_sub(report.reserved_bytes);
    let free = report.device_free_bytes?.min(report.limit_bytes.map_or(u64::MAX, below_limit));
    // Private pools keep what they have.
    let kept = report.cached_private_bytes;
    let cached = (report.cached_small_bytes + report.cached_large_bytes).saturating_sub(kept);
    let live = report.allocated_bytes + report.draining_bytes + kept;
    let pages = held.heaps * growth.miss_policy.large_segment_bytes;
    let needed = live.saturating_add(report.rounded_bytes).saturating_add(pages);
    let has_room = needed <= report.reserved_bytes.saturating_add(free);
    (cached > 0 && free < report.rounded_bytes && has_room).then_some((cached, free))
}

/// What would most likely have helped, the surest first.
fn hints(report: &OutOfMemory, refusal: &Refusal, held: Held, growth: &Growth) -> Vec<String> {
    let mut hints = Vec::new();
    let cached = report.cached_small_bytes + report.cached_large_bytes - held.elsewhere_bytes;
    if matches!(refusal, Refusal::Forbidden) {
        hints.push(
            "throw_on_cudamalloc_oom:True refused the request before the driver was asked; raise \
             per_process_memory_fraction."
                .to_owned(),
        );
    }
    if let Refusal::Reserve { reserve_bytes, class } = refusal
        && report.device_total_bytes.is_none_or(|total| report.rounded_bytes <= total)
    {
        let (of, key) = match class {
            Some(class) => (
                format!("of this stream's class '{class}' "),
                "expandable_segments_reserve_by_class",
            ),
            None => (String::new(), "expandable_segments_reserve"),
        };
        hints.push(format!(
            "an expandable segment {of}reserves {}, and a request cannot span two: raise {key}.",
            human_bytes(*reserve_bytes)
        ));
    }
    if let (Some(limit), Some(free)) = (report.limit_bytes, report.device_free_bytes)
        && free >= report.segment_bytes
        && report.reserved_bytes + report.segment_bytes > limit
    {
        hints.push(format!(
            "the limit of {} refused it, the device still has {} free: raise the memory fraction.",
            human_bytes(limit),
            human_bytes(free)
        ));
    }
    if held.fits_now {
        hints.push(
            "a block that fits came free while other streams were waited for, and compat:pytorch \
             does not search again: the same request would succeed now."
                .to_owned(),
        );
    } else if cached >= report.rounded_bytes {
        let remedy = if held.can_expand {
            "expandable_segments:True joins them"
        } else {
            "max_split_size_mb keeps large blocks whole, roundup_power2_divisions makes pieces fit \
             more requests"
        };
        hints.push(format!(
            "{} are cached but cut into pieces that are too small: {remedy}.",
            human_bytes(cached)
        ));
    } else if let Some((cached, free)) = joined(report, refusal, held, growth) {
        hints.push(format!(
            "{} are cached in parts of segments, and {} are free: expandable_segments:True may join them.",
            human_bytes(cached),
            human_bytes(free)
        ));
    }
    if held.elsewhere_fits || held.elsewhere_bytes >= report.rounded_bytes {
        hints.push(format!(
            "{} are cached for other streams or pools, which this request cannot use: allocate on \
             fewer streams.",
            human_bytes(held.elsewhere_bytes)
        ));
    }
    if report.rounded_bytes > report.requested_bytes.saturating_mul(5) / 4
        && growth.policy_of(report.pool).roundup != crate::size::RoundupDivisions::OFF
    {
        hints.push(format!(
            "roundup_power2_divisions rounded {} up to {}: use more divisions or none.",
            human_bytes(report.requested_bytes),
            human_bytes(report.rounded_bytes)
        ));
    }
    hints
}

/// Adds who holds most of the device to the report of a request that the driver refused, and a hint, behind
/// all others, if that is what is missing.
pub(crate) fn name_holders(report: &mut OutOfMemory, driver: &dyn Driver) {
    report.holders = largest_holders(driver);
    report.hints.extend(held_by_others(report));
}

/// Nobody when the driver cannot tell: that is no reason to lose the report.
fn largest_holders(driver: &dyn Driver) -> Vec<Holder> {
    let list = driver.processes().and_then(|processes| processes.list().ok());
    let holder =
        |usage: ProcessUsage| Holder { process: usage.process, used_bytes: usage.used_bytes };
    let mut holders: Vec<_> = list.unwrap_or_default().into_iter().map(holder).collect();
    holders.retain(|holder| holder.used_bytes > 0);
    holders.sort_unstable_by_key(|holder| (Reverse(holder.used_bytes), holder.process));
    holders.truncate(OutOfMemory::HOLDERS_MAX);
    holders
}

/// Others on the device have what is missing.
fn held_by_others(report: &OutOfMemory) -> Option<String> {
    let others =
        report.device_total_bytes.zip(report.device_free_bytes).map_or(0, |(total, free)| {
            total.saturating_sub(free).saturating_sub(report.reserved_bytes)
        });
    if others < report.rounded_bytes {
        return None;
    }
    // Where this process is not on the list it may be there under a number that the host gave it.
    let numbers_are_ours = report.holders.iter().any(Holder::is_this_process);
    let other = report.holders.iter().find(|holder| !holder.is_this_process());
    let other = other.filter(|_| numbers_are_ours);
    let which = other.map_or_else(
        || "look for other processes on it".to_owned(),
        |other| {
            let bytes = human_bytes(other.used_bytes);
            format!("process {} has {bytes}, the most of them", other.process)
        },
    );
    Some(format!("{} of the device are held by others: {which}.", human_bytes(others)))
}
