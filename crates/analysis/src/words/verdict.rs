//! The sentences about the result of a search for settings.

use super::{Sentences, counted_as, grouped, mib, near, part, whole_or_near};
use crate::needs::Cost;
use crate::recording::{EITHER, LimitSource};
use crate::verdict::{CodeBytes, Hindrance, LargestHolder, LivePeak, UnderLimit, Verdict, WORTH};
use stratalloc::size::MIB;

impl Verdict {
    /// Returns the result as a sentence: the setting, how much memory it saves and its cost; or why no
    /// setting is worth its cost or can help. If none can help, also names the code that holds the most
    /// memory, and before it the failed request, if that is larger.
    #[must_use]
    pub fn sentence(&self) -> String {
        self.sentences().to_string()
    }

    /// Returns the same as [`sentence`](Self::sentence), with the most important sentences marked.
    #[must_use]
    pub fn sentences(&self) -> Sentences {
        match self {
            Self::CannotHelp { why, failed_request, largest_holder } => {
                let request =
                    failed_request.as_ref().map(|CodeBytes { requested_bytes: bytes, code }| {
                        let (bytes, code) = (whole_or_near(*bytes), in_code(code.as_deref()));
                        format!("The failed request takes the most: {bytes} MiB{code}.")
                    });
                let holder = largest_holder.as_ref().map(LargestHolder::sentence);
                let all = Sentences::one(why.sentence()).and(request.unwrap_or_default());
                all.and_more(holder.unwrap_or_default())
            }
            Self::WorthIt { has_pytorch_setting: false, before_bytes, under_limit, .. } => {
                let is_rescue = under_limit.is_some_and(|under| under.is_rescue);
                let lacks = match is_rescue || before_bytes.is_none() {
                    true => "that was tried suffices",
                    false => "is worth its cost",
                };
                let sentence = format!("No setting of PyTorch's own allocator {lacks}.");
                self.setting_sentences().and_more(sentence)
            }
            _ => self.setting_sentences(),
        }
    }

    /// Returns the sentences about settings alone.
    #[must_use]
    pub fn setting_sentences(&self) -> Sentences {
        match self {
            Self::WorthIt { needs_bytes, before_bytes: None, under_limit, .. } => {
                Sentences::one(format!(
                    "{}: the recording then runs on {} MiB, and on no device as it is.",
                    self.to_set(),
                    mib(*needs_bytes),
                ))
                .and_more(text_of(*under_limit))
            }
            Self::WorthIt {
                needs_bytes,
                before_bytes: Some(before),
                cost,
                cost_before,
                under_limit,
                ..
            } => {
                let saved = before.saturating_sub(*needs_bytes);
                let instead = match saved {
                    0 => String::new(),
                    _ => {
                        let percent = part(saved, *before) * 100.0;
                        format!(" instead of {} MiB ({percent:.0} % less)", mib(*before))
                    }
                };
                let setting = format!(
                    "{}: the recording then needs {} MiB{instead}.",
                    self.to_set(),
                    mib(*needs_bytes),
                );
                let all = Sentences::one(setting).and_more(costs(*cost, *cost_before));
                all.and_more(text_of(*under_limit))
            }
            Self::NotWorthIt { before_bytes, least_bytes, more_time, live, under_limit } => {
                let before = before_bytes.unwrap_or(u64::MAX);
                let (end, more) = why_not(before, *least_bytes, *more_time);
                let setting = format!(
                    "No setting is worth its cost: the recording needs {} MiB as it is{end}.",
                    mib(before),
                );
                let live = format!("The live bytes alone take {}.", live.in_mib());
                Sentences::one(setting)
                    .and_more(more)
                    .and_more(live)
                    .and_more(text_of(*under_limit))
            }
            Self::CannotHelp { why, .. } => Sentences::one(why.sentence()),
            Self::NoHistory(no_history) => {
                Sentences::one(no_history.sentence()).and(no_history.remedy())
            }
            Self::NotSearched { why } => Sentences::one(why.clone()),
        }
    }

    fn to_set(&self) -> String {
        let Self::WorthIt { conf, is_for_pytorch, .. } = self else { return String::new() };
        let allocator = if *is_for_pytorch { "PyTorch's own allocator" } else { "stratalloc" };
        match conf.is_empty() {
            true => format!("Use {allocator} with its default settings"),
            false => format!("Set {conf} in {allocator}"),
        }
    }
}

/// Returns the end of the sentence about the need, and a sentence after it.
fn why_not(needs_bytes: u64, least_bytes: u64, more_time: Option<f64>) -> (String, String) {
    let saved = needs_bytes.saturating_sub(least_bytes);
    let end_alone = |end: String| (end, String::new());
    match part(saved, needs_bytes) {
        _ if saved == 0 => end_alone(", and no setting that was tried needs less".to_owned()),
        share if share < WORTH => end_alone(format!(
            ", and the best setting saves {} MiB ({:.1} %)",
            near(saved),
            share * 100.0
        )),
        share => {
            let but = match more_time.filter(|time| *time > share) {
                Some(time) => {
                    format!("its device calls take {:.0} % of the recorded time more", time * 100.0)
                }
                None => "the limit or the version of PyTorch excludes it".to_owned(),
            };
            let (saved, percent) = (near(saved), share * 100.0);
            let more = format!(
                "The setting that needs least saves {saved} MiB ({percent:.0} %), but {but}."
            );
            (String::new(), more)
        }
    }
}

/// Returns what a setting gives under the limit, as a sentence.
fn text_of(under_limit: Option<UnderLimit>) -> String {
    let Some(UnderLimit { limit, failures, is_rescue, is_tight }) = under_limit else {
        return String::new();
    };
    let failed = counted_as(failures, "request failed", "requests failed");
    let spare = if is_tight { ", with nothing to spare" } else { "" };
    let bounds = limit.in_mib();
    match limit.source {
        LimitSource::Possible(_) => format!(
            "If a memory fraction is set ({bounds}), it runs without a failure{spare}; if the driver refused \
             for another reason, no allocator setting helps."
        ),
        _ if is_rescue => format!(
            "Under the limit of {bounds}, where {failed} when it was recorded, it runs without a \
             failure{spare}."
        ),
        _ => format!("It runs under the limit of {bounds}."),
    }
}

impl Hindrance {
    fn sentence(&self) -> String {
        match self {
            Self::NoDevice { live } => format!(
                "No setting that was tried runs this recording on any device: {} MiB are live at once{}.",
                near(live.live_bytes),
                live.remark()
            ),
            Self::Undecided { refused } => format!("No setting can help: {refused}, so {EITHER}."),
            Self::LargeRequest {
                request: CodeBytes { requested_bytes: bytes, code },
                has_failed,
                limit,
            } => {
                format!(
                    "No setting can help: {} alone ({} MiB{}) is larger than the limit ({}).",
                    if *has_failed { "the failed request" } else { "one request" },
                    mib(*bytes),
                    in_code(code.as_deref()),
                    limit.in_mib()
                )
            }
            Self::LiveBytes { live, limit } => {
                let by = match mib_over(live.live_bytes, limit.highest_bytes()) {
                    0 => String::new(),
                    over => format!(" by {} MiB", grouped(over)),
                };
                format!(
                    "No setting can help: the live bytes alone ({} MiB{}) exceed the limit ({}){by}.",
                    mib(live.live_bytes),
                    live.remark(),
                    limit.in_mib()
                )
            }
            Self::Needs { least_bytes, limit } => {
                let over = |least: u64| mib_over(least, limit.highest_bytes());
                let why = match least_bytes.map(|least| (mib(least), over(least))) {
                    None => "no device suffices for any of them".to_owned(),
                    Some((least, 0)) => format!("the one that needs least needs {least} MiB"),
                    Some((least, over)) => format!(
                        "the one that needs least needs {least} MiB, {} MiB too much",
                        grouped(over)
                    ),
                };
                let limit = limit.in_mib();
                format!("No setting that was tried runs under the limit of {limit}: {why}.")
            }
        }
    }
}

/// Returns by how many MiB the bytes exceed a limit, both rounded up.
fn mib_over(bytes: u64, limit_bytes: u64) -> u64 {
    bytes.div_ceil(MIB).saturating_sub(limit_bytes.div_ceil(MIB))
}

impl LivePeak {
    fn in_mib(&self) -> String {
        format!("{} MiB{}", near(self.live_bytes), self.remark())
    }

    /// Returns what to add to the figure if it includes a request that failed.
    #[must_use]
    pub fn remark(&self) -> &'static str {
        if self.with_failed { ", with the request that failed" } else { "" }
    }
}

impl LargestHolder {
    fn sentence(&self) -> String {
        let Self { held_bytes: bytes, blocks, code, each_bytes } = self;
        let (held, blocks) = (near(*bytes), counted_as(*blocks, "block", "blocks"));
        match code {
            Some(code) => format!("Largest holder: {code}, {held} MiB in {blocks}."),
            None => {
                let each = grouped(each_bytes.unwrap_or(0));
                format!("Largest holder: {held} MiB in {blocks} of {each} bytes.")
            }
        }
    }
}

/// Returns the code of a request, with a comma before it; empty if its stack was not recorded.
fn in_code(code: Option<&str>) -> String {
    code.map_or_else(String::new, |code| format!(", {code}"))
}

fn costs(cost: Option<Cost>, before: Option<Cost>) -> String {
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
    format!("{retries}{calls}.")
}
