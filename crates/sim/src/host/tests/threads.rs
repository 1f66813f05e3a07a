//! Work without worker threads, which the system may refuse to start.

use super::*;

#[test]
fn work_is_done_where_no_thread_can_be_started() {
    let host = host();
    host.limit_workers(0);
    let block = host.allocate(64).unwrap();
    let event = host.create_event().unwrap();
    host.fill(block, 5, 64, B).unwrap();
    host.synchronize_stream(B).unwrap();
    let gate = host.hold(A);
    host.fill(block, 7, 64, A).unwrap();
    host.record_event(event, A).unwrap();
    host.wait_event(B, event).unwrap();
    host.fill(block, 8, 1, B).unwrap();
    assert!(!host.query_event(event).unwrap(), "the gate holds it back");
    assert_eq!(bytes(&host, block, 64, StreamId(192)), [5; 64]);
    gate.open();
    assert!(host.query_event(event).unwrap());
    let mut expected = [7; 64];
    expected[0] = 8;
    assert_eq!(bytes(&host, block, 64, B), expected);
    host.synchronize_device().unwrap();
    host.limit_workers(1);
    host.fill(block, 9, 64, A).unwrap();
    assert_eq!(bytes(&host, block, 64, A), [9; 64], "a later job starts a thread");
    host.free(block, 64).unwrap();
}
