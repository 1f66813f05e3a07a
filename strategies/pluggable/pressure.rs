//! The steps when a user's function has no memory, or the limit forbids calling it.
//!
//! First, call the free-memory callbacks, and try again if they freed something. Then wait for other
//! streams, free idle blocks, call the user's `reset`, and try once more. Then use pools with
//! `use_on_oom`. At last, report the failure.
//!
//! During a capture nothing is waited for, freed or reset, because that would break the capture. A
//! capture is recognized by its open scope, or by the request's stream being captured.

use super::{PluggableAllocator, Refusal};
use crate::allocator::Request;
use crate::error::{AllocError, AllocResult, DriverError, OutOfMemory};
use crate::history::Action;
use crate::ids::PoolId;
use crate::refusal::report_of;
use crate::size::human_bytes;

impl PluggableAllocator {
    #[cold]
    pub(super) fn serve_under_pressure(&self, pool: PoolId, request: Request) -> AllocResult {
        if self.hooks.free_some_memory()
            && let Ok(found) = self.try_serve(pool, request)?
        {
            return Ok(found);
        }
        let mut drained = Ok(());
        if self.may_wait_for(request.stream) {
            if self.waiting.any() {
                self.table.counters().num_sync_all_streams += 1;
            }
            drained = self.drain_and_release(Some(pool));
            self.table.counters().num_alloc_retries += 1;
        }
        let refusal = match self.try_serve(pool, request)? {
            Ok(found) => return Ok(found),
            Err(refusal) => refusal,
        };
        if pool == PoolId::DEFAULT
            && let Some(found) = self.take_from_helpers(request)
        {
            return Ok(found);
        }
        // Returns the error of the wait, if it failed: blocks that are still waiting might have served
        // the request, so "out of memory" would be wrong.
        drained?;
        self.table.counters().num_ooms += 1;
        let mut report = self.report(pool, request, refusal);
        let free = report.device_free_bytes.unwrap_or(0);
        self.record(Action::OutOfMemory, free, request.bytes, (request.stream, pool));
        self.history.explain(&mut report);
        self.hooks.notify_out_of_memory(&report);
        Err(AllocError::OutOfMemory(Box::new(report)))
    }

    /// Waits for other streams, frees the idle blocks of pools without users and of `own`, and calls the
    /// user's `reset`.
    fn drain_and_release(&self, own: Option<PoolId>) -> Result<(), DriverError> {
        let drained = self.drain();
        self.release_idle(own);
        if let Some(reset) = &self.callbacks.reset {
            reset();
        }
        drained
    }

    /// Empties the cache. Does nothing while a capture is known, because the waits would break the
    /// capture.
    pub(super) fn empty(&self) -> Result<(), DriverError> {
        if self.pools.any_capture_known() {
            return Ok(());
        }
        let drained = self.drain_and_release(None);
        self.waiting.queue.destroy_spare(&*self.driver)?;
        drained
    }

    fn report(&self, pool: PoolId, request: Request, refusal: Refusal) -> OutOfMemory {
        let info = self.driver.memory_info().ok();
        let statistics = self.table.statistics();
        let mut report = OutOfMemory {
            device: self.device.device,
            pool,
            ..report_of(&request, self.limit.get(), &statistics, info)
        };
        report.cached_private_bytes = report.cached_small_bytes + report.cached_large_bytes;
        report.hints = self.hints(&report, refusal);
        report
    }

    fn hints(&self, report: &OutOfMemory, refusal: Refusal) -> Vec<String> {
        let mut hints = Vec::new();
        match (refusal, report.limit_bytes) {
            (Refusal::Limit, Some(limit)) => hints.push(format!(
                "the limit of {} refused the request before the user's function was called: raise \
                 the memory fraction.",
                report.bytes_in_reason()(limit)
            )),
            _ => hints.push(format!(
                "the user's function of backend:{} returned null for {} bytes.",
                self.name, report.requested_bytes
            )),
        }
        if let (Refusal::Null, Some(free)) = (refusal, report.device_free_bytes)
            && free >= report.requested_bytes
        {
            hints.push(format!(
                "the device still has {} free, so the user's function keeps a limit of its own or \
                 has cut its memory into pieces.",
                human_bytes(free)
            ));
        }
        hints
    }
}
