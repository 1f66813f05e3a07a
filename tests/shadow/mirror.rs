//! A second, plain account of an allocator, kept from its history alone.
//!
//! Each event is replayed on maps of segments and blocks by the rules as they are written down:
//! rounding, best fit, splitting, joining. An event that the rules do not allow is an error. Every
//! counter is one plain number that goes up and down with the events, so its peak is the true one.

use std::collections::BTreeMap;

use stratalloc::config::{Compat, Settings};
use stratalloc::history::{Action, BlockStateName, Event, SegmentLayout};
use stratalloc::ids::StreamId;
use stratalloc::size::{MIB, PoolKind, SMALL_SEGMENT_BYTES, segment_bytes};
use stratalloc::stats::{Counter, PerPool, Statistics};

use crate::common::{Checked, ensure, ensure_eq};

/// A block as the rules say it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Block {
    pub(crate) size: u64,
    pub(crate) requested: u64,
    pub(crate) state: BlockStateName,
}

impl Block {
    const fn free(size: u64) -> Self {
        Self { size, requested: 0, state: BlockStateName::Inactive }
    }
}

/// A segment as the rules say it is.
#[derive(Clone, Debug)]
pub(crate) struct Segment {
    pub(crate) size: u64,
    pub(crate) stream: StreamId,
    pub(crate) kind: PoolKind,
    pub(crate) blocks: BTreeMap<u64, Block>,
}

impl Segment {
    /// Free blocks that are not the whole segment, and their bytes.
    fn loose(&self) -> (i64, i64) {
        if self.blocks.len() == 1 {
            return (0, 0);
        }
        let free = self.blocks.values().filter(|b| b.state == BlockStateName::Inactive);
        free.fold((0, 0), |(count, bytes), block| (count + 1, bytes + signed(block.size)))
    }

    fn is_idle(&self) -> bool {
        self.blocks.values().all(|block| block.state == BlockStateName::Inactive)
    }
}

/// The account.
#[derive(Debug)]
pub(crate) struct Mirror {
    pub(crate) segments: BTreeMap<u64, Segment>,
    /// Every counter, as the plain numbers say it should read.
    pub(crate) book: Statistics,
    pub(crate) settings: Settings,
    /// What the device has.
    total_bytes: u64,
    pub(crate) limit: Option<u64>,
    /// The segment that came last, until something is handed out of it.
    fresh: Option<u64>,
}

fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).expect("sizes fit")
}

/// A change by `n`, up or down.
fn change(family: &mut PerPool, kind: PoolKind, n: i64) {
    change_one(&mut family.all, n);
    change_one(
        match kind {
            PoolKind::Small => &mut family.small,
            PoolKind::Large => &mut family.large,
        },
        n,
    );
}

fn change_one(counter: &mut Counter, n: i64) {
    if n > 0 {
        counter.increase(n);
    } else {
        counter.decrease(-n);
    }
}

impl Mirror {
    /// Nothing yet.
    pub(crate) fn new(settings: Settings, total_bytes: u64) -> Self {
        let max_split_size = settings.max_split_bytes.map_or(-1, signed);
        Self {
            segments: BTreeMap::new(),
            book: Statistics { max_split_size, ..Statistics::default() },
            settings,
            total_bytes,
            limit: None,
            fresh: None,
        }
    }

    pub(crate) fn reserved(&self) -> u64 {
        self.segments.values().map(|segment| segment.size).sum()
    }

    pub(crate) fn bytes_in(&self, kind: Option<PoolKind>, state: BlockStateName) -> u64 {
        let segments = self.segments.values().filter(|s| kind.is_none_or(|kind| kind == s.kind));
        let blocks = segments.flat_map(|segment| segment.blocks.values());
        blocks.filter(|block| block.state == state).map(|block| block.size).sum()
    }

    pub(crate) fn any_idle(&self) -> bool {
        self.segments.values().any(Segment::is_idle)
    }

    pub(crate) fn any_draining(&self) -> bool {
        self.bytes_in(None, BlockStateName::ActivePendingFree) > 0
    }

    /// The address of the free block that must serve a request, if one may.
    pub(crate) fn best_fit(&self, stream: StreamId, rounded: u64) -> Option<u64> {
        self.best_fit_outside(None, stream, rounded)
    }

    fn best_fit_outside(&self, fresh: Option<u64>, stream: StreamId, rounded: u64) -> Option<u64> {
        let kind = PoolKind::of(rounded);
        let serves = |segment: &Segment| segment.stream == stream && segment.kind == kind;
        let known = self.segments.iter().filter(|(at, _)| fresh != Some(**at));
        let own = known.map(|(_, segment)| segment).filter(|segment| serves(segment));
        let free = own
            .flat_map(|s| &s.blocks)
            .filter(|(_, block)| block.state == BlockStateName::Inactive && block.size >= rounded);
        let (size, address) = free.map(|(address, block)| (block.size, *address)).min()?;
        let allowed = match self.settings.max_split_bytes {
            None => true,
            Some(most) if rounded < most => size < most,
            Some(_) => size < rounded + self.settings.non_split_rounding_bytes(),
        };
        allowed.then_some(address)
    }

    fn splits(&self, kind: PoolKind, rounded: u64, rest: u64) -> bool {
        match kind {
            PoolKind::Small => rest >= 512,
            PoolKind::Large => {
                self.settings.max_split_bytes.is_none_or(|most| rounded < most) && rest > MIB
            }
        }
    }

    fn is_oversize(&self, size: u64) -> bool {
        self.settings.max_split_bytes.is_some_and(|most| size >= most)
    }

    pub(crate) fn rounded(&self, bytes: u64) -> u64 {
        self.settings.roundup.round(bytes)
    }

    pub(crate) fn segment_for(&self, rounded: u64) -> u64 {
        segment_bytes(rounded, self.settings.large_segment_bytes)
    }

    /// Whether requests find what became free while they waited; PyTorch's do not.
    pub(crate) fn searches_again(&self) -> bool {
        self.settings.compat == Compat::Default
    }

    /// Replays one event.
    pub(crate) fn replay(&mut self, event: Event) -> Checked {
        let Event { address, size_bytes, stream, .. } = event;
        match event.action {
            Action::Alloc => self.allocated(address, size_bytes, stream),
            Action::FreeRequested => self.free_requested(address, size_bytes, stream),
            Action::FreeCompleted => self.free_completed(address, size_bytes, stream),
            Action::SegmentAlloc => self.segment_came(address, size_bytes, stream),
            Action::SegmentFree => self.segment_went(address, size_bytes, stream),
            Action::OutOfMemory => self.out_of_memory(address, size_bytes, stream),
            Action::SegmentMap | Action::SegmentUnmap => Err("fixed segments map nothing".into()),
        }
        .map_err(|wrong| format!("{event:?}: {wrong}"))
    }

    fn segment_of(&mut self, address: u64, stream: StreamId) -> Result<&mut Segment, String> {
        let (start, segment) =
            self.segments.range_mut(..=address).next_back().ok_or("before every segment")?;
        ensure!(address < start + segment.size, "in no segment");
        ensure_eq!(segment.stream, stream, "the segment serves another stream");
        Ok(segment)
    }

    fn allocated(&mut self, address: u64, requested: u64, stream: StreamId) -> Checked {
        let rounded = self.rounded(requested);
        if self.fresh.take() == Some(address) {
            let segment = self.segments[&address].size;
            ensure_eq!(segment, self.segment_for(rounded), "size of the new segment");
            let cached = self.best_fit_outside(Some(address), stream, rounded);
            ensure!(cached.is_none() || !self.searches_again(), "grew beside a block that fits");
        } else {
            ensure_eq!(self.best_fit(stream, rounded), Some(address), "the best fit");
        }
        let kind = PoolKind::of(rounded);
        let whole = self.segment_of(address, stream)?.blocks.get(&address).copied();
        let whole = whole.ok_or("no block begins there")?;
        let cut = self.splits(kind, rounded, whole.size - rounded);
        let segment = self.segment_of(address, stream)?;
        ensure_eq!(segment.kind, kind, "kind of the segment");
        let before = segment.loose();
        let size = if cut { rounded } else { whole.size };
        let block = Block { size, requested, state: BlockStateName::ActiveAllocated };
        segment.blocks.insert(address, block);
        if cut {
            segment.blocks.insert(address + size, Block::free(whole.size - size));
        }
        let after = segment.loose();
        self.loose_changed(kind, before, after);
        self.count_use(kind, size, requested, 1);
        self.count_hold(kind, size, 1);
        Ok(())
    }

    fn free_requested(&mut self, address: u64, requested: u64, stream: StreamId) -> Checked {
        let segment = self.segment_of(address, stream)?;
        let kind = segment.kind;
        let block = segment.blocks.get_mut(&address).ok_or("no block begins there")?;
        ensure_eq!(block.state, BlockStateName::ActiveAllocated, "state of the block");
        ensure_eq!(block.requested, requested, "what was asked for");
        block.state = BlockStateName::ActivePendingFree;
        let size = block.size;
        self.count_hold(kind, size, -1);
        Ok(())
    }

    fn free_completed(&mut self, address: u64, requested: u64, stream: StreamId) -> Checked {
        let segment = self.segment_of(address, stream)?;
        let (kind, before) = (segment.kind, segment.loose());
        let block = *segment.blocks.get(&address).ok_or("no block begins there")?;
        ensure_eq!(block.state, BlockStateName::ActivePendingFree, "state of the block");
        ensure_eq!(block.requested, requested, "what was asked for");
        let is_free = |block: &Block| block.state == BlockStateName::Inactive;
        let (mut start, mut size) = (address, block.size);
        let previous = segment.blocks.range(..address).next_back();
        if let Some((&at, free)) = previous.filter(|(_, block)| is_free(block)) {
            (start, size) = (at, size + free.size);
        }
        let behind = address + block.size;
        if let Some(free) = segment.blocks.get(&behind).copied().filter(is_free) {
            size += free.size;
            segment.blocks.remove(&behind);
        }
        segment.blocks.remove(&address);
        segment.blocks.insert(start, Block::free(size));
        let after = segment.loose();
        self.loose_changed(kind, before, after);
        self.count_use(kind, block.size, requested, -1);
        Ok(())
    }

    fn segment_came(&mut self, address: u64, size: u64, stream: StreamId) -> Checked {
        let kind = if size == SMALL_SEGMENT_BYTES { PoolKind::Small } else { PoolKind::Large };
        let before = self.segments.range(..address + size).next_back();
        ensure!(before.is_none_or(|(at, s)| at + s.size <= address), "overlaps a segment");
        let blocks = BTreeMap::from([(address, Block::free(size))]);
        self.segments.insert(address, Segment { size, stream, kind, blocks });
        let reserved = self.reserved();
        ensure!(self.limit.is_none_or(|limit| reserved <= limit), "{reserved} passes the limit");
        self.fresh = Some(address);
        change(&mut self.book.segment, kind, 1);
        change(&mut self.book.reserved_bytes, kind, signed(size));
        self.book.num_device_alloc += 1;
        if self.is_oversize(size) {
            self.book.oversize_segments.increase(1);
        }
        Ok(())
    }

    fn segment_went(&mut self, address: u64, size: u64, stream: StreamId) -> Checked {
        let segment = self.segments.remove(&address).ok_or("no segment begins there")?;
        ensure_eq!((segment.size, segment.stream), (size, stream), "size and stream");
        ensure!(segment.is_idle() && segment.blocks.len() == 1, "not one free block");
        change(&mut self.book.segment, segment.kind, -1);
        change(&mut self.book.reserved_bytes, segment.kind, -signed(size));
        self.book.num_device_free += 1;
        if self.is_oversize(size) {
            self.book.oversize_segments.decrease(1);
        }
        Ok(())
    }

    /// A failure is honest: nothing idle or draining is left, nothing cached fits, and the segment
    /// would pass the limit or what the device has. What could never fit may leave idle segments.
    fn out_of_memory(&mut self, device_free: u64, rounded: u64, stream: StreamId) -> Checked {
        self.book.num_ooms += 1;
        let segment = self.segment_for(rounded);
        let most = self.limit.unwrap_or(u64::MAX).min(self.total_bytes);
        if segment <= most || !self.searches_again() {
            ensure!(!self.any_idle(), "an idle segment is left");
            ensure!(!self.any_draining(), "a block still drains");
        }
        if self.searches_again() {
            ensure_eq!(self.best_fit(stream, rounded), None, "a cached block fits");
        }
        let limited = self.limit.is_some_and(|limit| self.reserved() + segment > limit);
        ensure!(limited || device_free < segment, "{segment} would have fit");
        Ok(())
    }

    fn loose_changed(&mut self, kind: PoolKind, before: (i64, i64), after: (i64, i64)) {
        change(&mut self.book.inactive_split, kind, after.0 - before.0);
        change(&mut self.book.inactive_split_bytes, kind, after.1 - before.1);
    }

    /// Blocks in callers' hands.
    fn count_hold(&mut self, kind: PoolKind, size: u64, sign: i64) {
        change(&mut self.book.allocation, kind, sign);
        change(&mut self.book.allocated_bytes, kind, sign * signed(size));
        if self.is_oversize(size) {
            change_one(&mut self.book.oversize_allocations, sign);
        }
    }

    /// Blocks in callers' hands or draining.
    fn count_use(&mut self, kind: PoolKind, size: u64, requested: u64, sign: i64) {
        change(&mut self.book.active, kind, sign);
        change(&mut self.book.active_bytes, kind, sign * signed(size));
        change(&mut self.book.requested_bytes, kind, sign * signed(requested));
    }

    fn for_each_counter(&mut self, change: impl Fn(&mut Counter)) {
        let book = &mut self.book;
        for family in [
            &mut book.allocation,
            &mut book.segment,
            &mut book.active,
            &mut book.inactive_split,
            &mut book.allocated_bytes,
            &mut book.reserved_bytes,
            &mut book.active_bytes,
            &mut book.inactive_split_bytes,
            &mut book.requested_bytes,
        ] {
            change(&mut family.all);
            change(&mut family.large);
            change(&mut family.small);
        }
        change(&mut book.oversize_allocations);
        change(&mut book.oversize_segments);
    }

    pub(crate) fn reset_peaks(&mut self) {
        self.for_each_counter(|counter| counter.peak = counter.current);
    }

    pub(crate) fn reset_accumulated(&mut self) {
        self.for_each_counter(|counter| (counter.allocated, counter.freed) = (0, 0));
        let book = &mut self.book;
        (book.num_ooms, book.num_device_alloc, book.num_device_free) = (0, 0, 0);
        book.num_oom_rejections = 0;
    }

    /// Every segment and every block of the layout is as the rules say, and nothing else is there.
    pub(crate) fn check_layout(&self, segments: &[SegmentLayout]) -> Checked {
        let starts: Vec<u64> = segments.iter().map(|segment| segment.address).collect();
        ensure_eq!(starts, self.segments.keys().copied().collect::<Vec<_>>(), "segments");
        for told in segments {
            let own = &self.segments[&told.address];
            let whole = (told.size_bytes, told.stream, told.kind);
            ensure_eq!(whole, (own.size, own.stream, own.kind), "segment {:#x}", told.address);
            ensure_eq!(told.blocks.len(), own.blocks.len(), "blocks of {:#x}", told.address);
            for (told, (address, own)) in told.blocks.iter().zip(&own.blocks) {
                let block = (told.address, told.size_bytes, told.state);
                ensure_eq!(block, (*address, own.size, own.state), "block");
                if own.state != BlockStateName::Inactive {
                    ensure_eq!(told.requested_bytes, own.requested, "request of {address:#x}");
                }
            }
        }
        Ok(())
    }

    /// Every counter reads as the plain numbers say.
    pub(crate) fn check_statistics(&mut self, told: &Statistics) -> Checked {
        // Who waits or tries again how often is the engine's business; it only counts up.
        self.book.num_alloc_retries = told.num_alloc_retries;
        self.book.num_sync_all_streams = told.num_sync_all_streams;
        (self.book.hits, self.book.misses) = (told.hits, told.misses);
        let blocks = self.segments.values().flat_map(|segment| segment.blocks.values());
        self.book.free_blocks =
            blocks.filter(|b| b.state == BlockStateName::Inactive).count() as u64;
        let (told_keys, own_keys) = (told.pytorch_keys(), self.book.pytorch_keys());
        for (told, own) in told_keys.iter().zip(&own_keys) {
            ensure_eq!(told, own, "counter");
        }
        ensure_eq!(told, &self.book, "statistics");
        Ok(())
    }
}
