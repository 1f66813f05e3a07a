//! `oom_retry:3`: a request that is out of memory is asked again after somebody freed something.
//!
//! From code a callback says whether to ask again. From the string the callback empties the cache of the
//! allocator below, if it has one, and lets other threads run; the number is the most repetitions of one
//! request. The callback runs with no lock of this layer held and may allocate and free; a request that
//! it makes is asked once only.

use std::cell::Cell;
use std::fmt;
use std::sync::Arc;

use super::layered::{Layer, Layered};
use crate::allocator::{Allocation, DeviceAllocator, Request};
use crate::error::{AllocError, OutOfMemory};

/// See the [module](self).
pub type Retrying<A> = Layered<Retry<A>>;

/// Called with the request, the report and the number of the attempt that failed (from 1); says whether
/// to ask again.
pub type OomCallback = Arc<dyn Fn(Request, &OutOfMemory, u32) -> bool + Send + Sync>;

/// An allocator, and when to ask it again.
pub struct Retry<A> {
    inner: A,
    how: How,
    attempts_max: u32,
}

enum How {
    Callback(OomCallback),
    EmptyCache,
}

impl<A> fmt::Debug for Retry<A> {
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
    Layered::new(Retry { inner, how: How::Callback(callback), attempts_max: retries_max })
}

/// `inner`, which is asked again up to `retries_max` times, each time with an empty cache.
pub fn retry<A: DeviceAllocator>(inner: A, retries_max: u32) -> Retrying<A> {
    Layered::new(Retry { inner, how: How::EmptyCache, attempts_max: retries_max })
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

impl<A: DeviceAllocator> Retry<A> {
    /// Asks again as long as it is wanted. The last error otherwise.
    #[cold]
    #[inline(never)]
    fn ask_again(&self, request: Request, mut error: AllocError) -> Result<Allocation, AllocError> {
        for attempt in 1..=self.attempts_max {
            if !self.is_wanted(request, &error, attempt) {
                break;
            }
            match self.inner.allocate(request) {
                Ok(made) => return Ok(made),
                Err(next) => error = next,
            }
        }
        Err(error)
    }

    fn is_wanted(&self, request: Request, error: &AllocError, attempt: u32) -> bool {
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
                let _ = self.inner.caching().map(|caching| caching.empty_cache());
                std::thread::yield_now();
                true
            }
        }
    }
}

impl<A: DeviceAllocator> Layer for Retry<A> {
    type Inner = A;

    #[inline]
    fn inner(&self) -> &A {
        &self.inner
    }

    #[inline]
    fn allocate(&self, request: Request) -> Result<Allocation, AllocError> {
        let mut answer = self.inner.allocate(request);
        if let Err(error) = answer {
            answer = self.ask_again(request, error);
        }
        answer
    }
}
