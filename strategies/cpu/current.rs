//! Which instance a thread uses: the innermost guard's.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::Arc;

use super::CpuAllocator;
use crate::threads::Lasting;

thread_local! {
    /// One entry for each guard with the guard's number, the innermost last.
    static CURRENT: Lasting<Vec<(u64, Arc<CpuAllocator>)>> = const { Lasting::new(Vec::new()) };
    static LAST: Cell<u64> = const { Cell::new(0) };
}

/// While it lives, the thread's requests for host memory ([`CpuBuffer::new`](super::CpuBuffer::new),
/// [`current`]) go to one instance. Guards nest; one that is dropped before those inside it takes them
/// along. Threads that are started meanwhile begin without one.
#[derive(Debug)]
#[must_use = "the guard ends when it is dropped"]
pub struct CpuCachingGuard {
    number: u64,
    /// It belongs to its thread.
    thread: PhantomData<*const ()>,
}

impl CpuCachingGuard {
    /// From now on the thread uses this instance.
    pub fn new(allocator: Arc<CpuAllocator>) -> Self {
        let number = LAST.get() + 1;
        LAST.set(number);
        CURRENT.with(|stack| stack.change(|stack| stack.push((number, allocator))));
        Self { number, thread: PhantomData }
    }
}

impl Drop for CpuCachingGuard {
    fn drop(&mut self) {
        // An instance is dropped when the list is in its place again.
        let gone = CURRENT.with(|stack| {
            stack.change(|stack| {
                // An outer guard that was dropped first has removed it.
                let at = stack.iter().rposition(|(number, _)| *number == self.number);
                at.map(|at| stack.split_off(at))
            })
        });
        drop(gone);
    }
}

/// The instance that this thread uses now; none outside of all guards.
#[must_use]
pub fn current() -> Option<Arc<CpuAllocator>> {
    let last = |stack: &[(u64, Arc<CpuAllocator>)]| stack.last().map(|(_, own)| Arc::clone(own));
    CURRENT.with(|stack| stack.read(last))
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
/// assert_eq!(cache.control().counters.unwrap().statistics().hits, 2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn with_cpu_caching_allocator<R>(allocator: &Arc<CpuAllocator>, work: impl FnOnce() -> R) -> R {
    let _guard = CpuCachingGuard::new(Arc::clone(allocator));
    work()
}
