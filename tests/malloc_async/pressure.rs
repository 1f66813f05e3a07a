//! A request that finds no memory must end with its out-of-memory report, even if other driver calls
//! fail before.

use super::note;
use crate::common::prelude::*;

type Fixture = FixtureOn<Faulty<Arc<Sim>>, MallocAsyncAllocator>;

/// Returns an allocator on a device of 128 MiB, of which 64 MiB were freed on a stream that has not
/// reached the free yet. The driver call `only` fails from call `at` on, counted from 0. Also returns a
/// counter of the calls of an out-of-memory observer.
fn failing(only: &'static str, at: u64, kind: DriverErrorKind) -> (Fixture, Arc<AtomicUsize>) {
    let fixture = Fixture::new(128 * MIB, "");
    fixture.give(fixture.take_on(64 * MIB, fixture.stream()));
    fixture.device.arm(FaultPlan { at, kind, repeat: true, only: Some(only) });
    let ooms = fixture.count_ooms();
    (fixture, ooms)
}

/// Driver calls made between the request's first out-of-memory error and its last. Each is paired with
/// the index, from 0, of the first call that is made to fail.
const ON_THE_WAY: [(&str, u64); 5] = [
    ("capture_status", 0),
    ("synchronize_stream", 0),
    ("trim", 0),
    ("trim_graphs", 0),
    ("allocate_async", 1),
];

#[test]
fn a_call_that_fails_on_the_way_does_not_replace_the_report() {
    for (only, at) in ON_THE_WAY {
        for kind in [DriverErrorKind::Other, DriverErrorKind::NotSupported] {
            let (fixture, ooms) = failing(only, at, kind);
            let error = fixture.fail(160 * MIB, HOME).driver.expect("the driver was called");
            assert!(fixture.device.failed_calls() > 0, "{only}");
            assert_eq!(error.kind(), DriverErrorKind::OutOfMemory, "{only}");
            assert_eq!((fixture.stats().num_ooms, ooms.load(Ordering::Relaxed)), (1, 1), "{only}");
        }
    }
}

#[test]
fn a_device_that_is_lost_on_the_way_is_reported_as_lost() {
    for (only, at) in ON_THE_WAY {
        let (fixture, ooms) = failing(only, at, DriverErrorKind::DeviceLost);
        match fixture.try_allocate(160 * MIB, HOME) {
            Err(AllocError::Driver(error)) => {
                assert_eq!(error.kind(), DriverErrorKind::DeviceLost, "{only}");
            }
            other => panic!("{only}: {other:?}"),
        }
        assert_eq!(ooms.load(Ordering::Relaxed), 0, "{only}");
        fixture.device.disarm();
    }
}

#[test]
fn a_driver_that_cannot_report_captures_is_waited_for() {
    let (fixture, _) = failing("capture_status", 0, DriverErrorKind::NotSupported);
    fixture.give(fixture.take_on(96 * MIB, HOME));
    assert_eq!(note(&fixture, "trims_that_helped"), 1);
}
