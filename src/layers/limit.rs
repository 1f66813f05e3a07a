//! `limit:8GiB`: limits the bytes that callers hold. A request beyond the limit fails as out of memory.
//!
//! Requested bytes count. The rounding and caching of the allocator below do not count
//! (`per_process_memory_fraction` limits those). The limit is exact, also with several threads (see
//! `sync::Quota`). Blocks that a restored checkpoint makes live count too, and may exceed the limit,
//! because no request asks for them.

use super::watch::{Watch, Watched, out_of_memory};
use crate::allocator::{DeviceAllocator, Request};
use crate::config::size_text;
use crate::error::{AllocError, AllocResult, OutOfMemory};
use crate::sync::Quota;

/// See the [module](self).
pub(crate) type Limited<A> = Watched<A, Limit>;

/// The limit and the bytes that callers hold.
#[derive(Debug)]
pub struct Limit {
    quota: Quota,
}

/// Returns `inner` with a limit on the bytes that callers hold.
pub fn limit<A: DeviceAllocator>(inner: A, limit_bytes: u64) -> Limited<A> {
    Watched::new(inner, Limit { quota: Quota::new(limit_bytes) })
}

/// The bytes of a request in progress. The drop runs only if the allocator below panics, and subtracts
/// them.
struct Charge<'l> {
    quota: &'l Quota,
    bytes: u64,
}

impl Drop for Charge<'_> {
    #[cold]
    fn drop(&mut self) {
        self.quota.put_back(self.bytes);
    }
}

impl Limit {
    /// Returns the bytes that callers hold, including requests in progress. Exact when no call overlaps.
    pub fn held_bytes(&self) -> u64 {
        self.quota.held_bytes()
    }

    #[cold]
    #[inline(never)]
    fn refuse<A: DeviceAllocator>(
        &self,
        request: Request,
        held_bytes: u64,
        below: &A,
    ) -> AllocError {
        let hint = format!(
            "layers:[limit:{}] refused the request; the allocator below was not called",
            size_text(self.quota.limit_bytes())
        );
        let report = OutOfMemory {
            limit_bytes: Some(self.quota.limit_bytes()),
            allocated_bytes: held_bytes,
            hints: vec![hint],
            ..OutOfMemory::of(request.bytes, request.stream)
        };
        out_of_memory(below, report)
    }
}

impl Watch for Limit {
    #[inline]
    fn allocate<A: DeviceAllocator>(&self, request: Request, below: &A) -> AllocResult {
        if let Err(held_bytes) = self.quota.take(request.bytes) {
            return Err(self.refuse(request, held_bytes, below));
        }
        let charge = Charge { quota: &self.quota, bytes: request.bytes };
        let mut answer = below.allocate(request);
        std::mem::forget(charge);
        if let Err(error) = answer {
            self.quota.put_back(request.bytes);
            answer = Err(error);
        }
        answer
    }

    #[inline]
    fn freed(&self, size_bytes: u64) {
        self.quota.put_back(size_bytes);
    }

    fn revived(&self, size_bytes: u64) {
        self.quota.force(size_bytes);
    }
}
