//! `limit:8GiB`: callers hold at most so many bytes; a request beyond fails as out of memory.
//!
//! Counted is what callers asked for, by every call; what the allocator below rounds up or caches
//! is its own affair (`per_process_memory_fraction` limits that). Blocks that come back with a
//! checkpoint are counted too, also beyond the limit, because nobody asked.

use std::sync::atomic::{AtomicU64, Ordering};

use super::layered::Layered;
use super::watch::{Block, Watch, Watching};
use crate::allocator::{DeviceAllocator, Request};
use crate::config::told_size;
use crate::error::{AllocError, OutOfMemory};

/// See the [module](self).
pub type Limited<A> = Layered<Watching<A, Limit>>;

/// The limit and what is held.
#[derive(Debug)]
pub struct Limit {
    limit_bytes: u64,
    held_bytes: AtomicU64,
}

/// `inner` with at most `limit_bytes` in callers' hands.
pub fn limit<A: DeviceAllocator>(inner: A, limit_bytes: u64) -> Limited<A> {
    Layered::new(Watching::new(inner, Limit { limit_bytes, held_bytes: AtomicU64::new(0) }))
}

impl<A: DeviceAllocator> Watching<A, Limit> {
    /// What callers hold now, in bytes, with requests under way. Never waits.
    pub fn held_bytes(&self) -> u64 {
        self.watch().held_bytes.load(Ordering::Relaxed)
    }
}

impl Limit {
    #[cold]
    fn refuse(&self, request: Request, held_bytes: u64) -> AllocError {
        AllocError::OutOfMemory(Box::new(OutOfMemory {
            limit_bytes: Some(self.limit_bytes),
            allocated_bytes: held_bytes,
            hints: vec![format!(
                "layers:[limit:{}] refused this; the allocator below was not asked",
                told_size(self.limit_bytes)
            )],
            ..OutOfMemory::of(request.bytes, request.stream)
        }))
    }
}

impl Watch for Limit {
    const KEEPS_BOOK: bool = false;

    #[inline]
    fn ask(&self, request: Request) -> Result<(), AllocError> {
        let fits =
            |held: u64| held.checked_add(request.bytes).filter(|sum| *sum <= self.limit_bytes);
        let charged = self.held_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits);
        charged.map(|_| ()).map_err(|held| self.refuse(request, held))
    }

    fn withdrawn(&self, request: Request) {
        self.held_bytes.fetch_sub(request.bytes, Ordering::Relaxed);
    }

    fn adopted(&self, block: &Block) {
        self.held_bytes.fetch_add(block.size_bytes, Ordering::Relaxed);
    }

    #[inline]
    fn took(&self, _: &Block) {}

    #[inline]
    fn freed(&self, size_bytes: u64) {
        self.held_bytes.fetch_sub(size_bytes, Ordering::Relaxed);
    }
}
