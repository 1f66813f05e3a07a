//! Invariants that hold whenever no call is running.
//!
//! The blocks of a layout tile its segments. The sizes of the segments add up to the memory that the driver
//! reports as used. The current value of each counter that a layout determines equals a recount. Except for
//! the engine's own check, nothing here depends on how the allocator is implemented.
//!
//! Source of the recount: PyTorch's consistency test of `memory_stats()` against snapshots.

use stratalloc::allocator::{Caching, Counters, DeviceAllocator, PrivatePools};
use stratalloc::error::PoolError;
use stratalloc::history::{BlockStateName, SegmentLayout};
use stratalloc::ids::PoolId;
use stratalloc::size::{MIN_BLOCK_BYTES, PoolKind};
use stratalloc::stats::{PerPool, Statistics, Usage};
use stratalloc::strategies::native::Engine;

use super::{Checked, ensure, ensure_eq};

/// Checks that segments do not overlap, that their blocks tile them, and that no two neighbours are both
/// free.
pub(crate) fn check_layout(segments: &[SegmentLayout]) -> Checked {
    for pair in segments.windows(2) {
        let end = pair[0].address + pair[0].size_bytes;
        ensure!(end <= pair[1].address, "segments overlap at {:#x}", pair[1].address);
    }
    for segment in segments {
        let mut at = segment.address;
        for block in &segment.blocks {
            ensure_eq!(block.address, at, "a block does not begin where the last one ends");
            let whole = block.size_bytes > 0 && block.size_bytes.is_multiple_of(MIN_BLOCK_BYTES);
            ensure!(whole, "block {at:#x} has {} bytes", block.size_bytes);
            let used = block.state != BlockStateName::Inactive;
            ensure!(
                !used || (1..=block.size_bytes).contains(&block.requested_bytes),
                "block {at:#x} of {} bytes serves {}",
                block.size_bytes,
                block.requested_bytes
            );
            at += block.size_bytes;
        }
        ensure_eq!(at, segment.address + segment.size_bytes, "the last block ends elsewhere");
        let both_free = segment
            .blocks
            .windows(2)
            .any(|pair| pair.iter().all(|block| block.state == BlockStateName::Inactive));
        ensure!(!both_free, "free neighbours in segment {:#x}", segment.address);
    }
    Ok(())
}

/// Returns the bytes of all segments, without those of tags that sleep.
pub(crate) fn reserved_bytes(segments: &[SegmentLayout]) -> u64 {
    segments.iter().filter(|segment| !segment.asleep).map(|segment| segment.size_bytes).sum()
}

/// Returns address and requested bytes of every live block, in address order.
pub(crate) fn live_blocks(segments: &[SegmentLayout]) -> Vec<(u64, u64)> {
    let blocks = segments.iter().flat_map(|segment| &segment.blocks);
    let live = blocks.filter(|block| block.state == BlockStateName::ActiveAllocated);
    live.map(|block| (block.address, block.requested_bytes)).collect()
}

/// Computes the current value of every counter that a layout determines.
pub(crate) fn recount(segments: &[SegmentLayout]) -> Statistics {
    let mut counted = Statistics::default();
    for segment in segments {
        let kind = segment.kind;
        // Mapped ranges of expandable segments are counted as bytes but not as segments.
        if !segment.expandable {
            add(&mut counted.segment, kind, 1);
        }
        if !segment.asleep {
            add(&mut counted.reserved_bytes, kind, segment.size_bytes);
        }
        for block in &segment.blocks {
            let size = block.size_bytes;
            if block.state == BlockStateName::Inactive {
                counted.free_blocks += 1;
                if segment.blocks.len() > 1 && !segment.expandable {
                    add(&mut counted.inactive_split, kind, 1);
                    add(&mut counted.inactive_split_bytes, kind, size);
                }
                continue;
            }
            add(&mut counted.active, kind, 1);
            add(&mut counted.active_bytes, kind, size);
            add(&mut counted.requested_bytes, kind, block.requested_bytes);
            if block.state == BlockStateName::ActiveAllocated {
                add(&mut counted.allocation, kind, 1);
                add(&mut counted.allocated_bytes, kind, size);
            }
        }
    }
    counted
}

fn add(family: &mut PerPool, kind: PoolKind, n: u64) {
    let n = i64::try_from(n).expect("sizes fit");
    family.all.current += n;
    match kind {
        PoolKind::Small => family.small.current += n,
        PoolKind::Large => family.large.current += n,
    }
}

/// Returns the counters that a layout determines, with their names.
pub(crate) fn families(statistics: &Statistics) -> [(&'static str, &PerPool); 9] {
    [
        ("allocation", &statistics.allocation),
        ("allocated_bytes", &statistics.allocated_bytes),
        ("active", &statistics.active),
        ("active_bytes", &statistics.active_bytes),
        ("requested_bytes", &statistics.requested_bytes),
        ("inactive_split", &statistics.inactive_split),
        ("inactive_split_bytes", &statistics.inactive_split_bytes),
        ("segment", &statistics.segment),
        ("reserved_bytes", &statistics.reserved_bytes),
    ]
}

/// Checks that the current value of each counter of [`families`] equals the recount, that no peak is below
/// it, and that the number of free blocks is right.
pub(crate) fn check_statistics(statistics: &Statistics, segments: &[SegmentLayout]) -> Checked {
    let counted = recount(segments);
    for ((name, reported), (_, counted)) in families(statistics).into_iter().zip(families(&counted))
    {
        for (pool, reported, counted) in [
            ("all", reported.all, counted.all),
            ("large", reported.large, counted.large),
            ("small", reported.small, counted.small),
        ] {
            ensure_eq!(reported.current, counted.current, "{name}.{pool} and its recount");
            ensure!(reported.peak >= reported.current, "{name}.{pool} has a peak below its value");
        }
    }
    ensure_eq!(statistics.free_blocks, counted.free_blocks, "free blocks and their recount");
    Ok(())
}

/// Checks all invariants. `used_bytes` is the memory that the driver reports as used.
pub(crate) fn check_all(engine: &Engine, used_bytes: u64) -> Result<Vec<SegmentLayout>, String> {
    engine.check().map_err(|broken| format!("{broken:?}"))?;
    let segments = engine.layout();
    check_layout(&segments)?;
    ensure_eq!(reserved_bytes(&segments), used_bytes, "segments and what the driver gave");
    let statistics = Counters::statistics(engine);
    check_statistics(&statistics, &segments)?;
    ensure_eq!(DeviceAllocator::usage(engine), Usage::of(&statistics), "usage and the counters");
    Ok(segments)
}

/// Returns true if the pool's live blocks start at exactly these addresses.
pub(crate) fn holds_exactly(
    pools: &dyn PrivatePools,
    pool: PoolId,
    addresses: &[u64],
) -> Result<bool, PoolError> {
    let mut expected = addresses.to_vec();
    expected.sort_unstable();
    Ok(pools.live_addresses(pool)? == expected)
}
