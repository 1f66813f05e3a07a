//! `limit:8GiB`: callers hold at most so many bytes; a request beyond fails as out of memory.
//!
//! Counted is what callers asked for, by every call; what the allocator below rounds up or caches
//! is its own affair (`per_process_memory_fraction` limits that). Blocks that come back with a
//! checkpoint are counted too, also beyond the limit, because nobody asked.

use super::watch::{Watch, Watched, out_of_memory};
use crate::allocator::{DeviceAllocator, Request};
use crate::config::told_size;
use crate::error::{AllocError, AllocResult, OutOfMemory};
use crate::sync::Quota;

/// See the [module](self).
pub(crate) type Limited<A> = Watched<A, Limit>;

/// The limit and what is held.
#[derive(Debug)]
pub struct Limit {
    held: Quota,
}

/// `inner` with at most `limit_bytes` in callers' hands.
pub fn limit<A: DeviceAllocator>(inner: A, limit_bytes: u64) -> Limited<A> {
    Watched::new(inner, Limit { held: Quota::new(limit_bytes) })
}

/// A request under way. Dropped only if the allocator below panics.
struct Charge<'l> {
    held: &'l Quota,
    bytes: u64,
}

impl Drop for Charge<'_> {
    #[cold]
    fn drop(&mut self) {
        self.held.give(self.bytes);
    }
}

impl Limit {
    /// What callers hold now, in bytes, with requests under way. Exact when no call overlaps.
    pub fn held_bytes(&self) -> u64 {
        self.held.held_bytes()
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
            "layers:[limit:{}] refused this; the allocator below was not asked",
            told_size(self.held.limit_bytes())
        );
        let report = OutOfMemory {
            limit_bytes: Some(self.held.limit_bytes()),
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
        if let Err(held_bytes) = self.held.take(request.bytes) {
            return Err(self.refuse(request, held_bytes, below));
        }
        let charge = Charge { held: &self.held, bytes: request.bytes };
        let mut answer = below.allocate(request);
        std::mem::forget(charge);
        if let Err(error) = answer {
            self.held.give(request.bytes);
            answer = Err(error);
        }
        answer
    }

    #[inline]
    fn freed(&self, size_bytes: u64) {
        self.held.give(size_bytes);
    }

    fn revived(&self, size_bytes: u64) {
        self.held.force(size_bytes);
    }
}
