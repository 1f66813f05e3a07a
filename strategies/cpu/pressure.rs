//! The steps when the system has no memory, or the limit forbids a request to it.
//!
//! First, call the free-memory callbacks and try again. Then release everything that this instance
//! caches and try once more. At last, report the failure.

use super::{AllocatedBlock, Core};
use crate::allocator::Request;
use crate::error::{AllocError, OutOfMemory};
use crate::history::Action;
use crate::refusal::{Refusal, list_cached, report_of};
use crate::system::memory_info;

impl Core {
    #[cold]
    pub(super) fn serve_under_pressure(
        &self,
        request: Request,
        refusal: Refusal,
    ) -> Result<AllocatedBlock, AllocError> {
        if matches!(refusal.about_memory()?, Refusal::Failed(_)) {
            self.has_run_out();
        }
        if self.hooks.free_some_memory()
            && let Ok(found) = self.try_again(request)
        {
            return Ok(found);
        }
        self.release_all();
        // Other threads may be releasing memory; it is usable only after that.
        self.wait_for_releases();
        self.source.release_cached();
        self.blocks.lock().counters.num_alloc_retries += 1;
        let refusal = match self.try_again(request) {
            Ok(found) => return Ok(found),
            Err(refusal) => refusal.about_memory()?,
        };
        let mut report = self.report(request, refusal);
        let free = report.device_free_bytes.unwrap_or(0);
        self.blocks.lock().counters.num_ooms += 1;
        self.record(Action::OutOfMemory, free, request.bytes, request.stream);
        self.history.explain(&mut report);
        self.hooks.notify_out_of_memory(&report);
        Err(AllocError::OutOfMemory(Box::new(report)))
    }

    /// Allocates a block that a callback or another thread has freed, or else requests one from the
    /// system.
    fn try_again(&self, request: Request) -> Result<AllocatedBlock, Refusal> {
        self.reuse(request).map_or_else(|| self.take(request), Ok)
    }

    fn report(&self, request: Request, refusal: Refusal) -> OutOfMemory {
        let blocks = self.blocks.lock();
        let (statistics, (ranges, largest_bytes)) = (blocks.statistics(), blocks.idle());
        drop(blocks);
        let mut report = OutOfMemory {
            device: self.device,
            ..report_of(&request, self.limit.get(), &statistics, memory_info().ok())
        };
        list_cached(&mut report, ranges, largest_bytes);
        report.hints.push("the \"device\" is this machine's own memory: backend:cpu.".to_owned());
        refusal.explain(&mut report, "the system");
        report
    }
}
