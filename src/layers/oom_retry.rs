//! `oom_retry:3`: a request that is out of memory is asked again after somebody freed something.
//!
//! From code a callback says whether to ask again. From the string the callback empties the cache of the
//! allocator below, if it has one, and lets other threads run; the number is the most repetitions of one
//! request. The callback runs with no lock of this layer held and may allocate and free; a request that
//! it makes is asked once only.

use std::fmt;
use std::sync::{Arc, LazyLock};

use super::watch::{Watch, Watched};
use crate::allocator::{Caching, DeviceAllocator, Request};
use crate::error::{AllocError, AllocResult, OutOfMemory};
use crate::threads::Region;

/// See the [module](self).
pub(crate) type Retrying<A> = Watched<A, Retry>;

/// Called with the request, the report and the number of the attempt that failed (from 1); says whether
/// to ask again.
pub type OomCallback = Arc<dyn Fn(Request, &OutOfMemory, u32) -> bool + Send + Sync>;

/// When to ask again.
pub struct Retry {
    /// `None` empties the cache.
    callback: Option<OomCallback>,
    attempts_max: u32,
}

impl fmt::Debug for Retry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = if self.callback.is_some() { "callback" } else { "empty_cache" };
        f.debug_struct("Retry").field("how", &how).field("most", &self.attempts_max).finish()
    }
}

/// `inner`, which is asked again, up to `retries_max` times, as long as the callback says so.
pub fn retry_with<A: DeviceAllocator>(
    inner: A,
    retries_max: u32,
    callback: OomCallback,
) -> Retrying<A> {
    Watched::new(inner, Retry { callback: Some(callback), attempts_max: retries_max })
}

/// `inner`, which is asked again up to `retries_max` times, each time with an empty cache.
pub fn retry<A: DeviceAllocator>(inner: A, retries_max: u32) -> Retrying<A> {
    Watched::new(inner, Retry { callback: None, attempts_max: retries_max })
}

/// A thread that runs a callback of any layer is inside of it.
static CALLBACKS: LazyLock<Region> = LazyLock::new(Region::default);

impl Retry {
    fn is_wanted(
        &self,
        request: Request,
        error: &AllocError,
        attempt: u32,
        cache: Option<&dyn Caching>,
    ) -> bool {
        let AllocError::OutOfMemory(report) = error else { return false };
        if CALLBACKS.is_here() {
            return false;
        }
        let _inside = CALLBACKS.enter();
        if let Some(callback) = &self.callback {
            return callback(request, report, attempt);
        }
        // A driver that fails now is asked again with the request, and says so then.
        let _ = cache.map(Caching::empty_cache);
        std::thread::yield_now();
        true
    }
}

impl Watch for Retry {
    /// Asks again as long as it is wanted. The last error otherwise.
    #[cold]
    #[inline(never)]
    fn failed<A: DeviceAllocator>(
        &self,
        request: Request,
        mut error: AllocError,
        below: &A,
    ) -> AllocResult {
        for attempt in 1..=self.attempts_max {
            if !self.is_wanted(request, &error, attempt, below.control().caching) {
                break;
            }
            match below.allocate(request) {
                Ok(made) => return Ok(made),
                Err(next) => error = next,
            }
        }
        Err(error)
    }
}
