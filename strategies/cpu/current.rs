//! The instance that a thread uses: the one of the thread's innermost guard.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::Arc;

use super::CpuAllocator;
use crate::threads::Lasting;

thread_local! {
    /// One entry for each open guard of the thread: the guard's number and instance. The innermost is
    /// last.
    static CURRENT: Lasting<Vec<(u64, Arc<CpuAllocator>)>> = const { Lasting::new(Vec::new()) };
    static LAST: Cell<u64> = const { Cell::new(0) };
}

/// Makes the thread's requests for host memory ([`CpuBuffer::new`](super::CpuBuffer::new), [`current`])
/// use one instance while the guard lives. Guards nest. Dropping a guard also ends the guards created
/// after it. New threads start without a guard.
#[derive(Debug)]
#[must_use = "the guard ends when it is dropped"]
pub struct CpuCachingGuard {
    number: u64,
    /// Makes the guard not `Send`, because it belongs to its thread.
    thread: PhantomData<*const ()>,
}

impl CpuCachingGuard {
    /// Makes the thread use this instance from now on.
    pub fn new(allocator: Arc<CpuAllocator>) -> Self {
        let number = LAST.get() + 1;
        LAST.set(number);
        CURRENT.with(|stack| stack.change(|stack| stack.push((number, allocator))));
        Self { number, thread: PhantomData }
    }
}

impl Drop for CpuCachingGuard {
    fn drop(&mut self) {
        // The instances are dropped only after the list is stored back, because dropping one may use the
        // list.
        let removed = CURRENT.with(|stack| {
            stack.change(|stack| {
                // The entry is absent if an outer guard was dropped first.
                let at = stack.iter().rposition(|(number, _)| *number == self.number);
                at.map(|at| stack.split_off(at))
            })
        });
        drop(removed);
    }
}

/// Returns the instance that this thread uses, or `None` outside of all guards.
#[must_use]
pub fn current() -> Option<Arc<CpuAllocator>> {
    let last = |stack: &[(u64, Arc<CpuAllocator>)]| stack.last().map(|(_, own)| Arc::clone(own));
    CURRENT.with(|stack| stack.read(last))
}

/// Runs `work`. During the call, the thread's requests for host memory use `allocator`.
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
