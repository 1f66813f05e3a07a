//! How memory goes back to the system: over the watermark, by age, when the cache is emptied, when somebody
//! else frees it, and with the last block of an instance whose allocator has gone.
//!
//! A block leaves the account first, then the map of all instances, then the system gets it. `giving` is
//! held, shared, from the first to the last, so that who is out of memory can wait for it. No user code
//! runs here but the source's `give`.

use std::sync::atomic::Ordering;

use super::system::SystemBlock;
use super::{Core, TRIM_STEP, is_old, live};
use crate::history::Action;
use crate::ids::StreamId;

impl Core {
    /// Gives back what is over the watermark, and some of what is too old. A block that is larger than the
    /// watermark goes alone.
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
            let _giving = self.giving.read();
            let mut blocks = self.blocks.lock();
            if self.history.may_release(address, 1)
                && let Some((block, stream)) = blocks.evict_if_larger(slot, address, life, most)
            {
                self.record(Action::SegmentFree, address, block.size_bytes(), stream);
                drop(blocks);
                self.give(block, stream);
            }
        }
        while self.evict(|_, idle_bytes| idle_bytes > most).is_some() {}
        for _ in 0..TRIM_STEP {
            if self.evict(|freed_at, _| is_old(freed_at, now_ns, age_ns)).is_none() {
                break;
            }
        }
    }

    /// Gives back at most so many blocks that have been idle for too long. Returns their bytes.
    pub(super) fn trim(&self, most: usize) -> u64 {
        let (now, age) = (self.now_ns(), self.trim_age_ns.load(Ordering::Relaxed));
        let old = || self.evict(|freed_at, _| is_old(freed_at, now, age));
        (0..most).map_while(|_| old()).sum()
    }

    /// Gives back everything that is idle now; what others free meanwhile may stay.
    pub(super) fn release_all(&self) {
        let idle = self.blocks.lock().counters.free_blocks;
        for _ in 0..idle {
            if self.evict(|_, _| true).is_none() {
                break;
            }
        }
    }

    /// Waits until nothing is on its way back to the system.
    pub(super) fn wait_for_giving(&self) {
        if !self.history.is_in_tracker() {
            drop(self.giving.write());
        }
    }

    /// Frees the oldest idle block if `goes` is true for it. Returns its bytes.
    fn evict(&self, goes: impl FnOnce(u64, u64) -> bool) -> Option<u64> {
        // The thread may hold `giving` then.
        if self.history.is_in_tracker() {
            return None;
        }
        let _giving = self.giving.read();
        let mut blocks = self.blocks.lock();
        let may_go = |address| self.history.may_release(address, 1);
        let (block, stream) = blocks.evict(may_go, goes)?;
        self.record(Action::SegmentFree, block.address(), block.size_bytes(), stream);
        drop(blocks);
        Some(self.give(block, stream))
    }

    /// Frees a block that has left the account. Returns its bytes.
    fn give(&self, block: SystemBlock, stream: StreamId) -> u64 {
        let bytes = block.size_bytes();
        let _charge = self.limit.kept(bytes);
        self.announce(Action::SegmentFree, block.address(), bytes, stream);
        // Before the memory goes: the system may give the address to somebody else at once.
        live::leave(block.address(), self);
        self.source.give(block);
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
            self.wind_up();
        }
        Some(block)
    }

    /// After its allocator has gone: gives back what is idle, and with the last block goes itself.
    #[cold]
    pub(super) fn wind_up(&self) {
        while self.evict(|_, _| true).is_some() {}
        let empty = self.blocks.lock().live_blocks() == 0;
        let itself = if empty { self.retired.lock().take() } else { None };
        drop(itself);
    }
}
