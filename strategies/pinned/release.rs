//! Releasing memory to the driver: blocks that are too large for the cache, blocks that have been free too
//! long, the whole cache, and everything when the allocator is dropped.
//!
//! A block is removed from the bookkeeping first, because another thread may get its address as soon as the
//! driver has freed it. If the driver fails, the block is added again.

use std::time::Instant;

use super::Core;
use super::blocks::{Block, Blocks, Idle, Origin};
use super::reserve::Reserve;
use crate::error::DriverError;
use crate::history::{Action, Event};
use crate::ids::{PoolId, StreamId};
use crate::live_blocks::Live;

/// The most blocks that one free or miss releases because of their age.
const TRIM_STEP: usize = 4;

impl Core {
    /// Releases a block that has just become free if it is too large for the cache, and a few blocks that
    /// have been free too long. A block that the driver fails to free stays cached.
    pub(super) fn after_free(&self, address: u64) {
        let most = self.settings.read().max_cached_bytes;
        if let Some(most) = most {
            let too_large = |idle: &Idle| idle.bytes > most;
            let _ = self.release_one(|blocks| blocks.idle_at(address).filter(too_large));
        }
        self.trim_step();
    }

    /// Releases a few blocks that have been free too long.
    pub(super) fn trim_step(&self) {
        for _ in 0..TRIM_STEP {
            if !matches!(self.trim_one(), Ok(true)) {
                return;
            }
        }
    }

    /// Releases all blocks that have been free too long.
    pub(super) fn trim(&self) -> Result<(), DriverError> {
        while self.trim_one()? {}
        Ok(())
    }

    fn trim_one(&self) -> Result<bool, DriverError> {
        let Some(age) = self.settings.read().trim_age else { return Ok(false) };
        let age_ns = u64::try_from(age.as_nanos()).unwrap_or(u64::MAX);
        let now_ns = self.now_ns();
        let is_old = |idle: &Idle| idle.freed_at_ns.saturating_add(age_ns) <= now_ns;
        self.release_one(|blocks| blocks.oldest().filter(is_old))
    }

    /// Releases all blocks that are free now. Blocks freed during the call may remain.
    ///
    /// # Errors
    ///
    /// The first [`DriverError`]. The blocks that could not be released stay cached.
    pub(super) fn release_cached(&self) -> Result<(), DriverError> {
        let count = {
            let mut blocks = self.blocks.lock();
            blocks.reset_reserve();
            blocks.counters.free_blocks
        };
        let mut done = Ok(());
        for _ in 0..count {
            match self.release_one(Blocks::oldest) {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => done = done.and(Err(error)),
            }
        }
        done
    }

    /// Empties the cache, and destroys the events that are not in use.
    pub(super) fn empty(&self) -> Result<(), DriverError> {
        let drained = self.drain();
        let released = self.release_cached();
        self.waiting.queue.destroy_spare(&*self.driver)?;
        drained.and(released)
    }

    /// Waits until no memory is being released.
    pub(super) fn wait_for_releases(&self) {
        if !self.history.is_in_tracker() {
            drop(self.releasing.write());
        }
    }

    /// Releases the block that `choose` returns. Returns false if there is none, or if it may not be
    /// released now.
    fn release_one(
        &self,
        choose: impl FnOnce(&Blocks) -> Option<Idle>,
    ) -> Result<bool, DriverError> {
        // Inside a tracker, the thread may already hold `releasing`.
        if self.history.is_in_tracker() {
            return Ok(false);
        }
        let _releasing = self.releasing.read();
        let removed = {
            let mut blocks = self.blocks.lock();
            let may = |idle: &Idle| self.history.may_release(idle.address, idle.bytes);
            choose(&blocks).filter(may).and_then(|idle| blocks.remove(idle))
        };
        removed.map_or(Ok(false), |block| self.release(block).map(|()| true))
    }

    /// Releases a block that was removed. If the driver fails, the block is free again.
    fn release(&self, block: Live<Block>) -> Result<(), DriverError> {
        let Live { address, value: Block { bytes, stream, ref origin, .. }, .. } = block;
        match self.release_memory(address, bytes, stream, origin) {
            Ok(()) => Ok(()),
            Err(_) if self.settings.read().free_catch_all => {
                self.blocks.lock().times.ignored();
                self.released(bytes);
                keep_pages(block.value.origin);
                Ok(())
            }
            Err(error) => {
                self.announce(Action::SegmentAlloc, address, bytes, stream);
                self.blocks.lock().put_back(block);
                Err(error)
            }
        }
    }

    fn release_memory(
        &self,
        address: u64,
        bytes: u64,
        stream: StreamId,
        origin: &Origin,
    ) -> Result<(), DriverError> {
        self.announce(Action::SegmentFree, address, bytes, stream);
        // The time is taken before the driver frees the address: see `History::moment`.
        let moment = self.history.moment();
        let start = Instant::now();
        self.source.release(address, bytes, origin)?;
        self.blocks.lock().times.freed(start.elapsed());
        self.released(bytes);
        if let Some(moment) = moment {
            let (action, pool) = (Action::SegmentFree, PoolId::DEFAULT);
            let event = Event { action, address, size_bytes: bytes, stream, pool };
            self.history.push(0, moment, event);
        }
        Ok(())
    }

    /// Ends the accounting of memory that was released.
    fn released(&self, bytes: u64) {
        self.blocks.lock().uncount_segment(bytes);
        drop(self.limit.kept(bytes));
    }

    /// Waits for the streams that use freed blocks, then releases the memory of all blocks, even live ones.
    /// Memory that the driver fails to free leaks, because a drop cannot report it.
    pub(super) fn release_everything(&self) {
        let _ = self.drain();
        let (all, reserve) = {
            let mut blocks = self.blocks.lock();
            (blocks.take_all(), blocks.reserve.take())
        };
        for Live { address, value: Block { bytes, stream, origin, .. }, .. } in all {
            if self.release_memory(address, bytes, stream, &origin).is_err() {
                keep_pages(origin);
            }
        }
        if let Some(Reserve { address, bytes, origin, .. }) = reserve
            && self.release_memory(address, bytes, StreamId::DEFAULT, &origin).is_err()
        {
            keep_pages(origin);
        }
        self.waiting.queue.destroy(&*self.driver);
    }
}

/// Leaves pages mapped that the driver could not unregister, because the device may still access them.
fn keep_pages(origin: Origin) {
    std::mem::forget(origin);
}
