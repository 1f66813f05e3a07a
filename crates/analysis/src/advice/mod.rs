//! Searches for settings under which a recording needs a smaller device.
//!
//! Each setting is tried alone first, numeric ones in coarse steps. Then the best settings are combined
//! with others. A setting is dropped after a single replay if it fails on a device that suffices for three
//! other settings of the same allocator; only the rest are searched in full. Every reported figure comes
//! from a replay.
//!
//! In this module, a *setting* is a configuration string, for PyTorch's own allocator or for this
//! library's. The *need* of a recording under a setting is the smallest device on which it runs.

mod search;

use std::time::Duration;

use crate::budget::Budget;
use crate::needs::{Need, SearchOptions};
use crate::recording::Recording;
use crate::torch::{ForTorch, is_of_rocm};
use crate::trial::{Capacity, measure};
use search::SettingSearch;
use stratalloc::config::{Compat, Config, KeyTable, TorchVersion};
use stratalloc_recording::{Progress, ReplayError};

/// Options of [`Advice::search`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdviceOptions {
    /// The time of the search. After two thirds of it, no further settings are tried, and the best ones are
    /// searched with other addresses. Settings that were not searched to the end by then are left out. Only
    /// a [`Progress`] with a clock ends it.
    pub time: Duration,
    /// Whether the recorded setting is searched to its end even if that takes longer.
    pub always_recorded: bool,
    /// Whether to try only the settings that help most often.
    pub quick: bool,
    /// The version of PyTorch that must accept the settings for PyTorch's own allocator. If `None`, it is the
    /// oldest version that can have made the recording.
    pub torch: Option<TorchVersion>,
    /// Whether PyTorch is built for ROCm; a recording may show it too.
    pub is_rocm: bool,
    /// If the recorded setting needs at most this many bytes, no other setting is tried.
    pub enough_bytes: Option<u64>,
}

impl Default for AdviceOptions {
    fn default() -> Self {
        Self {
            time: Duration::from_secs(60),
            always_recorded: true,
            quick: false,
            torch: None,
            is_rocm: false,
            enough_bytes: None,
        }
    }
}

/// A setting that was tried, and the need of the recording under it.
#[derive(Clone, Debug, PartialEq)]
pub struct Tried {
    /// The configuration string; empty for the default one.
    pub conf: String,
    /// The need under the setting.
    pub need: Need,
    /// Whether the recording runs under its limit with the setting; `None` if this was not tried.
    pub runs_under_limit: Option<bool>,
}

impl Tried {
    /// Creates an entry that was not tried under a limit.
    #[must_use]
    pub fn new(conf: String, need: Need) -> Self {
        Self { conf, need, runs_under_limit: None }
    }

    /// Returns the configuration string for PyTorch's own allocator, if the replay made PyTorch's decisions
    /// (`compat:pytorch`). Returns `None` for a setting of this library's allocator.
    #[must_use]
    pub fn for_pytorch(&self) -> Option<&str> {
        for_pytorch(&self.conf)
    }

    /// Orders settings: smaller needs first, then fewer keys, then less device time.
    fn rank(&self) -> (u64, usize, u64) {
        let needs_bytes = self.need.needs_bytes.unwrap_or(u64::MAX);
        (needs_bytes, self.keys(), self.device_ns())
    }

    /// Returns the number of keys in the setting, not counting a final `compat:pytorch`.
    pub(super) fn keys(&self) -> usize {
        let conf = self.for_pytorch().unwrap_or(&self.conf);
        conf.split(',').filter(|part| !part.is_empty()).count()
    }

    /// Returns the time of the device calls in a run on the smallest sufficient device, in nanoseconds.
    pub(super) fn device_ns(&self) -> u64 {
        self.need.cost.map_or(u64::MAX, |cost| cost.device_ns)
    }

    /// Returns true if some device suffices and, if there is a limit, the recording runs under that too.
    pub(super) fn runs(&self) -> bool {
        self.need.needs_bytes.is_some() && self.runs_under_limit != Some(false)
    }
}

/// The needs of a recording under the settings that were tried.
#[derive(Clone, Debug, PartialEq)]
pub struct Advice {
    /// The need in PyTorch's own allocator with the recorded configuration, or with the default one if
    /// the recorded configuration cannot be replayed.
    pub recorded: Tried,
    /// The settings that were searched in full, best first. Without those that only a model of the
    /// driver can replay.
    pub tried: Vec<Tried>,
    /// The settings that the caller asked for, as far as they are not in `tried`.
    pub asked: Vec<Tried>,
    /// The need under `backend:cudaMallocAsync`, a model of the driver's own pools, for comparison.
    pub modelled: Option<Tried>,
    /// The number of settings dropped because three others need less or as much.
    pub passed_over: usize,
    /// Whether time ran out before all settings were tried.
    pub is_cut_short: bool,
    /// The version of PyTorch that the settings suit.
    pub torch: ForTorch,
    /// Whether they are for ROCm. Then none is for this library, which needs CUDA.
    pub is_rocm: bool,
}

/// The end of a configuration string that is replayed with PyTorch's exact decisions.
const PYTORCH: &str = "compat:pytorch";

/// Returns a configuration string without the key for PyTorch's decisions, if it has that key.
pub(super) fn for_pytorch(conf: &str) -> Option<&str> {
    let conf = conf.strip_suffix(PYTORCH)?;
    Some(conf.strip_suffix(',').unwrap_or(conf))
}

/// The settings that help most often.
pub(super) const QUICK: [&str; 5] = [
    "",
    "expandable_segments:True",
    "max_split_size_mb:32",
    "max_split_size_mb:64",
    "max_split_size_mb:256",
];

/// Further settings, each tried alone.
pub(super) const ALONE: [&str; 14] = [
    "max_split_size_mb:20",
    "max_split_size_mb:21",
    "max_split_size_mb:48",
    "max_split_size_mb:96",
    "max_split_size_mb:128",
    "max_split_size_mb:512",
    "roundup_power2_divisions:2",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:8",
    "roundup_power2_divisions:16",
    "large_segment_size_mb:12",
    "large_segment_size_mb:32",
    "large_segment_size_mb:64",
    "garbage_collection_threshold:0.8,per_process_memory_fraction:0.999",
];

/// The maximum number of settings that a report prints.
const PRINTED: usize = 7;

/// The number of settings that are replayed under the limit at a time.
const LIMITED_AT_ONCE: usize = 8;

impl Advice {
    /// Searches for the settings under which `recording` needs the smallest device. Takes some hundred
    /// to some thousand replays, by [`Progress::each`]. Receives the number of settings done and the number
    /// known so far ([`Stage::Settings`](stratalloc_recording::Stage::Settings)).
    ///
    /// # Errors
    ///
    /// [`ReplayError`] when the recording has no history, a replay fails for a reason other than memory,
    /// `progress` cancels, or time runs out before the need of the recorded setting is known.
    pub fn search(
        recording: &Recording,
        options: &AdviceOptions,
        progress: &dyn Progress,
    ) -> Result<Self, ReplayError> {
        Self::search_with(recording, options, &[], progress)
    }

    /// Does the same as [`search`](Self::search), and searches the settings `asked` for, which come after the
    /// recorded one and the first candidates.
    pub(crate) fn search_with(
        recording: &Recording,
        options: &AdviceOptions,
        asked: &[(String, Config)],
        progress: &dyn Progress,
    ) -> Result<Self, ReplayError> {
        let budget = Budget::new(progress, options.time);
        let mut search = SettingSearch {
            recording,
            tried: Vec::new(),
            seen: Vec::new(),
            passed_over: 0,
            is_cut_short: false,
            torch: ForTorch::of(recording, options.torch),
            is_rocm: options.is_rocm || is_of_rocm(recording),
            budget: &budget,
        };
        let recorded = match options.always_recorded {
            true => search.recorded(progress)?,
            false => budget.within(search.recorded(&budget))?.ok_or(ReplayError::OutOfTime)?,
        };
        let needs_bytes = recorded.need.needs_bytes.unwrap_or(u64::MAX);
        let is_enough = options.enough_bytes.is_some_and(|enough| needs_bytes <= enough);
        if !is_enough {
            search.try_all(&QUICK)?;
        }
        let mut asked_for = search.asked(asked)?;
        if !options.quick && !is_enough {
            search.try_all(&ALONE)?;
            for _ in 0..2 {
                let together = search.combined();
                search.try_all(&together.iter().map(String::as_str).collect::<Vec<_>>())?;
            }
        }
        let modelled = match options.quick || is_enough || search.is_cut_short || search.is_rocm {
            true => None,
            false => search.modelled()?,
        };
        let SettingSearch { tried, passed_over, is_cut_short, torch, is_rocm, .. } = search;
        let mut advice = Self {
            recorded,
            tried,
            asked: Vec::new(),
            modelled,
            passed_over,
            is_cut_short,
            torch,
            is_rocm,
        };
        advice.try_under_limit(recording, &budget)?;
        advice.try_other_addresses(recording, &budget)?;
        asked_for.retain(|(_, config)| !advice.has_tried(recording, config));
        advice.asked = asked_for.into_iter().map(|(tried, _)| tried).collect();
        Ok(advice)
    }

    /// Returns true if the search tried a configuration.
    fn has_tried(&self, recording: &Recording, config: &Config) -> bool {
        let is_it =
            |tried: &Tried| self.config_of(recording, tried).settings() == config.settings();
        self.tried.iter().any(is_it)
    }

    /// Returns the setting with the smallest need, for either allocator. `None` if no device suffices
    /// for any setting.
    #[must_use]
    pub fn best(&self) -> Option<&Tried> {
        self.tried.first().filter(|tried| tried.need.needs_bytes.is_some())
    }

    /// Returns true if PyTorch's own allocator accepts the setting, in the version that the caller set, or
    /// else in the oldest version that can have made the recording. Without a version from the caller, it
    /// accepts the recorded setting.
    pub(super) fn is_for_pytorch(&self, tried: &Tried) -> bool {
        let accepts = |version| parsed(&tried.conf).is_accepted_by(version);
        match self.torch {
            _ if tried.for_pytorch().is_none() => false,
            ForTorch::Set(version) => accepts(version),
            _ => tried.conf == self.recorded.conf || accepts(self.torch.version()),
        }
    }

    /// Repeats the search with other orders of addresses for the recorded setting, the best ones, and those
    /// that sentences name. The results can change which settings these are, so it continues until all of
    /// them were searched with other addresses. When time runs out, the others are left out: with one order
    /// of addresses a setting may seem better than the recorded one by luck.
    fn try_other_addresses(
        &mut self,
        recording: &Recording,
        budget: &Budget<'_>,
    ) -> Result<(), ReplayError> {
        while let Some(at) = self.unconfirmed(recording) {
            if budget.within(self.confirm(recording, at, budget))?.is_none() {
                self.is_cut_short = true;
                self.tried.retain(|tried| tried.need.is_confirmed());
                return Ok(());
            }
        }
        Ok(())
    }

    /// Returns the index of a setting that may be printed and was not yet searched with other addresses.
    /// A sentence may name the best setting for each allocator, whether or not it is worth its cost.
    fn unconfirmed(&self, recording: &Recording) -> Option<usize> {
        let pytorch = self.tried.iter().find(|tried| self.is_for_pytorch(tried));
        let ours = self.tried.iter().find(|tried| tried.for_pytorch().is_none());
        let named = [self.worth_setting(recording), pytorch, ours, Some(&self.recorded)];
        let printed = self.tried.iter().take(PRINTED).chain(named.into_iter().flatten());
        let at = |conf: &str| self.tried.iter().position(|tried| tried.conf == conf);
        let mut printed = printed.filter_map(|tried| at(&tried.conf));
        printed.find(|at| !self.tried[*at].need.is_confirmed())
    }

    /// Searches one setting with other orders of addresses, and ranks it again.
    fn confirm(
        &mut self,
        recording: &Recording,
        at: usize,
        progress: &dyn Progress,
    ) -> Result<(), ReplayError> {
        let mut tried = self.tried[at].clone();
        let config = self.config_of(recording, &tried);
        tried.need.try_other_addresses(recording, &config, &SearchOptions::QUICK, progress)?;
        self.tried.remove(at);
        if tried.conf == self.recorded.conf {
            self.recorded = tried.clone();
        }
        insert(&mut self.tried, tried);
        Ok(())
    }

    /// Returns the configuration of a setting that was searched.
    pub(crate) fn config_of(&self, recording: &Recording, tried: &Tried) -> Config {
        match tried.conf == self.recorded.conf {
            true => recording.config.clone().unwrap_or_default().with_compat(Compat::PyTorch),
            false => parsed(&tried.conf),
        }
    }

    /// If there is a limit, replays every searched setting under it. Those for which no time is left are left
    /// out.
    fn try_under_limit(
        &mut self,
        recording: &Recording,
        budget: &Budget<'_>,
    ) -> Result<(), ReplayError> {
        if recording.limit.is_none() {
            return Ok(());
        }
        let untried = |all: &[Tried]| {
            let at = (0..all.len()).filter(|at| all[*at].runs_under_limit.is_none());
            at.take(LIMITED_AT_ONCE).collect::<Vec<usize>>()
        };
        loop {
            let some = untried(&self.tried);
            if some.is_empty() {
                return Ok(());
            }
            let run = |at: usize| {
                let tried = &self.tried[some[at]];
                runs_under_limit(recording, &self.config_of(recording, tried), budget)
            };
            let Some(runs) = budget.within((budget as &dyn Progress).collect(some.len(), run))?
            else {
                self.is_cut_short = true;
                self.tried.retain(|tried| tried.runs_under_limit.is_some());
                return Ok(());
            };
            for (at, runs) in some.into_iter().zip(runs) {
                self.tried[at].runs_under_limit = Some(runs);
            }
        }
    }

    /// Returns the cheapest setting under which the recording needs at most `bytes`. If the recorded
    /// setting suffices, returns that. Otherwise prefers settings for PyTorch's own allocator, and among
    /// those the one whose device calls take the least time on a device of that size. Takes at least one
    /// replay for each setting that suffices.
    ///
    /// # Errors
    ///
    /// The same as [`search`](Self::search).
    pub fn cheapest_within(
        &mut self,
        recording: &Recording,
        bytes: u64,
        progress: &dyn Progress,
    ) -> Result<Option<Tried>, ReplayError> {
        let suffices = |tried: &Tried| tried.need.needs_bytes.is_some_and(|needs| needs <= bytes);
        if suffices(&self.recorded) {
            return Ok(Some(self.recorded.clone()));
        }
        let is_ours = |tried: &Tried| tried.for_pytorch().is_none();
        let usable = self.tried.iter().filter(|tried| suffices(tried));
        let usable: Vec<&Tried> =
            usable.filter(|tried| is_ours(tried) || self.is_for_pytorch(tried)).collect();
        let rank = |at: usize| {
            let tried = usable[at];
            let config = self.config_of(recording, tried);
            let room = Capacity::Device { total_bytes: bytes };
            let device_ns = measure(recording, &config, room, 1, progress)?.device_ns;
            Ok::<_, ReplayError>((is_ours(tried), device_ns, tried.keys(), tried.conf.clone()))
        };
        let mut ranks = progress.collect(usable.len(), rank)?;
        ranks.sort();
        for (.., conf) in ranks {
            let at = |all: &[Tried]| all.iter().position(|tried| tried.conf == conf);
            if let Some(at) = at(&self.tried) {
                self.confirm(recording, at, progress)?;
            }
            let confirmed_one = at(&self.tried).map(|at| &self.tried[at]);
            if let Some(tried) = confirmed_one.filter(|tried| suffices(tried)) {
                return Ok(Some(tried.clone()));
            }
        }
        Ok(None)
    }
}

/// Returns true if no request fails under the limit of the recording.
fn runs_under_limit(
    recording: &Recording,
    config: &Config,
    progress: &dyn Progress,
) -> Result<bool, ReplayError> {
    Ok(measure(recording, config, Capacity::Limited, 1, progress)?.run.ooms == 0)
}

/// Parses a configuration string made in this file. An empty string gives the default configuration.
fn parsed(conf: &str) -> Config {
    Config::parse(conf, &KeyTable::default()).unwrap_or_default()
}

/// Inserts a setting at its rank, best first.
fn insert(all: &mut Vec<Tried>, tried: Tried) {
    let at = all.partition_point(|known| known.rank() <= tried.rank());
    all.insert(at, tried);
}

fn joined(first: &str, second: &str) -> String {
    let comma = if first.is_empty() || second.is_empty() { "" } else { "," };
    format!("{first}{comma}{second}")
}
