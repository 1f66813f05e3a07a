//! Streams and events.

use super::*;

fn record(sim: &Sim, stream: StreamId) -> EventId {
    let event = sim.create_event().unwrap();
    sim.record_event(event, stream).unwrap();
    event
}

#[test]
fn an_event_that_was_never_recorded_has_finished() {
    let sim = sim(EventMode::Manual);
    let event = sim.create_event().unwrap();
    assert_eq!(sim.query_event(event), Ok(true));
}

#[test]
fn immediate_events_have_finished_at_once() {
    let sim = sim(EventMode::Immediate);
    let event = record(&sim, StreamId(7));
    assert_eq!(sim.query_event(event), Ok(true));
    assert_eq!(sim.pending_events(), []);
}

#[test]
fn manual_events_finish_when_the_test_completes_them() {
    let sim = sim(EventMode::Manual);
    let (s, t) = (StreamId(7), StreamId(8));
    let events = [record(&sim, s), record(&sim, t), record(&sim, s)];
    let finished = || events.map(|event| sim.query_event(event).unwrap());
    assert_eq!(sim.pending_events(), [(events[0], s), (events[1], t), (events[2], s)]);
    sim.complete_event(events[2]);
    assert_eq!(finished(), [false, false, true], "out of order, on purpose");
    sim.complete_stream(s);
    assert_eq!(finished(), [true, false, true]);
    sim.complete_all();
    assert_eq!(finished(), [true; 3]);
    let again = record(&sim, s);
    assert_eq!(sim.query_event(again), Ok(false));
}

#[test]
fn waiting_for_an_event_finishes_what_its_stream_did_before() {
    let sim = sim(EventMode::Manual);
    let s = StreamId(7);
    let [a, b, c] = [(); 3].map(|()| record(&sim, s));
    sim.synchronize_event(b).unwrap();
    assert_eq!(sim.pending_events(), [(c, s)]);
    assert_eq!(sim.query_event(a), Ok(true));
    sim.synchronize_stream(s).unwrap();
    assert_eq!(sim.query_event(c), Ok(true));
}

#[test]
fn recording_again_forgets_the_earlier_mark() {
    let sim = sim(EventMode::Manual);
    let event = record(&sim, StreamId(7));
    sim.record_event(event, StreamId(8)).unwrap();
    sim.complete_stream(StreamId(7));
    assert_eq!(sim.query_event(event), Ok(false));
    assert_eq!(sim.pending_events(), [(event, StreamId(8))]);
}

#[test]
fn finishing_a_stream_finishes_what_it_waited_for() {
    let sim = sim(EventMode::Manual);
    let [a, b, c] = [7, 8, 9].map(StreamId);
    let on_a = record(&sim, a);
    sim.wait_event(b, on_a).unwrap();
    let on_b = record(&sim, b);
    sim.wait_event(c, on_b).unwrap();
    let later_on_a = record(&sim, a);
    sim.synchronize_stream(c).unwrap();
    assert_eq!(sim.query_event(on_a), Ok(true));
    assert_eq!(sim.pending_events(), [(later_on_a, a)]);
}

#[test]
fn work_before_a_wait_does_not_depend_on_it() {
    let sim = sim(EventMode::Manual);
    let (a, b) = (StreamId(7), StreamId(8));
    let on_a = record(&sim, a);
    let before = record(&sim, b);
    sim.wait_event(b, on_a).unwrap();
    sim.synchronize_event(before).unwrap();
    assert_eq!(sim.query_event(on_a), Ok(false));
}

#[test]
fn timed_events_finish_when_the_clock_has_moved() {
    let sim = sim(EventMode::After(100));
    let event = record(&sim, StreamId(7));
    sim.advance_ns(99);
    assert_eq!(sim.query_event(event), Ok(false));
    sim.advance_ns(1);
    assert_eq!(sim.query_event(event), Ok(true));
}

#[test]
fn timed_events_are_not_before_what_their_stream_waited_for() {
    let sim = sim(EventMode::After(100));
    let (a, b) = (StreamId(7), StreamId(8));
    sim.advance_ns(50);
    let on_a = record(&sim, a);
    sim.wait_event(b, on_a).unwrap();
    let on_b = record(&sim, b);
    sim.synchronize_event(on_b).unwrap();
    assert_eq!(sim.elapsed_ns(), 150, "waiting moves the clock");
    assert_eq!(sim.pending_events(), []);
}

#[test]
fn unknown_and_destroyed_events_are_refused() {
    let sim = sim(EventMode::Manual);
    let event = record(&sim, StreamId(7));
    sim.destroy_event(event).unwrap();
    for event in [event, EventId(999)] {
        let invalid = DriverErrorKind::InvalidValue;
        assert_eq!(kind(sim.query_event(event)), invalid);
        assert_eq!(kind(sim.synchronize_event(event)), invalid);
        assert_eq!(kind(sim.record_event(event, StreamId(7))), invalid);
        assert_eq!(kind(sim.wait_event(StreamId(7), event)), invalid);
        assert_eq!(kind(sim.destroy_event(event)), invalid);
    }
}

#[test]
fn a_destroyed_stream_takes_no_work_but_its_events_still_finish() {
    let sim = sim(EventMode::Manual);
    let stream = sim.create_stream().unwrap();
    let event = record(&sim, stream);
    sim.destroy_stream(stream).unwrap();
    let invalid = DriverErrorKind::InvalidValue;
    assert_eq!(kind(sim.record_event(event, stream)), invalid);
    assert_eq!(kind(sim.synchronize_stream(stream)), invalid);
    assert_eq!(kind(sim.destroy_stream(stream)), invalid);
    assert_eq!(sim.query_event(event), Ok(false));
    sim.synchronize_device().unwrap();
    assert_eq!(sim.query_event(event), Ok(true));
}

#[test]
fn only_created_streams_can_be_destroyed() {
    let sim = sim(EventMode::Manual);
    record(&sim, StreamId(7));
    for stream in [StreamId::DEFAULT, StreamId(7), StreamId(99)] {
        let refused = kind(sim.destroy_stream(stream));
        assert_eq!(refused, DriverErrorKind::InvalidValue);
    }
}
