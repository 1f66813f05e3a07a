//! `oom_retry:3`: retries requests that are out of memory.
//!
//! A layer built in code calls a callback, which frees memory and decides whether to retry. A layer
//! built from the configuration string empties the cache of the allocator below, if it has one, and
//! yields to other threads before each retry. The number is the most retries of one request. The
//! callback runs with no lock of this layer held and may allocate and free. Requests that the callback
//! makes are not retried.

use std::fmt;
use std::sync::{Arc, LazyLock};

use super::watch::{Watch, Watched};
use crate::allocator::{Caching, DeviceAllocator, Request};
use crate::error::{AllocError, AllocResult, OutOfMemory};
use crate::threads::Region;

/// See the [module](self).
pub(crate) type Retrying<A> = Watched<A, Retry>;

/// Called with the request, the report and the number of the failed attempt (from 1). Returns true to
/// retry.
pub type OomCallback = Arc<dyn Fn(Request, &OutOfMemory, u32) -> bool + Send + Sync>;

/// The action before a retry, and the most retries of one request.
pub struct Retry {
    /// If `None`, a retry empties the cache.
    callback: Option<OomCallback>,
    retries_max: u32,
}

impl fmt::Debug for Retry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = if self.callback.is_some() { "callback" } else { "empty_cache" };
        f.debug_struct("Retry").field("how", &how).field("most", &self.retries_max).finish()
    }
}

/// Returns `inner` with up to `retries_max` retries of each request, for as long as the callback returns
/// true.
pub fn retry_with<A: DeviceAllocator>(
    inner: A,
    retries_max: u32,
    callback: OomCallback,
) -> Retrying<A> {
    Watched::new(inner, Retry { callback: Some(callback), retries_max })
}

/// Returns `inner` with up to `retries_max` retries of each request, each after emptying the cache.
pub fn retry<A: DeviceAllocator>(inner: A, retries_max: u32) -> Retrying<A> {
    Watched::new(inner, Retry { callback: None, retries_max })
}

/// The threads that are running a callback, or emptying a cache, for any layer of this kind.
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
        // If emptying the cache fails, the retry may fail too, and its error is returned.
        let _ = cache.map(Caching::empty_cache);
        std::thread::yield_now();
        true
    }
}

impl Watch for Retry {
    /// Retries until a request succeeds, fails for another reason than lack of memory, or may not be
    /// retried. Returns the last result.
    #[cold]
    #[inline(never)]
    fn failed<A: DeviceAllocator>(
        &self,
        request: Request,
        mut error: AllocError,
        below: &A,
    ) -> AllocResult {
        for attempt in 1..=self.retries_max {
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
