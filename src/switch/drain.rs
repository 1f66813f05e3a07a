//! Retired allocators: when their memory goes back, and when they go themselves.
//!
//! Idle memory of a retired one is given back at the switch, and from then on before the current one
//! grows, once an eighth of its blocks has been freed since (where the current one asks before it grows, as
//! those of the caching engine do); all of it before a request fails. So a free
//! waits for nobody, except the one that frees the last block: it drops the allocator, which gives its
//! segments back as the driver does that. An allocator whose idle memory the driver refuses would lose it,
//! and blocks that wait for other streams are not waited for: in both cases it goes at a later look (the
//! next miss, release, switch, or `process_events`).
//!
//! While a scope is open nothing goes, and none opens while something does: it may be a capture's, which
//! would break.

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

/// How many allocators in turn may refuse a request because each was replaced meanwhile: a callback that
/// switches whenever it is asked must end, too.
const ASKS_MAX: usize = 64;

/// A request that an allocator has refused.
#[derive(Debug)]
struct Refusal {
    error: AllocError,
    /// The allocator was replaced meanwhile.
    is_retired: bool,
    /// The allocator tells nobody of refusals.
    is_silent: bool,
}

impl Core {
    /// Takes from the current one. Out of memory is final only when retired ones have nothing idle.
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

    /// A request was refused: asks the current one if that was another (64 times at most), and once more
    /// after retired ones gave something back. Observers hear of the last refusal only.
    #[cold]
    #[inline(never)]
    fn refused<T>(
        &self,
        request: Request,
        mut refusal: Refusal,
        take: &impl Fn(&Generation) -> Result<T, AllocError>,
    ) -> Result<T, AllocError> {
        let (mut counted, mut may_make_room, mut asks) = (0, true, 0);
        loop {
            let Refusal { error, is_retired, is_silent } = refusal;
            let AllocError::OutOfMemory(mut report) = error else {
                self.ledger.lock().rescue(counted);
                return Err(error);
            };
            let was_told = hooks::was_refused();
            counted += i64::from(was_told || is_silent);
            asks += 1;
            let was_replaced = is_retired && asks < ASKS_MAX;
            let again =
                was_replaced || (std::mem::take(&mut may_make_room) && self.make_room(request));
            if !again {
                self.ledger.lock().rescue((counted - 1).max(0));
                self.explain(&mut report);
                self.left();
                if was_told || is_silent {
                    self.hooks.tell_out_of_memory(&report);
                }
                return Err(AllocError::OutOfMemory(report));
            }
            let generation = self.generations.read();
            let taken = take(&generation);
            match self.after_take(generation, taken) {
                Err(again) => refusal = again,
                Ok(taken) => {
                    self.ledger.lock().rescue(counted);
                    return Ok(taken);
                }
            }
        }
    }

    /// Says what retired ones still hold.
    fn explain(&self, report: &mut OutOfMemory) {
        let retired = self.generations.retired();
        if retired > 0 {
            let held = human_bytes(self.sum_of_retired(Generation::held_bytes));
            report.hints.push(format!(
                "{retired} allocators that were switched away from hold {held}, for blocks that live or \
                 because the driver did not take it back"
            ));
        }
    }

    /// Has retired ones give back all that is idle; true if that made room. Nothing is given back
    /// while a capture would break of it.
    fn make_room(&self, request: Request) -> bool {
        if self.generations.retired() == 0 {
            return false;
        }
        let captured = self.driver.capture_status(request.stream);
        if !matches!(captured, Ok(CaptureStatus::None)) {
            return false;
        }
        // What they reserve, of a pool that several share, counts once for each.
        let figures = [Generation::held_bytes, Generation::reserved_bytes];
        let before = figures.map(|figure| self.sum_of_retired(figure));
        {
            let Some(_still) = self.hold_scopes_off() else { return false };
            self.each(|generation| {
                if generation.is_retired() {
                    generation.give_idle_back();
                }
            });
        }
        self.look_at_all();
        self.spread_limit();
        let now = figures.map(|figure| self.sum_of_retired(figure));
        let has_room = now[0] < before[0] || now[1] < before[1];
        self.left();
        has_room
    }

    /// Before the current one grows: retired ones that are due give back what is idle, then users'
    /// callbacks are asked. True when one of those freed something.
    pub(super) fn before_growing(&self) -> bool {
        if self.generations.retired() > 0
            && let Some(still) = self.hold_scopes_off()
        {
            let mut gave = false;
            self.each(|generation| {
                if generation.is_retired() && generation.is_due.load(Ordering::Relaxed) {
                    generation.give_idle_back();
                    gave = true;
                }
            });
            drop(still);
            if gave {
                self.look_again();
                self.spread_limit();
            }
            self.left();
        }
        self.hooks.free_some_memory()
    }

    fn no_scope(&self) -> bool {
        self.open_scopes.load(Ordering::SeqCst) == 0
    }

    /// Keeps scopes from opening until it is dropped; `None` when one is open or about to. Retired
    /// allocators know no scope of the current one, so they wait and release only under this. Waits
    /// for nobody.
    pub(super) fn hold_scopes_off(&self) -> Option<NoScopes<'_>> {
        let gate = self.scope_gate.try_read()?;
        self.no_scope().then(|| NoScopes::new(gate))
    }

    /// Held while a scope is opened: waits for those who hold still. `None` on a thread that does so
    /// itself: it would wait for itself.
    pub(super) fn open_gate(&self) -> Option<RwLockWriteGuard<'_, ()>> {
        (!NoScopes::is_held_here()).then(|| self.scope_gate.write())
    }

    /// Looks whether a retired one has drained, and lets it go if so; otherwise says when to look again.
    fn look_at(&self, old: Arc<Generation>) {
        if let Some(old) = self.try_let_go(old) {
            // Somebody was inside. Whoever leaves from now on looks; who left before is seen by this.
            self.stuck.store(true, Ordering::SeqCst);
            fence(Ordering::SeqCst);
            self.try_let_go(old);
        }
    }

    /// Gives a drained one back that could not go.
    fn try_let_go(&self, old: Arc<Generation>) -> Option<Arc<Generation>> {
        let still = self.hold_scopes_off();
        if still.is_some() {
            // An event that cannot be asked keeps its block waiting.
            let _ = old.strategy.control().cross_stream.map(CrossStream::process_events);
        }
        let drained = self.has_drained(&old);
        if !old.is_retired() || !drained {
            return None;
        }
        if still.is_none() {
            return Some(old);
        }
        // What the driver refuses now would be lost with it: it goes at a later look.
        let kept = |old: &Generation| !old.give_idle_back() || old.is_captures(&*self.driver);
        if !self.leaves_pool_to_others(&old) && kept(&old) {
            old.wants_look.store(true, Ordering::SeqCst);
            return None;
        }
        let mut ledger = self.ledger.lock();
        // Before it leaves the list: meanwhile it counts twice, never not at all.
        let held = old.held_bytes();
        self.going_bytes.fetch_add(held, Ordering::SeqCst);
        let going = Defer(|| _ = self.going_bytes.fetch_sub(held, Ordering::SeqCst));
        let gone = match self.generations.let_go(old, |old| self.has_drained(old)) {
            Ok(gone) => gone,
            Err(old) => return Some(old),
        };
        let mut last = gone.statistics();
        if self.generations.all().iter().any(|living| living.shares_with(&gone)) {
            // What they reserve together is counted with one of those that live.
            last.reserved_bytes = PerPool::default();
        }
        ledger.gone(&last);
        drop(ledger);
        drop(gone);
        drop(going);
        drop(still);
        self.spread_limit();
        None
    }

    /// Whether what it reserved stays in use by another one that lives.
    fn leaves_pool_to_others(&self, old: &Arc<Generation>) -> bool {
        let others = |living: &Arc<_>| !Arc::ptr_eq(living, old) && living.shares_with(old);
        self.generations.all().iter().any(others)
    }

    /// Whether no block of it is in callers' hands or waits for other streams.
    fn has_drained(&self, old: &Generation) -> bool {
        let (live, waiting) = old.await_frees();
        if live == 0 {
            // Whatever keeps it now, nobody will free a block of it and look again for that.
            old.is_due.store(true, Ordering::Relaxed);
            old.wants_look.store(true, Ordering::SeqCst);
        }
        live == 0 && waiting == 0
    }

    /// Looks at all retired ones, the oldest first.
    pub(super) fn look_at_all(&self) {
        self.each(|old| old.wants_look.store(true, Ordering::SeqCst));
        self.look_again();
    }

    /// Looks at one, and at others that want it.
    pub(super) fn want_look(&self, old: Arc<Generation>) {
        old.wants_look.store(true, Ordering::SeqCst);
        drop(old);
        self.look_again();
    }

    /// Looks at one that a call was inside of when it was replaced. The call may have taken or given a
    /// block of it, or been in the way.
    #[cold]
    #[inline(never)]
    pub(super) fn look_at_left(&self, left: *const Generation) {
        let all = self.generations.all();
        if let Some(left) = all.iter().find(|one| std::ptr::eq(Arc::as_ptr(one), left)) {
            left.wants_look.store(true, Ordering::SeqCst);
        }
        drop(all);
        self.look_again();
        self.spread_limit();
    }

    /// Looks at those that may have drained since somebody looked. One thread looks at a time, so that
    /// none is in another's way; who comes meanwhile leaves it the work.
    #[cold]
    pub(super) fn look_again(&self) {
        if self.looks.fetch_add(1, Ordering::SeqCst) > 0 {
            return;
        }
        // The turn ends too when an allocator that goes panics.
        let turn = Defer(|| self.looks.store(0, Ordering::SeqCst));
        let mut asked = 1;
        loop {
            self.look_once();
            match self.looks.compare_exchange(asked, 0, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return std::mem::forget(turn),
                Err(more) => asked = more,
            }
        }
    }

    fn look_once(&self) {
        self.stuck.store(false, Ordering::SeqCst);
        let mut all = self.generations.all();
        while all.len() > 1 {
            let wanted = |old: &Arc<_>| Generation::wants_look_now(old);
            if let Some(old) = all.pop().filter(wanted) {
                self.look_at(old);
            }
        }
    }

    /// No reference to any generation is held here any more: one that could not go for that can now.
    #[inline]
    pub(super) fn left(&self) {
        // Either this sees that one is stuck, or the second try sees that the reference has gone.
        fence(Ordering::SeqCst);
        if self.stuck.load(Ordering::SeqCst) && self.no_scope() {
            self.look_again();
        }
    }

    /// A block of `old` was freed.
    pub(super) fn freed_of(&self, old: Arc<Generation>) {
        if old.is_retired() && old.freed_one() {
            old.is_due.store(true, Ordering::Relaxed);
            self.want_look(old);
        }
    }

    /// Adds up a figure of the retired ones.
    fn sum_of_retired(&self, figure: impl Fn(&Generation) -> u64) -> u64 {
        let figures = self.each(|one| if one.is_retired() { figure(one) } else { 0 });
        figures.into_iter().sum()
    }

    /// Shares the limit out anew.
    pub(super) fn spread_limit(&self) {
        let state = self.state.lock();
        if state.limit_bytes.is_some() {
            self.spread(&state);
        }
        drop(state);
        self.left();
    }

    /// The current one may reserve what the retired ones, which do not grow, leave of the limit.
    pub(super) fn spread(&self, state: &SwitchState) {
        let all = self.generations.all();
        let retired: u64 = all[1..].iter().map(|retired| retired.held_bytes()).sum();
        let others = retired + self.going_bytes.load(Ordering::SeqCst);
        if let Some(caching) = all[0].strategy.control().caching {
            caching.set_limit_bytes(left_of(state.limit_bytes, others));
        }
    }

    /// What the next one may reserve beside all that are there.
    pub(super) fn limit_of_next(&self, limit_bytes: Option<u64>) -> Option<u64> {
        let going = self.going_bytes.load(Ordering::SeqCst);
        left_of(limit_bytes, self.each(Generation::held_bytes).into_iter().sum::<u64>() + going)
    }

    /// Does something with the counters of all that live and of those that have gone.
    pub(super) fn with_counters<R>(
        &self,
        act: impl FnOnce(&mut Ledger, &All<Generation>) -> R,
    ) -> R {
        let answer = {
            let mut ledger = self.ledger.lock();
            act(&mut ledger, &self.generations.all())
        };
        self.left();
        answer
    }

    /// Peaks begin anew.
    pub(super) fn begin_peaks(ledger: &mut Ledger, all: &All<Generation>) {
        ledger.reset_peaks();
        all.iter().filter_map(|one| one.counters()).for_each(Counters::reset_peaks);
    }
}

/// What is left of a limit beside so many bytes.
fn left_of(limit_bytes: Option<u64>, others: u64) -> Option<u64> {
    limit_bytes.map(|limit| limit.saturating_sub(others))
}
