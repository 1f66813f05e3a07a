//! The model's rules for expandable segments: where pages are mapped, and which ones are unmapped.
//!
//! In the model, a reserved address range is a segment with a page size, and blocks without memory are
//! gaps. The rules are PyTorch's. Growth starts at the lowest gap that is long enough together with the
//! free block before it, and maps whole pages for the missing bytes. A release unmaps the whole pages
//! inside free blocks, after the fixed segments of the same kind. Except under PyTorch's rules, a large
//! request for which these pages exceed the limit or the device maps pages of 2 MiB, in ranges of their own.
//!
//! The driver alone determines the address of a new range, so the model takes it from the event or from
//! the driver's list. The model computes the range's size. It learns of a range without mapped pages
//! only after the call. So a call that has waited may map pages in a range that the model does not have
//! yet.

use stratalloc::size::SMALL_SEGMENT_BYTES;

use super::mirror::{Block, Mirror, Segment, change, signed};
use crate::common::prelude::*;

/// Page sizes are multiples of this on every device that runs these tests.
const GRANULARITY_BYTES: u64 = 2 * MIB;

/// The state of the call whose events are being applied.
#[derive(Clone, Debug, Default)]
pub(crate) struct Call {
    /// The rounded bytes and the stream of the request, if the call is a request.
    pub(crate) request: Option<(u64, StreamId)>,
    /// Whether the call has waited for all streams.
    pub(crate) waited: bool,
    /// The result of the search, `None` before it. The search is repeated after each block that becomes
    /// free.
    pub(crate) found: Option<Option<u64>>,
    /// The start of the block that is being extended by mapping pages.
    pub(crate) growing: Option<u64>,
    /// While a release of all free memory is in progress, the number of its events that remain.
    pub(crate) releasing: Option<usize>,
    /// Whether a search found the block, so that no pages had to be mapped.
    pub(crate) fitted: bool,
}

/// The next step of growth.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    Enough,
    Map { address: u64, size: u64 },
}

impl Segment {
    /// Returns a new range without mapped pages.
    fn reserved(size: u64, page: u64, stream: StreamId, kind: PoolKind, start: u64) -> Self {
        let blocks = BTreeMap::from([(start, Block::gap(size))]);
        Self { size, stream, kind, page: Some(page), blocks }
    }

    /// Returns true if large blocks are mapped by pages of 2 MiB.
    fn is_fine(&self) -> bool {
        self.kind == PoolKind::Large && self.page == Some(GRANULARITY_BYTES)
    }

    /// Returns the start and size of the whole pages inside a free block.
    fn whole_pages(&self, start: u64, address: u64, block: Block) -> Option<(u64, u64)> {
        let page = self.page.filter(|_| block.is_free())?;
        let first = start + (address - start).next_multiple_of(page);
        let end = start + (address + block.size - start) / page * page;
        (first < end).then(|| (first, end - first))
    }

    /// Joins the block at `address` with neighbours that are also free, or also unmapped. Returns the
    /// start of the result.
    fn join_alike(&mut self, address: u64) -> u64 {
        let own = self.blocks[&address];
        let alike =
            |other: &Block| other.is_free() && own.is_free() || !other.is_mapped && !own.is_mapped;
        let (mut start, mut size) = (address, own.size);
        let behind = address + own.size;
        if let Some(next) = self.blocks.get(&behind).copied().filter(alike) {
            size += next.size;
            self.blocks.remove(&behind);
        }
        let previous = self.blocks.range(..address).next_back();
        if let Some((&at, before)) = previous.filter(|(_, block)| alike(block)) {
            (start, size) = (at, size + before.size);
            self.blocks.remove(&address);
        }
        self.blocks.insert(start, Block { size, ..own });
        start
    }
}

impl Mirror {
    pub(crate) fn page(&self, kind: PoolKind) -> u64 {
        match kind {
            PoolKind::Small => SMALL_SEGMENT_BYTES,
            PoolKind::Large => self.settings.large_segment_bytes,
        }
        .next_multiple_of(GRANULARITY_BYTES)
    }

    /// Returns true if a request may map pages of 2 MiB, if no others fit.
    pub(crate) fn may_map_finely(&self, rounded: u64) -> bool {
        self.searches_again()
            && self.settings.expandable_segments
            && PoolKind::of(rounded) == PoolKind::Large
    }

    /// Returns the size of the pages for a request.
    pub(crate) fn page_for(&self, rounded: u64, fine: bool) -> u64 {
        if fine { GRANULARITY_BYTES } else { self.page(PoolKind::of(rounded)) }
    }

    /// Returns the size of a new range: nine eighths of the device, in whole pages.
    fn reserve(&self, page: u64) -> u64 {
        (self.total_bytes + self.total_bytes / 8).next_multiple_of(page)
    }

    /// Returns where growth for a request starts, if a known range has room for it.
    pub(crate) fn room(&self, stream: StreamId, rounded: u64, fine: bool) -> Option<u64> {
        let kind = PoolKind::of(rounded);
        let own = |s: &&Segment| {
            s.page.is_some() && s.stream == stream && s.kind == kind && s.is_fine() == fine
        };
        self.segments.values().filter(own).find_map(|segment| {
            let gaps = segment.blocks.iter().filter(|(_, block)| !block.is_mapped);
            gaps.map(|(gap, _)| *gap).find_map(|gap| {
                let before = segment.blocks.range(..gap).next_back();
                let start = before.filter(|(_, block)| block.is_free()).map_or(gap, |(at, _)| *at);
                let run = segment.blocks.range(start..).map(|(_, block)| block);
                let run = run.take_while(|block| block.is_free() || !block.is_mapped);
                (run.map(|block| block.size).sum::<u64>() >= rounded).then_some(start)
            })
        })
    }

    /// Returns where growth for a request would start, if the free block there is already large enough.
    pub(crate) fn room_that_is_free(&self, stream: StreamId, rounded: u64) -> Option<u64> {
        let start =
            self.room(stream, rounded, false).filter(|_| self.settings.expandable_segments)?;
        (self.next_step(start, rounded) == Ok(Step::Enough)).then_some(start)
    }

    /// Returns the block that was extended by mapping pages, if it is now large enough.
    pub(crate) fn has_grown(&self, rounded: u64) -> Option<u64> {
        let start = self.call.growing?;
        (self.next_step(start, rounded) == Ok(Step::Enough)).then_some(start)
    }

    fn next_step(&self, start: u64, rounded: u64) -> Result<Step, String> {
        let (_, segment) = self.segments.range(..=start).next_back().ok_or("no range")?;
        let page = segment.page.ok_or("a fixed segment does not grow")?;
        let block = segment.blocks.get(&start).ok_or("no block to grow")?;
        let (address, missing) = match block.is_free() {
            true if block.size >= rounded => return Ok(Step::Enough),
            true => (start + block.size, rounded - block.size),
            false => (start, rounded),
        };
        let gap = segment.blocks.get(&address).filter(|block| !block.is_mapped);
        let gap = gap.ok_or("nothing to map behind the block")?;
        let size = missing.min(gap.size).next_multiple_of(page).min(gap.size);
        Ok(Step::Map { address, size })
    }

    pub(crate) fn pages_came(&mut self, address: u64, size: u64, stream: StreamId) -> Checked {
        ensure!(self.settings.expandable_segments, "new segments are fixed");
        let (rounded, requested_on) = self.call.request.ok_or("nothing requested memory")?;
        ensure_eq!(stream, requested_on, "the requesting stream");
        let kind = PoolKind::of(rounded);
        let step = Step::Map { address, size };
        let continues = |start: &u64| self.next_step(*start, rounded).as_ref() == Ok(&step);
        let start = match self.call.growing.filter(continues) {
            Some(start) => start,
            None => self.start_growing((address, size), rounded, stream)?,
        };
        ensure_eq!(self.next_step(start, rounded)?, Step::Map { address, size }, "pages");
        let (_, segment) = self.segments.range_mut(..=address).next_back().ok_or("no range")?;
        let gap = segment.blocks.insert(address, Block::free(size)).ok_or("no gap")?;
        if gap.size > size {
            segment.blocks.insert(address + size, Block::gap(gap.size - size));
        }
        self.call.growing = Some(segment.join_alike(address));
        change(&mut self.book.reserved_bytes, kind, signed(size));
        self.book.num_device_alloc += 1;
        Ok(())
    }

    /// Returns where growth starts, for the first pages of a growth. Adds a new range if no known range has
    /// room.
    fn start_growing(
        &mut self,
        (at, size): (u64, u64),
        rounded: u64,
        stream: StreamId,
    ) -> Result<u64, String> {
        let may_ignore_fit = self.call.waited && !self.searches_again();
        let found = self.call.found.flatten();
        ensure!(found.is_none() || may_ignore_fit, "grew beside a block that fits: {found:x?}");
        let compared = if self.searches_again() { size } else { self.segment_for(rounded) };
        let after = self.reserved() + compared;
        ensure!(self.limit.is_none_or(|limit| after <= limit), "{after} would pass the limit");
        let known = |(start, segment): &(&u64, &Segment)| at < *start + segment.size;
        let range = self.segments.range(..=at).next_back().filter(known);
        // Usual pages need a new range only if no range has room for them.
        let usual = rounded.next_multiple_of(self.page_for(rounded, false));
        let not_usual = size < usual || self.room(stream, rounded, false).is_some();
        let fine =
            range.map_or(self.may_map_finely(rounded) && not_usual, |(_, own)| own.is_fine());
        let is_known = range.is_some();
        if fine {
            self.check_that_usual_pages_do_not_fit(rounded, stream)?;
        }
        let room = self.room(stream, rounded, fine);
        if !is_known && (room.is_none() || self.call.waited) {
            self.add_range(at, rounded, stream, fine)?;
            return Ok(at);
        }
        room.ok_or_else(|| format!("a new range was due for {rounded} bytes"))
    }

    fn check_that_usual_pages_do_not_fit(&self, rounded: u64, stream: StreamId) -> Checked {
        ensure!(self.may_map_finely(rounded), "only large requests map fine pages");
        // A request that `throw_on_cudamalloc_oom` refuses releases nothing.
        if self.call.growing.is_none() && !self.settings.throw_on_device_oom {
            self.any_draining_or_idle()?;
        }
        let most = self.limit.unwrap_or(u64::MAX).min(self.total_bytes);
        let more = self.next_mapping(rounded, stream, false).unwrap_or(0);
        ensure!(self.reserved() + more > most, "{more} bytes of usual pages would have fit");
        Ok(())
    }

    fn add_range(&mut self, start: u64, rounded: u64, stream: StreamId, fine: bool) -> Checked {
        let (kind, page) = (PoolKind::of(rounded), self.page_for(rounded, fine));
        let size = self.reserve(page);
        ensure!(rounded <= size, "a range of {size} bytes for {rounded}");
        let before = self.segments.range(..start + size).next_back();
        ensure!(before.is_none_or(|(at, s)| at + s.size <= start), "ranges overlap");
        self.segments.insert(start, Segment::reserved(size, page, stream, kind, start));
        Ok(())
    }

    pub(crate) fn pages_went(&mut self, address: u64, size: u64, stream: StreamId) -> Checked {
        ensure!(self.call.releasing.is_some(), "pages go only when everything idle goes");
        let (&start, segment) =
            self.segments.range_mut(..=address).next_back().ok_or("before every range")?;
        ensure_eq!(segment.stream, stream, "the range serves another stream");
        let own = segment.blocks.range(..=address).next_back();
        let (at, block) = own.map(|(at, block)| (*at, *block)).ok_or("no block")?;
        let whole = segment.whole_pages(start, at, block);
        ensure_eq!(whole, Some((address, size)), "whole pages of the block at {at:#x}");
        segment.blocks.remove(&at);
        if at < address {
            segment.blocks.insert(at, Block::free(address - at));
        }
        let (end, block_end) = (address + size, at + block.size);
        if end < block_end {
            segment.blocks.insert(end, Block::free(block_end - end));
        }
        segment.blocks.insert(address, Block::gap(size));
        segment.join_alike(address);
        let (kind, is_empty) = (segment.kind, segment.blocks.len() == 1);
        if is_empty {
            self.segments.remove(&start);
        }
        change(&mut self.book.reserved_bytes, kind, -signed(size));
        self.book.num_device_free += 1;
        Ok(())
    }

    /// Returns the releases of all free memory, in order. The large kind is first; in each kind fixed
    /// segments are first, then pages. Both are ordered by stream, size and address of the block.
    pub(crate) fn idle_in_order(&self) -> Vec<Event> {
        let (mut idle, pool) = (Vec::new(), PoolId::DEFAULT);
        for (&start, segment) in &self.segments {
            let Segment { stream, kind, .. } = *segment;
            let rank = |is_pages: bool| (kind == PoolKind::Small, is_pages, stream.0);
            match segment.page {
                None if segment.is_idle() => {
                    let size_bytes = segment.size;
                    let action = Action::SegmentFree;
                    let event = Event { action, address: start, size_bytes, stream, pool };
                    idle.push(((rank(false), size_bytes, start), event));
                }
                None => {}
                Some(_) => {
                    for (&at, &block) in &segment.blocks {
                        let Some((address, size_bytes)) = segment.whole_pages(start, at, block)
                        else {
                            continue;
                        };
                        let action = Action::SegmentUnmap;
                        let event = Event { action, address, size_bytes, stream, pool };
                        idle.push(((rank(true), block.size, at), event));
                    }
                }
            }
        }
        idle.sort_by_key(|(order, _)| *order);
        idle.into_iter().map(|(_, event)| event).collect()
    }

    /// Returns true if mapping cannot continue, because the device has too little memory for the next pages
    /// or the request is larger than a range.
    pub(crate) fn cannot_map(
        &self,
        device_free: u64,
        rounded: u64,
        stream: StreamId,
        fine: bool,
    ) -> bool {
        let mapping = self.next_mapping(rounded, stream, fine);
        let range = self.reserve(self.page_for(rounded, false));
        rounded > range || mapping.is_some_and(|bytes| bytes > device_free)
    }

    /// Returns the bytes to map next for a request, if pages are missing.
    pub(crate) fn next_mapping(&self, rounded: u64, stream: StreamId, fine: bool) -> Option<u64> {
        let is_such = |start: &u64| {
            self.segments.range(..=*start).next_back().is_some_and(|(_, s)| s.is_fine() == fine)
        };
        let growing = self.call.growing.filter(is_such);
        let step = |start| self.next_step(start, rounded);
        match growing.or_else(|| self.room(stream, rounded, fine)).map(step) {
            Some(Ok(Step::Map { size, .. })) => Some(size),
            Some(_) => None,
            None => Some(rounded.next_multiple_of(self.page_for(rounded, fine))),
        }
    }

    /// Checks that the driver has exactly the mapped pages and the reserved ranges of the model. Before
    /// that, adds ranges without mapped pages to the model.
    pub(crate) fn check_device(&mut self, held: &HeldResources) -> Checked {
        for &(start, size) in &held.reservations {
            if !self.segments.contains_key(&start) {
                let (rounded, stream) = self.call.request.ok_or("nothing needed a new range")?;
                ensure!(self.settings.expandable_segments, "reserved for fixed segments");
                self.add_range(start, rounded, stream, false)?;
                ensure_eq!(self.segments[&start].size, size, "size of the new range");
            }
        }
        let ranges = self.segments.iter().filter(|(_, segment)| segment.page.is_some());
        let ranges: Vec<_> = ranges.map(|(start, segment)| (*start, segment.size)).collect();
        ensure_eq!(held.reservations, ranges, "reserved ranges");
        let fixed = self.segments.iter().filter(|(_, segment)| segment.page.is_none());
        let fixed: Vec<_> = fixed.map(|(start, segment)| (*start, segment.size)).collect();
        ensure_eq!(held.segments, fixed, "fixed segments");
        let mut pages = Vec::new();
        for (start, blocks) in self.segments.values().flat_map(Segment::runs) {
            let (_, segment) = self.segments.range(..=start).next_back().ok_or("no segment")?;
            let Some(page) = segment.page else { continue };
            let size: u64 = blocks.iter().map(|(_, block)| block.size).sum();
            ensure!(size.is_multiple_of(page), "part of a page at {start:#x}");
            pages.extend((0..size / page).map(|n| (start + n * page, page)));
        }
        ensure_eq!(held.mapped, pages, "mapped pages");
        ensure_eq!(held.pieces, pages.len() as u64, "physical pieces");
        Ok(())
    }

    /// Returns every free block of a stream and kind as (size, address, reach) with its segment, in the
    /// order of the search. The reach is the size including the gap behind the block.
    pub(crate) fn free_in_order(
        &self,
        stream: StreamId,
        kind: PoolKind,
    ) -> Vec<(u64, u64, u64, &Segment)> {
        let own = self.segments.values().filter(|s| s.stream == stream && s.kind == kind);
        let mut found: Vec<_> = own
            .flat_map(|segment| {
                let free = segment.blocks.iter().filter(|(_, block)| block.is_free());
                free.map(move |(&at, block)| {
                    let behind = segment.blocks.get(&(at + block.size));
                    let gap = behind.filter(|next| !next.is_mapped).map_or(0, |next| next.size);
                    (block.size, at, block.size + gap, segment)
                })
            })
            .collect();
        found.sort_by_key(|(size, at, ..)| (*size, *at));
        found
    }

    pub(crate) fn any_draining_or_idle(&self) -> Checked {
        let draining = self.bytes_in(None, BlockStateName::ActivePendingFree);
        ensure_eq!(draining, 0, "bytes that still drain");
        ensure_eq!(self.idle_in_order(), [], "idle and not released");
        Ok(())
    }
}
