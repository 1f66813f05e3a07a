//! Captures.

use super::*;
use stratalloc::driver::DriverPoolId;

const ACTIVE: DriverErrorKind = DriverErrorKind::CaptureActive;
const A: StreamId = StreamId(7);
const B: StreamId = StreamId(8);

#[test]
fn work_of_a_captured_stream_becomes_a_chain_of_nodes() {
    let sim = sim(EventMode::Manual);
    let memory = sim.allocate(2 * MIB).unwrap();
    let capture = sim.begin(A).unwrap();
    assert_eq!(sim.capture_status(A), Ok(CaptureStatus::Active { capture }));
    assert_eq!(sim.capture_status(B), Ok(CaptureStatus::None));
    assert_eq!(sim.frontier(A), Ok(vec![]));
    sim.fill(memory, 0, MIB, A).unwrap();
    let first = sim.frontier(A).unwrap();
    let event = sim.create_event().unwrap();
    sim.record_event(event, A).unwrap();
    let second = sim.frontier(A).unwrap();
    assert_eq!(sim.dependencies(second[0]), Ok(first.clone()));
    assert_eq!(sim.dependencies(first[0]), Ok(vec![]));
    assert_eq!(sim.pending_events(), [], "captured work does not run");
    sim.end(A).unwrap();
    assert_eq!(sim.capture_status(A), Ok(CaptureStatus::None));
    assert_eq!(kind(sim.dependencies(first[0])), DriverErrorKind::InvalidValue);
}

#[test]
fn waiting_for_a_captured_event_joins_the_capture() {
    let sim = sim(EventMode::Manual);
    let [fork, join] = [(); 2].map(|()| sim.create_event().unwrap());
    let capture = sim.begin(A).unwrap();
    sim.record_event(fork, A).unwrap();
    sim.wait_event(B, fork).unwrap();
    assert_eq!(sim.capture_status(B), Ok(CaptureStatus::Active { capture }));
    assert_eq!(sim.frontier(B), sim.frontier(A));
    sim.record_event(join, B).unwrap();
    sim.wait_event(A, join).unwrap();
    assert_eq!(sim.frontier(A).unwrap().len(), 2);
    sim.end(A).unwrap();
    assert_eq!(sim.capture_status(B), Ok(CaptureStatus::None));
}

#[test]
fn a_capture_with_an_unjoined_stream_ends_with_an_error() {
    let sim = sim(EventMode::Manual);
    let [fork, side] = [(); 2].map(|()| sim.create_event().unwrap());
    sim.begin(A).unwrap();
    sim.record_event(fork, A).unwrap();
    sim.wait_event(B, fork).unwrap();
    sim.record_event(side, B).unwrap();
    assert_eq!(kind(sim.end(B)), DriverErrorKind::InvalidValue, "not the origin");
    assert_eq!(kind(sim.end(A)), DriverErrorKind::InvalidValue);
    assert_eq!(sim.capture_status(A), Ok(CaptureStatus::None));
}

#[test]
fn calls_that_wait_are_refused_while_the_thread_captures() {
    let sim = sim(EventMode::Manual);
    let memory = sim.allocate(2 * MIB).unwrap();
    let outside = sim.create_event().unwrap();
    sim.record_event(outside, B).unwrap();
    sim.begin(A).unwrap();
    assert_eq!(kind(sim.query_event(outside)), ACTIVE);
    assert_eq!(kind(sim.synchronize_event(outside)), ACTIVE);
    assert_eq!(kind(sim.synchronize_stream(A)), ACTIVE);
    assert_eq!(kind(sim.synchronize_stream(B)), ACTIVE);
    assert_eq!(kind(sim.free(memory, 2 * MIB)), ACTIVE);
    assert_eq!(kind(sim.copy_from_host(memory, &[1], A)), ACTIVE);
    sim.allocate(2 * MIB).unwrap();
    sim.end(A).unwrap();
    sim.free(memory, 2 * MIB).unwrap();
}

#[test]
fn other_threads_may_wait_for_what_is_not_captured() {
    let sim = sim(EventMode::Manual);
    let [outside, inside] = [(); 2].map(|()| sim.create_event().unwrap());
    sim.record_event(outside, B).unwrap();
    sim.begin(A).unwrap();
    sim.record_event(inside, A).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!(sim.query_event(outside), Ok(false));
            sim.synchronize_stream(B).unwrap();
            assert_eq!(kind(sim.query_event(inside)), ACTIVE);
            assert_eq!(kind(sim.synchronize_stream(A)), ACTIVE);
        });
    });
    sim.end(A).unwrap();
    assert_eq!(sim.query_event(outside), Ok(true));
    assert_eq!(kind(sim.query_event(inside)), DriverErrorKind::InvalidValue);
}

#[test]
fn waits_across_the_border_of_a_capture_break_it() {
    let sim = sim(EventMode::Manual);
    let [outside, inside] = [(); 2].map(|()| sim.create_event().unwrap());
    sim.record_event(outside, B).unwrap();
    sim.begin(A).unwrap();
    assert_eq!(kind(sim.wait_event(A, outside)), DriverErrorKind::InvalidValue);
    assert_eq!(sim.capture_status(A), Ok(CaptureStatus::Invalidated));
    assert_eq!(kind(sim.record_event(inside, A)), ACTIVE);
    assert_eq!(kind(sim.end(A)), ACTIVE);

    sim.begin(A).unwrap();
    sim.begin(B).unwrap();
    sim.record_event(inside, A).unwrap();
    assert_eq!(kind(sim.wait_event(B, inside)), DriverErrorKind::InvalidValue);
    for stream in [A, B] {
        assert_eq!(sim.capture_status(stream), Ok(CaptureStatus::Invalidated));
    }
}

#[test]
fn a_wait_for_the_whole_device_breaks_captures_of_all_threads() {
    let sim = sim(EventMode::Manual);
    sim.begin(A).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| assert_eq!(kind(sim.synchronize_device()), ACTIVE));
    });
    assert_eq!(sim.capture_status(A), Ok(CaptureStatus::Invalidated));
    assert_eq!(kind(sim.end(A)), ACTIVE);
    sim.synchronize_device().unwrap();
}

#[test]
fn the_memory_of_a_graph_goes_with_it() {
    let sim = sim(EventMode::Manual);
    sim.begin(A).unwrap();
    let address = sim.allocate_async(DriverPoolId(0), MIB, A).unwrap();
    sim.end(A).unwrap();
    assert_eq!(sim.graph_usage().unwrap().used_bytes, 0);
    assert_eq!(kind(sim.free_async(address, A)), DriverErrorKind::InvalidValue);
    sim.trim_graphs().unwrap();
    assert_eq!(sim.graph_usage().unwrap().reserved_bytes, 0);
}

#[test]
fn a_test_can_break_a_capture() {
    let sim = sim(EventMode::Manual);
    sim.begin(A).unwrap();
    sim.invalidate_capture(A);
    assert_eq!(sim.capture_status(A), Ok(CaptureStatus::Invalidated));
}

#[test]
fn captures_do_not_nest_and_spare_the_default_stream() {
    let sim = sim(EventMode::Manual);
    let first = sim.begin(A).unwrap();
    assert_eq!(kind(sim.begin(A)), ACTIVE);
    assert_eq!(kind(sim.begin(StreamId::DEFAULT)), DriverErrorKind::InvalidValue);
    assert_eq!(kind(sim.end(B)), DriverErrorKind::InvalidValue);
    sim.end(A).unwrap();
    assert_ne!(sim.begin(A).unwrap(), first);
}
