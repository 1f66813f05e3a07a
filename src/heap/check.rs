//! Checks the invariants of a heap one by one, so that the broken one is named.
//!
//! A check visits all blocks: for tests and debugging.

use std::collections::HashSet;

use super::Heap;
use super::block::{BlockState, Slot};
use crate::size::{MIN_BLOCK_BYTES, PoolKind};

/// A broken invariant, with details.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Broken {
    /// Its number, such as `I1`.
    pub invariant: &'static str,
    /// Where and how it is broken.
    pub detail: String,
}

pub(super) fn ensure(
    holds: bool,
    invariant: &'static str,
    detail: impl FnOnce() -> String,
) -> Result<(), Broken> {
    if holds { Ok(()) } else { Err(Broken { invariant, detail: detail() }) }
}

impl Heap {
    /// Checks every invariant.
    ///
    /// # Errors
    ///
    /// The first invariant that is broken.
    pub(crate) fn check(&self) -> Result<(), Broken> {
        let mut in_segments = 0;
        for head in self.chain_heads() {
            in_segments += self.check_segment(head)?;
        }
        ensure(in_segments == self.slab.len(), "I1", || {
            format!("{} blocks, {in_segments} of them in segments", self.slab.len())
        })?;
        let mut indexed = HashSet::new();
        for kind in [PoolKind::Small, PoolKind::Large] {
            self.check_index(kind, &mut indexed)?;
        }
        for slot in self.slab.occupied() {
            let free = self.slab.get(slot).state == BlockState::Free;
            ensure(free == indexed.contains(&slot), "I3", || {
                format!("{slot:?} free {free}, in an index {}", !free)
            })?;
        }
        self.check_gaps()?;
        self.check_keys()?;
        self.check_starts()
    }

    fn check_gaps(&self) -> Result<(), Broken> {
        let mut count = 0;
        for slot in self.slab.occupied() {
            let block = self.slab.get(slot);
            if block.state == BlockState::Unmapped {
                let gap = self.expandable.gaps[block.kind.index()].get(&block.address);
                ensure(gap == Some(&slot), "I9", || format!("no gap at {:#x}", block.address))?;
                count += 1;
            }
        }
        let gaps = self.unmapped_count();
        ensure(count == gaps, "I9", || format!("{count} unmapped blocks, {gaps} gaps"))
    }

    fn check_segment(&self, head: Slot) -> Result<usize, Broken> {
        let (mut previous, mut count) = (Slot::NONE, 0);
        for (slot, _) in self.chain(head) {
            let (block, before) = (self.slab.get(slot), self.slab.get(previous));
            ensure(block.previous == previous, "I1", || {
                format!("{slot:?} and {previous:?} unlinked")
            })?;
            if count > 0 {
                ensure(before.address + before.size_bytes == block.address, "I1", || {
                    format!("gap or overlap at {:#x}", block.address)
                })?;
                ensure(before.kind == block.kind, "I1", || "a segment of two kinds".to_owned())?;
                let alike = before.state == block.state
                    && matches!(block.state, BlockState::Free | BlockState::Unmapped);
                ensure(!alike, "I2", || {
                    format!("{:?} neighbours at {:#x}", block.state, block.address)
                })?;
            }
            let sizes = block.size_bytes >= MIN_BLOCK_BYTES
                && block.size_bytes.is_multiple_of(MIN_BLOCK_BYTES);
            ensure(sizes, "I6", || format!("{} bytes at {:#x}", block.size_bytes, block.address))?;
            let (invariant, holds) = match block.state {
                BlockState::Vacant => ("I1", false),
                BlockState::Draining => ("I5", block.links[0].0 > 0),
                BlockState::Live => ("I7", block.requested_bytes <= block.size_bytes),
                BlockState::Free | BlockState::Unmapped => ("I1", true),
            };
            ensure(holds, invariant, || format!("{slot:?} {block:?}"))?;
            (previous, count) = (slot, count + 1);
        }
        Ok(count)
    }

    fn check_index(&self, kind: PoolKind, indexed: &mut HashSet<Slot>) -> Result<(), Broken> {
        let index = &self.free[kind.index()];
        ensure(index.is_sound(self.slab.blocks()), "I4", || {
            format!("bins of the {} index", kind.name())
        })?;
        let mut last = None;
        for (slot, block) in self.free_blocks(kind) {
            let key = (block.size_bytes, self.slab.get(slot).key);
            ensure(last < Some(key), "I4", || format!("{key:?} behind {last:?}"))?;
            ensure(block.state == BlockState::Free, "I3", || format!("{slot:?} is not free"))?;
            ensure(block.kind == kind, "I3", || format!("{slot:?} in the wrong index"))?;
            indexed.insert(slot);
            last = Some(key);
        }
        Ok(())
    }

    fn check_starts(&self) -> Result<(), Broken> {
        let starts = &self.starts;
        if !starts.is_kept {
            return Ok(());
        }
        let live = self.live_blocks();
        for &slot in &live {
            let address = self.slab.get(slot).address;
            ensure(starts.find(self.slab.blocks(), address) == Some(slot), "I8", || {
                format!("no start at {address:#x}")
            })?;
        }
        let (live, count) = (live.len(), starts.count(self.slab.blocks()));
        ensure(live == count, "I8", || format!("{live} live, {count} starts"))
    }
}
