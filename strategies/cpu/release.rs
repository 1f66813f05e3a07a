//! Releasing memory to the system: over the watermark, by age, when the cache is emptied, when other
//! code will free the memory, and when an instance whose allocator was dropped frees a block.
//!
//! A block is removed from the instance first, then from the map of all instances, then released to the
//! system. `releasing` is held shared during all of this, so that a thread that is out of memory can
//! wait for it. The only user code called here is the source's `release`, and trackers.

use std::sync::atomic::Ordering;

use super::{Core, TRIM_STEP, is_old, live};
use crate::history::Action;
use crate::ids::StreamId;
use crate::system::SystemBlock;

impl Core {
    /// Releases free blocks over the watermark, and at most `TRIM_STEP` blocks that are too old. If the
    /// freed block alone exceeds the watermark, that block is released and the others are kept.
    #[cold]
    pub(super) fn after_free(
        &self,
        (slot, address, life): (u32, u64, u64),
        now_ns: u64,
        age_ns: u64,
    ) {
        if self.history.is_in_tracker() {
            return;
        }
        let most = self.cached_max_bytes.load(Ordering::Relaxed);
        {
            let _giving = self.releasing.read();
            let mut blocks = self.blocks.lock();
            if self.history.may_release(address, 1)
                && let Some((block, stream)) = blocks.evict_if_larger(slot, address, life, most)
            {
                self.record(Action::SegmentFree, address, block.size_bytes(), stream);
                drop(blocks);
                self.release_block(block, stream);
            }
        }
        while self.evict(|_, idle_bytes| idle_bytes > most).is_some() {}
        for _ in 0..TRIM_STEP {
            if self.evict(|freed_at, _| is_old(freed_at, now_ns, age_ns)).is_none() {
                break;
            }
        }
    }

    /// Releases at most `most` blocks that have been free for too long. Returns their bytes.
    pub(super) fn trim(&self, most: usize) -> u64 {
        let (now, age) = (self.now_ns(), self.trim_age_ns.load(Ordering::Relaxed));
        let old = || self.evict(|freed_at, _| is_old(freed_at, now, age));
        (0..most).map_while(|_| old()).sum()
    }

    /// Releases all blocks that are free now. Blocks freed during the call may remain.
    pub(super) fn release_all(&self) {
        let idle = self.blocks.lock().counters.free_blocks;
        for _ in 0..idle {
            if self.evict(|_, _| true).is_none() {
                break;
            }
        }
    }

    /// Waits until no block is being released to the system.
    pub(super) fn wait_for_releases(&self) {
        if !self.history.is_in_tracker() {
            drop(self.releasing.write());
        }
    }

    /// Releases the oldest free block if `should_evict` returns true for it. Returns the block's bytes.
    fn evict(&self, should_evict: impl FnOnce(u64, u64) -> bool) -> Option<u64> {
        // Inside a tracker, the thread may already hold `releasing`.
        if self.history.is_in_tracker() {
            return None;
        }
        let _giving = self.releasing.read();
        let mut blocks = self.blocks.lock();
        let may_release = |address| self.history.may_release(address, 1);
        let (block, stream) = blocks.evict(may_release, should_evict)?;
        self.record(Action::SegmentFree, block.address(), block.size_bytes(), stream);
        drop(blocks);
        Some(self.release_block(block, stream))
    }

    /// Releases a block that was removed from the instance. Returns the block's bytes.
    fn release_block(&self, block: SystemBlock, stream: StreamId) -> u64 {
        let bytes = block.size_bytes();
        let _charge = self.limit.kept(bytes);
        self.announce(Action::SegmentFree, block.address(), bytes, stream);
        // Removed from the map before the release, because then the system may give the address to
        // another thread at once.
        live::leave(block.address(), self);
        self.source.release(block);
        bytes
    }

    pub(super) fn record_free(&self, slot: u32, address: u64) -> Option<SystemBlock> {
        let mut blocks = self.blocks.lock();
        let (mut block, stream) = blocks.forget(slot, address)?;
        let bytes = block.size_bytes();
        for action in [Action::FreeRequested, Action::FreeCompleted, Action::SegmentFree] {
            self.record(action, address, bytes, stream);
        }
        let retired = blocks.retired;
        drop(blocks);
        drop(self.limit.kept(bytes));
        self.announce(Action::SegmentFree, address, bytes, stream);
        live::leave(address, self);
        block.mark_touched();
        if retired {
            self.release_retired();
        }
        Some(block)
    }

    /// Releases all free blocks of an instance whose allocator was dropped. Drops the instance itself if
    /// no block is live.
    #[cold]
    pub(super) fn release_retired(&self) {
        while self.evict(|_, _| true).is_some() {}
        let empty = self.blocks.lock().live_blocks() == 0;
        let itself = if empty { self.retired.lock().take() } else { None };
        drop(itself);
    }
}
