//! The first difference between a recording and that of the largest group.

use std::borrow::Cow;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::fingerprint::{Differs, Place, facts, first_differing};
use crate::diff::{ShownRequest, first_difference};
use crate::grouped;
use stratalloc::history::Action;
use stratalloc_recording::{Op, Trace, Workload};

/// How a recording differs from that of the largest group. Pairs are that of the largest group and that of
/// this recording.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Difference {
    /// The recorded configurations, if they differ.
    pub confs: Option<[String; 2]>,
    /// Other data that differ, such as the version of PyTorch: the name and the values.
    pub facts: Vec<(String, [String; 2])>,
    /// The first request that differs in its size, its stream or its success. `None` if all requests are the
    /// same.
    pub requests: Option<[Option<ShownRequest>; 2]>,
    /// The streams of these requests, numbered by first use with 0 for the default stream, if only the stream
    /// differs.
    pub streams: Option<[u32; 2]>,
    /// If all requests are the same, the first operation that differs.
    pub operations: Option<[Option<Operation>; 2]>,
    /// Whether only the blocks from before the recordings differ.
    pub(crate) only_blocks_before: bool,
}

/// An operation, as it is printed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Operation {
    /// The number of events up to this one.
    pub event: u64,
    /// The operation, its size and its stream.
    pub what: String,
}

/// A recording of one rank, with its operations and the limit that its failed requests show.
pub struct Rank<'a> {
    pub(super) trace: &'a Trace,
    pub(super) workload: Arc<Workload>,
    pub(super) limit_bytes: Option<u64>,
}

impl Difference {
    /// Compares a recording with that of the largest group, which is the first.
    pub fn of(sides: &[Rank<'_>; 2]) -> Self {
        let traces = [sides[0].trace, sides[1].trace];
        let confs = traces.map(|trace| trace.conf.clone());
        let [a, b] = [0, 1].map(|side| facts(traces[side], sides[side].limit_bytes));
        let pairs = a.into_iter().zip(b).filter(|(a, b)| a != b);
        let mut found = Self {
            confs: (confs[0] != confs[1]).then_some(confs),
            facts: pairs.map(|((name, a), (_, b))| (name.to_owned(), [a, b])).collect(),
            requests: None,
            streams: None,
            operations: None,
            only_blocks_before: false,
        };
        if let Some((requests, streams)) = first_difference(traces) {
            (found.requests, found.streams) = (Some(requests), streams);
            return found;
        }
        match first_differing([&sides[0].workload, &sides[1].workload]) {
            Some(Differs::Operations(places)) => {
                found.operations = Some(operations(sides, places));
            }
            Some(Differs::BlocksBefore) => found.only_blocks_before = true,
            None => {}
        }
        found
    }

    /// Returns the difference as a sentence. `largest` is the name of the recording of the largest group.
    pub fn sentence(&self, largest: &str) -> String {
        let mut parts = Vec::new();
        if let Some(confs) = &self.confs {
            let [a, b] = different_settings(confs);
            parts.push(format!("settings {b} instead of {a}"));
        }
        parts.extend(self.facts.iter().map(|(name, [a, b])| format!("{name}: {b} instead of {a}")));
        let request = |side: usize| {
            let ShownRequest { request, event, bytes, failed, requested_by, .. } =
                self.requests.as_ref()?[side].as_ref()?;
            let failed = if *failed { ", failed" } else { "" };
            let stream = self.streams.map_or_else(String::new, |streams| {
                format!(", {}", stream(u64::from(streams[side])))
            });
            let by = requested_by.as_ref().map_or_else(String::new, |by| format!(", {by}"));
            let (number, event) = (grouped(*request), grouped(u64::from(*event)));
            let bytes = grouped(*bytes);
            Some(format!("request {number} (event {event}: {bytes} bytes{failed}{stream}{by})"))
        };
        let operation = |side: usize| {
            let Operation { event, what } = self.operations.as_ref()?[side].as_ref()?;
            Some(format!("{what} (event {})", grouped(*event)))
        };
        let is_ordered_otherwise =
            matches!(&self.operations, Some([Some(a), Some(b)]) if a.what == b.what);
        let pair = |pair: [Option<String>; 2]| match pair {
            [Some(a), Some(b)] => Some(format!("{b} instead of {a}")),
            [None, Some(b)] => Some(format!("{b} is additional")),
            [Some(a), None] => Some(format!("{a} is missing")),
            [None, None] => None,
        };
        match pair([0, 1].map(request)) {
            Some(requests) => parts.push(requests),
            None => parts.push("the requests are the same".to_owned()),
        }
        parts.extend(match is_ordered_otherwise {
            true => operation(1).map(|what| format!("{what} completes in another order")),
            false => pair([0, 1].map(operation)),
        });
        if self.only_blocks_before {
            parts.push("other blocks lived before the recording".to_owned());
        }
        format!("differs from {largest}: {}", parts.join("; "))
    }
}

/// Returns the settings that only one of two configurations has.
fn different_settings(confs: &[String; 2]) -> [String; 2] {
    let settings = confs.each_ref().map(|conf| parts(conf));
    let only = [0, 1].map(|side| {
        let is_only = |setting: &&&str| !settings[1 - side].contains(setting);
        settings[side].iter().filter(is_only).copied().collect::<Vec<_>>().join(",")
    });
    match only.iter().all(String::is_empty) {
        // Only the order or the spaces differ.
        true => confs.clone().map(|conf| format!("{conf:?}")),
        false => only.map(|only| if only.is_empty() { "the defaults".to_owned() } else { only }),
    }
}

/// Splits a configuration at the commas that are not in brackets.
fn parts(conf: &str) -> Vec<&str> {
    let mut depth = 0_i32;
    let split = conf.split(move |sign| {
        depth += i32::from("[(".contains(sign)) - i32::from("])".contains(sign));
        sign == ',' && depth <= 0
    });
    split.map(str::trim).filter(|part| !part.is_empty()).collect()
}

/// Returns the operations of two recordings as they are printed.
fn operations(sides: &[Rank<'_>; 2], places: [Option<Place>; 2]) -> [Option<Operation>; 2] {
    let texts = |is_long: bool| {
        [0, 1].map(|side| Some(text(&sides[side].workload, places[side]?, is_long)))
    };
    let short = texts(false);
    let texts = if short[0] == short[1] { texts(true) } else { short };
    let mut texts = texts.into_iter();
    [0, 1].map(|side| {
        let what = texts.next().flatten()?;
        let workload = &sides[side].workload;
        let ops = workload.ops.range(workload.seeded as usize..places[side]?.index + 1);
        Some(Operation { event: event_of(sides[side].trace, ops), what })
    })
}

fn stream(ordinal: u64) -> String {
    if ordinal == 0 { "default stream".to_owned() } else { format!("stream number {ordinal}") }
}

/// Returns an operation as text; if `is_long`, with its streams and pools.
fn text(workload: &Workload, place: Place, is_long: bool) -> String {
    let on = || match (is_long, place.pool) {
        (false, _) => String::new(),
        (true, 0) => format!(" on the {}, in no private pool", stream(place.stream)),
        (true, pool) => format!(" on the {}, in private pool number {pool}", stream(place.stream)),
    };
    let block = |id: u32| match id.checked_sub(workload.seeded) {
        Some(request) => format!("request {}", grouped(u64::from(request) + 1)),
        None => match workload.ops.get(id as usize) {
            Some(Op::Allocate { bytes, .. }) => {
                format!("a block of {} bytes from before the recording{}", grouped(bytes), on())
            }
            _ => "a block from before the recording".to_owned(),
        },
    };
    let Some(op) = workload.ops.get(place.index) else { return String::new() };
    match op {
        Op::Allocate { id, .. } | Op::AllocateFailing { id, .. } => {
            format!("{}{}", block(id), on())
        }
        Op::Free { id } => format!("free of {}", block(id)),
        Op::FreeInUse { id, .. } => {
            format!("free of {} that waits for other streams", block(id))
        }
        Op::Finished { id } => format!("end of the wait of the free of {}", block(id)),
        Op::EmptyCache => "release of free segments (empty_cache)".to_owned(),
    }
}

/// Returns the number of events up to that of the last of `ops`, which are the operations of the recording
/// from its first event on.
fn event_of(trace: &Trace, ops: impl Iterator<Item = Op>) -> u64 {
    let all = match &trace.log {
        None => Cow::Borrowed(trace.events.as_slice()),
        Some(_) => Cow::Owned(trace.each_event().collect()),
    };
    let mut event = 0;
    let mut next = 0;
    for op in ops {
        if matches!(op, Op::FreeInUse { lane, .. } if lane == Workload::LANE_BEFORE) {
            continue;
        }
        let mut events = all.iter().skip(next);
        let found = events.position(|event| match op {
            Op::Allocate { .. } | Op::AllocateFailing { .. } => event.is_request(),
            Op::Free { .. } | Op::FreeInUse { .. } => event.action == Action::FreeRequested,
            Op::Finished { .. } => event.action == Action::FreeCompleted,
            Op::EmptyCache => event.action.is_segment(),
        });
        event = next + found.map_or(0, |found| found + 1);
        // A free that completes at once has two events.
        next = event + usize::from(matches!(op, Op::Free { .. }));
    }
    event as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use stratalloc::ids::{PoolId, StreamId};
    use stratalloc_recording::TraceEvent;

    /// Returns a recording. Each event has an action, the number of a block and its size.
    fn trace(events: &[(Action, u64, u64)]) -> Trace {
        let event =
            |&(action, block, bytes)| TraceEvent::new(action, block << 30, bytes, StreamId(0));
        Trace { events: events.iter().map(event).collect(), ..Trace::default() }
    }

    fn sentence(traces: [&Trace; 2]) -> String {
        let side =
            |trace| Rank { trace, workload: Workload::shared(trace, 1 << 37), limit_bytes: None };
        Difference::of(&traces.map(side)).sentence("rank0")
    }

    use Action::{Alloc, FreeCompleted, FreeRequested};

    const EQUAL: &str = "differs from rank0: the requests are the same; ";

    #[test]
    fn a_free_that_differs_is_named_with_its_event() {
        let begin = [(Alloc, 1, 512), (Alloc, 2, 512)];
        let free = |block| [(FreeRequested, block, 512), (FreeCompleted, block, 512)];
        let end = [(Alloc, 3, 512)];
        let a = trace(&[&begin[..], &free(1), &end].concat());
        let b = trace(&[&begin[..], &free(2), &end].concat());
        let c = trace(&[&begin[..], &end, &free(1)].concat());
        let d = trace(&[&begin[..], &[free(1)[0]], &end, &[free(1)[1]]].concat());
        let other = "free of request 2 (event 3) instead of free of request 1 (event 3)";
        assert_eq!(sentence([&a, &b]), format!("{EQUAL}{other}"));
        let later = "request 3 (event 3) instead of free of request 1 (event 3)";
        assert_eq!(sentence([&a, &c]), format!("{EQUAL}{later}"));
        let waits = "free of request 1 that waits for other streams (event 3) instead of free of request 1 (event 3)";
        assert_eq!(sentence([&a, &d]), format!("{EQUAL}{waits}"));
        let missing = "free of request 1 (event 4) is missing";
        let short = trace(&[&begin[..], &end].concat());
        assert_eq!(sentence([&c, &short]), format!("{EQUAL}{missing}"));
    }

    #[test]
    fn waits_that_end_in_another_order_are_named() {
        let begin =
            [(Alloc, 1, 512), (Alloc, 2, 512), (FreeRequested, 1, 512), (FreeRequested, 2, 512)];
        let end = |blocks: [u64; 2]| {
            [(Alloc, 3, 512), (FreeCompleted, blocks[0], 512), (FreeCompleted, blocks[1], 512)]
        };
        let [a, b] = [[1, 2], [2, 1]].map(|blocks| trace(&[&begin[..], &end(blocks)].concat()));
        let expected =
            "free of request 2 that waits for other streams (event 4) completes in another order";
        assert_eq!(sentence([&a, &b]), format!("{EQUAL}{expected}"));
    }

    #[test]
    fn a_stream_or_a_pool_that_differs_is_named() {
        let a = trace(&[(Alloc, 1, 512), (Alloc, 2, 512)]);
        let mut b = a.clone();
        b.events[1].stream = StreamId(0x7000);
        let stream = "request 2 (event 2: 512 bytes, stream number 1) instead of request 2 (event 2: 512 bytes, \
                      default stream)";
        assert_eq!(sentence([&a, &b]), format!("differs from rank0: {stream}"));
        let [mut a, mut c] = [a.clone(), a];
        for (trace, pool) in [(&mut a, PoolId::DEFAULT), (&mut c, PoolId { capture: 9, user: 0 })] {
            (trace.events[1].pool, trace.events[1].names_pool) = (pool, true);
        }
        let pool = "request 2 on the default stream, in private pool number 1 (event 2) instead of request 2 on \
                    the default stream, in no private pool (event 2)";
        assert_eq!(sentence([&a, &c]), format!("{EQUAL}{pool}"));
    }

    #[test]
    fn settings_that_differ_are_listed_alone() {
        let mut a = trace(&[(Alloc, 1, 512)]);
        let mut b = a.clone();
        a.conf = "roundup_power2_divisions:[256:1,>:4],max_split_size_mb:64".to_owned();
        b.conf = "expandable_segments:True,roundup_power2_divisions:[256:1,>:4]".to_owned();
        b.torch = Some("2.13".parse().unwrap());
        let expected = "differs from rank0: settings expandable_segments:True instead of max_split_size_mb:64; \
                        version of PyTorch: 2.13 instead of 2.11; the requests are the same";
        assert_eq!(sentence([&a, &b]), expected);
    }

    #[test]
    fn blocks_from_before_the_recording_that_differ_are_named() {
        let [a, b] = [512, 1024].map(|bytes| {
            trace(&[(FreeRequested, 1, bytes), (FreeCompleted, 1, bytes), (Alloc, 2, 512)])
        });
        let block =
            |bytes| format!("free of a block of {bytes} bytes from before the recording (event 1)");
        let expected = format!("{EQUAL}{} instead of {}", block("1,024"), block("512"));
        assert_eq!(sentence([&a, &b]), expected);
    }
}
