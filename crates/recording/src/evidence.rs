//! Finds the entries that a recording does not contain, and decides whether the rest shows a history.
//!
//! PyTorch's `skip_actions` leaves out all entries of an action, and the file does not state which. An action
//! without any entry either did not happen or was left out. The other entries and the final layout decide
//! that: a block that is free at the end was freed, and a block that became free was freed before. Where the
//! missing entry follows from others, [`MissingEntries::add_frees`] adds it, so that nothing else has to know
//! that it was missing. [`NoHistory`] states what cannot be repaired.

use std::collections::{BTreeMap, HashSet};

use schemars::JsonSchema;
use serde::Serialize;

use super::start::Start;
use super::totals::TotalsSource;
use super::trace::{Trace, TraceEvent};
use stratalloc::history::{Action, BlockStateName, SegmentLayout};

/// Entries that the recorded program must have caused and that the recording does not contain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct MissingEntries {
    /// Frees without the entry `free_requested`. It was added right before the free's completion.
    pub free_requests: u64,
    /// Frees without the entry `free_completed`. It was added right after the free's request.
    pub free_completions: u64,
    /// Blocks that were freed at an unknown moment, because neither entry of the free exists.
    pub frees: u64,
    /// Blocks without the entry `alloc`, although the recording covers their requests.
    pub allocations: u64,
}

/// Entries to add to a recording: each is inserted before the event with this index.
type Additions = Vec<(usize, TraceEvent)>;

/// The most host memory that [`MissingEntries::add_frees`] uses for each event, besides the additions.
const WALK_BYTES_PER_EVENT: u64 = 80;

impl MissingEntries {
    /// Returns true if no missing entry was found.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Returns true if one of the actions that [`add_frees`](Self::add_frees) needs has no entry. Otherwise
    /// none of them was left out.
    fn may_be_in(events: &[TraceEvent]) -> bool {
        let has = |action| events.iter().any(|event| event.action == action);
        let actions = [Action::Alloc, Action::FreeRequested, Action::FreeCompleted];
        !events.is_empty() && !actions.into_iter().all(has)
    }

    /// Finds the missing entries of a trace. Adds those that follow from others, and counts all in
    /// [`Trace::missing`]. Calls `charge` with the host memory that each step needs.
    ///
    /// # Errors
    ///
    /// Those of `charge`.
    pub(super) fn add_frees<E>(
        trace: &mut Trace,
        mut charge: impl FnMut(u64) -> Result<(), E>,
    ) -> Result<(), E> {
        if !Self::may_be_in(&trace.events) {
            return Ok(());
        }
        let events = trace.events.len();
        charge((events as u64).saturating_mul(WALK_BYTES_PER_EVENT))?;
        let (missing, additions) = EvidenceWalk::of(&trace.events, &trace.segments);
        trace.missing = missing;
        if additions.is_empty() {
            return Ok(());
        }
        let event_bytes = size_of::<TraceEvent>();
        charge((size_of_val(&*additions) + (events + additions.len()) * event_bytes) as u64)?;
        let annotated = trace.annotations.iter_mut().map(|note| &mut note.events_before);
        let marked = trace.marks.iter_mut().map(|mark| &mut mark.events_before);
        for events_before in annotated.chain(marked) {
            let added = additions.partition_point(|(at, _)| *at < *events_before as usize);
            let added = u32::try_from(added).unwrap_or(u32::MAX);
            *events_before = events_before.saturating_add(added);
        }
        let mut all = Vec::with_capacity(trace.events.len() + additions.len());
        let mut additions = additions.into_iter().peekable();
        for (at, event) in trace.events.iter().enumerate() {
            while let Some((_, added)) = additions.next_if(|(before, _)| *before <= at) {
                all.push(added);
            }
            all.push(*event);
        }
        all.extend(additions.map(|(_, added)| added));
        trace.events = all;
        Ok(())
    }
}

/// A block between its request and its last entry.
#[derive(Clone, Copy)]
struct Seen {
    end: u64,
    /// The index of the free's request, if there was one.
    requested: Option<usize>,
}

/// The blocks while the events are read in order.
struct EvidenceWalk<'a> {
    events: &'a [TraceEvent],
    has_free_requests: bool,
    /// The blocks that are not free, by address. Without those from before the first event.
    blocks: BTreeMap<u64, Seen>,
    /// The addresses of blocks that became free and were not requested again.
    free: HashSet<u64>,
    /// The index of the first segment event of the current operation, if it had one.
    operation: Option<usize>,
    missing: MissingEntries,
    additions: Additions,
}

impl<'a> EvidenceWalk<'a> {
    /// Returns the missing entries, and those that follow from others, in the order of their places.
    fn of(events: &'a [TraceEvent], segments: &[SegmentLayout]) -> (MissingEntries, Additions) {
        let (blocks, free, missing, additions) = Default::default();
        let has_free_requests = events.iter().any(|event| event.action == Action::FreeRequested);
        let mut walk =
            Self { events, has_free_requests, blocks, free, operation: None, missing, additions };
        (0..events.len()).for_each(|at| walk.see(at));
        walk.end(segments);
        walk.additions.sort_by_key(|(at, _)| *at);
        (walk.missing, walk.additions)
    }

    fn see(&mut self, at: usize) {
        let TraceEvent { action, address, size_bytes, .. } = self.events[at];
        let end = address.saturating_add(size_bytes.max(1));
        match action {
            Action::SegmentFree | Action::SegmentUnmap => self.freed_within(address, end),
            Action::Alloc => {
                self.freed_within(address, end);
                self.free.remove(&address);
                self.blocks.insert(address, Seen { end, requested: None });
            }
            Action::FreeRequested => self.requested(at, address, end),
            Action::FreeCompleted => self.completed(at, address),
            _ => {}
        }
        match action {
            _ if action.is_segment() => _ = self.operation.get_or_insert(at),
            Action::FreeCompleted => {}
            _ => self.operation = None,
        }
    }

    fn requested(&mut self, at: usize, address: u64, end: u64) {
        let was_free = self.free.remove(&address);
        let is_again = match self.blocks.insert(address, Seen { end, requested: Some(at) }) {
            Some(Seen { requested: Some(before), .. }) => {
                self.add_completion(before);
                true
            }
            Some(_) => false,
            None => was_free,
        };
        self.missing.allocations += u64::from(is_again);
    }

    fn completed(&mut self, at: usize, address: u64) {
        let before = self.blocks.remove(&address);
        let is_new = self.free.insert(address);
        let is_requested = match before {
            Some(block) => block.requested.is_some(),
            None => {
                self.missing.allocations += u64::from(!is_new);
                // The block lived before the recording. If the recording begins with the completion, its
                // ring has probably dropped the request.
                self.has_free_requests || at == 0
            }
        };
        if !is_requested {
            // An entry between the events of one operation would cut it in two.
            let request = TraceEvent { action: Action::FreeRequested, ..self.events[at] };
            self.additions.push((self.operation.unwrap_or(at), request));
            self.missing.free_requests += 1;
        }
    }

    /// Removes the blocks in a range that the recorded allocator treats as free.
    fn freed_within(&mut self, from: u64, to: u64) {
        while let Some((&address, &block)) = self.blocks.range(..to).next_back()
            && block.end > from
        {
            self.blocks.remove(&address);
            self.freed_unseen(block);
        }
    }

    fn freed_unseen(&mut self, block: Seen) {
        match block.requested {
            Some(at) => self.add_completion(at),
            None => self.missing.frees += 1,
        }
    }

    fn add_completion(&mut self, requested: usize) {
        let completion = TraceEvent { action: Action::FreeCompleted, ..self.events[requested] };
        self.additions.push((requested + 1, completion));
        self.missing.free_completions += 1;
    }

    /// Compares the blocks after the last event with the final layout. Does nothing without a layout.
    fn end(&mut self, segments: &[SegmentLayout]) {
        if segments.is_empty() {
            return;
        }
        let blocks = segments.iter().flat_map(|segment| &segment.blocks);
        let live: HashSet<u64> = blocks
            .filter(|block| block.state != BlockStateName::Inactive)
            .map(|block| block.address)
            .collect();
        for (address, block) in std::mem::take(&mut self.blocks) {
            if !live.contains(&address) {
                self.freed_unseen(block);
            }
        }
        self.missing.allocations += self.free.intersection(&live).count() as u64;
    }
}

/// The reason why a recording has no history.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Lack {
    /// At most one request was recorded, and memory existed before it.
    Requests,
    /// The entries of frees were left out.
    Frees,
    /// The entries of successful requests were left out.
    Allocations,
    /// The file has only totals: counters, or bytes over time.
    Totals,
}

/// A recording that shows only the moment when it was written: its entries do not show how much memory the
/// program needed before. No peak, need, age or setting follows from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema, thiserror::Error)]
#[error("{} {}", self.sentence(), self.remedy().trim_end_matches('.'))]
pub struct NoHistory {
    /// The reason.
    pub lack: Lack,
    /// The number of entries in the file, including those that are not about memory.
    pub entries: u64,
    /// The number of recorded requests, successful or not.
    pub requests: u64,
    /// The number of entries that are missing, if the reason is not `requests`.
    pub missing: u64,
    /// The largest number of entries of another device in the file.
    #[serde(skip)]
    elsewhere: u64,
    /// Whether this library wrote the file.
    #[serde(skip)]
    is_ours: bool,
    /// The kind of file, if it is not a snapshot.
    #[serde(skip)]
    totals: Option<TotalsSource>,
}

impl NoHistory {
    /// Returns `None` if the recording has a history: requests and frees over time, or everything from the
    /// program's start on.
    #[must_use]
    pub fn of(trace: &Trace) -> Option<Self> {
        if trace.requests_only {
            return None;
        }
        let MissingEntries { frees, allocations, .. } = trace.missing;
        let found = |lack, missing| Self {
            lack,
            entries: trace.entries,
            requests: trace.requests().count() as u64,
            missing,
            elsewhere: trace.entries_elsewhere,
            is_ours: trace.made_here.is_some(),
            totals: trace.totals.as_ref().map(|totals| totals.source),
        };
        if trace.totals.is_some() {
            return Some(found(Lack::Totals, 0));
        }
        match (allocations, frees) {
            (0, 0) => {}
            (0, frees) => return Some(found(Lack::Frees, frees)),
            (allocations, _) => return Some(found(Lack::Allocations, allocations)),
        }
        let is_something = !trace.events.is_empty() || !trace.segments.is_empty();
        let has_no_history = match trace.requests().take(2).count() {
            0 => is_something,
            // From the program's start on, one request is all that happened.
            1 => !Start::of(trace).is_empty(),
            _ => false,
        };
        has_no_history.then(|| found(Lack::Requests, 0))
    }

    /// Returns what was recorded, as text.
    fn recorded(&self) -> String {
        let Self { lack, entries, requests, missing, .. } = *self;
        match (lack, entries, requests) {
            // The ring is larger, or was not that of this device.
            (Lack::Requests, own, _) if self.elsewhere > 1 => {
                let own = match (own, requests) {
                    (1, _) => "1 event".to_owned(),
                    (_, 0) => format!("{own} events"),
                    _ => format!("{own} events with 1 request"),
                };
                format!("{own}, and {} of another", self.elsewhere)
            }
            (Lack::Requests, 0, _) => "0 events".to_owned(),
            (Lack::Requests, 1, _) if self.is_ours => "a ring of one entry".to_owned(),
            (Lack::Requests, 1, _) => {
                "a ring of one entry, as _record_memory_history(True) makes it".to_owned()
            }
            (Lack::Requests, some, 0) => format!("none of its {some} entries is a request"),
            (Lack::Requests, some, _) => format!("1 of its {some} entries is a request"),
            (Lack::Frees, ..) => {
                format!("no free was recorded, and {missing} of its blocks were freed")
            }
            (Lack::Totals, entries, _) => format!("{entries} totals and no requests"),
            (Lack::Allocations, ..) => {
                format!("{missing} of its blocks were requested, and no such entry was recorded")
            }
        }
    }

    /// Returns the statement that precedes everything that is printed about the recording.
    #[must_use]
    pub fn sentence(&self) -> String {
        let recorded = self.recorded();
        let kind = match self.totals {
            Some(TotalsSource::MemoryStats) => {
                "the output of torch.cuda.memory_stats(): it has the allocator's counters"
            }
            Some(_) => "a memory timeline of PyTorch's profiler: it has the live bytes over time",
            None => {
                let of_device = match self.lack {
                    Lack::Requests if self.elsewhere > 1 => " of this device",
                    _ => "",
                };
                return format!(
                    "This snapshot has no history{of_device} ({recorded}): it shows the moment of the dump, not the \
                     peak."
                );
            }
        };
        format!("This file is {kind}, and no requests, so no need and no setting follows from it.")
    }

    /// Returns how to make a recording with a history.
    #[must_use]
    pub fn remedy(&self) -> &'static str {
        match (self.lack, self.is_ours) {
            (Lack::Requests, _) if self.elsewhere > 1 => {
                "Start the recording before the program uses this device."
            }
            (Lack::Requests, false) | (Lack::Totals, _) => {
                "Call torch.cuda.memory._record_memory_history() before the steps, and dump the snapshot after them."
            }
            (Lack::Requests, true) => {
                "Record before the steps, with room for their entries: record_history:1000000 keeps that many."
            }
            (Lack::Frees | Lack::Allocations, _) => {
                "Record again without skip_actions for alloc, free_requested and free_completed."
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Limits, reader};

    fn shipped() -> impl Iterator<Item = (String, Trace)> {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/traces");
        let names = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
        names.filter(|path| path.extension().is_some_and(|end| end == "xz")).map(|path| {
            let trace = reader::read(&path, &Limits::default()).unwrap();
            (path.display().to_string(), trace)
        })
    }

    #[test]
    fn nothing_is_missing_from_whole_recordings_and_from_their_ends() {
        for (name, trace) in shipped() {
            for part in 0..4 {
                let events = &trace.events[trace.events.len() * part / 4..];
                let (missing, additions) = EvidenceWalk::of(events, &trace.segments);
                assert!(missing.is_empty(), "{name} {part}: {missing:?}");
                assert!(additions.is_empty(), "{name} {part}");
                let part = Trace { events: events.to_vec(), ..trace.clone() };
                assert_eq!(Start::of(&part).outside, 0, "{name}");
            }
        }
    }

    /// Returns the events of a trace without those of an action.
    fn without(trace: &Trace, action: Action) -> Trace {
        let mut cut = trace.clone();
        cut.events.retain(|event| event.action != action);
        MissingEntries::add_frees(&mut cut, |_| Ok::<_, ()>(())).unwrap();
        cut
    }

    #[test]
    fn one_entry_of_a_free_follows_from_the_other() {
        let key = |event: &TraceEvent| (event.action, event.address, event.size_bytes);
        let mut equal = 0;
        for (name, trace) in shipped() {
            let events: Vec<_> = trace.events.iter().map(key).collect();
            for action in [Action::FreeRequested, Action::FreeCompleted] {
                let whole = without(&trace, action);
                assert_eq!((whole.missing.frees, whole.missing.allocations), (0, 0), "{name}");
                assert_eq!(NoHistory::of(&whole), None, "{name}");
                equal += usize::from(whole.events.iter().map(key).eq(events.iter().copied()));
            }
        }
        assert!(equal >= 8, "{equal} recordings without waits are as they were");
    }

    #[test]
    fn blocks_that_became_free_unseen_and_frees_of_free_blocks_are_counted() {
        for (name, trace) in shipped() {
            let lack = |action| NoHistory::of(&without(&trace, action)).map(|found| found.lack);
            assert_eq!(lack(Action::Alloc), Some(Lack::Allocations), "{name}");
            let mut cut = trace.clone();
            cut.events.retain(|event| event.action != Action::FreeCompleted);
            let cut = without(&cut, Action::FreeRequested);
            assert_eq!(NoHistory::of(&cut).map(|found| found.lack), Some(Lack::Frees), "{name}");
        }
    }

    #[test]
    fn a_request_of_a_free_is_not_added_between_the_events_of_one_operation() {
        let event = |action, address, size_bytes| {
            TraceEvent::new(action, address, size_bytes, stratalloc::ids::StreamId(0))
        };
        let mut trace = Trace {
            events: vec![
                event(Action::Alloc, 512, 512),
                event(Action::Alloc, 2048, 512),
                event(Action::SegmentFree, 1 << 20, 512),
                event(Action::FreeCompleted, 512, 512),
                event(Action::SegmentAlloc, 1 << 20, 512),
                event(Action::Alloc, 1 << 20, 512),
            ],
            ..Trace::default()
        };
        MissingEntries::add_frees(&mut trace, |_| Ok::<_, ()>(())).unwrap();
        let actions: Vec<Action> = trace.events.iter().map(|event| event.action).collect();
        assert_eq!(
            actions[2..5],
            [Action::FreeRequested, Action::SegmentFree, Action::FreeCompleted]
        );
        assert_eq!(trace.missing, MissingEntries { free_requests: 1, ..Default::default() });
    }
}
