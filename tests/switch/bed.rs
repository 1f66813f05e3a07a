//! A switchable allocator on a device that tells what it has given out.

use std::sync::Arc;

use stratalloc::allocator::{Allocation, DeviceAllocator, PoolScope, Request, ScopeFilter};
use stratalloc::config::Config;
use stratalloc::driver::sim::{CallCosts, EventMode, SimOptions};
use stratalloc::driver::{Capture, Driver, Sim};
use stratalloc::ids::{PoolId, StreamId};
use stratalloc::registry::{self, BuildOptions};
use stratalloc::size::GIB;
use stratalloc::switch::Switchable;

pub(crate) const NATIVE: &str = "backend:native";
pub(crate) const EXPANDABLE: &str = "backend:native,expandable_segments:True";
pub(crate) const ASYNC: &str = "backend:cudaMallocAsync";
pub(crate) const FRONT: &str = "backend:native,layers:[front]";
pub(crate) const ALL: [&str; 4] = [NATIVE, EXPANDABLE, ASYNC, FRONT];

/// A device and an allocator on it.
pub(crate) struct Bed {
    pub(crate) sim: Arc<Sim>,
    pub(crate) switchable: Switchable,
}

impl Bed {
    pub(crate) fn new(conf: &str) -> Self {
        Self::with_bytes(conf, 8 * GIB)
    }

    pub(crate) fn with_bytes(conf: &str, total_bytes: u64) -> Self {
        Self::with_options(conf, total_bytes, BuildOptions::default())
    }

    pub(crate) fn with_options(conf: &str, total_bytes: u64, options: BuildOptions) -> Self {
        let (event_mode, costs) = (EventMode::Manual, CallCosts::NONE);
        let sim = SimOptions { total_bytes, event_mode, costs, ..SimOptions::default() };
        let sim = Arc::new(Sim::new(sim));
        let config = Config::parse(conf, &registry::key_table()).expect("a good string");
        let driver: Arc<dyn Driver> = Arc::clone(&sim) as _;
        let switchable = Switchable::build(&config, driver, options).expect("the device can do it");
        Self { sim, switchable }
    }

    pub(crate) fn take(&self, bytes: u64) -> Allocation {
        self.take_on(bytes, StreamId::DEFAULT)
    }

    pub(crate) fn take_on(&self, bytes: u64, stream: StreamId) -> Allocation {
        self.switchable.allocate(Request::new(bytes, stream)).expect("there is room")
    }

    pub(crate) fn give(&self, block: Allocation) {
        self.switchable.free(block).expect("it is live");
    }

    pub(crate) fn switch(&self, conf: &str) {
        self.switchable.switch(conf).expect("a good string");
    }

    /// A scope for a capture that begins on `stream`.
    pub(crate) fn capture(&self, stream: StreamId) -> PoolScope<'_> {
        let capture = Capture::begin(&*self.sim, stream).expect("it is not captured");
        let pools = self.switchable.control().private_pools.expect("there are pools");
        let pool = PoolId::next_capture();
        PoolScope::open(pools, pool, ScopeFilter::Capture(capture)).expect("it is closed")
    }

    /// What the device has given out.
    pub(crate) fn used_bytes(&self) -> u64 {
        let info = self.sim.memory_info().expect("the device works");
        info.total_bytes - info.free_bytes
    }
}
