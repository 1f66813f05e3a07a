//! A device with an allocator on it, and helpers that work with any allocator.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use stratalloc::allocator::{
    Allocation, Caching, Checkpoints, Counters, CrossStream, DeviceAllocator, Expandable, Hooks,
    MemoryPool, PeerAccess, PoolOptions, PoolScope, PrivatePools, Recording, Request, ScopeFilter,
    Sharing,
};
use stratalloc::config::{Config, Settings};
use stratalloc::driver::{Capture, Driver};
use stratalloc::error::{AllocError, OutOfMemory};
use stratalloc::history::{BlockStateName, SegmentLayout};
use stratalloc::ids::{EventId, PoolId, StreamId};
use stratalloc::registry::{self, BuildOptions};
use stratalloc::stats::Statistics;
use stratalloc::strategies::native::Engine;
use stratalloc::strategies::{MallocAsyncAllocator, Strategy};
use stratalloc::switch::Switchable;
use stratalloc_sim::Sim;

use super::base::Base;
use super::invariants;

/// Configurations for fixed and for expandable segments.
pub(crate) const BOTH: [&str; 2] = ["", "expandable_segments:True"];

/// The size of a device that no test fills, in bytes.
pub(crate) const ROOMY: u64 = 16 << 30;

/// The stream of most requests, and two others.
pub(crate) const HOME: StreamId = StreamId::DEFAULT;
pub(crate) const SIDE: StreamId = StreamId(0x40);
pub(crate) const FAR: StreamId = StreamId(0x80);

/// Access to capabilities that the allocator must have, and requests that must succeed.
pub(crate) trait Tested: DeviceAllocator {
    #[track_caller]
    fn caching(&self) -> &dyn Caching {
        self.control().caching.expect("it caches")
    }

    #[track_caller]
    fn counters(&self) -> &dyn Counters {
        self.control().counters.expect("it counts")
    }

    #[track_caller]
    fn cross_stream(&self) -> &dyn CrossStream {
        self.control().cross_stream.expect("it supports several streams")
    }

    #[track_caller]
    fn private_pools(&self) -> &dyn PrivatePools {
        self.control().private_pools.expect("it has private pools")
    }

    #[track_caller]
    fn checkpoints(&self) -> &dyn Checkpoints {
        self.control().checkpoints.expect("it has checkpoints")
    }

    #[track_caller]
    fn expandable(&self) -> &dyn Expandable {
        self.control().expandable.expect("it has expandable segments")
    }

    #[track_caller]
    fn hooks(&self) -> &Hooks {
        self.control().hooks.expect("it has hooks")
    }

    #[track_caller]
    fn sharing(&self) -> &dyn Sharing {
        self.control().sharing.expect("it shares memory")
    }

    #[track_caller]
    fn peer_access(&self) -> &dyn PeerAccess {
        self.control().peer_access.expect("its device has peers")
    }

    #[track_caller]
    fn recording(&self) -> &dyn Recording {
        self.control().recording.expect("it records a history")
    }

    /// Returns the current statistics.
    #[track_caller]
    fn stats(&self) -> Statistics {
        self.counters().statistics()
    }

    fn try_allocate(&self, bytes: u64, stream: StreamId) -> Result<Allocation, AllocError> {
        self.allocate(Request::new(bytes, stream))
    }

    /// Allocates on the default stream.
    #[track_caller]
    fn take(&self, bytes: u64) -> Allocation {
        self.take_on(bytes, HOME)
    }

    #[track_caller]
    fn take_on(&self, bytes: u64, stream: StreamId) -> Allocation {
        self.take_by(Request::new(bytes, stream))
    }

    #[track_caller]
    fn take_in(&self, pool: PoolId, bytes: u64, stream: StreamId) -> Allocation {
        self.take_by(Request::new(bytes, stream).in_pool(pool))
    }

    #[track_caller]
    fn take_by(&self, request: Request) -> Allocation {
        match self.allocate(request) {
            Ok(block) => block,
            Err(error) => panic!("{request:?}: {error}"),
        }
    }

    /// Returns the report of a request that must run out of memory.
    #[track_caller]
    fn fail(&self, bytes: u64, stream: StreamId) -> OutOfMemory {
        match self.try_allocate(bytes, stream) {
            Err(AllocError::OutOfMemory(report)) => *report,
            other => panic!("{bytes} bytes on {stream}: expected out of memory, got {other:?}"),
        }
    }

    #[track_caller]
    fn give(&self, block: Allocation) {
        self.free(block).expect("the block is live");
    }

    /// Adds an observer and returns its count of requests that ran out of memory.
    fn count_ooms(&self) -> Arc<AtomicUsize> {
        let output = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&output);
        self.hooks().add_oom_observer(Arc::new(move |_| {
            count.fetch_add(1, SeqCst);
        }));
        output
    }

    /// Creates a private pool.
    #[track_caller]
    fn pool(&self) -> MemoryPool<'_> {
        MemoryPool::new(self.private_pools(), PoolOptions::default()).expect("its id is new")
    }

    #[track_caller]
    fn record(&self, block: &Allocation, stream: StreamId) {
        self.cross_stream().record_stream(block, stream).expect("the block is live");
    }
}

impl<A: DeviceAllocator + ?Sized> Tested for A {}

/// An allocator that can be built from a configuration. A `Strategy` is built with support for frees by
/// address.
pub(crate) trait Built: DeviceAllocator + Sized {
    fn built(config: &Config, driver: Arc<dyn Driver>) -> Self;
}

impl Built for Strategy {
    fn built(config: &Config, driver: Arc<dyn Driver>) -> Self {
        let options = BuildOptions { raw_addresses: true };
        registry::build(config, driver, options).expect("the device can do it")
    }
}

impl Built for Switchable {
    fn built(config: &Config, driver: Arc<dyn Driver>) -> Self {
        Self::build(config, driver, BuildOptions::default()).expect("the device can do it")
    }
}

impl Built for MallocAsyncAllocator {
    fn built(config: &Config, driver: Arc<dyn Driver>) -> Self {
        Self::new(driver, config.settings()).expect("the device has pools")
    }
}

/// Runs `work` on a new thread.
#[track_caller]
pub(crate) fn on_new_thread<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| scope.spawn(work).join().expect("it does not panic"))
}

/// Parses a configuration string.
#[track_caller]
pub(crate) fn config(conf: &str) -> Config {
    Config::parse(conf, &registry::key_table()).expect(conf)
}

/// A device and an allocator on it. Dereferences to the allocator.
#[derive(Debug)]
pub(crate) struct FixtureOn<D, A = Strategy> {
    pub(crate) device: Arc<D>,
    pub(crate) allocator: A,
}

/// A strategy on the simulated device.
pub(crate) type Fixture = FixtureOn<Sim>;

/// Returns one fixture with fixed segments and one with expandable segments.
pub(crate) fn fixtures(total_bytes: u64) -> impl Iterator<Item = Fixture> {
    BOTH.into_iter().map(move |conf| Fixture::new(total_bytes, conf))
}

impl<D, A> Deref for FixtureOn<D, A> {
    type Target = A;

    fn deref(&self) -> &A {
        &self.allocator
    }
}

impl<D: Base, A: Built> FixtureOn<D, A> {
    /// Creates an allocator on a new device of `total_bytes`. On the simulated and the host device, work
    /// finishes when the test completes it or when a call waits for it.
    #[track_caller]
    pub(crate) fn new(total_bytes: u64, conf: &str) -> Self {
        Self::of(total_bytes, &config(conf))
    }

    /// Like `new`, but from settings instead of a string.
    pub(crate) fn with(total_bytes: u64, settings: Settings) -> Self {
        Self::of(total_bytes, &Config::from_settings(settings))
    }

    fn of(total_bytes: u64, config: &Config) -> Self {
        let device = Arc::new(D::with_bytes(total_bytes));
        let allocator = A::built(config, Arc::clone(&device) as Arc<dyn Driver>);
        Self { device, allocator }
    }

    /// Returns the bytes allocated on the device.
    pub(crate) fn used_bytes(&self) -> u64 {
        self.device.used_bytes()
    }

    pub(crate) fn stream(&self) -> StreamId {
        self.device.create_stream().expect("the device has streams")
    }

    /// Records a new event on a stream.
    pub(crate) fn mark(&self, stream: StreamId) -> EventId {
        let event = self.device.create_event().expect("the device has events");
        self.device.record_event(event, stream).expect("it takes work");
        event
    }

    /// Makes work submitted to `then` from now on wait for the work that `first` has so far.
    pub(crate) fn join(&self, first: StreamId, then: StreamId) {
        let event = self.mark(first);
        self.device.wait_event(then, event).expect("it can wait");
        self.device.destroy_event(event).expect("it exists");
    }

    /// Records a use of a block by another stream and submits work of that stream.
    #[track_caller]
    pub(crate) fn work(&self, block: &Allocation, stream: StreamId) {
        self.record(block, stream);
        self.device.fill(block.address(), 1, block.size_bytes(), stream).expect("it takes work");
    }

    #[track_caller]
    pub(crate) fn empty_cache(&self) {
        self.caching().empty_cache().expect("the device works");
    }

    #[track_caller]
    pub(crate) fn process_events(&self) {
        self.cross_stream().process_events().expect("the device works");
    }

    pub(crate) fn reserved_bytes(&self) -> u64 {
        self.stats().memory_reserved().unsigned_abs()
    }

    pub(crate) fn layout_of(&self, pool: PoolId) -> Vec<SegmentLayout> {
        self.private_pools().pool_layout(pool).expect("it exists")
    }

    /// Returns size and state of every block of a pool, in address order.
    pub(crate) fn blocks_of(&self, pool: PoolId) -> Vec<(u64, BlockStateName)> {
        let layout = self.layout_of(pool);
        let blocks = layout.iter().flat_map(|segment| &segment.blocks);
        blocks.map(|block| (block.size_bytes, block.state)).collect()
    }

    pub(crate) fn layout(&self) -> Vec<SegmentLayout> {
        self.caching().layout()
    }

    /// Returns the sizes of all segments in ascending order.
    pub(crate) fn segment_sizes(&self) -> Vec<u64> {
        let mut sizes: Vec<_> = self.layout().iter().map(|segment| segment.size_bytes).collect();
        sizes.sort_unstable();
        sizes
    }
}

impl<D: Base + Capture, A: Built> FixtureOn<D, A> {
    /// Starts a capture of a stream, and opens a scope that routes the capture's requests to a pool.
    #[track_caller]
    pub(crate) fn capture(&self, stream: StreamId, pool: PoolId) -> PoolScope<'_> {
        let capture = Capture::begin(&*self.device, stream).expect("it is not captured");
        let filter = ScopeFilter::Capture(capture);
        PoolScope::open(self.private_pools(), pool, filter).expect("it is closed")
    }

    #[track_caller]
    pub(crate) fn end_capture(&self, stream: StreamId) {
        Capture::end(&*self.device, stream).expect("all streams were joined");
    }
}

impl<D: Base> FixtureOn<D> {
    pub(crate) fn engine(&self) -> &Engine {
        self.allocator.engine().expect("it was built on the engine")
    }

    /// Checks every invariant of `invariants` and returns the layout.
    ///
    /// # Errors
    ///
    /// The first invariant that does not hold.
    pub(crate) fn checked(&self) -> Result<Vec<SegmentLayout>, String> {
        invariants::check_all(self.engine(), self.used_bytes() - self.engine().unreleased_bytes())
    }

    #[track_caller]
    pub(crate) fn check(&self) {
        drop(self.checked().expect("every invariant holds"));
    }
}
