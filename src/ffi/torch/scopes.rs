//! Scopes that PyTorch opens without saying for which streams.
//!
//! PyTorch begins a scope just before a stream's capture begins, with a filter that only C++ can ask.
//! So a scope begins as one of the calling thread. The first request on a captured stream settles
//! it: from then on it is the scope of that capture, whatever thread asks, and captured streams get
//! the care that a capture needs. While no scope is unsettled a request reads one number here.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, ThreadId};

use parking_lot::Mutex;

use crate::allocator::ScopeFilter;
use crate::driver::CaptureStatus;
use crate::ffi::guard::Failure;
use crate::ffi::instance::Instance;
use crate::ids::{PoolId, StreamId};

/// The open scopes of one device, the newest last.
#[derive(Debug, Default)]
pub(super) struct Scopes {
    unsettled: AtomicUsize,
    open: Mutex<Vec<Scope>>,
}

#[derive(Debug)]
struct Scope {
    pool: PoolId,
    state: State,
}

#[derive(Debug, PartialEq, Eq)]
enum State {
    /// Routes the requests of this thread, which began it.
    OfThread(ThreadId),
    /// Routes the requests of this capture.
    OfCapture(u64),
}

impl Scopes {
    /// Whether a request has to [`settle`](Self::settle) first.
    #[inline]
    pub(super) fn any_unsettled(&self) -> bool {
        self.unsettled.load(Ordering::Relaxed) != 0
    }

    pub(super) fn begin(&self, instance: &Instance, pool: PoolId) -> Result<(), Failure> {
        let mut open = self.open.lock();
        instance.pools()?.open_scope(pool, ScopeFilter::this_thread())?;
        open.push(Scope { pool, state: State::OfThread(thread::current().id()) });
        self.count(&open);
        Ok(())
    }

    pub(super) fn end(&self, instance: &Instance, pool: PoolId) -> Result<(), Failure> {
        let mut open = self.open.lock();
        open.retain(|scope| scope.pool != pool);
        self.count(&open);
        Ok(instance.pools()?.close_scope(pool)?)
    }

    /// The pool of the capture that `stream` is part of. A capture without a scope gets the newest
    /// unsettled one of this thread, or of any.
    #[cold]
    pub(super) fn settle(
        &self,
        instance: &Instance,
        stream: StreamId,
    ) -> Result<Option<PoolId>, Failure> {
        let CaptureStatus::Active { capture } = instance.driver.capture_status(stream)? else {
            return Ok(None);
        };
        let mut open = self.open.lock();
        let settled = State::OfCapture(capture);
        if let Some(scope) = open.iter().find(|scope| scope.state == settled) {
            return Ok(Some(scope.pool));
        }
        let own = State::OfThread(thread::current().id());
        let at = open.iter().rposition(|scope| scope.state == own);
        let any = |scope: &Scope| matches!(scope.state, State::OfThread(_));
        let Some(at) = at.or_else(|| open.iter().rposition(any)) else { return Ok(None) };
        let scope = &mut open[at];
        instance.reopen_scope(scope.pool, ScopeFilter::Capture(capture))?;
        scope.state = settled;
        let pool = scope.pool;
        self.count(&open);
        Ok(Some(pool))
    }

    fn count(&self, open: &[Scope]) {
        let unsettled = open.iter().filter(|scope| matches!(scope.state, State::OfThread(_)));
        self.unsettled.store(unsettled.count(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::driver::{Capture, Driver};

    fn bed() -> (Arc<Instance>, Scopes, StreamId) {
        let instance = Arc::new(Instance::open(Some(""), "sim").unwrap());
        let stream = instance.driver.create_stream().unwrap();
        (instance, Scopes::default(), stream)
    }

    fn take(instance: &Instance, scopes: &Scopes, stream: StreamId) -> u64 {
        let pool = scopes.any_unsettled().then(|| scopes.settle(instance, stream).unwrap());
        match pool.flatten() {
            Some(pool) => instance.allocate_in(pool, 4096, stream).unwrap(),
            None => instance.allocate(4096, stream).unwrap(),
        }
    }

    fn capture(instance: &Instance) -> &dyn Capture {
        instance.driver.capture().unwrap()
    }

    const POOL: PoolId = PoolId { capture: 7, user: 0 };

    fn in_pool(instance: &Instance) -> Vec<u64> {
        instance.pools().unwrap().live_addresses(POOL).unwrap()
    }

    #[test]
    fn a_capture_takes_its_requests_from_all_threads_and_no_others() {
        let (instance, scopes, stream) = bed();
        scopes.begin(&instance, POOL).unwrap();
        capture(&instance).begin(stream).unwrap();
        let elsewhere = instance.driver.create_stream().unwrap();
        let (first, second) = (
            std::thread::scope(|s| s.spawn(|| take(&instance, &scopes, stream)).join().unwrap()),
            take(&instance, &scopes, stream),
        );
        assert!(!scopes.any_unsettled());
        let outside = take(&instance, &scopes, elsewhere);
        capture(&instance).end(stream).unwrap();
        scopes.end(&instance, POOL).unwrap();
        let after = take(&instance, &scopes, stream);
        let mut expected = [first, second];
        expected.sort_unstable();
        assert_eq!(in_pool(&instance), expected);
        assert!(!expected.contains(&outside) && !expected.contains(&after));
        assert_eq!(instance.pools().unwrap().pool_users(POOL), Some(1));
    }

    #[test]
    fn without_a_capture_the_threads_requests_are_routed() {
        let (instance, scopes, stream) = bed();
        scopes.begin(&instance, POOL).unwrap();
        let inside = take(&instance, &scopes, stream);
        let other =
            std::thread::scope(|s| s.spawn(|| take(&instance, &scopes, stream)).join().unwrap());
        scopes.end(&instance, POOL).unwrap();
        assert_eq!(in_pool(&instance), [inside]);
        assert_ne!(inside, other);
        assert!(scopes.end(&instance, POOL).is_err(), "ended twice");
    }

    #[test]
    fn two_captures_at_once_keep_apart() {
        let (instance, scopes, stream) = bed();
        let other = PoolId { capture: 8, user: 0 };
        scopes.begin(&instance, POOL).unwrap();
        capture(&instance).begin(stream).unwrap();
        let first = take(&instance, &scopes, stream);
        let second_stream = instance.driver.create_stream().unwrap();
        scopes.begin(&instance, other).unwrap();
        capture(&instance).begin(second_stream).unwrap();
        let again = take(&instance, &scopes, stream);
        assert!(scopes.any_unsettled(), "the first capture does not take the second's scope");
        take(&instance, &scopes, second_stream);
        assert!(!scopes.any_unsettled());
        assert_eq!(in_pool(&instance).len(), 2);
        assert!(in_pool(&instance).contains(&first) && in_pool(&instance).contains(&again));
    }
}
