//! Classifies the reserved bytes at one moment of a replay by the reason why they are reserved.
//!
//! [`Picture::take`] replays a recording twice. The first replay finds the moment: the first failure, the
//! peak of live bytes, or the peak of reserved bytes. The second stops there and combines the allocator's
//! layout with the recorded requests of the live blocks. Each reserved byte is counted once, so the fields
//! of [`Picture::causes`] add up to the bytes allocated from the device.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use serde::Serialize;

use super::holders::{Holders, LiveBlock, stack_of};
use super::recording::Recording;
use super::trial::{Capacity, open_with_start, without_files};
use stratalloc::allocator::{Allocation, DeviceAllocator};
use stratalloc::config::Config;
use stratalloc::history::{BlockLayout, BlockStateName, SegmentLayout};
use stratalloc::ids::{PoolId, StreamId};
use stratalloc_recording::{Op, ReplayError, StackId, Workload, walk};
use stratalloc_sim::WorkGate;

/// A moment of a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// The first moment at which the most requested bytes were live.
    PeakLive,
    /// The moment at which the most memory was reserved. Of several such moments, the one with the most
    /// live bytes.
    PeakReserved,
    /// The moment of the first failed request.
    FirstFailure,
    /// The moment when the snapshot was written. A replay has no such moment.
    Dump,
}

/// Reserved bytes by cause. Each byte is counted in one field only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Causes {
    /// Requested bytes in live blocks.
    pub requested_bytes: u64,
    /// Bytes that rounding added to live blocks.
    pub rounding_bytes: u64,
    /// Freed bytes that wait for other streams.
    pub waiting_bytes: u64,
    /// Free bytes in segments with live or waiting blocks. Such segments cannot be released as a whole.
    pub split_rest_bytes: u64,
    /// Free bytes in segments without any live or waiting block.
    pub idle_segment_bytes: u64,
    /// Bytes allocated from the device that are not in the layout: the driver's own pools hold them.
    pub driver_bytes: u64,
}

impl Causes {
    /// Returns the sum: all reserved bytes.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.rows().into_iter().fold(0, |sum, (_, bytes)| sum.saturating_add(bytes))
    }

    fn of(segment: &SegmentLayout) -> Self {
        let sum = |state, bytes: fn(&BlockLayout) -> u64| {
            let blocks = segment.blocks.iter().filter(|block| block.state == state);
            blocks.map(bytes).fold(0, u64::saturating_add)
        };
        let (live, waiting) = (BlockStateName::ActiveAllocated, BlockStateName::ActivePendingFree);
        let free_bytes = sum(BlockStateName::Inactive, |block| block.size_bytes);
        let is_idle = segment.blocks.iter().all(|b| b.state == BlockStateName::Inactive);
        Self {
            requested_bytes: sum(live, |block| block.requested_bytes.min(block.size_bytes)),
            rounding_bytes: sum(live, |block| {
                block.size_bytes.saturating_sub(block.requested_bytes)
            }),
            waiting_bytes: sum(waiting, |block| block.size_bytes),
            split_rest_bytes: if is_idle { 0 } else { free_bytes },
            idle_segment_bytes: if is_idle { free_bytes } else { 0 },
            driver_bytes: 0,
        }
    }

    pub(super) fn add(&mut self, other: &Self) {
        self.requested_bytes = self.requested_bytes.saturating_add(other.requested_bytes);
        self.rounding_bytes = self.rounding_bytes.saturating_add(other.rounding_bytes);
        self.waiting_bytes = self.waiting_bytes.saturating_add(other.waiting_bytes);
        self.split_rest_bytes = self.split_rest_bytes.saturating_add(other.split_rest_bytes);
        self.idle_segment_bytes = self.idle_segment_bytes.saturating_add(other.idle_segment_bytes);
        self.driver_bytes = self.driver_bytes.saturating_add(other.driver_bytes);
    }
}

/// Reserved bytes of one stream of one pool, by cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeapCauses {
    /// The stream.
    pub stream: StreamId,
    /// The pool.
    pub pool: PoolId,
    /// Bytes by cause.
    pub causes: Causes,
    /// The largest free block.
    pub largest_free_bytes: u64,
}

/// A request that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failed {
    /// Requested bytes.
    pub requested_bytes: u64,
    /// The stream.
    pub stream: StreamId,
    /// The recorded stack of the request.
    pub stack: Option<StackId>,
}

/// The reserved memory at one moment of a replay.
#[derive(Clone, Debug, PartialEq)]
pub struct Picture {
    /// The moment.
    pub moment: Moment,
    /// The number of operations of the workload before the moment.
    pub operations: usize,
    /// The request that failed, if the moment is a failure.
    pub failed: Option<Failed>,
    /// All reserved bytes by cause.
    pub causes: Causes,
    /// The bytes by cause for each stream of each pool, largest first.
    pub heaps: Vec<HeapCauses>,
    /// The holders of the live bytes.
    pub holders: Holders,
}

impl Picture {
    /// Replays `recording` under `config` up to the moment and classifies the bytes there. Returns
    /// `None` if the replay has no such moment. Files that a layer of the configuration names are not
    /// written.
    ///
    /// # Errors
    ///
    /// [`ReplayError`] when the configuration builds no allocator, or the allocator fails for a reason
    /// other than memory.
    pub fn take(
        recording: &Recording,
        config: &Config,
        room: Capacity,
        moment: Moment,
    ) -> Result<Option<Self>, ReplayError> {
        let config = &without_files(config);
        match find(recording, config, room, moment)? {
            Some(at) => paint(recording, config, room, moment, at).map(Some),
            None => Ok(None),
        }
    }

    /// Classifies the bytes of a layout, without a replay and without holders.
    pub fn of_layout(layout: &[SegmentLayout], moment: Moment, operations: usize) -> Self {
        let mut heaps = heaps_of(layout);
        let mut causes = Causes::default();
        heaps.iter().for_each(|heap| causes.add(&heap.causes));
        heaps.sort_unstable_by_key(|heap| {
            (std::cmp::Reverse(heap.causes.total_bytes()), heap.stream, heap.pool)
        });
        Self { moment, operations, failed: None, causes, heaps, holders: Holders::default() }
    }
}

/// Returns the index of the operation right after which the moment is.
pub(super) fn find(
    recording: &Recording,
    config: &Config,
    room: Capacity,
    moment: Moment,
) -> Result<Option<usize>, ReplayError> {
    if moment == Moment::Dump {
        return Ok(None);
    }
    let (strategy, sim, held) = open_with_start(recording, config, room)?;
    let work_gate = Some(Arc::clone(&sim) as Arc<dyn WorkGate>);
    let mut live = LiveBytes::of(&recording.workload);
    let (mut found, mut most_bytes) = (None, (0, 0));
    walk(&recording.workload, &strategy, work_gate, held, |step| {
        live.see(step.at, step.blocks);
        let bytes = match moment {
            Moment::FirstFailure if step.is_failure => {
                found = Some(step.at);
                return ControlFlow::Break(());
            }
            Moment::FirstFailure | Moment::Dump => return ControlFlow::Continue(()),
            Moment::PeakLive => (live.now_bytes, 0),
            Moment::PeakReserved => (sim.used_bytes(), live.now_bytes),
        };
        if bytes > most_bytes {
            most_bytes = bytes;
            found = Some(step.at);
        }
        ControlFlow::Continue(())
    })?;
    Ok(found)
}

/// The requested bytes of live blocks during a replay.
struct LiveBytes<'a> {
    ops: &'a [Op],
    /// How many operations have been counted.
    counted: usize,
    /// Requested bytes of each live block, by its number.
    requested_bytes: Vec<u64>,
    now_bytes: u64,
}

impl<'a> LiveBytes<'a> {
    fn of(workload: &'a Workload) -> Self {
        let requested_bytes = vec![0; workload.blocks as usize];
        Self { ops: &workload.ops, counted: 0, requested_bytes, now_bytes: 0 }
    }

    /// Counts the operations up to and including `at`. `blocks` are the blocks that live after operation
    /// `at`.
    fn see(&mut self, at: usize, blocks: &[Option<Allocation>]) {
        for op in &self.ops[self.counted..=at] {
            match *op {
                Op::Allocate { id, bytes, .. } if blocks[id as usize].is_some() => {
                    self.requested_bytes[id as usize] = bytes;
                    self.now_bytes = self.now_bytes.saturating_add(bytes);
                }
                Op::Free { id } | Op::FreeInUse { id, .. } => {
                    let bytes = std::mem::take(&mut self.requested_bytes[id as usize]);
                    self.now_bytes = self.now_bytes.saturating_sub(bytes);
                }
                _ => {}
            }
        }
        self.counted = at + 1;
    }
}

/// Replays a recording up to the operation `at` and passes the blocks that then live to `see`. Returns the
/// layout, and the bytes allocated from the device.
pub(super) fn stop_at(
    recording: &Recording,
    config: &Config,
    room: Capacity,
    at: usize,
    mut see: impl FnMut(&[Option<Allocation>]),
) -> Result<(Vec<SegmentLayout>, u64), ReplayError> {
    let (strategy, sim, held) = open_with_start(recording, config, room)?;
    let work_gate = Some(Arc::clone(&sim) as Arc<dyn WorkGate>);
    walk(&recording.workload, &strategy, work_gate, held, |step| {
        if step.at < at {
            return ControlFlow::Continue(());
        }
        see(step.blocks);
        ControlFlow::Break(())
    })?;
    let layout = strategy.control().caching.map(|caching| caching.layout()).unwrap_or_default();
    Ok((layout, sim.used_bytes()))
}

fn paint(
    recording: &Recording,
    config: &Config,
    room: Capacity,
    moment: Moment,
    at: usize,
) -> Result<Picture, ReplayError> {
    let mut live = Vec::new();
    let (layout, used_bytes) = stop_at(recording, config, room, at, |blocks| {
        live = live_blocks(&recording.workload, at, blocks);
    })?;
    let mut picture = Picture::of_layout(&layout, moment, at + 1);
    let causes = &mut picture.causes;
    if layout.is_empty() {
        // An allocator that reports no layout holds at least the live blocks.
        causes.requested_bytes = live.iter().map(|block| block.requested_bytes).sum();
    }
    causes.driver_bytes = used_bytes.saturating_sub(causes.total_bytes());
    picture.failed = match (moment, recording.workload.ops[at]) {
        (
            Moment::FirstFailure,
            Op::Allocate { id, bytes, stream, .. } | Op::AllocateFailing { id, bytes, stream },
        ) => Some(Failed { requested_bytes: bytes, stream, stack: stack_of(recording, id) }),
        _ => None,
    };
    picture.holders = Holders::of(recording, &live);
    Ok(picture)
}

/// Returns the reserved bytes of each stream of each pool in a layout, by cause. The order is arbitrary.
fn heaps_of(layout: &[SegmentLayout]) -> Vec<HeapCauses> {
    let mut heaps: HashMap<(StreamId, PoolId), HeapCauses> = HashMap::new();
    for segment in layout {
        let SegmentLayout { stream, pool, .. } = *segment;
        let heap = heaps.entry((stream, pool)).or_insert(HeapCauses {
            stream,
            pool,
            causes: Causes::default(),
            largest_free_bytes: 0,
        });
        heap.causes.add(&Causes::of(segment));
        let free = segment.blocks.iter().filter(|b| b.state == BlockStateName::Inactive);
        let largest = free.map(|block| block.size_bytes).max().unwrap_or(0);
        heap.largest_free_bytes = heap.largest_free_bytes.max(largest);
    }
    heaps.into_values().collect()
}

/// Returns the blocks that are live after operation `at`, with the data of their requests.
fn live_blocks(workload: &Workload, at: usize, blocks: &[Option<Allocation>]) -> Vec<LiveBlock> {
    let taken = workload.ops[..=at].iter().filter_map(|op| match *op {
        Op::Allocate { id, bytes, stream, .. } => Some((id, bytes, stream)),
        _ => None,
    });
    // Blocks are numbered in the order of the requests.
    let newest = workload.ops[..=at].iter().rev().find_map(|op| match *op {
        Op::Allocate { id, .. } | Op::AllocateFailing { id, .. } => Some(id),
        _ => None,
    });
    let newest = newest.unwrap_or(0);
    taken
        .filter(|(id, ..)| blocks[*id as usize].is_some())
        .map(|(id, requested_bytes, stream)| LiveBlock {
            id,
            requested_bytes,
            stream,
            age_requests: newest.saturating_sub(id),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Memory;
    use stratalloc::size::MIB;
    use stratalloc_recording::Trace;

    fn recording(ops: Vec<Op>, blocks: u32) -> Recording {
        let mut recording = Recording::new(Trace::default(), None, Memory::default());
        recording.workload = Workload { ops, blocks, ..Workload::default() };
        recording
    }

    fn take(id: u32, stream: u64, bytes: u64) -> Op {
        Op::Allocate { id, bytes, stream: StreamId(stream), pool: PoolId::DEFAULT }
    }

    #[test]
    fn every_reserved_byte_at_the_peak_has_one_cause() {
        let ops = vec![
            take(0, 0, 3 * MIB),
            Op::Free { id: 0 },
            take(1, 1, 3 * MIB),
            Op::FreeInUse { id: 1, lane: StreamId(9) },
            take(2, 0, 30 * MIB - 100),
            Op::Finished { id: 1 },
            Op::Free { id: 2 },
        ];
        let recording = recording(ops, 3);
        let (config, moment) = (Config::default(), Moment::PeakReserved);
        let picture =
            Picture::take(&recording, &config, Capacity::Endless, moment).unwrap().unwrap();
        let expected = Causes {
            requested_bytes: 30 * MIB - 100,
            rounding_bytes: 100,
            waiting_bytes: 3 * MIB,
            split_rest_bytes: 17 * MIB,
            idle_segment_bytes: 20 * MIB,
            driver_bytes: 0,
        };
        assert_eq!((picture.causes, picture.operations), (expected, 5));
        assert_eq!(picture.causes.total_bytes(), 70 * MIB);
        let streams: Vec<_> =
            picture.heaps.iter().map(|heap| (heap.stream.0, heap.causes.total_bytes())).collect();
        assert_eq!(streams, [(0, 50 * MIB), (1, 20 * MIB)]);
        assert_eq!(picture.heaps[1].largest_free_bytes, 17 * MIB);
        assert_eq!((picture.holders.blocks, picture.failed), (1, None));
        assert_eq!(picture.holders.requested_bytes, 30 * MIB - 100);
    }

    #[test]
    fn the_peak_of_live_bytes_is_not_that_of_reserved_ones_and_of_equal_peaks_the_fullest_counts() {
        let ops = vec![
            take(0, 0, 60 * MIB),
            Op::Free { id: 0 },
            take(1, 0, 70 * MIB),
            take(2, 0, 20 * MIB),
            Op::Free { id: 1 },
            Op::Free { id: 2 },
            Op::EmptyCache,
            take(3, 0, 100 * MIB),
        ];
        let recording = recording(ops, 4);
        let at = |moment| {
            let config = Config::default();
            let picture =
                Picture::take(&recording, &config, Capacity::Endless, moment).unwrap().unwrap();
            (picture.operations, picture.causes.requested_bytes / MIB)
        };
        assert_eq!(at(Moment::PeakReserved), (4, 90));
        assert_eq!(at(Moment::PeakLive), (8, 100));
    }

    #[test]
    fn the_first_failure_shows_what_is_left_and_its_holders() {
        let stream = StreamId(0);
        let ops = vec![
            take(0, 0, 3 * MIB),
            take(1, 0, 600),
            Op::AllocateFailing { id: 2, bytes: 30 * MIB, stream },
        ];
        let recording = recording(ops, 3);
        let take = |total_bytes| {
            let room = Capacity::Device { total_bytes };
            Picture::take(&recording, &Config::default(), room, Moment::FirstFailure).unwrap()
        };
        assert!(take(60 * MIB).is_none());
        let picture = take(40 * MIB).unwrap();
        assert_eq!(picture.failed, Some(Failed { requested_bytes: 30 * MIB, stream, stack: None }));
        assert_eq!(picture.causes.split_rest_bytes, 17 * MIB + 2 * MIB - 1024);
        assert_eq!(picture.causes.rounding_bytes, 1024 - 600);
        let ages: Vec<_> =
            picture.holders.by_age.iter().map(|c| (c.up_to_requests, c.blocks)).collect();
        assert_eq!(ages, [(Some(10), 2)]);
        let sizes: Vec<_> = picture.holders.by_size.iter().map(|c| c.each_bytes).collect();
        assert_eq!(sizes, [3 * MIB, 600]);
        let holder = &picture.holders.by_stack[0];
        assert_eq!((holder.oldest_requests, holder.newest_requests), (Some(2), Some(1)));
        assert_eq!(holder.stack, None);
    }

    #[test]
    fn memory_of_the_drivers_pool_is_a_cause_of_its_own() {
        let ops = vec![take(0, 0, 3 * MIB), take(1, 0, 64 * MIB), Op::Free { id: 0 }];
        let config = Config::parse("backend:cudaMallocAsync", &Default::default()).unwrap();
        let recording = recording(ops, 2);
        let moment = Moment::PeakReserved;
        let picture =
            Picture::take(&recording, &config, Capacity::Endless, moment).unwrap().unwrap();
        assert_eq!(picture.causes.requested_bytes, 67 * MIB);
        assert!(picture.causes.driver_bytes > 0);
        assert_eq!(picture.causes.split_rest_bytes, 0);
    }
}
