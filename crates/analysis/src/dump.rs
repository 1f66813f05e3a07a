//! The memory at the moment when a snapshot was written: all that a snapshot without history shows.

use std::cmp::Reverse;
use std::collections::HashMap;

use schemars::JsonSchema;
use serde::Serialize;

use super::causes::{Failed, Moment, Picture};
use super::holders::{FoundBy, Holder, Holders, HoldersSum};
use super::passes::Fate;
use stratalloc::history::{Action, BlockLayout, BlockStateName, SegmentLayout};
use stratalloc::ids::StreamId;
use stratalloc_recording::Trace;

/// Free ranges of one size on one stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct FreeClass {
    /// The bytes of all ranges.
    pub bytes: u64,
    /// The number of ranges.
    pub ranges: u64,
    /// The bytes of each range.
    pub each_bytes: u64,
    /// The stream.
    #[serde(serialize_with = "stratalloc_recording::stream_number")]
    #[schemars(with = "u64")]
    pub stream: StreamId,
}

/// The memory of a recording without history.
#[derive(Clone, Debug)]
pub struct Dump {
    /// The reserved bytes by cause, and the holders. Ages are unknown.
    pub picture: Picture,
    /// The free ranges, the largest first. At most [`Holders::LARGEST`] sizes.
    pub free: Vec<FreeClass>,
}

impl Dump {
    /// Reads the final layout of a trace. Uses no event except the request that failed.
    pub fn of(trace: &Trace) -> Self {
        let mut picture = Picture::of_layout(&trace.segments, Moment::Dump, 0);
        picture.holders = Holders::of_dump(trace);
        let failed = trace.events.iter().rev().find(|e| e.action == Action::OutOfMemory);
        picture.failed = failed.map(|event| Failed {
            requested_bytes: event.size_bytes,
            stream: event.stream,
            stack: event.stack,
        });
        Self { picture, free: free_of(&trace.segments) }
    }
}

fn free_of(segments: &[SegmentLayout]) -> Vec<FreeClass> {
    let mut by_size: HashMap<(u64, StreamId), u64> = HashMap::new();
    for segment in segments {
        let free = segment.blocks.iter().filter(|b| b.state == BlockStateName::Inactive);
        free.for_each(|b| *by_size.entry((b.size_bytes, segment.stream)).or_default() += 1);
    }
    let class = |((each_bytes, stream), ranges): ((u64, StreamId), u64)| FreeClass {
        bytes: each_bytes.saturating_mul(ranges),
        ranges,
        each_bytes,
        stream,
    };
    let mut all: Vec<_> = by_size.into_iter().map(class).collect();
    all.sort_unstable_by_key(|class| (Reverse(class.each_bytes), class.stream));
    all.truncate(Holders::LARGEST);
    all
}

impl Holders {
    /// Returns the live blocks of the final layout by stack and by size, without their ages.
    fn of_dump(trace: &Trace) -> Self {
        let mut sum = HoldersSum::default();
        for segment in &trace.segments {
            let is_live = |b: &&BlockLayout| b.state == BlockStateName::ActiveAllocated;
            for block in segment.blocks.iter().filter(is_live) {
                let requested_bytes = block.requested_bytes;
                let found_by = FoundBy { layout_bytes: requested_bytes, ..FoundBy::default() };
                let stack = trace.stack_at_end(block.address);
                let one =
                    Holder { stack, requested_bytes, blocks: 1, found_by, ..Holder::default() };
                sum.add(one, Fate::NotShown, segment.stream);
            }
        }
        let mut holders = sum.finish();
        if trace.block_stacks.is_empty() {
            holders.by_stack.clear();
        }
        holders
    }
}
