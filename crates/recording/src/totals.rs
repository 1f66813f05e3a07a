//! Figures that a file states itself, where it has no requests, or more than its requests show.

use schemars::JsonSchema;
use serde::Serialize;

/// The kind of file from which [`Totals`] were read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TotalsSource {
    /// `torch.cuda.memory_stats()` as JSON.
    MemoryStats,
    /// `export_memory_timeline` with a name that ends in `.json` or `.json.gz`.
    MemoryTimeline,
    /// `export_memory_timeline` with a name that ends in `.raw.json.gz`.
    RawMemoryTimeline,
    /// A trace of PyTorch's profiler.
    ProfilerTrace,
}

/// Figures that a file states itself. A figure that the file does not have is `null`. Allocated bytes are
/// the live blocks' bytes after rounding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Totals {
    /// The kind of file.
    pub source: TotalsSource,
    /// The number of entries, changes or counters in the file.
    pub entries: u64,
    /// The peak of allocated bytes.
    pub peak_allocated_bytes: Option<u64>,
    /// The allocated bytes at the end.
    pub end_allocated_bytes: Option<u64>,
    /// The peak of requested bytes.
    pub peak_requested_bytes: Option<u64>,
    /// The peak of reserved bytes.
    pub peak_reserved_bytes: Option<u64>,
    /// The reserved bytes at the end.
    pub end_reserved_bytes: Option<u64>,
    /// The peak of the bytes in free parts of split segments.
    pub peak_inactive_split_bytes: Option<u64>,
    /// The bytes in free parts of split segments at the end.
    pub end_inactive_split_bytes: Option<u64>,
    /// How often all free segments were released to serve a request.
    pub retries: Option<u64>,
    /// The number of requests that failed.
    pub failures: Option<u64>,
    /// The bytes that were allocated before the first entry and not freed afterwards. Their blocks are not
    /// recorded; they count as one block.
    pub unrecorded_bytes: Option<u64>,
    /// The most bytes that were live without a recorded request, besides `unrecorded_bytes`: those of threads
    /// that the profiler does not record.
    pub other_threads_bytes: Option<u64>,
    /// Whether the lines of Python code are those of the calls; if false, they are those of the definitions.
    /// `null` if the file has no Python code.
    pub has_call_lines: Option<bool>,
    /// Microseconds from the first entry to the last.
    pub duration_us: Option<u64>,
    /// The allocated bytes at their peak by category, the largest first.
    pub categories: Vec<CategoryTotal>,
}

/// The bytes of one category of PyTorch's profiler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct CategoryTotal {
    /// The category.
    pub category: &'static str,
    /// The bytes.
    pub bytes: u64,
}

impl Totals {
    /// Returns totals without figures.
    pub(super) fn of(source: TotalsSource) -> Self {
        Self {
            source,
            entries: 0,
            peak_allocated_bytes: None,
            end_allocated_bytes: None,
            peak_requested_bytes: None,
            peak_reserved_bytes: None,
            end_reserved_bytes: None,
            peak_inactive_split_bytes: None,
            end_inactive_split_bytes: None,
            retries: None,
            failures: None,
            unrecorded_bytes: None,
            other_threads_bytes: None,
            has_call_lines: None,
            duration_us: None,
            categories: Vec::new(),
        }
    }
}
