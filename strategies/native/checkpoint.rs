//! Allocation at exact addresses, and restoring an earlier state of a private pool.
//!
//! A checkpoint is the layout of a pool. Restoring it frees every live block of the pool. It then
//! allocates the checkpoint's live blocks in address order at their recorded addresses and sizes; the
//! rules for splitting do not apply. Everything is checked first: a checkpoint that does not fit changes
//! nothing. No driver call is made.
//!
//! A block that the pool has lent to a request of the default pool (`use_on_oom`) belongs to that request.
//! So a checkpoint contains it as free, and a restore leaves it as it is. Under `compat:pytorch` lent
//! blocks count as the pool's own, as in PyTorch.
//!
//! Source: PyTorch's checkpoints for CUDA graph trees, and its exact-address allocation.

use super::cell::{HeapCell, HeapGuard, HeapState};
use super::engine::Engine;
use super::growth::Growth;
use super::inspect::add_segments;
use super::pools::LentBlock;
use crate::allocator::{Allocation, Checkpoints, Freed, PoolCheckpoint, Request, Restored};
use crate::error::{AllocError, PoolError};
use crate::heap::{AllocatedBlock, FitRules, Heap, Slot, SplitChange};
use crate::history::{BlockLayout, BlockStateName, SegmentLayout};
use crate::ids::{PoolId, StreamId};
use crate::size::{MIN_BLOCK_BYTES, PoolKind};

impl Engine {
    /// Serves a request that names an exact address.
    pub(super) fn allocate_at(
        &self,
        request: Request,
        address: u64,
    ) -> Result<Allocation, AllocError> {
        let stream = request.stream;
        let pool = self.route(stream)?.to.map_or(PoolId::DEFAULT, |heaps| heaps.pool);
        let growth = self.growth.lock();
        let rounded_bytes = growth.policy_of(pool).roundup.round(request.bytes);
        let kinds = [PoolKind::of(rounded_bytes)];
        let found =
            self.place(&growth, pool, stream, &kinds, address, rounded_bytes, request.bytes);
        found.ok_or(AllocError::NoBlockAt { address, rounded_bytes, stream })
    }

    /// Allocates exactly `size_bytes` at `address` from a free block of a pool, as restoring a checkpoint
    /// does. For replays of recordings. Returns `None` if no free block contains that range, or it is not
    /// aligned to 512 B.
    #[must_use]
    pub fn replace(
        &self,
        pool: PoolId,
        stream: StreamId,
        address: u64,
        size_bytes: u64,
    ) -> Option<Allocation> {
        let growth = self.growth.lock();
        let kinds = [PoolKind::Small, PoolKind::Large];
        self.place(&growth, pool, stream, &kinds, address, size_bytes, size_bytes)
    }

    /// Allocates `size_bytes` at `address` if the range is aligned and in a free block of these kinds.
    #[expect(clippy::too_many_arguments, reason = "a request with an address, and where to look")]
    fn place(
        &self,
        growth: &Growth,
        pool: PoolId,
        stream: StreamId,
        kinds: &[PoolKind],
        address: u64,
        size_bytes: u64,
        requested_bytes: u64,
    ) -> Option<Allocation> {
        let whole = |bytes: u64| bytes.is_multiple_of(MIN_BLOCK_BYTES);
        if !whole(address) || !whole(size_bytes) || size_bytes == 0 {
            return None;
        }
        let cells = self.heaps_of(growth, pool);
        let cell = cells.into_iter().find(|cell| cell.stream() == stream)?;
        let mut state = cell.lock();
        if state.policy.asleep {
            return None;
        }
        let mut found = kinds.iter().filter_map(|&k| state.heap.free_at(k, address, size_bytes));
        let slot = found.next()?;
        let placed =
            place_in(&mut state.heap, slot, address, size_bytes, requested_bytes, self.now());
        let made = self.record_allocated(cell, &mut state, &placed, requested_bytes);
        let captured = self.driver.is_per_thread_stream(stream) && self.is_capturing(stream);
        self.note_own_use(cell, &mut state.heap, placed.slot, captured);
        Some(made)
    }

    /// Frees the live blocks of a heap, except those that the pool has lent.
    fn free_all(
        &self,
        cell: &HeapCell,
        state: &mut HeapGuard<'_>,
        lent: &[LentNow],
        freed: &mut Vec<Freed>,
    ) {
        for slot in state.heap.live_blocks() {
            let address = state.heap.view(slot).address;
            if is_lent(lent, address) {
                continue;
            }
            freed.push(Freed { address, size_bytes: state.heap.requested_bytes(slot) });
            state.heap.forget_uses(slot);
            self.free_slot(cell, state, slot);
        }
    }

    /// Allocates the live blocks of a recorded segment and adds them to `live`. The free block `next`
    /// contains the segment's range, or is `None` if lent blocks lie in it. With `exact`, the segment's free
    /// blocks are allocated too and freed at the end, so that they are counted as in PyTorch.
    pub(super) fn restore_segment(
        &self,
        cell: &HeapCell,
        state: &mut HeapGuard<'_>,
        mut next: Option<Slot>,
        segment: &SegmentLayout,
        exact: bool,
        live: &mut Vec<Allocation>,
    ) {
        let mut placed = Vec::new();
        for block in &segment.blocks {
            let wanted = block.state == BlockStateName::ActiveAllocated;
            if !wanted && !exact {
                continue;
            }
            let (address, size_bytes) = (block.address, block.size_bytes);
            let here = next.filter(|slot| state.heap.contains(*slot, address, size_bytes));
            let found = || state.heap.free_at(segment.kind, address, size_bytes);
            let Some(slot) = here.or_else(found) else {
                debug_assert!(false, "the range was checked");
                break;
            };
            let requested = if wanted && !exact { block.requested_bytes } else { block.size_bytes };
            let (heap, now) = (&mut state.heap, self.now());
            let out = place_in(heap, slot, address, size_bytes, requested, now);
            next = heap.free_behind(out.slot);
            placed.push((out, requested, wanted));
        }
        if !exact {
            // A free part that exists only until the next block is allocated must not be counted as an
            // inactive split. So the last block reports the net change, and the others report none.
            let parts = placed.iter_mut().map(|(out, ..)| std::mem::take(&mut out.inactive));
            let sum = parts.fold(SplitChange::default(), SplitChange::plus);
            if let Some((last, ..)) = placed.last_mut() {
                last.inactive = sum;
            }
        }
        let mut free = Vec::new();
        for (out, requested, wanted) in placed {
            let made = self.record_allocated(cell, state, &out, requested);
            if wanted {
                self.note_own_use(cell, &mut state.heap, out.slot, true);
                live.push(made);
            } else {
                free.push(out.slot);
            }
        }
        for slot in free {
            self.free_slot(cell, state, slot);
        }
    }
}

/// Allocates `size_bytes` at `address` from the free block at `slot`, which contains that range. The
/// bytes before `address` are split off and stay free. The result reports the net change in inactive
/// splits of all these steps.
fn place_in(
    heap: &mut Heap,
    slot: Slot,
    address: u64,
    size_bytes: u64,
    requested_bytes: u64,
    clock: u64,
) -> AllocatedBlock {
    const RULES: &FitRules = &FitRules::CUT;
    let before_bytes = address - heap.view(slot).address;
    if before_bytes == 0 {
        return heap.allocate(slot, size_bytes, requested_bytes, RULES, clock);
    }
    let before = heap.allocate(slot, before_bytes, before_bytes, RULES, clock);
    let slot = heap.free_behind(before.slot).unwrap_or(slot);
    let out = heap.allocate(slot, size_bytes, requested_bytes, RULES, clock);
    let freed = heap.free(before.slot, clock);
    let inactive = before.inactive.plus(out.inactive).plus(freed.inactive);
    AllocatedBlock { inactive, ..out }
}

fn check_nothing_drains(pool: PoolId, segments: &[SegmentLayout]) -> Result<(), PoolError> {
    let mut blocks = segments.iter().flat_map(|segment| &segment.blocks);
    match blocks.find(|block| block.state == BlockStateName::ActivePendingFree) {
        Some(block) => Err(PoolError::Draining { pool, address: block.address }),
        None => Ok(()),
    }
}

/// A lent block that is live.
#[derive(Clone, Copy, Debug)]
struct LentNow {
    address: u64,
    size_bytes: u64,
}

fn is_lent(lent: &[LentNow], address: u64) -> bool {
    lent.binary_search_by_key(&address, |block| block.address).is_ok()
}

/// Returns the live blocks of the pool that belong to requests of the default pool, in address order. The
/// heaps are locked and in the order of their numbers.
fn lent_now(
    growth: &Growth,
    pool: PoolId,
    cells: &[&HeapCell],
    states: &[HeapGuard<'_>],
) -> Vec<LentNow> {
    if growth.is_exact() {
        return Vec::new();
    }
    let live = |lent: &LentBlock| {
        let at = cells.binary_search_by_key(&lent.heap, |cell| cell.number).ok()?;
        let slot = states[at].heap.live(lent.id, lent.address)?;
        let size_bytes = states[at].heap.view(slot).size_bytes;
        Some(LentNow { address: lent.address, size_bytes })
    };
    let mut found: Vec<_> = growth.pools.lent(pool).iter().filter_map(live).collect();
    found.sort_unstable_by_key(|block| block.address);
    found
}

/// Fails if a live block of the checkpoint overlaps a lent block. A pool with a checkpoint lends nothing
/// further, so this needs a checkpoint that was made by hand.
fn check_beside_lent(checkpoint: &PoolCheckpoint, lent: &[LentNow]) -> Result<(), PoolError> {
    let mut blocks = checkpoint.segments.iter().flat_map(|segment| &segment.blocks);
    let overlaps = |block: &&BlockLayout| {
        let end = block.address + block.size_bytes;
        let before = lent.partition_point(|lent| lent.address < end).checked_sub(1);
        let reaches = |at: usize| block.address < lent[at].address + lent[at].size_bytes;
        block.state == BlockStateName::ActiveAllocated && before.is_some_and(reaches)
    };
    match blocks.find(overlaps) {
        Some(&BlockLayout { address, size_bytes, .. }) => {
            Err(PoolError::NotInPool { pool: checkpoint.pool, address, size_bytes })
        }
        None => Ok(()),
    }
}

/// Fails if a live block of the heap is used, outside of captures, by another stream or by its own
/// per-thread default stream. Freeing such a block now would allow its reuse while that work runs.
fn check_used_by_no_other_stream(
    pool: PoolId,
    state: &HeapState,
    lent: &[LentNow],
) -> Result<(), PoolError> {
    let heap = &state.heap;
    let used = |slot: &Slot| {
        !is_lent(lent, heap.view(*slot).address) && heap.uses(*slot).any(|by| !by.captured)
    };
    match heap.live_blocks().into_iter().find(used) {
        Some(slot) => Err(PoolError::UsedElsewhere { pool, address: heap.view(slot).address }),
        None => Ok(()),
    }
}

/// Checks that the checkpoint's blocks tile its segments, and that each of these lies in a segment that the
/// pool has now.
fn check_fits(checkpoint: &PoolCheckpoint, now: &[SegmentLayout]) -> Result<(), PoolError> {
    let end = |segment: &SegmentLayout| segment.address.checked_add(segment.size_bytes);
    let mut last_end = 0;
    for segment in &checkpoint.segments {
        let (pool, address, size_bytes) = (checkpoint.pool, segment.address, segment.size_bytes);
        let refuse = || PoolError::NotInPool { pool, address, size_bytes };
        let mut at = address;
        for block in &segment.blocks {
            let whole = block.size_bytes > 0 && block.size_bytes.is_multiple_of(MIN_BLOCK_BYTES);
            let has_request = (1..=block.size_bytes).contains(&block.requested_bytes);
            let free = block.state == BlockStateName::Inactive;
            if block.address != at || !whole || !(has_request || free) {
                return Err(refuse());
            }
            at = at.checked_add(block.size_bytes).ok_or_else(refuse)?;
        }
        let holds = |has: &&SegmentLayout| {
            has.stream == segment.stream
                && has.kind == segment.kind
                && has.address <= address
                && end(has) >= Some(at)
        };
        let tiled = Some(at) == end(segment) && at > address;
        let sound = tiled && address >= last_end && address.is_multiple_of(MIN_BLOCK_BYTES);
        if !sound || now.iter().find(holds).is_none() {
            return Err(refuse());
        }
        last_end = at;
    }
    Ok(())
}

impl Checkpoints for Engine {
    fn checkpoint(&self, pool: PoolId) -> Result<PoolCheckpoint, PoolError> {
        let _context = self.history.of_free();
        self.finish_deferred()?;
        let mut growth = self.growth.lock();
        growth.pools.in_use(pool)?;
        growth.pools.check_awake(pool)?;
        let mut cells = self.heaps_of(&growth, pool);
        cells.sort_by_key(|cell| cell.number);
        let states: Vec<_> = cells.iter().map(|cell| cell.lock()).collect();
        let mut segments = Vec::new();
        cells
            .iter()
            .zip(&states)
            .for_each(|(cell, state)| add_segments(cell, state, &mut segments));
        let lent = lent_now(&growth, pool, &cells, &states);
        drop(states);
        SegmentLayout::sort(&mut segments);
        check_nothing_drains(pool, &segments)?;
        for block in segments.iter_mut().flat_map(|segment| &mut segment.blocks) {
            if is_lent(&lent, block.address) {
                (block.state, block.requested_bytes) = (BlockStateName::Inactive, 0);
            }
        }
        growth.pools.pin(pool);
        Ok(PoolCheckpoint { pool, segments })
    }

    fn restore(&self, checkpoint: &PoolCheckpoint) -> Result<Restored, PoolError> {
        let pool = checkpoint.pool;
        let _context = self.history.of_free();
        self.finish_deferred()?;
        let mut growth = self.growth.lock();
        growth.pools.in_use(pool)?;
        growth.pools.check_awake(pool)?;
        let mut cells = self.heaps_of(&growth, pool);
        cells.sort_by_key(|cell| cell.number);
        // All heaps of the pool stay locked, so that nothing changes between the checks and the restore.
        let mut states: Vec<_> = cells.iter().map(|cell| cell.lock()).collect();
        let held = || cells.iter().zip(&states);
        let mut now = Vec::new();
        held().for_each(|(cell, state)| add_segments(cell, state, &mut now));
        SegmentLayout::sort(&mut now);
        check_nothing_drains(pool, &now)?;
        let lent = lent_now(&growth, pool, &cells, &states);
        held().try_for_each(|(_, state)| check_used_by_no_other_stream(pool, state, &lent))?;
        check_fits(checkpoint, &now)?;
        check_beside_lent(checkpoint, &lent)?;
        growth.pools.pin(pool);
        let mut restored = Restored::default();
        let exact = growth.is_exact();
        for (cell, state) in cells.iter().zip(&mut states) {
            self.free_all(cell, state, &lent, &mut restored.freed);
            let own = checkpoint.segments.iter().filter(|s| s.stream == cell.stream());
            for segment in own {
                let next = state.heap.free_at(segment.kind, segment.address, segment.size_bytes);
                self.restore_segment(cell, state, next, segment, exact, &mut restored.live);
            }
        }
        Ok(restored)
    }
}
