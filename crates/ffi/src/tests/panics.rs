//! Panics in users' functions behind the C interface. Each is caught by the call in which it occurs.

use std::ffi::CString;
use std::ptr::{null_mut, without_provenance_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{
    Status, stratalloc_allocate, stratalloc_create, stratalloc_destroy, stratalloc_empty_cache,
    stratalloc_free, stratalloc_record_stream, stratalloc_set_memory_fraction, stratalloc_switch,
};
use stratalloc::registry;
use stratalloc::strategies::plugin::Callbacks;

use super::{allocate, create, last_error};

/// The allocation function panics for a request of this size, and the free function for a block that is
/// one byte larger.
const BURSTS_BYTES: u64 = 666;

fn bursting() -> Callbacks {
    let next = Arc::new(AtomicU64::new(1 << 20));
    let allocate = move |bytes, _, _| {
        assert_ne!(bytes, BURSTS_BYTES, "no such request");
        Some(next.fetch_add(4096, Ordering::Relaxed))
    };
    let free = |_, bytes, _, _| assert_ne!(bytes, BURSTS_BYTES + 1, "no such free");
    Callbacks::new(allocate, free)
        .on_reset(|| panic!("no reset"))
        .on_record_stream(|_, _| panic!("no streams"))
        .on_memory_fraction(|_, _| panic!("no limit"))
}

fn ended(status: Status, words: &str) {
    assert_eq!(status, Status::Internal, "{words}");
    let message = last_error();
    assert!(
        message.starts_with("a defect of the library: ") && message.contains(words),
        "{message}"
    );
}

#[test]
fn what_a_users_function_panics_with_is_a_status() {
    registry::register_callbacks("bursting", bursting()).unwrap();
    let handle = create("backend:bursting", "sim").unwrap();
    let kept = without_provenance_mut(77);
    let mut place = kept;
    // SAFETY: the pointer is to a local variable.
    let status = unsafe { stratalloc_allocate(handle, BURSTS_BYTES, null_mut(), &raw mut place) };
    ended(status, "no such request");
    assert_eq!(place, kept, "a call that fails stores nothing");
    ended(allocate(handle, BURSTS_BYTES, 0).unwrap_err(), "no such request");

    let (block, burst) =
        (allocate(handle, 512, 0).unwrap(), allocate(handle, BURSTS_BYTES + 1, 0).unwrap());
    ended(stratalloc_free(handle, burst), "no such free");
    ended(stratalloc_record_stream(handle, block, without_provenance_mut(7)), "no streams");
    ended(stratalloc_empty_cache(handle), "no reset");
    ended(stratalloc_set_memory_fraction(handle, 0.5), "no limit");

    // A panic on one thread does not affect others, and the allocator continues to work.
    std::thread::spawn(move || {
        assert_eq!(last_error(), "");
        let other = allocate(handle, 512, 0).unwrap();
        assert_eq!(stratalloc_free(handle, other), Status::Ok);
    })
    .join()
    .unwrap();
    assert_eq!(stratalloc_free(handle, block), Status::Ok);
    assert_eq!(stratalloc_destroy(handle), Status::Ok);
}

#[test]
fn a_constructor_that_panics_makes_nothing() {
    registry::register("unmade", |_, _| panic!("not today")).unwrap();
    let (conf, mut handle) = (CString::new("backend:unmade").unwrap(), 77);
    // SAFETY: both texts end with a zero, and the handle's pointer is to a local variable.
    let status = unsafe { stratalloc_create(conf.as_ptr(), c"sim".as_ptr(), &raw mut handle) };
    ended(status, "not today");
    assert_eq!(handle, 77);
    let handle = create("backend:native", "sim").unwrap();
    let block = allocate(handle, 512, 0).unwrap();
    // SAFETY: the text ends with a zero.
    ended(unsafe { stratalloc_switch(handle, conf.as_ptr()) }, "not today");
    assert_eq!(stratalloc_free(handle, block), Status::Ok, "everything is as it was");
    assert_eq!(stratalloc_destroy(handle), Status::Ok);
}
