//! `backend:cudaMallocAsync`: what the strategy adds to the driver's pools, on the simulated and the host
//! device.
//!
//! `malloc_async/captures.rs` tests graphs, `malloc_async/pools.rs` private pools,
//! `malloc_async/pressure.rs` failed requests. `malloc_async/histories.rs` runs random histories on three
//! threads. `malloc_async/device.rs` uses a real device.

mod captures;
#[cfg(target_os = "linux")]
mod device;
mod histories;
mod pools;
mod pressure;

use stratalloc::driver::MemoryPools;

use crate::common::prelude::*;

#[cfg(target_os = "linux")]
use crate::common::machine::HostMachine;

type Fixture = FixtureOn<Sim, MallocAsyncAllocator>;

impl Fixture {
    fn allocated(&self) -> (i64, i64, i64) {
        let s = self.allocator.statistics();
        (s.allocation.all.current, s.allocated_bytes.all.current, s.active_bytes.all.current)
    }
}

fn sim(mib: u64) -> Fixture {
    Fixture::new(mib * MIB, "")
}

/// Returns the strategy's own counter of this name.
pub(crate) fn note(allocator: &MallocAsyncAllocator, name: &str) -> i64 {
    let own = allocator.statistics().own;
    let found = own.iter().find(|own| own.name.strip_prefix("malloc_async.") == Some(name));
    found.expect("the strategy has the counter").count
}

#[test]
fn requests_are_passed_on_as_they_are_and_the_driver_reuses_them_in_order() {
    let fixture = sim(256);
    let first = fixture.take(MIB + 1);
    assert_eq!(first.size_bytes(), MIB + 1);
    let address = first.address();
    assert_eq!(fixture.allocated(), (1, 1_048_577, 1_048_577));
    fixture.give(first);
    assert_eq!(fixture.allocated(), (0, 0, 0));
    let second = fixture.take(MIB + 1);
    assert_eq!(second.address(), address);
    let s = fixture.statistics();
    assert_eq!(s.reserved_bytes.all.current, 32 << 20);
    assert_eq!(
        (s.allocation.all.allocated, s.allocation.all.freed, s.allocation.all.peak),
        (2, 1, 1)
    );
    fixture.give(second);
}

#[test]
fn memory_stays_in_the_pool_over_a_wait_and_goes_when_the_cache_is_emptied() {
    let fixture = sim(256);
    fixture.give(fixture.take(64 * MIB));
    fixture.device.synchronize_device().unwrap();
    assert_eq!(fixture.statistics().reserved_bytes.all.current, 64 << 20);
    fixture.empty_cache();
    let s = fixture.statistics();
    assert_eq!((s.reserved_bytes.all.current, s.reserved_bytes.all.peak), (0, 64 << 20));
    fixture.reset_peaks();
    assert_eq!(fixture.statistics().reserved_bytes.all.peak, 0);
}

#[test]
fn the_default_pool_is_left_as_it_was_found() {
    let device = Arc::new(Sim::with_bytes(256 * MIB));
    let pool = device.default_pool().unwrap();
    device.set_release_threshold(pool, 7 * MIB).unwrap();
    let allocator = MallocAsyncAllocator::new(device.clone(), &Settings::default()).unwrap();
    assert_eq!(device.release_threshold(pool).unwrap(), u64::MAX);
    let kept = allocator.take(MIB);
    drop(allocator);
    assert_eq!(device.release_threshold(pool).unwrap(), 7 * MIB);
    assert!(device.held().is_nothing(), "{:?}", device.held());
    assert_eq!(device.used_bytes(), 0);
    assert_eq!(kept.size_bytes(), MIB);
}

fn two_allocators_on(machine: &impl Machine) {
    let driver = machine.driver();
    let pools = driver.memory_pools().expect("the machine has pools");
    let pool = pools.default_pool().expect("it works");
    pools.set_release_threshold(pool, 7 * MIB).expect("it works");
    let [first, second] = [(); 2].map(|()| {
        MallocAsyncAllocator::new(machine.driver(), &Settings::default()).expect("it works")
    });
    let request = Request::new(64 * MIB, StreamId::DEFAULT);
    second.give(second.allocate(request).expect("it works"));
    drop(first);
    driver.synchronize_device().expect("it works");
    assert_eq!(
        pools.release_threshold(pool).expect("it works"),
        u64::MAX,
        "the second still keeps it all"
    );
    assert_eq!(pools.usage(pool).expect("it works").reserved_bytes, 64 * MIB);
    drop(second);
    assert_eq!(pools.release_threshold(pool).expect("it works"), 7 * MIB, "as the first found it");
    assert_eq!(pools.usage(pool).expect("it works").reserved_bytes, 0);
    assert!(pools.keep_memory(pool, false).is_err(), "no user is left");
}

#[test]
fn allocators_that_share_a_pool_leave_it_as_the_first_found_it() {
    two_allocators_on(&SimMachine::new(256 * MIB));
    #[cfg(target_os = "linux")]
    two_allocators_on(&HostMachine::new(256 * MIB));
}

#[test]
fn a_pool_of_its_own_shares_nothing_with_the_default_pool() {
    let settings = Settings { malloc_async_own_pool: true, ..Settings::default() };
    let fixture = Fixture::with(256 * MIB, settings);
    let block = fixture.take(MIB);
    let driver = &fixture.device;
    assert_eq!(driver.usage(driver.default_pool().unwrap()).unwrap().reserved_bytes, 0);
    assert_eq!(fixture.statistics().reserved_bytes.all.current, 32 << 20);
    fixture.give(block);
    let Fixture { device, allocator } = fixture;
    drop(allocator);
    assert_eq!(device.used_bytes(), 0);
}

#[test]
fn the_limit_refuses_without_asking_the_driver() {
    let fixture = sim(256);
    fixture.set_limit_bytes(Some(10 * MIB));
    let block = fixture.take(6 * MIB);
    let calls = fixture.device.calls("allocate_async");
    let report = fixture.fail(5 * MIB, HOME);
    assert_eq!(fixture.device.calls("allocate_async"), calls);
    assert_eq!((report.limit_bytes, report.allocated_bytes), (Some(10 * MIB), 6 * MIB));
    assert_eq!(report.driver, None);
    assert!(report.to_string().contains("raise the memory fraction"), "{report}");
    fixture.give(block);
    fixture.give(fixture.take(10 * MIB));
    assert_eq!(fixture.statistics().num_ooms, 1);
    assert!(fixture.set_memory_fraction(1.5).is_err());
    fixture.set_memory_fraction(0.5).unwrap();
    assert_eq!(fixture.limit_bytes(), Some(128 * MIB));
    fixture.set_memory_fraction(1.0).unwrap();
    assert_eq!(fixture.limit_bytes(), None);
}

#[test]
fn a_configured_fraction_is_a_limit_from_the_start() {
    let settings = Settings { per_process_memory_fraction: 0.25, ..Settings::default() };
    let fixture = Fixture::with(256 * MIB, settings);
    assert_eq!(fixture.limit_bytes(), Some(64 * MIB));
    // The parser refuses a fraction out of range, but a program can set the field to one. Such a fraction
    // sets no limit.
    let settings = Settings { per_process_memory_fraction: -1.0, ..Settings::default() };
    let fixture = Fixture::with(256 * MIB, settings);
    assert_eq!(fixture.limit_bytes(), None);
}

#[test]
fn a_refusal_is_tried_again_after_waiting_and_trimming() {
    let fixture = sim(128);
    let (a, b) = (fixture.device.create_stream().unwrap(), StreamId::DEFAULT);
    fixture.give(fixture.take_on(64 * MIB, a));
    // The free on stream a is still pending, so stream b can get the memory only after a wait.
    let block = fixture.take_on(96 * MIB, b);
    assert_eq!(note(&fixture, "trims_that_helped"), 1);
    assert_eq!(fixture.statistics().num_alloc_retries, 1);
    fixture.give(block);
}

#[test]
fn pytorchs_letter_waits_for_the_streams_own_work_only() {
    let settings = Settings { compat: Compat::PyTorch, ..Settings::default() };
    let fixture = Fixture::with(128 * MIB, settings);
    let other = fixture.device.create_stream().unwrap();
    fixture.give(fixture.take_on(64 * MIB, other));
    fixture.fail(96 * MIB, HOME);
    fixture.device.complete_stream(other);
    fixture.give(fixture.take(96 * MIB));
}

#[test]
fn the_report_of_a_failure_has_the_numbers_and_observers_see_it() {
    let fixture = sim(128);
    let seen = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&seen);
    fixture.hooks().add_oom_observer(Arc::new(move |report| {
        assert_eq!(report.requested_bytes, 100 * MIB);
        count.fetch_add(1, Ordering::Relaxed);
    }));
    let kept = fixture.take(64 * MIB);
    fixture.history().start(&RecordOptions::at_most(16));
    let report = fixture.fail(100 * MIB, HOME);
    assert_eq!(seen.load(Ordering::Relaxed), 1);
    assert_eq!((report.allocated_bytes, report.reserved_bytes), (64 * MIB, 64 * MIB));
    assert_eq!(report.device_total_bytes, Some(128 * MIB));
    assert_eq!(report.driver.as_ref().unwrap().kind(), DriverErrorKind::OutOfMemory);
    let mut events = Vec::new();
    fixture.history().drain_into(&mut events);
    assert!(events.iter().any(|event| event.action == Action::OutOfMemory));
    fixture.give(kept);
}

#[test]
fn free_memory_callbacks_are_asked_before_anything_is_waited_for() {
    let machine = SimMachine::new(128 * MIB);
    let allocator =
        Arc::new(MallocAsyncAllocator::new(machine.driver(), &Settings::default()).unwrap());
    let kept = allocator.take(96 * MIB);
    let cell = Arc::new(parking_lot::Mutex::new(Some(kept)));
    let weak = Arc::downgrade(&allocator);
    allocator.hooks().add_free_memory_callback(Arc::new(move || {
        let allocator = weak.upgrade().expect("it calls");
        cell.lock().take().is_some_and(|block| allocator.free(block).is_ok())
    }));
    let waits = machine.0.calls("synchronize_device");
    let block = allocator.take(96 * MIB);
    assert_eq!(machine.0.calls("synchronize_device"), waits);
    allocator.give(block);
}

#[test]
fn a_block_that_other_streams_use_waits_for_all_of_them() {
    let fixture = sim(256);
    let driver = &fixture.device;
    let (a, b) = (driver.create_stream().unwrap(), driver.create_stream().unwrap());
    let block = fixture.take_on(32 * MIB, a);
    let address = block.address();
    fixture.record_stream(&block, b).unwrap();
    fixture.record_stream(&block, a).unwrap();
    assert_eq!(note(&fixture, "own_stream_recorded"), 1);
    fixture.reset_accumulated();
    assert_eq!(note(&fixture, "own_stream_recorded"), 0);
    fixture.give(block);
    // The block is freed on an internal stream, after the work of a and b. Neither a nor b waits for that
    // stream.
    for stream in [a, b] {
        let other = fixture.take_on(32 * MIB, stream);
        assert_ne!(other.address(), address);
        fixture.give(other);
    }
    driver.complete_stream(b);
    driver.complete_stream(a);
    driver.synchronize_device().unwrap();
    let again = fixture.take_on(32 * MIB, b);
    assert_eq!(again.address(), address, "the lowest range is free for all streams now");
    fixture.give(again);
}

#[test]
fn captures_are_asked_for_no_more_than_once_for_each_stream_while_no_scope_is_open() {
    let fixture = sim(256);
    let driver = &fixture.device;
    let [a, b] = [0, 1].map(|_| driver.create_stream().unwrap());
    fixture.give(fixture.take_on(MIB, a));
    assert_eq!(driver.calls("capture_status"), 0);
    let used = fixture.take_on(MIB, a);
    fixture.record_stream(&used, b).unwrap();
    fixture.give(used);
    assert_eq!(driver.calls("capture_status"), 2, "when they are joined");
    assert_eq!(fixture.allocated(), (0, 0, 0));
}

#[test]
fn threads_together_do_not_pass_the_limit() {
    let fixture = sim(256);
    for limit_mib in [1, 7, 32] {
        fixture.set_limit_bytes(Some(limit_mib * MIB));
        let meet = std::sync::Barrier::new(4);
        let held: Vec<Allocation> = std::thread::scope(|threads| {
            let take = || -> Vec<Allocation> {
                meet.wait();
                let request = Request::new(MIB, StreamId::DEFAULT);
                (0..limit_mib).filter_map(|_| fixture.allocate(request).ok()).collect()
            };
            let all: Vec<_> = (0..4).map(|_| threads.spawn(take)).collect();
            all.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(held.len() as u64, limit_mib, "as many as fit and no more");
        held.into_iter().for_each(|block| fixture.give(block));
        fixture.set_limit_bytes(None);
        fixture.give(fixture.take(64 * MIB));
    }
}

#[cfg(target_os = "linux")]
#[test]
fn bytes_that_another_stream_still_reads_stay_intact() {
    let machine = HostMachine::new(256 * MIB);
    let driver = machine.driver();
    let fixture = MallocAsyncAllocator::new(machine.driver(), &Settings::default()).unwrap();
    let (a, b) = (driver.create_stream().unwrap(), driver.create_stream().unwrap());
    let target = fixture.take_on(MIB, b);
    for round in 0..50 {
        let source = fixture.take_on(MIB, a);
        machine.write(source.address(), MIB, round, a).unwrap();
        // Stream b is delayed and then copies. Before it copies, the source is freed and other requests
        // allocate.
        machine.spoil_later(target.address(), 64, b).unwrap();
        driver.copy(target.address(), source.address(), MIB, b).unwrap();
        fixture.record_stream(&source, b).unwrap();
        fixture.give(source);
        let other = fixture.take_on(MIB, a);
        driver.fill(other.address(), 0xAA, MIB, a).unwrap();
        fixture.give(other);
        machine.verify(target.address(), MIB, round, b).unwrap();
    }
    fixture.give(target);
}

#[test]
fn the_largest_request_that_fits_is_found_and_costs_nothing_afterwards() {
    let fixture = sim(256);
    let kept = fixture.take(32 * MIB);
    let info = fixture.cache_info().unwrap();
    assert_eq!(info.device_free_bytes, 224 * MIB);
    assert_eq!(info.largest_cached_bytes, 224 * MIB);
    assert_eq!(fixture.statistics().reserved_bytes.all.current, 32 << 20);
    fixture.set_limit_bytes(Some(48 * MIB));
    assert_eq!(fixture.cache_info().unwrap().largest_cached_bytes, 16 * MIB);
    fixture.give(kept);
}

#[test]
fn what_was_tried_goes_back_although_its_free_is_refused() {
    let sim = SimMachine::new(256 * MIB);
    let faulty = Arc::new(Faulty::new(Arc::clone(&sim.0)));
    let driver = Arc::<Faulty<Arc<Sim>>>::clone(&faulty);
    let allocator = MallocAsyncAllocator::new(driver, &Settings::default()).unwrap();
    faulty.fail_call(0, Some("free_async"));
    assert_eq!(allocator.cache_info().unwrap().largest_cached_bytes, 256 * MIB);
    faulty.disarm();
    allocator.empty_cache().unwrap();
    assert_eq!(sim.used_bytes(), 0);
    let active = allocator.statistics().active;
    assert_eq!((active.all.current, active.all.allocated), (0, 0), "nothing requested it");
}

#[test]
fn the_largest_request_counts_what_the_pool_holds_idle() {
    let fixture = sim(128);
    let (kept, idle) = (fixture.take(64 * MIB), fixture.take(24 * MIB));
    fixture.give(idle);
    fixture.device.synchronize_device().unwrap();
    let info = fixture.cache_info().unwrap();
    // The driver can combine free pages and new pages, so both together serve one request.
    assert_eq!((info.device_free_bytes, info.largest_cached_bytes), (32 * MIB, 64 * MIB));
    fixture.give(kept);
}

#[test]
fn peers_reach_pools_of_before_and_after() {
    let options = SimOptions { reachable_devices: 1, ..SimOptions::default() };
    let sim = Arc::new(Sim::new(options));
    let allocator = MallocAsyncAllocator::new(sim.clone(), &Settings::default()).unwrap();
    let peers = allocator.peer_access();
    assert!(peers.enable_peer_access(DeviceId(0)).is_err());
    assert!(peers.enable_peer_access(DeviceId(5)).is_err());
    peers.enable_peer_access(DeviceId(1)).unwrap();
    peers.enable_peer_access(DeviceId(1)).unwrap();
    assert_eq!(peers.peers(), [DeviceId(1)]);
    let opened = sim.calls("open_pool");
    allocator.private_pools().create_pool(PoolId::next_user(), Default::default()).unwrap();
    assert_eq!(sim.calls("open_pool"), opened + 1);
}

#[test]
fn a_device_without_pools_is_refused_with_a_reason() {
    let driver = crate::common::plain::plain(SimMachine::new(64 * MIB).0);
    let error = MallocAsyncAllocator::new(driver, &Settings::default()).unwrap_err();
    assert_eq!(error.kind(), DriverErrorKind::NotSupported);
    assert!(error.to_string().contains("no stream-ordered memory pools"), "{error}");
}

#[test]
fn the_configuration_names_it() {
    for text in ["backend:cudaMallocAsync", "backend:hipMallocAsync,malloc_async_own_pool:True"] {
        let config = config(text);
        let machine = SimMachine::new(64 * MIB);
        let strategy =
            stratalloc::registry::build(&config, machine.driver(), Default::default()).unwrap();
        assert_eq!(strategy.name(), "cudaMallocAsync");
        assert!(strategy.engine().is_none());
    }
}
