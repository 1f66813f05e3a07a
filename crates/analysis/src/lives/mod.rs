//! Lifetimes of all blocks and segments of a recording, computed from its events in one pass.
//!
//! No replay is needed, so a page shows the recorded events even if no replay repeats them exactly. A
//! *moment* is the number of events that have happened: 0 before the first event, and the number of all
//! events after the last. A block or segment lives at a moment `m` if `born <= m < gone`.
//!
//! Free memory has no rows: it is the part of a segment that no block covers. Sizes of blocks are not
//! recorded. They are computed from the recorded rounding and from the free range that a block was split
//! from, as the recorded allocator did.

use std::collections::{BTreeMap, HashMap};

use serde::Serialize;

mod columns;
mod live_bytes;
mod numbered;
mod paused;

pub use columns::{Column, Columns, fewer};
pub use numbered::Numbered;

use columns::Bytes;
pub(crate) use live_bytes::LiveBytes;
use paused::Paused;
use stratalloc::config::Settings;
use stratalloc::history::{Action, BlockLayout, BlockStateName, SegmentLayout};
use stratalloc::ids::{PoolId, StreamId};
use stratalloc::size::{LARGE_REST_MIN_BYTES, MIN_BLOCK_BYTES, PoolKind};
use stratalloc_recording::{LiveBlock, PoolRouting, StackId, Start, Trace, TraceEvent, free_block};

/// The maximum number of columns of a time line.
pub const COLUMNS: usize = 8192;
/// A bound on addresses and sizes, more than any device has. Larger numbers are reduced to it, so that
/// sums do not overflow.
const MOST_BYTES: u64 = 1 << 44;
/// The value of `gone` and `freed` for whatever lives until the end of the recording.
pub const NEVER: u32 = u32::MAX;
/// The maximum number of events that are applied.
pub(crate) const EVENTS_MAX: u32 = NEVER - 1;

/// The lifetime of a block, from its request until the block is free again. Logs have millions of blocks, so
/// the fields are packed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(Rust, packed(4))]
pub struct Block {
    /// The first moment at which the block lives; 0 if it was allocated before the first event.
    pub born: u32,
    /// The first moment after the caller freed the block.
    pub freed: u32,
    /// The first moment at which the block is free. Later than `freed` if the block waits for other
    /// streams.
    pub gone: u32,
    /// The index of the block's stream and pool in [`Lives::heaps`].
    pub heap: u32,
    /// The address.
    pub address: u64,
    /// The size, in bytes.
    pub size_bytes: u64,
    /// The requested bytes.
    pub requested_bytes: u64,
    /// The stack of the request, if the file contains it: in the request's event or, if the block lives at
    /// the end, in the final layout.
    pub stack: Option<StackId>,
}

const _: () = assert!(size_of::<Block>() == 44);

/// The stream and the pool of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Heap {
    /// The index of the stream in [`Lives::streams`].
    pub stream: u32,
    /// The index of the pool in [`Lives::pools`].
    pub pool: u32,
}

/// The lifetime of a segment, or of a range of mapped pages, from its allocation to its release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The first moment at which it lives.
    pub born: u32,
    /// The first moment at which it no longer lives.
    pub gone: u32,
    /// The index of the stream in [`Lives::streams`].
    pub stream: u32,
    /// The index of the pool in [`Lives::pools`].
    pub pool: u32,
    /// The address.
    pub address: u64,
    /// The size, in bytes.
    pub size_bytes: u64,
    /// The kind of blocks in it.
    pub kind: PoolKind,
    /// Whether it is a range of pages of an expandable segment.
    pub expandable: bool,
}

/// A request that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FailedRequest {
    /// The moment.
    pub moment: u32,
    /// The requested bytes.
    pub requested_bytes: u64,
    /// The index of the stream in [`Lives::streams`].
    pub stream: u32,
    /// The stack of the request, if it was recorded.
    pub stack: Option<StackId>,
    /// The free bytes of the device, as recorded.
    pub device_free_bytes: u64,
}

/// A peak of bytes, and the moment of that peak.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Peak {
    /// The moment.
    pub moment: u32,
    /// In bytes.
    pub bytes: u64,
}

/// The lifetimes of all blocks and segments of a recording.
#[derive(Clone, Debug, Default)]
pub struct Lives {
    /// The number of events, which is also the last moment.
    pub events: u32,
    /// All blocks, in the order of `born`.
    pub blocks: Vec<Block>,
    /// All segments, in the order of `born`.
    pub segments: Vec<Segment>,
    /// The requests that failed.
    pub failures: Vec<FailedRequest>,
    /// The streams.
    pub streams: Numbered<StreamId>,
    /// The pools.
    pub pools: Numbered<PoolId>,
    /// The stream and pool of each heap that has had a block.
    pub heaps: Numbered<Heap>,
    /// The live and reserved bytes over time.
    pub columns: Columns,
    /// The peak of reserved bytes. If it occurs several times, the one with the most live bytes.
    pub peak_reserved: Peak,
    /// The peak of live bytes. If it occurs several times, the first.
    pub peak_live: Peak,
    /// The number of requests that succeeded.
    pub served: u64,
}

impl Lives {
    /// Computes the lifetimes from the events. `total_bytes` is the memory of the recorded device.
    pub fn of(trace: &Trace, settings: &Settings, total_bytes: u64, columns: usize) -> Self {
        let events = u32::try_from(trace.events.len()).unwrap_or(EVENTS_MAX);
        let routing = PoolRouting::of(trace, total_bytes);
        let mut walk = LivesWalk::new(settings, routing, Columns::new(columns, events));
        walk.begin(&Start::of(trace));
        trace.events.iter().for_each(|event| walk.see(event));
        walk.finish()
    }

    /// Returns the blocks that live at a moment, in the order of their requests.
    pub fn live_at(&self, moment: u32) -> impl Iterator<Item = &Block> {
        self.blocks.iter().filter(move |block| block.born <= moment && moment < block.freed)
    }

    /// Returns the number of requests until a moment, those that failed included.
    pub fn requests_until(&self, moment: u32) -> u32 {
        let before = if self.events > 0 { self.blocks.partition_point(|b| b.born == 0) } else { 0 };
        let served = self.blocks.partition_point(|block| block.born <= moment) - before;
        let failed = self.failures.partition_point(|failure| failure.moment <= moment);
        u32::try_from(served + failed).unwrap_or(u32::MAX)
    }

    /// Returns the stream and the pool of a block.
    pub fn heap(&self, block: &Block) -> Heap {
        self.heaps.items[block.heap as usize]
    }

    /// Returns true if a block was allocated before the first event.
    pub fn lived_before(&self, block: &Block) -> bool {
        block.born == 0 && self.events > 0
    }

    /// Returns true if the events have times.
    pub fn has_times(&self) -> bool {
        self.columns.end_us > self.columns.begin_us
    }

    /// Returns the layout at a moment, in the form of a snapshot.
    pub fn layout(&self, moment: u32) -> Vec<SegmentLayout> {
        let is_there = |born: u32, gone: u32| born <= moment && moment < gone;
        let mut segments: Vec<Segment> =
            self.segments.iter().filter(|s| is_there(s.born, s.gone)).copied().collect();
        segments.sort_unstable_by_key(|segment| segment.address);
        let mut blocks: Vec<&Block> =
            self.blocks.iter().filter(|b| is_there(b.born, b.gone)).collect();
        blocks.sort_unstable_by_key(|block| block.address);
        let mut layout: Vec<SegmentLayout> = Vec::new();
        for segment in segments {
            let stream = self.streams.items[segment.stream as usize];
            let pool = self.pools.items[segment.pool as usize];
            if let Some(last) = layout.last_mut()
                && last.expandable
                && segment.expandable
                && (last.stream, last.kind, last.pool) == (stream, segment.kind, pool)
                && last.address + last.size_bytes == segment.address
            {
                last.size_bytes += segment.size_bytes;
                continue;
            }
            let Segment { address, size_bytes, kind, expandable, .. } = segment;
            let blocks = Vec::new();
            let held = SegmentLayout {
                address,
                size_bytes,
                stream,
                kind,
                pool,
                expandable,
                asleep: false,
                blocks,
            };
            layout.push(held);
        }
        let mut rest = blocks.as_slice();
        for segment in &mut layout {
            let before = rest.partition_point(|block| block.address < segment.address);
            rest = &rest[before..];
            let end = segment.address.saturating_add(segment.size_bytes);
            let inside = rest.partition_point(|block| block.address < end);
            segment.blocks = tiles(&rest[..inside], moment, segment.address, end);
            rest = &rest[inside..];
        }
        layout
    }
}

/// Returns all blocks of one segment, live and free, in address order.
fn tiles(live: &[&Block], moment: u32, start: u64, end: u64) -> Vec<BlockLayout> {
    let mut blocks = Vec::new();
    let mut at = start;
    for block in live.iter().filter(|block| block.address >= start) {
        if block.address > at {
            blocks.push(free_block(at, block.address));
        }
        let state = match moment < block.freed {
            true => BlockStateName::ActiveAllocated,
            false => BlockStateName::ActivePendingFree,
        };
        let Block { address, size_bytes, requested_bytes, .. } = **block;
        blocks.push(BlockLayout { address, size_bytes, requested_bytes, state });
        at = at.max(block.address.saturating_add(block.size_bytes));
    }
    if at < end {
        blocks.push(free_block(at, end));
    }
    blocks
}

/// The state while the events are applied in order.
pub(crate) struct LivesWalk<'a> {
    lives: Lives,
    settings: &'a Settings,
    routing: PoolRouting,
    /// The blocks that are not free: the index in `lives.blocks`, by address.
    live: BTreeMap<u64, usize>,
    /// The segments and mapped ranges: the index in `lives.segments`, by address.
    held: BTreeMap<u64, usize>,
    live_bytes: u64,
    reserved_bytes: u64,
    paused: Paused,
    /// The peak of reserved bytes so far, and the largest number of live bytes at that peak.
    most: (u64, u64),
}

impl<'a> LivesWalk<'a> {
    pub(crate) fn new(settings: &'a Settings, routing: PoolRouting, columns: Columns) -> Self {
        Self {
            lives: Lives { columns, ..Lives::default() },
            settings,
            routing,
            live: BTreeMap::new(),
            held: BTreeMap::new(),
            live_bytes: 0,
            reserved_bytes: 0,
            paused: Paused::default(),
            most: (0, 0),
        }
    }

    /// Applies the next event. Events after the first [`EVENTS_MAX`] are ignored.
    pub(crate) fn see(&mut self, event: &TraceEvent) {
        let before = self.lives.events;
        if before < EVENTS_MAX {
            self.lives.events = before + 1;
            self.routing.see(before as usize, event);
            self.step(before + 1, event);
            self.note(before + 1, event.time_us);
        }
    }

    /// Returns the lifetimes after the last event.
    pub(crate) fn finish(mut self) -> Lives {
        self.lives.columns.moments = u64::from(self.lives.events) + 1;
        self.lives
    }

    /// Begins the lives of what exists before the first event.
    pub(crate) fn begin(&mut self, start: &Start) {
        start.held().for_each(|held| self.hold(0, held));
        let layout = start.layout(self.settings);
        let sizes: HashMap<u64, u64> = layout
            .iter()
            .flatten()
            .flat_map(|segment| &segment.blocks)
            .filter(|block| block.state != BlockStateName::Inactive)
            .map(|block| (block.address, block.size_bytes))
            .collect();
        for block in &start.blocks {
            let LiveBlock { address, requested_bytes, stream, pool, stack, .. } = *block;
            let known = sizes.get(&address).copied().or(block.size_bytes);
            let request = TraceEvent::new(Action::Alloc, address, requested_bytes, stream);
            self.take(0, &TraceEvent { stack, ..request }, pool, known);
            if block.draining {
                self.give(0, block.address);
            }
        }
        self.note(0, 0);
    }

    fn step(&mut self, moment: u32, event: &TraceEvent) {
        let TraceEvent { action, address, size_bytes, stream, .. } = *event;
        match action {
            Action::Alloc => {
                let pool = self.routing.pool_of(event);
                self.lives.served += 1;
                self.take(moment, event, pool, None);
            }
            Action::FreeRequested => self.give(moment, address),
            Action::FreeCompleted => self.end(moment, address),
            Action::SegmentAlloc | Action::SegmentMap | Action::TagResume => {
                let expandable = action != Action::SegmentAlloc;
                let kind = PoolKind::of_segment(size_bytes);
                let pool = event.named_pool().unwrap_or_else(|| self.routing.pool_at(address));
                self.hold(moment, &event.in_segment(kind, pool, expandable));
                self.wake(moment, address, size_bytes);
            }
            Action::SegmentFree | Action::SegmentUnmap => {
                self.drop(moment, address, size_bytes);
                self.paused.remove(address, size_bytes);
            }
            Action::TagPause => self.pause(moment, address, size_bytes),
            Action::Snapshot => {}
            Action::OutOfMemory => {
                let stream = self.lives.streams.number(stream);
                self.lives.failures.push(FailedRequest {
                    moment,
                    requested_bytes: size_bytes.min(MOST_BYTES),
                    stream,
                    stack: event.stack,
                    device_free_bytes: address,
                });
            }
        }
    }

    fn note(&mut self, moment: u32, time_us: u64) {
        let (live_bytes, reserved_bytes) = (self.live_bytes, self.reserved_bytes);
        let bytes =
            Bytes { live: live_bytes, reserved: reserved_bytes, paused: self.paused.bytes() };
        self.lives.columns.see(moment, time_us, bytes);
        if live_bytes > self.lives.peak_live.bytes {
            self.lives.peak_live = Peak { moment, bytes: live_bytes };
        }
        if (reserved_bytes, live_bytes) > self.most {
            self.most = (reserved_bytes, live_bytes);
            self.lives.peak_reserved = Peak { moment, bytes: reserved_bytes };
        }
    }

    /// Adds a block for this request. `size_bytes` is the block's size, if known.
    fn take(&mut self, born: u32, request: &TraceEvent, pool: PoolId, size_bytes: Option<u64>) {
        let TraceEvent { address, stream, stack, .. } = *request;
        // A live block may be at the same address if the parts of a file contradict each other. End its
        // life.
        self.end(born, address);
        let requested_bytes = request.size_bytes.min(MOST_BYTES);
        let size_bytes = size_bytes.map(|bytes| bytes.min(MOST_BYTES));
        let size_bytes = size_bytes.unwrap_or_else(|| self.size_of(address, requested_bytes));
        let stream = self.lives.streams.number(stream);
        let pool = self.lives.pools.number(pool);
        let heap = self.lives.heaps.number(Heap { stream, pool });
        self.live.insert(address, self.lives.blocks.len());
        self.live_bytes = self.live_bytes.saturating_add(requested_bytes);
        self.lives.blocks.push(Block {
            born,
            freed: NEVER,
            gone: NEVER,
            heap,
            address,
            size_bytes,
            requested_bytes,
            stack,
        });
    }

    /// Returns the size of the block for a request at an address. Decides whether the rest of the free
    /// range is split off, as the recorded allocator did.
    fn size_of(&self, address: u64, requested_bytes: u64) -> u64 {
        let rounded = self.settings.roundup.round(requested_bytes);
        let Some((&start, &segment)) = self.held.range(..=address).next_back() else {
            return rounded;
        };
        let segment = &self.lives.segments[segment];
        let end = start.saturating_add(segment.size_bytes);
        if segment.expandable || address >= end {
            return rounded;
        }
        let next = self.live.range(address.saturating_add(1)..end).next();
        let room = next.map_or(end, |(next, _)| *next) - address;
        let Some(rest) = room.checked_sub(rounded) else {
            return room;
        };
        let is_cut = match segment.kind {
            PoolKind::Small => rest >= MIN_BLOCK_BYTES,
            PoolKind::Large => {
                self.settings.max_split_bytes.is_none_or(|most| rounded < most)
                    && rest > LARGE_REST_MIN_BYTES
            }
        };
        if is_cut { rounded } else { room }
    }

    /// Ends the lives of a range of a tag that is paused, and of the blocks in it. They begin again when the
    /// range is mapped.
    fn pause(&mut self, moment: u32, address: u64, size_bytes: u64) {
        let end = address.saturating_add(size_bytes);
        let inside: Vec<_> =
            self.live.range(address..end).map(|(at, index)| (*at, *index)).collect();
        for (at, index) in inside {
            let block = self.lives.blocks[index];
            self.end(moment, at);
            if block.freed == NEVER {
                self.paused.add_block(block);
            }
        }
        self.drop(moment, address, size_bytes);
        self.paused.add(address, size_bytes);
    }

    /// Begins the lives of blocks in a range whose tag is resumed.
    fn wake(&mut self, moment: u32, address: u64, size_bytes: u64) {
        for block in self.paused.remove(address, size_bytes) {
            self.live.insert(block.address, self.lives.blocks.len());
            self.live_bytes = self.live_bytes.saturating_add(block.requested_bytes);
            self.lives.blocks.push(Block { born: moment, freed: NEVER, gone: NEVER, ..block });
        }
    }

    fn give(&mut self, moment: u32, address: u64) {
        self.paused.remove_block(address);
        if let Some(&at) = self.live.get(&address) {
            let block = &mut self.lives.blocks[at];
            if block.freed == NEVER {
                block.freed = moment;
                self.live_bytes = self.live_bytes.saturating_sub(block.requested_bytes);
            }
        }
    }

    fn end(&mut self, moment: u32, address: u64) {
        self.give(moment, address);
        if let Some(at) = self.live.remove(&address) {
            self.lives.blocks[at].gone = moment;
        }
    }

    fn hold(&mut self, born: u32, segment: &SegmentLayout) {
        let SegmentLayout { address, size_bytes, stream, kind, pool, expandable, .. } = *segment;
        let size_bytes = size_bytes.min(MOST_BYTES).min(u64::MAX - address);
        if size_bytes == 0 {
            return;
        }
        if self.held.contains_key(&address) {
            self.drop(born, address, size_bytes);
        }
        // Newly mapped pages get the kind and the pool of the mapped range that ends where they begin.
        let beside = self.held.range(..address).next_back().map(|(_, at)| self.lives.segments[*at]);
        let beside =
            beside.filter(|s| expandable && s.expandable && s.address + s.size_bytes == address);
        let kind = beside.map_or(kind, |segment| segment.kind);
        let stream = self.lives.streams.number(stream);
        let pool = self.lives.pools.number(pool);
        self.held.insert(address, self.lives.segments.len());
        self.reserved_bytes = self.reserved_bytes.saturating_add(size_bytes);
        let gone = NEVER;
        let held = Segment { born, gone, stream, pool, address, size_bytes, kind, expandable };
        self.lives.segments.push(held);
    }

    /// Removes a range. The parts of mapped ranges outside of it are kept.
    fn drop(&mut self, moment: u32, address: u64, size_bytes: u64) {
        let end = address.saturating_add(size_bytes);
        if end == address {
            return;
        }
        loop {
            let Some((&start, &at)) = self.held.range(..end).next_back() else {
                return;
            };
            let segment = self.lives.segments[at];
            let segment_end = start + segment.size_bytes;
            if segment_end <= address || (start < address && !segment.expandable) {
                return;
            }
            self.held.remove(&start);
            self.lives.segments[at].gone = moment;
            self.reserved_bytes = self.reserved_bytes.saturating_sub(segment.size_bytes);
            if !segment.expandable {
                if start == address {
                    return;
                }
                continue;
            }
            for (from, to) in [(start, address), (end, segment_end)] {
                if from < to {
                    let size_bytes = to - from;
                    self.held.insert(from, self.lives.segments.len());
                    self.reserved_bytes = self.reserved_bytes.saturating_add(size_bytes);
                    let rest =
                        Segment { born: moment, gone: NEVER, address: from, size_bytes, ..segment };
                    self.lives.segments.push(rest);
                }
            }
        }
    }
}

/// Returns each number as the difference from the previous one.
pub fn differences(numbers: impl Iterator<Item = u64>) -> Vec<i128> {
    let mut before = 0;
    numbers
        .map(|number| {
            let difference = i128::from(number) - before;
            before = i128::from(number);
            difference
        })
        .collect()
}
