//! One replay of a recording on one simulated device.

use std::cell::Cell;
use std::sync::Arc;

use super::device::{add_taken, counted, open_sim};
use super::recording::{LimitSource, Recording};
use crate::config::Config;
use crate::driver::sim::EventMode;
use crate::driver::{Brake, Driver, Sim};
use crate::registry::{self, BuildOptions};
use crate::replay::{self, Manner, ReplayError, Run};
use crate::size::fraction_of_limit;
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
    if room != Room::Endless {
        return measure_on(recording, config, room, passes);
    }
    let [large, larger] = ENDLESS_BYTES.map(|total_bytes| Room::Device { total_bytes });
    let trial = measure_on(recording, config, large, passes)?;
    if trial.run.ooms == 0 && trial.run.statistics.num_alloc_retries == 0 {
        return Ok(trial);
    }
    let second = measure_on(recording, config, larger, passes)?;
    Ok(if second.run.ooms <= trial.run.ooms { second } else { trial })
}

fn measure_on(
    recording: &Recording,
    config: &Config,
    room: Room,
    passes: u32,
) -> Result<Trial, ReplayError> {
    let (strategy, sim) = open(recording, config, room)?;
    let strategy = counted(strategy);
    let begun_ns = Cell::new(0);
    let ended_ns = Cell::new(0);
    let manner = Manner {
        passes,
        begun: &|| begun_ns.set(sim.elapsed_ns()),
        look: &|statistics: &mut Statistics| {
            ended_ns.set(sim.elapsed_ns());
            add_taken(statistics, &sim);
        },
        ..Manner::default()
    };
    let brake = Some(Arc::clone(&sim) as Arc<dyn Brake>);
    let run = replay::run_as(&recording.workload, &strategy, brake, manner)?;
    let device_ns = ended_ns.get().saturating_sub(begun_ns.get());
    Ok(Trial { run, peak_taken_bytes: sim.peak_used_bytes(), device_ns })
}

/// Whether every request of a recording is served on a device of `total_bytes`. Ends at the first that
/// is not.
///
/// # Errors
///
/// As [`measure`].
pub fn fits(recording: &Recording, config: &Config, total_bytes: u64) -> Result<bool, ReplayError> {
    let (strategy, sim) = open(recording, config, Room::Device { total_bytes })?;
    replay::is_served(&recording.workload, &strategy, Some(sim))
}

/// An allocator on a device of its own.
pub(super) fn open(
    recording: &Recording,
    config: &Config,
    room: Room,
) -> Result<(Strategy, Arc<Sim>), ReplayError> {
    let limit = recording.limit;
    let (total_bytes, fraction) = match room {
        Room::Endless => (ENDLESS_BYTES[0], None),
        Room::Device { total_bytes } => (total_bytes, None),
        Room::Limited => match limit.map(|limit| limit.source) {
            Some(LimitSource::Fraction) => (recording.total_bytes(), recording.memory.fraction),
            Some(LimitSource::TotalMemory) | None => (recording.total_bytes(), None),
            Some(LimitSource::Inferred { .. }) => {
                let total_bytes = recording.total_bytes();
                let limit_bytes = limit.map_or(total_bytes, |limit| limit.bytes);
                (total_bytes, Some(fraction_of_limit(limit_bytes, total_bytes)))
            }
        },
    };
    let sim = open_sim(Some(total_bytes), EventMode::Manual);
    let driver = Arc::clone(&sim) as Arc<dyn Driver>;
    let strategy = registry::build(config, driver, BuildOptions::default())?;
    if let Some(fraction) = fraction {
        strategy.caching_or_refuse()?.set_memory_fraction(fraction)?;
    }
    Ok((strategy, sim))
}

/// A configuration without layers that write files, for replays whose files nobody asked for.
pub(crate) fn without_files(config: &Config) -> Config {
    let writes = |config: &Config| {
        config.settings().layers.iter().any(|layer| layer.written_file().is_some())
    };
    if !writes(config) {
        return config.clone();
    }
    let mut settings = config.settings().clone();
    settings.layers.retain(|layer| layer.written_file().is_none());
    Config::from_settings(settings)
}
