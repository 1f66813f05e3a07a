//! Keeps the library usable across a fork.
//!
//! After a fork, the child has only the forking thread, but each lock is in the state that it had at
//! the fork. So a handler acquires all process-wide locks ([`sync::Global`](stratalloc::sync)) before
//! the fork, and releases them afterwards in parent and child. So in the child these locks are free,
//! and the data under them is consistent. The locks inside an allocator may stay locked forever. So the
//! child abandons all allocators of the parent and creates its own.

#![expect(unsafe_code, reason = "handlers that the system calls when the process forks")]

use std::any::Any;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{gate, torch, user_data};
use stratalloc::layers::front;
use stratalloc::sync::{self, Rank};
use stratalloc::threads::Lasting;

/// True in a forked child of a process that used the library.
static IS_CHILD: AtomicBool = AtomicBool::new(false);

/// The locks that the forking thread holds.
type HeldLocks = Vec<Box<dyn Any>>;

thread_local! {
    static HELD_LOCKS: Lasting<HeldLocks> = const { Lasting::new(Vec::new()) };
}

/// Returns true in a forked child of a process that used the library. The child has abandoned the parent's
/// allocators. If it frees one of their blocks, the call does nothing and is not an error.
pub(super) fn is_child() -> bool {
    IS_CHILD.load(Ordering::Relaxed)
}

/// Registers the fork handlers, if that was not done yet.
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
    let own = torch::is_opening().then_some(Rank::TorchDevices);
    let mut held = sync::hold_all(own);
    held.push(Box::new(std::io::stderr().lock()));
    drop(HELD_LOCKS.with(|cell| cell.replace(held)));
}

extern "C" fn in_parent() {
    drop(HELD_LOCKS.with(Lasting::take));
}

extern "C" fn in_child() {
    in_parent();
    IS_CHILD.store(true, Ordering::Relaxed);
    torch::forget_all();
    user_data::forget_all();
    front::forget_all();
    gate::forget_calls();
}
