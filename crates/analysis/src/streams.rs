//! The peak memory of each stream, and whether the streams' peaks come at the same time.
//!
//! A caching allocator keeps memory per stream, so memory that one stream has freed is not available to
//! another. If the peaks of streams come at different times, each stream keeps its own memory in
//! between. This module shows how much that costs.

use std::collections::HashMap;

use schemars::JsonSchema;
use serde::Serialize;

use stratalloc::ids::StreamId;
use stratalloc_recording::{Op, Workload};

/// The peak use of one stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct StreamUse {
    /// The stream.
    #[serde(serialize_with = "stratalloc_recording::stream_number")]
    #[schemars(with = "u64")]
    pub stream: StreamId,
    /// The peak of live bytes on the stream, as requested.
    pub peak_live_bytes: u64,
}

/// All streams of a recording.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Streams {
    /// Each stream, ordered by raw handle.
    pub streams: Vec<StreamUse>,
    /// The peak of live bytes on all streams together.
    pub peak_live_bytes: u64,
    /// The maximum number of streams that were busy at once. A stream is busy while more than half of
    /// its own peak is live.
    pub busy_together: usize,
}

#[derive(Default)]
struct Live {
    now_bytes: u64,
    peak_bytes: u64,
}

impl Streams {
    /// Computes the use of each stream of a workload.
    #[must_use]
    pub fn of(workload: &Workload) -> Self {
        let mut live: HashMap<StreamId, Live> = HashMap::new();
        let mut peak_live_bytes = 0;
        let mut now_bytes = 0_u64;
        changes(workload, |stream, change, bytes| {
            let entry = live.entry(stream).or_default();
            entry.now_bytes = change(entry.now_bytes, bytes);
            now_bytes = change(now_bytes, bytes);
            entry.peak_bytes = entry.peak_bytes.max(entry.now_bytes);
            peak_live_bytes = peak_live_bytes.max(now_bytes);
        });
        let (mut busy, mut busy_together) = (0_usize, 0);
        live.values_mut().for_each(|entry| entry.now_bytes = 0);
        changes(workload, |stream, change, bytes| {
            let Some(entry) = live.get_mut(&stream) else { return };
            let is_busy = |now_bytes: u64| now_bytes > entry.peak_bytes / 2;
            let was_busy = is_busy(entry.now_bytes);
            let now_bytes = change(entry.now_bytes, bytes);
            match (was_busy, is_busy(now_bytes)) {
                (false, true) => busy += 1,
                (true, false) => busy -= 1,
                _ => {}
            }
            entry.now_bytes = now_bytes;
            busy_together = busy_together.max(busy);
        });
        let used =
            |(stream, live): (_, Live)| StreamUse { stream, peak_live_bytes: live.peak_bytes };
        let mut streams: Vec<_> = live.into_iter().map(used).collect();
        streams.sort_unstable_by_key(|used| used.stream);
        Self { streams, peak_live_bytes, busy_together }
    }

    /// Returns the sum of the streams' peaks: the bytes needed if no stream can use another's memory.
    #[must_use]
    pub(crate) fn sum_of_peaks_bytes(&self) -> u64 {
        let peaks = self.streams.iter().map(|stream| stream.peak_live_bytes);
        peaks.fold(0, u64::saturating_add)
    }
}

/// Calls `see` for each block that is allocated or freed. The function that `see` gets adds the block's
/// bytes to a sum or subtracts them.
fn changes(workload: &Workload, mut see: impl FnMut(StreamId, fn(u64, u64) -> u64, u64)) {
    let mut blocks: Vec<Option<(StreamId, u64)>> = vec![None; workload.blocks as usize];
    for op in workload.ops.iter() {
        match op {
            Op::Allocate { id, bytes, stream, .. } => {
                blocks[id as usize] = Some((stream, bytes));
                see(stream, u64::saturating_add, bytes);
            }
            Op::Free { id } | Op::FreeInUse { id, .. } => {
                if let Some((stream, bytes)) = blocks[id as usize].take() {
                    see(stream, u64::saturating_sub, bytes);
                }
            }
            Op::AllocateFailing { .. } | Op::Finished { .. } | Op::EmptyCache => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stratalloc::ids::PoolId;

    fn take(id: u32, stream: u64, bytes: u64) -> Op {
        Op::Allocate { id, bytes, stream: StreamId(stream), pool: PoolId::DEFAULT }
    }

    #[test]
    fn streams_that_take_turns_are_never_busy_together() {
        let give = |id| Op::Free { id };
        let turns = vec![take(0, 1, 10), give(0), take(1, 2, 8), give(1), take(2, 1, 4)];
        let workload = Workload { ops: turns.into(), blocks: 3, ..Workload::default() };
        let streams = Streams::of(&workload);
        let peaks: Vec<u64> = streams.streams.iter().map(|s| s.peak_live_bytes).collect();
        assert_eq!((peaks, streams.peak_live_bytes), (vec![10, 8], 10));
        assert_eq!((streams.busy_together, streams.sum_of_peaks_bytes()), (1, 18));

        let both = vec![take(0, 1, 10), take(1, 2, 8), give(0), give(1)];
        let workload = Workload { ops: both.into(), blocks: 2, ..Workload::default() };
        let streams = Streams::of(&workload);
        assert_eq!((streams.busy_together, streams.peak_live_bytes), (2, 18));
    }
}
