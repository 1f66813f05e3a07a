//! Keeps the library usable across a fork.
//!
//! After a fork, the child has only the forking thread, but each lock is in the state that it had at
//! the fork. So a handler acquires all process-wide locks ([`sync::Global`](stratalloc::sync)) before
//! the fork, and releases them afterwards in parent and child. So in the child these locks are free,
//! and the data under them is consistent. The locks inside an allocator may stay locked forever. So the
//! child abandons all allocators of the parent and creates its own.

#![expect(unsafe_code, reason = "handlers that the system calls when the process forks")]

use std::any::Any;
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};

use super::table::PERMANENT;
use super::{gate, user_data};
use stratalloc::layers::front;
use stratalloc::sync::{self, Defer, Rank};
use stratalloc::threads::Lasting;

/// True in a forked child of a process that used the library.
static IS_CHILD: AtomicBool = AtomicBool::new(false);

/// The locks that the forking thread holds.
type HeldLocks = Vec<Box<dyn Any>>;

thread_local! {
    static HELD_LOCKS: Lasting<HeldLocks> = const { Lasting::new(Vec::new()) };
    /// See [`while_holding`].
    static OWN_LOCK: Cell<Option<Rank>> = const { Cell::new(None) };
}

/// Announces, until the result is dropped, that the calling thread holds the process-wide lock of `rank`.
/// Needed where users' functions run under a lock, because they may fork. They must not use that lock.
pub(super) fn while_holding(rank: Rank) -> Defer<impl FnMut()> {
    OWN_LOCK.set(Some(rank));
    Defer(|| OWN_LOCK.set(None))
}

/// Returns true in a forked child of a process that used the library. The child has abandoned the parent's
/// allocators. If it frees one of their blocks, the call does nothing and is not an error.
pub(super) fn is_child() -> bool {
    IS_CHILD.load(Ordering::Relaxed)
}

/// Registers the fork handlers, if that was not done yet. Called before each allocator is created.
pub(super) fn prepare_for() {
    static IS_PREPARED: AtomicBool = AtomicBool::new(false);
    if !IS_PREPARED.swap(true, Ordering::Relaxed) {
        // SAFETY: the handlers are functions of this library, and the system removes them when the
        // library is unloaded. Registration fails only when memory is short. Then no handlers run at a
        // fork.
        let _ = unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
    }
}

extern "C" fn before() {
    let mut held = sync::hold_all(OWN_LOCK.get());
    held.push(Box::new(std::io::stderr().lock()));
    drop(HELD_LOCKS.with(|cell| cell.replace(held)));
}

extern "C" fn in_parent() {
    drop(HELD_LOCKS.with(Lasting::take));
}

extern "C" fn in_child() {
    in_parent();
    IS_CHILD.store(true, Ordering::Relaxed);
    PERMANENT.forget_all();
    user_data::forget_all();
    front::forget_all();
    gate::forget_calls();
}
