//! A device and an allocator for one test, with captures.

use std::sync::Arc;

use stratalloc::allocator::{
    Allocation, Checkpoints, Counters, CrossStream, DeviceAllocator, PoolScope, PrivatePools,
    Request, ScopeFilter,
};
use stratalloc::config::{Config, KeyTable};
use stratalloc::driver::sim::{CallCosts, EventMode, SimOptions};
use stratalloc::driver::{Capture, Driver, Sim};
use stratalloc::error::{AllocError, OutOfMemory};
use stratalloc::history::{BlockStateName, SegmentLayout};
use stratalloc::ids::{PoolId, StreamId};
use stratalloc::registry::{BuildOptions, build};
use stratalloc::stats::Statistics;
use stratalloc::strategies::Strategy;
use stratalloc::strategies::native::Engine;

use crate::common::law;

/// Both kinds of segments.
pub(crate) const BOTH: [&str; 2] = ["", "expandable_segments:True"];

/// Bytes of a device that nobody fills.
pub(crate) const ROOMY: u64 = 16 << 30;

pub(crate) struct Bed {
    pub(crate) sim: Arc<Sim>,
    pub(crate) strategy: Strategy,
}

impl Bed {
    pub(crate) fn new(total_bytes: u64, conf: &str) -> Self {
        let config = Config::parse(conf, &KeyTable::default()).expect("a legal string");
        let sim = Arc::new(Sim::new(SimOptions {
            total_bytes,
            event_mode: EventMode::Manual,
            costs: CallCosts::NONE,
            ..SimOptions::default()
        }));
        let driver: Arc<dyn Driver> = Arc::<Sim>::clone(&sim);
        let strategy = build(&config, driver, BuildOptions { raw_addresses: true })
            .expect("sim can do everything");
        Self { sim, strategy }
    }

    pub(crate) fn engine(&self) -> &Engine {
        self.strategy.engine().expect("built on the engine")
    }

    pub(crate) fn checkpoints(&self) -> &dyn Checkpoints {
        self.strategy.control().checkpoints.expect("the engine has checkpoints")
    }

    pub(crate) fn pools(&self) -> &dyn PrivatePools {
        self.strategy.control().private_pools.expect("the engine has pools")
    }

    pub(crate) fn stream(&self) -> StreamId {
        self.sim.create_stream().expect("sim has streams")
    }

    #[track_caller]
    pub(crate) fn take(&self, bytes: u64, stream: StreamId) -> Allocation {
        self.strategy.allocate(Request::new(bytes, stream)).expect("it fits")
    }

    #[track_caller]
    pub(crate) fn fail(&self, bytes: u64, stream: StreamId) -> OutOfMemory {
        match self.strategy.allocate(Request::new(bytes, stream)) {
            Err(AllocError::OutOfMemory(report)) => *report,
            other => panic!("{bytes} bytes on {stream}: expected out of memory, got {other:?}"),
        }
    }

    #[track_caller]
    pub(crate) fn give(&self, block: Allocation) {
        self.strategy.free(block).expect("it is live");
    }

    #[track_caller]
    pub(crate) fn record(&self, block: &Allocation, stream: StreamId) {
        let others: &dyn CrossStream =
            self.strategy.control().cross_stream.expect("it knows streams");
        others.record_stream(block, stream).expect("it is live");
    }

    /// Uses a block on another stream than its own.
    #[track_caller]
    pub(crate) fn work(&self, block: &Allocation, stream: StreamId) {
        self.record(block, stream);
        self.sim.fill(block.address(), 1, block.size_bytes(), stream).expect("it takes work");
    }

    /// Starts a capture on a stream, into a pool.
    #[track_caller]
    pub(crate) fn capture(&self, stream: StreamId, pool: PoolId) -> PoolScope<'_> {
        let capture = Capture::begin(&*self.sim, stream).expect("it is not captured");
        PoolScope::open(self.pools(), pool, ScopeFilter::Capture(capture)).expect("it is closed")
    }

    pub(crate) fn end_capture(&self, stream: StreamId) {
        Capture::end(&*self.sim, stream).expect("all streams were joined");
    }

    /// Makes later work of `then` wait for what `first` has been given.
    pub(crate) fn join(&self, first: StreamId, then: StreamId) {
        let event = self.sim.create_event().expect("sim has events");
        self.sim.record_event(event, first).expect("it takes work");
        self.sim.wait_event(then, event).expect("it can wait");
        self.sim.destroy_event(event).expect("it exists");
    }

    pub(crate) fn empty_cache(&self) {
        self.engine().empty_cache().expect("sim takes back");
    }

    pub(crate) fn statistics(&self) -> Statistics {
        self.engine().statistics()
    }

    pub(crate) fn layout_of(&self, pool: PoolId) -> Vec<SegmentLayout> {
        self.pools().pool_layout(pool).expect("it exists")
    }

    /// Size and state of every block of a pool, in address order.
    pub(crate) fn blocks_of(&self, pool: PoolId) -> Vec<(u64, BlockStateName)> {
        let layout = self.layout_of(pool);
        let blocks = layout.iter().flat_map(|segment| &segment.blocks);
        blocks.map(|block| (block.size_bytes, block.state)).collect()
    }

    pub(crate) fn reserved_bytes(&self) -> u64 {
        self.statistics().memory_reserved().unsigned_abs()
    }

    #[track_caller]
    pub(crate) fn check(&self) {
        let info = self.sim.memory_info().expect("sim answers");
        let used = info.total_bytes - info.free_bytes - self.engine().unreleased_bytes();
        law::check_all(self.engine(), used).expect("every law holds");
    }
}
