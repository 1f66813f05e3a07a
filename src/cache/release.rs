//! Giving idle segments back to the driver: everything, or oversize blocks only.
//!
//! Candidates are found heap by heap and released one by one: taken out under the heap's lock,
//! given to the driver with no heap locked, and put back as they were if the driver refuses.

use super::cell::HeapCell;
use super::engine::Engine;
use super::growth::Growth;
use super::policy::Plan;
use crate::error::DriverError;
use crate::heap::{BlockView, PageRun, Slot};
use crate::history::Action;
use crate::size::PoolKind;

/// An idle segment, as it was when it was seen.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate<'a> {
    pub(super) cell: &'a HeapCell,
    pub(super) slot: Slot,
    pub(super) block: BlockView,
}

/// Anything idle that can go back to the driver.
#[derive(Clone, Copy, Debug)]
enum Idle<'a> {
    Segment(Candidate<'a>),
    Pages { cell: &'a HeapCell, kind: PoolKind, run: PageRun },
}

impl Engine {
    /// Idle segments of a kind in (stream, size, address) order.
    pub(super) fn idle_segments(&self, kind: PoolKind) -> Vec<Candidate<'_>> {
        let mut found = Vec::new();
        for cell in self.heaps.by_stream() {
            let state = cell.lock();
            let idle = state
                .heap
                .free_blocks(kind)
                .filter(|(_, block)| !block.is_split && !block.is_expandable);
            found.extend(idle.map(|(slot, block)| Candidate { cell, slot, block }));
        }
        found
    }

    /// Waits for all events and releases every idle segment.
    ///
    /// # Errors
    ///
    /// [`DriverError`]; what was not released stays cached.
    pub fn empty_cache(&self) -> Result<(), DriverError> {
        let mut growth = self.growth.lock();
        growth.counters.num_sync_all_streams += 1;
        let drained = self.drain_events();
        self.release_idle(&mut growth)?;
        self.shared.imports.offer_leftovers()?;
        drained
    }

    /// Releases idle segments, large ones first.
    pub(super) fn release_idle(&self, growth: &mut Growth) -> Result<(), DriverError> {
        self.offer_leftovers(growth)?;
        let mut idle = Vec::new();
        for kind in PoolKind::RELEASE_ORDER {
            idle.extend(self.idle_segments(kind).into_iter().map(Idle::Segment));
            self.add_idle_pages(kind, &mut idle);
        }
        for one in idle {
            match one {
                Idle::Segment(candidate) => self.release(growth, &candidate)?,
                Idle::Pages { cell, kind, run } => self.release_pages(growth, cell, kind, &run)?,
            };
        }
        Ok(())
    }

    /// Whole pages inside free blocks of a kind, in (stream, size, address) order of the blocks.
    fn add_idle_pages<'e>(&'e self, kind: PoolKind, idle: &mut Vec<Idle<'e>>) {
        for cell in self.heaps.by_stream() {
            let state = cell.lock();
            let blocks = state.heap.free_blocks(kind).filter(|(_, block)| block.is_expandable);
            let runs = blocks.filter_map(|(slot, _)| state.heap.whole_pages(slot));
            idle.extend(runs.map(|run| Idle::Pages { cell, kind, run }));
        }
    }

    /// Releases one segment, unless a request took it meanwhile. Returns the bytes released.
    pub(super) fn release(
        &self,
        growth: &mut Growth,
        candidate: &Candidate<'_>,
    ) -> Result<u64, DriverError> {
        let Candidate { cell, slot, block } = *candidate;
        let segment = {
            let mut state = cell.lock();
            if !state.heap.is_idle_segment(slot, block.address, block.size_bytes) {
                return Ok(0);
            }
            state.heap.remove_segment(slot)
        };
        if let Some(addresses) = &self.addresses {
            addresses.remove(segment.address, segment.size_bytes);
        }
        if let Err(error) = self.driver.free(segment.address, segment.size_bytes) {
            if let Some(addresses) = &self.addresses {
                addresses.add(segment.address, segment.size_bytes, cell.number);
            }
            cell.lock().heap.restore_segment(segment);
            return Err(error);
        }
        growth.segment_went(segment.kind, segment.size_bytes);
        self.record(Action::SegmentFree, segment.address, segment.size_bytes, cell.stream);
        Ok(segment.size_bytes)
    }

    /// Releases oversize blocks of the request's own heap, if the settings know such: the smallest
    /// that is large enough, or from the largest down until they are. True when they were.
    ///
    /// Source: PyTorch's `max_split_size_mb`.
    pub(super) fn release_oversize(
        &self,
        growth: &mut Growth,
        cell: &HeapCell,
        plan: &Plan,
    ) -> Result<bool, DriverError> {
        let Some(max_split_bytes) = growth.max_split_bytes() else {
            return Ok(false);
        };
        let wanted = plan.rounded_bytes.max(max_split_bytes);
        let oversize: Vec<_> = {
            let state = cell.lock();
            let blocks = state.heap.free_blocks(plan.kind);
            let oversize = blocks.filter(|(_, b)| {
                b.size_bytes >= max_split_bytes && !b.is_split && !b.is_expandable
            });
            oversize.map(|(slot, block)| Candidate { cell, slot, block }).collect()
        };
        if let Some(enough) = oversize.iter().find(|c| c.block.size_bytes >= wanted) {
            return Ok(self.release(growth, enough)? > 0);
        }
        let mut released = 0;
        for candidate in oversize.iter().rev() {
            released += self.release(growth, candidate)?;
            if released >= wanted {
                break;
            }
        }
        Ok(released >= wanted)
    }
}
