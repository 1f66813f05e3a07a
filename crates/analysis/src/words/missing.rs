//! The data that a recording lacks, each with the option or call that supplies it.

use std::fmt;

use serde::{Serialize, Serializer};

use super::{near, totals};
use crate::recording::{Limit, Recording};
use crate::torch::ForTorch;

/// Data that a recording lacks. In JSON it is one string.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotShown {
    /// The data.
    pub what: String,
    /// The option or call that supplies it; empty if none does.
    pub remedy: String,
}

impl NotShown {
    pub(super) fn new(what: &str, remedy: &str) -> Self {
        Self { what: what.to_owned(), remedy: remedy.to_owned() }
    }
}

impl fmt::Display for NotShown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.remedy.is_empty() {
            true => f.write_str(&self.what),
            false => write!(f, "{} ({})", self.what, self.remedy),
        }
    }
}

impl Serialize for NotShown {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl ForTorch {
    /// Returns a sentence about a version that the recording shows.
    pub(crate) fn sentence(self) -> Option<String> {
        match self {
            Self::Shown(version) => Some(format!(
                "The recording is of PyTorch {version} or later, so settings of {version} are named."
            )),
            Self::Set(_) | Self::Unknown => None,
        }
    }
}

/// Lists the data that a recording lacks. `torch` is the version that the settings suit.
#[must_use]
pub(crate) fn unknown(recording: &Recording, torch: ForTorch) -> Vec<NotShown> {
    let has_history = recording.no_history.is_none();
    let before = recording.start.iter().flat_map(|start| &start.blocks);
    let before = before.filter(|block| block.stack.is_none());
    let before_bytes = before.fold(0, |sum: u64, block| sum.saturating_add(block.requested_bytes));
    let start = format!(
        "the code that holds {} MiB of what lived before its first event",
        near(before_bytes)
    );
    let all = [
        (
            recording.requests_outside > 0,
            "when its segments were reserved and released, which skip_actions left out, so neither its reserved \
             bytes nor its limit",
            "",
        ),
        (
            recording.limit.and_then(Limit::known).is_none(),
            match recording.is_verified {
                true => "the memory limit",
                false => "the memory limit without replays, which were left out",
            },
            "--total-memory or --memory-fraction sets it",
        ),
        (
            torch == ForTorch::Unknown,
            "the version of PyTorch",
            "--torch sets it; else only keys of 2.1 are tried",
        ),
        (
            before_bytes > 0,
            &start,
            "call torch.cuda.memory._record_memory_history() before the program allocates",
        ),
        (
            recording.start.is_some(),
            "what was live and freed before its first event, so peaks and needs are those of its events",
            "",
        ),
    ];
    let all = all.into_iter().filter(|(is_unknown, ..)| *is_unknown && has_history);
    let all = all.map(|(_, what, remedy)| NotShown::new(what, remedy));
    let has_stacks = !recording.trace.stacks.is_empty();
    let kind = recording.trace.totals.as_ref().map(|totals| totals::not_in(totals, has_stacks));
    kind.into_iter().flatten().chain(all).collect()
}
