//! One replay of a recording on one simulated device.

use std::cell::Cell;
use std::ops::ControlFlow;
use std::sync::Arc;

use super::device::{Calls, add_taken, counted};
use super::recording::Recording;
use crate::allocator::{Allocation, DeviceAllocator};
use crate::config::Config;
use crate::driver::sim::{AddressOrder, EventMode, SimOptions};
use crate::driver::{Brake, Driver, Sim};
use crate::registry::{self, BuildOptions};
use crate::replay::{self, Manner, ReplayError, Run};
use crate::stats::Statistics;
use crate::strategies::Strategy;

/// How much memory a replay has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// What the recording's [`limit`](Recording::limit) leaves; where there is none, the device is
    /// what somebody said or an H200.
    Limited,
    /// More than any program asks for.
    Endless,
    /// A device of this many bytes, all of which may be reserved.
    Device {
        /// All its memory.
        total_bytes: u64,
    },
}

/// Devices that hardly any recording fills. A larger one costs address space, which is why it is only
/// the second choice.
const ENDLESS_BYTES: [u64; 2] = [1 << 38, 1 << 43];

/// What a replay showed.
#[derive(Clone, Debug)]
pub struct Trial {
    /// Counters and times; the counters also of strategies that count nothing themselves.
    pub run: Run,
    /// The most bytes that were taken from the device at once, whoever counted.
    pub peak_taken_bytes: u64,
    /// What the device's calls cost on its own clock, in nanoseconds.
    pub device_ns: u64,
}

impl Trial {
    /// Calls that took memory from the device or gave it back.
    #[must_use]
    pub fn device_calls(&self) -> u64 {
        let counters = &self.run.statistics;
        u64::try_from(counters.num_device_alloc + counters.num_device_free).unwrap_or(0)
    }
}

/// Repeats a recording under a configuration, `passes` times; what it shows is the first pass's, but
/// for the times. Files that a layer of the configuration names are written.
///
/// # Errors
///
/// [`ReplayError`] when the configuration builds no allocator, or the allocator fails in a way that is
/// not about memory.
pub fn measure(
    recording: &Recording,
    config: &Config,
    room: Room,
    passes: u32,
) -> Result<Trial, ReplayError> {
    measure_watched(recording, config, room, passes, &|_| ())
}

/// The same; `progress` is called after each pass with the number of passes done.
pub(crate) fn measure_watched(
    recording: &Recording,
    config: &Config,
    room: Room,
    passes: u32,
    progress: &dyn Fn(u32),
) -> Result<Trial, ReplayError> {
    let measure_on = |room| {
        let (strategy, sim, held) = open_with_start(recording, config, room)?;
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
            look: &|statistics: &mut Statistics| {
                ended_ns.set(sim.elapsed_ns());
                add_taken(statistics, &sim, before.get());
            },
        };
        let brake = Some(Arc::clone(&sim) as Arc<dyn Brake>);
        let run = replay::run_as(&recording.workload, &strategy, brake, manner)?;
        let device_ns = ended_ns.get().saturating_sub(begun_ns.get());
        Ok(Trial { run, peak_taken_bytes: sim.peak_used_bytes(), device_ns })
    };
    if room != Room::Endless {
        return measure_on(room);
    }
    let [large, larger] = ENDLESS_BYTES.map(|total_bytes| Room::Device { total_bytes });
    let trial = measure_on(large)?;
    if trial.run.ooms == 0 && trial.run.statistics.num_alloc_retries == 0 {
        return Ok(trial);
    }
    let second = measure_on(larger)?;
    Ok(if second.run.ooms <= trial.run.ooms { second } else { trial })
}

/// Whether every request of a recording is served on a device of `total_bytes`. Ends at the first that
/// is not.
///
/// # Errors
///
/// As [`measure`].
pub fn fits(recording: &Recording, config: &Config, total_bytes: u64) -> Result<bool, ReplayError> {
    fits_in_order(recording, config, total_bytes, AddressOrder::Lowest)
}

/// The same on a device that gives out addresses in this order.
pub(super) fn fits_in_order(
    recording: &Recording,
    config: &Config,
    total_bytes: u64,
    order: AddressOrder,
) -> Result<bool, ReplayError> {
    let (strategy, sim) = open(recording, config, Room::Device { total_bytes }, order)?;
    replay::is_served(&recording.workload, &strategy, Some(sim))
}

/// Repeats a recording once. `begun` gets the allocator before the first operation; `look` sees the number of
/// each operation, when it is done, and what is taken from the device then.
///
/// # Errors
///
/// As [`measure`].
pub(crate) fn watch(
    recording: &Recording,
    config: &Config,
    room: Room,
    begun: &dyn Fn(&Strategy),
    look: &mut dyn FnMut(usize, &Strategy, u64),
) -> Result<(), ReplayError> {
    let (strategy, sim, held) = open_with_start(recording, config, room)?;
    begun(&strategy);
    let brake = Some(Arc::clone(&sim) as Arc<dyn Brake>);
    replay::walk(&recording.workload, &strategy, brake, held, |step| {
        look(step.at, &strategy, sim.used_bytes());
        ControlFlow::Continue(())
    })
}

/// The strategy with what was there when the recording began, by the numbers of the workload's blocks;
/// blocks that are not there are allocated first.
pub(super) type Opened = (Strategy, Arc<Sim>, Vec<(u32, Allocation)>);

/// An allocator on a device of its own, which begins with what was there when the recording began.
pub(super) fn open_with_start(
    recording: &Recording,
    config: &Config,
    room: Room,
) -> Result<Opened, ReplayError> {
    let (strategy, sim) = open(recording, config, room, AddressOrder::Lowest)?;
    let start = recording.start.as_ref().zip(recording.layout_for(config));
    let Some(((start, layout), engine)) =
        start.filter(|_| room == Room::Limited).zip(strategy.engine())
    else {
        return Ok((strategy, sim, Vec::new()));
    };
    let Ok(installed) = engine.install(layout) else {
        // There is no room for all of it: what lived may have some.
        let (strategy, sim) = open(recording, config, room, AddressOrder::Lowest)?;
        return Ok((strategy, sim, Vec::new()));
    };
    let held = installed.into_iter().filter_map(|block| {
        let id = start.live_addresses.binary_search(&block.address).ok()?;
        Some((u32::try_from(id).ok()?, block.allocation))
    });
    let held = held.collect();
    Ok((strategy, sim, held))
}

/// An allocator on a device of its own.
fn open(
    recording: &Recording,
    config: &Config,
    room: Room,
    addresses: AddressOrder,
) -> Result<(Strategy, Arc<Sim>), ReplayError> {
    let (total_bytes, fraction) = match room {
        Room::Endless => (ENDLESS_BYTES[0], None),
        Room::Device { total_bytes } => (total_bytes, None),
        Room::Limited => {
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
            // What keeps no cache has no limit of its own: the device is as small.
            None if recording.limit_is_inferred() => {
                let bytes = recording.limit.map_or(total_bytes, |limit| limit.bytes);
                return open(recording, config, Room::Device { total_bytes: bytes }, addresses);
            }
            _ => strategy.caching_or_refuse()?.set_memory_fraction(fraction)?,
        }
    }
    Ok((strategy, sim))
}

/// A configuration whose allocator writes no files, for replays whose files nobody asked for.
pub(crate) fn without_files(config: &Config) -> Config {
    let settings = config.settings().clone().for_replay();
    match settings == *config.settings() {
        true => config.clone(),
        false => Config::from_settings(settings),
    }
}
