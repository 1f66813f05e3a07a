//! Keeps the library usable across a fork.
//!
//! The child has one thread, and every lock in the state of that moment. So a handler acquires all
//! process-wide locks ([`sync::Global`](stratalloc::sync)) before the fork, and releases them afterwards in
//! parent and child. The child finds these locks free and the data under them consistent. The locks
//! inside an allocator may stay locked forever, so the child abandons all allocators and creates its own.

#![expect(unsafe_code, reason = "handlers that the system calls when the process forks")]
#![cfg_attr(not(unix), expect(dead_code, reason = "nothing forks there"))]

use std::any::Any;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{gate, table, torch, user_data};
use stratalloc::layers::front;
use stratalloc::sync::{self, Rank};
use stratalloc::threads::Lasting;

/// True in a child of a process that used the library.
static IS_CHILD: AtomicBool = AtomicBool::new(false);

/// The locks that the forking thread holds.
type HeldLocks = Vec<Box<dyn Any>>;

thread_local! {
    static HELD_LOCKS: Lasting<HeldLocks> = const { Lasting::new(Vec::new()) };
}

/// Returns true in a child of a process that used the library. It may free blocks of the parent's
/// allocators, which do not exist here.
pub(super) fn is_child() -> bool {
    IS_CHILD.load(Ordering::Relaxed)
}

/// Registers the fork handlers, once.
pub(super) fn prepare_for() {
    static IS_PREPARED: AtomicBool = AtomicBool::new(false);
    #[cfg(unix)]
    if !IS_PREPARED.swap(true, Ordering::Relaxed) {
        // SAFETY: the handlers are functions of this library, and the system removes them when it is
        // unloaded. Registration fails only when memory is short; then forks work as without the
        // handlers.
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
    table::forget_all();
    user_data::forget_all();
    front::forget_all();
    gate::forget_calls();
}
