//! The sentence and the table about the figures that a file states itself, and what such a file lacks.

use super::{NotShown, counted_as, near};
use stratalloc_recording::{Totals, TotalsSource};

/// Returns a sentence about the peaks that a file states.
#[must_use]
pub fn totals_sentence(totals: &Totals) -> String {
    let counted = match totals.source {
        TotalsSource::MemoryStats => "The allocator counted",
        TotalsSource::ProfilerTrace => "The allocator's own counters in the trace show",
        TotalsSource::MemoryTimeline | TotalsSource::RawMemoryTimeline => "The profiler counted",
    };
    let Some(peak) = totals.peak_allocated_bytes.or(totals.peak_reserved_bytes) else {
        return String::new();
    };
    let allocated = match totals.peak_allocated_bytes {
        Some(_) => "allocated",
        None => "reserved",
    };
    let mut text = format!("{counted} {} MiB {allocated} at most", near(peak));
    if let Some(reserved) = totals.peak_reserved_bytes.filter(|_| allocated == "allocated") {
        text += &format!(" and {} MiB reserved at most", near(reserved));
    }
    if let Some(largest) = totals.categories.first() {
        text += &format!("; then {} MiB were {}", near(largest.bytes), largest.category);
    }
    text.push('.');
    let ended = [
        (totals.failures, "request failed", "requests failed"),
        (totals.retries, "request released the whole cache", "requests released the whole cache"),
    ];
    for (number, one, more) in ended {
        if let Some(number) = number.filter(|number| *number > 0) {
            text += &format!(" {}.", counted_as(number, one, more));
        }
    }
    text
}

/// Returns the names and the bytes of the figures, in the order in which tables list them.
#[must_use]
pub fn totals_rows(totals: &Totals) -> Vec<(String, u64)> {
    let figures = [
        ("allocated at the peak", totals.peak_allocated_bytes),
        ("allocated at the end", totals.end_allocated_bytes),
        ("requested at the peak", totals.peak_requested_bytes),
        ("reserved at the peak", totals.peak_reserved_bytes),
        ("reserved at the end", totals.end_reserved_bytes),
        ("free parts of split segments at most", totals.peak_inactive_split_bytes),
        ("free parts of split segments at the end", totals.end_inactive_split_bytes),
    ];
    let figures = figures.into_iter().filter_map(|(name, bytes)| Some((name.to_owned(), bytes?)));
    let categories = totals.categories.iter();
    let categories = categories
        .map(|one| (format!("at the peak of allocated bytes: {}", one.category), one.bytes));
    figures.chain(categories).collect()
}

/// Lists what a file lacks because of its kind.
pub(super) fn not_in(totals: &Totals, has_stacks: bool) -> Vec<NotShown> {
    let requests = "its requests: their sizes, streams and times, so no need, setting or fragmentation follows";
    let code = "the code that holds the memory";
    let reserved =
        "the reserved bytes: those that the allocator keeps free in its cache are not in it";
    let all: &[&'static str] = match totals.source {
        TotalsSource::MemoryStats => &[
            requests,
            code,
            "when the peaks were: they are those since the start, or since torch.cuda.reset_peak_memory_stats()",
            "its device and its settings",
        ],
        TotalsSource::MemoryTimeline | TotalsSource::RawMemoryTimeline => &[
            "which blocks its changes belong to, so no need, setting or fragmentation follows",
            "memory from before the trace that it neither uses nor frees: the real peak is higher by that",
            code,
            reserved,
            "its device and its settings",
        ],
        TotalsSource::ProfilerTrace => &[
            "the streams of its requests: a replay puts all on one",
            "the requested sizes: the profiler records those of the blocks, which are rounded up",
            "its settings, and which segments were reserved: reserved bytes other than the allocator's own counters \
             are those of a replay",
        ],
    };
    let no_code = NotShown::new(
        "the code that requests memory",
        "torch.profiler.profile(profile_memory=True, with_stack=True) records it",
    );
    let no_lines = "the lines of its code: this version of the profiler records those of the def statements, which \
             stand in their places";
    let is_profile = totals.source == TotalsSource::ProfilerTrace;
    let no_code = (is_profile && !has_stacks).then_some(no_code);
    let no_lines =
        (has_stacks && totals.has_call_lines == Some(false)).then(|| NotShown::new(no_lines, ""));
    let all = all.iter().map(|what| NotShown::new(what, ""));
    all.chain(no_code).chain(no_lines).collect()
}
