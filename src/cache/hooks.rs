//! Callbacks and observers of users. They run with no lock held and may allocate and free; a call
//! that comes back here on its own thread skips them.

use std::cell::Cell;
use std::fmt;

use parking_lot::RwLock;

use crate::allocator::{FreeMemoryCallback, OomObserver};
use crate::error::OutOfMemory;

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Marks that this thread runs a hook, until it is dropped, also by a panic.
struct Inside;

impl Inside {
    fn enter() -> Option<Self> {
        // Made only when it is the first: dropping one clears the mark.
        INSIDE.with(|inside| (!inside.replace(true)).then(|| Self))
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        INSIDE.with(|inside| inside.set(false));
    }
}

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

    /// Asks every callback to free something; true when one did.
    pub(super) fn free_some_memory(&self) -> bool {
        if self.callbacks.read().is_empty() {
            return false;
        }
        let callbacks = self.callbacks.read().clone();
        let Some(_inside) = Inside::enter() else {
            return false;
        };
        let mut freed = false;
        for callback in callbacks {
            freed |= callback();
        }
        freed
    }

    /// Shows the report to every observer.
    pub(super) fn tell_out_of_memory(&self, report: &OutOfMemory) {
        let observers = self.observers.read().clone();
        let Some(_inside) = Inside::enter() else {
            return;
        };
        for observer in observers {
            observer(report);
        }
    }
}

impl fmt::Debug for Hooks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (callbacks, observers) = (self.callbacks.read().len(), self.observers.read().len());
        write!(f, "Hooks {{ callbacks: {callbacks}, observers: {observers} }}")
    }
}
