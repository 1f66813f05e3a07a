//! Reconstructs the live and cached memory at the beginning of a recording.
//!
//! A recording that begins after the program's start, or whose ring buffer dropped the first events,
//! still ends with a layout. Beginning with that layout, the events are undone from the last to the
//! first. Undoing an allocation removes a block, undoing a free adds a live one; the same holds for
//! segments. The result is the layout before the first event.
//!
//! The sizes of blocks that were freed later are not recorded. They are derived from the requested bytes
//! and from where the next block begins.
//!
//! A replay under the recorded configuration starts from the layout before the first event
//! (`strategies/native/install`): it allocates the layout's memory from the driver and puts the blocks at
//! their places. Replays under other configurations, and searches for the smallest device, start from the
//! live blocks only.

use std::collections::{BTreeMap, HashMap};

use super::complete::is_complete;
use super::stacks::StackId;
use super::trace::{Trace, TraceEvent};
use stratalloc::config::Settings;
use stratalloc::history::{Action, BlockLayout, BlockStateName, SegmentLayout};
use stratalloc::ids::{PoolId, StreamId};
use stratalloc::size::{MIB, MIN_BLOCK_BYTES, PoolKind};

/// A block that was live before the first event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LiveBlock {
    /// The block's address.
    pub address: u64,
    /// The requested bytes.
    pub requested_bytes: u64,
    /// The block's size, if the final layout still contains the block.
    pub size_bytes: Option<u64>,
    /// The address of the first block that was allocated behind this one, in the same segment, while this
    /// one was live. Allocations take the start of a free block, so this block probably ended there.
    next_free: Option<u64>,
    /// The block's stream.
    pub stream: StreamId,
    /// The pool of the segment that contains the block, or else the pool of the recorded free.
    pub pool: PoolId,
    /// Whether the block had been freed before the first event and was waiting for other streams.
    pub draining: bool,
    /// The stack of the block's request, if the block is still live at the end and the file contains it.
    ///
    /// A block is the one of the final layout if no event requests or frees its address. If entries are
    /// missing, an earlier block may have had the address, and this is then the stack of the later one.
    pub stack: Option<StackId>,
}

impl LiveBlock {
    /// Returns a block of which only its free is recorded.
    pub(crate) fn freed(address: u64, requested_bytes: u64, stream: StreamId) -> Self {
        Self {
            address,
            requested_bytes,
            size_bytes: None,
            next_free: None,
            stream,
            pool: PoolId::DEFAULT,
            draining: false,
            stack: None,
        }
    }
}

/// The memory before the first event.
#[derive(Clone, Debug, Default)]
pub struct Start {
    /// The live blocks, in address order.
    pub blocks: Vec<LiveBlock>,
    /// The segments and mapped ranges, by address, without their blocks.
    held: BTreeMap<u64, SegmentLayout>,
    /// The number of recorded requests that no segment contains.
    pub outside: u64,
}

impl Start {
    /// Undoes all events of a trace, from the last to the first. If the trace is complete, no memory existed
    /// before the first event.
    #[must_use]
    pub fn of(trace: &Trace) -> Self {
        if let Some(log) = &trace.log {
            return Self { blocks: log.blocks_before().collect(), ..Self::default() };
        }
        if is_complete(trace) {
            return Self::default();
        }
        let mut back = Back::from_the_end(trace);
        trace.events.iter().rev().for_each(|event| back.undo(event));
        let Back { blocks, held, outside, .. } = back;
        let knows_segments = !trace.segments.is_empty() && !trace.requests_only;
        let outside = if knows_segments { outside } else { 0 };
        let mut start = Self { blocks: blocks.into_values().collect(), held, outside };
        for block in &mut start.blocks {
            let inside = start.held.range(..=block.address).next_back();
            if let Some((_, held)) = inside.filter(|(at, h)| block.address - **at < h.size_bytes) {
                block.pool = held.pool;
            }
        }
        start.blocks.sort_unstable_by_key(|block| block.address);
        start.look_ahead(trace);
        start
    }

    /// Finds the ends of blocks of unknown size. An allocation is placed at the start of a free block.
    /// So the first allocation behind a block that is still live marks that block's end.
    fn look_ahead(&mut self, trace: &Trace) {
        let mut unknown: BTreeMap<u64, usize> = BTreeMap::new();
        for (i, block) in self.blocks.iter().enumerate().filter(|(_, b)| b.size_bytes.is_none()) {
            unknown.insert(block.address, i);
        }
        for event in &trace.events {
            if unknown.is_empty() {
                return;
            }
            match event.action {
                Action::FreeCompleted => {
                    unknown.remove(&event.address);
                }
                Action::Alloc => {
                    // Of the blocks that were live before the first event: the last one below this address.
                    let behind = self.blocks.partition_point(|b| b.address < event.address);
                    let Some(i) = behind.checked_sub(1) else { continue };
                    let address = self.blocks[i].address;
                    let held = self.held.range(..=address).next_back();
                    let same = held.is_some_and(|(at, held)| event.address - at < held.size_bytes);
                    if same && unknown.get(&address) == Some(&i) {
                        unknown.remove(&address);
                        self.blocks[i].next_free = Some(event.address);
                    }
                }
                _ => {}
            }
        }
    }

    /// Returns the segments and mapped ranges before the first event, by address, without their blocks.
    pub fn held(&self) -> impl Iterator<Item = &SegmentLayout> {
        self.held.values()
    }

    /// Returns the reserved bytes before the first event.
    #[must_use]
    pub fn reserved_bytes(&self) -> u64 {
        self.held.values().fold(0, |sum, held| sum.saturating_add(held.size_bytes))
    }

    /// Returns the requested bytes of all live blocks.
    #[must_use]
    pub fn requested_bytes(&self) -> u64 {
        self.blocks.iter().fold(0, |sum, block| sum.saturating_add(block.requested_bytes))
    }

    /// Returns true if no memory existed before the first event: then the recording is complete.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty() && self.held.is_empty()
    }

    /// Returns the layout before the first event. Unknown sizes of blocks are derived with `settings`,
    /// which should be the recorded ones. Blocks that waited for other streams are treated as live. Returns
    /// `None` if the parts of the recording contradict each other, or if private pools had memory.
    #[must_use]
    pub fn layout(&self, settings: &Settings) -> Option<Vec<SegmentLayout>> {
        let mut rest = self.blocks.as_slice();
        let mut segments = Vec::new();
        let mut last_end = 0;
        for (&address, held) in &self.held {
            let end = address.checked_add(held.size_bytes)?;
            let aligned =
                [address, held.size_bytes].iter().all(|n| n.is_multiple_of(MIN_BLOCK_BYTES));
            let empty = held.size_bytes == 0;
            if empty || address < last_end || !aligned || held.pool != PoolId::DEFAULT {
                return None;
            }
            last_end = end;
            let inside = rest.partition_point(|block| block.address < end);
            let (own, others) = rest.split_at(inside);
            rest = others;
            let blocks = tiles(own, held, settings)?;
            segments.push(SegmentLayout { blocks, ..*held });
        }
        rest.is_empty().then_some(segments)
    }
}

/// Returns the live and free blocks of one segment in address order; `None` if they cannot tile it.
fn tiles(
    live: &[LiveBlock],
    held: &SegmentLayout,
    settings: &Settings,
) -> Option<Vec<BlockLayout>> {
    let mut blocks = Vec::new();
    let mut at = held.address;
    let end = held.address + held.size_bytes;
    for (i, block) in live.iter().enumerate() {
        let address = block.address;
        if address < at || !address.is_multiple_of(MIN_BLOCK_BYTES) || block.stream != held.stream {
            return None;
        }
        if address > at {
            blocks.push(free_block(at, address));
        }
        let next = live.get(i + 1).map_or(end, |next| next.address);
        let room = next.checked_sub(address)?;
        let rounded = settings.roundup.round(block.requested_bytes.min(room));
        let size_bytes = block.size_bytes.unwrap_or_else(|| {
            // In a fixed segment of large blocks, a block is split only if more than 1 MiB remains, and
            // never if the request has at least `max_split_bytes`.
            let whole = held.kind == PoolKind::Large
                && !held.expandable
                && (room.saturating_sub(rounded) <= MIB
                    || settings.max_split_bytes.is_some_and(|most| rounded >= most));
            let cut = block.next_free.map(|free| free - address).filter(|cut| {
                (rounded..=rounded.saturating_add(MIB)).contains(cut) && *cut <= room
            });
            if whole { room } else { cut.unwrap_or(rounded).min(room) }
        });
        if size_bytes == 0 || size_bytes > room || !size_bytes.is_multiple_of(MIN_BLOCK_BYTES) {
            return None;
        }
        blocks.push(BlockLayout {
            address,
            size_bytes,
            requested_bytes: block.requested_bytes.clamp(1, size_bytes),
            state: BlockStateName::ActiveAllocated,
        });
        at = address + size_bytes;
    }
    if at < end {
        blocks.push(free_block(at, end));
    }
    Some(blocks)
}

/// Returns a free block that extends from `address` to `end`.
pub fn free_block(address: u64, end: u64) -> BlockLayout {
    let (size_bytes, state) = (end - address, BlockStateName::Inactive);
    BlockLayout { address, size_bytes, requested_bytes: 0, state }
}

/// Returns the contiguous address ranges in which pages were ever mapped: the end of each, by its start.
fn ever_mapped(trace: &Trace) -> BTreeMap<u64, u64> {
    let is_page =
        |event: &&TraceEvent| matches!(event.action, Action::SegmentMap | Action::SegmentUnmap);
    let events = trace.events.iter().filter(is_page).map(|e| (e.address, e.size_bytes));
    let held = trace.segments.iter().filter(|segment| segment.expandable);
    let mut ranges: Vec<_> = events.chain(held.map(|s| (s.address, s.size_bytes))).collect();
    ranges.sort_unstable();
    let mut stretches = BTreeMap::new();
    let mut last = None;
    for (address, size_bytes) in ranges {
        let end = address.saturating_add(size_bytes);
        match &mut last {
            Some((start, reached)) if address <= *reached => {
                *reached = end.max(*reached);
                stretches.insert(*start, *reached);
            }
            _ => {
                last = Some((address, end));
                stretches.insert(address, end);
            }
        }
    }
    stretches
}

fn held_end(held: &SegmentLayout) -> u64 {
    held.address.saturating_add(held.size_bytes)
}

/// The state while events are undone.
struct Back {
    blocks: HashMap<u64, LiveBlock>,
    held: BTreeMap<u64, SegmentLayout>,
    /// The kind and pool of each known mapped range, by stream and address. When an unmap is undone, they
    /// determine the kind and pool of the pages.
    kinds: BTreeMap<(StreamId, u64), (PoolKind, PoolId)>,
    /// The contiguous ranges that were ever mapped: the end of each, by its start. Each is inside one
    /// reservation, unless a reservation was mapped to its end over time and the next one follows.
    mapped: BTreeMap<u64, u64>,
    /// The number of requests outside of all segments: entries of segments were left out.
    outside: u64,
}

impl Back {
    fn from_the_end(trace: &Trace) -> Self {
        let (blocks, held, kinds) = Default::default();
        let mut back = Self { blocks, held, kinds, mapped: ever_mapped(trace), outside: 0 };
        for segment in &trace.segments {
            let SegmentLayout { address, stream, kind, pool, expandable, .. } = *segment;
            back.held.insert(address, SegmentLayout { blocks: Vec::new(), ..*segment });
            if expandable {
                back.kinds.insert((stream, address), (kind, pool));
            }
            let live = segment.blocks.iter().filter(|b| b.state != BlockStateName::Inactive);
            for block in live {
                back.blocks.insert(
                    block.address,
                    LiveBlock {
                        address: block.address,
                        requested_bytes: block.requested_bytes.max(1),
                        size_bytes: Some(block.size_bytes),
                        next_free: None,
                        stream,
                        pool,
                        draining: block.state == BlockStateName::ActivePendingFree,
                        stack: trace.stack_at_end(block.address),
                    },
                );
            }
        }
        back
    }

    fn undo(&mut self, event: &TraceEvent) {
        let TraceEvent { action, address, size_bytes, .. } = *event;
        match action {
            Action::Alloc => {
                self.blocks.remove(&address);
                let below = self.held.range(..=address).next_back();
                let is_inside = below.is_some_and(|(at, held)| address - at < held.size_bytes);
                self.outside += u64::from(!is_inside);
            }
            Action::FreeRequested => {
                let block = self.live(event);
                // A block that is live behind this free is another one.
                block.stack = block.stack.filter(|_| block.draining);
                block.draining = false;
            }
            Action::FreeCompleted => {
                let block = self.live(event);
                (block.stack, block.draining) = (None, true);
            }
            Action::SegmentAlloc => {
                self.held.remove(&address);
            }
            Action::SegmentFree => {
                let kind = PoolKind::of_segment(size_bytes);
                self.hold(event.in_segment(kind, event.pool, false));
            }
            Action::SegmentMap => self.unmap(address, size_bytes),
            Action::SegmentUnmap => self.map(event),
            Action::Snapshot | Action::OutOfMemory | Action::TagPause | Action::TagResume => {}
        }
    }

    fn hold(&mut self, segment: SegmentLayout) {
        self.held.insert(segment.address, segment);
    }

    /// Returns the live block for a free that is being undone. Adds the block if it is new.
    fn live(&mut self, event: &TraceEvent) -> &mut LiveBlock {
        let TraceEvent { address, size_bytes, stream, pool, .. } = *event;
        let block = || LiveBlock { pool, ..LiveBlock::freed(address, size_bytes.max(1), stream) };
        self.blocks.entry(address).or_insert_with(block)
    }

    /// Removes pages from the mapped range that contains them all, if there is one.
    fn unmap(&mut self, address: u64, size_bytes: u64) {
        let end = address.saturating_add(size_bytes);
        let before = self.held.range(..=address).next_back().map(|(_, held)| held.clone());
        let Some(held) = before.filter(|held| held.expandable && held_end(held) >= end) else {
            return;
        };
        self.held.remove(&held.address);
        for (from, to) in [(held.address, address), (end, held_end(&held))] {
            if from < to {
                self.hold(SegmentLayout { address: from, size_bytes: to - from, ..held.clone() });
            }
        }
        self.kinds.entry((held.stream, address)).or_insert((held.kind, held.pool));
    }

    /// Adds pages and joins them with adjacent ranges of the same stream and kind.
    fn map(&mut self, event: &TraceEvent) {
        let TraceEvent { address, size_bytes, stream, .. } = *event;
        let below = self.kinds.range(..=(stream, address)).next_back();
        let above = self.kinds.range((stream, address)..).next();
        let near = below.into_iter().chain(above).filter(|((of, _), _)| *of == stream);
        let stretch = |at| self.mapped.range(..=at).next_back().map(|(start, _)| *start);
        let pages_end = address.saturating_add(size_bytes);
        let distance = |at: u64| match at <= address {
            true => address.saturating_sub(self.held.get(&at).map_or(at, held_end)),
            false => at.saturating_sub(pages_end),
        };
        // Prefers ranges in the same contiguous range, because pages of another reservation may be closer. Of
        // two that are adjacent to the pages, prefers the lower one.
        let nearest = near
            .map(|((_, at), found)| ((stretch(*at) != stretch(address), distance(*at)), *found))
            .min_by_key(|(distance, _)| *distance);
        // If no range of the stream is known, a multiple of 20 MiB counts as pages for large blocks.
        let by_size = match size_bytes.is_multiple_of(20 * MIB) {
            true => (PoolKind::Large, PoolId::DEFAULT),
            false => (PoolKind::Small, PoolId::DEFAULT),
        };
        let (kind, pool) = nearest.map_or(by_size, |(_, found)| found);
        let mut held = event.in_segment(kind, pool, true);
        let joins = |other: &SegmentLayout| {
            other.expandable && (other.stream, other.kind) == (stream, kind)
        };
        if let Some((&at, before)) = self.held.range(..address).next_back()
            && joins(before)
            && at.saturating_add(before.size_bytes) == address
        {
            held.size_bytes = held.size_bytes.saturating_add(before.size_bytes);
            held.address = at;
            self.held.remove(&at);
        }
        let end = held.address.saturating_add(held.size_bytes);
        if let Some(behind) = self.held.get(&end).filter(|behind| joins(behind)) {
            held.size_bytes = held.size_bytes.saturating_add(behind.size_bytes);
            self.held.remove(&end);
        }
        self.kinds.insert((stream, held.address), (kind, pool));
        self.hold(held);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A reservation for small blocks begins right behind one for large blocks. The last pages of the
    /// latter were unmapped. They are closer to the small blocks' pages than to the large blocks' pages
    /// that are still mapped at the end.
    #[test]
    fn unmapped_pages_belong_to_the_stretch_that_they_continue() {
        let (large, small, page) = (1_u64 << 40, (1_u64 << 40) + 400 * MIB, 20 * MIB);
        let stream = StreamId(0);
        let event =
            |action, address, size_bytes| TraceEvent::new(action, address, size_bytes, stream);
        let segment = |address, size_bytes, kind| SegmentLayout {
            address,
            size_bytes,
            stream,
            kind,
            pool: PoolId::DEFAULT,
            expandable: true,
            asleep: false,
            blocks: Vec::new(),
        };
        let trace = Trace {
            events: vec![
                event(Action::SegmentMap, small, 2 * MIB),
                event(Action::SegmentMap, large, 19 * page),
                event(Action::SegmentUnmap, large + page, 8 * page),
                event(Action::SegmentUnmap, large + 9 * page, 10 * page),
            ],
            segments: vec![
                segment(large, page, PoolKind::Large),
                segment(small, 2 * MIB, PoolKind::Small),
            ],
            ..Trace::default()
        };
        assert!(Start::of(&trace).is_empty(), "{:?}", Start::of(&trace).held);

        // A reservation that was mapped to its end, where the next one begins.
        let full = Trace {
            events: vec![
                event(Action::SegmentMap, large + page, 19 * page),
                event(Action::SegmentUnmap, large + 19 * page, page),
            ],
            segments: vec![
                segment(large, 19 * page, PoolKind::Large),
                segment(small, 2 * MIB, PoolKind::Small),
            ],
            ..Trace::default()
        };
        let before: Vec<_> = Start::of(&full).held.into_values().collect();
        let sizes: Vec<u64> = before.iter().map(|held| held.size_bytes).collect();
        assert_eq!(sizes, [page, 2 * MIB]);
    }
}
