//! Behaviour of the simulated device.

use super::*;

mod graph;
mod mapping;
mod pools;
mod work;

impl<K: Kind> SimulatedDevice<K> {
    /// Returns the bytes of memory that pieces use, and the length of the file that they share.
    pub(crate) fn stored_bytes(&self) -> (u64, u64) {
        self.shared.state.lock().backing.as_ref().map_or((0, 0), |backing| backing.stored_bytes())
    }

    /// Sets the number of worker threads that the system starts.
    pub(crate) fn limit_workers(&self, most: usize) {
        self.shared.state.lock().work.workers_max = most;
    }
}

fn sim(event_mode: EventMode) -> Sim {
    Sim::new(SimOptions {
        event_mode,
        total_bytes: 64 * MIB,
        costs: CallCosts::default(),
        ..SimOptions::default()
    })
}

fn kind<T: std::fmt::Debug>(result: DriverResult<T>) -> DriverErrorKind {
    result.unwrap_err().kind()
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
    assert_eq!(error.message(), "5242880 bytes requested, 4194304 of 67108864 bytes free");
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

#[test]
fn copies_and_fills_must_stay_inside_what_is_allocated() {
    let sim = sim(EventMode::Immediate);
    let [a, b] = [(); 2].map(|()| sim.allocate(2 * MIB).unwrap());
    let stream = StreamId::DEFAULT;
    sim.copy(a, b, 2 * MIB, stream).unwrap();
    sim.fill(a + MIB, 7, MIB, stream).unwrap();
    sim.copy_from_host(a, &[1; 16], stream).unwrap();
    let mut bytes = [9; 16];
    sim.copy_to_host(&mut bytes, a, stream).unwrap();
    assert_eq!(bytes, [0; 16]);
    // A range must not span two allocations, even adjacent ones.
    let invalid = DriverErrorKind::InvalidValue;
    assert_eq!(kind(sim.fill(a + MIB, 7, 2 * MIB, stream)), invalid);
    assert_eq!(kind(sim.copy(a, a + MIB, 2 * MIB, stream)), invalid);
    assert_eq!(kind(sim.copy(a, a + 512, MIB, stream)), invalid);
    sim.free(b, 2 * MIB).unwrap();
    assert_eq!(kind(sim.copy_from_host(b, &[1], stream)), invalid);
}

#[test]
fn every_call_costs_time_and_is_counted_even_when_it_fails() {
    let sim = Sim::new(SimOptions::default());
    let costs = CallCosts::H200;
    let a = sim.allocate(1 << 30).unwrap();
    assert_eq!(sim.elapsed_ns(), costs.allocate.of(1 << 30));
    sim.free(a, 1).unwrap_err();
    sim.free(a, 1 << 30).unwrap();
    assert_eq!(sim.calls("free"), 2);
    assert_eq!(sim.call_counts(), [("allocate", 1), ("free", 2)]);
    assert_eq!(sim.total_calls(), 3);
}

#[test]
#[should_panic(expected = "no driver call is named")]
fn counting_a_call_that_does_not_exist_is_a_mistake_in_the_test() {
    let _ = sim(EventMode::Immediate).calls("alocate");
}

#[test]
fn the_process_list_shows_what_is_in_use() {
    let sim = sim(EventMode::Immediate);
    sim.allocate(3 * MIB).unwrap();
    let list = sim.processes().unwrap().list().unwrap();
    assert_eq!(list[0].used_bytes, 3 * MIB);
}

quickcheck::quickcheck! {
    fn live_ranges_never_overlap_and_used_bytes_are_their_sum(ops: Vec<(bool, u32)>) -> bool {
        let sim = sim(EventMode::Immediate);
        let mut live: Vec<(u64, u64)> = Vec::new();
        for (allocate, pick) in ops {
            if allocate || live.is_empty() {
                let size_bytes = u64::from(pick) % (9 * MIB) + 1;
                match sim.allocate(size_bytes) {
                    Ok(address) => live.push((address, size_bytes)),
                    Err(error) => assert!(error.is_out_of_memory()),
                }
            } else {
                let (address, size_bytes) = live.swap_remove(pick as usize % live.len());
                sim.free(address, size_bytes).unwrap();
            }
            live.sort_unstable();
            let state = sim.shared.state.lock();
            assert!(state.memory.live().eq(live.iter().copied()));
            assert!(live.is_sorted_by(|a, b| a.0 + a.1 <= b.0));
            assert_eq!(state.budget.used_bytes, live.iter().map(|range| range.1).sum::<u64>());
        }
        true
    }
}

#[test]
fn only_an_enabled_peer_may_be_given_access_to_pages() {
    let options = SimOptions { device: DeviceId(1), reachable_devices: 2, ..SimOptions::default() };
    assert!(sim(EventMode::Immediate).peers().is_none());
    let sim = Sim::new(options);
    let (memory, peers) = (sim.virtual_memory().unwrap(), sim.peers().unwrap());
    let reachable: Vec<_> =
        (0..4).map(DeviceId).filter(|device| peers.can_access(*device).unwrap()).collect();
    assert_eq!(reachable, [DeviceId(0), DeviceId(2)]);

    let address = memory.reserve(4 * MIB).unwrap();
    let piece = memory.create(2 * MIB, stratalloc::driver::Exportable::No).unwrap();
    memory.map(address, 2 * MIB, piece).unwrap();
    let refused = memory.set_access(address, 2 * MIB, DeviceId(2));
    assert_eq!(kind(refused), DriverErrorKind::InvalidValue);
    assert_eq!(kind(peers.enable_access(DeviceId(3))), DriverErrorKind::NotSupported);
    peers.enable_access(DeviceId(2)).unwrap();
    memory.set_access(address, 2 * MIB, DeviceId(2)).unwrap();
    assert_eq!(sim.mapped_bytes_open_to(DeviceId(2)), 2 * MIB);
    assert_eq!(sim.mapped_bytes_open_to(DeviceId(0)), 0);
    assert_eq!(sim.held().mapped_bytes(), 2 * MIB);
    assert_eq!(sim.held().reservations, [(address, 4 * MIB)]);

    let (own, there) = ((DeviceId(1), address), (DeviceId(2), 0));
    let stream = StreamId::DEFAULT;
    assert_eq!(
        kind(peers.copy_peer(there, own, MIB, stream)),
        DriverErrorKind::InvalidValue,
        "the device itself has no access yet"
    );
    memory.set_access(address, 2 * MIB, DeviceId(1)).unwrap();
    peers.copy_peer(there, own, MIB, stream).unwrap();
    let elsewhere = (DeviceId(0), 0);
    assert_eq!(
        kind(peers.copy_peer(elsewhere, own, MIB, stream)),
        DriverErrorKind::InvalidValue,
        "not enabled"
    );
}
