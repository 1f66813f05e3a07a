//! Which instance a thread uses: the innermost guard's.

use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::sync::Arc;

use super::CpuAllocator;

thread_local! {
    /// One entry for each guard with the guard's number, the innermost last.
    static CURRENT: RefCell<Vec<(u64, Arc<CpuAllocator>)>> = const { RefCell::new(Vec::new()) };
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
        CURRENT.with_borrow_mut(|stack| stack.push((number, allocator)));
        Self { number, thread: PhantomData }
    }
}

impl Drop for CpuCachingGuard {
    fn drop(&mut self) {
        // A thread that ends may have lost its list already; an instance goes after the list is free.
        let gone = CURRENT.try_with(|stack| {
            let mut stack = stack.borrow_mut();
            // Taken along by an outer one: nothing is here any more.
            let at = stack.iter().rposition(|(number, _)| *number == self.number);
            at.map(|at| stack.split_off(at))
        });
        drop(gone);
    }
}

/// The instance that this thread uses now; none outside of all guards.
#[must_use]
pub fn current() -> Option<Arc<CpuAllocator>> {
    let last = |stack: &RefCell<Vec<(u64, Arc<CpuAllocator>)>>| {
        stack.borrow().last().map(|(_, own)| Arc::clone(own))
    };
    CURRENT.try_with(last).ok().flatten()
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
