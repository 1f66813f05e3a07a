//! `oom_retry:3`: a request that is out of memory is asked again after somebody freed something.
//!
//! From code a callback says whether to ask again. From the string the callback empties the cache of the
//! allocator below, if it has one, and lets other threads run; the number is the most repetitions of one
//! request. The callback runs with no lock of this layer held and may allocate and free; a request that
//! it makes is asked once only.

use std::cell::Cell;
use std::fmt;
use std::sync::Arc;

use super::watch::{Watch, Watched};
use crate::allocator::{Allocation, Caching, DeviceAllocator, Request};
use crate::error::{AllocError, OutOfMemory};

/// See the [module](self).
pub type Retrying<A> = Watched<A, Retry>;

/// Called with the request, the report and the number of the attempt that failed (from 1); says whether
/// to ask again.
pub type OomCallback = Arc<dyn Fn(Request, &OutOfMemory, u32) -> bool + Send + Sync>;

/// When to ask again.
pub struct Retry {
    how: How,
    attempts_max: u32,
}

enum How {
    Callback(OomCallback),
    EmptyCache,
}

impl fmt::Debug for Retry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = match self.how {
            How::Callback(_) => "callback",
            How::EmptyCache => "empty_cache",
        };
        f.debug_struct("Retry").field("how", &how).field("most", &self.attempts_max).finish()
    }
}

/// `inner`, which is asked again, up to `retries_max` times, as long as the callback says so.
pub fn retry_with<A: DeviceAllocator>(
    inner: A,
    retries_max: u32,
    callback: OomCallback,
) -> Retrying<A> {
    Watched::new(inner, Retry { how: How::Callback(callback), attempts_max: retries_max })
}

/// `inner`, which is asked again up to `retries_max` times, each time with an empty cache.
pub fn retry<A: DeviceAllocator>(inner: A, retries_max: u32) -> Retrying<A> {
    Watched::new(inner, Retry { how: How::EmptyCache, attempts_max: retries_max })
}

thread_local! {
    /// Whether this thread is inside a callback.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Marks this thread while it lives, also when the callback panics.
struct Inside;

impl Inside {
    fn enter() -> Option<Self> {
        (!INSIDE.replace(true)).then_some(Self)
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        INSIDE.set(false);
    }
}

impl Retry {
    /// Asks again as long as it is wanted. The last error otherwise.
    #[cold]
    #[inline(never)]
    fn ask_again<A: DeviceAllocator>(
        &self,
        request: Request,
        mut error: AllocError,
        below: &A,
    ) -> Result<Allocation, AllocError> {
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

    fn is_wanted(
        &self,
        request: Request,
        error: &AllocError,
        attempt: u32,
        cache: Option<&dyn Caching>,
    ) -> bool {
        let AllocError::OutOfMemory(report) = error else {
            return false;
        };
        let Some(_inside) = Inside::enter() else {
            return false;
        };
        match &self.how {
            How::Callback(callback) => callback(request, report, attempt),
            How::EmptyCache => {
                // A driver that fails now is asked again with the request, and says so then.
                let _ = cache.map(Caching::empty_cache);
                std::thread::yield_now();
                true
            }
        }
    }
}

impl Watch for Retry {
    #[inline]
    fn allocate<A: DeviceAllocator>(
        &self,
        request: Request,
        below: &A,
    ) -> Result<Allocation, AllocError> {
        let mut answer = below.allocate(request);
        if let Err(error) = answer {
            answer = self.ask_again(request, error, below);
        }
        answer
    }
}
