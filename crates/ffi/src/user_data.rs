//! The `user` pointers of callers' functions, and the table of objects that callers refer to by number:
//! allocators, checkpoints, snapshots, shared and owned blocks, and tensors.

#![expect(unsafe_code, reason = "callers hand us functions and pointers")]

use std::any::Any;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use super::gate::{self, Gate};
use super::guard::{Failure, Status};
use super::pointers::store;
use stratalloc::sync::{Global, Rank};

/// Called once when the library no longer needs `user`, on any thread, with no lock held. It may
/// allocate and free, and must not unwind. It is not called if the call that passed `user` failed, or
/// after `stratalloc_callbacks_end`.
pub type Release = Option<unsafe extern "C" fn(user: *mut c_void)>;

/// Stops the calls of all functions that were added with `release`, including those of stack sources.
/// After that, `release` itself is not called either. Waits at most `wait_ms` milliseconds for running
/// calls, and stores in `inside` the number of calls that are still running then. An interpreter calls
/// this before it exits. It must not be called from a function that it stops. Functions that are added
/// later are not stopped.
///
/// # Safety
///
/// `inside` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_callbacks_end(
    release: *const c_void,
    wait_ms: u64,
    inside: *mut u64,
) -> Status {
    // SAFETY: required of the caller (`# Safety`).
    unsafe {
        store(inside, "inside", || Ok(gate::close(release.addr(), Duration::from_millis(wait_ms))))
    }
}

/// A caller's `user` pointer, with the release function that runs when the last reference is dropped. A
/// running call holds a reference.
#[derive(Debug)]
pub(super) struct UserData {
    user: *mut c_void,
    release: Release,
    gate: Arc<Gate>,
    is_taken: AtomicBool,
}

// SAFETY: the interface requires that the caller's functions can be called on any thread with this
// pointer.
unsafe impl Send for UserData {}
// SAFETY: as above.
unsafe impl Sync for UserData {}

impl UserData {
    /// Passes the caller's pointer and its release function to `take`. If `take` fails, the pointer
    /// still belongs to the caller.
    pub(super) fn to<T>(
        user: *mut c_void,
        release: Release,
        take: impl FnOnce(Arc<Self>) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let gate = Gate::of(release.map_or(0, |release| release as usize));
        let user_data = Arc::new(Self { user, release, gate, is_taken: AtomicBool::new(true) });
        take(Arc::clone(&user_data))
            .inspect_err(|_| user_data.is_taken.store(false, Ordering::Relaxed))
    }

    /// Runs `call` with `user`. Returns `None` if `stratalloc_callbacks_end` has stopped the calls.
    pub(super) fn call<T>(&self, call: impl FnOnce(*mut c_void) -> T) -> Option<T> {
        let _inside = self.gate.enter()?;
        Some(call(self.user))
    }
}

impl Drop for UserData {
    fn drop(&mut self) {
        if let (Some(release), true) = (self.release, *self.is_taken.get_mut()) {
            // SAFETY: the caller's function, with the caller's pointer, once.
            let _ = self.call(|user| unsafe { release(user) });
        }
    }
}

type Objects = BTreeMap<u64, Arc<dyn Any + Send + Sync>>;

static OBJECTS: Global<Objects> = Global::new(Rank::Objects, BTreeMap::new());

/// The first number of an object. Small numbers, which a caller may pass by mistake, are no objects.
pub(super) const FIRST_NUMBER: u64 = 1 << 24;

/// The number of the next object.
static NEXT: AtomicU64 = AtomicU64::new(FIRST_NUMBER);
/// Objects with smaller numbers belong to the process that forked this one.
static FIRST_OWN: AtomicU64 = AtomicU64::new(FIRST_NUMBER);

/// Stores an object and returns its number. Numbers are unique over all kinds of objects.
pub(super) fn add(thing: impl Any + Send + Sync) -> u64 {
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    OBJECTS.lock().insert(number, Arc::new(thing));
    number
}

/// Returns the object with this number, if it is of the type `T`.
pub(super) fn find<T: Any + Send + Sync>(kind: &str, number: u64) -> Result<Arc<T>, Failure> {
    known(kind, number, OBJECTS.read().get(&number).map(Arc::clone))
}

/// Returns all objects of the type `T`, with their numbers.
pub(super) fn all<T: Any + Send + Sync>() -> Vec<(u64, Arc<T>)> {
    let objects = OBJECTS.read();
    let all = objects.iter();
    all.filter_map(|(number, thing)| Some((*number, Arc::clone(thing).downcast().ok()?))).collect()
}

/// Removes a number and returns its object. The object is dropped with the last reference to it.
pub(super) fn remove<T: Any + Send + Sync>(kind: &str, number: u64) -> Result<Arc<T>, Failure> {
    let mut all = OBJECTS.lock();
    // The number may be that of an object of another kind, which stays.
    let removed = match all.get(&number) {
        Some(thing) if thing.is::<T>() => all.remove(&number),
        _ => None,
    };
    drop(all);
    known(kind, number, removed)
}

/// Removes a number, and drops its object with the last reference to it. Does nothing if the number is of the
/// process that forked this one.
pub(super) fn release<T: Any + Send + Sync>(kind: &str, number: u64) -> Result<(), Failure> {
    if is_of_parent(number) { Ok(()) } else { remove::<T>(kind, number).map(drop) }
}

fn known<T: Any + Send + Sync>(
    kind: &str,
    number: u64,
    thing: Option<Arc<dyn Any + Send + Sync>>,
) -> Result<Arc<T>, Failure> {
    let unknown = || {
        let text = match is_of_parent(number) {
            true => format!(
                "the {kind} {number:#x} belongs to the process that forked this one: make an allocator in \
                 this process"
            ),
            false => format!("no {kind} has the handle {number:#x}, or it was released"),
        };
        Failure::new(Status::UnknownHandle, text)
    };
    thing.and_then(|thing| thing.downcast().ok()).ok_or_else(unknown)
}

/// Returns true for a number of the process that forked this one.
pub(super) fn is_of_parent(number: u64) -> bool {
    (FIRST_NUMBER..FIRST_OWN.load(Ordering::Relaxed)).contains(&number)
}

/// Removes all numbers in a forked child, without dropping the objects.
pub(super) fn forget_all() {
    mem::forget(mem::take(&mut *OBJECTS.lock()));
    FIRST_OWN.store(NEXT.load(Ordering::Relaxed), Ordering::Relaxed);
}
