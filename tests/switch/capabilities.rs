//! Calls about blocks, pools and devices after a switch.

use super::{ASYNC, EXPANDABLE, Fixture, NATIVE, register};
use crate::common::prelude::*;

fn raw_fixture(conf: &str) -> Fixture {
    let (device, options) =
        (Arc::new(Sim::with_bytes(8 * GIB)), BuildOptions { raw_addresses: true });
    let allocator = Switchable::build(&config(conf), Arc::<Sim>::clone(&device), options);
    Fixture { device, allocator: allocator.expect("the device can do it") }
}

#[test]
fn bare_addresses_find_their_allocator() {
    let fixture = raw_fixture(NATIVE);
    let raw = &fixture.allocator;
    let mut addresses = Vec::new();
    for conf in [EXPANDABLE, ASYNC, NATIVE, EXPANDABLE] {
        let take = |n: u64| fixture.try_allocate(n * 1000, StreamId::DEFAULT).map(|b| b.address());
        addresses.extend((1..9).map(|n| take(n).expect("there is room")));
        fixture.switch(conf);
    }
    let side = fixture.device.create_stream().expect("streams");
    for address in addresses.iter().step_by(3) {
        raw.record_stream_raw(*address, side).expect("it is live");
    }
    fixture.device.complete_all();
    for address in &addresses {
        raw.free_raw(*address).expect("it is live");
    }
    fixture.device.complete_all();
    for address in addresses {
        let twice = raw.free_raw(address).expect_err("it was freed");
        assert!(matches!(twice, HandleError::UnknownAddress { .. }), "{twice}");
    }
    fixture.cross_stream().process_events().expect("it works");
    assert_eq!(fixture.retired(), 0);
}

#[test]
fn an_allocator_without_bare_addresses_is_refused_where_they_are_in_use() {
    register("addressless", (), |own| own.inner.control());
    let fixture = raw_fixture(NATIVE);
    let error = fixture.allocator.switch("backend:addressless").expect_err("it has none");
    assert!(matches!(error, SwitchError::Lacks { .. }), "{error}");
    assert!(error.to_string().contains("blocks by bare address"), "{error}");
    Fixture::new(8 * GIB, NATIVE).switch("backend:addressless");
}

#[test]
fn a_block_that_another_stream_uses_waits_for_it_in_the_old_allocator() {
    let fixture = Fixture::new(8 * GIB, NATIVE);
    let side = fixture.device.create_stream().expect("streams");
    let block = fixture.take(8 * MIB);
    fixture.switch(EXPANDABLE);
    let crossing = fixture.cross_stream();
    crossing.record_stream(&block, side).expect("it is live");
    let base = fixture.caching().base_allocation(&block);
    assert_eq!(base.expect("it is live").address, block.address());
    fixture.give(block);
    assert_eq!((fixture.retired(), fixture.used_bytes()), (1, 20 * MIB), "it waits");
    fixture.device.complete_all();
    crossing.process_events().expect("events can be queried");
    assert_eq!((fixture.retired(), fixture.used_bytes()), (0, 0));
}

#[test]
fn an_open_scope_refuses_the_switch_and_names_its_pool() {
    let fixture = Fixture::new(8 * GIB, NATIVE);
    let pools = fixture.private_pools();
    let pool = MemoryPool::new(pools, PoolOptions::default()).expect("a new id");
    let scope = pool.enter().expect("no scope is open");
    let error = fixture.allocator.switch(EXPANDABLE).expect_err("a scope is open");
    assert!(matches!(error, SwitchError::ScopeOpen { pool: open } if open == pool.id()), "{error}");
    let inside = fixture.take(MIB);
    drop(scope);
    drop(pool);
    fixture.switch(EXPANDABLE);
    fixture.give(inside);
    assert_eq!((fixture.retired(), fixture.used_bytes()), (0, 0));
}

#[test]
fn a_switch_that_is_refused_leaves_a_capture_sound() {
    for conf in [NATIVE, ASYNC] {
        let fixture = Fixture::new(8 * GIB, conf);
        let stream = fixture.device.create_stream().expect("streams are free");
        let capture = Capture::begin(&*fixture.device, stream).expect("no capture yet");
        let pools = fixture.private_pools();
        let filter = ScopeFilter::Capture(capture);
        let scope = PoolScope::open(pools, PoolId::next_capture(), filter).expect("none is open");
        for other in [ASYNC, NATIVE, "backend:cudaMallocAsync,malloc_async_own_pool:True"] {
            let error = fixture.allocator.switch(other).expect_err("a scope is open");
            assert!(matches!(error, SwitchError::ScopeOpen { .. }), "{error}");
        }
        fixture.give(fixture.take_on(MIB, stream));
        drop(scope);
        Capture::end(&*fixture.device, stream).expect("the capture is sound");
    }
}

#[test]
fn a_pool_of_an_allocator_without_pools_is_refused_as_such() {
    let fixture = Fixture::new(8 * GIB, "backend:native");
    let old = fixture.take(MIB);
    fixture.switch("backend:native,layers:[align:4KiB]");
    let pools = fixture.private_pools();
    let refused = pools.create_pool(PoolId::next_user(), PoolOptions::default());
    assert!(matches!(refused, Err(PoolError::NotSupported { .. })), "{refused:?}");
    fixture.give(old);
}

#[test]
fn a_pool_with_users_refuses_the_switch_and_is_unknown_after_it() {
    let fixture = Fixture::new(8 * GIB, NATIVE);
    let pools = fixture.private_pools();
    let pool = MemoryPool::new(pools, PoolOptions::default()).expect("a new id");
    let id = pool.id();
    let request = Request::new(3 * MIB, StreamId::DEFAULT).in_pool(id);
    let block = fixture.allocate(request).expect("there is room");
    for conf in [EXPANDABLE, ASYNC] {
        let error = fixture.allocator.switch(conf).expect_err("the pool has a user");
        assert!(matches!(error, SwitchError::PoolInUse { pool } if pool == id), "{error}");
    }
    let again = fixture.allocate(request).expect("nothing has changed");
    assert_eq!(again.owner(), block.owner());
    fixture.give(again);
    drop(pool);
    fixture.switch(EXPANDABLE);
    let refused = fixture.allocate(request);
    let is_unknown = |of: &PoolError| matches!(of, PoolError::Unknown { .. });
    assert!(matches!(&refused, Err(AllocError::Pool(of)) if is_unknown(of)), "{refused:?}");
    assert_eq!(pools.pool_users(id), None);
    assert_eq!(pools.release_pool(id), Err(PoolError::Unknown { pool: id }));
    fixture.give(block);
    assert_eq!((fixture.retired(), fixture.used_bytes()), (0, 0));
}

#[test]
fn nothing_is_released_while_a_scope_is_open() {
    let fixture = Fixture::new(8 * GIB, NATIVE);
    let old = fixture.take(32 * MIB);
    fixture.switch(EXPANDABLE);
    let pools = fixture.private_pools();
    let pool = PoolId::next_capture();
    let scope = PoolScope::open(pools, pool, ScopeFilter::this_thread()).expect("none is open");
    let frees = fixture.device.calls("free");
    fixture.give(old);
    assert_eq!((fixture.retired(), fixture.device.calls("free")), (1, frees));
    drop(scope);
    assert_eq!((fixture.retired(), fixture.used_bytes()), (0, 0));
}

#[test]
fn emptying_the_cache_inside_a_scope_leaves_retired_allocators_alone() {
    let fixture = Fixture::new(8 * GIB, NATIVE);
    let (idle, live) = (fixture.take(32 * MIB), fixture.take(32 * MIB));
    fixture.switch(EXPANDABLE);
    fixture.give(idle);
    let pools = fixture.private_pools();
    let pool = PoolId::next_capture();
    let scope = PoolScope::open(pools, pool, ScopeFilter::Capture(1)).expect("none is open");
    let caching = fixture.caching();
    caching.empty_cache().expect("the device works");
    fixture.cross_stream().process_events().expect("it works");
    assert_eq!(fixture.used_bytes(), 64 * MIB, "it would break the capture");
    drop(scope);
    caching.empty_cache().expect("the device works");
    assert_eq!(fixture.used_bytes(), 32 * MIB);
    fixture.give(live);
    assert_eq!((fixture.retired(), fixture.used_bytes()), (0, 0));
}

#[test]
fn a_block_that_waits_keeps_its_allocator_also_below_a_layer_that_counts() {
    for conf in ["backend:native,layers:[statistics]", "backend:native,layers:[statistics,front]"] {
        let fixture = Fixture::new(8 * GIB, conf);
        let side = fixture.device.create_stream().expect("streams");
        let block = fixture.take(8 * MIB);
        fixture.switch(EXPANDABLE);
        let crossing = fixture.cross_stream();
        crossing.record_stream(&block, side).expect("it is live");
        fixture.give(block);
        assert_eq!((fixture.retired(), fixture.used_bytes()), (1, 20 * MIB), "{conf}: it waits");
        fixture.device.complete_all();
        crossing.process_events().expect("events can be queried");
        assert_eq!((fixture.retired(), fixture.used_bytes()), (0, 0), "{conf}");
    }
}

/// An allocator that refuses access by every device.
#[derive(Clone, Debug)]
struct Walled;

impl PeerAccess for Walled {
    fn enable_peer_access(&self, _: DeviceId) -> Result<(), DriverError> {
        Err(DriverError::new(
            DriverErrorKind::NotSupported,
            "enable_access",
            0,
            "walled".to_owned(),
        ))
    }

    fn peers(&self) -> Vec<DeviceId> {
        Vec::new()
    }
}

#[test]
fn a_device_that_a_retired_allocator_keeps_out_is_not_let_in_by_the_current_one() {
    register("walled", Walled, |own| {
        let mut control = Control::default();
        control.peer_access = Some(&own.more);
        control
    });
    let sim = SimOptions { reachable_devices: 1, ..SimOptions::default() };
    let config = config("backend:walled");
    let driver = Arc::new(Sim::new(sim));
    let switchable = Switchable::build(&config, driver, BuildOptions::default()).expect("it can");
    let block = switchable.take(MIB);
    switchable.switch(NATIVE).expect("a good string");
    let peers = switchable.peer_access();
    peers.enable_peer_access(DeviceId(1)).expect_err("the block's allocator refuses");
    assert_eq!(peers.peers(), []);
    switchable.give(block);
    peers.enable_peer_access(DeviceId(1)).expect("the device has peers");
    assert_eq!(peers.peers(), [DeviceId(1)]);
}
