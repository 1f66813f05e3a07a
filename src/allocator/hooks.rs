//! User callbacks that are called under memory pressure.
//!
//! An allocator that supports hooks has a [`Hooks`]. It calls the free-memory callbacks before it takes
//! memory from the driver, and the observers with the report of a failed request. Hooks are called with
//! no lock held, and may allocate and free. Requests that a hook makes call no hooks.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use log::Level;
use parking_lot::RwLock;

use crate::diagnostics;
use crate::error::OutOfMemory;
use crate::ids::HookId;
use crate::threads::Region;

/// Called when no cached block fits a request. Returns whether it freed anything.
pub type FreeMemoryCallback = Arc<dyn Fn() -> bool + Send + Sync>;
/// Called with the report of a failed request.
pub type OomObserver = Arc<dyn Fn(&OutOfMemory) + Send + Sync>;

/// The callbacks and observers of one allocator.
#[derive(Default)]
pub struct Hooks {
    /// The region that a thread is in while it runs a callback or an observer.
    running: Region,
    callbacks: RwLock<Vec<(HookId, FreeMemoryCallback)>>,
    observers: RwLock<Vec<(HookId, OomObserver)>>,
    rejection_observers: RwLock<Vec<(HookId, OomObserver)>>,
    /// Whether a wrapper around this allocator writes the log lines of failures.
    is_inner: AtomicBool,
}

/// Adds a hook to a list and returns its id.
fn add<H>(to: &RwLock<Vec<(HookId, H)>>, hook: H) -> HookId {
    let id = HookId::next();
    to.write().push((id, hook));
    id
}

/// Removes a hook from a list and returns it. The caller drops it without a lock, because its
/// destructor is user code.
fn remove<H>(from: &RwLock<Vec<(HookId, H)>>, id: HookId) -> Option<H> {
    let mut all = from.write();
    let at = all.iter().position(|(known, _)| *known == id)?;
    Some(all.remove(at).1)
}

impl Hooks {
    /// Creates an empty set of hooks.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a callback that is called before memory is taken from the driver, and may free memory
    /// instead.
    pub fn add_free_memory_callback(&self, callback: FreeMemoryCallback) -> HookId {
        add(&self.callbacks, callback)
    }

    /// Adds an observer of failed requests.
    pub fn add_oom_observer(&self, observer: OomObserver) -> HookId {
        add(&self.observers, observer)
    }

    /// Adds an observer of requests that `throw_on_cudamalloc_oom` rejects before the driver is called.
    /// Observers of failed requests are not called for these.
    pub fn add_oom_rejection_observer(&self, observer: OomObserver) -> HookId {
        add(&self.rejection_observers, observer)
    }

    /// Removes a callback or an observer. Returns false if there is none with this id. A call of it on
    /// another thread may still be running.
    pub fn remove(&self, hook: HookId) -> bool {
        remove(&self.callbacks, hook).is_some()
            || remove(&self.observers, hook).is_some()
            || remove(&self.rejection_observers, hook).is_some()
    }

    /// Calls each callback. Returns whether any of them freed anything. Allocators call this with no
    /// lock held, before they take memory from the driver.
    #[must_use = "a callback that freed something may have made room"]
    pub fn free_some_memory(&self) -> bool {
        if self.callbacks.read().is_empty() {
            return false;
        }
        let callbacks = self.callbacks.read().clone();
        if self.running.is_here() {
            return false;
        }
        let _inside = self.running.enter();
        let mut freed = false;
        for (_, callback) in callbacks {
            freed |= callback();
        }
        freed
    }

    /// Disables the log lines of failed requests. The wrapper around this allocator, which may retry
    /// the request, writes them instead.
    pub(crate) fn report_outside(&self) {
        self.is_inner.store(true, Ordering::Relaxed);
    }

    /// Logs that a request failed, and calls each observer with the report. Allocators call this with no
    /// lock held.
    pub fn notify_out_of_memory(&self, report: &OutOfMemory) {
        self.show(&self.observers, report);
    }

    /// Logs that a request was rejected, and calls each observer of rejections with the report.
    /// Allocators call this with no lock held.
    pub fn notify_oom_rejection(&self, report: &OutOfMemory) {
        self.show(&self.rejection_observers, report);
    }

    fn show(&self, observers: &RwLock<Vec<(HookId, OomObserver)>>, report: &OutOfMemory) {
        let _lines = diagnostics::lines();
        if !self.is_inner.load(Ordering::Relaxed) {
            diagnostics::note(Level::Warn, || first_line(report));
        }
        let observers = observers.read().clone();
        if self.running.is_here() {
            return;
        }
        let _inside = self.running.enter();
        for (_, observer) in observers {
            observer(report);
        }
    }
}

fn first_line(report: &OutOfMemory) -> String {
    report.to_string().lines().next().unwrap_or_default().to_owned()
}

impl fmt::Debug for Hooks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (callbacks, observers) = (self.callbacks.read().len(), self.observers.read().len());
        write!(f, "Hooks {{ callbacks: {callbacks}, observers: {observers} }}")
    }
}
