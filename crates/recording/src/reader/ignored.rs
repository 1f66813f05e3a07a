//! A setting that PyTorch ignored when the recording was made.
//!
//! Where PyTorch has no expandable segments, as under Windows and for ROCm before 2.12, it prints a warning
//! and serves requests without them. The configuration string of a snapshot has the key all the same.

use crate::trace::Trace;
use stratalloc::history::Action;

/// Removes `expandable_segments:True` from the configuration of a recording of PyTorch that has segments,
/// none of them expandable. Replays then repeat the decisions that were made.
pub(super) fn remove_ignored(trace: &mut Trace) {
    let is_ignored = |part: &str| {
        let key_and_value = part.split_once(':');
        key_and_value.is_some_and(|(key, value)| {
            key.trim() == "expandable_segments" && value.trim() == "True"
        })
    };
    if trace.made_here.is_some() || !trace.conf.split(',').any(is_ignored) {
        return;
    }
    let is_made = trace.events.iter().any(|event| event.action == Action::SegmentAlloc);
    let is_expandable = trace.segments.iter().any(|segment| segment.expandable)
        || trace
            .events
            .iter()
            .any(|event| matches!(event.action, Action::SegmentMap | Action::SegmentUnmap));
    if is_made && !is_expandable {
        let rest: Vec<&str> = trace.conf.split(',').filter(|part| !is_ignored(part)).collect();
        trace.conf = rest.join(",");
        trace.ignores_expandable = true;
    }
}
