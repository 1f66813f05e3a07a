//! The engine's implementation of the allocator traits.

use super::cell::HeapCell;
use super::engine::Engine;
use crate::allocator::{
    Allocation, BaseAllocation, CacheInfo, Caching, Control, CrossStream, DeviceAllocator,
    MemoryKind, PeerAccess, Place, Request,
};
use crate::config::Config;
use crate::diagnostics;
use crate::error::{AllocError, DriverError, FractionError, FreeError, HandleError};
use crate::history::SegmentLayout;
use crate::ids::{PoolId, StreamId};
use crate::size::PoolKind;
use crate::stats::{ALL, CounterIndex, LiveBlocks, Usage};

impl DeviceAllocator for Engine {
    #[inline(always)]
    fn allocate(&self, request: Request) -> Result<Allocation, AllocError> {
        match request.place {
            Place::Anywhere => self.allocate_anywhere(request.bytes, request.stream),
            _ => self.allocate_checked(request),
        }
    }

    #[inline(never)]
    fn free(&self, allocation: Allocation) -> Result<(), FreeError> {
        let address = allocation.address();
        let freed =
            self.own(&allocation).and_then(|(cell, id)| self.free_block(cell, address, Some(id)));
        freed.map(drop).map_err(|reason| FreeError { reason, allocation })
    }

    fn name(&self) -> &str {
        "native"
    }

    #[inline(never)]
    fn free_raw(&self, address: u64) -> Result<u64, HandleError> {
        let Some(cell) = self.cell_of(address) else {
            return Err(HandleError::UnknownAddress { address });
        };
        self.free_block(cell, address, None)
    }

    fn record_stream_raw(&self, address: u64, stream: StreamId) -> Result<(), HandleError> {
        let Some(cell) = self.cell_of(address) else {
            return Err(HandleError::UnknownAddress { address });
        };
        self.record_use(cell, address, stream, None).map_err(of_address)
    }

    /// Returns the most important counters. Visits the heaps that were used since the last calls; all heaps,
    /// one at a time, if another thread has locked one of those. Does not take the growth lock, which may
    /// be held during driver calls.
    fn usage(&self) -> Usage {
        let live = self.ledger.live(&self.heaps).unwrap_or_else(|| self.sum_of_live());
        let allocated_peak_bytes = self.ledger.peaks()[ALL].of(CounterIndex::AllocatedBytes);
        let [reserved_bytes, reserved_peak_bytes] = self.reserved.bytes();
        Usage {
            live_blocks: live.count,
            allocated_bytes: live.bytes,
            allocated_peak_bytes,
            reserved_bytes,
            reserved_peak_bytes,
        }
    }

    fn control(&self) -> Control<'_> {
        Control {
            cross_stream: Some(self),
            caching: Some(self),
            counters: Some(self),
            by_address: self.addresses.is_kept(),
            memory: MemoryKind::Device,
            may_be_bypassed: true,
            hooks: Some(&self.hooks),
            private_pools: Some(self),
            checkpoints: Some(self),
            expandable: Some(self),
            peer_access: self.driver.peers().is_some().then_some(self as &dyn PeerAccess),
            sharing: Some(self),
            sleeping: Some(self),
            host_bytes: None,
            recording: Some(self),
        }
    }
}

impl CrossStream for Engine {
    fn record_stream(&self, allocation: &Allocation, stream: StreamId) -> Result<(), HandleError> {
        let (cell, id) = self.own(allocation)?;
        self.record_use(cell, allocation.address(), stream, Some(id))
    }

    fn process_events(&self) -> Result<(), DriverError> {
        if self.scopes.captures_here() {
            return Ok(());
        }
        let _context = self.history.of_free();
        self.finish_deferred()?;
        // Unlike a request, this waits for another thread that is polling.
        self.events.poll(&*self.driver, |block| self.pass(block))
    }
}

impl Caching for Engine {
    /// Waits for all events, releases the free memory of the default pool and of pools without users, and
    /// destroys unused events. Does nothing while a graph is captured, because the driver would refuse.
    fn empty_cache(&self) -> Result<(), DriverError> {
        let _context = self.history.of_free();
        let _lines = diagnostics::lines();
        if self.scopes.any_capture() {
            return Ok(());
        }
        let mut growth = self.growth.lock();
        growth.counters.num_sync_all_streams += 1;
        let drained = self.drain_events(None);
        self.release_idle(&mut growth, PoolId::DEFAULT)?;
        self.shared.imports.release_leftovers()?;
        self.release_copier(&mut growth);
        self.events.destroy_spare(&*self.driver)?;
        drained
    }

    fn set_limit_bytes(&self, limit_bytes: Option<u64>) {
        let mut growth = self.growth.lock();
        growth.limit_bytes = limit_bytes;
        self.apply_policy_to_heaps(&growth);
    }

    fn limit_bytes(&self) -> Option<u64> {
        self.growth.lock().limit_bytes
    }

    fn total_bytes(&self) -> Result<u64, DriverError> {
        Ok(self.device.total_bytes)
    }

    fn set_memory_fraction(&self, fraction: f64) -> Result<(), FractionError> {
        FractionError::check(fraction)?;
        let mut growth = self.growth.lock();
        growth.limit_to_fraction(fraction);
        self.apply_policy_to_heaps(&growth);
        Ok(())
    }

    fn apply(&self, config: &Config) -> Result<(), DriverError> {
        let settings = config.settings();
        self.check_pages(settings)?;
        let mut growth = self.growth.lock();
        growth.settings = settings.clone().in_range();
        self.captures.apply(settings);
        self.apply_policy_to_heaps(&growth);
        drop(growth);
        self.history.configured(config);
        Ok(())
    }

    fn cache_info(&self) -> Result<CacheInfo, DriverError> {
        let info = self.driver.memory_info()?;
        let mut cached = CacheInfo::empty(info.free_bytes, info.total_bytes);
        for cell in self.heaps.all() {
            let state = cell.lock();
            if state.policy.asleep {
                continue;
            }
            for kind in [PoolKind::Small, PoolKind::Large] {
                state
                    .heap
                    .free_blocks(kind)
                    .for_each(|(_, block)| cached.add_free(block.size_bytes));
            }
        }
        Ok(cached)
    }

    fn layout(&self) -> Vec<SegmentLayout> {
        let growth = self.growth.lock();
        self.layout_of(&self.all_heaps(&growth))
    }

    fn base_allocation(&self, allocation: &Allocation) -> Result<BaseAllocation, HandleError> {
        let segment = self.segment_of(allocation)?;
        Ok(BaseAllocation {
            address: segment.address,
            size_bytes: segment.size_bytes,
            expandable: segment.reservation.is_some(),
        })
    }
}

impl Engine {
    /// Adds up the live blocks of all heaps.
    fn sum_of_live(&self) -> LiveBlocks {
        let mut live = LiveBlocks { count: 0, bytes: 0 };
        for cell in self.heaps.all() {
            let now = cell.lock().counters.current(ALL);
            live.count += now.of(CounterIndex::Allocation);
            live.bytes += now.of(CounterIndex::AllocatedBytes);
        }
        live
    }

    /// Returns the heap that may hold a block at `address`.
    #[inline]
    fn cell_of(&self, address: u64) -> Option<&HeapCell> {
        let number = self.addresses.heap_of(address)?;
        self.heaps.get(number)
    }

    /// Returns a handle of the live block at `address`, for a read-only call.
    pub(super) fn at(&self, address: u64) -> Result<Allocation, HandleError> {
        let unknown = HandleError::UnknownAddress { address };
        let cell = self.cell_of(address).ok_or(unknown.clone())?;
        let state = cell.lock();
        let slot = state.heap.live_at(address).ok_or(unknown)?;
        let (id, size_bytes) = (state.heap.id(slot), state.heap.requested_bytes(slot));
        Ok(cell.handle_of(address, size_bytes, id))
    }
}

/// Converts the error for a caller that identified the block by its address.
#[cold]
#[inline(never)]
pub(super) fn of_address(error: HandleError) -> HandleError {
    match error {
        HandleError::Stale { address } => HandleError::UnknownAddress { address },
        other => other,
    }
}
