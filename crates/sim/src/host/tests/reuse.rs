//! A block that is reused too early shows as wrong bytes, and frees wait for work.

use super::*;

/// Stream A writes to a block and is held back. Stream B then writes to it, after A's event if `waits`.
/// Returns whether the bytes that B wrote are there at the end.
fn bytes_of_b_survive(waits: bool) -> bool {
    let host = host();
    let block = host.allocate(4096).unwrap();
    let gate = host.hold(A);
    host.fill(block, 0xAA, 4096, A).unwrap();
    let event = host.create_event().unwrap();
    host.record_event(event, A).unwrap();
    if waits {
        host.wait_event(B, event).unwrap();
        host.fill(block, 0xBB, 4096, B).unwrap();
        gate.open();
    } else {
        host.fill(block, 0xBB, 4096, B).unwrap();
        host.synchronize_stream(B).unwrap();
        assert_eq!(bytes(&host, block, 4096, B), [0xBB; 4096], "B is done before A goes on");
        gate.open();
    }
    host.synchronize_device().unwrap();
    let found = bytes(&host, block, 4096, B);
    assert!(found == [0xAA; 4096] || found == [0xBB; 4096]);
    found == [0xBB; 4096]
}

#[test]
fn reuse_on_another_stream_without_waiting_is_seen_in_the_bytes() {
    assert!(!bytes_of_b_survive(false));
}

#[test]
fn reuse_on_another_stream_after_its_event_keeps_the_bytes() {
    assert!(bytes_of_b_survive(true));
}

#[test]
fn a_free_waits_for_work_and_can_be_done_once() {
    let host = host();
    let block = host.allocate(4096).unwrap();
    let gate = host.hold(A);
    host.fill(block, 1, 4096, A).unwrap();
    std::thread::scope(|scope| {
        let free = scope.spawn(|| host.free(block, 4096));
        // `free` first makes the range refuse new work, and then waits for the work of A.
        while host.fill(block, 2, 1, B).is_ok() {
            std::thread::yield_now();
        }
        assert!(!free.is_finished());
        assert_eq!(host.memory_info().unwrap().free_bytes, 64 * MIB - 4096);
        assert_eq!(host.free(block, 4096).unwrap_err().kind(), DriverErrorKind::InvalidValue);
        gate.open();
        free.join().unwrap().unwrap();
    });
    assert_eq!(host.memory_info().unwrap().free_bytes, 64 * MIB);
}

#[test]
fn only_the_held_stream_waits_for_its_gate() {
    let host = host();
    let block = host.allocate(8).unwrap();
    host.fill(block, 1, 4, A).unwrap();
    let first = host.hold(A);
    host.fill(block, 2, 4, A).unwrap();
    let second = host.hold(A);
    host.fill(block, 3, 4, A).unwrap();
    host.fill(block + 4, 9, 4, StreamId::DEFAULT).unwrap();
    assert_eq!(bytes(&host, block + 4, 4, StreamId::DEFAULT), [9; 4]);
    drop(second);
    let event = host.create_event().unwrap();
    host.record_event(event, A).unwrap();
    assert!(!host.query_event(event).unwrap(), "the first gate is still closed");
    first.open();
    host.synchronize_event(event).unwrap();
    assert_eq!(bytes(&host, block, 4, B), [3; 4]);
}

#[test]
fn captured_work_never_runs_and_other_streams_go_on() {
    let host = host();
    let block = host.allocate(8).unwrap();
    let stream = host.create_stream().unwrap();
    host.begin(stream).unwrap();
    host.fill(block, 1, 4, stream).unwrap();
    host.fill(block + 4, 2, 4, A).unwrap();
    host.complete_all();
    host.end(stream).unwrap();
    assert_eq!(bytes(&host, block, 8, stream), [0, 0, 0, 0, 2, 2, 2, 2]);
}
