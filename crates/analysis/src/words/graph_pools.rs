//! The sentences about private pools, and the columns of a table with many pools.

use std::collections::BTreeSet;

use super::{Sentences, StreamNumbers, counted_as, near, part, percent};
use crate::answer::{HeapFigures, MomentCauses};
use crate::causes::Causes;
use crate::graph_pools::{GraphPools, ProgramPools};
use crate::verdict::WORTH;

/// Private pools beyond this number share a column of a table.
const POOLS_LISTED: usize = 3;

/// The condition under which captures may share a pool.
const SAFE_TO_SHARE: &str = "That is safe only if the graphs are replayed in the order of their captures, one at \
    a time, and no output is read after a later replay.";

impl GraphPools {
    /// Returns sentences about their free bytes and one pool for all captures. `None` if one pool would save
    /// too little. `total_bytes` are all reserved bytes.
    #[must_use]
    pub fn sentences(&self, total_bytes: u64) -> Option<Sentences> {
        let Self { pools, free_bytes, reserved_bytes, shared_need_bytes, is_shareable, .. } = *self;
        let percent = percent(free_bytes, total_bytes);
        is_shareable.then(|| {
            let free = format!(
                "{} MiB ({percent} %) are free in {pools} private pools: their graphs keep them, empty_cache does \
                 not release them; one pool for all captures (pool=), the largest captured first, would need about \
                 {} MiB instead of {} MiB.",
                near(free_bytes),
                near(shared_need_bytes),
                near(reserved_bytes)
            );
            Sentences::one(free).and(SAFE_TO_SHARE)
        })
    }
}

impl ProgramPools {
    /// Returns a sentence about their free bytes. `None` if they are few. `total_bytes` are all reserved
    /// bytes.
    #[must_use]
    pub fn sentences(&self, total_bytes: u64) -> Option<Sentences> {
        let share = part(self.free_bytes, total_bytes);
        (share >= WORTH).then(|| {
            Sentences::one(format!(
                "{} MiB ({:.0} %) are free in {} that the program made (torch.cuda.MemPool or graph_pool_handle): \
                 requests outside do not use them.",
                near(self.free_bytes),
                share * 100.0,
                counted_as(self.pools, "private pool", "private pools")
            ))
        })
    }
}

/// A column of a table of reserved bytes: a stream of a pool, or many private pools together.
#[derive(Clone, Debug)]
pub struct CausesColumn {
    /// The name of the stream and its pool, or the number of pools.
    pub name: String,
    /// The bytes by cause.
    pub causes: Causes,
    /// All reserved bytes.
    pub reserved_bytes: u64,
    /// The largest free block.
    pub largest_free_bytes: u64,
}

impl MomentCauses {
    /// Returns the columns of a table, the largest first. Private pools have one column together if there are
    /// more than a few. `streams` has the names of streams.
    #[must_use]
    pub fn columns(&self, streams: &StreamNumbers) -> Vec<CausesColumn> {
        let is_private = |heap: &&HeapFigures| heap.pool != [0, 0];
        let pools: BTreeSet<_> = self.heaps.iter().filter(is_private).map(|h| h.pool).collect();
        let is_joined = |heap: &&HeapFigures| pools.len() > POOLS_LISTED && is_private(heap);
        let mut columns: Vec<CausesColumn> = Vec::new();
        for heap in self.heaps.iter().filter(|heap| !is_joined(heap)) {
            let HeapFigures { causes, reserved_bytes, largest_free_bytes, .. } = *heap;
            columns.push(CausesColumn {
                name: heap.name(streams),
                causes,
                reserved_bytes,
                largest_free_bytes,
            });
        }
        let mut joined = CausesColumn {
            name: format!("{} private pools", pools.len()),
            causes: Causes::default(),
            reserved_bytes: 0,
            largest_free_bytes: 0,
        };
        for heap in self.heaps.iter().filter(is_joined) {
            joined.causes.add(&heap.causes);
            joined.reserved_bytes = joined.reserved_bytes.saturating_add(heap.reserved_bytes);
            joined.largest_free_bytes = joined.largest_free_bytes.max(heap.largest_free_bytes);
        }
        columns.extend(Some(joined).filter(|joined| joined.reserved_bytes > 0));
        columns.sort_by_key(|column| std::cmp::Reverse(column.reserved_bytes));
        columns
    }
}
