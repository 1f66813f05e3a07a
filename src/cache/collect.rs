//! The collector: near the limit, releases the large segments that were idle longest.
//!
//! Age is counted in searches of the large pool, not in time. A pass releases every idle segment at
//! least as old as their average.
//!
//! Source: PyTorch's `garbage_collection_threshold`.

use std::sync::atomic::Ordering;

use parking_lot::MutexGuard;

use super::engine::Engine;
use super::growth::Growth;
use super::release::Candidate;
use crate::error::DriverError;
use crate::size::{PoolKind, fraction_of};

impl Growth {
    /// How many bytes the collector should release; 0 when it is not due.
    pub(super) fn collectable_bytes(&self) -> u64 {
        let (Some(limit), Some(threshold)) = (self.limit_bytes, self.miss_policy.collect_above)
        else {
            return 0;
        };
        self.reserved_bytes().saturating_sub(fraction_of(threshold, limit))
    }
}

impl Engine {
    /// Runs the collector if it is due. Neither waits for events nor processes them.
    pub(super) fn collect_idle(
        &self,
        growth: &mut MutexGuard<'_, Growth>,
    ) -> Result<(), DriverError> {
        let wanted = growth.collectable_bytes();
        if wanted == 0 {
            return Ok(());
        }
        let now = self.clock.load(Ordering::Relaxed);
        let age = |candidate: &Candidate<'_>| now.saturating_sub(candidate.block.birth);
        let mut idle = Self::idle_segments(&self.heaps.of_default_pool(), PoolKind::Large);
        let mut released = 0;
        while released < wanted && !idle.is_empty() {
            let average = average(idle.iter().map(age));
            let (old, young): (Vec<_>, Vec<_>) =
                idle.into_iter().partition(|candidate| at_least(age(candidate), average));
            for candidate in &old {
                released += self.release(growth, candidate)?;
            }
            if old.is_empty() {
                break;
            }
            idle = young;
        }
        // Where the limit is near the collector runs at each miss, and most often finds nothing.
        if released > 0 {
            self.note_step("garbage_collection_threshold", released);
        }
        Ok(())
    }
}

#[expect(clippy::cast_precision_loss, reason = "the very arithmetic of the source: doubles")]
fn average(ages: impl ExactSizeIterator<Item = u64>) -> f64 {
    let count = ages.len() as f64;
    ages.sum::<u64>() as f64 / count
}

#[expect(clippy::cast_precision_loss, reason = "the very arithmetic of the source: doubles")]
fn at_least(age: u64, average: f64) -> bool {
    age as f64 >= average
}
