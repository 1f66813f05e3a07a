//! What a request that is refused ends in: the report, whatever else fails on the way to it.

use stratalloc::driver::ProcessUsage;

use super::note;
use crate::common::crowded::crowded;
use crate::common::prelude::*;

const ON: StreamId = StreamId::DEFAULT;

/// The report of 40 MiB too many on a device of 100 MiB, of which others have 70.
fn report_among_others(limit_bytes: Option<u64>) -> OutOfMemory {
    let options =
        SimOptions { total_bytes: 100 * MIB, costs: CallCosts::NONE, ..SimOptions::default() };
    let sim = Sim::new(options);
    sim.allocate(70 * MIB).expect("it works");
    let usage = |process, mib| ProcessUsage { process, used_bytes: mib * MIB };
    let list = vec![usage(std::process::id(), 30), usage(9, 70), usage(8, 0)];
    let allocator =
        MallocAsyncAllocator::new(crowded(sim, Ok(list)), &Settings::default()).expect("it works");
    allocator.caching().set_limit_bytes(limit_bytes);
    match allocator.ask(40 * MIB, ON) {
        Err(AllocError::OutOfMemory(report)) => *report,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_report_names_the_holders_and_blames_the_largest_other() {
    let report = report_among_others(None);
    let told: Vec<_> = report.holders.iter().map(|h| (h.process, h.used_bytes / MIB)).collect();
    assert_eq!(told, [(9, 70), (std::process::id(), 30)]);
    let text = report.to_string();
    let blamed = "70.00 MiB of the device are held by others: process 9 has 70.00 MiB, the most";
    assert!(text.contains(blamed), "{text}");
}

#[test]
fn nobody_is_asked_who_holds_the_device_when_only_the_limit_refused() {
    let report = report_among_others(Some(20 * MIB));
    assert_eq!(report.holders, []);
    assert!(!report.to_string().contains("held by others"), "{report}");
}

/// An allocator over a device of 128 MiB that can be made to fail, with 64 MiB freed on a stream that has
/// not reached the free.
struct Bed {
    allocator: MallocAsyncAllocator,
    faulty: Arc<Faulty<Arc<Sim>>>,
    told: Arc<AtomicUsize>,
}

impl Bed {
    fn new() -> Self {
        let faulty = Arc::new(Faulty::new(SimMachine::new(128 * MIB).0));
        let allocator =
            MallocAsyncAllocator::new(faulty.clone(), &Settings::default()).expect("it works");
        let other = faulty.create_stream().expect("it works");
        let block = allocator.take_on(64 * MIB, other);
        allocator.give(block);
        let told = allocator.ooms_told();
        Self { allocator, faulty, told }
    }

    fn fail(&self, only: &'static str, at: u64, kind: DriverErrorKind) {
        self.faulty.arm(FaultPlan { at, kind, repeat: true, only: Some(only) });
    }
}

/// Calls between the first refusal and the last, from which one on they fail.
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
            let bed = Bed::new();
            bed.fail(only, at, kind);
            let refused = bed.allocator.ask(160 * MIB, ON);
            let Err(AllocError::OutOfMemory(report)) = refused else {
                panic!("{only}: {refused:?}");
            };
            assert!(bed.faulty.failed_calls() > 0, "{only}");
            let said = report.driver.expect("the driver was asked");
            assert_eq!(said.kind(), DriverErrorKind::OutOfMemory, "{only}");
            assert_eq!(bed.allocator.statistics().num_ooms, 1, "{only}");
            assert_eq!(bed.told.load(Ordering::Relaxed), 1, "{only}");
        }
    }
}

#[test]
fn a_device_that_is_lost_on_the_way_is_told_as_itself() {
    for (only, at) in ON_THE_WAY {
        let bed = Bed::new();
        bed.fail(only, at, DriverErrorKind::DeviceLost);
        match bed.allocator.ask(160 * MIB, ON) {
            Err(AllocError::Driver(error)) => {
                assert_eq!(error.kind(), DriverErrorKind::DeviceLost, "{only}");
            }
            other => panic!("{only}: {other:?}"),
        }
        assert_eq!(bed.told.load(Ordering::Relaxed), 0, "{only}");
        bed.faulty.disarm();
    }
}

#[test]
fn a_driver_that_cannot_tell_of_captures_is_waited_for_all_the_same() {
    let bed = Bed::new();
    bed.fail("capture_status", 0, DriverErrorKind::NotSupported);
    let block = bed.allocator.take_on(96 * MIB, ON);
    assert_eq!(note(&bed.allocator, "trims_that_helped"), 1);
    bed.allocator.give(block);
}
