//! The open scopes of one allocator: where requests go, and whether captures may be under way.
//!
//! Any scope may meet a capture, whatever its filter, because a thread or a stream can begin one inside it.
//! So the driver expects captures while any scope is open, each request that comes by asks the driver whether
//! its stream is captured, and a scope that has routed such a request is a capture's from then on. Nothing
//! else knows of captures: whether one stream is in one is always the driver's answer.
//!
//! No lock is held while a filter runs, because it may be a user's function.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use parking_lot::RwLock;

use crate::allocator::ScopeFilter;
use crate::driver::{CaptureStatus, Driver, DriverResult, capture_status_of};
use crate::ids::{PoolId, StreamId, ThreadNumber};

/// The open scopes, with what the allocator keeps for each.
#[derive(Debug)]
pub(crate) struct Scopes<P> {
    driver: Arc<dyn Driver>,
    count: AtomicUsize,
    /// How many of them are captures'.
    captures: AtomicUsize,
    /// How many of them the driver was told of. Never more than it knows.
    told: AtomicU64,
    /// The newest last.
    open: RwLock<Arc<Vec<Arc<Scope<P>>>>>,
}

#[derive(Debug)]
struct Scope<P> {
    pool: PoolId,
    filter: ScopeFilter,
    kept: P,
    /// The thread that opened it. A capture in the scope runs on it.
    thread: ThreadNumber,
    is_captures: AtomicBool,
    is_told: bool,
}

/// A scope that was closed. Dropping it drops its filter, which may be a user's: where no lock is held.
#[derive(Debug)]
pub(crate) struct Closed<P> {
    /// Whether it was a capture's.
    pub(crate) was_captures: bool,
    _scope: Arc<Scope<P>>,
}

/// Where a request goes.
#[derive(Debug)]
pub(crate) struct Routed<P> {
    /// What is kept for the scope that accepts it.
    pub(crate) to: Option<P>,
    /// Of its stream. Without scopes nobody asked, and this is `None`.
    pub(crate) status: CaptureStatus,
}

impl<P> Scopes<P> {
    pub(crate) fn new(driver: Arc<dyn Driver>) -> Self {
        Self {
            driver,
            count: AtomicUsize::new(0),
            captures: AtomicUsize::new(0),
            told: AtomicU64::new(0),
            open: RwLock::default(),
        }
    }

    /// Whether any is open. One relaxed load.
    #[inline]
    pub(crate) fn any(&self) -> bool {
        self.count.load(Ordering::Relaxed) != 0
    }

    /// Whether a capture is under way in any of them, as far as is known. One relaxed load.
    #[inline]
    pub(crate) fn any_capture(&self) -> bool {
        self.captures.load(Ordering::Relaxed) != 0
    }

    /// Whether the calling thread has such a capture under way: it may not wait or ask events then.
    #[inline]
    pub(crate) fn captures_here(&self) -> bool {
        let thread = ThreadNumber::current();
        let here = |scope: &Arc<Scope<P>>| {
            scope.thread == thread && scope.is_captures.load(Ordering::Relaxed)
        };
        self.any_capture() && self.open.read().iter().any(here)
    }

    /// Whether others over the same driver have scopes open.
    pub(crate) fn any_elsewhere(&self) -> bool {
        let Some(capture) = self.driver.capture() else { return false };
        // A driver that fails to say may hide one.
        capture.expected().map_or(true, |expected| expected > self.told.load(Ordering::SeqCst))
    }

    /// Opens a scope, before all others. The caller has seen that its pool has none.
    pub(crate) fn open(&self, pool: PoolId, filter: ScopeFilter, kept: P) {
        // A driver that does not hear it behaves as one that nobody tells.
        let told = self.driver.capture().map(|capture| capture.expect_captures(true));
        let is_told = matches!(told, Some(Ok(())));
        self.told.fetch_add(u64::from(is_told), Ordering::SeqCst);
        let is_captures = matches!(filter, ScopeFilter::Capture(_));
        self.captures.fetch_add(usize::from(is_captures), Ordering::Relaxed);
        let thread = ThreadNumber::current();
        let is_captures = AtomicBool::new(is_captures);
        let scope = Arc::new(Scope { pool, filter, kept, thread, is_captures, is_told });
        Arc::make_mut(&mut *self.open.write()).push(scope);
        self.count.fetch_add(1, Ordering::Relaxed);
    }

    /// Closes a pool's scope. `None` when it has none.
    #[must_use = "a user's filter is dropped with it"]
    pub(crate) fn close(&self, pool: PoolId) -> Option<Closed<P>> {
        let scope = {
            let mut open = self.open.write();
            let at = open.iter().position(|scope| scope.pool == pool)?;
            self.count.fetch_sub(1, Ordering::Relaxed);
            Arc::make_mut(&mut open).remove(at)
        };
        // A request that is being routed by it finds it taken.
        let was_captures = scope.is_captures.swap(true, Ordering::Relaxed);
        self.captures.fetch_sub(usize::from(was_captures), Ordering::Relaxed);
        if scope.is_told {
            self.told.fetch_sub(1, Ordering::SeqCst);
            // What the driver was told of it knows.
            let _ = self.driver.capture().map(|capture| capture.expect_captures(false));
        }
        Some(Closed { was_captures, _scope: scope })
    }

    /// Closes all of them, when the allocator goes.
    pub(crate) fn close_all(&self) {
        let pools: Vec<_> = self.open.read().iter().map(|scope| scope.pool).collect();
        for pool in pools {
            drop(self.close(pool));
        }
    }
}

impl<P: Clone> Scopes<P> {
    /// What is kept for a pool's open scope.
    pub(crate) fn of(&self, pool: PoolId) -> Option<P> {
        let open = self.open.read();
        open.iter().find(|scope| scope.pool == pool).map(|scope| scope.kept.clone())
    }

    /// Where a request on a stream goes: to the pool of the newest scope that accepts it.
    ///
    /// # Errors
    ///
    /// [`DriverError`](crate::error::DriverError) when the driver cannot say whether the stream is captured.
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
        Ok(Routed { to: scope.map(|scope| scope.kept.clone()), status })
    }
}

impl<P> Drop for Scopes<P> {
    fn drop(&mut self) {
        self.close_all();
    }
}

/// Whether a filter accepts a request of the calling thread on a stream of this state.
pub(crate) fn accepts(filter: &ScopeFilter, stream: StreamId, status: CaptureStatus) -> bool {
    match filter {
        ScopeFilter::Thread(thread) => *thread == ThreadNumber::current(),
        ScopeFilter::Stream(own) => *own == stream,
        ScopeFilter::Capture(capture) => status == CaptureStatus::Active { capture: *capture },
        ScopeFilter::Where(accepts) => accepts(stream),
    }
}
