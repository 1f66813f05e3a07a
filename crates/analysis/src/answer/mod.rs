//! The answer about a recording: every figure and every sentence that any output shows, as data.
//!
//! [`answer`] makes it from a recording and a [`Question`]. The terminal, the JSON, the page and Python show
//! it; none of them computes a figure. Sizes are in bytes and their names end in `_bytes`. The schema of its
//! JSON is `docs/answer.schema.json`.

mod build;
mod evidence;
mod over_time;
mod schema;

use schemars::JsonSchema;
use serde::Serialize;

use super::advice::{AdviceOptions, Tried, for_pytorch};
use super::callers::Compared;
use super::causes::{Causes, HeapCauses};
use super::dump::FreeClass;
use super::graph_pools::{GraphPools, ProgramPools};
use super::growth::StepGrowth;
use super::holders::{AgeClass, CategoryBytes, Holder, SizeClass};
use super::host::HostFigures;
use super::paste::Paste;
use super::streams::StreamUse;
use super::temporary::Temporary;
use super::verdict::Verdict;
use super::words::{Choice, NotShown, Sentences, StreamNumbers};
use stratalloc::config::Config;
use stratalloc::ids::{PoolId, StreamId};
use stratalloc_recording::{DeviceFigures, NoHistory, StackId, Totals};

pub use build::{answer, described, described_on};
pub use evidence::{Basis, BasisKind};
pub(crate) use over_time::CHART_COLUMNS;
pub use over_time::OverTime;
pub use schema::{Field, fields, schema};

/// What is asked about a recording. The memory of its device is part of the [`Recording`](crate::Recording).
#[derive(Clone, Debug)]
pub struct Question {
    /// How settings are searched.
    pub advice: AdviceOptions,
    /// The reason why no setting is searched, as a sentence; `None` to search.
    pub unsearched: Option<&'static str>,
    /// Settings to search besides.
    pub settings: Vec<(String, Config)>,
    /// The needs, in bytes, for which the cheapest setting is wanted.
    pub within_bytes: Vec<u64>,
    /// Which frames of stacks are compared and listed.
    pub compared: Compared,
    /// The number of callers, and of sizes, that are listed for a moment.
    pub holders: usize,
    /// Whether the frames of the callers are listed.
    pub frames: bool,
}

impl Default for Question {
    fn default() -> Self {
        Self {
            advice: AdviceOptions::default(),
            unsearched: None,
            settings: Vec::new(),
            within_bytes: Vec::new(),
            compared: Compared::Code,
            holders: 10,
            frames: true,
        }
    }
}

/// The answer about a recording.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Answer {
    /// The version of this form. It is raised when a field changes its name, type or meaning.
    pub version: u32,
    /// The name of the recording.
    pub trace: String,
    /// The number of the recorded device.
    pub device: u32,
    /// All devices of the file, the one to look at first first: the one that failed first, else the one with
    /// the most reserved bytes; empty if the file has one device only.
    pub devices: Vec<DeviceFigures>,
    /// A sentence that compares them.
    pub devices_sentence: Option<String>,
    /// The result as a sentence.
    #[schemars(with = "String")]
    pub sentence: Sentences,
    /// The kind of the result: `growth` if growth from step to step decides, else `worth it`, `not worth it`,
    /// `cannot help`, `no history` or `not searched`.
    pub headline: &'static str,
    /// The result as numbers.
    pub verdict: Verdict,
    /// Sentences about the most important moment and the code that holds the most memory then; empty if the
    /// recording has no data for them.
    #[schemars(with = "String")]
    pub memory: Sentences,
    /// Sentences about the code that determines the peak; empty if its stacks were not recorded.
    #[schemars(with = "String")]
    pub code: Sentences,
    /// The peak of live bytes without the blocks of the code that holds the most memory at the most important
    /// moment; `null` if `code` is empty.
    pub peak_without_bytes: Option<u64>,
    /// The peak of live bytes without activations, if these are kept although no backward pass is recorded;
    /// `null` otherwise.
    pub peak_without_activations_bytes: Option<u64>,
    /// What the statements of the fields `sentence`, `memory`, `code`, `causes`, `holders`, `growth`,
    /// `devices_sentence`, `failures` and `limit_bytes` rest on.
    pub evidence: Vec<Basis>,
    /// The setting that is worth its cost.
    pub choice: Option<Setting>,
    /// The version of PyTorch that the settings are for; `null` if it is not known.
    pub torch: Option<String>,
    /// A sentence about a later version than 2.1 that the recording shows; `null` otherwise.
    pub torch_sentence: Option<String>,
    /// `ROCm` if PyTorch is built for it, as the caller set or a stack or a key shows; `null` otherwise.
    pub platform: Option<&'static str>,
    /// The lines to paste: for PyTorch's own allocator, and for this library's.
    pub set: Vec<String>,
    /// The same lines, each with its allocator and the need.
    pub choices: Vec<Choice>,
    /// The data that the recording lacks, each with the option or call that supplies it.
    #[schemars(with = "Vec<String>")]
    pub not_shown: Vec<NotShown>,
    /// Remarks about the recording, such as that it begins late.
    pub remarks: Vec<String>,
    /// Set if the recording has no history. Then no need, peak, age or setting follows from it.
    pub no_history: Option<NoHistory>,
    /// The limit on reserved bytes.
    #[serde(flatten)]
    pub limit: LimitFigures,
    /// The number of entries that were ignored because their action is unknown.
    pub unknown_entries: u64,
    /// Pinned host memory.
    pub host: Option<HostFigures>,
    /// Figures that the file states itself, if it is not a snapshot.
    pub totals: Option<Totals>,
    /// The figures under the recorded configuration.
    pub recorded: Recorded,
    /// The setting with the smallest need.
    pub best: Option<Setting>,
    /// The smallest need of the recorded configuration and all settings that were tried; `null` if none was
    /// searched or no device suffices.
    pub least_need_bytes: Option<u64>,
    /// The peak of live bytes, as requested; `null` without a history.
    pub live_peak_bytes: Option<u64>,
    /// The number of requests that failed, or would fail with the memory that is set; `null` without a
    /// history.
    pub failures: Option<u64>,
    /// Whether `failures` are those of a replay with the memory that is set, not those recorded.
    pub failures_are_replayed: bool,
    /// The settings that were searched, the smallest need first, and last a model of the driver's pools.
    pub tried: Vec<Setting>,
    /// The settings that the caller asked for and the search did not try.
    pub asked: Vec<Setting>,
    /// The number of settings that were dropped because three others were already better.
    pub passed_over: usize,
    /// Whether time ran out before all settings were searched; `sentence` states it too.
    pub is_cut_short: bool,
    /// The steps of the program and the growth from step to step; `null` if no steps were found.
    pub growth: Option<StepGrowth>,
    /// The reason why no steps were found.
    pub no_steps: Option<&'static str>,
    /// The blocks that are freed by the step that allocated them, by code; `null` without a history, or if
    /// requests or frees were left out.
    pub temporary: Option<Temporary>,
    /// The bytes over the events, for a small chart; `null` without a history.
    pub over_time: Option<OverTime>,
    /// The numbers of the streams, which name them in sentences and tables.
    pub stream_numbers: StreamNumbers,
    /// The most important moment: the first failure, else the peak of live bytes, else the dump.
    pub causes: Option<MainCauses>,
    /// The holders at that moment.
    pub holders: Option<HolderList>,
    /// All chosen moments with their holders, the most important one first.
    pub moments: Vec<MomentFigures>,
    /// Without a history: the free ranges, the largest first.
    pub free_ranges: Vec<FreeClass>,
    /// The cheapest settings that need at most so much, in the order of the question.
    #[serde(skip)]
    pub within: Vec<Option<Setting>>,
}

/// The version of [`Answer`].
pub const VERSION: u32 = 2;

/// The limit on reserved bytes.
#[derive(Clone, Debug, Default, Serialize, JsonSchema)]
pub struct LimitFigures {
    /// In bytes; the low end if only an interval is known.
    pub limit_bytes: Option<u64>,
    /// The limit is below this; `null` if it is known exactly.
    pub limit_below_bytes: Option<u64>,
    /// Its source.
    pub limit_from: Option<String>,
    /// Whether it was derived from the recorded events.
    pub limit_inferred: bool,
    /// How certain it is: `set`, `recorded`, `inferred`, `probable` or `possible`.
    pub limit_certainty: Option<&'static str>,
    /// The number of failed requests that it was derived from; `null` unless it was derived from events.
    pub limit_failures: Option<u64>,
    /// The number of retries that it was derived from: requests that released the cache before they got
    /// memory.
    pub limit_retries: Option<u64>,
    /// The number of other requests that it was derived from, because they released segments at the limit.
    pub limit_releases: Option<u64>,
    /// The number of garbage collections that it was derived from.
    pub limit_collections: Option<u64>,
    /// The limit and its source as a sentence.
    pub limit_sentence: Option<String>,
}

/// The figures under the recorded configuration.
#[derive(Clone, Debug, Default, Serialize, JsonSchema)]
pub struct Recorded {
    /// The recorded configuration string.
    pub conf: String,
    /// The need, in bytes; `null` if no device suffices, and without a search.
    pub needs_bytes: Option<u64>,
    /// The need with the luckiest order of addresses, if that is less.
    pub needs_with_luck_bytes: Option<u64>,
    /// The recorded time, in milliseconds.
    pub duration_ms: Option<f64>,
    /// Whether PyTorch's default configuration was replayed instead, because the recorded one cannot be.
    pub is_default_instead: bool,
    /// The replay of the recorded configuration.
    pub replayed: Option<Setting>,
}

/// A setting that was searched.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Setting {
    /// The configuration that was replayed; `compat:pytorch` stands for PyTorch's decisions.
    pub conf: String,
    /// The need, in bytes; `null` if no device suffices.
    pub needs_bytes: Option<u64>,
    /// The need with the luckiest order of addresses, if that is less.
    pub needs_with_luck_bytes: Option<u64>,
    /// Whether several orders of addresses were tried.
    pub all_address_orders: bool,
    /// The time of the device calls on the smallest sufficient device, in milliseconds, simulated.
    pub device_ms: Option<f64>,
    /// How often all free segments were released to serve a request.
    pub retries: Option<u64>,
    /// Calls that allocated or released memory.
    pub device_calls: Option<u64>,
    /// The peak of reserved bytes without a limit.
    pub reserved_unlimited_bytes: u64,
    /// Whether it runs under the limit of the recording; `null` if that was not tried.
    pub runs_under_limit: Option<bool>,
    /// The line to paste; empty if nothing has to be set.
    pub paste: String,
    /// The allocator that reads the line.
    pub paste_for: String,
    /// Whether it is a model of the driver's own pools.
    pub is_model: bool,
}

impl Setting {
    /// Returns the configuration string for PyTorch's own allocator, if the replay made PyTorch's decisions.
    pub(crate) fn conf_for_pytorch(&self) -> Option<&str> {
        for_pytorch(&self.conf)
    }

    /// Returns the figures of a setting. `paste` is the line that sets it.
    #[must_use]
    pub fn new(tried: &Tried, paste: Paste) -> Self {
        let (need, cost) = (&tried.need, tried.need.cost);
        Self {
            conf: tried.conf.clone(),
            needs_bytes: need.needs_bytes,
            needs_with_luck_bytes: need.with_luck_bytes,
            all_address_orders: need.all_orders,
            #[expect(clippy::cast_precision_loss, reason = "a displayed number")]
            device_ms: cost.map(|cost| cost.device_ns as f64 / 1e6),
            retries: cost.map(|cost| cost.retries),
            device_calls: cost.map(|cost| cost.device_calls),
            reserved_unlimited_bytes: need.reserved_unlimited_bytes,
            runs_under_limit: tried.runs_under_limit,
            paste: paste.set,
            paste_for: paste.allocator,
            is_model: false,
        }
    }
}

/// The reserved bytes at the most important moment.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct MainCauses {
    /// The moment.
    #[serde(flatten)]
    pub main: MomentCauses,
    /// The peak of reserved bytes.
    pub peak_reserved: Option<MomentCauses>,
    /// The peak of live bytes of the requests that succeeded; `null` without a history.
    pub live_peak_bytes: Option<u64>,
    /// The most streams that were busy at once; `null` without a history.
    pub streams_busy_together: Option<usize>,
    /// The use of each stream.
    pub streams: Vec<StreamUse>,
}

/// A chosen moment.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct MomentFigures {
    /// The reserved bytes.
    #[serde(flatten)]
    pub causes: MomentCauses,
    /// The holders of the live bytes.
    pub holders: HolderList,
    /// The live bytes by category; empty without stacks.
    pub categories: Vec<CategoryBytes>,
    /// The bytes whose category is not known, as a sentence; empty without stacks.
    pub categories_sentence: String,
}

/// The reserved bytes at a moment by cause.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct MomentCauses {
    /// All reserved bytes.
    pub reserved_bytes: u64,
    /// The bytes by cause.
    #[serde(flatten)]
    pub causes: Causes,
    /// `first failure`, `peak of live bytes`, `peak of reserved bytes`, `end` or `moment of the dump`.
    pub moment: &'static str,
    /// The number of events before it.
    pub events: u32,
    /// Whether it is a moment of a replay with the memory that is set, not of the recorded events.
    pub is_replay: bool,
    /// The number of operations before it.
    pub operations: usize,
    /// The requested bytes of the request that failed.
    pub failed_bytes: Option<u64>,
    /// The code that made that request.
    pub failed_by: Option<String>,
    /// The reason why so much is reserved, as sentences.
    #[schemars(with = "String")]
    pub why: Sentences,
    /// The private pools that captures of graphs made; `null` if none has free memory.
    pub graph_pools: Option<GraphPools>,
    /// The private pools that the program made itself; `null` if none has free memory.
    pub program_pools: Option<ProgramPools>,
    /// The bytes of each stream of each pool, the largest first.
    pub heaps: Vec<HeapFigures>,
}

/// The reserved bytes of one stream of one pool at a moment.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct HeapFigures {
    /// All reserved bytes.
    pub reserved_bytes: u64,
    /// The bytes by cause.
    #[serde(flatten)]
    pub causes: Causes,
    /// The stream.
    #[serde(serialize_with = "stratalloc_recording::stream_number")]
    #[schemars(with = "u64")]
    pub stream: StreamId,
    /// The two numbers of the pool.
    pub pool: [u64; 2],
    /// The largest free block.
    pub largest_free_bytes: u64,
}

impl HeapFigures {
    fn of(heap: &HeapCauses) -> Self {
        let HeapCauses { stream, pool: PoolId { capture, user }, causes, largest_free_bytes } =
            *heap;
        let (reserved_bytes, pool) = (causes.total_bytes(), [capture, user]);
        Self { reserved_bytes, causes, stream, pool, largest_free_bytes }
    }
}

/// The holders of the live bytes at a moment.
#[derive(Clone, Debug, Default, Serialize, JsonSchema)]
pub struct HolderList {
    /// Requested bytes of all live blocks.
    pub requested_bytes: u64,
    /// Number of live blocks.
    pub blocks: u64,
    /// Whether the stack of any live block was recorded.
    pub has_stacks: bool,
    /// The code that holds the most bytes, then the blocks without a recorded stack, and last those of them
    /// from before the recording.
    pub by_stack: Vec<CodeFigures>,
    /// The sizes that hold the most bytes.
    pub by_size: Vec<SizeClass>,
    /// All blocks by age, youngest first, and last those from before the recording.
    pub by_age: Vec<AgeClass>,
    /// The bytes of the code that is not listed; without stacks, of the sizes that are not listed.
    pub others_bytes: u64,
    /// The blocks of these.
    pub others_blocks: u64,
}

/// The live blocks of one caller.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct CodeFigures {
    /// Their bytes, number and ages.
    #[serde(flatten)]
    pub holder: Holder,
    /// The label of the code.
    pub asked_for_by: String,
    /// The purpose of the blocks; `null` if it is not known. If the lives of the blocks show several, the one
    /// of their requests.
    pub category: Option<&'static str>,
    /// What shows the purpose; `null` if it is not known.
    pub category_from: Option<CategorySource>,
    /// Whether they were allocated before the recording began and have no recorded stack.
    pub lived_before: bool,
    /// The frames of the stack that holds the most of them, innermost first; `null` if it was not recorded
    /// or not asked for.
    pub frames: Option<Vec<FrameFigures>>,
}

impl CodeFigures {
    /// Returns the stack that holds the most of the blocks.
    #[must_use]
    pub fn stack(&self) -> Option<StackId> {
        self.holder.stack
    }
}

/// What shows the purpose of blocks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct CategorySource {
    /// The frame of the stack, in the form of labels; `null` if the life alone shows the purpose.
    pub frame: Option<String>,
    /// What the lives of the blocks show; `null` if the stack alone shows the purpose.
    pub life: Option<&'static str>,
}

/// A frame of a stack.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct FrameFigures {
    /// The file.
    pub filename: String,
    /// The line.
    pub line: u32,
    /// The function.
    pub name: String,
}

#[cfg(test)]
mod tests;
