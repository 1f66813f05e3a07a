//! Callbacks and observers that were added here, carried from allocator to allocator.
//!
//! Each allocator gets one callback and one observer of ours. Ours asks the users' callbacks, after the
//! retired allocators; and notes that a request was refused, because observers are told only when giving
//! back what retired allocators keep did not help either. Users' own are in
//! [`Hooks`](crate::allocator::Hooks): they run with no lock held, and a request of theirs that fails asks
//! and tells nobody again.

use std::cell::Cell;
use std::sync::{Arc, Weak};

use super::core::Core;
use crate::allocator::DeviceAllocator;
use crate::strategies::Strategy;

thread_local! {
    /// Whether an allocator has told this thread's request that it fails.
    static REFUSED: Cell<bool> = const { Cell::new(false) };
}

/// Whether an allocator has told that this thread's request fails; once.
pub(super) fn was_refused() -> bool {
    REFUSED.take()
}

/// Gives an allocator our hooks.
pub(super) fn attach(strategy: &Strategy, core: &Weak<Core>) {
    let Some(hooks) = strategy.control().hooks else { return };
    let (core, own) = (Weak::clone(core), Weak::clone(core));
    hooks.add_free_memory_callback(Arc::new(move || {
        core.upgrade().is_some_and(|core| core.before_growing())
    }));
    hooks.add_oom_observer(Arc::new(|_| REFUSED.set(true)));
    hooks.report_outside();
    // A rejection is final: what replaced allocators keep is not looked at.
    hooks.add_oom_rejection_observer(Arc::new(move |report| {
        if let Some(core) = own.upgrade() {
            core.hooks.tell_oom_rejection(report);
        }
    }));
}
