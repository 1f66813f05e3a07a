//! The settings that a hit needs: a small value that is copied into each heap. A miss also reads
//! `Settings`.

use crate::allocator::PoolOptions;
use crate::config::{Reserve, Settings, Ties};
use crate::heap::{FitRules, TieRule};
use crate::size::{FractionRounding, PoolKind, RoundupDivisions, TIB, fraction_of, segment_bytes};

/// The settings that a hit needs. Each heap has a copy under its own lock.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct HitPolicy {
    pub(super) roundup: RoundupDivisions,
    pub(super) rules: FitRules,
    pub(super) ties: TieRule,
    /// True if searches for large blocks advance the garbage collector's clock: only in the default pool,
    /// and only while there is a limit and a threshold.
    pub(super) clock_runs: bool,
    /// True if the heap belongs to a tag that is not awake. The rules then allow none of its blocks.
    pub(super) asleep: bool,
}

impl HitPolicy {
    pub(super) fn new(settings: &Settings, limited: bool) -> Self {
        Self {
            roundup: settings.roundup,
            rules: FitRules {
                max_split_bytes: settings.max_split_bytes.unwrap_or(u64::MAX),
                oversize_slack_bytes: settings.non_split_rounding_bytes(),
                expandable: settings.expandable_segments,
                oversize_in_expandable: settings.compat.is_pytorch(),
                rest_min_bytes: FitRules::rest_min_bytes(settings.expandable_segments, false),
            },
            ties: tie_rule(settings.compat.decisions().ties),
            clock_runs: limited && settings.garbage_collection_threshold.is_some(),
            asleep: false,
        }
    }

    /// Returns the policy for a private pool. The garbage collector handles only the default pool, and
    /// memory of a pool's own allocator cannot be mapped page by page. A tag always has expandable
    /// segments, but the setting determines how they are split, and which count as oversize.
    ///
    /// Memory of a pool's own allocator may be registered with other processes (NCCL's symmetric memory),
    /// which must all use the same segment at the same step. Their addresses differ, so the order of reuse
    /// must not depend on addresses.
    pub(super) fn in_pool(mut self, options: &PoolOptions, settings: &Settings) -> Self {
        self.ties = tie_rule(settings.ties_in_pool(options.allocator.is_some()));
        self.rules.expandable &= options.allocator.is_none();
        self.rules.rest_min_bytes =
            FitRules::rest_min_bytes(self.rules.expandable, options.no_split);
        self.rules.oversize_in_expandable |= options.tag.is_some() && !self.rules.expandable;
        self.rules.expandable |= options.tag.is_some();
        self.clock_runs = false;
        self
    }

    /// Returns the policy for a tag that is not awake. All its blocks are expandable, so rules that allow
    /// only fixed segments make every request a miss, without a check in the path of a hit.
    pub(super) fn asleep(mut self) -> Self {
        self.rules.expandable = false;
        self.asleep = true;
        self
    }

    /// Returns true if sizes are rounded to multiples of 512 B only, no block is oversize and the garbage
    /// collector's clock stands still.
    pub(super) fn is_plain(&self) -> bool {
        let rounds_to_steps = self.roundup.divisions().iter().any(|&divisions| divisions > 1);
        !rounds_to_steps && self.rules.max_split_bytes == u64::MAX && !self.clock_runs
    }

    /// Returns true if a block of this size counts as oversize.
    #[inline]
    pub(super) const fn is_oversize(&self, block_bytes: u64) -> bool {
        block_bytes >= self.rules.max_split_bytes
    }
}

fn tie_rule(ties: Ties) -> TieRule {
    match ties {
        Ties::Address => TieRule::Address,
        Ties::BlockAge => TieRule::BlockAge,
        Ties::SegmentAge => TieRule::SegmentAge,
    }
}

/// Returns the address space to reserve for an expandable segment: nine eighths of the device's memory,
/// or the configured value if that is less.
///
/// Source: PyTorch's `expandable_segments_reserve`.
pub(super) fn reserve_bytes(
    configured: Option<Reserve>,
    device_total_bytes: u64,
    rounding: FractionRounding,
) -> u64 {
    // 64 TiB is half of a process's address space, and more than any device needs.
    let most = device_total_bytes.saturating_add(device_total_bytes / 8).min(64 * TIB);
    match configured {
        None => most,
        Some(Reserve::Bytes(bytes)) => bytes.min(most),
        Some(Reserve::Fraction(part)) => fraction_of(part, device_total_bytes, rounding).min(most),
    }
}

/// A request with its derived sizes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub(super) requested_bytes: u64,
    pub(super) rounded_bytes: u64,
    pub(super) kind: PoolKind,
    pub(super) segment_bytes: u64,
    /// True if its segment would be expandable.
    pub(super) expandable: bool,
    /// True if the thread has an open capture or the stream may be captured. The request then neither waits
    /// nor releases memory.
    pub(super) capturing: bool,
}

impl Plan {
    pub(super) fn new(requested_bytes: u64, hit: &HitPolicy, settings: &Settings) -> Self {
        let rounded_bytes = hit.roundup.round(requested_bytes);
        Self {
            requested_bytes,
            rounded_bytes,
            kind: PoolKind::of(rounded_bytes),
            segment_bytes: segment_bytes(rounded_bytes, settings.large_segment_bytes),
            expandable: hit.rules.expandable,
            capturing: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Compat, TorchVersion};

    #[test]
    fn private_pools_follow_the_age_of_segments_beside_a_pytorch_that_does() {
        let ties = |compat, running_torch| {
            let settings = Settings { compat, running_torch, ..Settings::default() };
            let hit = HitPolicy::new(&settings, false);
            (hit.ties, hit.in_pool(&PoolOptions::default(), &settings).ties)
        };
        let (address, age) = (TieRule::Address, TieRule::SegmentAge);
        for running in [None, Some(TorchVersion::V2_11), Some(TorchVersion::V2_12)] {
            assert_eq!(ties(Compat::Default, running), (address, address), "{running:?}");
        }
        for running in [TorchVersion::V2_13, TorchVersion::V2_14] {
            assert_eq!(ties(Compat::Default, Some(running)), (address, age), "{running}");
            let compat = Compat::Version(TorchVersion::V2_11);
            assert_eq!(ties(compat, Some(running)), (address, address), "{running}");
        }
        assert_eq!(ties(Compat::Version(TorchVersion::V2_13), None), (age, age));
    }
}
