//! Read-only views: layout, invariants, and the prediction of a request.

use std::sync::Arc;

use super::cell::{HeapCell, HeapState};
use super::engine::Engine;
use super::growth::Refusal;
use super::policy::Plan;
use crate::allocator::{Caching, Recording, Request};
use crate::heap::{BlockState, Broken, Growing};
use crate::history::{
    Action, BlockLayout, BlockStateName, Event, History, SegmentLayout, Snapshot,
};
use crate::ids::PoolId;
use crate::size::REQUEST_MAX_BYTES;

/// How many times at most a snapshot is retried while other threads have frees that are not recorded yet.
const LATE_MAX: u32 = 10_000;

/// The first step that the next allocation of a request would take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prediction {
    /// Cached memory serves the request; its block starts at this address.
    Hit(u64),
    /// The collector runs and releases segments.
    Collect(Collection),
    /// The limit forbids the segment, or the device has no room for it. Contains the oversize blocks of its
    /// stream that the request would release first; none without `max_split_size_mb`.
    Limit(Releases),
    /// A segment or pages are requested from the driver.
    Grow,
    /// Nothing is released or allocated: for zero bytes, for more than the largest request, in a tag that
    /// is not awake, and if `throw_on_cudamalloc_oom` rejects the request.
    Refuse,
}

/// The segments that one step of a request would release.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Releases {
    /// The addresses of the segments, in the order of their release.
    pub addresses: Vec<u64>,
    /// Their total bytes.
    pub bytes: u64,
    /// True if the request can be served afterwards, so that nothing more is released.
    pub suffices: bool,
}

/// The result of a run of the collector.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Collection {
    /// The segments that it would release.
    pub releases: Releases,
    /// The number of free fixed segments of the default pool, which an explicit `empty_cache` would
    /// release.
    pub idle_segments: usize,
}

impl Engine {
    /// Predicts the first step of allocating `request` in a pool. Changes nothing.
    #[must_use]
    pub fn predict(&self, pool: PoolId, request: Request) -> Prediction {
        if !(1..=REQUEST_MAX_BYTES).contains(&request.bytes) {
            return Prediction::Refuse;
        }
        let growth = self.growth.lock();
        let policy = growth.policy_of(pool);
        if policy.asleep {
            return Prediction::Refuse;
        }
        let plan = Plan::new(request.bytes, &policy, &growth.settings);
        let heaps = self.heaps_of(&growth, pool);
        let cell = heaps.iter().find(|cell| cell.stream() == request.stream);
        let fit = cell.and_then(|cell| {
            let heap = &cell.lock().heap;
            let slot = heap.best_fit(plan.kind, plan.rounded_bytes, &policy.rules)?;
            Some(heap.view(slot).address)
        });
        if let Some(address) = fit {
            return Prediction::Hit(address);
        }
        let growing = cell.filter(|_| plan.expandable).and_then(|cell| growing(cell, &plan));
        let needed_bytes = match &growing {
            Some((Growing::Map(run), _)) => run.size_bytes,
            Some((Growing::Enough(_), _)) => 0,
            None if plan.expandable => self.least_growth(&growth, pool, &plan).bytes,
            None => plan.segment_bytes,
        };
        let compared_bytes =
            if growth.is_exact() || !plan.expandable { plan.segment_bytes } else { needed_bytes };
        let free_bytes = self.driver.memory_info().map_or(u64::MAX, |info| info.free_bytes);
        let is_refused = |released_bytes: u64| {
            growth.refuses(compared_bytes, released_bytes).is_some()
                || needed_bytes > free_bytes.saturating_add(released_bytes)
        };
        match self.predict_collection(&growth) {
            Some(mut collection) => {
                collection.releases.suffices = !is_refused(collection.releases.bytes);
                Prediction::Collect(collection)
            }
            None if matches!(growth.refuses(compared_bytes, 0), Some(Refusal::Forbidden)) => {
                Prediction::Refuse
            }
            None if is_refused(0) => {
                let oversize = cell.map(|cell| Self::predict_oversize(&growth, cell, &plan));
                let mut oversize = oversize.unwrap_or_default();
                oversize.suffices = oversize.suffices && !is_refused(oversize.bytes);
                Prediction::Limit(oversize)
            }
            None => match growing {
                Some((Growing::Enough(_), address)) => Prediction::Hit(address),
                _ => Prediction::Grow,
            },
        }
    }

    /// Returns true if a full release would release memory of the pool, if the pool may be released.
    #[must_use]
    pub fn has_idle_memory(&self, pool: PoolId) -> bool {
        !self.idle_memory(&self.growth.lock(), pool).is_empty()
    }

    fn snapshot_unless(&self, is_early: impl FnOnce() -> bool) -> Option<Snapshot> {
        let growth = self.growth.lock();
        let cells = self.all_heaps(&growth);
        let states: Vec<_> = cells.iter().map(|cell| (cell, cell.lock())).collect();
        if is_early() {
            return None;
        }
        let mut segments = Vec::new();
        states.iter().for_each(|(cell, state)| add_segments(cell, state, &mut segments));
        let (captured, limit_bytes) = (self.history.capture(), growth.limit_bytes);
        let numbers = growth.numbers.clone();
        drop(states);
        drop(growth);
        Some(self.history.snapshot_of(segments, captured, limit_bytes).numbered_by(&numbers))
    }

    /// Returns the segments of these heaps, in address order. The caller holds the growth lock.
    pub(super) fn layout_of(&self, cells: &[&HeapCell]) -> Vec<SegmentLayout> {
        let mut segments = Vec::new();
        cells.iter().for_each(|cell| add_segments(cell, &cell.lock(), &mut segments));
        SegmentLayout::sort(&mut segments);
        segments
    }

    /// Checks the invariants of every heap. For tests: visits all blocks.
    ///
    /// # Errors
    ///
    /// The first invariant that is broken.
    pub fn check(&self) -> Result<(), Broken> {
        let _growth = self.growth.lock();
        self.heaps.all().try_for_each(|cell| cell.lock().heap.check())
    }

    /// Returns the bytes of metadata and the number of blocks over all heaps, for tests of memory use.
    #[must_use]
    pub fn metadata(&self) -> (usize, usize) {
        self.heaps.all().fold((0, 0), |(bytes, blocks), cell| {
            let state = cell.lock();
            (bytes + state.heap.metadata_bytes(), blocks + state.heap.block_count())
        })
    }
}

/// Adds the segments of a heap to `into`. The caller holds the heap's lock.
pub(super) fn add_segments(cell: &HeapCell, state: &HeapState, into: &mut Vec<SegmentLayout>) {
    for head in state.heap.segment_heads() {
        let first = state.heap.view(head);
        let blocks: Vec<_> = state
            .heap
            .segment_blocks(head)
            .map(|block| BlockLayout {
                address: block.address,
                size_bytes: block.size_bytes,
                requested_bytes: block.requested_bytes,
                state: match block.state {
                    BlockState::Live => BlockStateName::ActiveAllocated,
                    BlockState::Draining => BlockStateName::ActivePendingFree,
                    BlockState::Free | BlockState::Vacant | BlockState::Unmapped => {
                        BlockStateName::Inactive
                    }
                },
            })
            .collect();
        into.push(SegmentLayout {
            address: first.address,
            size_bytes: blocks.iter().map(|block| block.size_bytes).sum(),
            stream: cell.stream(),
            kind: first.kind,
            pool: cell.pool(),
            expandable: first.is_expandable,
            asleep: state.policy.asleep,
            blocks,
        });
    }
}

impl Drop for Engine {
    /// Waits for pending events. Then releases every segment, including those with live blocks: their
    /// allocations can no longer be freed.
    fn drop(&mut self) {
        // Open scopes would prevent the wait for the device. During a capture all are left open.
        if !self.scopes.any_capture() {
            self.scopes.close_all();
        }
        // Errors are ignored here, because a drop cannot report them. Memory that the driver fails to
        // release leaks.
        let _ = self.drain_events(None);
        self.wait_for_peers_of_all();
        for segment in self.layout() {
            let SegmentLayout { address, size_bytes, stream, pool, .. } = segment;
            // The memory of a tag that sleeps was announced when it was unmapped.
            if !self.growth.lock().pools.is_mapped(pool) {
                continue;
            }
            let action =
                if segment.expandable { Action::SegmentUnmap } else { Action::SegmentFree };
            self.history.announce(Event { action, address, size_bytes, stream, pool });
            if segment.expandable {
                continue;
            }
            let own = self.growth.lock().pools.allocator_of(pool);
            match own {
                None => drop(self.driver.free(address, size_bytes)),
                Some(own) => own.free(address, size_bytes, stream),
            }
        }
        self.drop_pages();
        self.drop_backups();
        self.events.destroy(&*self.driver);
    }
}

/// Returns how an expandable segment would grow for a request, and the address of its block.
fn growing(cell: &HeapCell, plan: &Plan) -> Option<(Growing, u64)> {
    let heap = &cell.lock().heap;
    let start = heap.room_for(plan.kind, plan.rounded_bytes, false)?;
    Some((heap.plan_growth(start, plan.rounded_bytes)?, heap.view(start).address))
}

impl Recording for Engine {
    fn history(&self) -> &Arc<History> {
        &self.history
    }

    /// See [`Recording::snapshot`](crate::allocator::Recording::snapshot). Holds the growth lock and
    /// then the locks of all heaps. This cannot deadlock, because only a thread that holds the growth lock
    /// may wait for the lock of a second heap.
    fn snapshot(&self) -> Snapshot {
        // Frees are recorded after their heap was unlocked. No lock is held while this waits for them,
        // because a stack provider may allocate. The number of tries is bounded, because stack providers
        // of two threads may both take a snapshot and wait for each other.
        let taken = (0..LATE_MAX).find_map(|_| {
            let taken = self.snapshot_unless(|| self.history.any_late());
            if taken.is_none() {
                std::thread::yield_now();
            }
            taken
        });
        taken.or_else(|| self.snapshot_unless(|| false)).unwrap_or_default()
    }
}
