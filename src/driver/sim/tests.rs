//! Behaviour of the simulated device.

use super::*;

fn sim(event_mode: EventMode) -> Sim {
    Sim::new(SimOptions {
        event_mode,
        total_bytes: 64 * MIB,
        costs: CallCosts::NONE,
        ..SimOptions::default()
    })
}

fn kind<T: std::fmt::Debug>(result: DriverResult<T>) -> DriverErrorKind {
    result.unwrap_err().kind
}

#[test]
fn a_freed_range_is_given_out_again_lowest_first() {
    let sim = sim(EventMode::Immediate);
    let [a, b, c] = [(); 3].map(|()| sim.allocate(4 * MIB).unwrap());
    assert_eq!((b - a, c - b), (4 * MIB, 4 * MIB));
    sim.free(a, 4 * MIB).unwrap();
    sim.free(b, 4 * MIB).unwrap();
    assert_eq!(sim.allocate(8 * MIB), Ok(a));
}

#[test]
fn more_than_is_left_is_out_of_memory_with_the_numbers() {
    let sim = sim(EventMode::Immediate);
    sim.allocate(60 * MIB).unwrap();
    let error = sim.allocate(5 * MIB).unwrap_err();
    assert!(error.is_out_of_memory());
    assert_eq!(error.message, "5242880 bytes asked, 4194304 of 67108864 bytes free");
    assert_eq!(sim.memory_info().unwrap().free_bytes, 4 * MIB);
}

#[test]
fn a_free_of_what_was_not_given_out_is_refused() {
    let sim = sim(EventMode::Immediate);
    let a = sim.allocate(4 * MIB).unwrap();
    assert_eq!(kind(sim.free(a, 2 * MIB)), DriverErrorKind::InvalidValue);
    assert_eq!(kind(sim.free(a + MIB, 4 * MIB)), DriverErrorKind::InvalidValue);
    sim.free(a, 4 * MIB).unwrap();
    assert_eq!(kind(sim.free(a, 4 * MIB)), DriverErrorKind::InvalidValue);
}
