//! Infers the calls and moments of the recorded program that no entry of a recording contains.
//!
//! Each function compares what the recording shows with what the engine would do (`Engine::predict`). Where
//! two explanations lead to the same events and the same state, either is taken.

use std::collections::HashSet;

use super::{Misfit, Verifier, asked_by};
use crate::run::ReplayError;
use crate::trace::TraceEvent;
use stratalloc::allocator::{PoolOptions, PrivatePools};
use stratalloc::history::{Action, Event};
use stratalloc::ids::PoolId;
use stratalloc::strategies::native::{Collection, Prediction, Releases};

impl Verifier<'_> {
    /// Returns true if the request was made during a capture, or is treated so. `segments` are its segment
    /// events. Up to 2.12, PyTorch treats all requests that are routed to private pools as captured. From
    /// 2.13 on, a pool (n, 0) is that of a capture. A capture may also use a pool of the program, (0, n):
    /// that shows only in a failed request that did not release the free memory of the default pool.
    pub(super) fn is_captured(&self, request: &TraceEvent, segments: &[TraceEvent]) -> bool {
        let failed_at_once = || {
            request.action == Action::OutOfMemory
                && segments.iter().all(|event| event.reserved_change() >= 0)
                && self.engine.has_idle_memory(PoolId::DEFAULT)
        };
        private_pool(request)
            .is_some_and(|pool| self.routing_is_capture || pool.capture != 0 || failed_at_once())
    }

    /// Returns true if the recorded request found no memory, waited for events and then went on without a
    /// second search. Before the completions no free block fitted and no segment could be allocated
    /// (`before`). After them a free block fits and no work is pending, and yet the request failed or
    /// allocated a segment. `before` is `None` if the request cannot have waited.
    pub(super) fn is_retry(
        &self,
        before: Option<Prediction>,
        pool: PoolId,
        request: &TraceEvent,
    ) -> bool {
        let waits = matches!(before, Some(Prediction::Limit(own)) if own.addresses.is_empty());
        waits
            && self.lanes.pending() == 0
            && matches!(self.engine.predict(pool, asked_by(request)), Prediction::Hit(_))
    }

    /// Returns true if an explicit call caused the releases at the start of `rest`, not the request. Counts
    /// the releases of requests.
    pub(super) fn is_explicit(
        &mut self,
        rest: &[TraceEvent],
        pool: PoolId,
        request: Option<&TraceEvent>,
    ) -> bool {
        let Some(first) = rest.first().filter(|event| event.reserved_change() < 0) else {
            return false;
        };
        let Some(request) = request.filter(|_| !first.empty_cache) else {
            return true;
        };
        // A request that releases everything waits for all events, begins with the default pool, and then
        // grows or fails.
        if private_pool(first).is_some_and(|of| of != pool) {
            let grew = rest.last().is_some_and(|event| event.reserved_change() > 0);
            let may_be_own = grew || request.action == Action::OutOfMemory;
            if !may_be_own || self.lanes.pending() > 0 || self.keeps_idle_memory(rest) {
                return true;
            }
        }
        match self.engine.predict(pool, asked_by(request)) {
            Prediction::Collect(own) => {
                let is_explicit = is_beyond(rest, &own);
                self.result.collections += u64::from(!is_explicit);
                is_explicit
            }
            // The request first releases oversize blocks, if it has any, and then everything, unless these
            // suffice or it is captured.
            Prediction::Limit(own) => {
                let is_all = own.suffices || self.is_captured(request, rest);
                let is_own = begins_with(rest, |event| event.reserved_change() < 0, &own, is_all);
                let is_served = is_own && request.action != Action::OutOfMemory;
                self.result.limit_releases += u64::from(is_served);
                !is_own
            }
            Prediction::Hit(_) | Prediction::Grow | Prediction::Refuse => true,
        }
    }

    /// Returns true if the default pool, or a private pool without users that the releases at the start of
    /// `rest` leave out, has free memory. A request that releases private pools releases all of these.
    fn keeps_idle_memory(&self, rest: &[TraceEvent]) -> bool {
        let pools: &dyn PrivatePools = self.engine;
        let releases = rest.iter().take_while(|event| event.reserved_change() < 0);
        let released: HashSet<PoolId> = releases.filter_map(private_pool).collect();
        let known = self.builder.workload.pools.iter().copied();
        let mut kept = known
            .filter(|pool| pools.pool_users(*pool) == Some(0) && !released.contains(pool))
            .chain([PoolId::DEFAULT]);
        kept.any(|pool| self.engine.has_idle_memory(pool))
    }

    /// Creates a private pool when a request first uses it.
    pub(super) fn add_pool(&mut self, pool: PoolId) -> Result<(), ReplayError> {
        if pool == PoolId::DEFAULT || !self.pools.insert(pool) {
            return Ok(());
        }
        let pools: &dyn PrivatePools = self.engine;
        let made = pools.create_pool(pool, PoolOptions::default());
        made.map_err(|error| ReplayError::Alloc(error.into()))
    }

    /// Releases the private pools whose segments the recording releases for another request or for none:
    /// they had no users any more. `own` is the pool of the request. The moment at which the last user was
    /// gone is not recorded, but only such releases depend on it.
    pub(super) fn release_pools(
        &mut self,
        segments: &[TraceEvent],
        own: PoolId,
    ) -> Result<(), ReplayError> {
        let pools: &dyn PrivatePools = self.engine;
        let released = segments.iter().filter(|event| event.reserved_change() < 0);
        for pool in released.filter_map(private_pool).filter(|pool| *pool != own) {
            if pools.pool_users(pool).is_some_and(|users| users > 0) {
                self.pools.remove(&pool);
                pools.release_pool(pool).map_err(|error| ReplayError::Alloc(error.into()))?;
            }
        }
        Ok(())
    }
}

/// Returns the private pool that the entry contains, if any.
pub(super) fn private_pool(event: &TraceEvent) -> Option<PoolId> {
    event.named_pool().filter(|pool| *pool != PoolId::DEFAULT)
}

/// Returns true if the releases at the start of `rest` are as many as there are free segments in the
/// default pool, and differ from those that the garbage collector would make, or begin with.
fn is_beyond(rest: &[TraceEvent], collection: &Collection) -> bool {
    let is_release = |event: &TraceEvent| event.action == Action::SegmentFree;
    let own = &collection.releases;
    rest.iter().take_while(|event| is_release(event)).count() == collection.idle_segments
        && !begins_with(rest, is_release, own, own.suffices)
}

/// Returns true if the releases at the start of `rest` begin with the `own` ones, or with `is_all` are
/// exactly these.
fn begins_with(
    rest: &[TraceEvent],
    is_release: impl Fn(&TraceEvent) -> bool,
    own: &Releases,
    is_all: bool,
) -> bool {
    let releases = rest.iter().take_while(|event| is_release(event));
    let addresses: Vec<u64> = releases.map(|event| event.address).collect();
    match is_all {
        true => addresses == own.addresses,
        false => addresses.starts_with(&own.addresses),
    }
}

/// Returns the direction in which the limit is wrong, judged by the first differing segment event. `failed`
/// is true if the request failed in the replay.
pub(super) fn misfit(seen: &[Event], recorded: &[TraceEvent], failed: bool) -> Option<Misfit> {
    let releases = |action: Action| matches!(action, Action::SegmentFree | Action::SegmentUnmap);
    let key = |at: usize| {
        let seen = seen.get(at).map(|e| (e.action, e.address, e.size_bytes));
        (seen, recorded.get(at).map(|e| (e.action, e.address, e.size_bytes)))
    };
    let first = (0..seen.len().max(recorded.len())).map(key).find(|(a, b)| a != b)?;
    let (ours, theirs) = (first.0.map(|e| releases(e.0)), first.1.map(|e| releases(e.0)));
    match (ours, theirs) {
        (Some(true), Some(false) | None) => Some(Misfit::TooLow),
        (Some(false) | None, Some(true)) | (Some(false), None) => Some(Misfit::TooHigh),
        // The recorded allocator allocated a segment and the replay did not. Either the limit refused
        // the segment, or the replay still held memory that the recorded allocator had released.
        (None, Some(false)) => Some(if failed { Misfit::TooLow } else { Misfit::TooHigh }),
        // Both released, but different segments: one allocator collected, the other released everything
        // because it reached the limit. The one that releases less collected, because its limit is lower.
        (Some(true), Some(true)) => {
            let ours = seen.iter().filter(|e| releases(e.action)).count();
            let theirs = recorded.iter().filter(|e| releases(e.action)).count();
            Some(if ours < theirs { Misfit::TooLow } else { Misfit::TooHigh })
        }
        _ => None,
    }
}
