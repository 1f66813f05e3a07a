//! The memory that each setting reserves during the replay, as curves for a picture.

use super::answer::{Answer, Question, Setting};
use super::lives::{Lives, differences};
use super::recording::Recording;
use super::trial::{Capacity, Watched, watch, without_files};
use stratalloc::config::{Compat, Config, KeyTable};
use stratalloc_recording::{Op, Progress, ReplayError};

/// The reserved bytes of the recording under one setting.
#[derive(Clone, Debug)]
pub struct Curve {
    /// The setting.
    pub setting: Setting,
    /// Whether it is the recorded one.
    pub is_recorded: bool,
    /// Whether the caller asked for it.
    pub is_asked: bool,
    /// The reserved bytes at each point, on the smallest sufficient device. Stored as differences from the
    /// previous point.
    pub at_need: Vec<i128>,
    /// The reserved bytes at each point without a limit, in the same form.
    pub unlimited: Vec<i128>,
}

/// The number of settings shown, in addition to the recorded one and those that the caller requested.
const SHOWN: usize = 6;
/// The number of points of a curve.
const POINTS: usize = 800;

/// Replays the best settings of an answer, the recorded one and those that the caller requested, by
/// [`Progress::each`]. The smallest need is first.
///
/// # Errors
///
/// [`ReplayError`] when a replay fails for a reason other than memory, or `progress` cancels.
pub fn curves(
    recording: &Recording,
    lives: &Lives,
    answer: &Answer,
    question: &Question,
    progress: &dyn Progress,
) -> Result<Vec<Curve>, ReplayError> {
    let Some(recorded) = &answer.recorded.replayed else { return Ok(Vec::new()) };
    let config_of = |setting: &Setting| {
        let asked = question.settings.iter().find(|(conf, _)| *conf == setting.conf);
        let own = || recording.config.clone().unwrap_or_default().with_compat(Compat::PyTorch);
        let parsed = || Config::parse(&setting.conf, &KeyTable::default()).unwrap_or_default();
        match asked {
            _ if setting.conf == recorded.conf => own(),
            Some((_, config)) => without_files(config),
            None => parsed(),
        }
    };
    let columns = columns_of_ops(recording, lives);
    let row = |setting: &Setting| {
        let config = config_of(setting);
        let curve = |room| curve(recording, &config, room, &columns);
        let at_need =
            setting.needs_bytes.map(|total_bytes| curve(Capacity::Device { total_bytes }));
        let is_same = |(_, asked): &(String, Config)| {
            without_files(asked).settings() == without_files(&config).settings()
        };
        Ok::<Curve, ReplayError>(Curve {
            setting: setting.clone(),
            is_recorded: setting.conf == recorded.conf,
            is_asked: question.settings.iter().any(is_same),
            at_need: at_need.transpose()?.unwrap_or_default(),
            unlimited: curve(Capacity::Endless)?,
        })
    };
    let shown = shown(answer, recorded);
    let mut all = progress.collect(shown.len(), |at| row(shown[at]))?;
    all.sort_by_key(|curve| curve.setting.needs_bytes.unwrap_or(u64::MAX));
    Ok(all)
}

fn shown<'a>(answer: &'a Answer, recorded: &'a Setting) -> Vec<&'a Setting> {
    let (models, searched): (Vec<_>, Vec<_>) = answer.tried.iter().partition(|one| one.is_model);
    // If both allocators need the same with a setting, only the row of PyTorch's own allocator is shown.
    let is_alone = |setting: &Setting| {
        let same = |other: &&Setting| {
            other.conf_for_pytorch() == Some(&setting.conf)
                && other.needs_bytes == setting.needs_bytes
        };
        setting.conf_for_pytorch().is_some() || !searched.iter().any(same)
    };
    let others = searched.iter().copied().filter(|setting| setting.conf != recorded.conf);
    let mut shown: Vec<&Setting> = others.filter(|one| is_alone(one)).take(SHOWN).collect();
    // The setting that the first sentence recommends must have a row.
    let choice =
        answer.choice.iter().filter(|choice| shown.iter().all(|one| one.conf != choice.conf));
    let choice: Vec<&Setting> = choice.collect();
    shown.extend(choice);
    [recorded].into_iter().chain(shown).chain(models).chain(&answer.asked).collect()
}

/// Returns the number of points of the curves for a recording.
#[must_use]
pub fn points(lives: &Lives) -> usize {
    POINTS.min(lives.events as usize + 1)
}

/// Returns the point of the curve to which each operation of the workload belongs. Requests are in the
/// recorded order. Every other operation belongs to the point of the request before it.
fn columns_of_ops(recording: &Recording, lives: &Lives) -> Vec<u32> {
    let events = recording.trace.each_event().zip(1_u32..);
    let requests = events.filter(|(event, _)| event.is_request());
    let requests: Vec<u32> = requests.map(|(_, moment)| moment).collect();
    let (count, moments) = (points(lives) as u64, u64::from(lives.events) + 1);
    let seeded = recording.workload.seeded;
    let mut moment = 0;
    let column = |op: Op| {
        if let Op::Allocate { id, .. } | Op::AllocateFailing { id, .. } = op
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
    watch(recording, config, room, &|_| (), &mut |Watched { at, taken_bytes, .. }| {
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
