//! Segments, blocks and history as of one moment.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use super::annotations::Annotation;
#[cfg(feature = "ffi")]
use super::clock::Moment;
use super::clock::Operation;
use super::context::{Context, Gathered};
use super::entries::Entries;
use super::event::{Action, BlockStateName, Event, SegmentLayout};
use super::record::{Captured, History};
use crate::config::Config;
use crate::ids::{DeviceId, PoolId, StreamId};

/// A segment, with who asked for it and who holds its blocks.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SegmentState {
    /// The segment.
    pub layout: SegmentLayout,
    /// Rises in the order in which the segments were taken from the driver; an expandable segment has one
    /// number for all its pages. The order of addresses, where the allocator keeps no numbers.
    pub number: u64,
    /// Who asked for its memory, where stacks are recorded. Pages that were mapped later may have another.
    pub context: Option<Context>,
    /// Who holds each block of the layout, in the same order.
    pub holders: Vec<Option<Context>>,
}

/// Whose memory it is, and under which rules.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct About {
    /// The device.
    pub device: DeviceId,
    /// All the memory it has; 0 if nobody said.
    pub total_bytes: u64,
    /// The most bytes that may be reserved.
    pub limit_bytes: Option<u64>,
    /// The configuration in force.
    pub config: Config,
}

/// The memory of one device as of one moment.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Snapshot {
    /// In address order.
    pub segments: Vec<SegmentState>,
    /// What was recorded before.
    pub entries: Entries,
    /// What the program said meanwhile, the oldest first.
    pub annotations: Vec<Annotation>,
    /// Whose it is.
    pub about: About,
}

impl About {
    /// The configuration without what a replay of the snapshot must not do again: write files, record.
    pub(crate) fn config_text(&self) -> String {
        Config::from_settings(self.config.settings().clone().for_replay()).to_text()
    }
}

impl History {
    /// The present time, in microseconds since 1970, by the clock of entries.
    #[cfg(feature = "ffi")]
    pub(crate) fn now_us() -> u64 {
        Moment::now().unix_us()
    }

    /// The next number of a segment: allocators that share a history share the count.
    pub(crate) fn number_segment(&self) -> u64 {
        self.segment_count.fetch_add(1, Ordering::Relaxed)
    }
}

impl Snapshot {
    /// These parts.
    #[must_use]
    pub fn new(segments: Vec<SegmentState>, entries: Entries, about: About) -> Self {
        Self { segments, entries, annotations: Vec::new(), about }
    }

    /// These segments, and what was captured under the same locks.
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

    /// The same with the numbers of `starts`: each segment has the number of the last start that is not
    /// behind its address.
    pub(crate) fn numbered_by(mut self, starts: &BTreeMap<u64, u64>) -> Self {
        for segment in &mut self.segments {
            let start = starts.range(..=segment.layout.address).next_back();
            segment.number = start.map_or(segment.number, |(_, number)| *number);
        }
        self
    }

    fn active_bytes(&self) -> u64 {
        let active = [BlockStateName::ActiveAllocated, BlockStateName::ActivePendingFree];
        self.segments.iter().map(|segment| segment.layout.bytes_in(&active)).sum()
    }

    /// Both, in address order, with the entries of this one: for allocators that share a history.
    #[must_use]
    pub(crate) fn with_segments_of(mut self, other: Self) -> Self {
        self.segments.extend(other.segments);
        self.segments.sort_by_key(|segment| segment.layout.address);
        self
    }
}

impl History {
    /// Returns the snapshot of these segments and of what was captured under the same locks, and
    /// [notes](Self::note_snapshot) it, unless it is a part of an operation's. The caller holds no lock.
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

    /// Adds an entry of the action `snapshot`, which later snapshots list: PyTorch, too, copies its entries
    /// first. The caller holds no lock, because trackers are called.
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
