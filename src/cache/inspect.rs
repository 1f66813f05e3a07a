//! Looking without touching: layout, invariants, and what a request would do.

use super::engine::Engine;
use super::policy::Plan;
use crate::allocator::{CacheInfo, Request};
use crate::error::DriverError;
use crate::heap::{BlockState, Broken};
use crate::history::{BlockLayout, BlockStateName, SegmentLayout};
use crate::ids::PoolId;
use crate::size::PoolKind;

/// What the next allocation of a request would begin with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Foresight {
    /// A cached block fits.
    Hit,
    /// The collector is due and has something to release.
    Collect,
    /// The limit refuses the segment.
    Limit,
    /// The driver is asked for a segment.
    Grow,
}

impl Engine {
    /// What an allocation of `request` would begin with now. Changes nothing.
    #[must_use]
    pub fn foresee(&self, request: Request) -> Foresight {
        let growth = self.growth.lock();
        let policy = growth.hit_policy();
        let plan = Plan::new(request.bytes, &policy, &growth.miss_policy);
        let fits = self.heaps.find(request.stream).is_some_and(|cell| {
            cell.lock().heap.best_fit(plan.kind, plan.rounded_bytes, &policy.rules).is_some()
        });
        if fits {
            Foresight::Hit
        } else if growth.collectable_bytes() > 0 && !self.idle_segments(PoolKind::Large).is_empty()
        {
            Foresight::Collect
        } else if growth.refuses(plan.segment_bytes).is_some() {
            Foresight::Limit
        } else {
            Foresight::Grow
        }
    }

    /// Every block of every segment, in address order.
    #[must_use]
    pub fn layout(&self) -> Vec<SegmentLayout> {
        let _growth = self.growth.lock();
        let mut segments = Vec::new();
        for cell in self.heaps.all() {
            let state = cell.lock();
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
                segments.push(SegmentLayout {
                    address: first.address,
                    size_bytes: blocks.iter().map(|block| block.size_bytes).sum(),
                    stream: cell.stream,
                    kind: first.kind,
                    pool: PoolId::DEFAULT,
                    expandable: first.is_expandable,
                    blocks,
                });
            }
        }
        segments.sort_by_key(|segment| segment.address);
        segments
    }

    /// Checks the invariants of every heap. For tests: walks over all blocks.
    ///
    /// # Errors
    ///
    /// The first invariant that is broken.
    pub fn check(&self) -> Result<(), Broken> {
        let _growth = self.growth.lock();
        self.heaps.all().try_for_each(|cell| cell.lock().heap.check())
    }

    /// Bytes of bookkeeping and number of blocks over all heaps, for tests of memory use.
    #[must_use]
    pub fn metadata(&self) -> (usize, usize) {
        self.heaps.all().fold((0, 0), |(bytes, blocks), cell| {
            let state = cell.lock();
            (bytes + state.heap.metadata_bytes(), blocks + state.heap.block_count())
        })
    }

    pub(super) fn cache_info(&self) -> Result<CacheInfo, DriverError> {
        let info = self.driver.memory_info()?;
        let (mut largest_cached_bytes, mut free_blocks) = (0, 0);
        for cell in self.heaps.all() {
            let state = cell.lock();
            for kind in [PoolKind::Small, PoolKind::Large] {
                for (_, block) in state.heap.free_blocks(kind) {
                    largest_cached_bytes = block.size_bytes.max(largest_cached_bytes);
                    free_blocks += 1;
                }
            }
        }
        Ok(CacheInfo {
            device_free_bytes: info.free_bytes,
            device_total_bytes: info.total_bytes,
            largest_cached_bytes,
            free_blocks,
        })
    }
}

impl Drop for Engine {
    /// Gives every segment back to the driver, also those with live blocks: their allocations can
    /// no longer be freed. Waits for pending events first.
    fn drop(&mut self) {
        // A driver that fails now keeps the memory; there is nobody to tell.
        let _ = self.drain_events();
        for segment in self.layout().iter().filter(|segment| !segment.expandable) {
            let _ = self.driver.free(segment.address, segment.size_bytes);
        }
        self.drop_pages();
        self.destroy_events();
    }
}
