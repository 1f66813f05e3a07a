//! Streams of other contexts, and other devices, on a fake library. The context of a stream or event is
//! its handle with the last three hexadecimal digits set to 0.

use std::cell::{Cell, RefCell};

use super::*;
use crate::driver::cuda::Abilities;
use crate::driver::cuda::tests::{device_over, library};
use crate::driver::{Driver, Peers};

/// The context of the device; see `device_over`.
const OURS: u64 = 0;
const THEIRS: u64 = 0x7000;
const FOREIGN: StreamId = StreamId(THEIRS + 0x111);
const CONTEXT_DESTROYED_KIND: DriverErrorKind = DriverErrorKind::InvalidValue;
const CONTEXT_DESTROYED: StreamId = StreamId(0x999);

thread_local! {
    static CURRENT: Cell<u64> = const { Cell::new(OURS) };
    static CALLS: RefCell<Vec<(&'static str, u64, u64)>> = const { RefCell::new(Vec::new()) };
    static EVENTS: Cell<u64> = const { Cell::new(0) };
    /// Result of creating an event in the context `THEIRS`.
    static THERE: Cell<u32> = const { Cell::new(0) };
    /// Capture status of all streams: 1 if captured.
    static CAPTURED: Cell<u32> = const { Cell::new(0) };
    /// For each device, how often its context was retained minus how often it was released.
    static RETAINED: Cell<[i32; 3]> = const { Cell::new([0; 3]) };
}

const fn context_of(handle: u64) -> u64 {
    handle & !0xfff
}

fn called(what: &'static str, a: u64, b: u64) {
    CALLS.with_borrow_mut(|calls| calls.push((what, a, b)));
}

fn hold(device: i32, by: i32) {
    let mut retained = RETAINED.get();
    retained[usize::try_from(device).unwrap()] += by;
    RETAINED.set(retained);
}

library! {
    context_current(context: &mut u64) = { *context = CURRENT.get(); 0 };
    context_push(context: u64) = { CURRENT.set(context); 0 };
    context_pop(_: &mut u64) = { CURRENT.set(OURS); 0 };
    stream_create(stream: &mut u64, _: u32) = {
        *stream = CURRENT.get() + 0x222;
        called("create stream", *stream, 0);
        0
    };
    stream_destroy(stream: u64) = { called("destroy stream", stream, 0); 0 };
    stream_context(stream: u64, context: &mut u64) = {
        *context = context_of(stream);
        if stream == CONTEXT_DESTROYED.0 { INVALID_HANDLE } else { 0 }
    };
    event_create(event: &mut u64, _: u32) = {
        if CURRENT.get() == THEIRS && THERE.get() != 0 {
            return THERE.get();
        }
        EVENTS.set(EVENTS.get() + 1);
        *event = CURRENT.get() + EVENTS.get();
        0
    };
    event_destroy(event: u64) = { called("destroy event", event, 0); 0 };
    event_record(event: u64, stream: u64) = {
        let fits = context_of(event) == context_of(stream) && CURRENT.get() == context_of(event);
        if stream == CONTEXT_DESTROYED.0 || !fits {
            return INVALID_HANDLE;
        }
        called("record", event, stream);
        0
    };
    stream_wait(stream: u64, event: u64, _: u32) = { called("wait", stream, event); 0 };
    capture_info_1(_: u64, status: &mut u32, id: &mut u64) = {
        (*status, *id) = (CAPTURED.get(), 5);
        0
    };
    device_get(number: &mut i32, ordinal: i32) = {
        *number = ordinal;
        u32::from(!(0..3).contains(&ordinal))
    };
    context_retain(context: &mut u64, device: i32) = {
        hold(device, 1);
        *context = THEIRS * u64::try_from(device).unwrap();
        0
    };
    context_release(device: i32) = { hold(device, -1); 0 };
    peer_possible(can: &mut i32, _: i32, _: i32) = { *can = 1; 0 };
    peer_enable(context: u64, _: u32) = { called("enable", CURRENT.get(), context); 0 };
}

fn cuda() -> Cuda {
    device_over(library(), Abilities::default())
}

fn calls() -> Vec<(&'static str, u64, u64)> {
    CALLS.with_borrow_mut(std::mem::take)
}

#[test]
fn an_event_comes_after_the_work_of_a_stream_of_another_context() {
    let cuda = cuda();
    let event = cuda.create_event().unwrap();
    for _ in 0..2 {
        cuda.record_event(event, FOREIGN).unwrap();
        assert_eq!(CURRENT.get(), OURS, "what was current is current again");
    }
    let (first, second, ours) = (THEIRS + 2, THEIRS + 3, 0x222);
    let expected = [
        ("record", first, FOREIGN.0),
        ("create stream", ours, 0),
        ("wait", ours, first),
        ("record", event.0, ours),
        ("destroy event", first, 0),
        ("record", second, FOREIGN.0),
        ("wait", ours, second),
        ("record", event.0, ours),
        ("destroy event", second, 0),
    ];
    assert_eq!(calls(), expected);
    drop(cuda);
    assert_eq!(calls(), [("destroy stream", ours, 0)]);
}

#[test]
fn a_captured_stream_of_another_context_draws_nothing_of_ours_in() {
    let cuda = cuda();
    let event = cuda.create_event().unwrap();
    CAPTURED.set(1);
    let refused = cuda.record_event(event, FOREIGN).unwrap_err();
    assert_eq!(refused.kind(), DriverErrorKind::CaptureActive);
    assert_eq!(calls(), [("record", THEIRS + 2, FOREIGN.0), ("destroy event", THEIRS + 2, 0)]);
}

/// A stream counts as destroyed only for the codes of a destroyed context. Other errors are returned.
#[test]
fn a_stream_whose_context_lives_and_has_no_event_is_not_destroyed() {
    let cuda = cuda();
    let event = cuda.create_event().unwrap();
    for (there, kind) in [
        (2, DriverErrorKind::OutOfMemory),
        (700, DriverErrorKind::DeviceLost),
        (709, CONTEXT_DESTROYED_KIND),
    ] {
        THERE.set(there);
        assert_eq!(cuda.record_event(event, FOREIGN).unwrap_err().kind(), kind, "{there}");
    }
    assert_eq!(calls(), []);
}

#[test]
fn a_destroyed_stream_stays_refused() {
    let cuda = cuda();
    let event = cuda.create_event().unwrap();
    for stream in [CONTEXT_DESTROYED, StreamId(0x998)] {
        // The second stream belongs to the device's own context, so the first error is returned.
        let event = if stream == CONTEXT_DESTROYED { event } else { EventId(THEIRS + 9) };
        let refused = cuda.record_event(event, stream).unwrap_err();
        assert_eq!((refused.kind(), refused.code()), (DriverErrorKind::InvalidValue, 400));
    }
    assert_eq!(calls(), []);
}

/// Access that is enabled for a context ends when the context is destroyed.
#[test]
fn a_context_with_peer_access_is_retained_until_the_device_is_dropped() {
    let cuda = cuda();
    assert!(cuda.can_access(DeviceId(1)).unwrap());
    assert_eq!(RETAINED.get(), [0; 3], "the query needs no context");
    for _ in 0..2 {
        cuda.enable_access(DeviceId(1)).unwrap();
        assert_eq!(RETAINED.get(), [0, 1, 0]);
    }
    assert_eq!(calls(), [("enable", THEIRS, OURS); 2]);
    assert!(cuda.enable_access(DeviceId(3)).is_err(), "there is none");
    drop(cuda);
    // -1: dropping the device releases its own context, which `device_over` did not retain.
    assert_eq!(RETAINED.get(), [-1, 0, 0]);
}
