//! Simulated devices for replays. Their counters supply figures that a strategy does not count itself.

use std::sync::Arc;

use stratalloc::allocator::DeviceAllocator;
use stratalloc::layers;
use stratalloc::stats::Statistics;
use stratalloc::strategies::Strategy;
use stratalloc_sim::{EventMode, Sim, SimOptions};

/// Opens a simulated device of `total_bytes`, by default of an H200's size. `event_mode` decides when its
/// CUDA events complete.
pub fn open_sim(total_bytes: Option<u64>, event_mode: EventMode) -> Arc<Sim> {
    let total_bytes = total_bytes.unwrap_or(SimOptions::default().total_bytes);
    Arc::new(Sim::new(SimOptions { total_bytes, event_mode, ..SimOptions::default() }))
}

/// Wraps a strategy without counters in the layer `statistics`.
pub fn counted(strategy: Strategy) -> Strategy {
    match strategy.control().counters.is_some() {
        true => strategy,
        false => Strategy::User(Box::new(layers::statistics::statistics(strategy))),
    }
}

/// The number of allocations from a device and of releases to it.
#[derive(Clone, Copy, Default)]
pub(super) struct Calls {
    took: u64,
    gave: u64,
}

impl Calls {
    pub(super) fn of(sim: &Sim) -> Self {
        let calls = |names: [&str; 3]| names.into_iter().map(|name| sim.calls(name)).sum();
        Self {
            took: calls(["allocate", "create", "allocate_async"]),
            gave: calls(["free", "release", "free_async"]),
        }
    }
}

/// Fills in the counters that a strategy does not maintain from those of the simulated device: the peak of
/// reserved bytes, and the calls since `before`, including failed ones.
pub(super) fn add_taken(statistics: &mut Statistics, sim: &Sim, before: Calls) {
    let signed = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
    if statistics.reserved_bytes.all.peak == 0 {
        statistics.reserved_bytes.all.peak = signed(sim.peak_used_bytes());
    }
    // A strategy that counts its device calls has counted at least one if it has allocated anything.
    if statistics.num_device_alloc != 0 || statistics.allocation.all.peak == 0 {
        return;
    }
    let now = Calls::of(sim);
    statistics.num_device_alloc = signed(now.took - before.took);
    statistics.num_device_free = signed(now.gave - before.gave);
}
