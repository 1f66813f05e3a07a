//! The garbage collector: near the limit, releases the large segments that were free longest.
//!
//! Age is counted in searches for large blocks, not in time. A pass releases every free segment that is
//! at least as old as their average.
//!
//! Source: PyTorch's `garbage_collection_threshold`.

use parking_lot::MutexGuard;

use super::engine::Engine;
use super::growth::Growth;
use super::inspect::Collection;
use super::release::Candidate;
use crate::error::DriverError;
use crate::size::{PoolKind, fraction_of};

impl Growth {
    /// Returns how many bytes the collector should release: 0 if no threshold is set or reached.
    pub(super) fn collectable_bytes(&self) -> u64 {
        let threshold = self.settings.garbage_collection_threshold;
        let (Some(limit), Some(threshold)) = (self.limit_bytes, threshold) else { return 0 };
        let collected_from = fraction_of(threshold, limit, self.settings.compat.rounding());
        self.reserved_bytes().saturating_sub(collected_from)
    }
}

impl Engine {
    /// Runs the collector if the threshold is exceeded. Neither waits for events nor processes them.
    pub(super) fn collect_idle(
        &self,
        growth: &mut MutexGuard<'_, Growth>,
    ) -> Result<(), DriverError> {
        let wanted = growth.collectable_bytes();
        if wanted == 0 {
            return Ok(());
        }
        let mut idle = Self::idle_segments(&self.heaps.of_default_pool(), PoolKind::Large);
        let mut released = 0;
        while released < wanted && !idle.is_empty() {
            let (old, young) = self.by_age(idle);
            for candidate in &old {
                released += self.release(growth, candidate)?;
            }
            if old.is_empty() {
                break;
            }
            idle = young;
        }
        // Near the limit the collector runs at each miss and usually releases nothing, which is not
        // logged.
        if released > 0 {
            self.note_step("garbage_collection_threshold", released);
        }
        Ok(())
    }

    /// Returns the segments that one pass releases, and the younger ones.
    #[expect(clippy::cast_precision_loss, reason = "the very arithmetic of the source: doubles")]
    fn by_age<'a>(&self, idle: Vec<Candidate<'a>>) -> (Vec<Candidate<'a>>, Vec<Candidate<'a>>) {
        let now = self.now();
        let age = |candidate: &Candidate<'_>| now.saturating_sub(candidate.block.birth);
        let average = idle.iter().map(age).sum::<u64>() as f64 / idle.len() as f64;
        idle.into_iter().partition(|candidate| age(candidate) as f64 >= average)
    }

    /// Returns the segments that the garbage collector would release now. `None` if the threshold is not
    /// exceeded or no segment is free. Changes nothing.
    pub(super) fn predict_collection(&self, growth: &Growth) -> Option<Collection> {
        let wanted = growth.collectable_bytes();
        let cells = self.heaps.of_default_pool();
        let mut idle = Self::idle_segments(&cells, PoolKind::Large);
        if wanted == 0 || idle.is_empty() {
            return None;
        }
        let small = Self::idle_segments(&cells, PoolKind::Small).len();
        let mut collection =
            Collection { idle_segments: idle.len() + small, ..Collection::default() };
        while collection.releases.bytes < wanted && !idle.is_empty() {
            let (old, young) = self.by_age(idle);
            if old.is_empty() {
                break;
            }
            old.iter().for_each(|candidate| collection.releases.add(&candidate.block));
            idle = young;
        }
        Some(collection)
    }
}
