//! Functions of callers that are told what happens: of entries, of requests that failed, of pressure.
//!
//! They run on the thread that asked, with no lock of the library held.

#![expect(unsafe_code, reason = "exported names, callers' pointers and functions")]

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use super::guard::{Failure, Status, status};
use super::instance::Instance;
use super::lent::{Lent, Release};
use super::pointers::store;
use super::snapshots::{Entry, with_entry};
use super::table;
use crate::error::OutOfMemory;
use crate::history::TrackerId;
use crate::ids::HookId;

/// Gets an entry of the history, which stays as it is during the call. It may allocate, free and take
/// snapshots, and must not unwind. It must not wait for a request of another thread.
pub type Tracker = Option<unsafe extern "C" fn(user: *mut c_void, entry: *const Entry)>;

/// Told of a request that failed: the device, what was asked for, and what the device has in all and free,
/// each 0 if nobody knows. It may allocate and free, and must not unwind.
pub type OomObserver = Option<
    unsafe extern "C" fn(
        user: *mut c_void,
        device: c_int,
        requested_bytes: u64,
        device_total_bytes: u64,
        device_free_bytes: u64,
    ),
>;

/// Called for a request that `throw_on_cudamalloc_oom` rejected: the device, the segment that the request
/// would have taken, what the allocator has reserved, and what the device has in all (0 if unknown). It may
/// allocate and free, and must not unwind.
pub type OomRejectionObserver = Option<
    unsafe extern "C" fn(
        user: *mut c_void,
        device: c_int,
        segment_bytes: u64,
        reserved_bytes: u64,
        device_total_bytes: u64,
    ),
>;

/// Asked to free something before memory is taken from the device; says whether it did, by anything but 0. It
/// may allocate and free, and must not unwind.
pub type FreeMemoryCallback = Option<unsafe extern "C" fn(user: *mut c_void) -> c_int>;

/// The shape of all calls that add a function: a place for the number, a function that is there, and `user`,
/// which stays the caller's if the call fails.
///
/// # Safety
///
/// `id` is null or may be written.
unsafe fn add<F>(
    handle: u64,
    function: Option<F>,
    (release, user): (Release, *mut c_void),
    id: *mut u64,
    add: impl FnOnce(&Instance, F, Arc<Lent>) -> u64,
) -> Status {
    let work = || {
        let function = function.ok_or_else(|| Failure::null("the function"))?;
        let instance = table::find(handle)?;
        Lent::to(user, release, |lent| Ok(add(&instance, function, lent)))
    };
    // SAFETY: our caller's promise.
    unsafe { store(id, "id", work) }
}

type Observe = unsafe extern "C" fn(*mut c_void, c_int, u64, u64, u64);

/// An observer that passes the device and three figures of a report on.
fn observing(
    observe: Observe,
    lent: Arc<Lent>,
    figures: impl Fn(&OutOfMemory) -> [u64; 3] + Send + Sync + 'static,
) -> Arc<dyn Fn(&OutOfMemory) + Send + Sync> {
    Arc::new(move |report| {
        let device = c_int::try_from(report.device.0).unwrap_or(c_int::MAX);
        let [first, second, third] = figures(report);
        // SAFETY: the caller's function, with the caller's pointer.
        let _ = lent.call(|user| unsafe { observe(user, device, first, second, third) });
    })
}

/// The shape of all calls that remove one.
fn remove(handle: u64, id: u64, remove: impl FnOnce(&Instance) -> bool) -> Status {
    status(|| match remove(&*table::find(handle)?) {
        true => Ok(()),
        false => {
            let text = format_args!("nothing was added with the number {id}, or it was removed");
            Err(Failure::invalid(text))
        }
    })
}

/// Calls `told` with every entry of the history from now on, while recording is on, and stores a number to
/// remove it by. It stays through a switch of strategy. No lock of the library is held during a call.
///
/// Memory of the device is announced in an order that allows to register it with a network library: as
/// `segment_alloc` or `segment_map` after the driver gave it and before any request is served from it, as
/// `segment_free` or `segment_unmap` when no request can get it and before the driver gets it back. If the
/// driver refuses to take it back it is announced as coming again.
///
/// Blocks that a call takes or frees itself are recorded, and no tracker is called for them. Memory that it
/// takes from the device is announced when the call has returned. Inside a call no memory goes back to the
/// device: `stratalloc_empty_cache` releases nothing there. `stratalloc_destroy` announces all that goes
/// back; the handle is unknown by then.
///
/// # Safety
///
/// `told` may be called with `user` on any thread until `release` is; `id` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_tracker_add(
    handle: u64,
    told: Tracker,
    release: Release,
    user: *mut c_void,
    id: *mut u64,
) -> Status {
    type Told = unsafe extern "C" fn(*mut c_void, *const Entry);
    let add_to = |instance: &Instance, told: Told, lent: Arc<Lent>| {
        let tracker = move |entry: &crate::history::Entry| {
            // SAFETY: the caller's function, with the caller's pointer and an entry that stays.
            let tell = |user| with_entry(entry, |entry| unsafe { told(user, entry) });
            let _ = lent.call(tell);
        };
        instance.history().add_tracker(Arc::new(tracker)).0
    };
    // SAFETY: our caller's promise.
    unsafe { add(handle, told, (release, user), id, add_to) }
}

/// Removes a tracker. A call of another thread may still run; `user` is let go of when it has ended.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_tracker_remove(handle: u64, id: u64) -> Status {
    remove(handle, id, |instance| instance.history().remove_tracker(TrackerId(id)))
}

/// Lets `told` know of every request that fails from now on, and stores a number to remove it by. It stays
/// through a switch of strategy. A request of its own that fails is told to nobody.
///
/// # Safety
///
/// `told` may be called with `user` on any thread until `release` is; `id` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_oom_observer_add(
    handle: u64,
    told: OomObserver,
    release: Release,
    user: *mut c_void,
    id: *mut u64,
) -> Status {
    let add_to = |instance: &Instance, told: Observe, lent: Arc<Lent>| {
        let figures = |report: &OutOfMemory| {
            let device = [report.device_total_bytes, report.device_free_bytes];
            let [total, free] = device.map(|bytes| bytes.unwrap_or(0));
            [report.requested_bytes, total, free]
        };
        instance.hooks().add_oom_observer(observing(told, lent, figures)).0
    };
    // SAFETY: our caller's promise.
    unsafe { add(handle, told, (release, user), id, add_to) }
}

/// Calls `observer` for every request that `throw_on_cudamalloc_oom` rejects from now on, and stores a number
/// to remove it by. It stays through a switch of strategy. Observers of failed requests are not called then.
///
/// # Safety
///
/// `observer` may be called with `user` on any thread until `release` is; `id` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_oom_rejection_observer_add(
    handle: u64,
    observer: OomRejectionObserver,
    release: Release,
    user: *mut c_void,
    id: *mut u64,
) -> Status {
    let add_to = |instance: &Instance, observe: Observe, lent: Arc<Lent>| {
        let figures = |report: &OutOfMemory| {
            let total = report.device_total_bytes.unwrap_or(0);
            [report.segment_bytes, report.reserved_bytes, total]
        };
        instance.hooks().add_oom_rejection_observer(observing(observe, lent, figures)).0
    };
    // SAFETY: our caller's promise.
    unsafe { add(handle, observer, (release, user), id, add_to) }
}

/// Removes an observer or a free-memory callback, as `stratalloc_tracker_remove` does.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_hook_remove(handle: u64, id: u64) -> Status {
    remove(handle, id, |instance| instance.hooks().remove(HookId(id)))
}

/// Lets `asked` free something from now on whenever memory would be taken from the device, and stores a
/// number to remove it by. It stays through a switch of strategy. What it asks for itself asks nobody.
///
/// # Safety
///
/// `asked` may be called with `user` on any thread until `release` is; `id` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_free_memory_callback_add(
    handle: u64,
    asked: FreeMemoryCallback,
    release: Release,
    user: *mut c_void,
    id: *mut u64,
) -> Status {
    let add_to = |instance: &Instance, asked: unsafe extern "C" fn(_) -> c_int, lent: Arc<Lent>| {
        // SAFETY: the caller's function, with the caller's pointer.
        let callback = move || lent.call(|user| unsafe { asked(user) }).is_some_and(|did| did != 0);
        instance.hooks().add_free_memory_callback(Arc::new(callback)).0
    };
    // SAFETY: our caller's promise.
    unsafe { add(handle, asked, (release, user), id, add_to) }
}
