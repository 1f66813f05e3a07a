//! What an analysis says, in sentences: every number in them was replayed.

use std::collections::BTreeMap;

use super::advice::{Advice, Tried};
#[cfg(feature = "cli")]
use super::causes::HeapCauses;
use super::causes::{Causes, Moment, Picture};
use super::needs::Cost;
#[cfg(feature = "cli")]
use super::needs::Need;
use super::recording::Recording;
use super::streams::Streams;
#[cfg(feature = "cli")]
use crate::ids::PoolId;
use crate::ids::StreamId;
use crate::size::MIB;

/// A saving below this part of the need is none.
const WORTH: f64 = 0.01;
/// What PyTorch's allocator may need more than ours and still be named first, because it is in use.
const ALIKE: f64 = 0.005;

/// A whole number with separators.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// "1 retry", "2 retries".
pub(crate) fn counted_as(number: u64, one: &str, more: &str) -> String {
    format!("{} {}", grouped(number), if number == 1 { one } else { more })
}

/// Bytes as tables show them: whole MiB from 100 MiB on, and tenths below.
pub(crate) fn near(bytes: u64) -> String {
    let tenths = (u128::from(bytes) * 10 + u128::from(MIB) / 2) / u128::from(MIB);
    match u64::try_from(tenths).unwrap_or(u64::MAX) {
        tenths if bytes < 100 * MIB => format!("{}.{}", tenths / 10, tenths % 10),
        _ => grouped(bytes.saturating_add(MIB / 2) / MIB),
    }
}

/// Bytes in whole MiB, rounded up: a device of this size has them.
fn mib(bytes: u64) -> String {
    grouped(bytes.div_ceil(MIB))
}

#[expect(clippy::cast_precision_loss, reason = "shown to people")]
fn part(bytes: u64, of: u64) -> f64 {
    if of == 0 { 0.0 } else { bytes as f64 / of as f64 }
}

fn setting(tried: &Tried) -> String {
    let (settings, whose) = match tried.for_pytorch() {
        Some(settings) => (settings, "PyTorch's own allocator"),
        None => (tried.conf.as_str(), "stratalloc"),
    };
    match settings.is_empty() {
        true => format!("Use {whose} with its default settings"),
        false => format!("Set {settings} in {whose}"),
    }
}

fn cost(cost: Option<Cost>, before: Option<Cost>) -> String {
    let (Some(cost), Some(before)) = (cost, before) else { return String::new() };
    let retries = match cost.retries == before.retries {
        true => format!("Retries: {}, as before", grouped(cost.retries)),
        false => format!("Retries: {}, before {}", grouped(cost.retries), grouped(before.retries)),
    };
    // In tenths of a millisecond, as shown.
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

impl Advice {
    /// The setting to name first: PyTorch's own allocator where it needs hardly more.
    #[must_use]
    pub fn first_choice(&self) -> Option<&Tried> {
        let best = self.best()?;
        let needs = |tried: &Tried| tried.need.needs_bytes.unwrap_or(u64::MAX);
        let pytorch = self
            .best_for_pytorch()
            .filter(|tried| part(needs(tried).saturating_sub(needs(best)), needs(best)) <= ALIKE);
        pytorch.or(Some(best))
    }

    /// What to set, how much memory it saves and what it costs; or that nothing helps, and why.
    #[must_use]
    pub fn sentence(&self, recording: &Recording) -> String {
        let live = recording.live_peak_bytes;
        let Some(choice) = self.first_choice() else {
            return format!(
                "No setting that was tried runs this recording on any device: {} MiB are live at once",
                near(live)
            );
        };
        let needs = choice.need.needs_bytes.unwrap_or(u64::MAX);
        let limited = self.under_limit(recording);
        let Some(before) = self.recorded.need.needs_bytes else {
            return format!(
                "{}: the recording then runs on {} MiB, and on no device as it is{limited}.",
                setting(choice),
                mib(needs)
            );
        };
        let saved = before.saturating_sub(needs);
        let served_bytes = Streams::of(&recording.workload).peak_live_bytes;
        let with_failed = if live > served_bytes { ", with the request that failed" } else { "" };
        if part(saved, before) < WORTH {
            return format!(
                "No setting helps: the recording needs {} MiB as it is, no setting that was tried needs less \
                 than {} MiB, and the live bytes alone take {} MiB{with_failed}{limited}.",
                mib(before),
                mib(needs.min(before)),
                near(live)
            );
        }
        format!(
            "{}: the recording then needs {} MiB instead of {} MiB ({:.0} % less){}{limited}.",
            setting(choice),
            mib(needs),
            mib(before),
            part(saved, before) * 100.0,
            cost(choice.need.cost, self.recorded.need.cost)
        )
    }

    fn under_limit(&self, recording: &Recording) -> String {
        let (Some(limit), Some(runs)) = (recording.limit, self.best_runs_under_limit) else {
            return String::new();
        };
        let ooms = recording.figures.ooms;
        let failed = counted_as(ooms, "request failed", "requests failed");
        match runs {
            true if ooms > 0 => format!(
                ". Under the limit of {} MiB, where {failed} when it was recorded, it runs without a failure",
                mib(limit.bytes)
            ),
            true => format!(". It runs under the limit of {} MiB", mib(limit.bytes)),
            false => format!(". It does not run under the limit of {} MiB", mib(limit.bytes)),
        }
    }
}

#[cfg(feature = "cli")]
impl Need {
    /// What it needs in MiB, and with lucky addresses if that is less.
    pub(crate) fn in_mib(&self) -> String {
        let needs = self.needs_bytes.map_or_else(|| "no device suffices".to_owned(), mib);
        match self.with_luck_bytes {
            Some(bytes) => format!("{needs} ({} with luck)", mib(bytes)),
            None => needs,
        }
    }
}

impl Causes {
    /// Each cause in words, in the order of a table.
    #[must_use]
    pub fn rows(&self) -> [(&'static str, u64); 6] {
        [
            ("requested and live", self.requested_bytes),
            ("rounding inside live blocks", self.rounding_bytes),
            ("waiting for other streams", self.waiting_bytes),
            ("free parts of split segments", self.split_rest_bytes),
            ("completely free segments", self.idle_segment_bytes),
            ("kept by the driver's pool", self.driver_bytes),
        ]
    }
}

/// Streams whose peaks add up to less than this many times what lives at once share well enough.
const APART: f64 = 1.2;
/// Streams that keep less than this part of what the largest keeps are not spoken of.
const SMALL: f64 = 0.02;

impl Picture {
    /// Explains in a few sentences why so much is reserved.
    #[must_use]
    pub fn sentence(&self, streams: &Streams) -> String {
        let total = self.causes.total_bytes();
        let free = self.causes.rows()[1..].iter().max_by_key(|(_, bytes)| *bytes).copied();
        let (name, bytes) = free.unwrap_or(("none", 0));
        let when = match (self.moment, self.failed) {
            (Moment::FirstFailure, Some(failed)) => {
                format!("At the failed request of {} MiB", near(failed.requested_bytes))
            }
            (Moment::FirstFailure, None) => "At the failed request".to_owned(),
            (Moment::PeakLive, _) => "At the peak of live bytes".to_owned(),
            (Moment::PeakReserved, _) => "At the peak of reserved bytes".to_owned(),
        };
        let live = near(self.causes.requested_bytes);
        let mut text = format!("{when}, {} MiB are reserved and {live} MiB are live", near(total));
        if bytes > 0 {
            let share = part(bytes, total) * 100.0;
            text += &format!("; {} MiB ({share:.0} %) are {name}", near(bytes));
        }
        if let (Moment::FirstFailure, Some(largest)) =
            (self.moment, self.heaps.iter().map(|heap| heap.largest_free_bytes).max())
        {
            text += &format!(". The largest free block has {} MiB", near(largest));
        }
        text.push('.');
        // What idle streams keep shows in the peak of reserved bytes.
        if self.moment != Moment::PeakLive
            && let Some(more) = self.streams_apart(streams)
        {
            text.push(' ');
            text += &more;
        }
        text
    }

    /// That streams keep memory at different times, if they do.
    fn streams_apart(&self, streams: &Streams) -> Option<String> {
        let mut kept: BTreeMap<StreamId, u64> = BTreeMap::new();
        for heap in &self.heaps {
            *kept.entry(heap.stream).or_default() += heap.causes.total_bytes();
        }
        let largest = kept.values().copied().max()?;
        kept.retain(|_, bytes| part(*bytes, largest) >= SMALL);
        let peaks = streams.sum_of_peaks_bytes();
        if kept.len() < 2 || part(peaks, streams.peak_live_bytes) < APART {
            return None;
        }
        let (least, most) = (kept.values().min()?, kept.values().max()?);
        let together = match streams.busy_together {
            0 | 1 => " and are never busy together",
            few if few < kept.len() => &format!("; at most {few} of them are busy together"),
            _ => ", and their peaks come at different times",
        };
        Some(format!(
            "{} streams keep {} to {} MiB each{together}. The peaks of their live memory add up to {} MiB, but \
             at most {} MiB are live at once.",
            kept.len(),
            near(*least),
            near(*most),
            near(peaks),
            near(streams.peak_live_bytes)
        ))
    }
}

/// A stream and its pool.
#[cfg(feature = "cli")]
pub(crate) fn heap_name(heap: &HeapCauses) -> String {
    let stream = format!("stream {:#x}", heap.stream.0);
    match heap.pool {
        PoolId::DEFAULT => stream,
        PoolId { capture, user } => format!("{stream} pool {capture}.{user}"),
    }
}

#[cfg(feature = "cli")]
impl Recording {
    /// What may be reserved, and who says so.
    pub(crate) fn limit_sentence(&self) -> Option<String> {
        let limit = self.limit?;
        #[expect(clippy::cast_precision_loss, reason = "shown to people")]
        let mib = limit.bytes as f64 / MIB as f64;
        Some(format!("The limit is {mib:.1} MiB: {}.", limit.source))
    }
}

/// What to set, for one allocator.
#[cfg(feature = "cli")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Choice {
    /// The allocator.
    pub(crate) whose: &'static str,
    /// The variable and its value.
    pub(crate) set: String,
    /// What the recording then needs.
    pub(crate) needs: String,
}

#[cfg(feature = "cli")]
impl Advice {
    /// What to set in PyTorch's own allocator and in this project's.
    pub(crate) fn choices(&self) -> Vec<Choice> {
        let both = [
            ("PyTorch's own allocator", "PYTORCH_CUDA_ALLOC_CONF", self.best_for_pytorch()),
            ("stratalloc", "ALLOC_CONF", self.best_for_stratalloc()),
        ];
        let choice = |whose, variable, tried: &Tried| {
            let conf = tried.for_pytorch().unwrap_or(&tried.conf);
            let set = match conf.is_empty() {
                true => "(nothing to set)".to_owned(),
                false => format!("{variable}={conf}"),
            };
            let needs = format!("needs {} MiB", tried.need.in_mib());
            Choice { whose, set, needs }
        };
        both.into_iter()
            .filter_map(|(whose, variable, tried)| Some(choice(whose, variable, tried?)))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::Need;

    fn tried(conf: &str, needs_mib: u64) -> Tried {
        let cost = Some(Cost { retries: 1, device_calls: 4, device_ns: 2_000_000 });
        let need = Need { needs_bytes: Some(needs_mib * MIB), cost, ..Need::default() };
        Tried { conf: conf.to_owned(), need }
    }

    fn advice(best: &[Tried]) -> Advice {
        Advice {
            recorded: tried("compat:pytorch", 2100),
            tried: best.to_vec(),
            modelled: None,
            passed_over: 0,
            is_cut_short: false,
            best_runs_under_limit: None,
        }
    }

    fn recording() -> Recording {
        Recording::new(crate::replay::Trace::default(), None, crate::analysis::Memory::default())
    }

    #[test]
    fn the_sentence_names_pytorchs_allocator_where_it_needs_hardly_more() {
        let ours = tried("max_split_size_mb:32", 1490);
        let theirs = tried("max_split_size_mb:64,compat:pytorch", 1493);
        let said = advice(&[ours.clone(), theirs]).sentence(&recording());
        assert_eq!(
            said,
            "Set max_split_size_mb:64 in PyTorch's own allocator: the recording then needs 1,493 MiB \
             instead of 2,100 MiB (29 % less). Retries: 1, as before."
        );
        let theirs = tried("compat:pytorch", 1800);
        let said = advice(&[ours, theirs]).sentence(&recording());
        assert!(said.starts_with("Set max_split_size_mb:32 in stratalloc"), "{said}");
    }

    #[test]
    fn a_saving_below_a_hundredth_is_none() {
        let said = advice(&[tried("expandable_segments:True", 2090)]).sentence(&recording());
        assert!(said.starts_with("No setting helps: the recording needs 2,100 MiB"), "{said}");
    }
}
