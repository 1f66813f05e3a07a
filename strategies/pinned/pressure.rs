//! The steps when the driver has no memory, or the limit forbids a request to it.
//!
//! First, call the free-memory callbacks, and try again if they freed something. Then wait for the streams
//! that use freed blocks, release all cached blocks and try once more. At last, report the failure.

use super::{Core, Sizes};
use crate::allocator::{Allocation, Request};
use crate::error::{AllocError, AllocResult, OutOfMemory};
use crate::history::Action;
use crate::refusal::{Refusal, list_cached, report_of};
use crate::system::memory_info;

impl Core {
    #[cold]
    pub(super) fn serve_under_pressure(
        &self,
        request: Request,
        sizes: Sizes,
        refusal: Refusal,
    ) -> AllocResult {
        refusal.about_memory()?;
        if self.hooks.free_some_memory()
            && let Ok(found) = self.try_again(request, sizes)?
        {
            return Ok(found);
        }
        if self.waiting.any() {
            self.blocks.lock().counters.num_sync_all_streams += 1;
        }
        let drained = self.drain();
        // A block that the driver fails to free stays cached; `empty_cache` reports it.
        let _ = self.release_cached();
        // Other threads may be releasing memory; it is usable only after that.
        self.wait_for_releases();
        self.blocks.lock().counters.num_alloc_retries += 1;
        let refusal = match self.try_again(request, sizes)? {
            Ok(found) => return Ok(found),
            Err(refusal) => refusal.about_memory()?,
        };
        // Blocks that could not be waited for might have served the request, so "out of memory" would be
        // wrong.
        drained?;
        let mut report = self.report(request, refusal);
        let free = report.device_free_bytes.unwrap_or(0);
        self.blocks.lock().counters.num_ooms += 1;
        self.record(Action::OutOfMemory, free, request.bytes, request.stream);
        self.history.explain(&mut report);
        self.hooks.notify_out_of_memory(&report);
        Err(AllocError::OutOfMemory(Box::new(report)))
    }

    fn try_again(
        &self,
        request: Request,
        sizes: Sizes,
    ) -> AllocResult<Result<Allocation, Refusal>> {
        match self.reuse(request, sizes) {
            Some(found) => Ok(Ok(found)),
            None => self.take(request, sizes),
        }
    }

    fn report(&self, request: Request, refusal: Refusal) -> OutOfMemory {
        let blocks = self.blocks.lock();
        let statistics = blocks.statistics();
        let largest_bytes = blocks.idle_sizes().max().unwrap_or(0);
        drop(blocks);
        let mut report = OutOfMemory {
            device: self.device.device,
            ..report_of(&request, self.limit.get(), &statistics, memory_info().ok())
        };
        list_cached(&mut report, statistics.free_blocks, largest_bytes);
        report.hints.push(
            "the bytes are those of page-locked host memory, and the free and total bytes those of this \
             machine: backend:pinned."
                .to_owned(),
        );
        refusal.explain(&mut report, "the driver");
        report
    }
}
