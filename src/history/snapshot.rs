//! Segments, blocks and history at one moment.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use super::annotations::Annotation;
use super::clock::{Moment, Operation};
use super::context::{Context, Gathered};
use super::entries::Entries;
use super::event::{Action, BlockStateName, Event, SegmentLayout};
use super::record::{Captured, History};
use crate::config::Config;
use crate::ids::{DeviceId, PoolId, StreamId};

/// A segment with the contexts in which it and its blocks were allocated.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SegmentState {
    /// The segment.
    pub layout: SegmentLayout,
    /// Segments are numbered in the order in which they were taken from the driver. An expandable
    /// segment has one number for all its pages. If the allocator assigns no numbers, the order is that
    /// of the addresses.
    pub number: u64,
    /// The context in which the segment's memory was taken from the driver, if stacks are recorded.
    /// Pages that were mapped later may have another context.
    pub context: Option<Context>,
    /// The context of each block in `layout`, in the same order.
    pub holders: Vec<Option<Context>>,
}

/// The device and the configuration of a snapshot.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct About {
    /// The device.
    pub device: DeviceId,
    /// The total memory of the device; 0 if unknown.
    pub total_bytes: u64,
    /// The most bytes that the allocator may reserve, if there is a limit.
    pub limit_bytes: Option<u64>,
    /// The configuration at the time of the snapshot.
    pub config: Config,
}

/// The memory of one device at one moment.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Snapshot {
    /// All segments in address order.
    pub segments: Vec<SegmentState>,
    /// The recorded entries.
    pub entries: Entries,
    /// The program's annotations, oldest first.
    pub annotations: Vec<Annotation>,
    /// The device and its configuration.
    pub about: About,
}

impl About {
    /// Returns the configuration as text, without settings that a replay must not apply: those for
    /// writing files and for recording.
    #[doc(hidden)]
    pub fn config_text(&self) -> String {
        Config::from_settings(self.config.settings().clone().for_replay()).to_text()
    }
}

impl History {
    /// Returns the current time of the entries' clock, in microseconds since 1970.
    #[doc(hidden)]
    pub fn now_us() -> u64 {
        Moment::now().unix_us()
    }

    /// Returns the next segment number. Allocators that share a history share the count.
    pub(crate) fn number_segment(&self) -> u64 {
        self.segment_count.fetch_add(1, Ordering::Relaxed)
    }
}

impl Snapshot {
    /// Creates a snapshot without annotations.
    #[must_use]
    pub fn new(segments: Vec<SegmentState>, entries: Entries, about: About) -> Self {
        Self { segments, entries, annotations: Vec::new(), about }
    }

    /// Creates a snapshot from a layout and from the contexts, which were captured under the same
    /// locks.
    fn of(segments: Vec<SegmentLayout>, captured: Captured, limit_bytes: Option<u64>) -> Self {
        let Captured { entries, annotations, mut blocks, segments: mut memory, about } = captured;
        let mut held = |layout: SegmentLayout| {
            let holder = |block: &super::BlockLayout| match block.state {
                BlockStateName::Inactive => None,
                _ => blocks.remove(&block.address).and_then(|holder| holder.context),
            };
            let holders = layout.blocks.iter().map(holder).collect();
            let context = memory.remove(&layout.address).and_then(|holder| holder.context);
            SegmentState { layout, number: 0, context, holders }
        };
        let mut segments: Vec<_> = segments.into_iter().map(&mut held).collect();
        segments.sort_by_key(|segment| segment.layout.address);
        (0..).zip(&mut segments).for_each(|(number, segment)| segment.number = number);
        Self { segments, entries, annotations, about: About { limit_bytes, ..about } }
    }

    /// Sets the number of each segment. `starts` maps start addresses to numbers. A segment gets the
    /// number of the last start at or below its address.
    pub(crate) fn numbered_by(mut self, starts: &BTreeMap<u64, u64>) -> Self {
        for segment in &mut self.segments {
            let start = starts.range(..=segment.layout.address).next_back();
            segment.number = start.map_or(segment.number, |(_, number)| *number);
        }
        self
    }

    fn active_bytes(&self) -> u64 {
        let active_bytes =
            |segment: &SegmentState| segment.layout.bytes_in(&BlockStateName::ACTIVE);
        self.segments.iter().map(active_bytes).sum()
    }

    /// Adds the segments of `other` in address order, and keeps the entries of `self`. For allocators
    /// that share a history.
    #[must_use]
    pub(crate) fn with_segments_of(mut self, other: Self) -> Self {
        self.segments.extend(other.segments);
        self.segments.sort_by_key(|segment| segment.layout.address);
        self
    }
}

impl History {
    /// Returns the snapshot of a layout and of contexts that were captured under the same locks. Also
    /// records an [entry](Self::note_snapshot) for the snapshot, unless the thread has an open
    /// operation. The caller holds no lock.
    pub(crate) fn snapshot_of(
        &self,
        segments: Vec<SegmentLayout>,
        captured: Captured,
        limit_bytes: Option<u64>,
    ) -> Snapshot {
        let snapshot = Snapshot::of(segments, captured, limit_bytes);
        if !Operation::is_open() {
            self.note_snapshot(&snapshot);
        }
        snapshot
    }

    /// Records an entry with the action `snapshot`. Only later snapshots list the entry, as in PyTorch,
    /// which copies its entries before it records that of the snapshot. The caller holds no lock,
    /// because trackers are called.
    pub(crate) fn note_snapshot(&self, snapshot: &Snapshot) {
        let _operation = Gathered::without_stack(self);
        self.record(0, || Event {
            action: Action::Snapshot,
            address: 0,
            size_bytes: snapshot.active_bytes(),
            stream: StreamId::DEFAULT,
            pool: PoolId::DEFAULT,
        });
    }
}
