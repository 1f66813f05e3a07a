//! The result of a search for settings: one setting is worth its cost, none is, or none can help.
//!
//! One rule decides, and all outputs follow it. A setting is worth its cost under two conditions: it saves
//! at least 2 % of the need, and the share of the recorded time that its device calls add is at most the
//! share of memory that it saves. The second condition is left out if the recording has no times. If the
//! recording fails under the recorded setting, every setting under which it runs is worth its cost.

use super::advice::{Advice, Tried};
use super::callers::{Callers, Compared};
use super::holders::stack_of;
use super::needs::Cost;
use super::recording::{EITHER, Limit, LimitSource, Recording};
use super::streams::Streams;
use super::why::Why;
use super::words::{counted_as, grouped, mib, near, part, whole_or_near};
use stratalloc::size::MIB;
use stratalloc_recording::{Op, StackId};

/// The smallest share of the need that a setting must save to be worth its cost.
const WORTH: f64 = 0.02;
/// Needs that differ by at most this share are treated as equal. Of these settings, the one with the fewest
/// keys is chosen.
const ALIKE: f64 = 0.005;

/// The result of an advice.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Headline<'a> {
    /// This setting is worth its cost.
    Worth(&'a Tried),
    /// No setting is worth its cost. Contains the setting that needs the smallest device, which may be the
    /// recorded one.
    NotWorth(&'a Tried),
    /// The recording runs with none of the settings. Contains the setting that needs the smallest device,
    /// if any device suffices without the limit.
    CannotHelp(Option<&'a Tried>),
}

impl<'a> Headline<'a> {
    /// Returns the setting that is worth its cost, if there is one.
    pub fn choice(&self) -> Option<&'a Tried> {
        match self {
            Self::Worth(choice) => Some(choice),
            Self::NotWorth(_) | Self::CannotHelp(_) => None,
        }
    }

    /// Returns the variant's name for JSON.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Worth(_) => "worth it",
            Self::NotWorth(_) => "not worth it",
            Self::CannotHelp(_) => "cannot help",
        }
    }
}

impl Advice {
    /// Returns the result of the advice.
    #[must_use]
    pub fn headline(&self, recording: &Recording) -> Headline<'_> {
        let least = self.best();
        if !self.tried.iter().any(Tried::runs) {
            return Headline::CannotHelp(least);
        }
        match (self.worth_setting(recording), least) {
            (Some(choice), _) => Headline::Worth(choice),
            (None, Some(least)) => Headline::NotWorth(least),
            (None, None) => Headline::CannotHelp(None),
        }
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

    /// Returns the result as a sentence: the setting, how much memory it saves and its cost; or why no
    /// setting is worth its cost or can help.
    #[must_use]
    pub fn sentence(&self, recording: &Recording) -> String {
        match self.headline(recording) {
            Headline::Worth(choice) => self.worth_sentence(choice, recording),
            Headline::NotWorth(least) => self.not_worth_sentence(least, recording),
            Headline::CannotHelp(least) => cannot_help_sentence(least, recording),
        }
    }

    fn worth_sentence(&self, choice: &Tried, recording: &Recording) -> String {
        let limited = self.under_limit(choice, recording);
        let Some(before) = self.recorded.need.needs_bytes else {
            return format!(
                "{}: the recording then runs on {} MiB, and on no device as it is{limited}.",
                setting(choice),
                mib(needs(choice))
            );
        };
        let saved = before.saturating_sub(needs(choice));
        let instead = match saved {
            0 => String::new(),
            _ => {
                let percent = part(saved, before) * 100.0;
                format!(" instead of {} MiB ({percent:.0} % less)", mib(before))
            }
        };
        format!(
            "{}: the recording then needs {} MiB{instead}{}{limited}.",
            setting(choice),
            mib(needs(choice)),
            cost(choice.need.cost, self.recorded.need.cost)
        )
    }

    fn not_worth_sentence(&self, least: &Tried, recording: &Recording) -> String {
        let before = needs(&self.recorded);
        let saved = before.saturating_sub(needs(least));
        let why = match part(saved, before) {
            _ if saved == 0 => ", and no setting that was tried needs less".to_owned(),
            share if share < WORTH => {
                format!(", and the best setting saves {} MiB ({:.1} %)", near(saved), share * 100.0)
            }
            share => {
                let more_ns = least.device_ns().saturating_sub(self.recorded.device_ns());
                let time = time_share(more_ns, recording).unwrap_or(0.0);
                format!(
                    ". The setting that needs least saves {} MiB ({:.0} %), but its device calls take {:.0} % \
                     of the recorded time more",
                    near(saved),
                    share * 100.0,
                    time * 100.0
                )
            }
        };
        format!(
            "No setting is worth its cost: the recording needs {} MiB as it is{why}. The live bytes alone take \
             {} MiB{}{}.",
            mib(before),
            near(recording.live_peak_bytes),
            with_failed(recording),
            self.under_limit(&self.recorded, recording)
        )
    }

    fn under_limit(&self, tried: &Tried, recording: &Recording) -> String {
        let Some(limit) = recording.limit.filter(|_| tried.runs_under_limit == Some(true)) else {
            return String::new();
        };
        let ooms = recording.figures.ooms;
        let failed = counted_as(ooms, "request failed", "requests failed");
        let spare = match needs(tried) > limit.bytes {
            true => ", with nothing to spare",
            false => "",
        };
        let bounds = limit.in_mib();
        match limit.source {
            LimitSource::Possible(_) => format!(
                ". If a memory fraction is set ({bounds}), it runs without a failure{spare}; if the driver refused \
                 for another reason, no allocator setting helps"
            ),
            _ if ooms > 0 && !self.recorded.runs() => format!(
                ". Under the limit of {bounds}, where {failed} when it was recorded, it runs without a \
                 failure{spare}"
            ),
            _ => format!(". It runs under the limit of {bounds}"),
        }
    }

    /// Returns the headline as a sentence. If no setting can help, adds the code that holds the most memory,
    /// and before it the failed request, if that is larger.
    pub fn sentence_with_holder(&self, recording: &Recording, why: &Why) -> String {
        let sentence = self.sentence(recording);
        let Headline::CannotHelp(_) = self.headline(recording) else { return sentence };
        let is_decided = recording.limit.is_none_or(|limit| limit.known().is_some());
        if !is_decided || LargestRequest::beyond_limit(recording).is_some() {
            return sentence;
        }
        let callers = Callers::of(&recording.trace.stacks, Compared::Code);
        let holder = largest_holder(&callers, why);
        let failed = why.main.as_ref().and_then(|picture| picture.failed).filter(|failed| {
            holder.as_ref().is_none_or(|holder| failed.requested_bytes >= holder.bytes)
        });
        let request = failed.map(|failed| {
            let (bytes, code) =
                (whole_or_near(failed.requested_bytes), code_of(failed.stack, &callers));
            format!(" The failed request takes the most: {bytes} MiB{code}.")
        });
        let holder = holder.map(|holder| format!(" Largest holder: {}.", holder.text));
        [Some(sentence), request, holder].into_iter().flatten().collect()
    }
}

/// The largest request of a recording.
struct LargestRequest {
    bytes: u64,
    has_failed: bool,
    stack: Option<StackId>,
}

impl LargestRequest {
    /// Returns the first of the largest requests, if it is larger than the limit.
    fn beyond_limit(recording: &Recording) -> Option<Self> {
        let requests = recording.workload.ops.iter().filter_map(|op| match *op {
            Op::Allocate { id, bytes, .. } => Some((bytes, false, id)),
            Op::AllocateFailing { id, bytes, .. } => Some((bytes, true, id)),
            _ => None,
        });
        let (bytes, has_failed, id) = requests.rev().max_by_key(|(bytes, ..)| *bytes)?;
        let is_beyond = bytes > recording.limit?.highest_bytes();
        is_beyond.then(|| Self { bytes, has_failed, stack: stack_of(recording, id) })
    }

    fn sentence(&self, recording: &Recording, limit: &Limit) -> String {
        let callers = Callers::of(&recording.trace.stacks, Compared::Code);
        let request = if self.has_failed { "the failed request" } else { "one request" };
        format!(
            "No setting can help: {request} alone ({} MiB{}) is larger than the limit ({}).",
            mib(self.bytes),
            code_of(self.stack, &callers),
            limit.in_mib()
        )
    }
}

/// Returns the code of a request, with a comma before it; empty if the recording has no stacks.
fn code_of(stack: Option<StackId>, callers: &Callers<'_>) -> String {
    let code = stack.map(|stack| callers.labels(&[callers.of_stack(stack)]).concat());
    code.map_or_else(String::new, |code| format!(", {code}"))
}

/// The code, or the size of blocks, that holds the most bytes.
struct LargestHolder {
    bytes: u64,
    text: String,
}

/// Returns the code that holds the most bytes, or the size of its blocks if the recording has no stacks.
fn largest_holder(callers: &Callers<'_>, why: &Why) -> Option<LargestHolder> {
    let holders = &why.main.as_ref()?.holders;
    let blocks = |blocks: u64| counted_as(blocks, "block", "blocks");
    if holders.by_stack.iter().any(|holder| holder.stack.is_some())
        && let Some(code) = holders.by_code(callers, usize::MAX).into_iter().next()
    {
        let bytes = code.holder.requested_bytes;
        let (held, count) = (near(bytes), blocks(code.holder.blocks));
        let text = format!("{}, {held} MiB in {count}", code.asked_for_by);
        return Some(LargestHolder { bytes, text });
    }
    let class = holders.by_size.first()?;
    let (held, count) = (near(class.requested_bytes), blocks(class.blocks));
    let text = format!("{held} MiB in {count} of {} bytes", grouped(class.each_bytes));
    Some(LargestHolder { bytes: class.requested_bytes, text })
}

fn cannot_help_sentence(least: Option<&Tried>, recording: &Recording) -> String {
    let live = recording.live_peak_bytes;
    let Some(limit) = recording.limit else {
        return format!(
            "No setting that was tried runs this recording on any device: {} MiB are live at once{}.",
            near(live),
            with_failed(recording)
        );
    };
    if let LimitSource::Possible(refused) = limit.source {
        return format!("No setting can help: {refused}; {EITHER}.");
    }
    if let Some(request) = LargestRequest::beyond_limit(recording) {
        return request.sentence(recording, &limit);
    }
    let bounds = limit.in_mib();
    let over = |bytes: u64| bytes.div_ceil(MIB).saturating_sub(limit.highest_bytes().div_ceil(MIB));
    if live >= limit.below_bytes.unwrap_or(limit.bytes.saturating_add(1)) {
        let by = match over(live) {
            0 => String::new(),
            over => format!(" by {} MiB", grouped(over)),
        };
        return format!(
            "No setting can help: the live bytes alone ({} MiB{}) exceed the limit ({bounds}){by}.",
            mib(live),
            with_failed(recording),
        );
    }
    let why = match least.map(|least| (least, over(needs(least)))) {
        None => "no device suffices for any of them".to_owned(),
        Some((least, 0)) => format!("the one that needs least needs {} MiB", mib(needs(least))),
        Some((least, over)) => format!(
            "the one that needs least needs {} MiB, {} MiB too much",
            mib(needs(least)),
            grouped(over)
        ),
    };
    format!("No setting that was tried runs under the limit of {bounds}: {why}.")
}

/// Returns what to add to the figure of live bytes: a remark if it includes a request that failed.
pub fn with_failed(recording: &Recording) -> &'static str {
    let served_bytes = Streams::of(&recording.workload).peak_live_bytes;
    match recording.live_peak_bytes > served_bytes {
        true => ", with the request that failed",
        false => "",
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

fn setting(tried: &Tried) -> String {
    let (settings, allocator) = match tried.for_pytorch() {
        Some(settings) => (settings, "PyTorch's own allocator"),
        None => (tried.conf.as_str(), "stratalloc"),
    };
    match settings.is_empty() {
        true => format!("Use {allocator} with its default settings"),
        false => format!("Set {settings} in {allocator}"),
    }
}

fn cost(cost: Option<Cost>, before: Option<Cost>) -> String {
    let (Some(cost), Some(before)) = (cost, before) else { return String::new() };
    let retries = match cost.retries == before.retries {
        true => format!("Retries: {}, as before", grouped(cost.retries)),
        false => format!("Retries: {}, before {}", grouped(cost.retries), grouped(before.retries)),
    };
    // In tenths of a millisecond, the precision that is shown.
    let tenths = |ns: u64| ns.saturating_add(50_000) / 100_000;
    let ms = |tenths: u64| format!("{}.{} ms", grouped(tenths / 10), tenths % 10);
    let (more, less) = (
        tenths(cost.device_ns.saturating_sub(before.device_ns)),
        tenths(before.device_ns.saturating_sub(cost.device_ns)),
    );
    let calls = match (more, less) {
        (0, 0) => String::new(),
        (more, 0) => format!("; device calls take {} more", ms(more)),
        (_, less) => format!("; device calls take {} less", ms(less)),
    };
    format!(". {retries}{calls}")
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
            modelled: None,
            passed_over: 0,
            is_cut_short: false,
            torch: ForTorch::Unknown,
        }
    }

    fn recording() -> Recording {
        Recording::new(stratalloc_recording::Trace::default(), None, Memory::default())
    }

    #[test]
    fn the_sentence_names_pytorchs_allocator_where_it_needs_hardly_more() {
        let ours = tried("max_split_size_mb:32", 1490);
        let theirs = tried("max_split_size_mb:64,compat:pytorch", 1493);
        let sentence = advice(&[ours.clone(), theirs]).sentence(&recording());
        assert_eq!(
            sentence,
            "Set max_split_size_mb:64 in PyTorch's own allocator: the recording then needs 1,493 MiB \
             instead of 2,100 MiB (29 % less). Retries: 1, as before."
        );
        let theirs = tried("compat:pytorch", 1800);
        let sentence = advice(&[ours, theirs]).sentence(&recording());
        assert!(sentence.starts_with("Set max_split_size_mb:32 in stratalloc"), "{sentence}");
    }

    #[test]
    fn a_saving_below_two_hundredths_is_not_worth_it_and_nothing_is_printed_to_paste() {
        let advice = advice(&[tried("expandable_segments:True", 2060)]);
        let sentence = advice.sentence(&recording());
        let begin = "No setting is worth its cost: the recording needs 2,100 MiB as it is, and the best \
                     setting saves 40.0 MiB (1.9 %).";
        assert!(sentence.starts_with(begin), "{sentence}");
        assert_eq!(advice.headline(&recording()).name(), "not worth it");
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
        let sentence = advice(&[slow.clone()]).sentence(&recording);
        assert!(
            sentence.contains("saves 420 MiB (20 %), but its device calls take 30 %"),
            "{sentence}"
        );
        recording.figures.duration_us = None;
        assert_eq!(chosen(&settings(&slow), &recording), Some(1680));
    }

    #[test]
    fn needs_that_are_alike_go_to_the_string_with_fewer_keys() {
        let one = tried("expandable_segments:True,compat:pytorch", 1004);
        let two = tried("max_split_size_mb:64,roundup_power2_divisions:8,compat:pytorch", 1000);
        let advice_of = |one: Tried| advice(&[two.clone(), one]);
        let sentence = advice_of(one).sentence(&recording());
        assert!(sentence.starts_with("Set expandable_segments:True in PyTorch's"), "{sentence}");
        let more = tried("expandable_segments:True,compat:pytorch", 1010);
        let sentence = advice_of(more).sentence(&recording());
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
        assert_eq!(advice.headline(&recording).name(), "cannot help");
        let sentence = advice.sentence(&recording);
        assert!(
            sentence.starts_with("No setting can help: the live bytes alone (1,500 MiB"),
            "{sentence}"
        );
        assert!(sentence.ends_with("exceed the limit (1,400 MiB) by 100 MiB."), "{sentence}");
        recording.live_peak_bytes = 1300 * MIB;
        let sentence = advice.sentence(&recording);
        assert!(sentence.ends_with("needs least needs 1,510 MiB, 110 MiB too much."), "{sentence}");
    }
}
