//! What the statements of an answer rest on: entries of the recording, blocks of its final layout, replays,
//! and settings of the caller.

use schemars::JsonSchema;
use serde::Serialize;

use super::Answer;
use crate::recording::Recording;

/// A kind of data that a statement rests on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum BasisKind {
    /// Entries of the recording.
    Events,
    /// Blocks of the final layout, live and free.
    Layout,
    /// Configurations of which replays were made.
    Replays,
    /// Settings of the caller, or that the file contains.
    Settings,
}

/// What a statement of an answer rests on. A statement that rests on several kinds has several of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Basis {
    /// The field with the statement.
    pub of: &'static str,
    /// The kind.
    pub kind: BasisKind,
    /// The number of entries, blocks, configurations or settings.
    pub count: u64,
}

/// The data of a recording that statements can rest on.
#[derive(Clone, Copy)]
struct Sources {
    events: Basis,
    layout: Basis,
}

impl Sources {
    fn of(recording: &Recording) -> Self {
        let trace = &recording.trace;
        let blocks: usize = trace.segments.iter().map(|segment| segment.blocks.len()).sum();
        // Of a recording from the program's start on, the events show all blocks.
        let is_used = recording.start.is_some() || recording.no_history.is_some();
        let of = |kind, count| Basis { of: "", kind, count };
        Self {
            events: of(BasisKind::Events, trace.event_count()),
            layout: of(BasisKind::Layout, if is_used { blocks as u64 } else { 0 }),
        }
    }
}

impl Basis {
    /// Returns what the statements of `answer` about `recording` rest on.
    pub(super) fn of(answer: &Answer, recording: &Recording) -> Vec<Self> {
        let Sources { events, layout } = Sources::of(recording);
        let one = |of, kind, count| Self { of, kind, count };
        let setting = |of| one(of, BasisKind::Settings, u64::from(recording.is_memory_set));
        let replay = |of, is_replay| one(of, BasisKind::Replays, u64::from(is_replay));
        let mut all = Vec::new();
        let mut add = |of, has_statement: bool, sources: &[Self]| {
            let sources = sources.iter().filter(|one| has_statement && one.count > 0);
            all.extend(sources.map(|one| Self { of, ..*one }));
        };
        let tried = one("", BasisKind::Replays, answer.tried.len() as u64);
        let is_found = answer.headline != "not searched";
        add("sentence", is_found, &[events, layout, tried, setting("")]);
        // Without a history, only the sentence that states this rests on entries.
        let events = events.only_if(recording.no_history.is_none());
        let main = answer.causes.as_ref().map(|causes| &causes.main);
        let is_replay = main.is_some_and(|main| main.is_replay) || recording.trace.requests_only;
        let at_moment = [events, layout, replay("", is_replay), setting("").only_if(is_replay)];
        add("memory", !answer.memory.is_empty(), &at_moment);
        add("code", !answer.code.is_empty(), &at_moment);
        add("causes", main.is_some(), &at_moment);
        add("holders", answer.holders.is_some(), &at_moment);
        add("growth", answer.growth.is_some(), &[events]);
        let of_all = answer.devices.iter().map(|device| device.events).sum();
        let of_all = one("", BasisKind::Events, of_all);
        add("devices_sentence", answer.devices_sentence.is_some(), &[of_all, layout]);
        let is_replay = answer.failures_are_replayed;
        let of_failures = [events, replay("", is_replay), setting("").only_if(is_replay)];
        add("failures", answer.failures.is_some(), &of_failures);
        let limit = &answer.limit;
        let decisions = [
            limit.limit_failures,
            limit.limit_retries,
            limit.limit_releases,
            limit.limit_collections,
        ];
        let decisions = one("", BasisKind::Events, decisions.into_iter().flatten().sum());
        let is_set = recording.limit.is_some() && !recording.limit_is_inferred();
        let of_limit = [decisions, one("", BasisKind::Settings, u64::from(is_set))];
        add("limit_bytes", limit.limit_bytes.is_some(), &of_limit);
        all
    }

    fn only_if(self, is_used: bool) -> Self {
        Self { count: if is_used { self.count } else { 0 }, ..self }
    }
}
