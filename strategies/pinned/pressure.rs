//! The steps when the driver has no memory, or the limit forbids a request to it.
//!
//! First, call the free-memory callbacks, and try again if they freed something. Then wait for the streams
//! that use freed blocks, release all cached blocks and try once more. At last, report the failure.

use super::{Core, Refusal, Sizes};
use crate::allocator::{Allocation, Request};
use crate::error::{AllocError, AllocResult, FreeRanges, OutOfMemory};
use crate::history::Action;
use crate::size::{PoolKind, human_bytes};
use crate::system::memory_info;

/// Returns the error if it is not about lack of memory, because releasing memory would not help.
fn about_memory(refusal: Refusal) -> Result<Refusal, AllocError> {
    match refusal {
        Refusal::Driver(error) if !error.is_out_of_memory() => Err(AllocError::Driver(error)),
        refusal => Ok(refusal),
    }
}

impl Core {
    #[cold]
    pub(super) fn serve_under_pressure(
        &self,
        request: Request,
        sizes: Sizes,
        refusal: Refusal,
    ) -> AllocResult {
        about_memory(refusal)?;
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
            Err(refusal) => about_memory(refusal)?,
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
        let info = memory_info().ok();
        let blocks = self.blocks.lock();
        let statistics = blocks.statistics();
        let (ranges, largest_bytes) =
            (statistics.free_blocks, blocks.idle_sizes().max().unwrap_or(0));
        drop(blocks);
        let bytes = |bytes: i64| u64::try_from(bytes).unwrap_or(0);
        let allocated = statistics.allocated_bytes.all.current;
        let mut report = OutOfMemory {
            device: self.device.device,
            device_free_bytes: info.map(|info| info.free_bytes),
            device_total_bytes: info.map(|info| info.total_bytes),
            limit_bytes: self.limit.get(),
            allocated_bytes: bytes(allocated),
            reserved_bytes: bytes(statistics.reserved_bytes.all.current),
            cached_small_bytes: statistics.cached_bytes_of(PoolKind::Small),
            cached_large_bytes: statistics.cached_bytes_of(PoolKind::Large),
            draining_bytes: bytes(statistics.active_bytes.all.current - allocated),
            ..OutOfMemory::of(request.bytes, request.stream)
        };
        if largest_bytes > 0 {
            let bytes = report.cached_small_bytes + report.cached_large_bytes;
            report.free.push(FreeRanges { bytes, ranges, largest_bytes, ..FreeRanges::default() });
        }
        report.hints.push(
            "the bytes are those of page-locked host memory, and the free and total bytes those of this \
             machine: backend:pinned."
                .to_owned(),
        );
        match refusal {
            Refusal::Driver(error) => report.driver = Some(error),
            Refusal::Limit => report.hints.push(format!(
                "the limit of {} refused the request before the driver was called: raise the memory \
                 fraction.",
                human_bytes(report.limit_bytes.unwrap_or_default())
            )),
        }
        report
    }
}
