//! Blocks that other streams use.

use super::rules;
use crate::common::prelude::*;

// As in PyTorch, the event is recorded at the free, so work that is submitted later does not matter.
#[test]
fn work_that_the_other_stream_gets_after_the_free_is_not_waited_for() {
    let fixture = Fixture::new(GIB, "");
    let (first, second) = (fixture.take(20 * MIB), fixture.take(30 * MIB));
    let address = first.address();
    fixture.record(&first, SIDE);
    fixture.record(&second, SIDE);
    fixture.give(first);
    let moment = fixture.device.submitted();
    fixture.give(second);
    fixture.device.complete_until(SIDE, moment);
    let reused = fixture.take(20 * MIB);
    assert_eq!(reused.address(), address);
    assert_eq!(fixture.stats().active.all.current, 2, "the second one still drains");
    fixture.give(reused);
    fixture.check();
}

// Corresponds to PyTorch's `EventPool::empty_cache`.
#[test]
fn empty_cache_destroys_the_events_that_are_kept() {
    let fixture = Fixture::new(GIB, "");
    for _ in 0..3 {
        let blocks = [fixture.take(MIB), fixture.take(MIB)];
        for block in blocks {
            fixture.record(&block, SIDE);
            fixture.give(block);
        }
        fixture.device.complete_all();
        fixture.cross_stream().process_events().unwrap();
    }
    assert_eq!(
        (fixture.device.calls("create_event"), fixture.device.calls("destroy_event")),
        (2, 0)
    );
    fixture.caching().empty_cache().unwrap();
    assert_eq!(
        (fixture.device.calls("create_event"), fixture.device.calls("destroy_event")),
        (2, 2)
    );
}

// From PyTorch's tests: a hundred frees of 160 MiB, delayed by a slow stream, do not run out of memory,
// because memory pressure waits for their events.
#[test]
fn a_hundred_delayed_frees_do_not_run_out_of_memory() {
    for compat in [Compat::Default, Compat::PyTorch] {
        let fixture = Fixture::with(GIB, rules(compat));
        for _ in 0..100 {
            let block = fixture.take(160 * MIB);
            fixture.record(&block, SIDE);
            fixture.give(block);
        }
        let now = fixture.stats();
        assert_eq!(now.num_ooms, 0, "{compat:?}");
        assert!(now.num_sync_all_streams > 0);
        fixture.check();
    }
}

/// Returns a device with a second one that can access it, and an allocator.
fn beside_a_peer(conf: &str) -> (Arc<Faulty<Arc<Sim>>>, Strategy) {
    let options = SimOptions { total_bytes: GIB, reachable_devices: 2, ..SimOptions::default() };
    let device = Arc::new(Faulty::new(Arc::new(Sim::new(options))));
    let driver: Arc<dyn Driver> = Arc::<Faulty<Arc<Sim>>>::clone(&device);
    let allocator =
        registry::build(&config(conf), driver, BuildOptions::default()).expect("it can");
    (device, allocator)
}

/// Returns the calls that wait for a stream or the device while a free segment of 30 MiB is released.
fn waits_of_a_release(conf: &str, has_peer: bool) -> [u64; 2] {
    let (device, allocator) = beside_a_peer(conf);
    if has_peer {
        allocator.peer_access().enable_peer_access(DeviceId(1)).expect("it can");
    }
    let stream = device.create_stream().expect("it can");
    allocator.give(allocator.take_on(30 * MIB, stream));
    let count = || ["synchronize_stream", "synchronize_device"].map(|c| device.inner().calls(c));
    let before = count();
    allocator.caching().empty_cache().expect("it can");
    assert_eq!(allocator.stats().memory_reserved(), 0);
    let after = count();
    [after[0] - before[0], after[1] - before[1]]
}

// The driver's free of a fixed segment does not wait for copies that another device makes.
#[test]
fn a_fixed_segment_that_a_peer_can_write_is_released_after_its_stream() {
    assert_eq!(waits_of_a_release("", true), [1, 0]);
    assert_eq!(waits_of_a_release("", false), [0, 0], "no other device has access");
    for version in ["pytorch-2.11", "pytorch-2.15"] {
        assert_eq!(waits_of_a_release(&format!("compat:{version}"), true), [0, 0], "{version}");
    }
    assert_eq!(waits_of_a_release("expandable_segments:True", false), [1, 0]);
}

#[test]
fn an_allocator_that_a_peer_can_write_is_dropped_after_its_streams() {
    for (conf, waits) in [("", 1), ("compat:pytorch", 0)] {
        let (device, allocator) = beside_a_peer(conf);
        allocator.peer_access().enable_peer_access(DeviceId(1)).unwrap();
        let stream = device.create_stream().unwrap();
        allocator.give(allocator.take_on(30 * MIB, stream));
        drop(allocator);
        assert_eq!(device.inner().calls("synchronize_device"), waits, "{conf}");
    }
}

// The segment stays in the cache if the wait fails.
#[test]
fn a_segment_whose_stream_cannot_be_waited_for_stays() {
    let (device, allocator) = beside_a_peer("");
    allocator.peer_access().enable_peer_access(DeviceId(1)).unwrap();
    allocator.give(allocator.take(30 * MIB));
    let (kind, only) = (DriverErrorKind::Other, Some("synchronize_stream"));
    device.arm(FaultPlan { at: 0, kind, repeat: false, only });
    assert!(allocator.caching().empty_cache().is_err());
    assert_eq!(allocator.stats().memory_reserved(), 30 << 20);
    allocator.caching().empty_cache().unwrap();
    assert_eq!(allocator.stats().memory_reserved(), 0);
}
