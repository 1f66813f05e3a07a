//! Classifies the reserved bytes at one moment by the reason why they are reserved. Each byte is counted
//! once, so the fields of [`Picture::causes`] add up to the reserved bytes.

use std::collections::HashMap;

use schemars::JsonSchema;
use serde::Serialize;

use super::holders::Holders;
use super::lives::Lives;
use super::passes::Passes;
use super::recording::Recording;
use stratalloc::history::{BlockLayout, BlockStateName, SegmentLayout};
use stratalloc::ids::{PoolId, StreamId};
use stratalloc_recording::StackId;

/// A moment of a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// The first moment at which the most requested bytes were live.
    PeakLive,
    /// The moment at which the most memory was reserved. Of several such moments, the one with the most
    /// live bytes.
    PeakReserved,
    /// The moment of the first failed request.
    FirstFailure,
    /// The end of the recording.
    End,
    /// The moment when a snapshot without history was written.
    Dump,
}

/// Reserved bytes by cause. Each byte is counted in one field only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
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
    /// Bytes that the driver's own pools hold. They are not in a recording, so this is 0.
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

    /// Returns the free bytes in segments.
    #[must_use]
    pub fn free_bytes(&self) -> u64 {
        self.split_rest_bytes.saturating_add(self.idle_segment_bytes)
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

/// The reserved memory at one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct Picture {
    /// The moment.
    pub moment: Moment,
    /// The number of events before it.
    pub at: u32,
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
    /// Classifies the bytes of a recording at a moment of its timeline. `passes` are those of the timeline.
    #[must_use]
    pub(crate) fn at(
        recording: &Recording,
        lives: &Lives,
        passes: &Passes<'_>,
        which: Moment,
        at: u32,
    ) -> Self {
        let mut picture = Self::of_layout(&lives.layout(at), which, at);
        picture.operations = recording.workload.operations_until(lives.requests_until(at));
        picture.holders = Holders::at(lives, passes, at);
        picture.failed = match which {
            Moment::FirstFailure => {
                lives.failures.iter().find(|f| f.moment == at).map(|failure| Failed {
                    requested_bytes: failure.requested_bytes,
                    stream: lives.streams.items[failure.stream as usize],
                    stack: failure.stack,
                })
            }
            _ => None,
        };
        picture
    }

    /// Classifies the bytes of a layout, without holders.
    pub(crate) fn of_layout(layout: &[SegmentLayout], moment: Moment, at: u32) -> Self {
        let mut heaps = heaps_of(layout);
        let mut causes = Causes::default();
        heaps.iter().for_each(|heap| causes.add(&heap.causes));
        heaps.sort_unstable_by_key(|heap| {
            (std::cmp::Reverse(heap.causes.total_bytes()), heap.stream, heap.pool)
        });
        let holders = Holders::default();
        Self { moment, at, operations: 0, failed: None, causes, heaps, holders }
    }
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
