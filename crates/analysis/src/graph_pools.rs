//! The private pools at a moment: how much of them is free, and about what one pool of all graphs would need.
//!
//! A graph keeps the segments of its pool as long as it exists, because its kernels use their addresses. So
//! free memory of such a pool serves no other request, and no release of free segments gets it back. Pools
//! that a program makes itself (`torch.cuda.MemPool`, `graph_pool_handle`) have an id of another kind and
//! are counted apart: the file does not show whether they belong to graphs.

use std::collections::{BTreeMap, BTreeSet};

use schemars::JsonSchema;
use serde::Serialize;

use super::causes::{Causes, Picture};
use super::verdict::WORTH;
use super::words::part;
use stratalloc::ids::{PoolId, StreamId};

/// The private pools that captures of graphs made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct GraphPools {
    /// The number of pools with free memory.
    pub pools: u64,
    /// Their free bytes.
    pub free_bytes: u64,
    /// The reserved bytes of all pools of graphs, also of those without free memory.
    pub reserved_bytes: u64,
    /// About what one pool for all captures would reserve instead: on each stream, the reserved bytes of the
    /// largest pool and the bytes in use of the others. That suffices if the largest graph is captured first.
    pub shared_need_bytes: u64,
    /// Whether one pool would save enough to be worth it.
    pub is_shareable: bool,
    /// Whether no other cause of free or lost memory has more bytes at the moment.
    pub is_largest_cause: bool,
}

impl GraphPools {
    /// Returns the pools at a moment. `None` if no capture made a pool with free memory.
    pub(crate) fn at(picture: &Picture) -> Option<Self> {
        let mut pools = BTreeSet::new();
        let (mut all, mut free) = (Self::default(), Causes::default());
        // The largest pool, its bytes in use, and those of all pools.
        let mut streams: BTreeMap<StreamId, [u64; 3]> = BTreeMap::new();
        for heap in picture.heaps.iter().filter(|heap| heap.pool.capture != 0) {
            let Causes { split_rest_bytes, idle_segment_bytes, .. } = heap.causes;
            let free_bytes = heap.causes.free_bytes();
            let reserved_bytes = heap.causes.total_bytes();
            let used_bytes = reserved_bytes.saturating_sub(free_bytes);
            if free_bytes > 0 {
                pools.insert(heap.pool);
            }
            all.reserved_bytes = all.reserved_bytes.saturating_add(reserved_bytes);
            all.free_bytes = all.free_bytes.saturating_add(free_bytes);
            free.add(&Causes { split_rest_bytes, idle_segment_bytes, ..Causes::default() });
            let [largest, used_in_largest, used] = streams.entry(heap.stream).or_default();
            if reserved_bytes > *largest {
                (*largest, *used_in_largest) = (reserved_bytes, used_bytes);
            }
            *used = used.saturating_add(used_bytes);
        }
        let needs = streams.values().map(|[largest, used_in_largest, used]| {
            largest.saturating_add(used.saturating_sub(*used_in_largest))
        });
        all.shared_need_bytes = needs.fold(0, u64::saturating_add);
        all.pools = pools.len() as u64;
        let saved_bytes = all.reserved_bytes.saturating_sub(all.shared_need_bytes);
        all.is_shareable = part(saved_bytes, picture.causes.total_bytes()) >= WORTH;
        all.is_largest_cause = is_largest_cause(picture, &free);
        (all.pools > 0).then_some(all)
    }
}

/// The private pools that the program made itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct ProgramPools {
    /// The number of pools with free memory.
    pub pools: u64,
    /// Their free bytes.
    pub free_bytes: u64,
    /// Whether no other cause of free or lost memory has more bytes at the moment.
    pub is_largest_cause: bool,
}

impl ProgramPools {
    /// Returns the pools at a moment. `None` if the program made no pool with free memory.
    pub(crate) fn at(picture: &Picture) -> Option<Self> {
        let (mut pools, mut free) = (BTreeSet::new(), Causes::default());
        let is_own = |pool: PoolId| pool.capture == 0 && pool != PoolId::default();
        for heap in picture.heaps.iter().filter(|heap| is_own(heap.pool)) {
            let Causes { split_rest_bytes, idle_segment_bytes, .. } = heap.causes;
            if split_rest_bytes.saturating_add(idle_segment_bytes) > 0 {
                pools.insert(heap.pool);
                free.add(&Causes { split_rest_bytes, idle_segment_bytes, ..Causes::default() });
            }
        }
        (!pools.is_empty()).then(|| Self {
            pools: pools.len() as u64,
            free_bytes: free.total_bytes(),
            is_largest_cause: is_largest_cause(picture, &free),
        })
    }
}

/// Returns true if no cause of free or lost memory besides `free` has more bytes than it.
fn is_largest_cause(picture: &Picture, free: &Causes) -> bool {
    let others = picture.causes.rows().into_iter().zip(free.rows()).skip(1);
    let others = others.map(|((_, bytes), (_, of_pools))| bytes.saturating_sub(of_pools));
    others.max().is_none_or(|most| most <= free.total_bytes())
}
