//! `limit:8GiB`: callers hold at most so many bytes; a request beyond fails as out of memory.
//!
//! Counted is what callers asked for, by every call; what the allocator below rounds up or caches
//! is its own affair (`per_process_memory_fraction` limits that). Blocks that come back with a
//! checkpoint are counted too, also beyond the limit, because nobody asked.

use super::layered::{Layer, Layered, checkpoints_of, out_of_memory, raw_of};
use crate::allocator::{Allocation, DeviceAllocator, PoolCheckpoint, Request, Restored};
use crate::config::told_size;
use crate::error::{AllocError, FreeError, HandleError, OutOfMemory, PoolError};
use crate::sync::Quota;

/// See the [module](self).
pub type Limited<A> = Layered<Limit<A>>;

/// An allocator, the limit and what is held.
#[derive(Debug)]
pub struct Limit<A> {
    inner: A,
    held: Quota,
}

/// `inner` with at most `limit_bytes` in callers' hands.
pub fn limit<A: DeviceAllocator>(inner: A, limit_bytes: u64) -> Limited<A> {
    Layered::new(Limit { inner, held: Quota::new(limit_bytes) })
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

impl<A: DeviceAllocator> Limit<A> {
    /// What callers hold now, in bytes, with requests under way. Exact when no call overlaps.
    pub fn held_bytes(&self) -> u64 {
        self.held.held_bytes()
    }

    #[inline]
    fn allocate_charged(&self, request: Request) -> Result<Allocation, AllocError> {
        let charge = Charge { held: &self.held, bytes: request.bytes };
        let mut answer = self.inner.allocate(request);
        std::mem::forget(charge);
        if let Err(error) = answer {
            self.held.give(request.bytes);
            answer = Err(error);
        }
        answer
    }

    #[cold]
    #[inline(never)]
    fn refuse(&self, request: Request, held_bytes: u64) -> AllocError {
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
        out_of_memory(&self.inner, report)
    }
}

impl<A: DeviceAllocator> Layer for Limit<A> {
    type Inner = A;

    #[inline]
    fn inner(&self) -> &A {
        &self.inner
    }

    #[inline]
    fn allocate(&self, request: Request) -> Result<Allocation, AllocError> {
        match self.held.take(request.bytes) {
            Ok(()) => self.allocate_charged(request),
            Err(held_bytes) => Err(self.refuse(request, held_bytes)),
        }
    }

    #[inline]
    fn free(&self, allocation: Allocation) -> Result<(), FreeError> {
        let size_bytes = allocation.size_bytes();
        let answer = self.inner.free(allocation);
        if answer.is_ok() {
            self.held.give(size_bytes);
        }
        answer
    }

    #[inline]
    fn free_raw(&self, address: u64) -> Result<u64, HandleError> {
        raw_of(&self.inner).free_raw(address).inspect(|size_bytes| self.held.give(*size_bytes))
    }

    fn restore(&self, checkpoint: &PoolCheckpoint) -> Result<Restored, PoolError> {
        let restored = checkpoints_of(&self.inner).restore(checkpoint)?;
        restored.freed.iter().for_each(|freed| self.held.give(freed.size_bytes));
        restored.live.iter().for_each(|live| self.held.force(live.size_bytes()));
        Ok(restored)
    }
}
