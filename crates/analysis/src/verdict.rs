//! The result of a search for settings, as numbers: one setting is worth its cost, none is, or none can help.
//!
//! One rule decides, and all outputs follow it. A setting is worth its cost under two conditions: it saves
//! at least 2 % of the need, and the share of the recorded time that its device calls add is at most the
//! share of memory that it saves. The second condition is left out if the recording has no times. If the
//! recording fails under the recorded setting, every setting under which it runs is worth its cost.

use schemars::JsonSchema;
use serde::Serialize;

use super::advice::{Advice, Tried};
use super::callers::{Callers, Compared};
use super::causes::Picture;
use super::holders::{Holders, stack_of};
use super::needs::Cost;
use super::recording::{Limit, LimitSource, Recording, RefusedWithFree};
use super::streams::Streams;
use super::words::part;
use stratalloc_recording::{NoHistory, Op};

/// Settings that save less than this share of the need are not worth their cost.
pub(crate) const WORTH: f64 = 0.02;
/// Needs that differ by at most this share are treated as equal. Of these settings, the one with the fewest
/// keys is chosen.
const ALIKE: f64 = 0.005;

/// The result of a search for settings, as numbers. `words` has the sentences.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Verdict {
    /// A setting is worth its cost.
    WorthIt {
        /// The setting as PyTorch or this library reads it; empty for the default.
        conf: String,
        /// Whether it is for PyTorch's own allocator.
        is_for_pytorch: bool,
        /// Whether a setting of PyTorch's own allocator is worth its cost.
        has_pytorch_setting: bool,
        /// The need with the setting, in bytes.
        needs_bytes: u64,
        /// The need as recorded, in bytes; `null` in JSON if no device suffices.
        before_bytes: Option<u64>,
        /// The cost with the setting.
        cost: Option<Cost>,
        /// The cost as recorded.
        cost_before: Option<Cost>,
        /// What the setting gives under the limit of the recording.
        under_limit: Option<UnderLimit>,
    },
    /// No setting is worth its cost.
    NotWorthIt {
        /// The need as recorded, in bytes; `null` in JSON if no device suffices.
        before_bytes: Option<u64>,
        /// The least need of all settings, in bytes.
        least_bytes: u64,
        /// The share of the recorded time that the device calls of the setting with the least need add.
        more_time: Option<f64>,
        /// The peak of live bytes.
        live: LivePeak,
        /// What the recorded setting gives under the limit of the recording.
        under_limit: Option<UnderLimit>,
    },
    /// The recording runs with none of the settings.
    CannotHelp {
        /// The reason.
        #[serde(flatten)]
        why: Hindrance,
        /// The failed request, if it is at least as large as what the largest holder holds.
        failed_request: Option<CodeBytes>,
        /// The code that holds the most bytes, or the size of its blocks.
        largest_holder: Option<LargestHolder>,
    },
    /// The recording has no history, so no setting follows from it.
    NoHistory(NoHistory),
    /// No setting was searched besides the recorded one.
    NotSearched {
        /// The reason, as a sentence.
        why: String,
    },
}

/// The peak of live bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct LivePeak {
    /// In bytes, as requested.
    pub live_bytes: u64,
    /// Whether a request that failed is part of it.
    pub with_failed: bool,
}

/// What a setting gives under the limit of a recording under which it runs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, JsonSchema)]
pub struct UnderLimit {
    /// The limit.
    #[serde(skip)]
    pub limit: Limit,
    /// The number of requests that failed when the recording was made.
    pub failures: u64,
    /// Whether the recorded setting fails under the limit.
    pub is_rescue: bool,
    /// Whether the need is above the limit, so that nothing is to spare.
    pub is_tight: bool,
}

/// The reason why no setting can help.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(tag = "because", rename_all = "snake_case")]
pub enum Hindrance {
    /// No device suffices, and there is no limit.
    NoDevice {
        /// The peak of live bytes.
        live: LivePeak,
    },
    /// It is not decided whether a limit or the driver refused a request.
    Undecided {
        /// The request.
        #[serde(skip)]
        refused: RefusedWithFree,
    },
    /// One request is larger than the limit.
    LargeRequest {
        /// The request.
        request: CodeBytes,
        /// Whether it failed.
        has_failed: bool,
        /// The limit.
        #[serde(skip)]
        limit: Limit,
    },
    /// The live bytes alone exceed the limit.
    LiveBytes {
        /// The peak of live bytes.
        live: LivePeak,
        /// The limit.
        #[serde(skip)]
        limit: Limit,
    },
    /// Every setting needs more than the limit.
    Needs {
        /// The least need, in bytes; `null` in JSON if no device suffices.
        least_bytes: Option<u64>,
        /// The limit.
        #[serde(skip)]
        limit: Limit,
    },
}

/// Bytes, and the code that requested them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct CodeBytes {
    /// The requested bytes.
    pub requested_bytes: u64,
    /// The label of the code, if its stack was recorded.
    pub code: Option<String>,
}

/// The code that holds the most bytes at a moment, or the size of its blocks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct LargestHolder {
    /// The requested bytes of its blocks.
    pub held_bytes: u64,
    /// The number of its blocks.
    pub blocks: u64,
    /// The label of the code; `null` in JSON if no stacks were recorded.
    pub code: Option<String>,
    /// Without code: the requested bytes of each block.
    pub each_bytes: Option<u64>,
}

impl Verdict {
    /// Returns the name of the kind for the field `headline` of JSON.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::WorthIt { .. } => "worth it",
            Self::NotWorthIt { .. } => "not worth it",
            Self::CannotHelp { .. } => "cannot help",
            Self::NoHistory(_) => "no history",
            Self::NotSearched { .. } => "not searched",
        }
    }
}

impl Advice {
    /// Returns the result of the search. `main` is the moment whose holders are named if no setting can help.
    #[must_use]
    pub fn verdict(&self, recording: &Recording, main: Option<&Picture>) -> Verdict {
        let least = self.best();
        match (self.worth_setting(recording), least) {
            _ if !self.tried.iter().any(Tried::runs) => cannot_help(least, recording, main),
            (Some(choice), _) => self.worth(choice, recording),
            (None, Some(least)) => self.not_worth(least, recording),
            (None, None) => cannot_help(None, recording, main),
        }
    }

    /// Returns the setting that is worth its cost, if there is one.
    #[must_use]
    pub fn worth_it(&self, recording: &Recording) -> Option<&Tried> {
        self.worth_setting(recording).filter(|_| self.tried.iter().any(Tried::runs))
    }

    /// Returns the setting to name first: the one for PyTorch's own allocator, unless the one for this
    /// library's allocator needs less by at least the share [`WORTH`].
    pub(super) fn worth_setting(&self, recording: &Recording) -> Option<&Tried> {
        let (pytorch, ours) = (self.worth_in_pytorch(recording), self.worth_in_ours(recording));
        let is_much_less = |ours: &Tried, pytorch: &Tried| {
            let more = needs(pytorch).saturating_sub(needs(ours));
            part(more, needs(ours)) >= WORTH
        };
        match (pytorch, ours) {
            (Some(pytorch), Some(ours)) if is_much_less(ours, pytorch) => Some(ours),
            (Some(pytorch), _) => Some(pytorch),
            (None, ours) => ours,
        }
    }

    /// Returns the [`simplest`] of the settings for PyTorch's own allocator that are worth their cost.
    pub(super) fn worth_in_pytorch(&self, recording: &Recording) -> Option<&Tried> {
        let wanted = |tried: &&Tried| self.is_for_pytorch(tried) && self.is_worth(tried, recording);
        simplest(self.tried.iter().filter(wanted))
    }

    /// Returns the [`simplest`] of the settings for this library's allocator that are worth their cost.
    pub(super) fn worth_in_ours(&self, recording: &Recording) -> Option<&Tried> {
        let is_ours = |tried: &Tried| tried.for_pytorch().is_none();
        let wanted = |tried: &&Tried| is_ours(tried) && self.is_worth(tried, recording);
        simplest(self.tried.iter().filter(wanted))
    }

    fn is_worth(&self, tried: &Tried, recording: &Recording) -> bool {
        if !tried.runs() || !self.recorded.runs() {
            return tried.runs();
        }
        let before = needs(&self.recorded);
        let saved = part(before.saturating_sub(needs(tried)), before);
        let more_ns = tried.device_ns().saturating_sub(self.recorded.device_ns());
        saved >= WORTH && time_share(more_ns, recording).is_none_or(|share| share <= saved)
    }

    fn worth(&self, choice: &Tried, recording: &Recording) -> Verdict {
        let for_pytorch = choice.for_pytorch();
        Verdict::WorthIt {
            conf: for_pytorch.unwrap_or(&choice.conf).to_owned(),
            is_for_pytorch: for_pytorch.is_some(),
            has_pytorch_setting: self.worth_in_pytorch(recording).is_some(),
            needs_bytes: needs(choice),
            before_bytes: self.recorded.need.needs_bytes,
            cost: choice.need.cost,
            cost_before: self.recorded.need.cost,
            under_limit: self.under_limit(choice, recording),
        }
    }

    fn not_worth(&self, least: &Tried, recording: &Recording) -> Verdict {
        let more_ns = least.device_ns().saturating_sub(self.recorded.device_ns());
        Verdict::NotWorthIt {
            before_bytes: self.recorded.need.needs_bytes,
            least_bytes: needs(least),
            more_time: time_share(more_ns, recording),
            live: LivePeak::of(recording),
            under_limit: self.under_limit(&self.recorded, recording),
        }
    }

    fn under_limit(&self, tried: &Tried, recording: &Recording) -> Option<UnderLimit> {
        let limit = recording.limit.filter(|_| tried.runs_under_limit == Some(true))?;
        Some(UnderLimit {
            limit,
            failures: recording.figures.ooms,
            is_rescue: recording.figures.ooms > 0 && !self.recorded.runs(),
            is_tight: needs(tried) > limit.bytes,
        })
    }
}

impl LivePeak {
    /// Returns the peak of a recording.
    pub(super) fn of(recording: &Recording) -> Self {
        let served_bytes = Streams::of(&recording.workload).peak_live_bytes;
        let bytes = recording.live_peak_bytes;
        Self { live_bytes: bytes, with_failed: bytes > served_bytes }
    }
}

fn cannot_help(least: Option<&Tried>, recording: &Recording, main: Option<&Picture>) -> Verdict {
    let callers = Callers::of(&recording.trace.stacks, Compared::Code);
    let why = hindrance(least, recording, &callers);
    let (mut failed_request, mut largest_holder) = (None, None);
    // Another holder is not to blame where the request alone is too large, or where the limit is not known.
    if !matches!(why, Hindrance::Undecided { .. } | Hindrance::LargeRequest { .. }) {
        largest_holder = main.and_then(|main| LargestHolder::of(&main.holders, &callers));
        let held_bytes = largest_holder.as_ref().map_or(0, |holder| holder.held_bytes);
        let failed = main.and_then(|main| main.failed);
        failed_request =
            failed.filter(|failed| failed.requested_bytes >= held_bytes).map(|failed| CodeBytes {
                requested_bytes: failed.requested_bytes,
                code: callers.code_of(failed.stack),
            });
    }
    Verdict::CannotHelp { why, failed_request, largest_holder }
}

fn hindrance(least: Option<&Tried>, recording: &Recording, callers: &Callers<'_>) -> Hindrance {
    let live = LivePeak::of(recording);
    let Some(limit) = recording.limit else { return Hindrance::NoDevice { live } };
    if let LimitSource::Possible(refused) = limit.source {
        return Hindrance::Undecided { refused };
    }
    if let Some((request, has_failed)) = request_beyond(limit, recording, callers) {
        return Hindrance::LargeRequest { request, has_failed, limit };
    }
    match live.live_bytes >= limit.below_bytes.unwrap_or(limit.bytes.saturating_add(1)) {
        true => Hindrance::LiveBytes { live, limit },
        false => Hindrance::Needs { least_bytes: least.map(needs), limit },
    }
}

/// Returns the first of the largest requests, and whether it failed, if it is larger than the limit.
fn request_beyond(
    limit: Limit,
    recording: &Recording,
    callers: &Callers<'_>,
) -> Option<(CodeBytes, bool)> {
    let requests = recording.workload.ops.iter().filter_map(|op| match op {
        Op::Allocate { id, bytes, .. } => Some((bytes, false, id)),
        Op::AllocateFailing { id, bytes, .. } => Some((bytes, true, id)),
        _ => None,
    });
    let (bytes, has_failed, id) = requests.rev().max_by_key(|(bytes, ..)| *bytes)?;
    let code = || callers.code_of(stack_of(recording, id));
    (bytes > limit.highest_bytes())
        .then(|| (CodeBytes { requested_bytes: bytes, code: code() }, has_failed))
}

impl LargestHolder {
    /// Returns the code that holds the most bytes, or the size of its blocks if the recording has no stacks.
    fn of(holders: &Holders, callers: &Callers<'_>) -> Option<Self> {
        if holders.has_stacks()
            && let Some(row) = holders.by_code(callers, usize::MAX).into_iter().next()
        {
            let (bytes, blocks) = (row.holder.requested_bytes, row.holder.blocks);
            return Some(Self {
                held_bytes: bytes,
                blocks,
                code: Some(row.asked_for_by),
                each_bytes: None,
            });
        }
        let class = holders.by_size.first()?;
        let (bytes, blocks) = (class.requested_bytes, class.blocks);
        Some(Self { held_bytes: bytes, blocks, code: None, each_bytes: Some(class.each_bytes) })
    }
}

fn needs(tried: &Tried) -> u64 {
    tried.need.needs_bytes.unwrap_or(u64::MAX)
}

/// Returns the setting with the fewest keys among those whose need is within [`ALIKE`] of the smallest.
/// `settings` are ordered by need.
fn simplest<'a>(mut settings: impl Iterator<Item = &'a Tried> + Clone) -> Option<&'a Tried> {
    let all = settings.clone();
    let least = needs(settings.next()?);
    let alike = all.filter(|tried| part(needs(tried).saturating_sub(least), least) <= ALIKE);
    alike.min_by_key(|tried| (tried.keys(), needs(tried), tried.device_ns()))
}

/// Returns the device time as a share of the recorded time, if the recording has times.
#[expect(clippy::cast_precision_loss, reason = "a printed share")]
fn time_share(device_ns: u64, recording: &Recording) -> Option<f64> {
    let duration_us = recording.figures.duration_us.filter(|us| *us > 0)?;
    Some(device_ns as f64 / 1e3 / duration_us as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ForTorch, Memory, Need};
    use stratalloc::size::MIB;

    fn tried(conf: &str, needs_mib: u64) -> Tried {
        let cost = Some(Cost { retries: 1, device_calls: 4, device_ns: 2_000_000 });
        let need = Need { needs_bytes: Some(needs_mib * MIB), cost, ..Need::default() };
        Tried::new(conf.to_owned(), need)
    }

    fn advice(best: &[Tried]) -> Advice {
        Advice {
            recorded: tried("compat:pytorch", 2100),
            tried: best.to_vec(),
            asked: Vec::new(),
            modelled: None,
            passed_over: 0,
            is_cut_short: false,
            torch: ForTorch::Unknown,
            is_rocm: false,
        }
    }

    fn recording() -> Recording {
        Recording::new(stratalloc_recording::Trace::default(), None, Memory::default())
    }

    #[test]
    fn the_sentence_names_pytorchs_allocator_where_it_needs_hardly_more() {
        let ours = tried("max_split_size_mb:32", 1490);
        let theirs = tried("max_split_size_mb:64,compat:pytorch", 1493);
        let sentence = advice(&[ours.clone(), theirs]).verdict(&recording(), None).sentence();
        assert_eq!(
            sentence,
            "Set max_split_size_mb:64 in PyTorch's own allocator: the recording then needs 1,493 MiB \
             instead of 2,100 MiB (29 % less). Retries: 1, as before."
        );
        let theirs = tried("compat:pytorch", 1800);
        let sentence = advice(&[ours.clone(), theirs]).verdict(&recording(), None).sentence();
        assert!(sentence.starts_with("Set max_split_size_mb:32 in stratalloc"), "{sentence}");
        let none = "No setting of PyTorch's own allocator is worth its cost.";
        assert!(!sentence.contains(none), "{sentence}");
        let sentence = advice(&[ours]).verdict(&recording(), None).sentence();
        assert!(sentence.starts_with("Set max_split_size_mb:32 in stratalloc"), "{sentence}");
        assert!(sentence.ends_with(none), "{sentence}");
    }

    #[test]
    fn a_saving_below_two_hundredths_is_not_worth_it_and_nothing_is_printed_to_paste() {
        let advice = advice(&[tried("expandable_segments:True", 2060)]);
        let sentence = advice.verdict(&recording(), None).sentence();
        let begin = "No setting is worth its cost: the recording needs 2,100 MiB as it is, and the best \
                     setting saves 40.0 MiB (1.9 %).";
        assert!(sentence.starts_with(begin), "{sentence}");
        assert_eq!(advice.verdict(&recording(), None).name(), "not worth it");
        assert_eq!(advice.worth_in_pytorch(&recording()), None);
        assert_eq!(advice.worth_in_ours(&recording()), None);
    }

    #[test]
    fn device_calls_may_take_no_larger_share_of_time_than_the_share_of_memory_that_is_saved() {
        let mut slow = tried("expandable_segments:True,compat:pytorch", 1680);
        let settings = |slow: &Tried| {
            let fast = tried("max_split_size_mb:64,compat:pytorch", 1890);
            advice(&[slow.clone(), fast])
        };
        let mut recording = recording();
        recording.figures.duration_us = Some(10_000);
        let chosen = |advice: &Advice, recording: &Recording| {
            advice.worth_setting(recording).map(|tried| tried.need.needs_bytes.unwrap() / MIB)
        };
        assert_eq!(chosen(&settings(&slow), &recording), Some(1680));
        // 3 ms more in 10 ms is a larger share than the fifth of memory that is saved.
        slow.need.cost = Some(Cost { device_ns: 5_000_000, ..Cost::default() });
        assert_eq!(chosen(&settings(&slow), &recording), Some(1890));
        assert_eq!(chosen(&advice(&[slow.clone()]), &recording), None);
        let sentence = advice(&[slow.clone()]).verdict(&recording, None).sentence();
        assert!(
            sentence.contains("saves 420 MiB (20 %), but its device calls take 30 %"),
            "{sentence}"
        );
        recording.figures.duration_us = None;
        assert_eq!(chosen(&settings(&slow), &recording), Some(1680));
    }

    #[test]
    fn a_setting_that_fails_under_the_limit_is_not_blamed_for_its_time() {
        let fails = tried("expandable_segments:True,compat:pytorch", 1000);
        let fails = Tried { runs_under_limit: Some(false), ..fails };
        let mut advice = advice(&[fails, tried("compat:pytorch", 2100)]);
        advice.recorded.runs_under_limit = Some(true);
        let sentence = advice.verdict(&recording(), None).sentence();
        assert!(sentence.contains("(52 %), but the limit or the version"), "{sentence}");
    }

    #[test]
    fn needs_that_are_alike_go_to_the_string_with_fewer_keys() {
        let one = tried("expandable_segments:True,compat:pytorch", 1004);
        let two = tried("max_split_size_mb:64,roundup_power2_divisions:8,compat:pytorch", 1000);
        let advice_of = |one: Tried| advice(&[two.clone(), one]);
        let sentence = advice_of(one).verdict(&recording(), None).sentence();
        assert!(sentence.starts_with("Set expandable_segments:True in PyTorch's"), "{sentence}");
        let more = tried("expandable_segments:True,compat:pytorch", 1010);
        let sentence = advice_of(more).verdict(&recording(), None).sentence();
        assert!(sentence.starts_with("Set max_split_size_mb:64,roundup"), "{sentence}");
    }

    #[test]
    fn keys_that_the_version_lacks_are_not_named() {
        let new = tried("large_segment_size_mb:12,compat:pytorch", 1000);
        let old = tried("expandable_segments:True,compat:pytorch", 1200);
        let mut advice = advice(&[new, old]);
        for (torch, expected) in [
            (ForTorch::Unknown, 1200),
            (ForTorch::Set("2.10".parse().unwrap()), 1200),
            (ForTorch::Set("2.11".parse().unwrap()), 1000),
            (ForTorch::Shown("2.12".parse().unwrap()), 1000),
        ] {
            advice.torch = torch;
            let choice = advice.worth_in_pytorch(&recording()).unwrap();
            assert_eq!(choice.need.needs_bytes, Some(expected * MIB), "{torch}");
        }
    }

    #[test]
    fn live_bytes_beyond_the_limit_are_beyond_the_help_of_settings() {
        let mut recording = recording();
        recording.live_peak_bytes = 1500 * MIB;
        recording.limit = Some(Limit::exactly(1400 * MIB, LimitSource::TotalMemory));
        let fails =
            |conf, needs_mib| Tried { runs_under_limit: Some(false), ..tried(conf, needs_mib) };
        let mut advice = advice(&[fails("expandable_segments:True,compat:pytorch", 1510)]);
        advice.recorded.runs_under_limit = Some(false);
        assert_eq!(advice.verdict(&recording, None).name(), "cannot help");
        let sentence = advice.verdict(&recording, None).sentence();
        assert!(
            sentence.starts_with("No setting can help: the live bytes alone (1,500 MiB"),
            "{sentence}"
        );
        assert!(sentence.ends_with("exceed the limit (1,400 MiB) by 100 MiB."), "{sentence}");
        recording.live_peak_bytes = 1300 * MIB;
        let sentence = advice.verdict(&recording, None).sentence();
        assert!(sentence.ends_with("needs least needs 1,510 MiB, 110 MiB too much."), "{sentence}");
    }
}
