//! `limit:8GiB`: callers hold at most so many bytes; a request beyond fails as out of memory.
//!
//! Counted is what callers asked for, by every call; what the allocator below rounds up or caches
//! is its own affair (`per_process_memory_fraction` limits that). Blocks that come back with a
//! checkpoint are counted too, also beyond the limit, because nobody asked.

use std::sync::atomic::{AtomicU64, Ordering};

use super::layered::{Layer, Layered, checkpoints_of, raw_of, refusal};
use crate::allocator::{Allocation, DeviceAllocator, PoolCheckpoint, Request, Restored};
use crate::config::told_size;
use crate::error::{AllocError, FreeError, HandleError, OutOfMemory, PoolError};

/// See the [module](self).
pub type Limited<A> = Layered<Limit<A>>;

/// An allocator, the limit and what is held.
#[derive(Debug)]
pub struct Limit<A> {
    inner: A,
    limit_bytes: u64,
    held_bytes: AtomicU64,
}

/// `inner` with at most `limit_bytes` in callers' hands.
pub fn limit<A: DeviceAllocator>(inner: A, limit_bytes: u64) -> Limited<A> {
    Layered::new(Limit { inner, limit_bytes, held_bytes: AtomicU64::new(0) })
}

/// A request under way. Dropped only if the allocator below panics.
struct Charge<'l> {
    held_bytes: &'l AtomicU64,
    bytes: u64,
}

impl Drop for Charge<'_> {
    #[cold]
    fn drop(&mut self) {
        self.held_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl<A: DeviceAllocator> Limit<A> {
    /// What callers hold now, in bytes, with requests under way. Never waits.
    pub fn held_bytes(&self) -> u64 {
        self.held_bytes.load(Ordering::Relaxed)
    }

    #[inline]
    fn allocate_charged(&self, request: Request) -> Result<Allocation, AllocError> {
        let charge = Charge { held_bytes: &self.held_bytes, bytes: request.bytes };
        let mut answer = self.inner.allocate(request);
        std::mem::forget(charge);
        if let Err(error) = answer {
            self.lower(request.bytes);
            answer = Err(error);
        }
        answer
    }

    #[inline]
    fn lower(&self, bytes: u64) {
        self.held_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    #[cold]
    #[inline(never)]
    fn refuse(&self, request: Request, held_bytes: u64) -> AllocError {
        let hint = format!(
            "layers:[limit:{}] refused this; the allocator below was not asked",
            told_size(self.limit_bytes)
        );
        let report = OutOfMemory {
            limit_bytes: Some(self.limit_bytes),
            allocated_bytes: held_bytes,
            hints: vec![hint],
            ..OutOfMemory::of(request.bytes, request.stream)
        };
        refusal(&self.inner, report)
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
        let fits =
            |held: u64| held.checked_add(request.bytes).filter(|sum| *sum <= self.limit_bytes);
        match self.held_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits) {
            Ok(_) => self.allocate_charged(request),
            Err(held_bytes) => Err(self.refuse(request, held_bytes)),
        }
    }

    #[inline]
    fn free(&self, allocation: Allocation) -> Result<(), FreeError> {
        let size_bytes = allocation.size_bytes();
        let answer = self.inner.free(allocation);
        if answer.is_ok() {
            self.lower(size_bytes);
        }
        answer
    }

    #[inline]
    fn free_raw(&self, address: u64) -> Result<u64, HandleError> {
        raw_of(&self.inner).free_raw(address).inspect(|size_bytes| self.lower(*size_bytes))
    }

    fn restore(&self, checkpoint: &PoolCheckpoint) -> Result<Restored, PoolError> {
        let restored = checkpoints_of(&self.inner).restore(checkpoint)?;
        restored.freed.iter().for_each(|freed| self.lower(freed.size_bytes));
        for live in &restored.live {
            self.held_bytes.fetch_add(live.size_bytes(), Ordering::Relaxed);
        }
        Ok(restored)
    }
}
