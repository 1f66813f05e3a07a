//! Peer devices. `enable_peer_access` lets a peer access every current and future page, or returns an error.

use super::tools::{SHARED, allocate, engine, sim, two};
use crate::common::prelude::*;

#[test]
fn a_peer_gets_the_pages_there_are_and_those_to_come() {
    let (sim, ours, theirs) = two(sim());
    let shared = allocate(&theirs, MIB);
    let imported = ours.open(&theirs.share(&shared).unwrap()).unwrap();
    let block = allocate(&ours, 25 * MIB);
    let small = allocate(&ours, 512);
    let peer = DeviceId(2);
    ours.enable_peer_access(peer).unwrap();
    // 40 MiB in large pages, 2 MiB in a small one, and 2 MiB imported; the other engine's own page is
    // not counted.
    assert_eq!(sim.mapped_bytes_open_to(peer), 44 * MIB);
    let more = allocate(&ours, 100 * MIB);
    let own = sim.held().mapped_bytes() - 2 * MIB;
    assert_eq!(sim.mapped_bytes_open_to(peer), own);
    let next = allocate(&theirs, 3 * MIB);
    let also = ours.open(&theirs.share(&next).unwrap()).unwrap();
    assert_eq!(sim.mapped_bytes_open_to(peer), own + 20 * MIB);
    assert_eq!(sim.mapped_bytes_open_to(DeviceId(1)), 0);
    assert_eq!(ours.peers(), [peer]);
    let calls = sim.total_calls();
    ours.enable_peer_access(peer).unwrap();
    assert_eq!(sim.total_calls(), calls, "twice is no error and no work");
    drop((block, small, more, imported, also));
}

/// Access is enabled in one direction only, as by PyTorch's `enablePeerAccess(dev, dev_to_access)`.
#[test]
fn a_peer_accesses_the_allocators_memory_and_the_allocators_device_not_the_peers() {
    let sims = [0, 1].map(|device| {
        let options =
            SimOptions { device: DeviceId(device), reachable_devices: 1, ..SimOptions::default() };
        Arc::new(Sim::new(options))
    });
    let engines = sims.each_ref().map(|sim| engine(sim.clone(), SHARED));
    let blocks = engines.each_ref().map(|engine| allocate(engine, 25 * MIB));
    engines[0].enable_peer_access(DeviceId(1)).unwrap();
    assert_eq!(sims[0].mapped_bytes_open_to(DeviceId(1)), sims[0].held().mapped_bytes());
    assert_eq!(sims[1].mapped_bytes_open_to(DeviceId(0)), 0);
    assert_eq!(sims.each_ref().map(|sim| sim.calls("enable_access")), [1, 0]);
    engines[1].enable_peer_access(DeviceId(0)).unwrap();
    assert_eq!(sims[1].mapped_bytes_open_to(DeviceId(0)), sims[1].held().mapped_bytes());
    drop(blocks);
}

#[test]
fn a_device_that_fails_is_not_remembered() {
    for at in 0..6 {
        let sim = sim();
        let faulty = Arc::new(Faulty::new(sim.clone()));
        let engine = engine(faulty.clone(), SHARED);
        let (_large, _small) = (allocate(&engine, 25 * MIB), allocate(&engine, 512));
        faulty.fail_call(at, None);
        let done = engine.enable_peer_access(DeviceId(1));
        faulty.disarm();
        // The driver calls are: check for access, enable access, and one for each of two ranges.
        assert_eq!(done.is_err(), at < 4, "call {at}: {done:?}");
        if let Err(error) = done {
            assert_eq!(engine.peers(), []);
            let opened = at == 3;
            assert_eq!(error.message().contains("1 ranges were opened before"), opened, "{error}");
            let before = sim.mapped_bytes_open_to(DeviceId(1));
            let _more = allocate(&engine, 100 * MIB);
            assert_eq!(sim.mapped_bytes_open_to(DeviceId(1)), before, "later pages stay closed");
            engine.enable_peer_access(DeviceId(1)).unwrap();
        }
        assert_eq!(engine.peers(), [DeviceId(1)]);
        assert_eq!(sim.mapped_bytes_open_to(DeviceId(1)), sim.held().mapped_bytes());
    }
}

#[test]
fn growth_with_peers_is_all_or_nothing() {
    for at in 0..3 {
        let sim = sim();
        let faulty = Arc::new(Faulty::new(sim.clone()));
        let engine = engine(faulty.clone(), SHARED);
        engine.enable_peer_access(DeviceId(1)).unwrap();
        faulty.fail_call(at, Some("set_access"));
        let request =
            stratalloc::allocator::Request::new(45 * MIB, stratalloc::ids::StreamId::DEFAULT);
        let done = engine.allocate(request);
        faulty.disarm();
        assert_eq!(done.is_err(), at < 2, "itself and the peer");
        if done.is_err() {
            assert_eq!((sim.held().mapped_bytes(), sim.piece_holds()), (0, 0));
        }
    }
}

#[test]
fn a_device_without_peers_is_reported() {
    let alone = engine(Arc::new(Sim::new(SimOptions::default())), SHARED);
    assert!(alone.control().peer_access.is_none());
    let engine = engine(sim(), SHARED);
    for device in [DeviceId(0), DeviceId(9)] {
        let error = engine.enable_peer_access(device).unwrap_err();
        assert_eq!(error.kind(), DriverErrorKind::NotSupported);
        assert_eq!(engine.peers(), []);
    }
}
