//! Stream-ordered calls on a fake library: the context that is current during each call, and the
//! thread's capture mode.

use std::cell::{Cell, RefCell};

use crate::driver::cuda::api::{Api, PoolProperties, kind_of};
use crate::driver::cuda::tests::{device_over, library};
use crate::driver::cuda::{Abilities, Cuda, INVALID_CONTEXT};
use crate::driver::{
    Capture, CaptureStatus, Driver, DriverPoolId, DriverPoolUsage, MemoryPools, PhysicalId,
    VirtualMemory,
};
use crate::error::DriverErrorKind;
use crate::ids::{EventId, StreamId};

/// The context of the device; see `device_over`.
const OURS: u64 = 0;
const THEIRS: u64 = 0xbeef;
const POOL: DriverPoolId = DriverPoolId(0x9001);
const GLOBAL: u32 = 0;
const RELAXED: u32 = 2;

thread_local! {
    static CURRENT: Cell<u64> = const { Cell::new(OURS) };
    static MODE: Cell<u32> = const { Cell::new(GLOBAL) };
    /// True if the library refuses all calls while another context than `OURS` is current.
    static WANTS_CONTEXT: Cell<bool> = const { Cell::new(false) };
    /// The calls, each with the current context and the thread's capture mode.
    static SEEN: RefCell<Vec<(&'static str, u64, u32)>> = const { RefCell::new(Vec::new()) };
}

fn saw(what: &'static str) {
    SEEN.with_borrow_mut(|seen| seen.push((what, CURRENT.get(), MODE.get())));
}

fn seen() -> Vec<(&'static str, u64, u32)> {
    SEEN.with_borrow_mut(std::mem::take)
}

fn in_context(what: &'static str) -> u32 {
    saw(what);
    if WANTS_CONTEXT.get() && CURRENT.get() != OURS { INVALID_CONTEXT } else { 0 }
}

thread_local! {
    /// Result of destroying a pool or a stream.
    static DESTROYED: Cell<u32> = const { Cell::new(0) };
}

thread_local! {
    static THRESHOLD: Cell<u64> = const { Cell::new(0) };
}

library! {
    context_current(context: &mut u64) = { saw("current"); *context = CURRENT.get(); 0 };
    context_push(context: u64) = { CURRENT.set(context); 0 };
    context_set(context: u64) = { CURRENT.set(context); 0 };
    context_pop(context: &mut u64) = { *context = CURRENT.replace(THEIRS); 0 };
    exchange_capture_mode(mode: &mut u32) = { *mode = MODE.replace(*mode); 0 };
    pool_allocate(address: &mut u64, _: usize, _: u64, _: u64) = {
        *address = 0x1000;
        in_context("allocate")
    };
    pool_free(_: u64, _: u64) = in_context("free");
    event_query(_: u64) = in_context("query");
    event_record(_: u64, _: u64) = in_context("record");
    capture_info_1(_: u64, status: &mut u32, id: &mut u64) = {
        (*status, *id) = (0, 0);
        in_context("capture")
    };
    event_synchronize(_: u64) = in_context("synchronize");
    pool_create(pool: &mut u64, _: &PoolProperties) = { *pool = 0x9003; 0 };
    pool_destroy(_: u64) = DESTROYED.get();
    stream_create(stream: &mut u64, _: u32) = { *stream = 0x5001; 0 };
    stream_destroy(_: u64) = DESTROYED.get();
    memory_free(_: u64) = in_context("free");
    address_reserve(address: &mut u64, _: usize, _: usize, _: u64, _: u64) = {
        *address = 0x2000;
        in_context("reserve")
    };
    address_free(_: u64, _: usize) = in_context("give range");
    piece_unmap(_: u64, _: usize) = in_context("give range");
    piece_release(_: u64) = in_context("release");
    graph_memory_trim(_: i32) = in_context("trim");
    pool_get(_: u64, _: u32, value: &mut u64) = { *value = THRESHOLD.get(); 0 };
    // The library refuses a threshold of 1.
    pool_set(_: u64, _: u32, value: &mut u64) = {
        if *value == 1 {
            return 1;
        }
        THRESHOLD.set(*value);
        0
    };
}

fn cuda() -> Cuda {
    device_over(library(), Abilities { memory_pools: true, ..Abilities::default() })
}

#[test]
fn a_stream_with_a_handle_of_its_own_needs_no_context() {
    let cuda = cuda();
    CURRENT.set(THEIRS);
    let stream = StreamId(0x5000);
    let address = cuda.allocate_async(POOL, 512, stream).unwrap();
    cuda.free_async(address, stream).unwrap();
    assert_eq!(seen(), [("allocate", THEIRS, GLOBAL), ("free", THEIRS, GLOBAL)]);
}

#[test]
fn a_call_on_a_stream_is_repeated_in_the_devices_context_if_the_driver_demands_that() {
    let (cuda, stream) = (cuda(), StreamId(0x5000));
    for wants in [false, true] {
        CURRENT.set(THEIRS);
        WANTS_CONTEXT.set(wants);
        cuda.record_event(EventId(1), stream).unwrap();
        assert_eq!(cuda.capture_status(stream), Ok(CaptureStatus::None));
        let calls = ["record", "capture"].into_iter().flat_map(|call| {
            let again = [("current", THEIRS, GLOBAL), (call, OURS, GLOBAL)];
            [(call, THEIRS, GLOBAL)].into_iter().chain(again.into_iter().filter(move |_| wants))
        });
        assert!(seen().into_iter().eq(calls));
        assert_eq!(CURRENT.get(), THEIRS, "what was current is current again");
    }
    WANTS_CONTEXT.set(false);
}

#[test]
fn default_streams_are_those_of_the_devices_own_context() {
    let cuda = cuda();
    for stream in [0, 1, 2].map(StreamId) {
        CURRENT.set(THEIRS);
        let address = cuda.allocate_async(POOL, 512, stream).unwrap();
        cuda.free_async(address, stream).unwrap();
        let (asked, there, own) = (("current", THEIRS, GLOBAL), "allocate", OURS);
        assert_eq!(seen(), [asked, (there, own, GLOBAL), asked, ("free", own, GLOBAL)]);
        assert_eq!(CURRENT.get(), THEIRS, "what was current is current again");
    }
}

#[test]
fn a_device_that_was_made_current_stays_so_and_is_pushed_no_more() {
    let cuda = cuda();
    CURRENT.set(THEIRS);
    cuda.make_current().unwrap();
    let address = cuda.allocate_async(POOL, 512, StreamId::DEFAULT).unwrap();
    cuda.free_async(address, StreamId::DEFAULT).unwrap();
    // If the call had pushed and popped a context, the fake `context_pop` would have made `THEIRS`
    // current.
    assert_eq!(CURRENT.get(), OURS);
}

#[test]
fn a_driver_that_wants_a_context_for_any_stream_gets_it() {
    let cuda = cuda();
    CURRENT.set(THEIRS);
    WANTS_CONTEXT.set(true);
    let stream = StreamId(0x5000);
    assert_eq!(cuda.allocate_async(POOL, 512, stream), Ok(0x1000));
    let twice = [("allocate", THEIRS, GLOBAL), ("current", THEIRS, GLOBAL)];
    assert_eq!(seen(), [&twice[..], &[("allocate", OURS, GLOBAL)]].concat());
    cuda.free_async(0x1000, stream).unwrap();
    assert_eq!(CURRENT.get(), THEIRS);
}

#[test]
fn calls_that_break_other_threads_captures_relax_the_thread_while_captures_are_expected() {
    let cuda = cuda();
    let all = || {
        cuda.query_event(EventId(1)).unwrap();
        cuda.synchronize_event(EventId(1)).unwrap();
        cuda.allocate_async(POOL, 512, StreamId(0x5000)).unwrap();
        cuda.free_async(0x1000, StreamId(0x5000)).unwrap();
        let modes = seen().into_iter().map(|(_, _, mode)| mode).collect::<Vec<_>>();
        assert_eq!(MODE.get(), GLOBAL, "the thread is as it was");
        modes
    };
    assert_eq!(all(), [GLOBAL; 4]);
    cuda.expect_captures(true).unwrap();
    assert_eq!(all(), [RELAXED; 4]);
    cuda.expect_captures(false).unwrap();
    assert_eq!(all(), [GLOBAL; 4]);
    assert!(cuda.expect_captures(false).is_err(), "none is expected");
}

#[test]
fn users_of_a_pool_are_counted_over_all_openings_of_the_device() {
    let (first, second) = (cuda(), cuda());
    let pool = DriverPoolId(0x9002);
    THRESHOLD.set(7);
    first.keep_memory(pool, true).unwrap();
    second.keep_memory(pool, true).unwrap();
    first.keep_memory(pool, false).unwrap();
    assert_eq!(THRESHOLD.get(), u64::MAX);
    second.keep_memory(pool, false).unwrap();
    assert_eq!(THRESHOLD.get(), 7);
    assert!(first.keep_memory(pool, false).is_err());
    // The library refuses to restore a threshold of 1. The user then stays counted.
    THRESHOLD.set(1);
    first.keep_memory(pool, true).unwrap();
    assert!(first.keep_memory(pool, false).is_err());
    first.keep_memory(pool, true).unwrap();
    first.keep_memory(pool, false).unwrap();
    assert!(first.keep_memory(pool, false).is_err());
}

/// When memory is short, a request releases memory. Another thread may be capturing at that time,
/// whether or not a capture is expected.
#[test]
fn freeing_memory_breaks_no_capture_of_another_thread() {
    let cuda = cuda();
    cuda.free(0x1000, 512).unwrap();
    cuda.reserve(4096).unwrap();
    cuda.unmap(0x2000, 4096).unwrap();
    cuda.release(PhysicalId(1)).unwrap();
    cuda.unreserve(0x2000, 4096).unwrap();
    cuda.trim_graphs().unwrap();
    let calls: Vec<_> = seen().into_iter().filter(|(what, ..)| *what != "current").collect();
    assert_eq!(calls.len(), 6);
    assert!(calls.iter().all(|(_, _, mode)| *mode == RELAXED), "{calls:?}");
    assert_eq!(MODE.get(), GLOBAL);
}

#[test]
fn what_the_driver_did_not_destroy_can_be_destroyed_later() {
    let cuda = cuda();
    let (pool, stream) = (cuda.create_pool().unwrap(), cuda.create_stream().unwrap());
    cuda.keep_memory(pool, true).unwrap();
    DESTROYED.set(1);
    assert_eq!(cuda.destroy_pool(pool).unwrap_err().code(), 1);
    assert_eq!(cuda.destroy_stream(stream).unwrap_err().code(), 1);
    cuda.keep_memory(pool, false).expect("its user is still known");
    DESTROYED.set(0);
    cuda.destroy_pool(pool).unwrap();
    cuda.destroy_stream(stream).unwrap();
    assert_eq!(cuda.destroy_pool(pool).unwrap_err().code(), 0, "not made here, any more");
    assert_eq!(cuda.destroy_stream(stream).unwrap_err().code(), 0);
}

#[test]
fn an_older_driver_has_less_and_breaks_nothing() {
    let api = Api::none();
    assert!(!api.has_virtual_memory() && !api.has_pools() && !api.has_captures());
    assert!(!api.has_ipc() && !api.has_peers());
    let cuda = device_over(api, Abilities { memory_pools: true, ..Abilities::default() });
    assert!(cuda.capture().is_none() && cuda.ipc().is_none() && cuda.peers().is_none());
    assert_eq!(cuda.graph_usage(), Ok(DriverPoolUsage::default()));
    cuda.reset_graph_high_marks().unwrap();
    cuda.trim_graphs().unwrap();
    assert_eq!(cuda.status_of(StreamId(0x5000)), Ok(CaptureStatus::None));
    let absent = cuda.allocate_async(POOL, 512, StreamId(0x5000)).unwrap_err();
    assert_eq!((absent.kind(), absent.code()), (DriverErrorKind::NotSupported, 0));
}

#[test]
fn unlisted_codes_are_errors_like_others() {
    assert_eq!(kind_of(123_456), DriverErrorKind::Other);
    assert_eq!(kind_of(INVALID_CONTEXT), DriverErrorKind::Other, "says nothing about a stream");
    assert_eq!(kind_of(709), DriverErrorKind::InvalidValue, "as of a stream that is gone");
    for lost in [220, 226, 700, 719, 999] {
        assert_eq!(kind_of(lost), DriverErrorKind::DeviceLost, "{lost}");
    }
}
