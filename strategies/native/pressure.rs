//! The steps of a miss, also called the ladder: tried in order until one yields a block.
//!
//! Call the free-memory callbacks and search again. Release old free segments near the limit (garbage
//! collection). Grow, which means to allocate a segment or map pages. Take a block from pools with
//! `use_on_oom`. Release oversize blocks and grow. Wait for pending events and search again. Release all
//! free memory and grow. Grow by fine pages, if segments are expandable. `Growth::is_exact` lists where
//! PyTorch differs.
//!
//! Source of the order: PyTorch's `CUDACachingAllocator`.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use parking_lot::MutexGuard;

use super::cell::{HeapCell, HeapGuard, HeapKey};
use super::engine::Engine;
use super::growth::{Growth, Refusal};
use super::policy::Plan;
use super::pools::LentBlock;
use crate::allocator::{Allocation, Request};
use crate::diagnostics;
use crate::error::{AllocError, DriverError, DriverErrorKind, PoolError};
use crate::heap::{FitRules, Slot};
use crate::ids::{PoolId, StreamId};
use crate::size::{PoolKind, align_up};

/// The result of a step: a block, or the reason why the next step is needed.
type Step = Result<Allocation, Refusal>;

/// The least memory that a request needs from the driver if the cache is empty.
#[derive(Clone, Copy, Debug)]
pub(super) struct LeastGrowth {
    pub(super) bytes: u64,
    /// The size of its pages, if these are mapped.
    pub(super) page_bytes: Option<u64>,
}

impl Engine {
    /// Serves a request that found no block. The caller holds no lock.
    #[cold]
    pub(super) fn allocate_under_pressure(
        &self,
        cell: &HeapCell,
        key: HeapKey,
        request: Request,
    ) -> Result<Allocation, AllocError> {
        let _operation = self.history.operation();
        let _lines = diagnostics::lines();
        if self.hooks.free_some_memory() {
            self.note(cell, || "free-memory callbacks freed something".to_owned());
            if let Ok(mut state) = cell.lock_at(key)
                && let Some(found) = self.search(cell, &mut state, request.bytes)
            {
                return Ok(found);
            }
        }
        let capturing = self.is_captured(request.stream);
        let mut growth = self.growth.lock();
        let (plan, refusal) = loop {
            // While this thread waited, another miss may have added memory to this heap, or the private
            // pool may have been removed.
            let policy = {
                let mut state = cell.lock_at(key)?;
                if let Some(found) = self.search(cell, &mut state, request.bytes) {
                    return Ok(found);
                }
                state.policy
            };
            if policy.asleep {
                if self.wait_until_awake(&mut growth, key.pool, capturing) {
                    continue;
                }
                return Err(PoolError::Asleep { pool: key.pool }.into());
            }
            let plan = Plan { capturing, ..Plan::new(request.bytes, &policy, &growth.settings) };
            growth.pools.set_busy(key.pool, true);
            // If a pool's own allocator panics, the busy mark must still be removed.
            let step = catch_unwind(AssertUnwindSafe(|| {
                match self.try_miss_steps(&mut growth, cell, &plan)? {
                    Err(refusal) => self.grow_by_fine_pages(&mut growth, cell, &plan, refusal),
                    found => Ok(found),
                }
            }));
            growth.pools.set_busy(key.pool, false);
            // A pause waits until its tag is not busy.
            if growth.pools.tag(key.pool).is_some() {
                self.announced.notify_all();
            }
            match step.unwrap_or_else(|panic| resume_unwind(panic))? {
                Ok(found) => return Ok(found),
                Err(_) if self.wait_for_announced(&mut growth) => {}
                Err(refusal) => break (plan, refusal),
            }
        };
        let is_rejected = matches!(refusal, Refusal::Forbidden);
        let mut report = self.report_out_of_memory(&mut growth, cell, &plan, refusal);
        drop(growth);
        self.history.explain(&mut report);
        if is_rejected {
            self.hooks.notify_oom_rejection(&report);
        } else {
            self.hooks.notify_out_of_memory(&report);
        }
        Err(AllocError::OutOfMemory(Box::new(report)))
    }

    fn try_miss_steps(
        &self,
        growth: &mut MutexGuard<'_, Growth>,
        cell: &HeapCell,
        plan: &Plan,
    ) -> Result<Step, DriverError> {
        if !plan.capturing {
            past_captures(self.collect_idle(growth), ())?;
        }
        let mut refusal = match self.grow(growth, cell, plan)? {
            Err(Refusal::Forbidden) => return Ok(Err(Refusal::Forbidden)),
            Err(refusal) => refusal,
            found => return Ok(found),
        };
        if cell.pool() == PoolId::DEFAULT
            && let Some(found) = self.search_helpers(growth, plan, cell.stream())
        {
            self.note(cell, || "a pool with use_on_oom served the request".to_owned());
            return Ok(Ok(found));
        }
        // In a capture, the thread may neither release memory nor wait.
        if plan.capturing {
            return Ok(Err(refusal));
        }
        let is_hopeless = !growth.is_exact() && self.is_hopeless(growth, cell, plan);
        if !is_hopeless && past_captures(self.release_oversize(growth, cell, plan), false)? {
            match self.grow(growth, cell, plan)? {
                Err(again) => refusal = again,
                found => return Ok(found),
            }
        }
        if self.counts_as_captured() {
            return Ok(Err(refusal));
        }
        // A draining block can serve the request only if the reserved bytes suffice for it. A lowered
        // limit may be below the reserved bytes, so waiting can help even if no segment may be allocated.
        let may_drain = self.attention.any_event() && plan.rounded_bytes <= growth.reserved_bytes();
        if is_hopeless && !may_drain {
            return Ok(Err(refusal));
        }
        growth.counters.num_sync_all_streams += 1;
        let drained = self.drain_events(None);
        self.note(cell, || "waited for the events of freed blocks".to_owned());
        if !growth.is_exact()
            && let Some(found) = self.search(cell, &mut cell.lock(), plan.requested_bytes)
        {
            return Ok(Ok(found));
        }
        if is_hopeless {
            return drained.map(|()| Err(refusal));
        }
        match (self.release_and_grow(growth, cell, plan)?, drained) {
            // Returns the error of the wait, not "out of memory": a block that still waits might have
            // served the request.
            (Err(_), Err(error)) => Err(error),
            (step, _) => Ok(step),
        }
    }

    fn release_and_grow(
        &self,
        growth: &mut MutexGuard<'_, Growth>,
        cell: &HeapCell,
        plan: &Plan,
    ) -> Result<Step, DriverError> {
        let before_bytes = growth.reserved_bytes();
        past_captures(self.release_idle(growth, cell.pool()), ())?;
        let released_bytes = before_bytes.saturating_sub(growth.reserved_bytes());
        self.note_step("release all free segments", released_bytes);
        growth.counters.num_alloc_retries += 1;
        self.grow(growth, cell, plan)
    }

    /// Serves a request by the last step of the ladder, even if a free block would fit. For replays of a
    /// recorded request that was served, or failed, this way because the block was still waiting for
    /// events when its pool was searched.
    ///
    /// # Errors
    ///
    /// [`AllocError::OutOfMemory`] if the step yields no block. [`PoolError`] if the pool is unknown, has no
    /// heap for the stream or sleeps.
    #[doc(hidden)]
    pub fn allocate_by_retry(
        &self,
        pool: PoolId,
        request: Request,
    ) -> Result<Allocation, AllocError> {
        let mut growth = self.growth.lock();
        let heaps = self.heaps_of(&growth, pool);
        let cell = heaps.iter().find(|cell| cell.stream() == request.stream);
        let cell = cell.ok_or_else(|| PoolError::missing(pool))?;
        growth.pools.check_awake(pool)?;
        let plan = Plan::new(request.bytes, &growth.policy_of(pool), &growth.settings);
        growth.counters.num_sync_all_streams += 1;
        self.release_and_grow(&mut growth, cell, &plan)?.map_err(|refusal| {
            let report = self.report_out_of_memory(&mut growth, cell, &plan, refusal);
            AllocError::OutOfMemory(Box::new(report))
        })
    }

    /// Allocates a free block of a pool with `use_on_oom`, if one fits.
    fn search_helpers(
        &self,
        growth: &mut Growth,
        plan: &Plan,
        stream: StreamId,
    ) -> Option<Allocation> {
        let (pool, found) = growth.pools.helpers().find_map(|heaps| {
            let cell = self.heap_in(heaps, stream)?;
            let mut state = cell.lock();
            // PyTorch considers only fixed segments here.
            let expandable = state.policy.rules.expandable && !growth.is_exact();
            let rules = FitRules { expandable, ..state.policy.rules };
            let slot = state.heap.best_fit(plan.kind, plan.rounded_bytes, &rules)?;
            let (rounded, requested) = (plan.rounded_bytes, plan.requested_bytes);
            Some((heaps.pool, self.allocate_slot(cell, &mut state, slot, rounded, requested)))
        })?;
        let (cell, id) = self.own(&found).expect("the block was just allocated");
        let lent = LentBlock { address: found.address(), heap: cell.number, id };
        growth.pools.add_lent(pool, lent, |lent| self.live_slot_of(lent).is_some());
        Some(found)
    }

    /// Returns the slot of a lent block if it is live. Locks its heap.
    fn live_slot_of(&self, lent: &LentBlock) -> Option<Slot> {
        self.heaps.get(lent.heap)?.lock().heap.live(lent.id, lent.address)
    }

    /// Searches the heap again and allocates the block it finds. Unlike `allocate_by_policy`, counts no
    /// hit and does not advance the garbage collector's clock.
    fn search(
        &self,
        cell: &HeapCell,
        state: &mut HeapGuard<'_>,
        requested_bytes: u64,
    ) -> Option<Allocation> {
        let rounded_bytes = state.policy.roundup.round(requested_bytes);
        let kind = PoolKind::of(rounded_bytes);
        let slot = state.heap.best_fit(kind, rounded_bytes, &state.policy.rules)?;
        Some(self.allocate_slot(cell, state, slot, rounded_bytes, requested_bytes))
    }

    /// Returns true if the request's segment exceeds the limit or the device, so that even an empty
    /// cache could not serve it and releasing memory is useless.
    fn is_hopeless(&self, growth: &Growth, cell: &HeapCell, plan: &Plan) -> bool {
        let most = growth.limit_bytes.unwrap_or(u64::MAX).min(self.device.total_bytes);
        self.least_growth(growth, cell.pool(), plan).bytes > most
    }

    /// Returns the smallest segment, or the smallest pages, that can serve a request in an empty cache.
    pub(super) fn least_growth(&self, growth: &Growth, pool: PoolId, plan: &Plan) -> LeastGrowth {
        match self.driver.virtual_memory().filter(|_| plan.expandable) {
            None => LeastGrowth { bytes: plan.segment_bytes, page_bytes: None },
            Some(memory) => {
                let page_bytes = growth.least_page_bytes(memory, pool, plan);
                let bytes = align_up(plan.rounded_bytes, page_bytes);
                LeastGrowth { bytes, page_bytes: Some(page_bytes) }
            }
        }
    }
}

/// Returns `kept` instead of the error if a capture prevented part of the release, because the part
/// released may be enough.
fn past_captures<T>(released: Result<T, DriverError>, kept: T) -> Result<T, DriverError> {
    released.or_else(|error| match error.kind() {
        DriverErrorKind::CaptureActive => Ok(kept),
        _ => Err(error),
    })
}
