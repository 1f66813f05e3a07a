//! Callbacks and observers that were added here, carried from allocator to allocator.
//!
//! Each allocator gets one callback and one observer of ours. Ours asks the users' callbacks, after the
//! retired allocators; and notes that a request was refused, because observers are told only when giving
//! back what retired allocators keep did not help either. Users' code runs with no lock held.

use std::cell::Cell;
use std::fmt;
use std::sync::{Arc, Weak};

use parking_lot::RwLock;

use super::core::Core;
use crate::allocator::{DeviceAllocator, FreeMemoryCallback, OomObserver};
use crate::error::OutOfMemory;
use crate::strategies::Strategy;

thread_local! {
    /// Whether an allocator has told this thread's request that it fails.
    static REFUSED: Cell<bool> = const { Cell::new(false) };
}

/// Whether an allocator has told that this thread's request fails; once.
pub(super) fn was_refused() -> bool {
    REFUSED.take()
}

/// The users' hooks.
#[derive(Default)]
pub(super) struct Hooks {
    callbacks: RwLock<Vec<FreeMemoryCallback>>,
    observers: RwLock<Vec<OomObserver>>,
}

impl Hooks {
    pub(super) fn add_callback(&self, callback: FreeMemoryCallback) {
        self.callbacks.write().push(callback);
    }

    pub(super) fn add_observer(&self, observer: OomObserver) {
        self.observers.write().push(observer);
    }

    /// Asks every callback; true when one freed something.
    pub(super) fn free_some_memory(&self) -> bool {
        let callbacks = self.callbacks.read().clone();
        callbacks.iter().fold(false, |freed, callback| callback() | freed)
    }

    pub(super) fn tell_out_of_memory(&self, report: &OutOfMemory) {
        let observers = self.observers.read().clone();
        observers.iter().for_each(|observer| observer(report));
    }
}

impl fmt::Debug for Hooks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (callbacks, observers) = (self.callbacks.read().len(), self.observers.read().len());
        write!(f, "Hooks {{ callbacks: {callbacks}, observers: {observers} }}")
    }
}

/// Gives an allocator our hooks.
pub(super) fn attach(strategy: &Strategy, core: &Weak<Core>) {
    let Some(pressure) = strategy.pressure() else { return };
    let core = Weak::clone(core);
    pressure.add_free_memory_callback(Arc::new(move || {
        core.upgrade().is_some_and(|core| core.before_growing())
    }));
    pressure.add_oom_observer(Arc::new(|_| REFUSED.set(true)));
}
