//! The pinned allocator's implementation of the allocator traits.

use std::sync::Arc;

use super::PinnedAllocator;
use crate::allocator::{
    Allocation, BaseAllocation, CacheInfo, Caching, Control, Counters, CrossStream,
    DeviceAllocator, MemoryKind, Recording, Request,
};
use crate::config::Config;
use crate::error::{AllocResult, DriverError, FractionError, FreeError, HandleError};
use crate::history::{History, SegmentLayout, Snapshot};
use crate::ids::StreamId;
use crate::live_blocks::BlockName;
use crate::stats::Statistics;
use crate::system::memory_info;

impl DeviceAllocator for PinnedAllocator {
    #[inline(never)]
    fn allocate(&self, request: Request) -> AllocResult {
        self.core.serve(request)
    }

    #[inline(never)]
    fn free(&self, allocation: Allocation) -> Result<(), FreeError> {
        let freed =
            BlockName::of(&allocation, self.core.owner).and_then(|name| self.core.free(name));
        freed.map(drop).map_err(|reason| FreeError { reason, allocation })
    }

    fn name(&self) -> &str {
        "pinned"
    }

    #[inline(never)]
    fn free_raw(&self, address: u64) -> Result<u64, HandleError> {
        self.core.free(BlockName::at(address))
    }

    fn record_stream_raw(&self, address: u64, stream: StreamId) -> Result<(), HandleError> {
        self.core.record_use(BlockName::at(address), stream)
    }

    fn control(&self) -> Control<'_> {
        Control {
            cross_stream: Some(self),
            caching: Some(self),
            counters: Some(self),
            by_address: true,
            memory: MemoryKind::PinnedHost,
            hooks: Some(&self.core.hooks),
            recording: Some(self),
            ..Control::default()
        }
    }
}

impl CrossStream for PinnedAllocator {
    fn record_stream(&self, allocation: &Allocation, stream: StreamId) -> Result<(), HandleError> {
        self.core.record_use(BlockName::of(allocation, self.core.owner)?, stream)
    }

    fn needs_own_stream(&self) -> bool {
        true
    }

    fn process_events(&self) -> Result<(), DriverError> {
        self.core.poll()
    }
}

impl Caching for PinnedAllocator {
    fn empty_cache(&self) -> Result<(), DriverError> {
        self.core.empty()
    }

    fn set_limit_bytes(&self, limit_bytes: Option<u64>) {
        self.core.limit.set(limit_bytes);
    }

    /// Sets the limit to a fraction of the memory of this machine, or of the container if one limits this
    /// process. If the system does not report that size, the limit is unchanged.
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

    /// Applies the keys that are not fixed. Refuses to change the others.
    fn apply(&self, config: &Config) -> Result<(), DriverError> {
        if let Some(key) = self.core.built.fixed_key_that_differs(config.settings(), "pinned") {
            return Err(DriverError::fixed_key(key));
        }
        *self.core.settings.write() = config.settings().pinned;
        // The background thread may wait without a timeout, because no age was set. The lock orders this
        // after its look at the settings.
        drop(self.core.waiting.is_over.lock());
        self.core.waiting.changed.notify_one();
        self.core.history.configured(config);
        Ok(())
    }

    /// Returns the free and total bytes of this machine instead of those of the device.
    fn cache_info(&self) -> Result<CacheInfo, DriverError> {
        let info = memory_info()?;
        let mut cached = CacheInfo::empty(info.free_bytes, info.total_bytes);
        self.core.blocks.lock().idle_sizes().for_each(|bytes| cached.add_free(bytes));
        Ok(cached)
    }

    fn layout(&self) -> Vec<SegmentLayout> {
        self.core.blocks.lock().layout()
    }

    fn base_allocation(&self, allocation: &Allocation) -> Result<BaseAllocation, HandleError> {
        let name = BlockName::of(allocation, self.core.owner)?;
        let mut blocks = self.core.blocks.lock();
        let own = (name.address, blocks.live(name)?.bytes);
        let reserve = blocks.reserve.as_ref().map(|reserve| (reserve.address, reserve.bytes));
        let contains = |(start, bytes): &(u64, u64)| (*start..start + bytes).contains(&own.0);
        let (address, size_bytes) = reserve.filter(contains).unwrap_or(own);
        Ok(BaseAllocation { address, size_bytes, expandable: false })
    }
}

impl Counters for PinnedAllocator {
    fn statistics(&self) -> Statistics {
        self.core.blocks.lock().statistics()
    }

    fn reset_peaks(&self) {
        let mut blocks = self.core.blocks.lock();
        blocks.counters.reset_peaks();
        blocks.times.reset_peaks();
    }

    fn reset_accumulated(&self) {
        let mut blocks = self.core.blocks.lock();
        blocks.counters.reset_accumulated();
        blocks.times.reset_accumulated();
    }
}

impl Recording for PinnedAllocator {
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
