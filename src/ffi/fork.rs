//! What a fork does to the library.
//!
//! The child has one thread, and every lock as it was at that moment. So whoever forks takes the locks of
//! the whole process first, and both sides let go of them. What other threads were doing inside allocators
//! has stopped half-way in the child. It forgets them all, and makes its own.

#![expect(unsafe_code, reason = "handlers that the system calls when the process forks")]
#![cfg_attr(not(unix), expect(dead_code, reason = "nothing forks there"))]

use std::any::Any;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{gate, lent, table, torch};
use crate::layers::front;
use crate::sync::{self, Rank};
use crate::threads::Lasting;

/// Whether this process is the child of one that used the library.
static IS_CHILD: AtomicBool = AtomicBool::new(false);

/// What the forking thread holds.
type Held = Vec<Box<dyn Any>>;

thread_local! {
    static HELD: Lasting<Held> = const { Lasting::new(Vec::new()) };
}

/// Whether this process is the child of one that used the library: it may have blocks of allocators that
/// are no more.
pub(super) fn is_child() -> bool {
    IS_CHILD.load(Ordering::Relaxed)
}

/// Makes forks from now on leave the library usable.
pub(super) fn prepare_for() {
    static IS_PREPARED: AtomicBool = AtomicBool::new(false);
    #[cfg(unix)]
    if !IS_PREPARED.swap(true, Ordering::Relaxed) {
        // SAFETY: the handlers are functions of this library, which takes them back when it is unloaded.
        // Refused only for want of memory; forks are as before then.
        let _ = unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
    }
}

extern "C" fn before() {
    let own = torch::is_opening().then_some(Rank::TorchDevices);
    let mut held = sync::hold_all(own);
    held.push(Box::new(std::io::stderr().lock()));
    drop(HELD.with(|place| place.replace(held)));
}

extern "C" fn in_parent() {
    drop(HELD.with(Lasting::take));
}

extern "C" fn in_child() {
    in_parent();
    IS_CHILD.store(true, Ordering::Relaxed);
    torch::forget_all();
    table::forget_all();
    lent::forget_all();
    front::forget_all();
    gate::forget_calls();
}
