//! Users' callbacks and observers, which stay registered across switches.
//!
//! Each allocator gets one internal callback and two internal observers. The callback first releases memory
//! of retired allocators, then calls the users' callbacks. One observer only records that a request failed:
//! users' observers are notified only if releasing memory of retired allocators did not help either. The
//! other passes rejections to the users' observers. The users' own hooks are in
//! [`Hooks`](crate::allocator::Hooks). They run with no lock held. If a request made inside a hook fails,
//! no hook is called for it.

use std::cell::Cell;
use std::sync::{Arc, Weak};

use super::core::Core;
use crate::allocator::DeviceAllocator;
use crate::strategies::Strategy;

thread_local! {
    /// Whether an allocator has reported this thread's request as failed.
    static REFUSED: Cell<bool> = const { Cell::new(false) };
}

/// Returns whether an allocator has reported this thread's request as failed, and clears the flag.
pub(super) fn was_refused() -> bool {
    REFUSED.take()
}

/// Registers the internal hooks with an allocator.
pub(super) fn attach(strategy: &Strategy, core: &Weak<Core>) {
    let Some(hooks) = strategy.control().hooks else { return };
    let (core, own) = (Weak::clone(core), Weak::clone(core));
    hooks.add_free_memory_callback(Arc::new(move || {
        core.upgrade().is_some_and(|core| core.before_growing())
    }));
    hooks.add_oom_observer(Arc::new(|_| REFUSED.set(true)));
    hooks.report_outside();
    // A rejection (by `throw_on_cudamalloc_oom`) is final: no retired allocator releases memory for it.
    hooks.add_oom_rejection_observer(Arc::new(move |report| {
        if let Some(core) = own.upgrade() {
            core.hooks.notify_oom_rejection(report);
        }
    }));
}
