//! Retired allocators: when their memory is released, and when they are dropped.
//!
//! Idle memory of a retired allocator is released at the switch. After that it is released before the
//! current allocator grows, once an eighth of the retired allocator's live blocks has been freed since the
//! last release. (This requires that the current allocator calls its hooks before it grows, as the caching
//! engine does.) It is also released before a request fails as out of memory, unless the request's stream
//! may be captured. So a free never waits, except the one that frees the last block: it drops the
//! allocator, and the driver may wait when it releases the segments.
//!
//! A drained allocator is dropped by the free of its last block, or else at the next switch, miss,
//! `empty_cache`, `process_events`, end of a scope or drop of a `CurrentStrategy`. The free does not drop
//! it if blocks wait for other streams, if another call is using the allocator at that moment, if a
//! captured stream may use its memory, or if the driver refuses the idle memory, which a drop would leak.
//!
//! A scope routes requests to a private pool. While a scope is open no retired allocator releases memory,
//! and no scope opens during a release: the scope may belong to a stream capture, which the release would
//! break.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::core::{Core, SwitchState};
use super::generation::Generation;
use super::hooks;
use super::ledger::Ledger;
use super::no_scopes::NoScopes;
use crate::allocator::{Allocation, Counters, DeviceAllocator, Request};
use crate::driver::CaptureStatus;
use crate::error::{AllocError, DriverError, OutOfMemory};
use crate::size::human_bytes;
use crate::stats::PerPool;
use crate::strategies::Strategy;
use crate::sync::{All, Defer, Read};

/// The most attempts at one request if the current allocator is replaced during each attempt. The limit
/// ends the loop if a callback switches on every call.
const ATTEMPTS_MAX: usize = 64;

/// A failed request.
struct Refused {
    error: AllocError,
    /// Whether its allocator has no hooks, so that it notified no observer.
    is_silent: bool,
    /// Whether its allocator was replaced during the call.
    was_replaced: bool,
}

impl Core {
    /// Allocates from the current allocator. If that fails, calls [`retry`](Self::retry).
    #[inline(always)]
    pub(super) fn allocate(&self, request: Request) -> Result<Allocation, AllocError> {
        let generation = self.generations.read();
        // The result stays in one variable up to the caller, because each copy costs time on the fast path.
        let mut taken = generation.strategy.allocate(request);
        match taken {
            Ok(_) => {
                self.leave(generation);
            }
            Err(error) => taken = self.retry(request, self.refused(error, generation)),
        }
        taken
    }

    /// Ends a call that `generation` has refused. Inlined, because a guard that is passed to a function lies
    /// in memory from its creation on.
    #[inline(always)]
    fn refused(&self, error: AllocError, generation: Read<'_, Generation>) -> Refused {
        let is_silent = generation.has_no_hooks();
        Refused { error, is_silent, was_replaced: self.leave(generation) }
    }

    /// Retries a failed request if it is out of memory: on the new current allocator if the old one was
    /// replaced (see `ATTEMPTS_MAX`), and once after retired allocators released idle memory. Observers are
    /// notified of the last failure only.
    #[cold]
    #[inline(never)]
    fn retry(&self, request: Request, mut refused: Refused) -> Result<Allocation, AllocError> {
        let (mut counted, mut may_make_room) = (0, true);
        for attempt in 1.. {
            let AllocError::OutOfMemory(report) = &mut refused.error else { break };
            let is_counted = hooks::was_refused() || refused.is_silent;
            counted += i64::from(is_counted);
            let again = refused.was_replaced && attempt < ATTEMPTS_MAX
                || std::mem::take(&mut may_make_room) && self.make_room(request);
            if !again {
                self.ledger.lock().hide_refusals((counted - 1).max(0));
                self.explain(report);
                if is_counted {
                    self.hooks.notify_out_of_memory(report);
                }
                return Err(refused.error);
            }
            let generation = self.generations.read();
            match generation.strategy.allocate(request) {
                Ok(taken) => {
                    self.leave(generation);
                    self.ledger.lock().hide_refusals(counted);
                    return Ok(taken);
                }
                Err(error) => refused = self.refused(error, generation),
            }
        }
        self.ledger.lock().hide_refusals(counted);
        Err(refused.error)
    }

    /// Adds a hint to the report with the bytes that retired allocators still hold.
    fn explain(&self, report: &mut OutOfMemory) {
        let retired = self.generations.retired();
        if retired > 0 {
            let held = self.generations.all()[1..].iter().map(|old| old.held_bytes()).sum();
            let held = human_bytes(held);
            report.hints.push(format!(
                "{retired} replaced allocators hold {held}, for live blocks, or \
                 because the driver failed to release it"
            ));
        }
    }

    /// Releases the idle memory of retired allocators. Does nothing and returns false if there are none, or
    /// if the request's stream may be captured: a release could break the capture.
    fn make_room(&self, request: Request) -> bool {
        if self.generations.retired() == 0 {
            return false;
        }
        let captured = self.driver.capture_status(request.stream);
        matches!(captured, Ok(CaptureStatus::None)) && {
            let _ = self.release_idle();
            true
        }
    }

    /// Runs before the current allocator grows: releases idle memory of retired allocators if `has_idle` is
    /// set, then calls the users' callbacks. Returns true if a callback freed something.
    pub(super) fn before_growing(&self) -> bool {
        if self.has_idle.load(Ordering::Relaxed) {
            let _ = self.release_idle();
        }
        self.hooks.free_some_memory()
    }

    /// Keeps scopes from opening until the guard is dropped; returns `None` if a scope is open or opening.
    /// Retired allocators have no record of the current one's scopes, so they wait for the device and
    /// release memory only under this guard. Never waits.
    pub(super) fn hold_scopes_off(&self) -> Option<NoScopes<'_>> {
        let scopes = self.scopes.try_read()?;
        scopes.is_empty().then(|| NoScopes::new(scopes))
    }

    /// Releases the idle memory of the retired allocators, then drops those that have drained. Does
    /// nothing while a scope is open.
    pub(super) fn release_idle(&self) -> Result<(), DriverError> {
        let Some(_no_scopes) = self.hold_scopes_off() else { return Ok(()) };
        self.has_idle.store(false, Ordering::SeqCst);
        let all = self.generations.all();
        let released = all[1..].iter().map(|old| old.release_idle()).fold(Ok(()), Result::and);
        drop(all);
        if released.is_err() {
            self.has_idle.store(true, Ordering::SeqCst);
        }
        let processed = self.drop_drained();
        released.and(processed)
    }

    /// Drops the retired allocators that have drained, after they have released their memory. Does nothing
    /// while a scope is open. Returns an error if a retired allocator fails to query its events.
    pub(super) fn drop_drained(&self) -> Result<(), DriverError> {
        if self.generations.retired() == 0 {
            return Ok(());
        }
        let Some(_no_scopes) = self.hold_scopes_off() else { return Ok(()) };
        let all = self.generations.all();
        let processed = all[1..].iter().map(|old| old.process_events()).fold(Ok(()), Result::and);
        for old in all[1..].iter().filter(|old| old.live_blocks() == 0) {
            // No later free of this allocator calls this function. If the drop below fails, `has_idle`
            // makes the next miss call it.
            self.has_idle.store(true, Ordering::SeqCst);
            let others = |other: &Arc<_>| !Arc::ptr_eq(other, old) && other.shares_with(old);
            // If the driver refuses to release memory now, a drop would leak that memory.
            let is_released = |old: &Generation| {
                old.release_idle().is_ok() && !old.holds_captured_memory(&*self.driver)
            };
            let may_drop = old.has_drained() && (all.iter().any(others) || is_released(old));
            old.is_released.store(may_drop, Ordering::SeqCst);
        }
        drop(all);
        // This thread holds no references from here on. So if several threads run this function, the last
        // one is not prevented by references of the others.
        loop {
            self.update_limit();
            if !self.drop_one() {
                return processed;
            }
        }
    }

    /// Drops one retired allocator that has drained and released its memory. Returns false if there is
    /// none, or if calls are using them.
    fn drop_one(&self) -> bool {
        let mut ledger = self.ledger.lock();
        let mut held = 0;
        let removed = self.generations.take_retired(|old| {
            let may_take = old.is_released.load(Ordering::SeqCst) && old.has_drained();
            if may_take {
                // Added before the allocator leaves the list: for a moment its bytes may count twice in the
                // limit, but they are never left out.
                held = old.held_bytes();
                self.dropping_bytes.fetch_add(held, Ordering::SeqCst);
            }
            may_take
        });
        let Some(removed) = removed else { return false };
        let _dropping = Defer(|| _ = self.dropping_bytes.fetch_sub(held, Ordering::SeqCst));
        let mut last = removed.statistics();
        if self.generations.all().iter().any(|living| living.shares_with(&removed)) {
            // The reserved bytes of the shared driver pool are counted with an allocator that remains.
            last.reserved_bytes = PerPool::default();
        }
        ledger.add_dropped(&last);
        drop(ledger);
        drop(removed);
        true
    }

    /// Runs after a call whose allocator was replaced during the call. The call may have allocated or freed
    /// a block of that allocator, or may have prevented its drop.
    #[cold]
    #[inline(never)]
    pub(super) fn after_replaced(&self) {
        self.has_idle.store(true, Ordering::SeqCst);
        let _ = self.drop_drained();
    }

    /// Calls `free` on one generation after the other, until one returns a value: it made the block.
    #[cold]
    pub(super) fn free_by<R>(&self, free: impl Fn(&Strategy) -> Option<R>) -> Option<R> {
        let (maker, answer) = self.generations.all().into_iter().find_map(|maker| {
            let answer = free(&maker.strategy)?;
            Some((maker, answer))
        })?;
        self.after_free_by(maker);
        Some(answer)
    }

    /// Runs after a free by `maker`. If it has no live block left, tries to drop the retired allocators
    /// without live blocks. The caller must hold no other reference to a generation.
    pub(super) fn after_free_by(&self, maker: Arc<Generation>) {
        let live = maker.live_blocks();
        if maker.count_free(live) {
            self.has_idle.store(true, Ordering::SeqCst);
        }
        drop(maker);
        if live == 0 {
            let _ = self.drop_drained();
        }
    }

    /// Recomputes the current allocator's share of the limit.
    pub(super) fn update_limit(&self) {
        let state = self.state.lock();
        if state.limit_bytes.is_some() {
            self.set_current_limit(&state);
        }
    }

    /// Sets the current allocator's limit to the total limit less the bytes held by retired allocators and
    /// by those being dropped. These bytes never grow.
    pub(super) fn set_current_limit(&self, state: &SwitchState) {
        let all = self.generations.all();
        if let Some(caching) = all[0].strategy.control().caching {
            caching.set_limit_bytes(self.limit_beside(&all[1..], state.limit_bytes));
        }
    }

    /// Returns the limit less the bytes held by `others` and by allocators that are being dropped.
    pub(super) fn limit_beside(
        &self,
        others: &[Arc<Generation>],
        limit_bytes: Option<u64>,
    ) -> Option<u64> {
        let held: u64 = others.iter().map(|other| other.held_bytes()).sum();
        let held = held + self.dropping_bytes.load(Ordering::SeqCst);
        limit_bytes.map(|limit| limit.saturating_sub(held))
    }

    /// Resets the peaks of the ledger and of all allocators.
    pub(super) fn begin_peaks(ledger: &mut Ledger, all: &All<Generation>) {
        ledger.reset_peaks();
        all.iter().filter_map(|one| one.counters()).for_each(Counters::reset_peaks);
    }
}
