//! The open scopes of one allocator. They route requests to pools, and show that captures may be
//! active.
//!
//! A scope accepts the requests of a thread, of a stream, of the streams in a capture, or those for
//! which a function returns true, as PyTorch's filters do. If several scopes accept a request, the
//! newest one determines its pool. Open scopes are found by thread, stream and capture, so their number
//! matters to a request only for those that select by a function.
//!
//! A thread or a stream can begin a capture inside any scope, whatever the scope's filter. So the
//! allocator announces to the driver that captures are expected while any scope is open, and each
//! routed request queries the capture status of its stream. A scope that has routed a request of a
//! captured stream is marked as used by a capture from then on. Whether a stream is captured is always
//! queried from the driver, never derived from scopes.
//!
//! All strategies use this code. No lock is held while a filter runs, because it may be a user's
//! function.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use hashbrown::HashMap;
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
    open: RwLock<OpenScopes<P>>,
}

#[derive(Debug)]
struct OpenScopes<P> {
    /// The open scopes under each of their keys, by number.
    by_key: HashMap<Key, BTreeMap<u64, Arc<Scope<P>>>>,
    /// The open scopes whose filter is a function. The newest is last. A request clones the list, because it
    /// calls the functions without the lock.
    functions: Arc<Vec<Arc<Scope<P>>>>,
    next_number: u64,
}

/// A property by which open scopes are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Key {
    /// Accepts the requests of this thread.
    Thread(ThreadNumber),
    /// Accepts the requests on this stream.
    Stream(StreamId),
    /// Accepts the requests on streams in this capture.
    Capture(u64),
    /// Belongs to this pool.
    Pool(PoolId),
    /// Was opened by this thread.
    OpenedBy(ThreadNumber),
    /// Belongs to this pool and was opened by this thread.
    PoolOpenedBy(PoolId, ThreadNumber),
}

#[derive(Debug)]
struct Scope<P> {
    /// Later scopes have larger numbers.
    number: u64,
    pool: PoolId,
    filter: ScopeFilter,
    data: P,
    /// The thread that opened the scope. A capture in the scope runs on this thread.
    thread: ThreadNumber,
    is_captures: AtomicBool,
    /// How many open scopes of this thread are marked as used by a capture. Shared by these scopes.
    captures_of_thread: Arc<AtomicUsize>,
    is_announced: bool,
}

impl<P> Scope<P> {
    /// Returns the keys of the scope.
    fn keys(&self) -> impl Iterator<Item = Key> + use<P> {
        let accepts = match self.filter {
            ScopeFilter::Thread(thread) => Some(Key::Thread(thread)),
            ScopeFilter::Stream(stream) => Some(Key::Stream(stream)),
            ScopeFilter::Capture(capture) => Some(Key::Capture(capture)),
            ScopeFilter::Where(_) => None,
        };
        let (pool, thread) = (self.pool, self.thread);
        let opened = [Key::Pool(pool), Key::OpenedBy(thread), Key::PoolOpenedBy(pool, thread)];
        opened.into_iter().chain(accepts)
    }
}

impl<P> Default for OpenScopes<P> {
    fn default() -> Self {
        Self { by_key: HashMap::new(), functions: Arc::default(), next_number: 0 }
    }
}

impl<P> OpenScopes<P> {
    /// Returns the newest scope with this key.
    #[inline]
    fn newest(&self, key: Key) -> Option<&Arc<Scope<P>>> {
        Some(self.by_key.get(&key)?.last_key_value()?.1)
    }

    fn add(&mut self, scope: &Arc<Scope<P>>) {
        for key in scope.keys() {
            self.by_key.entry(key).or_default().insert(scope.number, Arc::clone(scope));
        }
        if matches!(scope.filter, ScopeFilter::Where(_)) {
            Arc::make_mut(&mut self.functions).push(Arc::clone(scope));
        }
    }

    fn remove(&mut self, scope: &Scope<P>) {
        for key in scope.keys() {
            if let Some(with_key) = self.by_key.get_mut(&key) {
                with_key.remove(&scope.number);
                if with_key.is_empty() {
                    self.by_key.remove(&key);
                }
            }
        }
        if let Ok(at) = self.functions.binary_search_by_key(&scope.number, |own| own.number) {
            Arc::make_mut(&mut self.functions).remove(at);
        }
    }

    /// Returns the newest scope whose filter is no function and accepts a request of the calling thread.
    fn newest_without_function(
        &self,
        stream: StreamId,
        status: CaptureStatus,
    ) -> Option<&Arc<Scope<P>>> {
        let capture = match status {
            CaptureStatus::Active { capture } => Some(Key::Capture(capture)),
            _ => None,
        };
        let keys = [Key::Thread(ThreadNumber::current()), Key::Stream(stream)];
        let found = keys.into_iter().chain(capture).filter_map(|key| self.newest(key));
        found.max_by_key(|scope| scope.number)
    }
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
        let open = self.open.read();
        let own = open.newest(Key::OpenedBy(ThreadNumber::current()));
        own.is_some_and(|scope| scope.captures_of_thread.load(Ordering::Relaxed) != 0)
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
        let thread = ThreadNumber::current();
        {
            let mut open = self.open.write();
            let number = open.next_number;
            open.next_number += 1;
            let own = open.newest(Key::OpenedBy(thread));
            let scope = Arc::new(Scope {
                number,
                pool,
                filter,
                data,
                thread,
                is_captures: AtomicBool::new(false),
                captures_of_thread: own
                    .map_or_else(Arc::default, |own| Arc::clone(&own.captures_of_thread)),
                is_announced,
            });
            if is_captures {
                self.mark_as_captures(&scope);
            }
            open.add(&scope);
        }
        self.count.fetch_add(1, Ordering::Relaxed);
    }

    /// Marks a scope as used by a capture.
    fn mark_as_captures(&self, scope: &Scope<P>) {
        let is_marked = scope.is_captures.load(Ordering::Relaxed);
        if !is_marked && !scope.is_captures.swap(true, Ordering::Relaxed) {
            scope.captures_of_thread.fetch_add(1, Ordering::Relaxed);
            self.captures.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Closes the scope of a pool: the newest one that the calling thread opened, or else the newest.
    /// Returns `None` if the pool has no open scope.
    #[must_use = "a user's filter is dropped with it"]
    pub(crate) fn close(&self, pool: PoolId) -> Option<Closed<P>> {
        let scope = {
            let mut open = self.open.write();
            let own = open.newest(Key::PoolOpenedBy(pool, ThreadNumber::current()));
            let scope = Arc::clone(own.or_else(|| open.newest(Key::Pool(pool)))?);
            open.remove(&scope);
            self.count.fetch_sub(1, Ordering::Relaxed);
            scope
        };
        // Sets the flag, so that a request routed at the same time does not count the scope as used
        // once more.
        let was_captures = scope.is_captures.swap(true, Ordering::Relaxed);
        if was_captures {
            scope.captures_of_thread.fetch_sub(1, Ordering::Relaxed);
            self.captures.fetch_sub(1, Ordering::Relaxed);
        }
        if scope.is_announced {
            self.announced.fetch_sub(1, Ordering::SeqCst);
            // This reverses the call in `open`, which succeeded.
            let _ = self.driver.capture().map(|capture| capture.expect_captures(false));
        }
        Some(Closed { was_captures, _scope: scope })
    }

    /// Closes all scopes when the allocator is dropped.
    pub(crate) fn close_all(&self) {
        let pools: BTreeMap<u64, PoolId> = {
            let open = self.open.read();
            let of_pools = open.by_key.iter().filter(|(key, _)| matches!(key, Key::Pool(_)));
            let scopes = of_pools.flat_map(|(_, scopes)| scopes.values());
            scopes.map(|scope| (scope.number, scope.pool)).collect()
        };
        for pool in pools.into_values() {
            drop(self.close(pool));
        }
    }
}

impl<P: Clone> Scopes<P> {
    /// Returns the data of the open scope of a pool.
    pub(crate) fn of(&self, pool: PoolId) -> Option<P> {
        self.open.read().newest(Key::Pool(pool)).map(|scope| scope.data.clone())
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
        let (found, functions) = {
            let open = self.open.read();
            let functions = (!open.functions.is_empty()).then(|| Arc::clone(&open.functions));
            (open.newest_without_function(stream, status).cloned(), functions)
        };
        let is_newer =
            |scope: &&Arc<Scope<P>>| found.as_ref().is_none_or(|found| found.number < scope.number);
        let mut newer = functions.iter().flat_map(|all| all.iter().rev()).take_while(is_newer);
        let accepting = newer.find(|scope| accepts(&scope.filter, stream, status));
        let scope = accepting.or(found.as_ref());
        if let Some(scope) = scope
            && status != CaptureStatus::None
        {
            self.mark_as_captures(scope);
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
