//! The results of an analysis as sentences. Every number in them comes from a recording or a replay.

mod answer;
mod devices;
mod graph_pools;
mod growth;
mod host;
mod missing;
mod sentences;
mod streams;
mod summary;
mod temporary;
mod totals;
mod verdict;

pub use devices::{device_remark, devices_headline, devices_sentence, ranks_sentence};
pub use graph_pools::CausesColumn;
pub(crate) use growth::{no_steps, size_label};
pub use host::host_sentence;
pub use missing::NotShown;
pub(crate) use missing::unknown;
pub use sentences::Sentences;
pub use streams::{StreamNumber, StreamNumbers};
pub use summary::Summary;
pub use totals::{totals_rows, totals_sentence};

use std::collections::HashMap;

use schemars::JsonSchema;
use serde::Serialize;

use crate::advice::{Advice, Tried};
use crate::answer::HeapFigures;
use crate::categories::Category;
use crate::causes::{Causes, Moment, Picture};
use crate::graph_pools::{GraphPools, ProgramPools};
use crate::holders::CategoryBytes;
use crate::needs::Need;
use crate::passes::Fate;
use crate::paste::Paste;
use crate::recording::{Limit, LimitSource, Recording};
use crate::streams::Streams;
use crate::torch::ForTorch;
use stratalloc::ids::StreamId;
use stratalloc::size::MIB;

/// Formats a whole number with thousands separators.
pub fn grouped(number: u64) -> String {
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

/// Formats a number with its noun: "1 retry", "2 retries".
pub fn counted_as(number: u64, one: &str, more: &str) -> String {
    format!("{} {}", grouped(number), if number == 1 { one } else { more })
}

/// Formats bytes for tables: in whole MiB from 100 MiB on, in tenths below.
pub fn near(bytes: u64) -> String {
    let tenths = (u128::from(bytes) * 10 + u128::from(MIB) / 2) / u128::from(MIB);
    match u64::try_from(tenths).unwrap_or(u64::MAX) {
        tenths if bytes < 100 * MIB => format!("{}.{}", tenths / 10, tenths % 10),
        _ => grouped(bytes.saturating_add(MIB / 2) / MIB),
    }
}

/// Formats bytes with their unit: in MiB, and from 10 GiB on in GiB.
#[must_use]
pub fn size_text(bytes: u64) -> String {
    const GIB: u64 = 1024 * MIB;
    match bytes < 10 * GIB {
        true => format!("{} MiB", near(bytes)),
        false => format!("{} GiB", near(bytes / 1024)),
    }
}

/// Formats bytes as a whole number of MiB if they are one, and else as [`near`].
pub(super) fn whole_or_near(bytes: u64) -> String {
    if bytes.is_multiple_of(MIB) { grouped(bytes / MIB) } else { near(bytes) }
}

/// Formats bytes in whole MiB, rounded up so that a device of this size suffices.
pub(super) fn mib(bytes: u64) -> String {
    grouped(bytes.div_ceil(MIB))
}

/// Returns a share in whole percent, rounded.
pub(super) fn percent(part: u64, of: u64) -> u64 {
    let of = u128::from(of.max(1));
    u64::try_from((u128::from(part) * 100 + of / 2) / of).unwrap_or(100)
}

#[expect(clippy::cast_precision_loss, reason = "a printed number")]
pub(super) fn part(bytes: u64, of: u64) -> f64 {
    if of == 0 { 0.0 } else { bytes as f64 / of as f64 }
}

impl Need {
    /// Formats the need in MiB. If the need with the luckiest order of addresses is known, adds that.
    pub fn in_mib(&self) -> String {
        need_in_mib(self.needs_bytes, self.with_luck_bytes)
    }
}

fn need_in_mib(needs_bytes: Option<u64>, with_luck_bytes: Option<u64>) -> String {
    let needs = needs_bytes.map_or_else(|| "no device suffices".to_owned(), mib);
    match with_luck_bytes {
        Some(bytes) => format!("{needs} ({} with luck)", mib(bytes)),
        None => needs,
    }
}

impl Causes {
    /// Returns the name and the bytes of each cause, in the order in which tables list them.
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

/// Streams keep much more memory than they need at once if the sum of their peaks is at least this many
/// times the peak of all together.
const APART: f64 = 1.2;
/// Streams with less than this share of the bytes of the largest stream are not mentioned.
const SMALL: f64 = 0.02;

impl Picture {
    /// Returns a few sentences that explain why so much memory is reserved.
    #[must_use]
    pub fn sentences(&self, streams: &Streams) -> Sentences {
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
            (Moment::End, _) => "At the end".to_owned(),
            (Moment::Dump, _) => "At the moment of the dump".to_owned(),
        };
        let live = near(self.causes.requested_bytes);
        let mut text = format!("{when}, {} MiB are reserved and {live} MiB are live", near(total));
        let pools = GraphPools::at(self);
        let of_pools = pools.and_then(|pools| pools.sentences(total));
        let program_pools = ProgramPools::at(self);
        let of_program = program_pools.and_then(|pools| pools.sentences(total));
        let is_of_pools = of_pools.is_some() && pools.is_some_and(|pools| pools.is_largest_cause)
            || of_program.is_some() && program_pools.is_some_and(|pools| pools.is_largest_cause);
        if bytes > 0 && !is_of_pools {
            let share = percent(bytes, total);
            text += &format!("; {} MiB ({share} %) are {name}", near(bytes));
        }
        let mut largest_free = String::new();
        if let (Moment::FirstFailure, Some(largest)) =
            (self.moment, self.heaps.iter().map(|heap| heap.largest_free_bytes).max())
        {
            largest_free = format!("The largest free block has {} MiB.", near(largest));
        }
        let mut all = Sentences::one(text + ".").and_more(largest_free);
        // If they are the largest cause, the result has these sentences.
        let of_pools = of_pools.into_iter().chain(of_program).map(Sentences::as_more);
        all = of_pools.fold(all, Sentences::then);
        // At the peak of live bytes, streams that become busy later have not reserved their memory yet.
        if !matches!(self.moment, Moment::PeakLive | Moment::End | Moment::Dump)
            && let Some(more) = self.streams_apart(streams)
        {
            all = all.then(more);
        }
        all
    }

    /// Returns sentences if the peaks of streams come at different times, so that each keeps memory of
    /// its own.
    fn streams_apart(&self, streams: &Streams) -> Option<Sentences> {
        let mut kept: HashMap<StreamId, u64> = HashMap::new();
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
        let kept = format!(
            "{} streams keep {} to {} MiB each{together}.",
            kept.len(),
            near(*least),
            near(*most)
        );
        let peaks = format!(
            "The peaks of their live memory add up to {} MiB, but at most {} MiB are live at once.",
            near(peaks),
            near(streams.peak_live_bytes)
        );
        Some(Sentences::one(kept).and_more(peaks))
    }
}

/// Returns a sentence about the live bytes whose category is not known; empty if there are no categories.
pub(crate) fn categories_sentence(categories: &[CategoryBytes]) -> String {
    if categories.is_empty() {
        return String::new();
    }
    let unknown = categories.iter().filter(|one| one.category.starts_with("unknown"));
    let (bytes, share) = unknown.fold((0_u64, 0.0), |(bytes, share), one| {
        (bytes.saturating_add(one.requested_bytes), share + one.share)
    });
    let known = match bytes {
        0 => "The category of all live bytes is known.".to_owned(),
        _ => format!("The category of {} MiB ({:.0} %) is not known.", near(bytes), share * 100.0),
    };
    let has = |category: Category| categories.iter().any(|one| one.category == category.name());
    match has(Category::Activations) && has(Category::ActivationsKept) {
        true => format!(
            "{known} Of those that are only called activations, the recording does not show whether the backward \
             pass needs them."
        ),
        false => known,
    }
}

impl Fate {
    /// Returns what the life of a block shows; `None` if that is nothing.
    pub(crate) fn sentence(self) -> Option<&'static str> {
        match self {
            Self::NotShown => None,
            Self::FreedByBackward => Some("freed by autograd in a backward pass"),
            Self::FreedBeforeBackward => Some("freed before the next backward pass"),
            Self::FreedInPass => Some("freed in the pass that requested it"),
            Self::OutlivesPass => Some("lives on after the pass that requested it"),
        }
    }
}

impl Moment {
    /// Returns the name, as tables and JSON show it.
    pub fn name(self) -> &'static str {
        match self {
            Self::FirstFailure => "first failure",
            Self::PeakLive => "peak of live bytes",
            Self::PeakReserved => "peak of reserved bytes",
            Self::End => "end",
            Self::Dump => "moment of the dump",
        }
    }
}

impl HeapFigures {
    /// Returns the name of the stream and its pool.
    #[must_use]
    pub fn name(&self, streams: &StreamNumbers) -> String {
        let stream = streams.name(self.stream);
        match self.pool {
            [0, 0] => stream,
            [capture, user] => format!("{stream} pool {capture}.{user}"),
        }
    }
}

impl Limit {
    /// Formats the limit in whole MiB: "3,000 MiB", or "3,248 to 3,288 MiB" if only an interval is known.
    pub fn in_mib(&self) -> String {
        match self.below_bytes {
            Some(below) if below > self.bytes => {
                format!("{} to {} MiB", mib(self.bytes), mib(below))
            }
            _ => format!("{} MiB", mib(self.bytes)),
        }
    }

    /// Formats the limit in MiB, exactly if that is a whole number: "3,000 MiB", or "between 3,248 and
    /// 3,288 MiB".
    pub fn between_in_mib(&self) -> String {
        match self.below_bytes {
            Some(below) => {
                format!("between {} and {} MiB", whole_or_near(self.bytes), whole_or_near(below))
            }
            None => format!("{} MiB", whole_or_near(self.bytes)),
        }
    }

    /// Returns a sentence with the limit and its source.
    pub fn sentence(&self) -> String {
        let (range, source) = (self.between_in_mib(), self.source);
        match source {
            LimitSource::Probable(evidence) => format!(
                "The limit is probably {range}, inferred from {evidence}, unless the program itself called \
                 empty_cache at these moments."
            ),
            LimitSource::Possible(refused) => format!(
                "The recording does not decide on a limit: {refused}. If a memory fraction is set, it is {range}."
            ),
            _ => format!("The limit is {range}: {source}."),
        }
    }
}

impl Recording {
    /// Returns a sentence with the limit on reserved bytes and its source, or one about requests that failed
    /// without a limit that explains them.
    pub fn limit_sentence(&self) -> Option<String> {
        let unexplained = || {
            self.unexplained.map(|refused| {
                format!(
                    "No memory fraction explains that {refused}, because more had been reserved at another moment: \
                     the driver refused for another reason, and no allocator setting helps."
                )
            })
        };
        self.limit.map(|limit| limit.sentence()).or_else(unexplained)
    }
}

/// A setting to make, for one of the two allocators.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Choice {
    /// The name of the allocator.
    pub allocator: String,
    /// The environment variable and its value.
    pub set: String,
    /// The need of the recording with the setting.
    pub needs: String,
}

impl Advice {
    /// Returns the settings for PyTorch's own allocator and for this library's; empty if no setting is
    /// worth its cost.
    pub fn choices(&self, recording: &Recording) -> Vec<Choice> {
        let both = [self.worth_in_pytorch(recording), self.worth_in_ours(recording)];
        both.into_iter().flatten().map(|tried| self.choice(tried)).collect()
    }

    /// Returns the allocator, the environment variable and the need of a setting that was searched.
    pub fn choice(&self, tried: &Tried) -> Choice {
        let Paste { allocator, set, .. } = self.paste(tried);
        let set = if set.is_empty() { "(nothing to set)".to_owned() } else { set };
        Choice { allocator, set, needs: format!("needs {} MiB", tried.need.in_mib()) }
    }

    /// Returns the line that sets a setting that was searched.
    pub fn paste(&self, tried: &Tried) -> Paste {
        match tried.for_pytorch() {
            Some(_) if self.is_for_pytorch(tried) => {
                let paste = Paste::for_pytorch(self.torch.to_string(), &tried.conf);
                if self.is_rocm { paste.on_rocm() } else { paste }
            }
            _ => {
                let torch = match self.torch {
                    ForTorch::Set(version) => Some(version),
                    ForTorch::Shown(_) | ForTorch::Unknown => None,
                };
                Paste::of(&tried.conf, torch)
            }
        }
    }
}

/// The memory that a device needs in addition to the recorded memory.
pub const BESIDES: &str = "A device needs more than that: the CUDA context, loaded kernels, and what NCCL, \
    cuBLAS and other libraries allocate themselves are not in a recording, often several hundred MiB.";

/// The same for ROCm.
pub(crate) const BESIDES_ON_ROCM: &str = "A device needs more than that: the HIP context, loaded kernels, and what \
    RCCL, hipBLAS and other libraries allocate themselves are not in a recording, often several hundred MiB.";

/// The sentence about a recording of PyTorch for ROCm.
pub(crate) const ON_ROCM: &str = "This is PyTorch for ROCm: only settings of its own allocator are searched, because \
    stratalloc allocates memory of CUDA devices, and expandable_segments only for PyTorch 2.12 and later (--torch), \
    because earlier versions ignore it there.";

/// Returns remarks about a recording: entries that were left out, and a start after that of the program.
#[must_use]
pub fn remarks(recording: &Recording) -> Vec<String> {
    let mut all = Vec::new();
    if recording.trace.ignores_expandable {
        all.push(
            "its configuration has expandable_segments:True, and none of its segments is expandable: PyTorch \
             ignored the key, as it does under Windows and for ROCm before 2.12"
                .to_owned(),
        );
    }
    if recording.lacks_collector_limit() {
        all.push(
            "garbage_collection_threshold acts near a limit that the recording does not show: \
             --memory-fraction sets it"
                .to_owned(),
        );
    }
    if recording.requests_outside > 0 {
        all.push(format!(
            "entries of segments were left out (skip_actions): {} in no recorded segment, so the recorded \
             reserved bytes are not known",
            counted_as(recording.requests_outside, "request lies", "requests lie")
        ));
    }
    let totals = recording.trace.totals.as_ref();
    let some = |bytes: &u64| *bytes > 0;
    let unrecorded = totals.and_then(|totals| totals.unrecorded_bytes).filter(some);
    all.extend(unrecorded.map(|bytes| {
        format!(
            "of {} MiB that lived before the trace and were not freed in it only the sum is recorded: they count \
             as one block",
            near(bytes)
        )
    }));
    let others = totals.and_then(|totals| totals.other_threads_bytes).filter(some);
    all.extend(others.map(|bytes| {
        format!(
            "up to {} MiB were live whose requests are not in the trace, such as those of threads that the \
             profiler does not record: they count as one block without a stack",
            near(bytes)
        )
    }));
    let start = recording.start.as_ref().filter(|_| recording.no_history.is_none());
    all.extend(start.map(|start| {
        let from = match &recording.start_layout {
            Some(_) if recording.layout_for_all => {
                "replays start from that layout, the needs from the live blocks"
            }
            Some(_) => {
                "replays of the recorded configuration start from that layout, others and the needs from the \
                 live blocks"
            }
            None => "their addresses are unknown, so replays start from the live blocks alone",
        };
        let (begins, then) = match recording.layout_for_all {
            true => ("at the event", ""),
            false => ("it begins late:", " before its first event"),
        };
        let reserved = match recording.trace.requests_only {
            true => String::new(),
            false => format!(" and {} MiB were reserved", near(start.reserved_bytes())),
        };
        format!(
            "{begins} {} of {} MiB lived{reserved}{then}; {from}",
            counted_as(start.blocks.len() as u64, "block", "blocks"),
            near(start.requested_bytes())
        )
    }));
    all
}
