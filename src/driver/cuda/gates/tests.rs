//! Gates on a fake library: the number that each stream waits for, and when it is large enough.

use std::cell::{Cell, RefCell};

use super::*;
use crate::driver::Driver;
use crate::driver::cuda::Abilities;
use crate::driver::cuda::tests::{device_over, library};

thread_local! {
    /// The waits submitted to streams: stream, address and value.
    static WAITS: RefCell<Vec<(u64, u64, u32)>> = const { RefCell::new(Vec::new()) };
    static CONTEXTS: Cell<i32> = const { Cell::new(0) };
    static FREED: Cell<bool> = const { Cell::new(false) };
    static ANSWER: Cell<u32> = const { Cell::new(0) };
}

library! {
    context_current(context: &mut u64) = { *context = 0; 0 };
    context_pop(context: &mut u64) = { *context = 0; 0 };
    context_retain(context: &mut u64, _: i32) = {
        CONTEXTS.set(CONTEXTS.get() + 1);
        *context = 0;
        0
    };
    context_release(_: i32) = { CONTEXTS.set(CONTEXTS.get() - 1); 0 };
    context_push(_: u64) = 0;
    stream_destroy(_: u64) = 0;
    context_synchronize() = 0;
    // Returns memory that is never freed. It contains values other than 0.
    host_allocate(pointer: &mut u64, bytes: usize, flags: u32) = {
        let words: &'static [AtomicU32] =
            (0..bytes / 4).map(|_| AtomicU32::new(77)).collect::<Vec<_>>().leak();
        *pointer = words.as_ptr() as u64;
        u32::from(flags != SEEN_BY_DEVICES)
    };
    host_pointer(address: &mut u64, pointer: u64, _: u32) = { *address = pointer; 0 };
    host_free(_: u64) = { FREED.set(true); 0 };
    stream_wait_value(stream: u64, address: u64, value: u32, _: u32) = {
        if ANSWER.get() == 0 {
            WAITS.with_borrow_mut(|waits| waits.push((stream, address, value)));
        }
        ANSWER.get()
    };
    stream_create(stream: &mut u64, _: u32) = { *stream = 5000; 0 };
}

fn cuda() -> Cuda {
    device_over(library(), Abilities::default())
}

/// Returns the waits that still hold back their stream, because the number is too small.
fn waiting(cuda: &Cuda) -> Vec<(u64, u32)> {
    let gates = cuda.gates.lock();
    let numbers = gates.numbers.as_ref().expect("something was held");
    let waits = WAITS.with_borrow(Clone::clone);
    let closed = waits.into_iter().filter(|(_, address, value)| {
        let at = usize::try_from(address - numbers.there).expect("it is small") / 4;
        numbers.number(at).load(Ordering::Acquire) < *value
    });
    closed.map(|(stream, _, value)| (stream, value)).collect()
}

#[test]
fn each_stream_waits_for_a_number_of_its_own() {
    let cuda = cuda();
    let [a1, b1, a2] = [100, 200, 100].map(|n| cuda.hold_back(StreamId(n)).unwrap());
    assert_eq!(waiting(&cuda), [(100, 1), (200, 1), (100, 2)]);
    b1.open();
    assert_eq!(waiting(&cuda), [(100, 1), (100, 2)]);
    a1.open();
    assert_eq!(waiting(&cuda), [(100, 2)]);
    let a3 = cuda.hold_back(StreamId(100)).unwrap();
    a3.open();
    assert_eq!(waiting(&cuda), [], "a later gate opens all before it");
    a2.open();
    assert_eq!(waiting(&cuda), [], "and they stay open");
}

#[test]
fn a_number_is_reused_once_its_stream_is_destroyed() {
    let cuda = cuda();
    let stream = cuda.create_stream().unwrap();
    for _ in 0..3 {
        cuda.hold_back(stream).unwrap().open();
    }
    cuda.destroy_stream(stream).unwrap();
    let _gate = cuda.hold_back(StreamId(300)).unwrap();
    assert_eq!(waiting(&cuda), [(300, 4)], "the number never gets smaller");
    let waits = WAITS.with_borrow(Clone::clone);
    assert_eq!(waits[0].1, waits[3].1, "the same place");
}

#[test]
fn a_number_that_a_stream_still_waits_for_is_not_reused() {
    let cuda = cuda();
    let stream = cuda.create_stream().unwrap();
    let _gate = cuda.hold_back(stream).unwrap();
    cuda.destroy_stream(stream).unwrap();
    let _other = cuda.hold_back(StreamId(300)).unwrap();
    let waits = WAITS.with_borrow(Clone::clone);
    assert_ne!(waits[0].1, waits[1].1);
}

#[test]
fn more_streams_than_numbers_are_refused_and_nothing_is_lost() {
    let cuda = cuda();
    for stream in 0..NUMBERS as u64 {
        cuda.hold_back(StreamId(stream)).unwrap().open();
    }
    let error = cuda.hold_back(StreamId(u64::MAX)).unwrap_err();
    assert!(error.message().contains("1024 streams"), "{error}");
    cuda.hold_back(StreamId(0)).unwrap().open();
}

#[test]
fn a_wait_that_the_library_refuses_leaves_no_gate() {
    let cuda = cuda();
    ANSWER.set(801);
    cuda.hold_back(StreamId(100)).unwrap_err();
    ANSWER.set(0);
    let _gate = cuda.hold_back(StreamId(100)).unwrap();
    assert_eq!(waiting(&cuda), [(100, 1)]);
}

#[test]
fn the_numbers_outlive_the_device_until_the_last_gate_is_open() {
    let cuda = cuda();
    let gate = cuda.hold_back(StreamId(100)).unwrap();
    drop(cuda);
    assert!(!FREED.get());
    gate.open();
    assert!(FREED.get());
    assert_eq!(CONTEXTS.get(), -1, "what the device itself lets go of was never retained here");
}
