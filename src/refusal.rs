//! The report of a request that got no memory, for allocators that ask the driver or the system for each
//! block.

use crate::allocator::Request;
use crate::driver::MemoryInfo;
use crate::error::{AllocError, DriverError, FreeRanges, OutOfMemory};
use crate::size::PoolKind;
use crate::stats::Statistics;

/// The reason why a request got no memory.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// The limit forbade the call of the driver or the system.
    Limit,
    /// The call failed.
    Failed(DriverError),
}

impl Refusal {
    /// Returns the error if it is not about lack of memory, because releasing memory would not help.
    pub(crate) fn about_memory(self) -> Result<Self, AllocError> {
        match self {
            Self::Failed(error) if !error.is_out_of_memory() => Err(AllocError::Driver(error)),
            refusal => Ok(refusal),
        }
    }

    /// Adds the reason to a report. `callee` is the driver or the system.
    pub(crate) fn explain(self, report: &mut OutOfMemory, callee: &str) {
        match self {
            Self::Failed(error) => report.driver = Some(error),
            Self::Limit => report.hints.push(format!(
                "the limit of {} refused the request before {callee} was called: raise the memory \
                 fraction.",
                report.bytes_in_reason()(report.limit_bytes.unwrap_or_default())
            )),
        }
    }
}

/// Returns the report of a failed request. `memory` is that of the device or the machine.
pub(crate) fn report_of(
    request: &Request,
    limit_bytes: Option<u64>,
    statistics: &Statistics,
    memory: Option<MemoryInfo>,
) -> OutOfMemory {
    let bytes = |bytes: i64| u64::try_from(bytes).unwrap_or(0);
    let allocated = statistics.allocated_bytes.all.current;
    OutOfMemory {
        device_free_bytes: memory.map(|memory| memory.free_bytes),
        device_total_bytes: memory.map(|memory| memory.total_bytes),
        limit_bytes,
        allocated_bytes: bytes(allocated),
        reserved_bytes: bytes(statistics.reserved_bytes.all.current),
        cached_small_bytes: statistics.cached_bytes_of(PoolKind::Small),
        cached_large_bytes: statistics.cached_bytes_of(PoolKind::Large),
        draining_bytes: bytes(statistics.active_bytes.all.current - allocated),
        ..OutOfMemory::of(request.bytes, request.stream)
    }
}

/// Lists all cached bytes of a report as free ranges, if there are any.
pub(crate) fn list_cached(report: &mut OutOfMemory, ranges: u64, largest_bytes: u64) {
    if largest_bytes > 0 {
        let bytes = report.cached_small_bytes + report.cached_large_bytes;
        report.free.push(FreeRanges { bytes, ranges, largest_bytes, ..FreeRanges::default() });
    }
}
