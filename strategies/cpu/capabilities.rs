//! The CPU caching allocator's implementation of the allocator traits. Streams, pools, peers and sharing
//! are not supported.

use std::sync::Arc;

use super::{BlockId, Core, CpuAllocator, fill_of, id_of};
use crate::allocator::{
    Allocation, BaseAllocation, ByteAccess, CacheInfo, Caching, Control, Counters, DeviceAllocator,
    HostBytes, MemoryKind, Recording, Request,
};
use crate::config::Config;
use crate::error::{AllocResult, DriverError, FractionError, FreeError, HandleError};
use crate::history::{History, SegmentLayout, Snapshot};
use crate::ids::StreamId;
use crate::stats::Statistics;
use crate::system::memory_info;

impl DeviceAllocator for CpuAllocator {
    #[inline(never)]
    fn allocate(&self, request: Request) -> AllocResult {
        request.plain()?;
        let allocated = self.core.serve(request)?;
        Ok(self.core.allocation(allocated, request.bytes))
    }

    #[inline(never)]
    fn free(&self, allocation: Allocation) -> Result<(), FreeError> {
        self.core.free(&allocation).map_err(|reason| FreeError { reason, allocation })
    }

    fn name(&self) -> &str {
        "cpu"
    }

    #[inline(never)]
    fn free_raw(&self, address: u64) -> Result<u64, HandleError> {
        self.core.free_address(address)
    }

    /// Checks only that the address is live: streams have no effect on host memory.
    fn record_stream_raw(&self, address: u64, _: StreamId) -> Result<(), HandleError> {
        let live = |core: &Core, slot| core.blocks.lock().live_bytes_at(slot, address, None);
        self.core.with_maker(address, live).map(drop)
    }

    fn control(&self) -> Control<'_> {
        Control {
            caching: Some(self),
            counters: Some(self),
            by_address: true,
            memory: MemoryKind::Host,
            hooks: Some(&self.core.hooks),
            host_bytes: Some(self),
            recording: Some(self),
            ..Control::default()
        }
    }
}

impl Caching for CpuAllocator {
    /// Releases every free block to the system, and makes the C library release its own free memory.
    fn empty_cache(&self) -> Result<(), DriverError> {
        self.core.release_all();
        self.core.source.release_cached();
        Ok(())
    }

    fn set_limit_bytes(&self, limit_bytes: Option<u64>) {
        self.core.limit.set(limit_bytes);
    }

    /// Sets the limit to a fraction of the memory of this machine, or of the container if one limits
    /// this process. If the system does not report that size, the limit is unchanged.
    fn set_memory_fraction(&self, fraction: f64) -> Result<(), FractionError> {
        FractionError::check(fraction)?;
        self.core.limit_to_fraction(fraction).map_err(|_| FractionError { fraction })
    }

    fn limit_bytes(&self) -> Option<u64> {
        self.core.limit.get()
    }

    fn total_bytes(&self) -> Result<u64, DriverError> {
        Ok(memory_info()?.total_bytes)
    }

    /// Applies the watermark, the age and the initial contents of blocks. Refuses to change settings
    /// that are read only when an instance is built.
    fn apply(&self, config: &Config) -> Result<(), DriverError> {
        if let Some(key) = self.core.built.fixed_key_that_differs(config.settings(), "cpu") {
            return Err(DriverError::fixed_key(key));
        }
        let new = config.settings().cpu;
        self.core.tune(&new, fill_of(&new)?);
        self.core.history.configured(config);
        Ok(())
    }

    fn cache_info(&self) -> Result<CacheInfo, DriverError> {
        let info = memory_info()?;
        let blocks = self.core.blocks.lock();
        let ((free_blocks, largest_cached_bytes), free_block_bytes) =
            (blocks.idle(), blocks.idle_bytes());
        drop(blocks);
        Ok(CacheInfo {
            largest_cached_bytes,
            free_blocks,
            free_block_bytes,
            ..CacheInfo::empty(info.free_bytes, info.total_bytes)
        })
    }

    fn layout(&self) -> Vec<SegmentLayout> {
        self.core.blocks.lock().layout()
    }

    /// Returns the block itself, because each block is a separate allocation from the system.
    fn base_allocation(&self, allocation: &Allocation) -> Result<BaseAllocation, HandleError> {
        let address = allocation.address();
        allocation.check_owner(self.core.owner)?;
        let BlockId { slot, life } = id_of(allocation.token());
        let live = self.core.blocks.lock().live_bytes_at(slot, address, Some(life));
        let size_bytes = live.ok_or(HandleError::Stale { address })?;
        Ok(BaseAllocation { address, size_bytes, expandable: false })
    }
}

impl HostBytes for CpuAllocator {
    /// Holds the lock of the instance during the access, so that no other thread frees the block by its
    /// address.
    fn access(
        &self,
        allocation: &Allocation,
        address: u64,
        access: &mut ByteAccess<'_>,
    ) -> Result<(), HandleError> {
        let start = allocation.address();
        allocation.check_owner(self.core.owner)?;
        let BlockId { slot, life } = id_of(allocation.token());
        let mut blocks = self.core.blocks.lock();
        let block = blocks.live_block(slot, start, life);
        let block = block.ok_or(HandleError::Stale { address: start })?;
        let offset = address.checked_sub(start).and_then(|offset| usize::try_from(offset).ok());
        let done = offset.and_then(|offset| block.access(offset, access));
        done.ok_or(HandleError::UnknownAddress { address })
    }
}

impl Counters for CpuAllocator {
    fn statistics(&self) -> Statistics {
        self.core.blocks.lock().statistics()
    }

    fn reset_peaks(&self) {
        self.core.blocks.lock().counters.reset_peaks();
    }

    fn reset_accumulated(&self) {
        self.core.blocks.lock().counters.reset_accumulated();
    }
}

impl Recording for CpuAllocator {
    fn history(&self) -> &Arc<History> {
        &self.core.history
    }

    fn snapshot(&self) -> Snapshot {
        let blocks = self.core.blocks.lock();
        let (layout, captured) = (blocks.layout(), self.core.history.capture());
        drop(blocks);
        self.core.history.snapshot_of(layout, captured, self.limit_bytes())
    }
}
