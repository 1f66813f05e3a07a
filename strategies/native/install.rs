//! Installs a layout of another allocator: segments with live and free blocks at given offsets.
//!
//! For replays of recordings that start when blocks are already live. Each fixed segment is allocated
//! from the driver again, whole, in the order of the layout; the pages of expandable ones are mapped. The
//! driver determines the addresses; blocks keep their offsets. No other thread may use the engine during
//! the call.

use parking_lot::MutexGuard;

use super::cell::{HeapCell, HeapState};
use super::engine::Engine;
use super::expandable::PageSize;
use super::growth::{Growth, Refusal};
use super::policy::Plan;
use crate::allocator::{Allocation, Token};
use crate::error::{AllocError, DriverError, DriverErrorKind};
use crate::heap::BlockId;
use crate::history::{BlockLayout, BlockStateName, SegmentLayout};

/// A live block of a layout.
#[derive(Debug)]
pub struct Installed {
    /// Its address in the layout.
    pub address: u64,
    /// The block in this engine.
    pub allocation: Allocation,
}

/// The maximum number of unmapped holes in one reservation. Each hole costs a search of the heap.
const HOLES_MAX: usize = 4096;

impl Engine {
    /// Allocates the memory of a layout of the default pool from the driver, and its live blocks. The
    /// blocks must tile the segments, in address order.
    ///
    /// # Errors
    ///
    /// [`AllocError`] when the driver has not enough memory, or the layout has more streams or parts
    /// than are supported. Memory installed until then stays, free or live, until the engine is dropped.
    #[doc(hidden)]
    pub fn install(&self, layout: &[SegmentLayout]) -> Result<Vec<Installed>, AllocError> {
        let mut installed = Vec::new();
        for group in groups(layout, self.device.total_bytes) {
            let stream = group[0].stream;
            let is_per_thread = self.driver.is_per_thread_stream(stream);
            let cell = self.add_heap(stream, is_per_thread)?;
            let growth = &mut self.growth.lock();
            if group[0].expandable {
                self.install_pages(growth, cell, &group, &mut installed)?;
            } else {
                group.iter().try_for_each(|segment| {
                    self.install_segment(growth, cell, segment, &mut installed)
                })?;
            }
        }
        Ok(installed)
    }

    fn install_segment(
        &self,
        growth: &mut MutexGuard<'_, Growth>,
        cell: &HeapCell,
        segment: &SegmentLayout,
        installed: &mut Vec<Installed>,
    ) -> Result<(), AllocError> {
        let address = self.driver.allocate(segment.size_bytes)?;
        growth.segment_added(cell.pool(), segment.kind, segment.size_bytes);
        growth.numbers.insert(address, self.history.number_segment());
        self.addresses.add(address, segment.size_bytes, cell.number);
        let mut state = cell.lock();
        let clock = self.now();
        let slot = state.heap.add_segment(segment.kind, address, segment.size_bytes, clock);
        let here = moved(segment, address);
        let mut live = Vec::new();
        self.restore_segment(cell, &mut state, Some(slot), &here, false, &mut live);
        let blocks = segment.blocks.iter().filter(|b| b.state == BlockStateName::ActiveAllocated);
        let of = |(block, allocation): (&BlockLayout, _)| Installed {
            address: block.address,
            allocation,
        };
        installed.extend(blocks.zip(live).map(of));
        Ok(())
    }

    /// Installs the mapped ranges of one reservation. Maps the whole span as one block, splits it, and
    /// unmaps the holes of the layout.
    fn install_pages(
        &self,
        growth: &mut MutexGuard<'_, Growth>,
        cell: &HeapCell,
        runs: &[&SegmentLayout],
        installed: &mut Vec<Installed>,
    ) -> Result<(), AllocError> {
        let (first, last) = (runs[0], runs[runs.len() - 1]);
        let kind = first.kind;
        let span_bytes = last.address + last.size_bytes - first.address;
        let plan = Plan {
            requested_bytes: span_bytes,
            rounded_bytes: span_bytes,
            kind,
            segment_bytes: span_bytes,
            expandable: true,
            capturing: false,
        };
        let whole = match self.grow_expandable(growth, cell, &plan, PageSize::Usual)? {
            Ok(whole) => whole,
            Err(Refusal::Driver(error)) => return Err(error.into()),
            Err(_) => return Err(too_much("more address space than one reservation has").into()),
        };
        let base = whole.address();
        {
            let mut state = cell.lock();
            self.free_placeholder(cell, &mut state, &whole);
        }
        // Allocate everything except the holes, so that each hole is a free block of its own.
        let mut here = moved(first, base);
        here.size_bytes = span_bytes;
        here.blocks.clear();
        let mut holes = Vec::new();
        for run in runs {
            let from = base + (run.address - first.address);
            let behind = here.blocks.last().map_or(base, |block| block.address + block.size_bytes);
            if from > behind {
                let size_bytes = from - behind;
                let (address, state) = (behind, BlockStateName::Inactive);
                holes.push((address, size_bytes));
                here.blocks.push(BlockLayout { address, size_bytes, requested_bytes: 0, state });
            }
            here.blocks.extend(moved(run, from).blocks.into_iter().map(|block| BlockLayout {
                state: BlockStateName::ActiveAllocated,
                requested_bytes: block.requested_bytes.clamp(1, block.size_bytes),
                ..block
            }));
        }
        if holes.len() > HOLES_MAX {
            return Err(too_much("more gaps between pages than are looked for").into());
        }
        let mut live = Vec::new();
        {
            let mut state = cell.lock();
            let slot = state.heap.free_at(kind, base, span_bytes);
            self.restore_segment(cell, &mut state, slot, &here, false, &mut live);
        }
        for (address, size_bytes) in holes {
            let run = {
                let state = cell.lock();
                let slot = state.heap.free_at(kind, address, size_bytes);
                slot.and_then(|slot| state.heap.whole_pages(slot))
            };
            if let Some(run) = run {
                self.release_pages(growth, cell, &run)?;
            }
        }
        let blocks = runs.iter().flat_map(|run| &run.blocks);
        let mut state = cell.lock();
        for (block, allocation) in blocks.zip(live) {
            match block.state {
                BlockStateName::ActiveAllocated => {
                    installed.push(Installed { address: block.address, allocation });
                }
                _ => self.free_placeholder(cell, &mut state, &allocation),
            }
        }
        Ok(())
    }

    /// Frees a block that was allocated for this call only, unless it is no longer live.
    fn free_placeholder(&self, cell: &HeapCell, state: &mut HeapState, made: &Allocation) {
        let Token([index, generation, _]) = made.token();
        let id = BlockId { index, generation };
        if let Some(slot) = state.heap.live(id, made.address()) {
            self.free_slot(cell, state, slot);
        }
    }
}

fn too_much(what: &str) -> DriverError {
    DriverError::new(DriverErrorKind::OutOfMemory, "install", 0, what.to_owned())
}

/// Returns a copy of the segment at another address, with its blocks.
fn moved(segment: &SegmentLayout, address: u64) -> SegmentLayout {
    let mut here = SegmentLayout { address, ..segment.clone() };
    for block in &mut here.blocks {
        block.address = address + (block.address - segment.address);
    }
    here
}

/// Groups the segments of a layout in address order: each fixed one alone, mapped ranges with those that
/// may be of the same reservation.
pub fn groups(
    layout: &[SegmentLayout],
    device_total_bytes: u64,
) -> impl Iterator<Item = Vec<&SegmentLayout>> {
    let reserve_bytes = device_total_bytes.saturating_add(device_total_bytes / 8);
    let mut groups: Vec<Vec<&SegmentLayout>> = Vec::new();
    for segment in layout {
        if !segment.expandable {
            groups.push(vec![segment]);
            continue;
        }
        let same = groups.iter_mut().rev().find(|group| {
            let (first, last) = (group[0], group[group.len() - 1]);
            let end = segment.address + segment.size_bytes;
            last.expandable
                && (first.stream, first.kind) == (segment.stream, segment.kind)
                && end - first.address <= reserve_bytes
        });
        match same {
            Some(group) => group.push(segment),
            None => groups.push(vec![segment]),
        }
    }
    groups.into_iter()
}
