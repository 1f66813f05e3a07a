//! Work stays held back until its gate opens, and no wait lasts forever.

use super::*;
use crate::{Host, HostOptions};
use stratalloc::driver::{Driver, Exportable};
use stratalloc::size::MIB;

const LANE: StreamId = StreamId(64);
const OTHER: StreamId = StreamId(128);

fn gated() -> Gated<Host> {
    Gates::before(Host::new(HostOptions { total_bytes: 64 * MIB, ..HostOptions::default() }))
}

fn recorded(gated: &Gated<Host>, stream: StreamId) -> EventId {
    let event = gated.create_event().expect("the device works");
    gated.record_event(event, stream).expect("the event lives");
    event
}

fn finished(gated: &Gated<Host>, events: &[EventId]) -> Vec<bool> {
    events.iter().map(|event| gated.query_event(*event).expect("the event lives")).collect()
}

#[test]
fn work_finishes_in_the_order_of_its_release() {
    let gated = gated();
    let mut events = Vec::new();
    let mut marks = Vec::new();
    for stream in [LANE, LANE, OTHER] {
        gated.hold(stream).unwrap();
        events.push(recorded(&gated, stream));
        marks.push(gated.mark(stream).unwrap());
    }
    assert_eq!(finished(&gated, &events), [false, false, false]);
    gated.finish_until(OTHER, marks[2]).unwrap();
    assert_eq!(finished(&gated, &events), [false, false, true]);
    gated.finish_until(LANE, marks[0]).unwrap();
    assert_eq!(finished(&gated, &events), [true, false, true]);
    gated.finish_all().unwrap();
    assert_eq!(finished(&gated, &events), [true, true, true]);
    events.into_iter().for_each(|event| gated.destroy_event(event).unwrap());
    assert!(gated.inner().held().is_nothing(), "marks are events of the work_gate's own");
}

#[test]
fn letting_go_of_a_later_mark_lets_go_of_all_before_it() {
    let gated = gated();
    let events = [0, 1].map(|_| {
        gated.hold(LANE).unwrap();
        recorded(&gated, LANE)
    });
    let mark = gated.mark(LANE).unwrap();
    gated.finish_until(OTHER, mark).unwrap();
    assert_eq!(finished(&gated, &events), [false, false], "another stream's mark");
    gated.finish_until(LANE, mark).unwrap();
    assert_eq!(finished(&gated, &events), [true, true]);
}

#[test]
fn a_call_that_waits_lets_everything_go_first() {
    let waits: [fn(&Gated<Host>); 5] = [
        |gated| gated.synchronize_device().unwrap(),
        |gated| gated.synchronize_stream(LANE).unwrap(),
        |gated| {
            let event = recorded(gated, OTHER);
            gated.synchronize_event(event).unwrap();
        },
        |gated| {
            let address = gated.allocate(MIB).unwrap();
            gated.fill(address, 1, MIB, LANE).unwrap();
            gated.copy_to_host(&mut [0; 8], address, LANE).unwrap();
        },
        |gated| {
            let address = gated.allocate(MIB).unwrap();
            gated.fill(address, 1, MIB, LANE).unwrap();
            gated.free(address, MIB).unwrap();
        },
    ];
    for wait in waits {
        let gated = gated();
        gated.hold(LANE).unwrap();
        gated.hold(OTHER).unwrap();
        let event = recorded(&gated, LANE);
        // `finish_all` below waits for marks only. This mark lies after `event`.
        gated.mark(LANE).unwrap();
        assert!(!gated.query_event(event).unwrap());
        wait(&gated);
        gated.finish_all().unwrap();
        assert!(gated.query_event(event).unwrap());
    }
}

#[test]
fn a_call_that_does_not_wait_lets_nothing_go() {
    let gated = gated();
    gated.hold(LANE).unwrap();
    let event = recorded(&gated, LANE);
    let address = gated.allocate(MIB).unwrap();
    gated.fill(address, 1, MIB, LANE).unwrap();
    gated.memory_info().unwrap();
    gated.wait_event(OTHER, event).unwrap();
    let memory = gated.virtual_memory().unwrap();
    let base = memory.reserve(2 * MIB).unwrap();
    let piece = memory.create(2 * MIB, Exportable::No).unwrap();
    memory.map(base, 2 * MIB, piece).unwrap();
    memory.set_access(base, 2 * MIB, gated.info().device).unwrap();
    assert!(!gated.query_event(event).unwrap());
    memory.unmap(base, 2 * MIB).unwrap();
    memory.release(piece).unwrap();
    memory.unreserve(base, 2 * MIB).unwrap();
}

#[test]
fn work_that_is_still_held_goes_when_the_brake_goes() {
    let host = Arc::new(Host::new(HostOptions { total_bytes: MIB, ..HostOptions::default() }));
    let gated = Gates::before(Arc::clone(&host));
    gated.hold(LANE).unwrap();
    gated.mark(LANE).unwrap();
    drop(gated);
    host.synchronize_device().unwrap();
    assert!(host.held().is_nothing());
}

// `gated.inner()` bypasses the gates, as a call does that waits but is missing in `WAITING`.
#[test]
fn untouched_gates_open_by_themselves_with_an_error() {
    let host = Host::new(HostOptions { total_bytes: MIB, ..HostOptions::default() });
    let gated = Gates::with_patience(host, Duration::from_millis(20));
    gated.hold(LANE).unwrap();
    gated.inner().synchronize_device().unwrap();
    let error = gated.finish_all().unwrap_err();
    assert!(error.message().contains("released early 1 times"), "{error}");
    gated.finish_all().unwrap();
}
