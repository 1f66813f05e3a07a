//! The strategy's implementation of the allocator traits.
//!
//! The driver does not report where its free memory is. So layouts list live blocks, each as a segment
//! of its own, and blocks cannot be requested by address.

use std::sync::Arc;

use super::blocks::{Block, Blocks, Use};
use super::pressure::idle;
use super::{MallocAsyncAllocator, Note};
use crate::allocator::{
    Allocation, BaseAllocation, CacheInfo, Caching, Control, Counters, CrossStream,
    DeviceAllocator, PeerAccess, Place, Recording, Request,
};
use crate::config::Config;
use crate::driver::DriverPoolUsage;
use crate::error::{AllocResult, DriverError, FractionError, FreeError, HandleError};
use crate::history::{BlockLayout, BlockStateName, History, SegmentLayout, Snapshot};
use crate::ids::{PoolId, StreamId};
use crate::live_blocks::{BlockName, Live};
use crate::size::PoolKind;
use crate::stats::{Counter, PerPool, Statistics, signed};

impl DeviceAllocator for MallocAsyncAllocator {
    #[inline(never)]
    fn allocate(&self, request: Request) -> AllocResult {
        let pool = match request.place {
            Place::Anywhere => None,
            Place::Pool(pool) => Some(pool),
            Place::Address(address) => return Err(request.no_block_at(address)),
        };
        self.serve(pool, request)
    }

    #[inline(never)]
    fn free(&self, allocation: Allocation) -> Result<(), FreeError> {
        let done = BlockName::of(&allocation, self.owner).and_then(|name| self.free_block(name));
        done.map(drop).map_err(|reason| FreeError { reason, allocation })
    }

    fn name(&self) -> &str {
        "cudaMallocAsync"
    }

    #[inline(never)]
    fn free_raw(&self, address: u64) -> Result<u64, HandleError> {
        self.free_block(BlockName::at(address))
    }

    fn record_stream_raw(&self, address: u64, stream: StreamId) -> Result<(), HandleError> {
        self.announce(BlockName::at(address), stream)
    }

    fn control(&self) -> Control<'_> {
        Control {
            cross_stream: Some(self),
            caching: Some(self),
            counters: Some(self),
            by_address: true,
            hooks: Some(&self.hooks),
            private_pools: Some(self),
            peer_access: self.driver.peers().is_some().then_some(self as &dyn PeerAccess),
            recording: Some(self),
            ..Control::default()
        }
    }
}

impl MallocAsyncAllocator {
    fn announce(&self, name: BlockName, stream: StreamId) -> Result<(), HandleError> {
        self.blocks.lock().find(name)?;
        let capture = if self.scopes.any() { self.capture_of(stream)? } else { None };
        let mut blocks = self.blocks.lock();
        let block = blocks.find(name)?;
        if block.stream == stream {
            blocks.counters.note(Note::OwnStreamRecorded);
            return Ok(());
        }
        block.add_use(Use { stream, capture });
        Ok(())
    }

    /// Returns the sum of the memory that the driver reports for the main pool and for graphs. If the
    /// driver fails, returns the last known values.
    pub(super) fn usage_of_main(&self) -> DriverPoolUsage {
        let pools = self.memory_pools();
        let mut last = self.usage.lock();
        if let (Ok(main), Ok(graphs)) = (pools.usage(self.main.id), pools.graph_usage()) {
            *last = sum(main, graphs);
        }
        *last
    }

    /// Finds by trial the size of a large request that would succeed now. First tries all free memory of
    /// the device and the pool together, at most up to the limit, then the larger of the two, then half
    /// as much after each failure. At the end releases the memory that the pool has gained; the driver's
    /// peaks remain raised.
    fn largest_that_fits(&self, free_bytes: u64) -> Result<u64, DriverError> {
        const LEAST: u64 = 512;
        let pools = self.memory_pools();
        let usage = pools.usage(self.main.id)?;
        let (held, idle) = (usage.reserved_bytes, idle(usage));
        let mut bytes = free_bytes.saturating_add(idle).min(self.limit.room_bytes());
        let mut next = free_bytes.max(idle);
        let stream = self.driver.create_stream()?;
        let found = loop {
            if bytes < LEAST {
                break Ok(0);
            }
            let _address_guard = self.addresses.read();
            match pools.allocate_async(self.main.id, bytes, stream) {
                Ok(address) => {
                    let free = || pools.free_async(address, stream).map(|()| bytes);
                    // Tried twice, because no later call can free this memory.
                    break free().or_else(|_| free());
                }
                Err(error) if error.is_out_of_memory() => {
                    bytes = if next < bytes { next } else { bytes / 2 };
                    next = bytes / 2;
                }
                Err(error) => break Err(error),
            }
        };
        let waited = self.driver.synchronize_stream(stream);
        let destroyed = self.driver.destroy_stream(stream);
        let trimmed = pools.trim(self.main.id, held);
        let bytes = found?;
        waited.and(destroyed).and(trimmed).map(|()| bytes)
    }

    pub(super) fn layout_of(blocks: &Blocks, pool: Option<PoolId>) -> Vec<SegmentLayout> {
        let segment = |own: &Live<Block>| {
            let block = BlockLayout {
                address: own.address,
                size_bytes: own.bytes,
                requested_bytes: own.bytes,
                state: BlockStateName::ActiveAllocated,
            };
            let of_block = SegmentLayout::of_block(block, own.stream, own.pool);
            SegmentLayout { kind: PoolKind::Large, ..of_block }
        };
        let mut segments: Vec<_> = blocks.of(pool).map(segment).collect();
        SegmentLayout::sort(&mut segments);
        segments
    }
}

pub(super) fn sum(a: DriverPoolUsage, b: DriverPoolUsage) -> DriverPoolUsage {
    DriverPoolUsage {
        used_bytes: a.used_bytes + b.used_bytes,
        used_high_bytes: a.used_high_bytes + b.used_high_bytes,
        reserved_bytes: a.reserved_bytes + b.reserved_bytes,
        reserved_high_bytes: a.reserved_high_bytes + b.reserved_high_bytes,
    }
}

impl CrossStream for MallocAsyncAllocator {
    fn record_stream(&self, allocation: &Allocation, stream: StreamId) -> Result<(), HandleError> {
        self.announce(BlockName::of(allocation, self.owner)?, stream)
    }

    fn process_events(&self) -> Result<(), DriverError> {
        self.free_deferred()
    }
}

impl Caching for MallocAsyncAllocator {
    fn empty_cache(&self) -> Result<(), DriverError> {
        self.free_deferred()?;
        self.wait_for_freed()?;
        let pools = self.memory_pools();
        self.on_all_pools(|pool| pools.trim(pool, 0))?;
        self.destroy_empty_pools();
        pools.trim_graphs()
    }

    fn set_limit_bytes(&self, limit_bytes: Option<u64>) {
        self.limit.set(limit_bytes);
    }

    fn set_memory_fraction(&self, fraction: f64) -> Result<(), FractionError> {
        FractionError::check(fraction)?;
        self.limit_to_fraction(fraction);
        Ok(())
    }

    fn limit_bytes(&self) -> Option<u64> {
        self.limit.get()
    }

    fn total_bytes(&self) -> Result<u64, DriverError> {
        Ok(self.device.total_bytes)
    }

    fn apply(&self, config: &Config) -> Result<(), DriverError> {
        let new = config.settings().clone().in_range();
        let mut settings = self.settings.write();
        if let Some(key) = settings.fixed_key_that_differs(&new, "cudaMallocAsync") {
            return Err(DriverError::fixed_key(key));
        }
        // The other settings are read when they are needed.
        *settings = new;
        self.history.configured(config);
        Ok(())
    }

    fn cache_info(&self) -> Result<CacheInfo, DriverError> {
        let info = self.driver.memory_info()?;
        Ok(CacheInfo {
            largest_cached_bytes: self.largest_that_fits(info.free_bytes)?,
            ..CacheInfo::empty(info.free_bytes, info.total_bytes)
        })
    }

    fn layout(&self) -> Vec<SegmentLayout> {
        Self::layout_of(&self.blocks.lock(), None)
    }

    fn base_allocation(&self, allocation: &Allocation) -> Result<BaseAllocation, HandleError> {
        let name = BlockName::of(allocation, self.owner)?;
        let size_bytes = self.blocks.lock().find(name)?.bytes;
        Ok(BaseAllocation { address: name.address, size_bytes, expandable: false })
    }
}

impl Counters for MallocAsyncAllocator {
    /// Live blocks and bytes are counted here, so they are exact even if other libraries use the same
    /// driver pool. Reserved bytes are the driver's and include memory of graphs. Their peak is the sum
    /// of the pools' peaks, or an earlier, larger sum: it may be too high, never too low. Small and large
    /// blocks are not counted separately.
    fn statistics(&self) -> Statistics {
        let reserved = sum(self.usage_of_main(), self.usage_of_private_pools());
        let counters = self.blocks.lock().counters;
        let ([allocation, allocated_bytes], [active, active_bytes]) =
            (counters.allocated, counters.active);
        let of = |all: Counter| PerPool { all, ..PerPool::default() };
        Statistics {
            allocation: of(allocation),
            active: of(active),
            allocated_bytes: of(allocated_bytes),
            active_bytes: of(active_bytes),
            requested_bytes: of(active_bytes),
            reserved_bytes: of(Counter {
                current: signed(reserved.reserved_bytes),
                peak: signed(
                    self.pools.lock().destroyed_high_bytes.max(reserved.reserved_high_bytes),
                ),
                ..Counter::default()
            }),
            num_alloc_retries: counters.num_retries,
            num_ooms: counters.num_ooms,
            own: counters.own(),
            ..Statistics::default()
        }
    }

    fn reset_peaks(&self) {
        self.blocks.lock().counters.reset_peaks();
        // Reset before the driver's marks: a pool that is retired after this line stores a new value.
        self.pools.lock().destroyed_high_bytes = 0;
        let pools = self.memory_pools();
        // If the driver fails, its high marks stay: peaks may be too high, never too low.
        let _ = self.on_all_pools(|pool| pools.reset_high_marks(pool));
        let _ = pools.reset_graph_high_marks();
    }

    fn reset_accumulated(&self) {
        self.blocks.lock().counters.reset_accumulated();
    }
}

impl Recording for MallocAsyncAllocator {
    fn history(&self) -> &Arc<History> {
        &self.history
    }

    fn snapshot(&self) -> Snapshot {
        let blocks = self.blocks.lock();
        let (layout, captured) = (Self::layout_of(&blocks, None), self.history.capture());
        drop(blocks);
        self.history.snapshot_of(layout, captured, self.limit_bytes())
    }
}
