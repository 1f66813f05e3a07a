//! Virtual memory.

use super::*;
use stratalloc::driver::{Exportable, PhysicalId};

const INVALID: DriverErrorKind = DriverErrorKind::InvalidValue;
const PIECE: u64 = 2 * MIB;

fn create(sim: &Sim, size_bytes: u64) -> PhysicalId {
    sim.create(size_bytes, Exportable::No).unwrap()
}

fn free_bytes(sim: &Sim) -> u64 {
    sim.memory_info().unwrap().free_bytes
}

#[test]
fn address_space_costs_nothing_and_pieces_do() {
    let sim = sim(EventMode::Immediate);
    sim.reserve(1 << 40).unwrap();
    assert_eq!(free_bytes(&sim), 64 * MIB);
    create(&sim, 60 * MIB);
    let refused = sim.create(6 * MIB, Exportable::No).unwrap_err();
    assert!(refused.is_out_of_memory(), "{refused}");
    assert_eq!(free_bytes(&sim), 4 * MIB);
}

#[test]
fn mapped_memory_is_reachable_once_access_is_set() {
    let sim = sim(EventMode::Immediate);
    let at = sim.reserve(3 * PIECE).unwrap();
    for start in [at, at + PIECE] {
        sim.map(start, PIECE, create(&sim, PIECE)).unwrap();
    }
    let fill = |from, bytes| sim.fill(from, 0, bytes, StreamId::DEFAULT);
    assert_eq!(kind(fill(at, 1)), INVALID);
    sim.set_access(at, 2 * PIECE, DeviceId(0)).unwrap();
    fill(at + MIB, 3 * MIB).unwrap();
    assert_eq!(kind(fill(at + MIB, 3 * MIB + 1)), INVALID);
    sim.unmap(at, PIECE).unwrap();
    assert_eq!(kind(fill(at + MIB, 2 * MIB)), INVALID);
}

#[test]
fn access_and_unmapping_cost_by_the_handle() {
    let sim = Sim::new(SimOptions::default());
    let at = sim.reserve(4 * PIECE).unwrap();
    for start in (at..).step_by(2 << 20).take(4) {
        sim.map(start, PIECE, create(&sim, PIECE)).unwrap();
    }
    let before_ns = sim.elapsed_ns();
    sim.set_access(at, 4 * PIECE, DeviceId(0)).unwrap();
    sim.unmap(at, 4 * PIECE).unwrap();
    let costs = CallCosts::H200;
    let per_handle_ns = costs.set_access.fixed_ns + costs.unmap.fixed_ns;
    assert_eq!(sim.elapsed_ns() - before_ns, 4 * per_handle_ns);
}

#[test]
fn an_exported_piece_can_be_imported_and_is_then_held_twice() {
    let sim = sim(EventMode::Immediate);
    let piece = sim.create(PIECE, Exportable::Descriptor).unwrap();
    let descriptors = [(); 2].map(|()| sim.export(piece).unwrap());
    for descriptor in descriptors {
        assert_eq!(sim.import(descriptor, PIECE), Ok(piece));
    }
    for left in [62, 62, 64] {
        sim.release(piece).unwrap();
        assert_eq!(free_bytes(&sim), left * MIB);
    }
}

#[test]
fn descriptors_are_refused_when_foreign_or_of_another_size() {
    let sim = sim(EventMode::Immediate);
    let private = create(&sim, PIECE);
    assert_eq!(kind(sim.export(private)), INVALID);
    let foreign = std::io::pipe().unwrap().0;
    assert_eq!(kind(sim.import(foreign.into(), PIECE)), DriverErrorKind::NotSupported);
    let piece = sim.create(PIECE, Exportable::Descriptor).unwrap();
    let descriptor = sim.export(piece).unwrap();
    assert_eq!(kind(sim.import(descriptor, 2 * PIECE)), INVALID);
}
