//! Which instance a thread uses: the innermost guard's.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::sync::Arc;

use super::CpuAllocator;

thread_local! {
    /// One entry for each guard, the innermost last.
    static CURRENT: RefCell<Vec<Arc<CpuAllocator>>> = const { RefCell::new(Vec::new()) };
}

/// While it lives, the thread's requests for host memory ([`CpuBuffer::new`](super::CpuBuffer::new),
/// [`current`]) go to one instance. Guards nest; one that is dropped before those inside it takes them
/// along. Threads that are started meanwhile begin without one.
#[derive(Debug)]
#[must_use = "the guard ends when it is dropped"]
pub struct CpuCachingGuard {
    depth: usize,
    /// It belongs to its thread.
    thread: PhantomData<*const ()>,
}

impl CpuCachingGuard {
    /// From now on the thread uses this instance.
    pub fn new(allocator: Arc<CpuAllocator>) -> Self {
        let depth = CURRENT.with_borrow_mut(|stack| {
            stack.push(allocator);
            stack.len() - 1
        });
        Self { depth, thread: PhantomData }
    }
}

impl Drop for CpuCachingGuard {
    fn drop(&mut self) {
        // A thread that ends may have lost its list already; an instance goes after the list is free.
        let depth = self.depth;
        let gone = CURRENT.try_with(|stack| {
            let mut stack = stack.borrow_mut();
            let depth = depth.min(stack.len());
            stack.split_off(depth)
        });
        drop(gone);
    }
}

/// The instance that this thread uses now; none outside of all guards.
#[must_use]
pub fn current() -> Option<Arc<CpuAllocator>> {
    CURRENT.try_with(|stack| stack.borrow().last().cloned()).ok().flatten()
}

/// Runs `work` with the thread's requests for host memory going to `allocator`.
///
/// ```
/// use std::sync::Arc;
/// use stratalloc::config::Settings;
/// use stratalloc::ids::DeviceId;
/// use stratalloc::strategies::{CpuAllocator, CpuBuffer, with_cpu_caching_allocator};
///
/// let cache = Arc::new(CpuAllocator::new(DeviceId(0), &Settings::default())?);
/// for _ in 0..3 {
///     with_cpu_caching_allocator(&cache, || CpuBuffer::zeroed(1 << 20).map(drop))?;
/// }
/// # use stratalloc::allocator::{Counters, DeviceAllocator};
/// assert_eq!(cache.counters().unwrap().statistics().hits, 2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn with_cpu_caching_allocator<R>(allocator: &Arc<CpuAllocator>, work: impl FnOnce() -> R) -> R {
    let _guard = CpuCachingGuard::new(Arc::clone(allocator));
    work()
}
