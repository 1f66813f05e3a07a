//! Tests of the C interface: from Rust, with random handles and values and many threads, and from C and
//! C++ programs.

#![expect(unsafe_code, reason = "calls of the exported functions")]

mod alone;
mod figures;
#[allow(dead_code, unused_imports, reason = "these tests use a part")]
#[path = "../../../tests/common/gpu.rs"]
mod gpu;
mod panics;
mod wild;

use std::ffi::{CStr, CString, c_void};
use std::ptr::{null, null_mut};

use crate::{
    Pool, Status, Text, stratalloc_allocate, stratalloc_check_conf, stratalloc_create,
    stratalloc_destroy, stratalloc_free, stratalloc_last_error, stratalloc_pool_create,
    stratalloc_pool_release, stratalloc_pool_scope_close, stratalloc_pool_scope_open_thread,
    stratalloc_record_stream, stratalloc_switch, stratalloc_text_write,
};

fn create(conf: &str, device: &str) -> Result<u64, Status> {
    let [conf, device] = [conf, device].map(|text| CString::new(text).expect("no zero inside"));
    let mut handle = 0;
    // SAFETY: both texts end with a zero, and the handle's pointer is to a local variable.
    match unsafe { stratalloc_create(conf.as_ptr(), device.as_ptr(), &raw mut handle) } {
        Status::Ok => Ok(handle),
        other => Err(other),
    }
}

fn allocate(handle: u64, bytes: u64, stream: usize) -> Result<*mut c_void, Status> {
    let mut pointer = null_mut();
    let stream = std::ptr::without_provenance_mut(stream);
    // SAFETY: the pointer is to a local variable.
    match unsafe { stratalloc_allocate(handle, bytes, stream, &raw mut pointer) } {
        Status::Ok => Ok(pointer),
        other => Err(other),
    }
}

fn last_error() -> String {
    let mut bytes = [0; 4096];
    // SAFETY: the buffer has the size that is passed.
    unsafe { stratalloc_last_error(bytes.as_mut_ptr(), bytes.len()) };
    // SAFETY: the call has written a terminating zero.
    unsafe { CStr::from_ptr(bytes.as_ptr()) }.to_str().expect("it writes UTF-8").to_owned()
}

#[test]
fn a_block_comes_and_goes() {
    for device in ["sim", "host"] {
        let handle = create("backend:native", device).unwrap();
        let block = allocate(handle, 1 << 20, 0).unwrap();
        assert!(!block.is_null());
        assert_eq!(stratalloc_free(handle, block), Status::Ok);
        assert_eq!(stratalloc_free(handle, block), Status::UnknownAddress);
        assert!(last_error().starts_with("no live block starts at"), "{}", last_error());
        assert_eq!(allocate(handle, 0, 0), Ok(null_mut()));
        assert_eq!(allocate(handle, 1 << 60, 0), Err(Status::OutOfMemory));
        assert_eq!(stratalloc_destroy(handle), Status::Ok);
        assert_eq!(stratalloc_destroy(handle), Status::UnknownHandle);
        assert_eq!(stratalloc_free(handle, block), Status::UnknownHandle);
    }
}

#[test]
fn what_cannot_be_built_is_reported() {
    for (conf, device, expected, words) in [
        ("max_split_size_mb:1", "sim", Status::BadConfiguration, "max_split_size_mb"),
        ("backend:cpu,cpu_numa_node:900", "sim", Status::NotSupported, "node 900"),
        ("backend:no_such", "sim", Status::BadConfiguration, "no_such"),
        ("", "gpu", Status::InvalidArgument, "\"gpu\" is no device"),
    ] {
        assert_eq!(create(conf, device), Err(expected), "{conf} {device}");
        assert!(last_error().contains(words), "{}", last_error());
    }
    // Fails without a driver, and also with one, because there are fewer devices.
    assert!(create("", "cuda:4000000000").is_err());
    assert!(!last_error().is_empty());
    let mut handle = 0;
    // SAFETY: null pointers are refused.
    let status = unsafe { stratalloc_create(null(), null(), &raw mut handle) };
    assert_eq!((status, handle), (Status::InvalidArgument, 0));
    // SAFETY: as above.
    let status = unsafe { stratalloc_create(null(), c"sim".as_ptr(), null_mut()) };
    assert_eq!(status, Status::InvalidArgument);
    // SAFETY: the text is not UTF-8, but it ends with a zero.
    let status = unsafe { stratalloc_create(c"\xff".as_ptr(), c"sim".as_ptr(), &raw mut handle) };
    assert_eq!(status, Status::InvalidArgument);
}

#[test]
fn advice_is_refused_if_the_library_was_built_without_it() {
    let created = create("record_history:1000,advise_on_oom:True", "sim");
    if cfg!(feature = "advise") {
        assert_eq!(created.map(|handle| stratalloc_destroy(handle)), Ok(Status::Ok));
    } else {
        assert_eq!(created, Err(Status::NotSupported));
        assert!(last_error().contains("with its feature advise"), "{}", last_error());
    }
}

#[test]
fn a_configuration_is_checked_without_building_anything() {
    let log = std::env::temp_dir().join(format!("stratalloc-check-{}.csv", std::process::id()));
    std::fs::write(&log, "kept").unwrap();
    let with_log = format!("layers:[log:\"{}\"]", log.display());
    for (conf, expected) in [
        (with_log.as_str(), Status::Ok),
        ("backend:cpu,layers:[guard]", Status::Ok),
        ("max_split_size_mb:1", Status::BadConfiguration),
        ("backend:no_such_either", Status::BadConfiguration),
    ] {
        let text = CString::new(conf).unwrap();
        // SAFETY: the text ends with a zero.
        let status = unsafe { stratalloc_check_conf(text.as_ptr()) };
        assert_eq!(status, expected, "{conf}: {}", last_error());
    }
    assert_eq!(std::fs::read_to_string(&log).unwrap(), "kept");
    std::fs::remove_file(&log).unwrap();
    // SAFETY: a null pointer is refused.
    assert_eq!(unsafe { stratalloc_check_conf(null()) }, Status::InvalidArgument);
}

#[test]
fn a_scope_of_a_released_user_closes() {
    for conf in ["backend:native", "backend:native,expandable_segments:True"] {
        let handle = create(conf, "sim").unwrap();
        let mut pool = Pool::default();
        // SAFETY: the pointer is to a local variable.
        assert_eq!(unsafe { stratalloc_pool_create(handle, 0, &raw mut pool) }, Status::Ok);
        assert_eq!(stratalloc_pool_scope_open_thread(handle, pool), Status::Ok);
        assert_eq!(stratalloc_pool_release(handle, pool), Status::Ok);
        assert_eq!(stratalloc_pool_release(handle, pool), Status::Ok, "the scope's");
        assert_eq!(stratalloc_pool_scope_close(handle, pool), Status::Ok, "{}", last_error());
        assert_eq!(stratalloc_pool_scope_close(handle, pool), Status::BadPool, "it is closed");
        assert_eq!(stratalloc_destroy(handle), Status::Ok);
    }
}

/// The layer `guard` has finished its own writes before the caller gets the block.
#[test]
fn a_guarded_block_keeps_what_is_written_at_once() {
    let handle = create("backend:native,layers:[guard]", "host").unwrap();
    for round in 0..2000u32 {
        let block = allocate(handle, 64, 0).unwrap().cast::<u8>();
        // SAFETY: the block has 64 bytes, and they are ours.
        unsafe { std::ptr::write_bytes(block, 0x11, 64) };
        std::hint::black_box(block);
        // This request and free wait for all work of the stream, so a late write to the first block
        // would have happened after them.
        let other = allocate(handle, 64, 0).unwrap();
        assert_eq!(stratalloc_free(handle, other), Status::Ok);
        // SAFETY: as above.
        let bytes = unsafe { std::slice::from_raw_parts(block, 64) };
        assert_eq!(bytes, [0x11; 64], "round {round}");
        assert_eq!(stratalloc_free(handle, block.cast()), Status::Ok);
    }
    assert_eq!(stratalloc_destroy(handle), Status::Ok);
    assert_eq!(create("backend:cpu,layers:[guard]", "host"), Err(Status::BadConfiguration));
    assert!(last_error().contains("backend:cpu"), "{}", last_error());
}

#[test]
fn a_pool_with_users_refuses_a_switch() {
    let handle = create("backend:native", "sim").unwrap();
    let mut pool = Pool::default();
    // SAFETY: the pointer is to a local variable.
    assert_eq!(unsafe { stratalloc_pool_create(handle, 0, &raw mut pool) }, Status::Ok);
    // SAFETY: the text ends with a zero.
    let switch = || unsafe { stratalloc_switch(handle, c"backend:cudaMallocAsync".as_ptr()) };
    assert_eq!(switch(), Status::BadPool, "{}", last_error());
    assert_eq!(stratalloc_pool_release(handle, pool), Status::Ok, "{}", last_error());
    assert_eq!(switch(), Status::Ok, "{}", last_error());
    assert_eq!(stratalloc_pool_release(handle, pool), Status::BadPool, "it has gone");
    assert_eq!(stratalloc_destroy(handle), Status::Ok);
}

/// The layer `front` caches blocks per thread. It is refused, because an address does not show which
/// thread's cache holds the block.
#[test]
fn a_cache_of_each_thread_is_refused() {
    assert_eq!(
        create("backend:native,layers:[limit:1GiB,front]", "sim"),
        Err(Status::NotSupported)
    );
    assert!(last_error().contains("front"), "{}", last_error());
}

/// Returns a text that the library writes.
fn text(of: u64, kind: Text) -> Result<String, Status> {
    let (mut bytes, mut needed) = (vec![0u8; 1 << 14], 0);
    let start = bytes.as_mut_ptr().cast();
    // SAFETY: the buffer has the size that is passed, and `needed` is a local variable.
    match unsafe { stratalloc_text_write(of, kind as u32, start, bytes.len(), &raw mut needed) } {
        Status::Ok => {
            bytes.truncate(needed - 1);
            Ok(String::from_utf8(bytes).expect("it writes UTF-8"))
        }
        other => Err(other),
    }
}

/// Returns the counters of an allocator as JSON.
fn statistics(handle: u64) -> String {
    text(handle, Text::Statistics).expect("the handle is good")
}

#[test]
fn rare_events_of_a_strategy_are_among_the_counters() {
    for layers in ["", ",layers:[track,statistics]", ",layers:[limit:1GiB]"] {
        let conf = &format!("backend:cudaMallocAsync{layers}");
        let handle = create(conf, "sim").unwrap();
        let block = allocate(handle, 1 << 20, 0).unwrap();
        assert_eq!(stratalloc_record_stream(handle, block, null_mut()), Status::Ok);
        let json = statistics(handle);
        assert!(json.contains("\"malloc_async.own_stream_recorded\":1"), "{conf}: {json}");
        assert!(json.contains("\"malloc_async.deferred_frees\":0"), "{conf}: {json}");
        assert_eq!(stratalloc_free(handle, block), Status::Ok);
        // SAFETY: the text ends with a zero.
        let switched = unsafe { stratalloc_switch(handle, c"backend:native".as_ptr()) };
        assert_eq!(switched, Status::Ok, "{}", last_error());
        let json = statistics(handle);
        assert!(json.contains("\"malloc_async.own_stream_recorded\":1"), "it has gone: {json}");
        assert_eq!(stratalloc_destroy(handle), Status::Ok);
    }
    let handle = create("backend:native", "sim").unwrap();
    assert!(!statistics(handle).contains("malloc_async"));
    assert_eq!(stratalloc_destroy(handle), Status::Ok);
}
