//! Users' functions that the library calls: trackers (called with each history entry), observers of
//! failed requests, and callbacks that free memory.
//!
//! They run on the thread of the call that causes them, with no lock of the library held.

#![expect(unsafe_code, reason = "exported names, callers' pointers and functions")]

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use super::guard::{Failure, Status, status};
use super::instance::Instance;
use super::pointers::store;
use super::snapshots::{Entry, with_entry};
use super::table;
use super::user_data::{Release, UserData};
use stratalloc::error::OutOfMemory;
use stratalloc::history::TrackerId;
use stratalloc::ids::HookId;

/// Called with an entry of the history, which is valid during the call. The function may allocate, free
/// and take snapshots. It must not unwind, and must not wait for a request of another thread.
pub type Tracker = Option<unsafe extern "C" fn(user: *mut c_void, entry: *const Entry)>;

/// Called after a failed request. Receives the device, the requested bytes, and the total and the free
/// bytes of the device (0 if unknown). It may allocate and free, and must not unwind.
pub type OomObserver = Option<
    unsafe extern "C" fn(
        user: *mut c_void,
        device: c_int,
        requested_bytes: u64,
        device_total_bytes: u64,
        device_free_bytes: u64,
    ),
>;

/// Called for a request that the setting `throw_on_cudamalloc_oom` rejected. Receives the device, the
/// size of the segment that the request needed, the reserved bytes of the allocator, and the total bytes
/// of the device (0 if unknown). It may allocate and free, and must not unwind.
pub type OomRejectionObserver = Option<
    unsafe extern "C" fn(
        user: *mut c_void,
        device: c_int,
        segment_bytes: u64,
        reserved_bytes: u64,
        device_total_bytes: u64,
    ),
>;

/// Called before memory is acquired from the driver, so that the function can free memory instead.
/// Returns nonzero if it freed any. It may allocate and free, and must not unwind.
pub type FreeMemoryCallback = Option<unsafe extern "C" fn(user: *mut c_void) -> c_int>;

/// Adds a user's function and stores its number in `id`. If the call fails, `user` still belongs to the
/// caller.
///
/// # Safety
///
/// `id` is null or may be written.
unsafe fn add<F>(
    handle: u64,
    function: Option<F>,
    (release, user): (Release, *mut c_void),
    id: *mut u64,
    add: impl FnOnce(&Instance, F, Arc<UserData>) -> u64,
) -> Status {
    let work = || {
        let function = function.ok_or_else(|| Failure::null("the function"))?;
        let instance = table::find(handle)?;
        UserData::to(user, release, |user_data| Ok(add(&instance, function, user_data)))
    };
    // SAFETY: required of the caller (`# Safety`).
    unsafe { store(id, "id", work) }
}

type Observe = unsafe extern "C" fn(*mut c_void, c_int, u64, u64, u64);

/// Returns an observer that calls the user's function with the device and the three numbers that
/// `figures` returns.
fn observing(
    observe: Observe,
    user_data: Arc<UserData>,
    figures: impl Fn(&OutOfMemory) -> [u64; 3] + Send + Sync + 'static,
) -> Arc<dyn Fn(&OutOfMemory) + Send + Sync> {
    Arc::new(move |report| {
        let device = c_int::try_from(report.device.0).unwrap_or(c_int::MAX);
        let [first, second, third] = figures(report);
        // SAFETY: the caller's function, with the caller's pointer.
        let _ = user_data.call(|user| unsafe { observe(user, device, first, second, third) });
    })
}

/// Removes a user's function by its number.
fn remove(handle: u64, id: u64, remove: impl FnOnce(&Instance) -> bool) -> Status {
    status(|| match remove(&*table::find(handle)?) {
        true => Ok(()),
        false => {
            let text = format_args!("nothing was added with the number {id}, or it was removed");
            Err(Failure::invalid(text))
        }
    })
}

/// Adds a tracker: a function that is called with every entry of the history while recording is on.
/// Stores a number with which the tracker can be removed. The tracker stays after a switch. No lock of
/// the library is held during a call.
///
/// Entries for device memory come in an order that allows the tracker to register the memory with a
/// network library. `segment_alloc` or `segment_map` comes after the driver has allocated the memory
/// and before a request is served from it. `segment_free` or `segment_unmap` comes when no request can
/// be served from the memory any more, and before the driver frees it. If the driver fails to free it,
/// another `segment_alloc` or `segment_map` follows.
///
/// Blocks that a tracker itself allocates or frees are recorded, but no tracker is called for them. If a
/// request of a tracker acquires device memory, the entries for that memory follow after the tracker has
/// returned. While a tracker runs, its thread releases no memory to the device, so
/// `stratalloc_empty_cache` has no effect there. `stratalloc_destroy` calls trackers for all memory that
/// it releases; the handle is invalid by then.
///
/// # Safety
///
/// The function may be called with `user` on any thread until `release` is called; `id` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_tracker_add(
    handle: u64,
    tracker: Tracker,
    release: Release,
    user: *mut c_void,
    id: *mut u64,
) -> Status {
    type Function = unsafe extern "C" fn(*mut c_void, *const Entry);
    let add_to = |instance: &Instance, function: Function, user_data: Arc<UserData>| {
        let tracker = move |entry: &stratalloc::history::Entry| {
            // SAFETY: the caller's function, with the caller's pointer and an entry that lives through
            // the call.
            let call = |user| with_entry(entry, |entry| unsafe { function(user, entry) });
            let _ = user_data.call(call);
        };
        instance.history().add_tracker(Arc::new(tracker)).0
    };
    // SAFETY: required of the caller (`# Safety`).
    unsafe { add(handle, tracker, (release, user), id, add_to) }
}

/// Removes a tracker. A call of the tracker on another thread may still be running. `user` is released
/// after that call has returned.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_tracker_remove(handle: u64, id: u64) -> Status {
    remove(handle, id, |instance| instance.history().remove_tracker(TrackerId(id)))
}

/// Adds an observer that is called for every failed request, and stores a number with which it can be
/// removed. It stays after a switch. Failed requests of an observer itself call no observer.
///
/// # Safety
///
/// The function may be called with `user` on any thread until `release` is called; `id` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_oom_observer_add(
    handle: u64,
    observer: OomObserver,
    release: Release,
    user: *mut c_void,
    id: *mut u64,
) -> Status {
    let add_to = |instance: &Instance, observe: Observe, user_data: Arc<UserData>| {
        let figures = |report: &OutOfMemory| {
            let device = [report.device_total_bytes, report.device_free_bytes];
            let [total, free] = device.map(|bytes| bytes.unwrap_or(0));
            [report.requested_bytes, total, free]
        };
        instance.hooks().add_oom_observer(observing(observe, user_data, figures)).0
    };
    // SAFETY: required of the caller (`# Safety`).
    unsafe { add(handle, observer, (release, user), id, add_to) }
}

/// Adds an observer that is called for every request that the setting `throw_on_cudamalloc_oom` rejects,
/// and stores a number with which it can be removed. It stays after a switch. Observers of failed
/// requests are not called for these requests.
///
/// # Safety
///
/// The observer may be called with `user` on any thread until `release` is called; `id` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_oom_rejection_observer_add(
    handle: u64,
    observer: OomRejectionObserver,
    release: Release,
    user: *mut c_void,
    id: *mut u64,
) -> Status {
    let add_to = |instance: &Instance, observe: Observe, user_data: Arc<UserData>| {
        let figures = |report: &OutOfMemory| {
            let total = report.device_total_bytes.unwrap_or(0);
            [report.segment_bytes, report.reserved_bytes, total]
        };
        instance.hooks().add_oom_rejection_observer(observing(observe, user_data, figures)).0
    };
    // SAFETY: required of the caller (`# Safety`).
    unsafe { add(handle, observer, (release, user), id, add_to) }
}

/// Removes an observer or a free-memory callback, as `stratalloc_tracker_remove` does.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_hook_remove(handle: u64, id: u64) -> Status {
    remove(handle, id, |instance| instance.hooks().remove(HookId(id)))
}

/// Adds a callback that is called whenever memory is about to be acquired from the device, so that the
/// callback can free memory instead. Stores a number with which it can be removed. It stays after a
/// switch. Requests of a callback itself call no callback.
///
/// # Safety
///
/// The callback may be called with `user` on any thread until `release` is called; `id` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_free_memory_callback_add(
    handle: u64,
    callback: FreeMemoryCallback,
    release: Release,
    user: *mut c_void,
    id: *mut u64,
) -> Status {
    let add_to = |instance: &Instance,
                  function: unsafe extern "C" fn(_) -> c_int,
                  user_data: Arc<UserData>| {
        // SAFETY: the caller's function, with the caller's pointer.
        let callback =
            move || user_data.call(|user| unsafe { function(user) }).is_some_and(|did| did != 0);
        instance.hooks().add_free_memory_callback(Arc::new(callback)).0
    };
    // SAFETY: required of the caller (`# Safety`).
    unsafe { add(handle, callback, (release, user), id, add_to) }
}
