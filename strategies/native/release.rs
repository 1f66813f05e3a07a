//! Releasing free segments and pages to the driver: all of them, or oversize blocks only.
//!
//! Candidates are found heap by heap and released one by one. Each segment is removed under the heap's
//! lock, announced to trackers and freed in the driver with no heap locked. If the driver fails, the
//! segment is restored unchanged.

use parking_lot::MutexGuard;

use super::cell::HeapCell;
use super::engine::Engine;
use super::growth::{Growth, Return};
use super::inspect::Releases;
use super::policy::Plan;
use crate::driver::synchronize_outside_captures;
use crate::error::{DriverError, DriverErrorKind};
use crate::heap::{BlockView, PageRun, Slot};
use crate::history::Action;
use crate::ids::PoolId;
use crate::size::PoolKind;

/// A free segment that may be released. `block` is a copy: another thread may have allocated from the
/// segment since.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate<'a> {
    pub(super) cell: &'a HeapCell,
    pub(super) slot: Slot,
    pub(super) block: BlockView,
}

/// Free memory that can be released to the driver.
#[derive(Clone, Copy, Debug)]
pub(super) enum Idle<'a> {
    Segment(Candidate<'a>),
    Pages { cell: &'a HeapCell, run: PageRun },
}

impl Engine {
    /// Returns the free fixed segments of a kind in these heaps. Within each heap they are in the order
    /// in which requests use them, the smallest first.
    pub(super) fn idle_segments<'a>(cells: &[&'a HeapCell], kind: PoolKind) -> Vec<Candidate<'a>> {
        let mut found = Vec::new();
        for cell in cells {
            let state = cell.lock();
            let idle = state
                .heap
                .free_blocks(kind)
                .filter(|(_, block)| !block.is_split && !block.is_expandable);
            found.extend(idle.map(|(slot, block)| Candidate { cell, slot, block }));
        }
        found
    }

    /// Releases the free memory of the default pool (large segments first), then of pools without users.
    /// Then, except under `compat:pytorch`, releases that of `also`, the private pool of a request,
    /// unless it is pinned or has its own allocator. Memory that captured streams may use is kept.
    ///
    /// # Errors
    ///
    /// [`DriverError`]; of the kind `CaptureActive` if a capture prevented the release of some memory.
    /// All other free memory was released then.
    pub(super) fn release_idle(
        &self,
        growth: &mut MutexGuard<'_, Growth>,
        also: PoolId,
    ) -> Result<(), DriverError> {
        self.release_leftovers(growth)?;
        let mut kept = Ok(());
        let released = self.release_from(growth, PoolId::DEFAULT, PoolKind::RELEASE_ORDER);
        note_capture_error(released, &mut kept)?;
        for pool in growth.pools.freeable() {
            // The lock was released for calls of pools' own allocators: the id may belong to another
            // pool now.
            if growth.pools.is_freeable(pool) {
                note_capture_error(self.release_pool_memory(growth, pool), &mut kept)?;
            }
        }
        if !growth.is_exact() && growth.pools.may_shrink(also) {
            note_capture_error(self.release_pool_memory(growth, also), &mut kept)?;
        }
        let freeable = growth.pools.freeable();
        self.forget_empty_pools(growth, freeable);
        kept
    }

    pub(super) fn release_pool_memory(
        &self,
        growth: &mut MutexGuard<'_, Growth>,
        pool: PoolId,
    ) -> Result<(), DriverError> {
        let [first, second] = PoolKind::RELEASE_ORDER;
        let released = self.release_from(growth, pool, [second, first]);
        Self::return_segments(growth);
        released
    }

    fn release_from(
        &self,
        growth: &mut MutexGuard<'_, Growth>,
        pool: PoolId,
        kinds: [PoolKind; 2],
    ) -> Result<(), DriverError> {
        let idle = self.idle_of_kinds(growth, pool, kinds);
        self.release_listed(growth, idle)
    }

    /// Returns the free memory of a pool, in the order in which it is released.
    pub(super) fn idle_memory(&self, growth: &Growth, pool: PoolId) -> Vec<Idle<'_>> {
        self.idle_of_kinds(growth, pool, PoolKind::RELEASE_ORDER)
    }

    fn idle_of_kinds(&self, growth: &Growth, pool: PoolId, kinds: [PoolKind; 2]) -> Vec<Idle<'_>> {
        let mut cells = self.heaps_of(growth, pool);
        // The thread may not wait for captured streams, so their memory cannot be released.
        cells.retain(|cell| !self.may_not_be_released(cell));
        let mut idle = Vec::new();
        for kind in kinds {
            idle.extend(Self::idle_segments(&cells, kind).into_iter().map(Idle::Segment));
            add_idle_pages(&cells, kind, &mut idle);
        }
        idle
    }

    /// Releases this free memory, except what requests have taken since.
    pub(super) fn release_listed(
        &self,
        growth: &mut MutexGuard<'_, Growth>,
        idle: Vec<Idle<'_>>,
    ) -> Result<(), DriverError> {
        let mut kept = Ok(());
        for one in idle {
            note_capture_error(self.release_one(growth, &one, u64::MAX), &mut kept)?;
        }
        kept
    }

    /// Releases a free segment, or pages of a free block: as many as `wanted_bytes` need.
    pub(super) fn release_one(
        &self,
        growth: &mut MutexGuard<'_, Growth>,
        one: &Idle<'_>,
        wanted_bytes: u64,
    ) -> Result<(), DriverError> {
        match one {
            Idle::Segment(candidate) => self.release(growth, candidate).map(drop),
            Idle::Pages { cell, run } => {
                let run = run.last_bytes(wanted_bytes);
                self.release_pages(growth, cell, &run).map(drop)
            }
        }
    }

    /// Releases one segment. Returns the number of bytes released: 0 if a request has taken the segment
    /// or `may_release` forbids it.
    pub(super) fn release(
        &self,
        growth: &mut MutexGuard<'_, Growth>,
        candidate: &Candidate<'_>,
    ) -> Result<u64, DriverError> {
        let Candidate { cell, slot, block } = *candidate;
        let segment = {
            let mut state = cell.lock();
            let is_idle = state.heap.is_idle_segment(slot, block.address, block.size_bytes);
            if !is_idle || !self.history.may_release(block.address, block.size_bytes) {
                return Ok(0);
            }
            state.heap.remove_segment(slot)
        };
        self.addresses.remove(segment.address, segment.size_bytes);
        let (address, size_bytes, stream) = (segment.address, segment.size_bytes, cell.stream());
        // Recorded first: another thread may get the address as soon as the driver has freed it.
        self.record(Action::SegmentFree, address, size_bytes, cell);
        self.announce(growth, Action::SegmentFree, address, size_bytes, cell);
        let freed = match growth.pools.allocator_of(cell.pool()) {
            None => self
                .wait_for_peers(growth, cell)
                .and_then(|()| self.driver.free(address, size_bytes)),
            Some(to) => {
                growth.returns.push(Return { to, address, size_bytes, stream });
                Ok(())
            }
        };
        if let Err(error) = freed {
            self.addresses.add(segment.address, segment.size_bytes, cell.number);
            self.announce(growth, Action::SegmentAlloc, address, size_bytes, cell);
            self.record(Action::SegmentAlloc, address, size_bytes, cell);
            cell.lock().heap.restore_segment(segment);
            return Err(error);
        }
        growth.segment_removed(cell.pool(), segment.kind, size_bytes);
        growth.numbers.remove(&address);
        self.note(cell, || format!("freed a segment of {size_bytes} bytes at {address:#x}"));
        Ok(size_bytes)
    }

    /// Waits for the stream of a free fixed segment if other devices have access to it. The driver's `free`
    /// waits for the work of its own device only. A copy that another device makes is work of that
    /// device: the segment's stream has to wait for it before the segment is free, so this wait covers it.
    ///
    /// # Errors
    ///
    /// [`DriverError`]; of the kind `CaptureActive` if a capture prevents the wait.
    ///
    /// Source: issue 196257 of PyTorch, whose allocator does not wait.
    fn wait_for_peers(&self, growth: &Growth, cell: &HeapCell) -> Result<(), DriverError> {
        if growth.peers.is_empty() || growth.is_exact() {
            return Ok(());
        }
        self.wait_for_free_memory(cell)
    }

    /// Waits for all work on fixed segments before the allocator is dropped, as `wait_for_peers` does for one
    /// segment. An error is ignored, because a drop cannot report it.
    pub(super) fn wait_for_peers_of_all(&self) {
        let waits = {
            let growth = self.growth.lock();
            !growth.peers.is_empty() && !growth.is_exact()
        };
        if waits {
            let _ = synchronize_outside_captures(&*self.driver);
        }
    }

    /// Releases oversize blocks of the request's own heap, if `max_split_size_mb` is set. Releases the
    /// smallest one that is large enough, or otherwise from the largest down until the sum is large
    /// enough. Returns true if the released bytes are enough.
    ///
    /// Source: PyTorch's `max_split_size_mb`.
    pub(super) fn release_oversize(
        &self,
        growth: &mut MutexGuard<'_, Growth>,
        cell: &HeapCell,
        plan: &Plan,
    ) -> Result<bool, DriverError> {
        let Some(max_split_bytes) = growth.settings.max_split_bytes else { return Ok(false) };
        let wanted = plan.rounded_bytes.max(max_split_bytes);
        let mut released = 0;
        let done = Self::oversize(growth, cell, plan).iter().try_for_each(|candidate| {
            if released < wanted {
                released += self.release(growth, candidate)?;
            }
            Ok(())
        });
        if done.is_ok() {
            self.note_step("max_split_size_mb", released);
        }
        Self::return_segments(growth);
        done.map(|()| released >= wanted)
    }

    /// Predicts [`release_oversize`](Self::release_oversize). `suffices` is what that would return. Changes
    /// nothing.
    pub(super) fn predict_oversize(growth: &Growth, cell: &HeapCell, plan: &Plan) -> Releases {
        let mut releases = Releases::default();
        let Some(max_split_bytes) = growth.settings.max_split_bytes else { return releases };
        let wanted = plan.rounded_bytes.max(max_split_bytes);
        for candidate in Self::oversize(growth, cell, plan) {
            if releases.bytes < wanted {
                releases.add(&candidate.block);
            }
        }
        releases.suffices = releases.bytes >= wanted;
        releases
    }

    /// Returns the candidates of [`release_oversize`](Self::release_oversize), in the order of their
    /// release.
    fn oversize<'a>(growth: &Growth, cell: &'a HeapCell, plan: &Plan) -> Vec<Candidate<'a>> {
        let max_split_bytes = match growth.settings.max_split_bytes {
            Some(bytes) if !growth.pools.is_pinned(cell.pool()) => bytes,
            _ => return Vec::new(),
        };
        let wanted = plan.rounded_bytes.max(max_split_bytes);
        let mut oversize = Self::idle_segments(&[cell], plan.kind);
        oversize.retain(|candidate| candidate.block.size_bytes >= max_split_bytes);
        if let Some(enough) = oversize.iter().position(|c| c.block.size_bytes >= wanted) {
            return vec![oversize.swap_remove(enough)];
        }
        oversize.reverse();
        oversize
    }
}

impl Releases {
    pub(super) fn add(&mut self, block: &BlockView) {
        self.addresses.push(block.address);
        self.bytes += block.size_bytes;
    }
}

/// Stores an error that a capture caused in `kept` and returns `Ok`, so that the caller releases the
/// rest. Returns any other error.
fn note_capture_error(
    released: Result<(), DriverError>,
    kept: &mut Result<(), DriverError>,
) -> Result<(), DriverError> {
    match released {
        Err(error) if error.kind() == DriverErrorKind::CaptureActive => *kept = Err(error),
        released => released?,
    }
    Ok(())
}

/// Adds the whole pages inside free blocks of a kind to `idle`, smallest block first within a heap.
fn add_idle_pages<'a>(cells: &[&'a HeapCell], kind: PoolKind, idle: &mut Vec<Idle<'a>>) {
    for cell in cells {
        let state = cell.lock();
        let blocks = state.heap.free_blocks(kind).filter(|(_, block)| block.is_expandable);
        let runs = blocks.filter_map(|(slot, _)| state.heap.whole_pages(slot));
        idle.extend(runs.map(|run| Idle::Pages { cell, run }));
    }
}
