//! Streams keep their order, events mark points in it, and copies move real bytes.

use super::*;
use stratalloc::driver::{Capture, Driver, MemoryPools, VirtualMemory};
use stratalloc::error::DriverErrorKind;
use stratalloc::ids::EventId;
use stratalloc::size::MIB;

mod faults;
mod mapping;
mod pinned;
mod pools;
mod reuse;
mod sharing;
mod threads;

const A: StreamId = StreamId(64);
const B: StreamId = StreamId(128);

fn host() -> Host {
    Host::new(HostOptions { total_bytes: 64 * MIB, ..HostOptions::default() })
}

fn bytes(host: &Host, at: u64, count: usize, on: StreamId) -> Vec<u8> {
    let mut bytes = vec![0; count];
    host.copy_to_host(&mut bytes, at, on).unwrap();
    bytes
}

#[test]
fn memory_is_aligned_zeroed_counted_and_freed() {
    let host = host();
    let address = host.allocate(3 * MIB).unwrap();
    assert_eq!(address % (2 * MIB), 0);
    assert_eq!(host.memory_info().unwrap().free_bytes, 61 * MIB);
    assert_eq!(bytes(&host, address + 3 * MIB - 4, 4, A), [0; 4]);
    let refused = host.allocate(62 * MIB).unwrap_err();
    assert!(refused.is_out_of_memory() && refused.message().contains(&(61 * MIB).to_string()));
    assert_eq!(host.free(address, MIB).unwrap_err().kind(), DriverErrorKind::InvalidValue);
    host.free(address, 3 * MIB).unwrap();
    assert_eq!(host.free(address, 3 * MIB).unwrap_err().kind(), DriverErrorKind::InvalidValue);
    assert_eq!(host.memory_info().unwrap().free_bytes, 64 * MIB);
}

#[test]
fn ranges_outside_one_allocation_are_refused() {
    let host = host();
    let address = host.allocate(4096).unwrap();
    for (at, size) in
        [(address + 1, 4096), (address - 1, 1), (0, 1), (u64::MAX, 1), (address, u64::MAX)]
    {
        assert_eq!(host.fill(at, 1, size, A).unwrap_err().kind(), DriverErrorKind::InvalidValue);
    }
}

#[test]
fn work_of_a_stream_runs_in_its_order() {
    let host = host();
    let address = host.allocate(4096).unwrap();
    for byte in 0..=200 {
        host.fill(address, byte, 4096, A).unwrap();
    }
    assert_eq!(bytes(&host, address, 4096, A), [200; 4096]);
}

#[test]
fn an_event_is_passed_when_the_work_before_its_mark_is_done() {
    let host = host();
    let address = host.allocate(64).unwrap();
    let event = host.create_event().unwrap();
    assert!(host.query_event(event).unwrap(), "never recorded");
    let gate = host.hold(A);
    host.fill(address, 7, 64, A).unwrap();
    host.record_event(event, A).unwrap();
    assert!(!host.query_event(event).unwrap());
    host.wait_event(B, event).unwrap();
    host.fill(address, 8, 64, B).unwrap();
    gate.open();
    assert_eq!(bytes(&host, address, 64, B), [8; 64]);
    assert!(host.query_event(event).unwrap());
}

#[test]
fn recording_again_replaces_the_mark_for_later_waits_only() {
    let host = host();
    let address = host.allocate(64).unwrap();
    let event = host.create_event().unwrap();
    let gate = host.hold(A);
    host.record_event(event, A).unwrap();
    host.wait_event(B, event).unwrap();
    host.record_event(event, StreamId(3)).unwrap();
    assert!(host.query_event(event).unwrap(), "stream 3 has nothing to do");
    host.fill(address, 1, 64, B).unwrap();
    let behind = host.create_event().unwrap();
    host.record_event(behind, B).unwrap();
    assert!(!host.query_event(behind).unwrap(), "B still waits for A's point");
    host.destroy_event(event).unwrap();
    drop(gate);
    host.synchronize_event(behind).unwrap();
    assert_eq!(bytes(&host, address, 64, B), [1; 64]);
}

#[test]
fn more_waiting_streams_than_workers_do_not_block_each_other() {
    let host = host();
    let address = host.allocate(64).unwrap();
    let event = host.create_event().unwrap();
    let gate = host.hold(A);
    host.record_event(event, A).unwrap();
    for stream in 200..264 {
        host.wait_event(StreamId(stream), event).unwrap();
        host.fill(address + stream - 200, 5, 1, StreamId(stream)).unwrap();
    }
    assert_eq!(bytes(&host, address, 64, B), [0; 64]);
    gate.open();
    host.synchronize_device().unwrap();
    assert_eq!(bytes(&host, address, 64, B), [5; 64]);
}

#[test]
fn destroyed_streams_and_unknown_events_are_refused() {
    let host = host();
    let stream = host.create_stream().unwrap();
    let event = host.create_event().unwrap();
    host.destroy_stream(stream).unwrap();
    for refused in [
        host.record_event(event, stream),
        host.wait_event(stream, event),
        host.synchronize_stream(stream),
        host.destroy_stream(stream),
        host.destroy_stream(A),
        host.record_event(EventId(99), A),
        host.destroy_event(EventId(99)),
    ] {
        assert_eq!(refused.unwrap_err().kind(), DriverErrorKind::InvalidValue);
    }
}

#[test]
fn a_dropped_device_lets_held_work_finish() {
    let host = host();
    let address = host.allocate(64).unwrap();
    let gate = host.hold(A);
    host.fill(address, 1, 64, A).unwrap();
    drop(host);
    drop(gate);
}
