//! Runs one replay of a recording on one simulated device.

use std::cell::Cell;
use std::ops::ControlFlow;
use std::sync::Arc;

use super::device::{Calls, add_taken, counted};
use super::recording::{LimitSource, Recording};
use stratalloc::allocator::{Allocation, DeviceAllocator};
use stratalloc::config::{Compat, Config};
use stratalloc::driver::Driver;
use stratalloc::registry::{self, BuildOptions};
use stratalloc::stats::Statistics;
use stratalloc::strategies::Strategy;
use stratalloc_recording::{self, Blocks, Manner, Progress, ReplayError, Run, Silent};
use stratalloc_sim::{AddressOrder, EventMode, Sim, SimOptions, WorkGate};

/// The memory that a replay may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capacity {
    /// The recording's [`limit`](Recording::limit). Without a limit, the device size that the caller
    /// set, or an H200's.
    Limited,
    /// More memory than any program requests.
    Endless,
    /// A device of this many bytes. No other limit applies.
    Device {
        /// Memory of the device.
        total_bytes: u64,
    },
}

/// Device sizes that hardly any recording fills. A larger device costs address space, so the larger size
/// is used only if the smaller does not suffice.
pub(super) const ENDLESS_BYTES: [u64; 2] = [1 << 38, 1 << 43];

/// The result of a replay.
#[derive(Clone, Debug)]
pub struct Trial {
    /// Counters and times. The layer `statistics` and the device supply what the strategy does not count.
    pub run: Run,
    /// The peak of bytes allocated from the device, counted by the device.
    pub peak_taken_bytes: u64,
    /// Time of the device calls on the simulated clock, in nanoseconds.
    pub device_ns: u64,
}

impl Trial {
    /// Returns the number of calls that allocated or released device memory.
    #[must_use]
    pub fn device_calls(&self) -> u64 {
        let counters = &self.run.statistics;
        u64::try_from(counters.num_device_alloc + counters.num_device_free).unwrap_or(0)
    }
}

/// Replays a recording under a configuration `passes` times. The counters and `device_ns` are those of the
/// first pass. Files that a layer of the configuration names are written. `progress` measures the time; if
/// there are several passes, it receives the number of passes done, and may cancel the next.
///
/// # Errors
///
/// [`ReplayError`] when the configuration builds no allocator, the allocator fails for a reason other than
/// memory, or `progress` cancels.
pub fn measure(
    recording: &Recording,
    config: &Config,
    capacity: Capacity,
    passes: u32,
    progress: &dyn Progress,
) -> Result<Trial, ReplayError> {
    let measure_on = |capacity| {
        let (strategy, sim, held) = open_with_start(recording, config, capacity)?;
        let strategy = counted(strategy);
        let begun_ns = Cell::new(0);
        let ended_ns = Cell::new(0);
        let before = Cell::new(Calls::default());
        let manner = Manner {
            passes,
            held,
            progress,
            begun: &|| {
                begun_ns.set(sim.elapsed_ns());
                before.set(Calls::of(&sim));
            },
            on_read: &|statistics: &mut Statistics| {
                ended_ns.set(sim.elapsed_ns());
                add_taken(statistics, &sim, before.get());
            },
        };
        let work_gate = Some(Arc::clone(&sim) as Arc<dyn WorkGate>);
        let run = stratalloc_recording::run_as(&recording.workload, &strategy, work_gate, manner)?;
        let device_ns = ended_ns.get().saturating_sub(begun_ns.get());
        Ok(Trial { run, peak_taken_bytes: sim.peak_used_bytes(), device_ns })
    };
    if capacity != Capacity::Endless {
        return measure_on(capacity);
    }
    let [large, larger] = ENDLESS_BYTES.map(|total_bytes| Capacity::Device { total_bytes });
    let trial = measure_on(large)?;
    if trial.run.ooms == 0 && trial.run.statistics.num_alloc_retries == 0 {
        return Ok(trial);
    }
    let second = measure_on(larger)?;
    Ok(if second.run.ooms <= trial.run.ooms { second } else { trial })
}

/// Returns true if the number of failed requests is that of a replay, because the caller set the memory.
pub(crate) fn failures_are_replayed(recording: &Recording) -> bool {
    let by_total = recording.limit.is_some_and(|l| l.source == LimitSource::TotalMemory);
    recording.memory.fraction.is_some() || by_total
}

/// Returns the number of requests that got no memory under the recorded configuration: as recorded or, if
/// the caller set the memory, in a replay with it.
///
/// # Errors
///
/// The same as [`measure`].
pub fn failed_requests(recording: &Recording) -> Result<u64, ReplayError> {
    if !failures_are_replayed(recording) {
        return Ok(recording.figures.ooms);
    }
    let config = recording.config.clone().unwrap_or_default().with_compat(Compat::PyTorch);
    Ok(measure(recording, &without_files(&config), Capacity::Limited, 1, &Silent)?.run.ooms)
}

/// Returns true if every request of a recording succeeds on a device of `total_bytes`. Stops at the
/// first failure.
///
/// # Errors
///
/// The same as [`measure`].
pub fn fits(recording: &Recording, config: &Config, total_bytes: u64) -> Result<bool, ReplayError> {
    fits_in_order(recording, config, total_bytes, AddressOrder::Lowest)
}

/// Does the same as [`fits`], on a device that assigns addresses in this order.
pub(super) fn fits_in_order(
    recording: &Recording,
    config: &Config,
    total_bytes: u64,
    order: AddressOrder,
) -> Result<bool, ReplayError> {
    let (strategy, sim) = open(recording, config, Capacity::Device { total_bytes }, order)?;
    stratalloc_recording::is_served(&recording.workload, &strategy, Some(sim))
}

/// A replay after one of its operations.
#[derive(Clone, Copy)]
pub struct Watched<'a> {
    /// The index of the operation.
    pub at: usize,
    /// The allocator.
    pub strategy: &'a Strategy,
    /// The bytes allocated from the device.
    pub taken_bytes: u64,
    /// The live blocks.
    pub blocks: &'a dyn Blocks,
}

/// Replays a recording once. Calls `begun` when all blocks from before the recording exist. Calls `on_step`
/// after each operation.
///
/// # Errors
///
/// The same as [`measure`].
pub fn watch(
    recording: &Recording,
    config: &Config,
    capacity: Capacity,
    begun: &dyn Fn(&Strategy),
    on_step: &mut dyn FnMut(Watched<'_>),
) -> Result<(), ReplayError> {
    let (strategy, sim, held) = open_with_start(recording, config, capacity)?;
    let seeded = recording.workload.seeded as usize;
    if seeded == 0 {
        begun(&strategy);
    }
    let work_gate = Some(Arc::clone(&sim) as Arc<dyn WorkGate>);
    stratalloc_recording::walk(&recording.workload, &strategy, work_gate, held, |step| {
        if step.at + 1 == seeded {
            begun(&strategy);
        }
        let (at, strategy, taken_bytes) = (step.at, &strategy, sim.used_bytes());
        on_step(Watched { at, strategy, taken_bytes, blocks: step.blocks });
        ControlFlow::Continue(())
    })
}

/// The strategy, its device, and the blocks that exist at the start of a replay, by their numbers in the
/// workload. If there are no such blocks, the replay allocates those from before the recording first.
pub(super) type Opened = (Strategy, Arc<Sim>, Vec<(u32, Allocation)>);

/// Opens an allocator on its own device. The allocator starts with the recorded layout if `capacity` is
/// [`Capacity::Limited`], the layout is known and fits, and the strategy is built on the native engine.
pub(super) fn open_with_start(
    recording: &Recording,
    config: &Config,
    capacity: Capacity,
) -> Result<Opened, ReplayError> {
    let (strategy, sim) = open(recording, config, capacity, AddressOrder::Lowest)?;
    let start = recording.start.as_ref().zip(recording.layout_for(config));
    let Some(((start, layout), engine)) =
        start.filter(|_| capacity == Capacity::Limited).zip(strategy.engine())
    else {
        return Ok((strategy, sim, Vec::new()));
    };
    let Ok(installed) = engine.install(layout) else {
        // The layout does not fit on this device; without free blocks, the live blocks may fit.
        let (strategy, sim) = open(recording, config, capacity, AddressOrder::Lowest)?;
        return Ok((strategy, sim, Vec::new()));
    };
    let held = installed.into_iter().filter_map(|block| {
        let id = start.blocks.binary_search_by_key(&block.address, |live| live.address).ok()?;
        Some((u32::try_from(id).ok()?, block.allocation))
    });
    let held = held.collect();
    Ok((strategy, sim, held))
}

/// Opens an allocator on a new simulated device.
fn open(
    recording: &Recording,
    config: &Config,
    capacity: Capacity,
    addresses: AddressOrder,
) -> Result<(Strategy, Arc<Sim>), ReplayError> {
    let (total_bytes, fraction) = match capacity {
        Capacity::Endless => (ENDLESS_BYTES[0], None),
        Capacity::Device { total_bytes } => (total_bytes, None),
        Capacity::Limited => {
            let total_bytes = recording.total_bytes();
            (total_bytes, recording.fraction_of(total_bytes))
        }
    };
    let event_mode = EventMode::Manual;
    let options = SimOptions { total_bytes, event_mode, addresses, ..SimOptions::default() };
    let sim = Arc::new(Sim::new(options));
    let driver = Arc::clone(&sim) as Arc<dyn Driver>;
    let config = &recording.trace.resolved(config);
    let strategy = registry::build(config, driver, BuildOptions::default())?;
    if let Some(fraction) = fraction {
        match strategy.control().caching {
            // A strategy without a cache enforces no limit, so the limit becomes the size of the device.
            None if recording.limit_is_inferred() => {
                let bytes = recording.limit.map_or(total_bytes, |limit| limit.bytes);
                return open(recording, config, Capacity::Device { total_bytes: bytes }, addresses);
            }
            _ => strategy.caching_or_refuse()?.set_memory_fraction(fraction)?,
        }
    }
    Ok((strategy, sim))
}

/// Returns a configuration whose allocator writes no files, for replays made during an analysis.
pub fn without_files(config: &Config) -> Config {
    let settings = config.settings().clone().for_replay();
    match settings == *config.settings() {
        true => config.clone(),
        false => Config::from_settings(settings),
    }
}
