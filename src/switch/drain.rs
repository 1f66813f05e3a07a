//! Retired allocators: when their memory is released, and when they are dropped.
//!
//! Idle memory of a retired allocator is released at the switch. After that it is released before the
//! current allocator grows, once an eighth of the live blocks has been freed since the last release.
//! (The current allocator must call its hooks before it grows; those of the caching engine do.) All of
//! it is released before a request fails. So a free never waits, except the one that frees the last
//! block: it drops the allocator, and the driver may wait when it releases the segments.
//!
//! A drop is postponed to a later check (the next miss, release, switch or `process_events`) in two
//! cases: the driver refuses the idle memory, which a drop would leak, or blocks wait for other streams.
//!
//! While a scope is open no retired allocator is dropped, and no scope opens during a drop: the scope
//! may belong to a stream capture, which the drop would break.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use parking_lot::RwLockWriteGuard;

use super::core::{Core, SwitchState};
use super::generation::Generation;
use super::hooks;
use super::ledger::Ledger;
use super::no_scopes::NoScopes;
use crate::allocator::{Counters, CrossStream, DeviceAllocator, Request};
use crate::driver::CaptureStatus;
use crate::error::{AllocError, OutOfMemory};
use crate::size::human_bytes;
use crate::stats::PerPool;
use crate::sync::{All, Defer, Read};

/// The most allocators in turn that may refuse one request because each was replaced during the attempt.
/// It ends the loop if a callback switches on every call.
const ATTEMPTS_MAX: usize = 64;

/// A request that an allocator has refused.
#[derive(Debug)]
struct Refusal {
    error: AllocError,
    /// The allocator was replaced during the call.
    is_retired: bool,
    /// The allocator has no hooks, so it notified no observer.
    is_silent: bool,
}

impl Core {
    /// Allocates from the current allocator. Out of memory is final only when no retired allocator has
    /// idle memory.
    #[inline(always)]
    pub(super) fn take<T>(
        &self,
        request: Request,
        take: impl Fn(&Generation) -> Result<T, AllocError>,
    ) -> Result<T, AllocError> {
        let generation = self.generations.read();
        // One variable from here to the caller: each further copy costs a hit 5 to 10 ns.
        let mut taken = take(&generation);
        if taken.is_err() {
            taken = match self.after_take(generation, taken) {
                Ok(taken) => Ok(taken),
                Err(refusal) => self.refused(request, refusal, &take),
            };
        } else {
            self.leave(generation);
        }
        taken
    }

    #[cold]
    #[inline(never)]
    fn after_take<T>(
        &self,
        generation: Read<'_, Generation>,
        taken: Result<T, AllocError>,
    ) -> Result<T, Refusal> {
        let is_silent = generation.strategy.control().hooks.is_none();
        let is_retired = self.leave(generation);
        taken.map_err(|error| Refusal { error, is_retired, is_silent })
    }

    /// Retries a refused request: on the new current allocator if the old one was replaced (at most 64
    /// times), and once more after retired allocators released something. Observers are notified of the
    /// last refusal only.
    #[cold]
    #[inline(never)]
    fn refused<T>(
        &self,
        request: Request,
        mut refusal: Refusal,
        take: &impl Fn(&Generation) -> Result<T, AllocError>,
    ) -> Result<T, AllocError> {
        let (mut counted, mut may_make_room, mut attempts) = (0, true, 0);
        loop {
            let Refusal { error, is_retired, is_silent } = refusal;
            let AllocError::OutOfMemory(mut report) = error else {
                self.ledger.lock().hide_refusals(counted);
                return Err(error);
            };
            let was_notified = hooks::was_refused();
            counted += i64::from(was_notified || is_silent);
            attempts += 1;
            let was_replaced = is_retired && attempts < ATTEMPTS_MAX;
            let again =
                was_replaced || (std::mem::take(&mut may_make_room) && self.make_room(request));
            if !again {
                self.ledger.lock().hide_refusals((counted - 1).max(0));
                self.explain(&mut report);
                self.retry_blocked_drop();
                if was_notified || is_silent {
                    self.hooks.notify_out_of_memory(&report);
                }
                return Err(AllocError::OutOfMemory(report));
            }
            let generation = self.generations.read();
            let taken = take(&generation);
            match self.after_take(generation, taken) {
                Err(again) => refusal = again,
                Ok(taken) => {
                    self.ledger.lock().hide_refusals(counted);
                    return Ok(taken);
                }
            }
        }
    }

    /// Adds a hint to the report with the bytes that retired allocators still hold.
    fn explain(&self, report: &mut OutOfMemory) {
        let retired = self.generations.retired();
        if retired > 0 {
            let held = human_bytes(self.sum_of_retired(Generation::held_bytes));
            report.hints.push(format!(
                "{retired} replaced allocators hold {held}, for live blocks, or \
                 because the driver failed to release it"
            ));
        }
    }

    /// Releases all idle memory of retired allocators; returns true if that made room. Releases nothing
    /// if that could break a stream capture.
    fn make_room(&self, request: Request) -> bool {
        if self.generations.retired() == 0 {
            return false;
        }
        let captured = self.driver.capture_status(request.stream);
        if !matches!(captured, Ok(CaptureStatus::None)) {
            return false;
        }
        // Reserved bytes of a driver pool that several allocators share are counted once for each.
        let figures = [Generation::held_bytes, Generation::reserved_bytes];
        let before = figures.map(|figure| self.sum_of_retired(figure));
        {
            let Some(_no_scopes) = self.hold_scopes_off() else { return false };
            self.each(|generation| {
                if generation.is_retired() {
                    generation.release_idle();
                }
            });
        }
        self.check_all_retired();
        self.update_limit();
        let now = figures.map(|figure| self.sum_of_retired(figure));
        let has_room = now[0] < before[0] || now[1] < before[1];
        self.retry_blocked_drop();
        has_room
    }

    /// Runs before the current allocator grows. Releases idle memory of retired allocators that are due,
    /// then calls the users' callbacks. Returns true if a callback freed something.
    pub(super) fn before_growing(&self) -> bool {
        if self.generations.retired() > 0
            && let Some(no_scopes) = self.hold_scopes_off()
        {
            let mut released = false;
            self.each(|generation| {
                if generation.is_retired() && generation.needs_release.load(Ordering::Relaxed) {
                    generation.release_idle();
                    released = true;
                }
            });
            drop(no_scopes);
            if released {
                self.run_requested_checks();
                self.update_limit();
            }
            self.retry_blocked_drop();
        }
        self.hooks.free_some_memory()
    }

    fn no_scope(&self) -> bool {
        self.open_scopes.load(Ordering::SeqCst) == 0
    }

    /// Keeps scopes from opening until the guard is dropped; returns `None` if a scope is open or
    /// opening. Retired allocators have no record of the current one's scopes, so they wait and release
    /// only under this guard. Never waits.
    pub(super) fn hold_scopes_off(&self) -> Option<NoScopes<'_>> {
        let gate = self.scope_gate.try_read()?;
        self.no_scope().then(|| NoScopes::new(gate))
    }

    /// Returns the guard to hold while a scope is opened. Waits until no `NoScopes` guard is left.
    /// Returns `None` on a thread that holds such a guard itself, which would deadlock.
    pub(super) fn open_gate(&self) -> Option<RwLockWriteGuard<'_, ()>> {
        (!NoScopes::is_held_here()).then(|| self.scope_gate.write())
    }

    /// Drops a retired allocator if it has drained; otherwise arranges for a later check.
    fn check_drained(&self, old: Arc<Generation>) {
        if let Some(old) = self.try_drop(old) {
            // A call was using it. Calls that end from now on see `drop_blocked` and check again; calls that
            // ended earlier are seen by this second attempt.
            self.drop_blocked.store(true, Ordering::SeqCst);
            fence(Ordering::SeqCst);
            self.try_drop(old);
        }
    }

    /// Drops a retired allocator if it has drained. Returns it if a call is using it or a scope is open,
    /// so that it cannot be dropped yet.
    fn try_drop(&self, old: Arc<Generation>) -> Option<Arc<Generation>> {
        let no_scopes = self.hold_scopes_off();
        if no_scopes.is_some() {
            // On an error the blocks keep waiting for their events.
            let _ = old.strategy.control().cross_stream.map(CrossStream::process_events);
        }
        let drained = self.has_drained(&old);
        if !old.is_retired() || !drained {
            return None;
        }
        if no_scopes.is_none() {
            return Some(old);
        }
        // A drop would leak the memory that the driver refuses now, so the drop waits for a later check.
        let kept =
            |old: &Generation| !old.release_idle() || old.holds_captured_memory(&*self.driver);
        if !self.leaves_pool_to_others(&old) && kept(&old) {
            old.check_requested.store(true, Ordering::SeqCst);
            return None;
        }
        let mut ledger = self.ledger.lock();
        // Added before the allocator leaves the list: its bytes may count twice for a moment, but never
        // zero times.
        let held = old.held_bytes();
        self.dropping_bytes.fetch_add(held, Ordering::SeqCst);
        let dropping = Defer(|| _ = self.dropping_bytes.fetch_sub(held, Ordering::SeqCst));
        let removed = match self.generations.take_retired(old, |old| self.has_drained(old)) {
            Ok(removed) => removed,
            Err(old) => return Some(old),
        };
        let mut last = removed.statistics();
        if self.generations.all().iter().any(|living| living.shares_with(&removed)) {
            // The reserved bytes of the shared driver pool are counted with an allocator that remains.
            last.reserved_bytes = PerPool::default();
        }
        ledger.add_dropped(&last);
        drop(ledger);
        drop(removed);
        drop(dropping);
        drop(no_scopes);
        self.update_limit();
        None
    }

    /// Returns true if the driver pool it reserved from is still used by another allocator.
    fn leaves_pool_to_others(&self, old: &Arc<Generation>) -> bool {
        let others = |living: &Arc<_>| !Arc::ptr_eq(living, old) && living.shares_with(old);
        self.generations.all().iter().any(others)
    }

    /// Returns true if it has drained: no block of it is live or waits for other streams.
    fn has_drained(&self, old: &Generation) -> bool {
        let (live, waiting) = old.await_frees();
        if live == 0 {
            // No further free will trigger a check, so the next miss or release must.
            old.needs_release.store(true, Ordering::Relaxed);
            old.check_requested.store(true, Ordering::SeqCst);
        }
        live == 0 && waiting == 0
    }

    /// Checks all retired allocators, the oldest first.
    pub(super) fn check_all_retired(&self) {
        self.each(|old| old.check_requested.store(true, Ordering::SeqCst));
        self.run_requested_checks();
    }

    /// Checks one allocator, and the others for which a check was requested.
    pub(super) fn request_check(&self, old: Arc<Generation>) {
        old.check_requested.store(true, Ordering::SeqCst);
        drop(old);
        self.run_requested_checks();
    }

    /// Checks an allocator that was replaced during a call. The call may have allocated or freed one of
    /// its blocks, or may have prevented its drop.
    #[cold]
    #[inline(never)]
    pub(super) fn check_replaced(&self, left: *const Generation) {
        let all = self.generations.all();
        if let Some(left) = all.iter().find(|one| std::ptr::eq(Arc::as_ptr(one), left)) {
            left.check_requested.store(true, Ordering::SeqCst);
        }
        drop(all);
        self.run_requested_checks();
        self.update_limit();
    }

    /// Drops the retired allocators that have drained, among those for which a check is requested. One
    /// thread checks at a time. A call during a check makes that thread check again, and returns at once.
    #[cold]
    pub(super) fn run_requested_checks(&self) {
        if self.check_requests.fetch_add(1, Ordering::SeqCst) > 0 {
            return;
        }
        // Also ends the turn if dropping an allocator panics.
        let turn = Defer(|| self.check_requests.store(0, Ordering::SeqCst));
        let mut requests = 1;
        loop {
            self.check_requested_once();
            match self.check_requests.compare_exchange(
                requests,
                0,
                Ordering::SeqCst,
                Ordering::SeqCst,
            ) {
                Ok(_) => return std::mem::forget(turn),
                Err(more) => requests = more,
            }
        }
    }

    fn check_requested_once(&self) {
        self.drop_blocked.store(false, Ordering::SeqCst);
        let mut all = self.generations.all();
        while all.len() > 1 {
            let wanted = |old: &Arc<_>| Generation::take_check_request(old);
            if let Some(old) = all.pop().filter(wanted) {
                self.check_drained(old);
            }
        }
    }

    /// Called when the calling thread has released its references to generations. Retries a drop that
    /// such a reference prevented.
    #[inline]
    pub(super) fn retry_blocked_drop(&self) {
        // Either this load sees `drop_blocked`, or the second attempt of `check_drained` sees that the
        // reference is gone.
        fence(Ordering::SeqCst);
        if self.drop_blocked.load(Ordering::SeqCst) && self.no_scope() {
            self.run_requested_checks();
        }
    }

    /// Records that a block of `old` was freed; checks `old` if it is time.
    pub(super) fn after_free_by(&self, old: Arc<Generation>) {
        if old.is_retired() && old.count_free() {
            old.needs_release.store(true, Ordering::Relaxed);
            self.request_check(old);
        }
    }

    /// Returns the sum of a figure over the retired allocators.
    fn sum_of_retired(&self, figure: impl Fn(&Generation) -> u64) -> u64 {
        let figures = self.each(|one| if one.is_retired() { figure(one) } else { 0 });
        figures.into_iter().sum()
    }

    /// Recomputes the current allocator's share of the limit.
    pub(super) fn update_limit(&self) {
        let state = self.state.lock();
        if state.limit_bytes.is_some() {
            self.set_current_limit(&state);
        }
        drop(state);
        self.retry_blocked_drop();
    }

    /// Sets the current allocator's limit to the total limit less the bytes held by retired allocators
    /// and by those being dropped. Neither grow.
    pub(super) fn set_current_limit(&self, state: &SwitchState) {
        let all = self.generations.all();
        let retired: u64 = all[1..].iter().map(|retired| retired.held_bytes()).sum();
        let others = retired + self.dropping_bytes.load(Ordering::SeqCst);
        if let Some(caching) = all[0].strategy.control().caching {
            caching.set_limit_bytes(limit_less(state.limit_bytes, others));
        }
    }

    /// Returns the limit of the next allocator: the total limit less the bytes that all present ones
    /// hold.
    pub(super) fn limit_of_next(&self, limit_bytes: Option<u64>) -> Option<u64> {
        let dropping = self.dropping_bytes.load(Ordering::SeqCst);
        limit_less(
            limit_bytes,
            self.each(Generation::held_bytes).into_iter().sum::<u64>() + dropping,
        )
    }

    /// Runs `act` on the counters of all living allocators and the sums of the dropped ones.
    pub(super) fn with_counters<R>(
        &self,
        act: impl FnOnce(&mut Ledger, &All<Generation>) -> R,
    ) -> R {
        let answer = {
            let mut ledger = self.ledger.lock();
            act(&mut ledger, &self.generations.all())
        };
        self.retry_blocked_drop();
        answer
    }

    /// Resets the peaks of all allocators.
    pub(super) fn begin_peaks(ledger: &mut Ledger, all: &All<Generation>) {
        ledger.reset_peaks();
        all.iter().filter_map(|one| one.counters()).for_each(Counters::reset_peaks);
    }
}

/// Returns the part of the limit that the others' bytes leave.
fn limit_less(limit_bytes: Option<u64>, others: u64) -> Option<u64> {
    limit_bytes.map(|limit| limit.saturating_sub(others))
}
