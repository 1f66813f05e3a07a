//! Every wrapper hands every method through unchanged.
//!
//! A method that a wrapper forgets would silently answer with the trait's default. Two checks: a
//! witness whose answers cannot be defaults is asked through every wrapper, and the trait's text is
//! compared with the macro that writes the wrappers, so that a new method cannot be forgotten.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use stratalloc::allocator::{
    Allocation, BaseAllocation, CacheInfo, Caching, Checkpoints, Counters, CrossStream,
    DeviceAllocator, Expandable, ExpandableSegment, Freed, Hooks, Imported, PeerAccess, Place,
    PoolCheckpoint, PoolOptions, PrivatePools, RawAddresses, Recording, Request, Restored,
    ScopeFilter, Sharing, Token,
};
use stratalloc::config::{Config, FaultSetting, LayerSetting, Settings};
use stratalloc::driver::sim::SimOptions;
use stratalloc::driver::{Driver, Sim};
use stratalloc::error::{
    AllocError, DriverError, FractionError, FreeError, HandleError, PoolError,
};
use stratalloc::history::{History, SegmentLayout, Snapshot};
use stratalloc::ids::{DeviceId, OwnerId, PoolId, StreamId};
use stratalloc::layers;
use stratalloc::registry::{self, BuildOptions};
use stratalloc::sharing::{SharedHandle, SharingError};
use stratalloc::stats::{Statistics, Usage};
use stratalloc::strategies::{CpuAllocator, Strategy};
use stratalloc::switch::Switchable;

use crate::common::racing::racing;

/// Answers everything in a way of its own, and counts what changes nothing else.
#[derive(Debug)]
struct Witness {
    owner: OwnerId,
    heard: AtomicU64,
    hooks: Hooks,
    history: Arc<History>,
}

impl Witness {
    fn new() -> Self {
        Self {
            owner: OwnerId::next(),
            heard: AtomicU64::new(0),
            hooks: Hooks::new(),
            history: Arc::default(),
        }
    }

    /// Each call without an answer leaves its own mark.
    fn hear(&self, mark: u64) {
        self.heard.fetch_add(1 << (4 * mark), Ordering::Relaxed);
    }
}

impl DeviceAllocator for Witness {
    fn allocate(&self, request: Request) -> Result<Allocation, AllocError> {
        let Request { bytes, stream, place, .. } = request;
        let address = match place {
            Place::Pool(pool) => stream.0 + pool.user,
            Place::Address(address) => address,
            Place::Anywhere => stream.0 + 7,
        };
        Ok(Allocation::new(address, bytes + 1, self.owner, Token([11, 12, 13])))
    }

    fn free(&self, allocation: Allocation) -> Result<(), FreeError> {
        let reason = HandleError::UnknownAddress { address: allocation.address() + 1 };
        Err(FreeError { reason, allocation })
    }

    fn name(&self) -> &str {
        "witness"
    }

    fn cross_stream(&self) -> Option<&dyn CrossStream> {
        Some(self)
    }

    fn caching(&self) -> Option<&dyn Caching> {
        Some(self)
    }

    fn counters(&self) -> Option<&dyn Counters> {
        Some(self)
    }

    fn raw_addresses(&self) -> Option<&dyn RawAddresses> {
        Some(self)
    }

    fn hooks(&self) -> Option<&Hooks> {
        Some(&self.hooks)
    }

    fn private_pools(&self) -> Option<&dyn PrivatePools> {
        Some(self)
    }

    fn checkpoints(&self) -> Option<&dyn Checkpoints> {
        Some(self)
    }

    fn expandable(&self) -> Option<&dyn Expandable> {
        Some(self)
    }

    fn peer_access(&self) -> Option<&dyn PeerAccess> {
        Some(self)
    }

    fn sharing(&self) -> Option<&dyn Sharing> {
        Some(self)
    }

    fn recording(&self) -> Option<&dyn Recording> {
        Some(self)
    }
}

impl Recording for Witness {
    fn history(&self) -> &Arc<History> {
        &self.history
    }

    fn snapshot(&self) -> Snapshot {
        self.hear(12);
        Snapshot::default()
    }
}

impl Sharing for Witness {
    fn share(&self, allocation: &Allocation) -> Result<SharedHandle, SharingError> {
        Err(SharingError::NotExportable { address: allocation.address() })
    }

    fn share_raw(&self, address: u64) -> Result<SharedHandle, SharingError> {
        Err(SharingError::NotExportable { address: address + 54 })
    }

    fn open(&self, _: &SharedHandle) -> Result<Imported, SharingError> {
        Err(SharingError::OwnProcess)
    }
}

impl PeerAccess for Witness {
    fn enable_peer_access(&self, _: DeviceId) -> Result<(), DriverError> {
        self.hear(11);
        Ok(())
    }

    fn peers(&self) -> Vec<DeviceId> {
        vec![DeviceId(61)]
    }
}

impl CrossStream for Witness {
    fn record_stream(&self, _: &Allocation, stream: StreamId) -> Result<(), HandleError> {
        Err(HandleError::Stale { address: stream.0 })
    }

    fn process_events(&self) -> Result<(), DriverError> {
        self.hear(0);
        Ok(())
    }
}

impl Caching for Witness {
    fn empty_cache(&self) -> Result<(), DriverError> {
        self.hear(1);
        Ok(())
    }

    fn set_limit_bytes(&self, _: Option<u64>) {
        self.hear(2);
    }

    fn set_memory_fraction(&self, fraction: f64) -> Result<(), FractionError> {
        Err(FractionError { fraction })
    }

    fn limit_bytes(&self) -> Option<u64> {
        Some(21)
    }

    fn apply(&self, _: &Config) -> Result<(), DriverError> {
        self.hear(3);
        Ok(())
    }

    fn cache_info(&self) -> Result<CacheInfo, DriverError> {
        Ok(CacheInfo {
            device_free_bytes: 31,
            device_total_bytes: 32,
            largest_cached_bytes: 33,
            free_blocks: 34,
            free_block_bytes: 35,
        })
    }

    fn layout(&self) -> Vec<SegmentLayout> {
        self.hear(4);
        Vec::new()
    }

    fn base_allocation(&self, allocation: &Allocation) -> Result<BaseAllocation, HandleError> {
        let (address, size_bytes) = (allocation.address(), allocation.size_bytes());
        Ok(BaseAllocation { address, size_bytes, expandable: true })
    }
}

impl Expandable for Witness {
    fn expandable_segments(&self) -> Vec<ExpandableSegment> {
        self.hear(9);
        Vec::new()
    }

    fn set_reserve_class(&self, _: StreamId, _: Option<&str>) {
        self.hear(10);
    }
}

impl PrivatePools for Witness {
    fn create_pool(&self, pool: PoolId, _: PoolOptions) -> Result<(), PoolError> {
        Err(PoolError::Taken { pool })
    }

    fn set_pool_options(
        &self,
        pool: PoolId,
        use_on_oom: bool,
        no_split: bool,
    ) -> Result<(), PoolError> {
        if use_on_oom && !no_split { Err(PoolError::Released { pool }) } else { Ok(()) }
    }

    fn retain_pool(&self, pool: PoolId) -> Result<(), PoolError> {
        Err(PoolError::Unknown { pool })
    }

    fn release_pool(&self, pool: PoolId) -> Result<(), PoolError> {
        Err(PoolError::Released { pool })
    }

    fn pool_users(&self, pool: PoolId) -> Option<u32> {
        u32::try_from(pool.user + 61).ok()
    }

    fn open_scope(&self, pool: PoolId, _: ScopeFilter) -> Result<(), PoolError> {
        Err(PoolError::ScopeOpen { pool })
    }

    fn close_scope(&self, pool: PoolId) -> Result<(), PoolError> {
        Err(PoolError::ScopeClosed { pool })
    }

    fn empty_pool(&self, _: PoolId) -> Result<(), PoolError> {
        Err(PoolError::IsDefault)
    }

    fn live_addresses(&self, pool: PoolId) -> Result<Vec<u64>, PoolError> {
        Ok(vec![pool.user])
    }

    fn pool_layout(&self, pool: PoolId) -> Result<Vec<SegmentLayout>, PoolError> {
        Err(PoolError::Unknown { pool })
    }
}

impl Checkpoints for Witness {
    fn checkpoint(&self, pool: PoolId) -> Result<PoolCheckpoint, PoolError> {
        Ok(PoolCheckpoint { pool, segments: Vec::new() })
    }

    fn restore(&self, checkpoint: &PoolCheckpoint) -> Result<Restored, PoolError> {
        let freed = Freed { address: checkpoint.pool.user, size_bytes: 64 };
        Ok(Restored { freed: vec![freed], live: Vec::new() })
    }
}

impl Counters for Witness {
    fn statistics(&self) -> Statistics {
        Statistics { num_ooms: 41, ..Statistics::default() }
    }

    fn usage(&self) -> Usage {
        Usage { reserved_bytes: 42, ..Usage::default() }
    }

    fn reset_peaks(&self) {
        self.hear(5);
    }

    fn reset_accumulated(&self) {
        self.hear(6);
    }
}

impl RawAddresses for Witness {
    fn free_raw(&self, address: u64) -> Result<u64, HandleError> {
        match address {
            0 => Ok(51),
            _ => Err(HandleError::UnknownAddress { address: address + 52 }),
        }
    }

    fn record_stream_raw(&self, address: u64, stream: StreamId) -> Result<(), HandleError> {
        Err(HandleError::UnknownAddress { address: address + stream.0 + 53 })
    }
}

/// Asks every method of `through`, which wraps `witness`. Generic, so that the wrapper's own impl is
/// asked and not what it dereferences to.
#[expect(clippy::unwrap_used, reason = "a part of tests, which may unwrap")]
fn answers_come_through<A: DeviceAllocator>(through: &A, witness: &Witness) {
    answers_with_handles_come_through(through, witness);
    let raw = through.raw_addresses().unwrap();
    assert_eq!(raw.free_raw(0), Ok(51));
    assert_eq!(raw.free_raw(1), Err(HandleError::UnknownAddress { address: 53 }));
    let unknown = Err(HandleError::UnknownAddress { address: 114 });
    assert_eq!(raw.record_stream_raw(1, StreamId(60)), unknown);
}

#[expect(clippy::unwrap_used, reason = "a part of tests, which may unwrap")]
fn answers_with_handles_come_through<A: DeviceAllocator>(through: &A, witness: &Witness) {
    let (side, marked) = (StreamId(60), 0x1_1110_0111_1111);
    witness.heard.store(0, Ordering::Relaxed);

    let allocation = through.allocate(Request::new(5, side)).unwrap();
    let expected = || Allocation::new(67, 6, witness.owner, Token([11, 12, 13]));
    assert_eq!(allocation, expected());
    let crossing = through.cross_stream().unwrap();
    let stale = Err(HandleError::Stale { address: 60 });
    assert_eq!(crossing.record_stream(&allocation, side), stale);
    crossing.process_events().unwrap();
    let base = through.caching().unwrap().base_allocation(&allocation).unwrap();
    assert_eq!(base, BaseAllocation { address: 67, size_bytes: 6, expandable: true });
    let shared = through.sharing().unwrap().share(&allocation);
    assert_eq!(shared, Err(SharingError::NotExportable { address: 67 }));
    let refused = through.free(allocation).unwrap_err();
    assert_eq!(refused.reason, HandleError::UnknownAddress { address: 68 });
    assert_eq!(refused.allocation, expected());
    assert_eq!(through.name(), "witness");

    let caching = through.caching().unwrap();
    caching.empty_cache().unwrap();
    caching.set_limit_bytes(None);
    assert_eq!(caching.set_memory_fraction(0.25), Err(FractionError { fraction: 0.25 }));
    assert_eq!(caching.limit_bytes(), Some(21));
    caching.apply(&Config::default()).expect("the witness can");
    assert_eq!(caching.cache_info().unwrap().free_blocks, 34);
    assert_eq!(caching.layout(), []);
    assert_eq!(through.allocate(Request::new(5, side).at(512)).unwrap().address(), 512);
    let expandable = through.expandable().expect("it has segments that grow");
    assert_eq!(expandable.expandable_segments(), []);
    expandable.set_reserve_class(side, None);

    let pools = through.private_pools().unwrap();
    let pool = PoolId { capture: 0, user: 8 };
    let scope = ScopeFilter::Stream(side);
    assert_eq!(pools.create_pool(pool, PoolOptions::default()), Err(PoolError::Taken { pool }));
    assert_eq!(pools.retain_pool(pool), Err(PoolError::Unknown { pool }));
    assert_eq!(pools.release_pool(pool), Err(PoolError::Released { pool }));
    assert_eq!(pools.pool_users(pool), Some(69));
    assert_eq!(pools.open_scope(pool, scope), Err(PoolError::ScopeOpen { pool }));
    assert_eq!(pools.close_scope(pool), Err(PoolError::ScopeClosed { pool }));
    assert_eq!(pools.set_pool_options(pool, true, false), Err(PoolError::Released { pool }));
    assert_eq!(pools.set_pool_options(pool, false, true), Ok(()));
    let inside = through.allocate(Request::new(5, side).in_pool(pool)).unwrap();
    assert_eq!(inside.address(), 68);
    assert_eq!(pools.empty_pool(pool), Err(PoolError::IsDefault));
    assert_eq!(pools.live_addresses(pool), Ok(vec![8]));
    assert_eq!(pools.pool_layout(pool), Err(PoolError::Unknown { pool }));
    let checkpoints = through.checkpoints().expect("it has checkpoints");
    let checkpoint = checkpoints.checkpoint(pool).unwrap();
    let freed = Freed { address: 8, size_bytes: 64 };
    assert_eq!(checkpoints.restore(&checkpoint).unwrap().freed, [freed]);

    let counters = through.counters().unwrap();
    assert_eq!(counters.statistics().num_ooms, 41);
    assert_eq!(counters.usage().reserved_bytes, 42);
    counters.reset_peaks();
    counters.reset_accumulated();

    assert!(std::ptr::eq(through.hooks().unwrap(), &raw const witness.hooks));
    let recording = through.recording().expect("it records");
    assert!(Arc::ptr_eq(recording.history(), &witness.history));
    assert!(recording.snapshot().segments.is_empty());
    let peers = through.peer_access().unwrap();
    peers.enable_peer_access(DeviceId(3)).unwrap();
    assert_eq!(peers.peers(), [DeviceId(61)]);
    assert_eq!(witness.heard.load(Ordering::Relaxed), marked, "each silent call was heard once");
}

#[test]
fn every_wrapper_hands_every_method_through() {
    let witness = Arc::new(Witness::new());
    let held = || Arc::clone(&witness);
    answers_come_through(&*witness, &witness);
    answers_come_through(&held(), &witness);
    answers_come_through(&Box::new(held()), &witness);
    answers_come_through(&Arc::new(Box::new(held())), &witness);
    let boxed: Box<dyn DeviceAllocator> = Box::new(held());
    answers_come_through(&boxed, &witness);
    let shared: Arc<dyn DeviceAllocator> = Arc::new(boxed);
    answers_come_through(&shared, &witness);
    let nested: Box<dyn DeviceAllocator> = Box::new(shared);
    let strategy = Strategy::from(nested);
    assert!(strategy.engine().is_none());
    answers_come_through(&strategy, &witness);
    answers_come_through(&Box::new(Arc::new(strategy)), &witness);
}

/// Layers do their work and change nothing else; those that move blocks or keep them are asked with
/// nothing to do.
#[test]
fn every_layer_hands_every_method_through() {
    let witness = Arc::new(Witness::new());
    let held = || Arc::clone(&witness);
    let driver = || -> Arc<dyn Driver> { Arc::new(Sim::new(SimOptions::default())) };
    answers_come_through(&layers::limit::limit(held(), 1 << 20), &witness);
    answers_come_through(&layers::statistics::statistics(held()), &witness);
    answers_come_through(&layers::track::track_to(held(), Box::new(|_| {})), &witness);
    let when = FaultSetting { call: Some(u64::MAX), ..FaultSetting::default() };
    answers_come_through(&layers::fault::fault(held(), when), &witness);
    answers_come_through(&layers::oom_retry::retry(held(), 3), &witness);
    answers_come_through(&layers::align::align(held(), 512, 512), &witness);
    answers_with_handles_come_through(&layers::front::front(held(), 0), &witness);
    let path = std::env::temp_dir().join(format!("forwarding-{}.csv", std::process::id()));
    answers_come_through(&layers::log::log(held(), &path).unwrap(), &witness);
    let list = [
        LayerSetting::Statistics,
        LayerSetting::Limit { bytes: 1 << 20 },
        LayerSetting::Fault(when),
        LayerSetting::OomRetry { times: 3 },
        LayerSetting::Align { bytes: 512 },
    ];
    let layered = layers::wrap(Box::new(held()), &list, &driver(), 512).unwrap();
    answers_come_through(&Strategy::from(layered), &witness);
    let fronted = layers::front::front(Box::new(held()) as Box<dyn DeviceAllocator>, 0);
    let fronted = Strategy::from(fronted);
    assert!(fronted.engine().is_none());
    answers_with_handles_come_through(&fronted, &witness);
    assert!(fronted.raw_addresses().is_none());
    std::fs::remove_file(&path).unwrap();
}

/// The driver is called under the growth lock, and another thread calls `usage()` during that call. If it
/// waited for the lock, this test would wait without end.
#[test]
fn usage_waits_for_no_call_of_the_driver_whatever_the_layer() {
    let path = std::env::temp_dir().join(format!("usage-{}.csv", std::process::id()));
    let log = format!("log:\"{}\"", path.display());
    let layers = ["", "statistics", "track", &log, "fault:[probability:0]", "oom_retry:1", "front"];
    for layers in layers.iter().chain(&["align:4KiB", "limit:1GiB", "statistics,limit:1GiB,track"])
    {
        let device = racing(1 << 30);
        let text = format!("backend:native,layers:[{layers}]");
        let config = Config::parse(&text, &registry::key_table()).unwrap();
        let built = Switchable::build(&config, Arc::clone(&device) as _, BuildOptions::default());
        let allocator = Arc::new(built.unwrap());
        let (found, own) = (Arc::new(OnceLock::new()), Arc::clone(&allocator));
        let seen = Arc::clone(&found);
        device.interceptor().next("allocate", move || {
            let usage = move || own.counters().unwrap().usage();
            seen.set(std::thread::spawn(usage).join().unwrap()).unwrap();
        });
        let block = allocator.allocate(Request::new(4096, StreamId::DEFAULT)).unwrap();
        assert_eq!(found.get().unwrap().reserved_bytes, 0, "{layers}");
        let usage = allocator.counters().unwrap().usage();
        assert_eq!(usage, Usage::of(&allocator.counters().unwrap().statistics()), "{layers}");
        assert_eq!(usage.reserved_bytes, 2 << 20, "{layers}");
        allocator.free(block).unwrap();
    }
    std::fs::remove_file(&path).unwrap();
}

/// What names blocks below by their address is absent above a layer that moves them; the rest is there.
#[test]
fn a_layer_that_moves_blocks_hides_what_would_name_the_wrong_ones() {
    let moved = layers::align::align(Witness::new(), 4096, 1);
    assert!(moved.private_pools().is_none() && moved.sharing().is_none());
    assert!(moved.cross_stream().is_some() && moved.caching().is_some());
    assert!(moved.counters().is_some() && moved.raw_addresses().is_some());
    assert!(moved.hooks().is_some() && moved.peer_access().is_some());
    assert_eq!(moved.name(), "witness");
}

#[test]
fn a_registered_allocator_comes_through_the_registry_unchanged() {
    let witness = Arc::new(Witness::new());
    let registered = Arc::clone(&witness);
    registry::register("witness", move |_, _| Ok(Box::new(Arc::clone(&registered)))).unwrap();
    let settings = Settings { backend: "witness".to_owned(), ..Settings::default() };
    let driver: Arc<dyn Driver> = Arc::new(Sim::new(SimOptions::default()));
    let built =
        registry::build(&Config::from_settings(settings), driver, BuildOptions::default()).unwrap();
    answers_come_through(&built, &witness);
}

/// The smallest allocator there is: everything else must be absent, through wrappers too.
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
        assert!(least.cross_stream().is_none() && least.caching().is_none());
        assert!(least.counters().is_none() && least.raw_addresses().is_none());
        assert!(least.hooks().is_none() && least.peer_access().is_none());
        assert!(least.sharing().is_none() && least.private_pools().is_none());
    }
    is_bare(&Least);
    let boxed: Box<dyn DeviceAllocator> = Box::new(Arc::new(Least));
    is_bare(&boxed);
    is_bare(&Strategy::from(boxed));
    is_bare(&layers::limit::limit(Least, 1));
    is_bare(&layers::oom_retry::retry(Least, 1));
    is_bare(&layers::align::align(Least, 4096, 1));
    is_bare(&layers::front::front(Least, 4096));
}

/// Names of the functions between `from` and the first later line that is `to`.
fn functions(text: &str, from: &str, to: &str) -> Vec<String> {
    let inside = text.lines().skip_while(|line| !line.starts_with(from));
    let lines = inside.take_while(|line| *line != to);
    let named = lines.filter_map(|line| line.trim_start().strip_prefix("fn "));
    named
        .map(|rest| rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect())
        .collect()
}

#[test]
fn the_macro_forwards_exactly_the_methods_of_the_trait_and_the_witness_overrides_them() {
    let trait_text = include_str!("../src/allocator/mod.rs");
    let methods = functions(trait_text, "pub trait DeviceAllocator", "}");
    assert!(methods.len() >= 8, "{methods:?}");
    assert_eq!(functions(trait_text, "macro_rules! forward_device_allocator", "}"), methods);
    let here = include_str!("forwarding.rs");
    assert_eq!(functions(here, "impl DeviceAllocator for Witness", "}"), methods);
}

#[test]
fn the_comparison_sees_a_forgotten_method() {
    let text = "pub trait T {\n    fn a(&self);\n    fn b(&self) {}\n}\nmacro_rules! m {\n    (x) => {\n        fn a(&$s) {}\n    };\n}\n";
    assert_eq!(functions(text, "pub trait T", "}"), ["a", "b"]);
    assert_eq!(functions(text, "macro_rules! m", "}"), ["a"]);
}

/// Who has no private pools and cannot cut a block at an address says so.
#[test]
fn places_that_an_allocator_does_not_know_are_refused() {
    let own = CpuAllocator::new(DeviceId(0), &Settings::default()).expect("the host has memory");
    let pool = PoolId::next_user();
    let request = Request::new(4096, StreamId::DEFAULT);
    let refused = own.allocate(request.in_pool(pool)).unwrap_err();
    assert!(matches!(&refused, AllocError::Pool(of) if **of == PoolError::Unknown { pool }));
    let refused = own.allocate(request.at(1 << 20)).unwrap_err();
    assert!(matches!(refused, AllocError::NoBlockAt { address, .. } if address == 1 << 20));
    let block = own.allocate(request.in_pool(PoolId::DEFAULT)).unwrap();
    own.free(block).unwrap();
}
