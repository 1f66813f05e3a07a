//! A filter of streams as C++ takes it: a `std::function<bool(cudaStream_t)>` by value.
//!
//! It is not trivially copyable, so the calling convention passes a pointer to the caller's object,
//! which the callee may copy, call and move from, and which the caller destroys. The object is laid out
//! as GNU's C++ library does: two words of payload, a function that copies and destroys it, and one that
//! calls it. Ours keep a reference count in the payload. A library that was built with another C++
//! library than GNU's must not look at the filter, and a program that was must not hand us one.
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

/// The two words that a function object may use; the first is an `Arc<StreamFilter>` as a pointer.
type Payload = [*mut c_void; 2];
type Manager = unsafe extern "C-unwind" fn(*mut Payload, *const Payload, c_int) -> bool;
type Invoker = unsafe extern "C-unwind" fn(*const Payload, *mut *mut c_void) -> bool;

const GET_TYPE: c_int = 0;
const GET_FUNCTOR: c_int = 1;
const CLONE: c_int = 2;
const DESTROY: c_int = 3;

/// The object. Destroyed when it goes, unless C++ has moved what it held elsewhere.
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

// SAFETY: what C++ may call from any thread, one at a time, as PyTorch calls its filters.
unsafe impl Send for StdFunction {}

/// A filter of C++, copied; `None` when the object is empty. It is asked by one thread at a time, and ends
/// with the last holder. A C++ exception in it ends the process.
///
/// # Safety
///
/// `object` is null, or a `std::function<bool(cudaStream_t)>` that lives during the call, of GNU's C++
/// library.
#[cfg_attr(not(feature = "ffi"), expect(dead_code, reason = "PyTorch's symbols are handed one"))]
pub(crate) unsafe fn copied(object: *const c_void) -> Option<StreamFilter> {
    // SAFETY: our caller's promise.
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
        // A stream that is no pointer here is none that C++ could name.
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

/// Copies and destroys a payload, when C++ does so with its object.
unsafe extern "C-unwind" fn manage(to: *mut Payload, from: *const Payload, what: c_int) -> bool {
    match what {
        // What type it is has no name in C++.
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
            // SAFETY: the object that goes gives up its count, which `new` or a copy made.
            unsafe { Arc::decrement_strong_count(held) };
        }
        _ => {}
    }
    false
}

/// Asks the filter. C++ passes its argument by reference.
unsafe extern "C-unwind" fn invoke(payload: *const Payload, stream: *mut *mut c_void) -> bool {
    let held = held(payload);
    // SAFETY: C++ calls an object that is alive, so its count keeps the filter.
    let filter = unsafe { &*held };
    // SAFETY: the argument lives as long as the call.
    let stream = StreamId(unsafe { *stream }.addr() as u64);
    // No panic may pass C++; a filter that cannot answer accepts nothing.
    catch_unwind(AssertUnwindSafe(|| filter(stream))).unwrap_or(false)
}

fn held(payload: *const Payload) -> *const StreamFilter {
    // SAFETY: private, and called only with payloads of live objects.
    unsafe { (*payload)[0] }.cast_const().cast()
}

fn put(payload: *mut Payload, word: *mut c_void) {
    // SAFETY: private, and called only with the payload that C++ wants filled.
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
        // SAFETY: as C++ copies an object into a fresh one.
        unsafe { manage(&raw mut copy.payload, &raw const object.payload, CLONE) };
        drop(object);
        for (stream, accepted) in [(64, true), (65, false)] {
            let mut argument: *mut c_void = std::ptr::without_provenance_mut(stream);
            // SAFETY: the copy is alive.
            let said = unsafe { invoke(&raw const copy.payload, &raw mut argument) };
            assert_eq!(said, accepted);
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
