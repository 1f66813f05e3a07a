//! Where memory comes from, and when it is released to the driver.

use super::*;

#[test]
fn blocks_above_the_cached_size_are_released_as_soon_as_they_are_free() {
    let (sim, own) = pinned("pinned_max_cached_size_mb:2");
    own.give(own.take(3 * MIB));
    assert_eq!(reserved(&own), 0);
    own.give(own.take(2 * MIB));
    assert_eq!(reserved(&own), 2 * MIB);
    let large = own.take(3 * MIB);
    own.record_stream_raw(large.address(), SIDE).unwrap();
    own.give(large);
    assert_eq!(reserved(&own), 5 * MIB, "its work is unfinished");
    sim.complete_stream(SIDE);
    own.cross_stream().process_events().unwrap();
    assert_eq!(reserved(&own), 2 * MIB);
}

#[test]
fn blocks_that_have_been_free_too_long_are_released() {
    let (_, own) = pinned("");
    let blocks = [1, 2, 3].map(|n| own.take(n * MIB));
    blocks.into_iter().for_each(|block| own.give(block));
    for (age, reserved_bytes) in [("1000000", 6 * MIB), ("0", 0)] {
        let config = config(&format!("backend:pinned,pinned_trim_age_s:{age}"));
        own.caching().apply(&config).unwrap();
        own.give(own.take(3 * MIB));
        assert_eq!(reserved(&own), reserved_bytes, "{age}");
    }
}

#[test]
fn a_request_beyond_the_memory_waits_for_streams_and_releases_the_cache() {
    for limit in [false, true] {
        let sim = device(if limit { GIB } else { 10 * MIB });
        let own = pinned_over(Arc::clone(&sim) as _, "");
        own.caching().set_limit_bytes(limit.then_some(10 * MIB));
        let [waits, idle] = [4, 5].map(|n| own.take(n * MIB));
        own.record_stream_raw(waits.address(), SIDE).unwrap();
        own.give(waits);
        own.give(idle);
        let whole = own.take(10 * MIB);
        let s = own.stats();
        assert_eq!((s.num_alloc_retries, s.num_sync_all_streams, s.num_ooms), (1, 1, 0));
        let Err(AllocError::OutOfMemory(report)) = own.try_allocate(1, HOME) else {
            panic!("nothing is left");
        };
        assert_eq!((report.reserved_bytes, report.allocated_bytes), (10 * MIB, 10 * MIB));
        assert_eq!((report.limit_bytes.is_some(), report.driver.is_some()), (limit, !limit));
        own.give(whole);
        own.give(own.take(MIB));
    }
}

#[test]
fn a_reserved_segment_serves_requests_before_the_driver_does() {
    let (sim, own) = pinned("pinned_reserve_segment_size_mb:4");
    assert_eq!((sim.calls("allocate_host"), reserved(&own)), (1, 4 * MIB));
    let [first, second] = [3 * MIB, 600].map(|bytes| own.take(bytes));
    assert_eq!(second.address(), first.address() + 3 * MIB);
    let base = own.caching().base_allocation(&second).unwrap();
    assert_eq!((base.address, base.size_bytes), (first.address(), 4 * MIB));
    let own_block = own.take(2 * MIB);
    assert_eq!((sim.calls("allocate_host"), reserved(&own)), (2, 6 * MIB));
    let layout = own.caching().layout();
    let sizes: Vec<Vec<_>> =
        layout.iter().map(|s| s.blocks.iter().map(|block| block.size_bytes).collect()).collect();
    assert!(sizes.contains(&vec![3 * MIB, 1024, MIB - 1024]), "{sizes:?}");
    let start = first.address();
    own.give(first);
    own.caching().empty_cache().unwrap();
    assert_eq!(reserved(&own), 6 * MIB, "a part of the segment is live");
    own.give(second);
    own.give(own_block);
    own.caching().empty_cache().unwrap();
    assert_eq!(reserved(&own), 4 * MIB);
    assert_eq!(own.take(4 * MIB).address(), start, "the whole segment was unused again");
    assert_eq!(sim.calls("allocate_host"), 2);
    drop(own);
    assert_eq!(sim.held(), HeldResources::default());
}

#[test]
fn a_segment_that_cannot_be_reserved_fails_the_construction() {
    let sim = device(MIB);
    let settings = config("backend:pinned,pinned_reserve_segment_size_mb:2").settings().clone();
    let error = PinnedAllocator::new(Arc::clone(&sim) as _, &settings).unwrap_err();
    assert!(error.is_out_of_memory());
    assert_eq!(sim.held(), HeldResources::default());
}

#[test]
fn memory_of_the_program_is_registered_and_unregistered() {
    let (sim, own) = pinned("pinned_use_cuda_host_register:True,pinned_num_register_threads:4");
    let block = own.take(5 * MIB + 1);
    assert_eq!((sim.calls("register_host"), sim.calls("allocate_host")), (1, 0));
    assert_eq!(sim.held().pinned_bytes, 5 * MIB + 4096);
    own.give(block);
    own.caching().empty_cache().unwrap();
    assert_eq!((sim.calls("unregister_host"), sim.held().pinned_bytes), (1, 0));
    let _live = own.take(1);
    drop(own);
    assert_eq!(sim.held(), HeldResources::default());
}

/// Returns a device that reports this NUMA node.
fn near(host_node: Option<u32>) -> Arc<Sim> {
    Arc::new(Sim::new(SimOptions { host_node, ..SimOptions::default() }))
}

#[test]
fn a_node_is_chosen_only_if_it_is_known_and_can_be_chosen() {
    let registers = |sim: &Arc<Sim>, numa: &str| {
        let own = pinned_over(Arc::clone(sim) as _, &format!("pinned_numa:{numa}"));
        own.give(own.take(MIB));
        sim.calls("register_host") > 0
    };
    assert!(!registers(&near(None), "auto"));
    assert!(!registers(&near(Some(999)), "auto"), "the machine has no such node");
    assert!(!registers(&near(Some(0)), "any"));
    let settings = config("backend:pinned,pinned_numa:999").settings().clone();
    let error = PinnedAllocator::new(near(None), &settings).unwrap_err();
    assert!(error.message().contains("999"), "{error}");
    let settings = config("backend:pinned,pinned_numa:0").settings().clone();
    match PinnedAllocator::new(near(None), &settings) {
        Ok(_) => {
            assert!(registers(&near(Some(0)), "auto"));
            assert!(registers(&near(None), "0"));
        }
        // Some containers forbid choosing a node.
        Err(error) => eprintln!("skipped: {error}"),
    }
}

#[cfg(target_os = "linux")]
#[test]
fn pages_lie_on_the_chosen_node_before_the_program_touches_them() {
    let settings = config("backend:pinned,pinned_numa:0,pinned_num_register_threads:4");
    let own = match PinnedAllocator::new(near(None), settings.settings()) {
        Ok(own) => own,
        Err(error) => return eprintln!("skipped: {error}"),
    };
    let block = own.take(8 * MIB);
    let Some(pages) = pages_at(block.address()) else { return eprintln!("skipped: no numa_maps") };
    assert!(pages.contains("prefer:0"), "{pages}");
    let on_node = pages.split(' ').find_map(|part| part.strip_prefix("N0="));
    let count: u64 = on_node.expect("pages are on the node").parse().expect("it is a number");
    assert!(count >= 8 * MIB / 4096 || pages.contains("kernelpagesize_kB=2048"), "{pages}");
}

#[test]
fn a_block_that_the_driver_fails_to_free_stays_cached_unless_failures_are_ignored() {
    for ignores in [false, true] {
        let sim = device(GIB);
        let driver = Arc::new(Faulty::new(Arc::clone(&sim)));
        let own =
            pinned_over(Arc::clone(&driver) as _, &format!("pinned_free_catch_all:{ignores}"));
        [1, 2].map(|n| own.take(n * MIB)).into_iter().for_each(|block| own.give(block));
        let only = Some("free_host");
        driver.arm(FaultPlan { at: 0, kind: DriverErrorKind::Other, repeat: false, only });
        assert_eq!(own.caching().empty_cache().is_ok(), ignores);
        // The failure of one block does not keep the other.
        assert_eq!(reserved(&own), if ignores { 0 } else { MIB });
        own.caching().empty_cache().unwrap();
        assert_eq!(reserved(&own), 0);
        assert_eq!(sim.held().pinned_bytes, if ignores { MIB } else { 0 });
        let calls = own.stats().own.into_iter().find(|own| own.name == "pinned.ignored_failures");
        assert_eq!(calls.map(|own| own.count), Some(i64::from(ignores)));
    }
}

#[test]
fn dropping_the_allocator_releases_live_and_waiting_blocks() {
    let (sim, own) = pinned("");
    let [_live, waits, idle] = [1, 2, 3].map(|n| own.take(n * MIB));
    own.record_stream_raw(waits.address(), SIDE).unwrap();
    own.give(waits);
    own.give(idle);
    drop(own);
    assert_eq!(sim.held(), HeldResources::default());
}

#[test]
fn the_fraction_limits_to_a_part_of_the_machines_memory() {
    let (_, own) = pinned("per_process_memory_fraction:0.5");
    let total_bytes = own.caching().cache_info().unwrap().device_total_bytes;
    let limit = own.caching().limit_bytes().expect("the fraction is a limit");
    assert!(limit.abs_diff(total_bytes / 2) <= 1, "{limit} of {total_bytes}");
    let info = stratalloc::system::memory_info().unwrap();
    assert_eq!(total_bytes, info.total_bytes);
}

/// A device without the interface for host memory.
#[test]
fn a_device_without_host_memory_is_refused() {
    #[derive(Debug)]
    struct Hides;
    impl Interceptor for Hides {
        fn parts<'a>(&'a self, _: stratalloc::driver::Parts<'a>) -> stratalloc::driver::Parts<'a> {
            stratalloc::driver::Parts::default()
        }
    }
    let driver = Arc::new(Intercepted::with(device(GIB), Hides));
    assert!(driver.inner().host_node().is_ok());
    let error = PinnedAllocator::new(driver, &Settings::default()).unwrap_err();
    assert_eq!(error.kind(), DriverErrorKind::NotSupported);
}
