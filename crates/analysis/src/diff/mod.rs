//! Compares two recordings of one program: of two commits, two ranks or two steps.
//!
//! [`Side::of`] computes the figures of each recording alone. [`Diff::of`] then aligns the requests
//! (`requests`), finds the code that both recordings have (`code`), and compares the live bytes at each
//! recording's peak and the segments (`segments`). Streams are compared by the order of their first requests,
//! because their handles differ between processes.

mod code;
mod peak;
mod requests;
mod segments;

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::callers::{Callers, Compared};
use super::figures::live_at_peak;
use super::holders::{LIVED_BEFORE, NO_STACK, stack_from_before};
use super::needs::{Need, SearchOptions};
use super::recording::Recording;
use super::words;
use code::Codes;
pub(crate) use requests::RequestDiff;
pub(super) use requests::{DIFFERENCES_MAX, fewest};
use segments::{HeldSegment, held_segments, only_in_b};
use stratalloc::config::Compat;
use stratalloc::history::Action;
use stratalloc::ids::StreamId;
use stratalloc_recording::{Progress, ReplayError, StackId, Stage, Trace};

/// One request of a recording.
#[derive(Clone, Copy, Debug)]
struct Request {
    bytes: u64,
    stream: StreamId,
    stack: Option<StackId>,
    has_failed: bool,
    /// The number of events up to this one.
    event: u32,
}

/// A recording, with its figures that are compared.
#[derive(Debug)]
pub struct Side {
    /// The recording.
    pub recording: Recording,
    /// The need under the recorded configuration, with PyTorch's decisions.
    pub need: Need,
    requests: Vec<Request>,
    /// The blocks that live at the peak of live bytes: their numbers and requested bytes.
    live: Vec<(u32, u64)>,
    segments: Vec<HeldSegment>,
}

impl Side {
    /// The number of steps of [`Self::of`].
    const STEPS: u64 = 3;

    /// Computes the figures of a recording. Takes some hundred replays. Receives
    /// the number of steps done ([`Stage::Figures`]).
    ///
    /// # Errors
    ///
    /// [`ReplayError`] when a replay fails for a reason other than memory.
    pub fn of(recording: Recording, progress: &dyn Progress) -> Result<Self, ReplayError> {
        let config = recording.config.clone().unwrap_or_default().with_compat(Compat::PyTorch);
        let mut need = Need::search(&recording, &config, &SearchOptions::QUICK, progress)?;
        progress.at(Stage::Figures, 1, Self::STEPS);
        need.try_other_addresses(&recording, &config, &SearchOptions::QUICK, progress)?;
        progress.at(Stage::Figures, 2, Self::STEPS);
        let segments = held_segments(&recording, &super::without_files(&config))?;
        let requests = requests_of(&recording.trace);
        let live = live_at_peak(&recording.workload);
        progress.at(Stage::Figures, 3, Self::STEPS);
        Ok(Self { recording, need, requests, live, segments })
    }

    /// Returns the number of requests.
    pub fn requests(&self) -> u64 {
        self.requests.len() as u64
    }

    /// Returns the index of the request that made a block; `None` if the block lived before the recording.
    fn request_of(&self, id: u32) -> Option<usize> {
        let index = id.checked_sub(self.recording.workload.seeded)? as usize;
        (index < self.requests.len()).then_some(index)
    }
}

/// Returns the requests of a recording, in order.
fn requests_of(trace: &Trace) -> Vec<Request> {
    let events = (1..).zip(trace.each_event()).filter(|(_, event)| event.is_request());
    let request = events.map(|(number, event)| Request {
        bytes: event.size_bytes,
        stream: event.stream,
        stack: event.stack,
        has_failed: event.action == Action::OutOfMemory,
        event: number,
    });
    request.collect()
}

/// The requests of a recording, with the code that made them.
#[derive(Debug)]
struct Listed<'a> {
    requests: &'a [Request],
    callers: Callers<'a>,
    streams: words::StreamNumbers,
}

impl<'a> Listed<'a> {
    fn new(requests: &'a [Request], trace: &'a Trace) -> Self {
        let streams = words::StreamNumbers::of(requests.iter().map(|request| request.stream));
        Self { requests, callers: Callers::of(&trace.stacks, Compared::Code), streams }
    }

    /// Returns requests as they are printed.
    fn shown(&self, indices: &[usize]) -> Vec<ShownRequest> {
        let Self { requests, callers, .. } = self;
        let with_stack = indices.iter().filter_map(|index| requests[*index].stack);
        let numbers: Vec<u32> = with_stack.map(|stack| callers.of_stack(stack)).collect();
        let mut distinct = numbers.clone();
        distinct.sort_unstable();
        distinct.dedup();
        let labels: HashMap<u32, String> =
            distinct.iter().copied().zip(callers.labels(&distinct)).collect();
        let shown = |index: &usize| {
            let Request { bytes, stream, stack, has_failed, event } = requests[*index];
            let label = stack.and_then(|stack| labels.get(&callers.of_stack(stack)).cloned());
            let (request, failed) = (*index as u64 + 1, has_failed);
            ShownRequest { request, event, bytes, stream, failed, requested_by: label }
        };
        indices.iter().map(shown).collect()
    }
}

/// Returns the code of two recordings, if both have stacks.
fn codes_of(listed: [&Listed<'_>; 2]) -> Option<Codes> {
    let by_code = listed.iter().all(|of| of.callers.count() > 0);
    by_code.then(|| Codes::of(listed.map(|of| &of.callers), listed.map(|of| of.requests)))
}

/// Aligns the requests of two recordings. If most requests of both have stacks, requests of different `codes`
/// differ.
fn aligned(
    listed: [&Listed<'_>; 2],
    codes: Option<&Codes>,
    streams: &mut StreamNumbers,
) -> RequestDiff {
    let has_stacks = |of: &&Listed<'_>| {
        let with_stack = of.requests.iter().filter(|request| request.stack.is_some()).count();
        with_stack > of.requests.len() / 2
    };
    let codes = codes.filter(|_| listed.iter().all(has_stacks));
    let keys = [0, 1].map(|side| {
        let Listed { requests, callers, .. } = listed[side];
        let key = |request: &Request| {
            let code = codes.zip(request.stack);
            let code = code.map(|(codes, stack)| codes.of_caller(side, callers.of_stack(stack)));
            (request.bytes, streams.number(side, request.stream), code, request.has_failed)
        };
        requests.iter().map(key).collect::<Vec<_>>()
    });
    RequestDiff::of([&keys[0], &keys[1]])
}

/// The requests at which two recordings differ first: that of each, or `None` if the other one has more
/// requests there. Then the numbers of their streams, if only the stream differs.
type FirstDifference = ([Option<ShownRequest>; 2], Option<[u32; 2]>);

/// Returns the first difference between the requests of two recordings, regardless of their code. `None` if
/// all requests are the same.
pub(crate) fn first_difference(traces: [&Trace; 2]) -> Option<FirstDifference> {
    let requests = traces.map(requests_of);
    let listed = [0, 1].map(|side| Listed::new(&requests[side], traces[side]));
    let mut streams = StreamNumbers::default();
    let found = aligned([&listed[0], &listed[1]], None, &mut streams);
    let place = found.places.first()?;
    let shown = [0, 1].map(|side| {
        let first: Vec<usize> = place[side].clone().take(1).collect();
        listed[side].shown(&first).pop()
    });
    let numbers = match &shown {
        [Some(a), Some(b)] if (a.bytes, a.failed) == (b.bytes, b.failed) => {
            Some([streams.number(0, a.stream), streams.number(1, b.stream)])
        }
        _ => None,
    };
    Some((shown, numbers))
}

/// The holder of blocks, in which blocks of two recordings can agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum CallerBytes {
    /// Code, by its number.
    Code(u32),
    /// Without stacks: the size of each block and the number of its stream.
    Size(u64, u32),
    /// The request was recorded without a stack.
    NoStack,
    /// The block lived before the recording began and has no recorded stack.
    Before,
}

/// Blocks at the peak of live bytes that have the same holder, of which one recording has more.
#[derive(Clone, Debug)]
pub struct Growth {
    /// The code that requested the blocks in each recording; `None` if the recording has none of these
    /// blocks.
    pub requested_by: [Option<String>; 2],
    /// Requested bytes in each recording.
    pub bytes: [u64; 2],
    /// Number of blocks in each recording.
    pub blocks: [u64; 2],
}

impl Growth {
    /// Returns the code as the second recording names it, and the first recording's name if it differs.
    pub fn label(&self) -> String {
        match &self.requested_by {
            [Some(a), Some(b)] if a != b => format!("{b} (in A: {a})"),
            [_, Some(label)] | [Some(label), None] => label.clone(),
            [None, None] => String::new(),
        }
    }
}

impl Growth {
    /// Returns the bytes that the second recording has more than the first.
    pub fn difference(&self) -> i64 {
        difference(self.bytes)
    }
}

/// Returns by how many bytes the second value is larger than the first.
pub fn difference([a, b]: [u64; 2]) -> i64 {
    let difference = i128::from(b) - i128::from(a);
    i64::try_from(difference).unwrap_or(if difference < 0 { i64::MIN } else { i64::MAX })
}

/// A request, as it is printed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShownRequest {
    /// The number of requests up to this one.
    pub request: u64,
    /// The number of events up to this one. It is the moment of a page right after the request.
    pub event: u32,
    /// In bytes.
    pub bytes: u64,
    /// The stream.
    #[serde(
        serialize_with = "stratalloc_recording::stream_number",
        deserialize_with = "stratalloc_recording::stream_of_number"
    )]
    pub stream: StreamId,
    /// Whether the request failed.
    pub failed: bool,
    /// The code that made the request, if its stack was recorded.
    pub requested_by: Option<String>,
}

/// A segment that the second recording reserves and the first does not.
#[derive(Clone, Debug, Serialize)]
pub struct KeptSegment {
    /// The size, in bytes.
    pub size_bytes: u64,
    /// Its free bytes.
    pub free_bytes: u64,
    /// The stream.
    #[serde(serialize_with = "stratalloc_recording::stream_number")]
    pub stream: StreamId,
    /// The number of blocks that keep the segment.
    pub blocks: u64,
    /// The size of the largest of them.
    pub largest_bytes: u64,
    /// The request that made the largest block; `None` if the block lived before the recording or was freed
    /// and waits for other streams.
    pub largest: Option<ShownRequest>,
}

/// The differences between two recordings.
#[derive(Debug)]
pub struct Diff<'a> {
    sides: [&'a Side; 2],
    listed: [Listed<'a>; 2],
    /// How the requests differ.
    pub requests: RequestDiff,
    /// The holders whose bytes at the peak of live bytes differ, by the size of the difference. At most
    /// [`Diff::LISTED_MAX`] of them.
    pub grew: Vec<Growth>,
    /// The number of holders whose bytes differ.
    pub grew_count: u64,
    /// The segments that only the second recording reserves, those with most free bytes first. At most
    /// [`Diff::LISTED_MAX`] of them.
    pub kept: Vec<KeptSegment>,
    /// The number of segments that only the second recording reserves.
    pub kept_count: u64,
}

impl<'a> Diff<'a> {
    /// The maximum number of rows in [`Self::grew`] and [`Self::kept`].
    pub const LISTED_MAX: usize = 100;

    /// Compares two recordings.
    pub fn of(a: &'a Side, b: &'a Side) -> Self {
        let sides = [a, b];
        let listed = sides.map(|side| Listed::new(&side.requests, &side.recording.trace));
        let mut streams = StreamNumbers::default();
        let codes = codes_of([&listed[0], &listed[1]]);
        let requests = aligned([&listed[0], &listed[1]], codes.as_ref(), &mut streams);
        let (grew, kept) = Default::default();
        let (grew_count, kept_count) = (0, 0);
        let mut diff = Self { sides, listed, requests, grew, grew_count, kept, kept_count };
        (diff.grew, diff.grew_count) = diff.growth(codes.as_ref(), &mut streams);
        let extra =
            only_in_b(&a.segments, &b.segments, |side, stream| streams.number(side, stream));
        diff.kept_count = extra.len() as u64;
        diff.kept = diff.kept_segments(&extra[..extra.len().min(Self::LISTED_MAX)]);
        diff
    }

    /// Returns the two recordings.
    pub fn sides(&self) -> [&'a Side; 2] {
        self.sides
    }

    /// Returns true if the recordings have the same requests, holders and segments, and the same need.
    pub fn is_empty(&self) -> bool {
        let [a, b] = self.sides.map(|side| {
            let peak_reserved_bytes = side.recording.figures.peak_reserved_bytes;
            (side.need.needs_bytes, side.recording.live_peak_bytes, peak_reserved_bytes)
        });
        let is_same = self.requests.places.is_empty() && self.grew.is_empty();
        is_same && self.kept.is_empty() && a == b
    }

    /// Returns the holders whose bytes differ, the largest differences first, and their number.
    fn growth(&self, codes: Option<&Codes>, streams: &mut StreamNumbers) -> (Vec<Growth>, u64) {
        /// The blocks of one holder in one recording.
        #[derive(Clone, Copy, Default)]
        struct Sum {
            bytes: u64,
            blocks: u64,
            caller: Option<u32>,
        }
        let mut sums: HashMap<CallerBytes, [Sum; 2]> = HashMap::new();
        for (at, side) in self.sides.into_iter().enumerate() {
            for &(id, bytes) in &side.live {
                let request = side.request_of(id).map(|index| &side.requests[index]);
                let stack = match request {
                    Some(request) => request.stack,
                    None => stack_from_before(&side.recording, id),
                };
                let caller = stack.map(|stack| self.listed[at].callers.of_stack(stack));
                let holder = match (request, codes, caller) {
                    (_, Some(codes), Some(caller)) => {
                        CallerBytes::Code(codes.of_caller(at, caller))
                    }
                    (None, ..) => CallerBytes::Before,
                    (Some(_), Some(_), None) => CallerBytes::NoStack,
                    (Some(request), None, _) => {
                        CallerBytes::Size(bytes, streams.number(at, request.stream))
                    }
                };
                let sum = &mut sums.entry(holder).or_default()[at];
                sum.bytes = sum.bytes.saturating_add(bytes);
                sum.blocks += 1;
                sum.caller = sum.caller.or(caller);
            }
        }
        let differs =
            |sums: &[Sum; 2]| sums[0].bytes != sums[1].bytes || sums[0].blocks != sums[1].blocks;
        let mut rows: Vec<_> = sums.into_iter().filter(|(_, sums)| differs(sums)).collect();
        let growth = |sums: &[Sum; 2]| sums[0].bytes.abs_diff(sums[1].bytes);
        rows.sort_unstable_by_key(|(holder, sums)| (std::cmp::Reverse(growth(sums)), *holder));
        let count = rows.len() as u64;
        rows.truncate(Self::LISTED_MAX);
        let mut labels = [0, 1].map(|side| {
            let with_code =
                rows.iter().filter(|(holder, _)| matches!(holder, CallerBytes::Code(_)));
            let callers: Vec<u32> = with_code.filter_map(|(_, sums)| sums[side].caller).collect();
            self.listed[side].callers.labels(&callers).into_iter()
        });
        let row = |(holder, sums): (CallerBytes, [Sum; 2])| {
            let label = |side: usize| match (holder, sums[side]) {
                (_, Sum { blocks: 0, .. }) => None,
                (CallerBytes::Code(_), _) => labels[side].next(),
                (CallerBytes::Size(bytes, number), _) => {
                    Some(words::size_label(bytes, &format!("stream {number}")))
                }
                (CallerBytes::NoStack, _) => Some(NO_STACK.to_owned()),
                (CallerBytes::Before, _) => Some(LIVED_BEFORE.to_owned()),
            };
            Growth {
                requested_by: [0, 1].map(label),
                bytes: sums.map(|sum| sum.bytes),
                blocks: sums.map(|sum| sum.blocks),
            }
        };
        (rows.into_iter().map(row).collect(), count)
    }

    fn kept_segments(&self, extra: &[&HeldSegment]) -> Vec<KeptSegment> {
        let side = self.sides[1];
        let largest = |segment: &HeldSegment| side.request_of(segment.blocks.first()?.id?);
        let indices: Vec<Option<usize>> = extra.iter().map(|segment| largest(segment)).collect();
        let known: Vec<usize> = indices.iter().flatten().copied().collect();
        let mut known = self.shown_requests(1, &known).into_iter();
        let kept = |(segment, index): (&&HeldSegment, Option<usize>)| KeptSegment {
            size_bytes: segment.size_bytes,
            free_bytes: segment.free_bytes,
            stream: segment.stream,
            blocks: segment.blocks.len() as u64,
            largest_bytes: segment.blocks.first().map_or(0, |block| block.size_bytes),
            largest: index.and_then(|_| known.next()),
        };
        extra.iter().zip(indices).map(kept).collect()
    }

    /// Returns the number of a stream of a recording as text, in the order of first requests; 0 for the
    /// default stream. `side` is 0 or 1.
    pub fn stream_label(&self, side: usize, stream: StreamId) -> String {
        self.listed[side].streams.label(stream)
    }

    /// Returns requests of a recording as they are printed. `side` is 0 or 1.
    pub fn shown_requests(&self, side: usize, indices: &[usize]) -> Vec<ShownRequest> {
        self.listed[side].shown(indices)
    }
}

/// Numbers for the streams of two recordings, in the order of their first requests. The default stream has
/// number 0.
#[derive(Debug, Default)]
struct StreamNumbers {
    known: [HashMap<StreamId, u32>; 2],
}

impl StreamNumbers {
    fn number(&mut self, side: usize, stream: StreamId) -> u32 {
        if stream == StreamId::DEFAULT {
            return 0;
        }
        let known = &mut self.known[side];
        let new = u32::try_from(known.len() + 1).unwrap_or(u32::MAX);
        *known.entry(stream).or_insert(new)
    }
}
