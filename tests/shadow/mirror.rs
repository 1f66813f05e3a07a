//! A simple model of an allocator, updated from the allocator's history alone.
//!
//! Each event of the history is applied to maps of segments and blocks by the documented rules for
//! rounding, best fit, splitting and joining. `pages.rs` has the rules for expandable segments. An event
//! that the rules do not allow is an error. Every counter is a plain number that events raise and lower,
//! so its peak is exact.
//!
//! The model predicts exactly every allocated address, every mapped page, and everything that memory
//! pressure or `empty_cache` releases, in order. It does not predict which segments garbage collection
//! selects, nor the order in which oversize segments are released. If a request waited and no block
//! became free, the model also does not predict whether the first or the second search served it.

use stratalloc::size::{SMALL_SEGMENT_BYTES, segment_bytes};
use stratalloc::stats::Counter;

use super::pages::Call;
use crate::common::prelude::*;

/// A block in the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Block {
    pub(crate) size: u64,
    pub(crate) requested: u64,
    pub(crate) state: BlockStateName,
    /// Whether memory is mapped at the block.
    pub(crate) is_mapped: bool,
}

impl Block {
    pub(crate) const fn free(size: u64) -> Self {
        Self { size, requested: 0, state: BlockStateName::Inactive, is_mapped: true }
    }

    /// Returns a block of address space without memory.
    pub(crate) const fn gap(size: u64) -> Self {
        Self { is_mapped: false, ..Self::free(size) }
    }

    pub(crate) fn is_free(&self) -> bool {
        self.is_mapped && self.state == BlockStateName::Inactive
    }
}

/// A segment in the model.
#[derive(Clone, Debug)]
pub(crate) struct Segment {
    pub(crate) size: u64,
    pub(crate) stream: StreamId,
    pub(crate) kind: PoolKind,
    /// The page size of an expandable segment; `None` for a fixed one.
    pub(crate) page: Option<u64>,
    pub(crate) blocks: BTreeMap<u64, Block>,
}

impl Segment {
    /// Returns the number and bytes of inactive split blocks. An expandable segment has none.
    fn loose(&self) -> (i64, i64) {
        if self.blocks.len() == 1 || self.page.is_some() {
            return (0, 0);
        }
        let free = self.blocks.values().filter(|block| block.is_free());
        free.fold((0, 0), |(count, bytes), block| (count + 1, bytes + signed(block.size)))
    }

    /// Returns true if the segment is one free block.
    pub(crate) fn is_idle(&self) -> bool {
        self.blocks.len() == 1 && self.blocks.values().all(Block::is_free)
    }

    /// Returns each run of adjacent mapped blocks, with its start address.
    pub(crate) fn runs(&self) -> Vec<(u64, Vec<(u64, Block)>)> {
        let blocks: Vec<_> = self.blocks.iter().map(|(at, block)| (*at, *block)).collect();
        let runs = blocks.split(|(_, block)| !block.is_mapped);
        runs.filter_map(|run| Some((run.first()?.0, run.to_vec()))).collect()
    }
}

/// The model of an allocator.
#[derive(Debug)]
pub(crate) struct Mirror {
    pub(crate) segments: BTreeMap<u64, Segment>,
    /// The expected value of every counter.
    pub(crate) book: Statistics,
    pub(crate) settings: Settings,
    /// The device's memory.
    pub(crate) total_bytes: u64,
    pub(crate) limit: Option<u64>,
    /// The segment that was allocated last, until a block is allocated in it.
    fresh: Option<u64>,
    pub(crate) call: Call,
}

pub(crate) fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).expect("sizes fit")
}

/// Changes a statistic by `n`, up or down.
pub(crate) fn change(family: &mut PerPool, kind: PoolKind, n: i64) {
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
    /// Returns the model of an allocator without segments.
    pub(crate) fn new(settings: Settings, total_bytes: u64) -> Self {
        let max_split_size = settings.max_split_bytes.map_or(-1, signed);
        Self {
            segments: BTreeMap::new(),
            book: Statistics { max_split_size, ..Statistics::default() },
            settings,
            total_bytes,
            limit: None,
            fresh: None,
            call: Call::default(),
        }
    }

    pub(crate) fn reserved(&self) -> u64 {
        let blocks = self.segments.values().flat_map(|segment| segment.blocks.values());
        blocks.filter(|block| block.is_mapped).map(|block| block.size).sum()
    }

    pub(crate) fn bytes_in(&self, kind: Option<PoolKind>, state: BlockStateName) -> u64 {
        let segments = self.segments.values().filter(|s| kind.is_none_or(|kind| kind == s.kind));
        let blocks = segments.flat_map(|segment| segment.blocks.values());
        blocks.filter(|block| block.is_mapped && block.state == state).map(|block| block.size).sum()
    }

    pub(crate) fn any_draining(&self) -> bool {
        self.bytes_in(None, BlockStateName::ActivePendingFree) > 0
    }

    /// Returns the free block that must serve a request, if one may: the smallest that is large enough. If
    /// it is expandable, the next one in order of size is taken instead if its reach is smaller, and so on.
    /// The reach of a block is its size plus the unmapped addresses behind it. Expandable blocks are
    /// skipped while new segments are fixed.
    ///
    /// PyTorch's search ends at a block that the oversize rules forbid. Unless `compat:pytorch` is set, the
    /// search continues, because expandable blocks are exempt from those rules.
    pub(crate) fn best_fit(&self, stream: StreamId, rounded: u64) -> Option<u64> {
        let is_on = self.settings.expandable_segments;
        let mut free = self.free_in_order(stream, PoolKind::of(rounded));
        free.retain(|(size, _, _, segment)| {
            let is_expandable = segment.page.is_some();
            let passed = if is_expandable { !is_on } else { is_on && !self.allows(rounded, *size) };
            *size >= rounded && !(passed && (is_expandable || self.searches_again()))
        });
        let mut rest = free.iter().peekable();
        loop {
            let &(size, address, reach, segment) = rest.next()?;
            let is_expandable = segment.page.is_some();
            let closer = rest.peek().is_some_and(|(_, _, next, _)| *next < reach);
            if !is_expandable || !closer {
                let exempt = is_expandable && self.searches_again();
                return (exempt || self.allows(rounded, size)).then_some(address);
            }
        }
    }

    /// Returns true if the oversize rules allow a block of `size` to serve a request of `rounded` bytes.
    fn allows(&self, rounded: u64, size: u64) -> bool {
        match self.settings.max_split_bytes {
            None => true,
            Some(most) if rounded < most => size < most,
            Some(_) => size < rounded + self.settings.non_split_rounding_bytes(),
        }
    }

    fn splits(&self, kind: PoolKind, rounded: u64, rest: u64) -> bool {
        match kind {
            PoolKind::Small => rest >= 512,
            PoolKind::Large if self.settings.expandable_segments => rest >= 512,
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

    /// Returns the smallest segment, or the smallest pages, for a request in an empty cache.
    pub(crate) fn least_growth(&self, rounded: u64) -> u64 {
        if !self.settings.expandable_segments || !self.searches_again() {
            return self.segment_for(rounded);
        }
        rounded.next_multiple_of(self.page_for(rounded, self.may_map_finely(rounded)))
    }

    /// Returns true if a request searches the pool again after a wait, which is so except under
    /// PyTorch's rules.
    pub(crate) fn searches_again(&self) -> bool {
        self.settings.compat == Compat::Default
    }

    /// Prepares for the events of the next call. `request` contains the bytes and the stream if the call
    /// is a request.
    pub(crate) fn begin(&mut self, request: Option<(u64, StreamId)>) {
        let request = request.map(|(bytes, stream)| (self.rounded(bytes), stream));
        self.call = Call { request, ..Call::default() };
    }

    /// Applies all or some of the events of a call.
    pub(crate) fn replay(&mut self, events: &[Event]) -> Checked {
        for (at, event) in events.iter().enumerate() {
            self.look_ahead(&events[at..]);
            self.replay_one(*event).map_err(|wrong| format!("{event:?}: {wrong}"))?;
        }
        Ok(())
    }

    /// Before an event is applied, stores the result of a search at that moment, and whether a release
    /// of all free memory begins.
    fn look_ahead(&mut self, events: &[Event]) {
        let action = events[0].action;
        if action == Action::FreeCompleted {
            self.call.found = None;
        } else if let (None, Some((rounded, stream))) = (self.call.found, self.call.request) {
            self.call.found = Some(self.best_fit(stream, rounded));
        }
        if action != Action::SegmentMap && action != Action::Alloc && action != Action::OutOfMemory
        {
            self.call.growing = None;
        }
        let releases = matches!(action, Action::SegmentFree | Action::SegmentUnmap);
        self.call.releasing = match self.call.releasing {
            Some(left @ 1..) if releases => Some(left - 1),
            // If garbage collection has already released all free memory, a release of all begins only
            // after waiting has freed more blocks.
            _ if releases && self.call.waited => {
                let expected = self.idle_in_order();
                events.starts_with(&expected).then(|| expected.len() - 1)
            }
            other => other,
        };
    }

    fn replay_one(&mut self, event: Event) -> Checked {
        let Event { address, size_bytes, stream, .. } = event;
        match event.action {
            Action::Alloc => self.allocated(address, size_bytes, stream),
            Action::FreeRequested => self.free_requested(address, size_bytes, stream),
            Action::FreeCompleted => self.free_completed(address, size_bytes, stream),
            Action::SegmentAlloc => self.segment_came(address, size_bytes, stream),
            Action::SegmentFree => self.segment_went(address, size_bytes, stream),
            Action::SegmentMap => self.pages_came(address, size_bytes, stream),
            Action::SegmentUnmap => self.pages_went(address, size_bytes, stream),
            Action::Snapshot | Action::TagPause | Action::TagResume => Ok(()),
            Action::OutOfMemory => self.out_of_memory(address, size_bytes, stream),
        }
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
        self.call.fitted = self.check_place(address, rounded, stream)?;
        let kind = PoolKind::of(rounded);
        let whole = self.segment_of(address, stream)?.blocks.get(&address).copied();
        let whole = whole.ok_or("no block begins there")?;
        let cut = self.splits(kind, rounded, whole.size - rounded);
        let segment = self.segment_of(address, stream)?;
        ensure_eq!(segment.kind, kind, "kind of the segment");
        let before = segment.loose();
        let size = if cut { rounded } else { whole.size };
        let state = BlockStateName::ActiveAllocated;
        let block = Block { size, requested, state, is_mapped: true };
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

    /// Checks that the allocator may place a block here. Returns true if a search found the place.
    fn check_place(
        &mut self,
        address: u64,
        rounded: u64,
        stream: StreamId,
    ) -> Result<bool, String> {
        let searched = self.searches_again() || !self.call.waited;
        if let Some(fresh) = self.fresh.take() {
            ensure_eq!(fresh, address, "the new segment");
            let segment = self.segments[&address].size;
            ensure_eq!(segment, self.segment_for(rounded), "size of the new segment");
            let cached = self.call.found.flatten();
            ensure!(cached.is_none() || !searched, "grew beside a block that fits");
            return Ok(false);
        }
        if let Some(grown) = self.has_grown(rounded) {
            ensure_eq!(grown, address, "the block that pages were mapped for");
            return Ok(false);
        }
        let free_room = self.room_that_is_free(stream, rounded);
        let fit = if self.call.waited {
            self.best_fit(stream, rounded)
        } else {
            self.call.found.flatten()
        };
        let fits = searched && fit == Some(address);
        let is_only_room = free_room == Some(address) && (fit.is_none() || self.call.waited);
        ensure!(fits || is_only_room, "the best fit is {fit:x?}, free room {free_room:x?}");
        Ok(fits)
    }

    fn free_requested(&mut self, address: u64, requested: u64, stream: StreamId) -> Checked {
        let segment = self.segment_of(address, stream)?;
        let kind = segment.kind;
        let block = segment.blocks.get_mut(&address).ok_or("no block begins there")?;
        ensure_eq!(block.state, BlockStateName::ActiveAllocated, "state of the block");
        ensure_eq!(block.requested, requested, "the requested bytes");
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
        ensure_eq!(block.requested, requested, "the requested bytes");
        let (mut start, mut size) = (address, block.size);
        let previous = segment.blocks.range(..address).next_back();
        if let Some((&at, free)) = previous.filter(|(_, block)| block.is_free()) {
            (start, size) = (at, size + free.size);
        }
        let behind = address + block.size;
        if let Some(free) = segment.blocks.get(&behind).copied().filter(Block::is_free) {
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
        ensure!(!self.settings.expandable_segments, "new segments are expandable");
        let kind = if size == SMALL_SEGMENT_BYTES { PoolKind::Small } else { PoolKind::Large };
        let before = self.segments.range(..address + size).next_back();
        ensure!(before.is_none_or(|(at, s)| at + s.size <= address), "overlaps a segment");
        let blocks = BTreeMap::from([(address, Block::free(size))]);
        self.segments.insert(address, Segment { size, stream, kind, page: None, blocks });
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
        ensure!(segment.page.is_none() && segment.is_idle(), "not one free block");
        change(&mut self.book.segment, segment.kind, -1);
        change(&mut self.book.reserved_bytes, segment.kind, -signed(size));
        self.book.num_device_free += 1;
        if self.is_oversize(size) {
            self.book.oversize_segments.decrease(1);
        }
        Ok(())
    }

    /// Checks that a failure is justified: no free or draining memory remains, no cached block fits, and
    /// the segment would exceed the limit or the device. If the request can never fit, free segments may
    /// remain.
    fn out_of_memory(&mut self, device_free: u64, rounded: u64, stream: StreamId) -> Checked {
        self.book.num_ooms += 1;
        let segment = self.segment_for(rounded);
        let by_pages = self.settings.expandable_segments && self.searches_again();
        let fine = self.may_map_finely(rounded);
        let least = self.least_growth(rounded);
        let most = self.limit.unwrap_or(u64::MAX).min(self.total_bytes);
        // If mapping stopped halfway, the pages mapped so far remain. They were not free when the
        // release ran.
        if (least <= most || !self.searches_again()) && self.call.growing.is_none() {
            self.any_draining_or_idle()?;
        }
        if self.searches_again() {
            ensure_eq!(self.best_fit(stream, rounded), None, "a cached block fits");
        }
        // The limit applies to the whole pages that would be mapped, except under PyTorch's rules.
        let more = match by_pages {
            true => self.next_mapping(rounded, stream, fine).unwrap_or(0),
            false => segment,
        };
        let limited = self.limit.is_some_and(|limit| self.reserved() + more > limit);
        let short = if self.settings.expandable_segments {
            self.cannot_map(device_free, rounded, stream, fine)
        } else {
            device_free < segment
        };
        ensure!(limited || short, "{segment} would have fit");
        Ok(())
    }

    fn loose_changed(&mut self, kind: PoolKind, before: (i64, i64), after: (i64, i64)) {
        change(&mut self.book.inactive_split, kind, after.0 - before.0);
        change(&mut self.book.inactive_split_bytes, kind, after.1 - before.1);
    }

    /// Adds or removes a live block in the counters.
    fn count_hold(&mut self, kind: PoolKind, size: u64, sign: i64) {
        change(&mut self.book.allocation, kind, sign);
        change(&mut self.book.allocated_bytes, kind, sign * signed(size));
        if self.is_oversize(size) {
            change_one(&mut self.book.oversize_allocations, sign);
        }
    }

    /// Adds or removes a live or draining block in the counters.
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

    /// Checks that the layout has exactly the segments and blocks of the model.
    pub(crate) fn check_layout(&self, segments: &[SegmentLayout]) -> Checked {
        let starts: Vec<u64> = segments.iter().map(|segment| segment.address).collect();
        let runs =
            self.segments.values().flat_map(|own| own.runs().into_iter().map(move |r| (own, r)));
        let runs: Vec<_> = runs.collect();
        let own_starts: Vec<u64> = runs.iter().map(|(_, (start, _))| *start).collect();
        ensure_eq!(starts, own_starts, "segments");
        for (reported, (own, (start, blocks))) in segments.iter().zip(&runs) {
            let whole = (reported.stream, reported.kind, reported.expandable);
            ensure_eq!(whole, (own.stream, own.kind, own.page.is_some()), "segment {start:#x}");
            ensure_eq!(reported.blocks.len(), blocks.len(), "blocks of {start:#x}");
            for (reported, (address, own)) in reported.blocks.iter().zip(blocks) {
                let block = (reported.address, reported.size_bytes, reported.state);
                ensure_eq!(block, (*address, own.size, own.state), "block");
                if own.state != BlockStateName::Inactive {
                    ensure_eq!(reported.requested_bytes, own.requested, "request of {address:#x}");
                }
            }
        }
        Ok(())
    }

    /// Checks that every counter equals its expected value.
    pub(crate) fn check_statistics(&mut self, reported: &Statistics) -> Checked {
        // The model does not predict waits, retries, hits and misses.
        self.book.num_alloc_retries = reported.num_alloc_retries;
        self.book.num_sync_all_streams = reported.num_sync_all_streams;
        (self.book.hits, self.book.misses) = (reported.hits, reported.misses);
        let blocks = self.segments.values().flat_map(|segment| segment.blocks.values());
        self.book.free_blocks = blocks.filter(|block| block.is_free()).count() as u64;
        let (reported_keys, own_keys) = (reported.pytorch_keys(), self.book.pytorch_keys());
        for (reported, own) in reported_keys.iter().zip(&own_keys) {
            ensure_eq!(reported, own, "counter");
        }
        ensure_eq!(reported, &self.book, "statistics");
        Ok(())
    }
}
