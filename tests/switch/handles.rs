//! Handles whose allocator is switched, buffers from before a switch, and the current allocator of each
//! device.

use stratalloc::handle::current::{self, CurrentError};
use stratalloc::layers;

use super::{ASYNC, EXPANDABLE, FRONT, Fixture, NATIVE};
use crate::common::prelude::*;

fn used_bytes(driver: &dyn Driver) -> u64 {
    let info = driver.memory_info().expect("the device works");
    info.total_bytes - info.free_bytes
}

#[cfg(target_os = "linux")]
#[test]
fn buffers_from_before_a_switch_keep_their_values_and_go_back_to_their_maker() {
    use stratalloc_sim::{Host, HostOptions};
    let driver = Arc::new(Host::new(HostOptions::default()));
    let handle = Handle::build(&Config::default(), driver).expect("the device can do it");
    let values: Vec<u32> = (0..300_000).collect();
    let mut buffers = Vec::new();
    for conf in [EXPANDABLE, ASYNC, FRONT, NATIVE] {
        let from = handle.from_slice(&values, StreamId::DEFAULT);
        buffers.push(from.expect("there is room"));
        handle.switch(conf).expect("a good string");
    }
    let other = handle.zeroed::<u32>(values.len(), StreamId::DEFAULT).expect("there is room");
    for buffer in &buffers {
        assert_eq!(buffer.to_vec().expect("the device works"), values);
    }
    assert_eq!(handle.switchable().retired(), 4);
    let clone = handle.clone();
    drop(buffers);
    assert_eq!((clone.switchable().retired(), handle.lost_blocks()), (0, 0));
    drop(other);
}

#[test]
fn a_guard_keeps_a_strategy_until_it_is_dropped() {
    let fixture = Fixture::new(8 * GIB, NATIVE);
    let looked_at = fixture.strategy();
    fixture.switch(EXPANDABLE);
    assert_eq!(fixture.retired(), 1, "a guard references it");
    assert!(looked_at.engine().is_some_and(|engine| engine.layout().is_empty()));
    drop(looked_at);
    assert_eq!(fixture.retired(), 0);
}

#[test]
fn a_switchable_allocator_wears_layers_as_any_other() {
    let fixture = Fixture::new(8 * GIB, NATIVE);
    let limited =
        Strategy::User(Box::new(layers::limit::limit(fixture.allocator.clone(), 4 * MIB)));
    let take = |bytes| limited.try_allocate(bytes, StreamId::DEFAULT);
    let first = take(3 * MIB).expect("within the limit");
    fixture.switch(EXPANDABLE);
    assert!(take(2 * MIB).is_err(), "the layer has not forgotten the block");
    limited.give(first);
    limited.give(take(2 * MIB).expect("within the limit"));
    assert_eq!(fixture.retired(), 0);
}

#[test]
fn a_further_string_changes_the_allocator_and_another_backend_switches() {
    let fixture = Fixture::new(8 * GIB, NATIVE);
    let (owner, block) = (fixture.strategy().engine().expect("ours").owner(), fixture.take(MIB));
    fixture.update("roundup_power2_divisions:4").expect("a good string");
    assert_eq!((fixture.take(MIB).owner(), fixture.retired()), (owner, 0));
    fixture.update("expandable_segments:True").expect("it can");
    assert_eq!(fixture.retired(), 0, "an engine changes by itself");
    fixture.update("backend:cudaMallocAsync").expect("it can");
    assert_eq!((fixture.retired(), fixture.name()), (1, "cudaMallocAsync"));
    assert!(fixture.config().settings().expandable_segments, "the setting stays");
    let bad = fixture.update("no_such_key:1").expect_err("no such key");
    assert!(matches!(bad, SwitchError::Configuration { .. }), "{bad}");
    fixture.give(block);
}

#[test]
fn each_device_has_one_current_allocator_for_all() {
    let device = DeviceId(71);
    let sim = || Arc::new(Sim::new(SimOptions { device, ..SimOptions::default() }));
    let missing = current::get(device).expect_err("none was created");
    assert_eq!(missing.to_string(), "device 71 has no current allocator");
    let bad = current::create("no_such_key:1", sim()).expect_err("a bad string");
    assert!(matches!(bad, CurrentError::Build(BuildError::Configuration { .. })), "{bad}");
    let unknown = current::create("backend:no_such_either", sim()).expect_err("no such backend");
    assert!(matches!(unknown, CurrentError::Build(_)), "{unknown}");
    let driver = sim();
    let made = current::create(NATIVE, Arc::clone(&driver) as _).expect("it can");
    let twice = current::create(NATIVE, sim()).expect_err("there is one");
    assert!(matches!(twice, CurrentError::Exists { device: DeviceId(71) }), "{twice}");
    let found = current::get(device).expect("it was made");
    let old = found.uninit::<u8>(8 << 20, StreamId::DEFAULT).expect("there is room");
    assert!(current::change(device, "backend:no_such_either").is_err());
    current::change(device, EXPANDABLE).expect("it can");
    assert_eq!(made.switchable().retired(), 1, "all handles have changed");
    drop(old);
    assert_eq!((made.switchable().retired(), used_bytes(&*driver)), (0, 0));
    assert!(made.control().by_address && current::devices().contains(&device));
    drop(current::remove(device).expect("it was made"));
    assert!(matches!(current::change(device, NATIVE), Err(CurrentError::Missing { .. })));
}

#[test]
fn a_handle_around_an_unknown_allocator_switches_with_any_further_string() {
    let driver: Arc<dyn Driver> = Arc::new(Sim::new(SimOptions::default()));
    let asynchronous = config(ASYNC);
    let strategy = registry::build(&asynchronous, Arc::clone(&driver), BuildOptions::default());
    let handle = Handle::new(strategy.expect("the device can"), driver);
    let native = config(NATIVE);
    let caching = handle.switchable().caching();
    caching.apply(&native).expect_err("it is another backend");
    assert_eq!(handle.switchable().name(), "cudaMallocAsync");
    handle.switchable().update(NATIVE).expect("it can");
    assert_eq!(handle.switchable().name(), "native");
    caching.apply(&asynchronous).expect_err("it is another backend");
    caching.apply(&native).expect("it is what it was built from");
}

#[test]
fn further_strings_of_two_threads_are_both_in_force() {
    for _ in 0..50 {
        let fixture = Fixture::new(8 * GIB, NATIVE);
        let together = Barrier::new(2);
        thread::scope(|scope| {
            for text in [ASYNC, "pinned_num_register_threads:4"] {
                let (fixture, together) = (&fixture, &together);
                scope.spawn(move || {
                    together.wait();
                    fixture.update(text).expect("it can");
                });
            }
        });
        let config = fixture.config();
        assert_eq!(fixture.name(), "cudaMallocAsync");
        assert_eq!(config.settings().pinned.register_threads, 4, "no string is lost");
    }
}
