//! The need of a recording under several settings, and the memory that each reserves during the replay.

use serde::Serialize;

use crate::{
    Advice, Capacity, ForTorch, Need, Paste, Recording, SearchOptions, Tried, watch, without_files,
};
use stratalloc::config::Config;
use stratalloc_recording::{Op, ReplayError};

use crate::lives::Lives;
use crate::lives::differences;

/// The need of the recording under one setting.
#[derive(Debug, Serialize)]
pub struct NeedData {
    conf: String,
    /// The line that sets the setting; empty if nothing has to be set.
    paste: String,
    /// The allocator that reads the line.
    paste_for: String,
    recorded: bool,
    /// Whether the setting was replayed on a model of the driver only.
    model: bool,
    /// Whether the caller requested the setting.
    asked: bool,
    needs: Option<u64>,
    /// The need if the device assigns addresses in the most favourable order, if that is less.
    with_luck: Option<u64>,
    retries: Option<u64>,
    device_calls: Option<u64>,
    device_ms: Option<f64>,
    reserved_unlimited: u64,
    /// The reserved bytes at each point of the curve, on the smallest sufficient device. Stored as
    /// differences from the previous point.
    at_need: Vec<i128>,
    /// The reserved bytes at each point without a limit, in the same form.
    unlimited: Vec<i128>,
}

/// The number of settings shown, in addition to the recorded one and those that the caller requested.
const SHOWN: usize = 6;
/// The number of points of a curve.
const POINTS: usize = 800;

/// Returns the best settings of `advice`, the recorded one and those that the caller requested.
///
/// # Errors
///
/// [`ReplayError`] when a replay fails for a reason other than memory.
#[expect(clippy::cast_precision_loss, reason = "a displayed number")]
pub fn settings(
    recording: &Recording,
    lives: &Lives,
    advice: &Advice,
    asked: &[(String, Config)],
) -> Result<Vec<NeedData>, ReplayError> {
    let recorded = &advice.recorded;
    let others = advice.tried.iter().filter(|tried| tried.conf != recorded.conf);
    // If both allocators need the same with a setting, only the row of PyTorch's own allocator is shown.
    let is_alone = |tried: &&Tried| {
        let same = |other: &Tried| {
            other.for_pytorch() == Some(&tried.conf)
                && other.need.needs_bytes == tried.need.needs_bytes
        };
        tried.for_pytorch().is_some() || !advice.tried.iter().any(same)
    };
    let mut shown: Vec<&Tried> = others.filter(is_alone).take(SHOWN).collect();
    // The setting that the first sentence recommends must have a row.
    if let Some(choice) = advice.headline(recording).choice()
        && shown.iter().all(|tried| tried.conf != choice.conf)
    {
        shown.push(choice);
    }
    let with_config = |tried: &Tried| (tried.clone(), advice.config_of(recording, tried));
    let chosen = [recorded].into_iter().chain(shown).chain(&advice.modelled).map(with_config);
    let mut chosen: Vec<(Tried, Config)> = chosen.collect();
    for (conf, config) in asked {
        let is_known = |(_, known): &(Tried, Config)| known.settings() == config.settings();
        if !chosen.iter().any(is_known) {
            let mut need = Need::search(recording, config, &SearchOptions::QUICK)?;
            need.try_other_addresses(recording, config, &SearchOptions::QUICK)?;
            chosen.push((Tried::new(conf.clone(), need), without_files(config)));
        }
    }
    let columns = columns_of_ops(recording, lives);
    let torch = match advice.torch {
        ForTorch::Set(version) => Some(version),
        ForTorch::Shown(_) | ForTorch::Unknown => None,
    };
    let mut all = Vec::new();
    for (at, (Tried { conf, need, .. }, config)) in chosen.into_iter().enumerate() {
        let at_need = match need.needs_bytes {
            Some(total_bytes) => {
                curve(recording, &config, Capacity::Device { total_bytes }, &columns)?
            }
            None => Vec::new(),
        };
        let unlimited = curve(recording, &config, Capacity::Endless, &columns)?;
        let cost = need.cost;
        let paste = Paste::of(&conf, torch);
        all.push(NeedData {
            paste: paste.set,
            paste_for: paste.allocator,
            recorded: at == 0,
            model: advice.modelled.as_ref().is_some_and(|modelled| modelled.conf == conf),
            asked: asked.iter().any(|(_, known)| known.settings() == config.settings()),
            conf,
            needs: need.needs_bytes,
            with_luck: need.with_luck_bytes,
            retries: cost.map(|cost| cost.retries),
            device_calls: cost.map(|cost| cost.device_calls),
            device_ms: cost.map(|cost| cost.device_ns as f64 / 1e6),
            reserved_unlimited: need.reserved_unlimited_bytes,
            at_need,
            unlimited,
        });
    }
    all.sort_by_key(|setting| setting.needs.unwrap_or(u64::MAX));
    Ok(all)
}

/// Returns the number of points of the curves for a recording.
pub fn points(lives: &Lives) -> usize {
    POINTS.min(lives.events as usize + 1)
}

/// Returns the point of the curve to which each operation of the workload belongs. Requests are in the
/// recorded order. Every other operation belongs to the point of the request before it.
fn columns_of_ops(recording: &Recording, lives: &Lives) -> Vec<u32> {
    let events = recording.trace.events.iter().zip(1_u32..);
    let requests = events.filter(|(event, _)| event.is_request());
    let requests: Vec<u32> = requests.map(|(_, moment)| moment).collect();
    let (count, moments) = (points(lives) as u64, u64::from(lives.events) + 1);
    let seeded = recording.workload.seeded;
    let mut moment = 0;
    let column = |op: &Op| {
        if let Op::Allocate { id, .. } | Op::AllocateFailing { id, .. } = *op
            && let Some(request) = id.checked_sub(seeded)
        {
            moment = requests.get(request as usize).copied().unwrap_or(moment);
        }
        u32::try_from(u64::from(moment) * count / moments).unwrap_or(0)
    };
    recording.workload.ops.iter().map(column).collect()
}

/// Returns the peak of reserved bytes at each point of the curve, as differences from the previous
/// point.
fn curve(
    recording: &Recording,
    config: &Config,
    room: Capacity,
    columns: &[u32],
) -> Result<Vec<i128>, ReplayError> {
    let count = columns.last().map_or(0, |last| *last as usize + 1);
    let mut most: Vec<Option<u64>> = vec![None; count];
    let mut last = vec![0; count];
    watch(recording, config, room, &|_| (), &mut |at, _, taken_bytes| {
        let column = columns[at] as usize;
        most[column] = Some(most[column].unwrap_or(0).max(taken_bytes));
        last[column] = taken_bytes;
    })?;
    let mut before = 0;
    let filled = most.into_iter().zip(last).map(|(most, last)| match most {
        Some(most) => {
            before = last;
            most
        }
        None => before,
    });
    Ok(differences(filled))
}
