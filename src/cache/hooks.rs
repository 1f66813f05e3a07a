//! Callbacks and observers of users. They run with no lock held and may allocate and free; a call
//! that comes back here on its own thread skips them, and so does one from a thread's last destructors.

use std::cell::RefCell;
use std::fmt;

use parking_lot::RwLock;

use crate::allocator::{FreeMemoryCallback, OomObserver};
use crate::error::OutOfMemory;
use crate::ids::{HookId, OwnerId};

thread_local! {
    /// The allocators whose hooks this thread runs now.
    static INSIDE: RefCell<Vec<OwnerId>> = const { RefCell::new(Vec::new()) };
}

/// Marks that this thread runs a hook of one allocator, until it is dropped, also by a panic.
struct Inside(OwnerId);

impl Inside {
    /// `None` inside a hook, and on a thread that ends: nobody could tell there.
    fn enter(owner: OwnerId) -> Option<Self> {
        let enter = |inside: &RefCell<Vec<OwnerId>>| {
            let mut inside = inside.borrow_mut();
            if inside.contains(&owner) {
                return None;
            }
            inside.push(owner);
            Some(Self(owner))
        };
        INSIDE.try_with(enter).ok().flatten()
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        let leave = |inside: &RefCell<Vec<OwnerId>>| {
            inside.borrow_mut().retain(|owner| *owner != self.0);
        };
        // Where the thread ends nobody looks any more.
        let _ = INSIDE.try_with(leave);
    }
}

pub(crate) struct Hooks {
    owner: OwnerId,
    callbacks: RwLock<Vec<(HookId, FreeMemoryCallback)>>,
    observers: RwLock<Vec<(HookId, OomObserver)>>,
}

/// Adds a hook to a list, and names it.
fn add<H>(to: &RwLock<Vec<(HookId, H)>>, hook: H) -> HookId {
    let id = HookId::next();
    to.write().push((id, hook));
    id
}

/// Takes a hook off a list. It is a user's, and dropped where no lock is held.
fn remove<H>(from: &RwLock<Vec<(HookId, H)>>, id: HookId) -> Option<H> {
    let mut all = from.write();
    let at = all.iter().position(|(known, _)| *known == id)?;
    Some(all.remove(at).1)
}

impl Hooks {
    /// No hooks yet, of the allocator with this number.
    pub(crate) fn new(owner: OwnerId) -> Self {
        Self { owner, callbacks: RwLock::default(), observers: RwLock::default() }
    }

    pub(crate) fn add_callback(&self, callback: FreeMemoryCallback) -> HookId {
        add(&self.callbacks, callback)
    }

    pub(crate) fn add_observer(&self, observer: OomObserver) -> HookId {
        add(&self.observers, observer)
    }

    /// Whether it was there.
    pub(crate) fn remove(&self, hook: HookId) -> bool {
        remove(&self.callbacks, hook).is_some() || remove(&self.observers, hook).is_some()
    }

    /// Asks every callback to free something; true when one did.
    pub(crate) fn free_some_memory(&self) -> bool {
        if self.callbacks.read().is_empty() {
            return false;
        }
        let callbacks = self.callbacks.read().clone();
        let Some(_inside) = Inside::enter(self.owner) else {
            return false;
        };
        let mut freed = false;
        for (_, callback) in callbacks {
            freed |= callback();
        }
        freed
    }

    /// Shows the report to every observer.
    pub(crate) fn tell_out_of_memory(&self, report: &OutOfMemory) {
        let observers = self.observers.read().clone();
        let Some(_inside) = Inside::enter(self.owner) else {
            return;
        };
        for (_, observer) in observers {
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
