//! A stream filter in C++'s form: a `std::function<bool(cudaStream_t)>` passed by value.
//!
//! The type is not trivially copyable, so the calling convention passes a pointer to the caller's
//! object. The callee may copy, call and move from the object; the caller destroys it. The layout is
//! that of GNU's C++ library: two words of payload, a function that copies and destroys the payload, and
//! a function that calls the object. In our objects the payload is a counted reference to a Rust
//! closure.
//!
//! With another C++ standard library, a user's library must not use the filter, and a program must not
//! pass one.
//!
//! Source: the Itanium C++ ABI, "Non-Trivial Parameters", and GNU's `bits/std_function.h`.

#![expect(unsafe_code, reason = "an object that C++ copies and destroys")]

use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;
use std::sync::Arc;

use parking_lot::Mutex;

use super::StreamFilter;
use crate::ids::StreamId;

/// The two words of payload. In our objects the first word is an `Arc<StreamFilter>` as a pointer.
type Payload = [*mut c_void; 2];
type Manager = unsafe extern "C-unwind" fn(*mut Payload, *const Payload, c_int) -> bool;
type Invoker = unsafe extern "C-unwind" fn(*const Payload, *mut *mut c_void) -> bool;

const GET_TYPE: c_int = 0;
const GET_FUNCTOR: c_int = 1;
const CLONE: c_int = 2;
const DESTROY: c_int = 3;

/// A `std::function<bool(cudaStream_t)>`. Its drop destroys the payload, unless C++ has moved it
/// elsewhere.
#[repr(C)]
#[derive(Debug)]
pub(super) struct StdFunction {
    payload: Payload,
    manager: Option<Manager>,
    invoker: Option<Invoker>,
}

impl StdFunction {
    pub(super) fn new(filter: StreamFilter) -> Self {
        let held = Arc::into_raw(Arc::new(filter)).cast_mut().cast();
        Self { payload: [held, null_mut()], manager: Some(manage), invoker: Some(invoke) }
    }
}

// SAFETY: C++ may call the object from any thread, one at a time, as PyTorch calls its filters.
unsafe impl Send for StdFunction {}

/// Copies a C++ filter; returns `None` if the object is empty. The copy is called by one thread at a
/// time, and destroyed with the last reference to it. A C++ exception in the filter ends the process.
///
/// # Safety
///
/// `object` is null, or points to a `std::function<bool(cudaStream_t)>` of GNU's C++ library. The object
/// lives during the call.
pub unsafe fn copied(object: *const c_void) -> Option<StreamFilter> {
    // SAFETY: the caller guarantees that `object` is null or points to a live `std::function`.
    let object = unsafe { object.cast::<StdFunction>().as_ref() }?;
    let (manager, invoker) = (object.manager?, object.invoker?);
    let mut payload = [null_mut(); 2];
    // SAFETY: `manager` copies the payload of its own object into an empty one.
    unsafe { manager(&raw mut payload, &raw const object.payload, CLONE) };
    let copy = StdFunction { payload, manager: Some(manager), invoker: Some(invoker) };
    let copy = Mutex::new(copy);
    Some(Arc::new(move |stream| copy.lock().accepts(stream)))
}

impl StdFunction {
    fn accepts(&self, stream: StreamId) -> bool {
        // A stream that does not fit a pointer cannot come from C++.
        let Ok(handle) = usize::try_from(stream.0) else { return false };
        let mut argument = std::ptr::without_provenance_mut(handle);
        // SAFETY: the object is alive, and its payload belongs to `invoker`.
        self.invoker
            .is_some_and(|invoker| unsafe { invoker(&raw const self.payload, &raw mut argument) })
    }
}

impl Drop for StdFunction {
    fn drop(&mut self) {
        if let Some(manager) = self.manager.take() {
            let payload = &raw mut self.payload;
            // SAFETY: `manager` is set as long as `payload` belongs to it: C++ moves both or none, and
            // a function that C++ has put here instead destroys its own payload.
            unsafe { manager(payload, payload, DESTROY) };
        }
    }
}

/// Copies or destroys a payload, when C++ copies or destroys its object.
unsafe extern "C-unwind" fn manage(to: *mut Payload, from: *const Payload, what: c_int) -> bool {
    match what {
        // No C++ type info is available: returns null.
        GET_TYPE => put(to, null_mut()),
        GET_FUNCTOR => put(to, from.cast_mut().cast()),
        CLONE => {
            let held = held(from);
            // SAFETY: the payload of a live object is a counted pointer from `new`.
            unsafe { Arc::increment_strong_count(held) };
            put(to, held.cast_mut().cast());
        }
        DESTROY => {
            let held = held(to);
            // SAFETY: the destroyed object owns one count, taken by `new` or by a copy.
            unsafe { Arc::decrement_strong_count(held) };
        }
        _ => {}
    }
    false
}

/// Calls the filter. C++ passes its argument by reference.
unsafe extern "C-unwind" fn invoke(payload: *const Payload, stream: *mut *mut c_void) -> bool {
    let held = held(payload);
    // SAFETY: C++ calls an object that is alive, so its count keeps the filter.
    let filter = unsafe { &*held };
    // SAFETY: the argument lives as long as the call.
    let stream = StreamId(unsafe { *stream }.addr() as u64);
    // A panic must not unwind into C++. A filter that panics accepts no stream.
    catch_unwind(AssertUnwindSafe(|| filter(stream))).unwrap_or(false)
}

fn held(payload: *const Payload) -> *const StreamFilter {
    // SAFETY: this private function is called only with payloads of live objects.
    unsafe { (*payload)[0] }.cast_const().cast()
}

fn put(payload: *mut Payload, word: *mut c_void) {
    // SAFETY: this private function is called only with a payload that C++ wants to be filled.
    unsafe { (*payload)[0] = word };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_share_the_filter_and_the_last_one_lets_it_go() {
        let filter: StreamFilter = Arc::new(|stream| stream == StreamId(64));
        let object = StdFunction::new(Arc::clone(&filter));
        let mut copy = StdFunction { payload: [null_mut(); 2], ..StdFunction::new(filter.clone()) };
        let before = Arc::strong_count(&filter);
        // SAFETY: both payloads are alive. C++ makes this call to copy an object into a new one.
        unsafe { manage(&raw mut copy.payload, &raw const object.payload, CLONE) };
        drop(object);
        for (stream, accepted) in [(64, true), (65, false)] {
            let mut argument: *mut c_void = std::ptr::without_provenance_mut(stream);
            // SAFETY: the object `copy` is alive.
            let is_accepted = unsafe { invoke(&raw const copy.payload, &raw mut argument) };
            assert_eq!(is_accepted, accepted);
        }
        drop(copy);
        assert_eq!(Arc::strong_count(&filter), before - 1);
    }

    #[test]
    fn a_filter_that_panics_accepts_nothing() {
        let object = StdFunction::new(Arc::new(|_| panic!("asked")));
        let mut argument = null_mut();
        // SAFETY: the object is alive.
        assert!(!unsafe { invoke(&raw const object.payload, &raw mut argument) });
    }
}
