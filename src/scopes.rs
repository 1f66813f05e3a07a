//! The open scopes of one allocator. They route requests to pools, and show that captures may be
//! active.
//!
//! A scope accepts the requests of a thread, of a stream, of the streams in a capture, or those for
//! which a function returns true, as PyTorch's filters do. If several scopes accept a request, the
//! newest one determines its pool.
//!
//! A thread or a stream can begin a capture inside any scope, whatever the scope's filter. So the
//! allocator announces to the driver that captures are expected while any scope is open, and each
//! routed request queries the capture status of its stream. A scope that has routed a request of a
//! captured stream is marked as used by a capture from then on. Whether a stream is captured is always
//! queried from the driver, never derived from scopes.
//!
//! All strategies use this code. No lock is held while a filter runs, because it may be a user's
//! function.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use parking_lot::RwLock;

use crate::allocator::ScopeFilter;
use crate::driver::{CaptureStatus, Driver, DriverResult, capture_status_of};
use crate::ids::{PoolId, StreamId, ThreadNumber};

/// The open scopes, each with data of type `P` that the allocator keeps for it.
#[derive(Debug)]
pub(crate) struct Scopes<P> {
    driver: Arc<dyn Driver>,
    count: AtomicUsize,
    /// The number of open scopes that are marked as used by a capture.
    captures: AtomicUsize,
    /// The number of open scopes that were announced to the driver. Never greater than the driver's own
    /// count.
    announced: AtomicU64,
    /// The open scopes. The newest is last.
    open: RwLock<Arc<Vec<Arc<Scope<P>>>>>,
}

#[derive(Debug)]
struct Scope<P> {
    pool: PoolId,
    filter: ScopeFilter,
    data: P,
    /// The thread that opened the scope. A capture in the scope runs on this thread.
    thread: ThreadNumber,
    is_captures: AtomicBool,
    is_announced: bool,
}

/// A scope that was closed. Drop it without holding a lock: this drops its filter, which may be a
/// user's function.
#[derive(Debug)]
pub(crate) struct Closed<P> {
    /// True if a capture used the scope.
    pub(crate) was_captures: bool,
    _scope: Arc<Scope<P>>,
}

/// The pool of a request, and the capture status of its stream.
#[derive(Debug)]
pub(crate) struct Routed<P> {
    /// The data of the scope that accepts the request, if any scope does.
    pub(crate) to: Option<P>,
    /// The capture status of the stream. Not queried while no scope is open, and `None` then.
    pub(crate) status: CaptureStatus,
}

impl<P> Scopes<P> {
    pub(crate) fn new(driver: Arc<dyn Driver>) -> Self {
        Self {
            driver,
            count: AtomicUsize::new(0),
            captures: AtomicUsize::new(0),
            announced: AtomicU64::new(0),
            open: RwLock::default(),
        }
    }

    /// Returns true if any scope is open. Costs one relaxed load.
    #[inline]
    pub(crate) fn any(&self) -> bool {
        self.count.load(Ordering::Relaxed) != 0
    }

    /// Returns true if any scope is marked as used by a capture. Costs one relaxed load.
    #[inline]
    pub(crate) fn any_capture(&self) -> bool {
        self.captures.load(Ordering::Relaxed) != 0
    }

    /// Returns true if a scope that is used by a capture was opened on the calling thread. This thread
    /// may then not synchronize or query events.
    #[inline]
    pub(crate) fn captures_here(&self) -> bool {
        if !self.any_capture() {
            return false;
        }
        let thread = ThreadNumber::current();
        let here = |scope: &Arc<Scope<P>>| {
            scope.thread == thread && scope.is_captures.load(Ordering::Relaxed)
        };
        self.open.read().iter().any(here)
    }

    /// Returns true if other allocators with the same driver have open scopes.
    pub(crate) fn any_in_other_allocators(&self) -> bool {
        let Some(capture) = self.driver.capture() else { return false };
        // If the driver cannot report the number, assume that a capture may be active.
        capture.expected().map_or(true, |expected| expected > self.announced.load(Ordering::SeqCst))
    }

    /// Opens a scope that takes precedence over all others. The caller has checked that the pool may have
    /// one more.
    pub(crate) fn open(&self, pool: PoolId, filter: ScopeFilter, data: P) {
        // If this call fails, the driver does not count the scope. That is recorded in `is_announced`.
        let announced = self.driver.capture().map(|capture| capture.expect_captures(true));
        let is_announced = matches!(announced, Some(Ok(())));
        self.announced.fetch_add(u64::from(is_announced), Ordering::SeqCst);
        let is_captures = matches!(filter, ScopeFilter::Capture(_));
        self.captures.fetch_add(usize::from(is_captures), Ordering::Relaxed);
        let thread = ThreadNumber::current();
        let is_captures = AtomicBool::new(is_captures);
        let scope = Arc::new(Scope { pool, filter, data, thread, is_captures, is_announced });
        Arc::make_mut(&mut *self.open.write()).push(scope);
        self.count.fetch_add(1, Ordering::Relaxed);
    }

    /// Closes the scope of a pool: the newest one that the calling thread opened, or else the newest.
    /// Returns `None` if the pool has no open scope.
    #[must_use = "a user's filter is dropped with it"]
    pub(crate) fn close(&self, pool: PoolId) -> Option<Closed<P>> {
        let scope = {
            let mut open = self.open.write();
            let thread = ThreadNumber::current();
            let own = open.iter().rposition(|scope| scope.pool == pool && scope.thread == thread);
            let at = own.or_else(|| open.iter().rposition(|scope| scope.pool == pool))?;
            self.count.fetch_sub(1, Ordering::Relaxed);
            Arc::make_mut(&mut open).remove(at)
        };
        // Sets the flag, so that a request routed at the same time does not count the scope as used
        // once more.
        let was_captures = scope.is_captures.swap(true, Ordering::Relaxed);
        self.captures.fetch_sub(usize::from(was_captures), Ordering::Relaxed);
        if scope.is_announced {
            self.announced.fetch_sub(1, Ordering::SeqCst);
            // This reverses the call in `open`, which succeeded.
            let _ = self.driver.capture().map(|capture| capture.expect_captures(false));
        }
        Some(Closed { was_captures, _scope: scope })
    }

    /// Closes all scopes when the allocator is dropped.
    pub(crate) fn close_all(&self) {
        let pools: Vec<_> = self.open.read().iter().map(|scope| scope.pool).collect();
        for pool in pools {
            drop(self.close(pool));
        }
    }
}

impl<P: Clone> Scopes<P> {
    /// Returns the data of the open scope of a pool.
    pub(crate) fn of(&self, pool: PoolId) -> Option<P> {
        let open = self.open.read();
        open.iter().find(|scope| scope.pool == pool).map(|scope| scope.data.clone())
    }

    /// Finds the newest scope that accepts a request on a stream.
    ///
    /// # Errors
    ///
    /// [`DriverError`](crate::error::DriverError) when the capture status of the stream cannot be
    /// queried.
    #[inline]
    pub(crate) fn route(&self, stream: StreamId) -> DriverResult<Routed<P>> {
        if !self.any() {
            return Ok(Routed { to: None, status: CaptureStatus::None });
        }
        let status = capture_status_of(&*self.driver, stream)?;
        let open = Arc::clone(&self.open.read());
        let scope = open.iter().rev().find(|scope| accepts(&scope.filter, stream, status));
        if let Some(scope) = scope
            && status != CaptureStatus::None
            && !scope.is_captures.load(Ordering::Relaxed)
        {
            let was_captures = scope.is_captures.swap(true, Ordering::Relaxed);
            self.captures.fetch_add(usize::from(!was_captures), Ordering::Relaxed);
        }
        Ok(Routed { to: scope.map(|scope| scope.data.clone()), status })
    }
}

impl<P> Drop for Scopes<P> {
    fn drop(&mut self) {
        self.close_all();
    }
}

/// Returns true if a filter accepts a request that the calling thread makes on a stream with this
/// capture status.
pub(crate) fn accepts(filter: &ScopeFilter, stream: StreamId, status: CaptureStatus) -> bool {
    match filter {
        ScopeFilter::Thread(thread) => *thread == ThreadNumber::current(),
        ScopeFilter::Stream(own) => *own == stream,
        ScopeFilter::Capture(capture) => status == CaptureStatus::Active { capture: *capture },
        ScopeFilter::Where(accepts) => accepts(stream),
    }
}
