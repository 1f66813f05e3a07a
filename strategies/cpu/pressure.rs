//! The steps when the system has no memory, or the limit forbids a request to it.
//!
//! First, call the free-memory callbacks and try again. Then release everything that this instance
//! caches and try once more. At last, report the failure.

use super::{AllocatedBlock, Core, Refusal};
use crate::allocator::Request;
use crate::error::{AllocError, FreeRanges, OutOfMemory};
use crate::history::Action;
use crate::ids::PoolId;
use crate::size::{PoolKind, human_bytes};
use crate::system::memory_info;

/// Returns the error if it is not about lack of memory, because releasing memory would not help.
fn about_memory(refusal: Refusal) -> Result<Refusal, AllocError> {
    match refusal {
        Refusal::System(error) if !error.is_out_of_memory() => Err(AllocError::Driver(error)),
        refusal => Ok(refusal),
    }
}

impl Core {
    #[cold]
    pub(super) fn serve_under_pressure(
        &self,
        request: Request,
        refusal: Refusal,
    ) -> Result<AllocatedBlock, AllocError> {
        if matches!(about_memory(refusal)?, Refusal::System(_)) {
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
            Err(refusal) => about_memory(refusal)?,
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
        let info = memory_info().ok();
        let blocks = self.blocks.lock();
        let (statistics, (ranges, largest_bytes)) = (blocks.statistics(), blocks.idle());
        drop(blocks);
        let bytes = |bytes: i64| u64::try_from(bytes).unwrap_or(0);
        let mut report = OutOfMemory {
            device: self.device,
            pool: PoolId::DEFAULT,
            device_free_bytes: info.map(|info| info.free_bytes),
            device_total_bytes: info.map(|info| info.total_bytes),
            limit_bytes: self.limit.get(),
            allocated_bytes: bytes(statistics.allocated_bytes.all.current),
            reserved_bytes: bytes(statistics.reserved_bytes.all.current),
            cached_small_bytes: statistics.cached_bytes_of(PoolKind::Small),
            cached_large_bytes: statistics.cached_bytes_of(PoolKind::Large),
            ..OutOfMemory::of(request.bytes, request.stream)
        };
        if largest_bytes > 0 {
            let bytes = report.cached_small_bytes + report.cached_large_bytes;
            report.free.push(FreeRanges { bytes, ranges, largest_bytes, ..FreeRanges::default() });
        }
        report.hints.push("the \"device\" is this machine's own memory: backend:cpu.".to_owned());
        match refusal {
            Refusal::System(error) => report.driver = Some(error),
            Refusal::Limit => report.hints.push(format!(
                "the limit of {} refused the request before the system was called: raise the memory \
                 fraction.",
                human_bytes(report.limit_bytes.unwrap_or_default())
            )),
        }
        report
    }
}
