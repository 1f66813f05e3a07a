//! Tries settings one after the other, within a budget.

use super::{PYTORCH, Tried, insert, joined, parsed, runs_under_limit};
use crate::budget::Budget;
use crate::needs::{Need, SearchOptions};
use crate::recording::Recording;
use crate::torch::{ForTorch, ROCM_EXPANDABLE};
use crate::trial::{fits, without_files};
use stratalloc::config::{Compat, Config, KeyTable, TorchVersion};
use stratalloc_recording::{Progress, ReplayError, Stage};

/// Settings that are combined with the best of those tried before.
const TOGETHER: [&str; 7] = [
    "large_segment_size_mb:12",
    "large_segment_size_mb:16",
    "large_segment_size_mb:32",
    "roundup_power2_divisions:8",
    "roundup_power2_divisions:16",
    "garbage_collection_threshold:0.8,per_process_memory_fraction:0.999",
    "expandable_segments:True",
];

/// A setting that is replayed only on a model of the driver.
const MODELLED: &str = "backend:cudaMallocAsync";

/// A setting is dropped only if this many settings for the same allocator need less.
const KEPT: usize = 3;

/// The number of settings that are replayed at a time before a search. It does not depend on the number of
/// processors, so the result does not either.
const CHECKED_AT_ONCE: usize = 2;

pub(super) struct SettingSearch<'a> {
    pub(super) recording: &'a Recording,
    /// Best first.
    pub(super) tried: Vec<Tried>,
    /// The configurations of all candidates so far. They are not tried again.
    pub(super) seen: Vec<Config>,
    pub(super) passed_over: usize,
    pub(super) is_cut_short: bool,
    pub(super) torch: ForTorch,
    pub(super) is_rocm: bool,
    pub(super) budget: &'a Budget<'a>,
}

/// A setting that has not been searched yet.
struct Candidate {
    conf: String,
    config: Config,
}

impl SettingSearch<'_> {
    /// Searches the recorded setting. It is compared with all others, so it is searched with other addresses
    /// and replayed under the limit at once.
    pub(super) fn recorded(&mut self, progress: &dyn Progress) -> Result<Tried, ReplayError> {
        let own = self.recording.config.clone();
        let text = own.as_ref().map_or("", |_| self.recording.trace.conf.as_str());
        let conf = joined(text, PYTORCH);
        let config = own.unwrap_or_default().with_compat(Compat::PyTorch);
        self.seen.push(config.clone());
        let recording = self.recording;
        let mut tried = Tried::new(conf, confirmed_need(recording, &config, progress)?);
        if recording.limit.is_some() {
            tried.runs_under_limit = Some(runs_under_limit(recording, &config, progress)?);
        }
        insert(&mut self.tried, tried.clone());
        Ok(tried)
    }

    /// Searches the settings that the caller asked for and that were not tried yet, as far as time suffices.
    pub(super) fn asked(
        &mut self,
        asked: &[(String, Config)],
    ) -> Result<Vec<(Tried, Config)>, ReplayError> {
        let mut found = Vec::new();
        for (conf, config) in asked {
            let config = without_files(config);
            if self.seen.iter().any(|known| known.settings() == config.settings()) {
                continue;
            }
            let need = confirmed_need(self.recording, &config, self.budget);
            match self.budget.within(need)? {
                Some(need) => found.push((Tried::new(conf.clone(), need), config)),
                None => self.is_cut_short = true,
            }
        }
        Ok(found)
    }

    /// Returns, for each setting, a candidate for this library's allocator and one for PyTorch's, if the
    /// version of PyTorch accepts the setting. Leaves out those that were returned before.
    fn candidates(&mut self, settings: &[&str]) -> Vec<Candidate> {
        let confs = settings.iter().flat_map(|text| [(*text).to_owned(), joined(text, PYTORCH)]);
        let mut found = Vec::new();
        for conf in confs {
            // Contradictory settings, such as a split size below the segment size, fail to parse and are
            // skipped.
            let Ok(config) = Config::parse(&conf, &KeyTable::default()) else { continue };
            if conf.ends_with(PYTORCH) && !config.is_accepted_by(self.torch.version()) {
                continue;
            }
            if self.is_rocm && !self.is_for_rocm(&conf) {
                continue;
            }
            if self.seen.iter().all(|known| known.settings() != config.settings()) {
                self.seen.push(config.clone());
                found.push(Candidate { conf, config });
            }
        }
        found
    }

    /// Returns true if PyTorch for ROCm acts on a setting.
    fn is_for_rocm(&self, conf: &str) -> bool {
        let first = ROCM_EXPANDABLE.parse().unwrap_or(TorchVersion::V2_11);
        let is_known = self.torch.version() >= first || !conf.contains("expandable_segments");
        conf.ends_with(PYTORCH) && is_known
    }

    pub(super) fn try_all(&mut self, settings: &[&str]) -> Result<(), ReplayError> {
        let candidates = self.candidates(settings);
        let total = self.seen.len();
        let mut left = candidates.len();
        // A few at a time, because the needs found by one search can make later candidates unnecessary.
        let mut rest = candidates.into_iter();
        loop {
            let some: Vec<Candidate> = rest.by_ref().take(CHECKED_AT_ONCE).collect();
            if some.is_empty() {
                return Ok(());
            }
            if self.is_cut_short || self.budget.is_mostly_used() {
                self.is_cut_short = true;
                return Ok(());
            }
            left -= some.len();
            let Some(worth) = self.budget.within(self.worth_a_search(some))? else {
                self.is_cut_short = true;
                return Ok(());
            };
            for candidate in worth {
                match self.budget.within(self.search(candidate))? {
                    Some(tried) => insert(&mut self.tried, tried),
                    None => self.is_cut_short = true,
                }
            }
            self.budget.at(Stage::Settings, (total - left) as u64, total as u64);
        }
    }

    /// Drops the candidates that fail on the device given by `enough_bytes`, and returns the others.
    fn worth_a_search(
        &mut self,
        candidates: Vec<Candidate>,
    ) -> Result<Vec<Candidate>, ReplayError> {
        let (recording, this) = (self.recording, &*self);
        let is_worth = |at: usize| match this.enough_bytes(&candidates[at]) {
            Some(bytes) => fits(recording, &candidates[at].config, bytes),
            None => Ok(true),
        };
        let progress: &dyn Progress = self.budget;
        let are_worth = progress.collect(candidates.len(), is_worth)?;
        let (worth, passed): (Vec<_>, Vec<_>) =
            candidates.into_iter().zip(are_worth).partition(|(_, worth)| *worth);
        self.passed_over += passed.len();
        Ok(worth.into_iter().map(|(candidate, _)| candidate).collect())
    }

    /// Returns the need of the third best setting of the candidate's allocator. A candidate that fails
    /// on a device of that size is dropped.
    fn enough_bytes(&self, candidate: &Candidate) -> Option<u64> {
        let is_pytorch = candidate.conf.ends_with(PYTORCH);
        let alike = self.tried.iter().filter(|tried| tried.conf.ends_with(PYTORCH) == is_pytorch);
        alike.filter_map(|tried| tried.need.needs_bytes).nth(KEPT - 1)
    }

    fn search(&self, candidate: Candidate) -> Result<Tried, ReplayError> {
        let Candidate { conf, config } = candidate;
        let need = Need::search(self.recording, &config, &SearchOptions::QUICK, self.budget)?;
        Ok(Tried::new(conf, need))
    }

    /// Returns the best settings of each allocator, each combined with one of [`TOGETHER`] at a time.
    pub(super) fn combined(&self) -> Vec<String> {
        let mut bases: Vec<&str> = Vec::new();
        for pytorch in [true, false] {
            let alike = self.tried.iter().filter(|tried| tried.conf.ends_with(PYTORCH) == pytorch);
            for tried in alike.take(KEPT) {
                let base = tried.for_pytorch().unwrap_or(&tried.conf);
                if !bases.contains(&base) {
                    bases.push(base);
                }
            }
        }
        let has_key = |base: &str, more: &str| {
            let key = more.split(':').next().unwrap_or(more);
            base.contains(key)
        };
        let pairs = bases.iter().flat_map(|base| TOGETHER.map(|more| (*base, more)));
        pairs
            .filter(|(base, more)| !has_key(base, more))
            .map(|(base, more)| joined(base, more))
            .collect()
    }

    /// Returns the need with a model of the driver's pools. Errors other than a cancellation are ignored,
    /// because the advice does not depend on this need.
    pub(super) fn modelled(&mut self) -> Result<Option<Tried>, ReplayError> {
        let candidate = Candidate { conf: MODELLED.to_owned(), config: parsed(MODELLED) };
        match self.budget.within(self.search(candidate)) {
            Ok(found) => {
                self.is_cut_short |= found.is_none();
                Ok(found)
            }
            Err(error @ ReplayError::Cancelled(_)) => Err(error),
            Err(_) => Ok(None),
        }
    }
}

/// Searches a need with all orders of addresses.
fn confirmed_need(
    recording: &Recording,
    config: &Config,
    progress: &dyn Progress,
) -> Result<Need, ReplayError> {
    let options = &SearchOptions::QUICK;
    let mut need = Need::search(recording, config, options, progress)?;
    need.try_other_addresses(recording, config, options, progress)?;
    Ok(need)
}
