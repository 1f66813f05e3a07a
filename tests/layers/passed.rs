//! Capabilities that a layer passes on from the allocator below, and capabilities that a layer hides.

use stratalloc::config::{FaultSetting, LayerSetting};
use stratalloc::layers::{self, align, front, limit, oom_retry};
use stratalloc::stats::Usage;

use super::fixture::{DEFAULT, native, sim};
use crate::common::prelude::*;
use crate::common::racing::racing;

/// Returns, for each capability, whether it is present.
fn present(control: &Control<'_>) -> [bool; 11] {
    [
        control.cross_stream.is_some(),
        control.caching.is_some(),
        control.counters.is_some(),
        control.by_address,
        control.hooks.is_some(),
        control.private_pools.is_some(),
        control.checkpoints.is_some(),
        control.expandable.is_some(),
        control.peer_access.is_some(),
        control.sharing.is_some(),
        control.recording.is_some(),
    ]
}

/// Allocates a block and frees it by its address. Checks that name and counters are those of the native
/// strategy.
fn passes_on(layered: &impl DeviceAllocator, what: &str) {
    assert_eq!(layered.name(), "native", "{what}");
    let address = layered.take_on(4096, DEFAULT).address();
    layered.record_stream_raw(address, StreamId(7)).expect("it is live");
    let usage = layered.usage();
    assert_eq!((usage.live_blocks, usage.reserved_bytes), (1, 2 << 20), "{what}");
    assert_eq!(usage, Usage::of(&layered.stats()), "{what}");
    assert_eq!(layered.free_raw(address), Ok(4096), "{what}");
    let unknown = HandleError::UnknownAddress { address };
    assert_eq!(layered.free_raw(address), Err(unknown), "{what}");
}

#[test]
fn every_layer_passes_on_what_the_allocator_below_can_do() {
    let path = std::env::temp_dir().join(format!("passed-{}.csv", std::process::id()));
    let when = FaultSetting { call: Some(u64::MAX), ..FaultSetting::default() };
    let settings = [
        LayerSetting::Statistics,
        LayerSetting::Limit { bytes: 1 << 20 },
        LayerSetting::Track,
        LayerSetting::Log { path: path.display().to_string() },
        LayerSetting::Fault(when),
        LayerSetting::OomRetry { times: 3 },
        LayerSetting::Align { bytes: 512 },
    ];
    let lists = settings.iter().map(std::slice::from_ref).chain([&settings[..]]);
    for list in lists {
        let device = sim();
        let driver = Arc::clone(&device) as Arc<dyn Driver>;
        let layered = layers::wrap(Box::new(native(&device, true)), list, &driver, 512).unwrap();
        let what = format!("{list:?}");
        assert_eq!(
            present(&layered.control()),
            present(&native(&device, true).control()),
            "{what}"
        );
        passes_on(&layered, &what);
        passes_on(&Strategy::from(layered), &what);
    }
    passes_on(&Arc::new(native(&sim(), true)), "Arc");
    std::fs::remove_file(&path).unwrap();
}

/// A layer that moves blocks hides the capabilities that use addresses of blocks below. The `front` layer
/// hides frees by address. All other capabilities are present.
#[test]
fn a_layer_that_moves_blocks_hides_what_would_name_the_wrong_ones() {
    let own = native(&sim(), true);
    let expected = own.control();
    let moved = align::align(native(&sim(), true), 4096, 1);
    let mut without = expected;
    (without.private_pools, without.checkpoints, without.sharing) = (None, None, None);
    assert_eq!(present(&moved.control()), present(&without));
    passes_on(&moved, "align");
    let fronted = front::front(native(&sim(), true), 4096);
    let mut without = expected;
    without.by_address = false;
    assert_eq!(present(&fronted.control()), present(&without));
}

/// The strategy holds its growth lock while it calls the driver. During that call another thread calls
/// `usage()`. If `usage` waited for the lock, this test would hang.
#[test]
fn usage_waits_for_no_call_of_the_driver_whatever_the_layer() {
    let path = std::env::temp_dir().join(format!("usage-{}.csv", std::process::id()));
    let log = format!("log:\"{}\"", path.display());
    let layers = ["", "statistics", "track", &log, "fault:[probability:0]", "oom_retry:1", "front"];
    for layers in layers.iter().chain(&["align:4KiB", "limit:1GiB", "statistics,limit:1GiB,track"])
    {
        let device = racing(1 << 30);
        let text = format!("backend:native,layers:[{layers}]");
        let config = config(&text);
        let built = Switchable::build(&config, Arc::clone(&device) as _, BuildOptions::default());
        let allocator = Arc::new(built.unwrap());
        let (found, own) = (Arc::new(OnceLock::new()), Arc::clone(&allocator));
        let seen = Arc::clone(&found);
        device.interceptor().next("allocate", move || {
            let usage = move || own.usage();
            seen.set(std::thread::spawn(usage).join().unwrap()).unwrap();
        });
        let block = allocator.take(4096);
        assert_eq!(found.get().unwrap().reserved_bytes, 0, "{layers}");
        let usage = allocator.usage();
        assert_eq!(usage, Usage::of(&allocator.stats()), "{layers}");
        assert_eq!(usage.reserved_bytes, 2 << 20, "{layers}");
        allocator.give(block);
    }
    std::fs::remove_file(&path).unwrap();
}

/// The smallest allocator, which has no capabilities. Wrappers must not add any.
#[derive(Debug)]
struct Least;

impl DeviceAllocator for Least {
    fn allocate(&self, _: Request) -> Result<Allocation, AllocError> {
        Err(AllocError::ZeroBytes)
    }

    fn free(&self, _: Allocation) -> Result<(), FreeError> {
        Ok(())
    }
}

#[test]
fn what_an_allocator_cannot_do_stays_absent_through_wrappers() {
    fn is_bare<A: DeviceAllocator>(least: &A) {
        assert_eq!(least.name(), "user");
        assert_eq!(present(&least.control()), [false; 11]);
        assert_eq!(least.usage(), Usage::default());
        assert_eq!(least.free_raw(512), Err(HandleError::UnknownAddress { address: 512 }));
    }
    is_bare(&Least);
    let boxed: Box<dyn DeviceAllocator> = Box::new(Arc::new(Least));
    is_bare(&boxed);
    is_bare(&Strategy::from(boxed));
    is_bare(&limit::limit(Least, 1));
    is_bare(&oom_retry::retry(Least, 1));
    is_bare(&align::align(Least, 4096, 1));
    is_bare(&front::front(Least, 4096));
}

/// An allocator without private pools and exact addresses must refuse a request for a pool or an address.
#[test]
fn places_that_an_allocator_does_not_know_are_refused() {
    let own = CpuAllocator::new(DeviceId(0), &Settings::default()).expect("the host has memory");
    let pool = PoolId::next_user();
    let request = Request::new(4096, StreamId::DEFAULT);
    let refused = own.allocate(request.in_pool(pool)).unwrap_err();
    assert!(matches!(&refused, AllocError::Pool(of) if **of == PoolError::Unknown { pool }));
    let refused = own.allocate(request.at(1 << 20)).unwrap_err();
    assert!(matches!(refused, AllocError::NoBlockAt { address, .. } if address == 1 << 20));
    own.give(own.allocate(request.in_pool(PoolId::DEFAULT)).unwrap());
}
