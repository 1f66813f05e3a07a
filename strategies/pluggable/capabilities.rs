//! The pluggable allocator's implementation of the allocator traits.

use std::sync::Arc;

use super::PluggableAllocator;
use super::table::{Block, State};
use crate::allocator::{
    Allocation, BaseAllocation, CacheInfo, Caching, Control, Counters, CrossStream,
    DeviceAllocator, PeerAccess, Place, Recording, Request,
};
use crate::config::Config;
use crate::driver::open_to_peer;
use crate::error::{AllocResult, DriverError, FractionError, FreeError, HandleError};
use crate::history::{History, SegmentLayout, Snapshot};
use crate::ids::{DeviceId, StreamId};
use crate::live_blocks::BlockName;
use crate::stats::Statistics;

impl DeviceAllocator for PluggableAllocator {
    #[inline(never)]
    fn allocate(&self, request: Request) -> AllocResult {
        match request.place {
            Place::Anywhere => self.serve(self.route(request)?, request),
            Place::Pool(pool) => self.allocate_in(pool, request),
            Place::Address(address) => Err(request.no_block_at(address)),
        }
    }

    #[inline(never)]
    fn free(&self, allocation: Allocation) -> Result<(), FreeError> {
        let freed = BlockName::of(&allocation, self.owner).and_then(|name| self.free_block(name));
        freed.map(drop).map_err(|reason| FreeError { reason, allocation })
    }

    fn name(&self) -> &str {
        &self.name
    }

    #[inline(never)]
    fn free_raw(&self, address: u64) -> Result<u64, HandleError> {
        self.free_block(BlockName::at(address)).map_err(|error| match error {
            HandleError::Stale { address } => HandleError::UnknownAddress { address },
            other => other,
        })
    }

    fn record_stream_raw(&self, address: u64, stream: StreamId) -> Result<(), HandleError> {
        self.record_use(BlockName::at(address), stream)
    }

    fn control(&self) -> Control<'_> {
        Control {
            cross_stream: Some(self),
            caching: Some(self),
            counters: Some(self),
            by_address: true,
            hooks: Some(&self.hooks),
            private_pools: Some(self),
            checkpoints: Some(self),
            peer_access: self.driver.peers().is_some().then_some(self as &dyn PeerAccess),
            recording: Some(self),
            ..Control::default()
        }
    }
}

impl PluggableAllocator {
    fn record_use(&self, name: BlockName, stream: StreamId) -> Result<(), HandleError> {
        let address = name.address;
        let mut shard = self.table.lock(address);
        shard.live(name)?;
        let Some(record_stream) = &self.callbacks.record_stream else {
            let is_new = |own: &&mut Block| own.stream != stream && !own.uses.contains(&stream);
            if let Some(block) = shard.get_mut(address).filter(is_new) {
                block.uses.push(stream);
            }
            return Ok(());
        };
        drop(shard);
        record_stream(address, stream);
        Ok(())
    }
}

impl CrossStream for PluggableAllocator {
    fn record_stream(&self, allocation: &Allocation, stream: StreamId) -> Result<(), HandleError> {
        self.record_use(BlockName::of(allocation, self.owner)?, stream)
    }

    fn process_events(&self) -> Result<(), DriverError> {
        if self.pools.any_capture_known() { Ok(()) } else { self.poll() }
    }
}

impl Caching for PluggableAllocator {
    fn empty_cache(&self) -> Result<(), DriverError> {
        self.empty()
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

    /// Returns an error if the configuration changes a key of this backend, because these are fixed when
    /// it is built. Other keys change nothing here; snapshots list the new configuration.
    fn apply(&self, config: &Config) -> Result<(), DriverError> {
        if let Some(key) = self.built.fixed_key_that_differs(config.settings(), "pluggable") {
            return Err(DriverError::fixed_key(key));
        }
        self.history.configured(config);
        Ok(())
    }

    fn cache_info(&self) -> Result<CacheInfo, DriverError> {
        let info = self.driver.memory_info()?;
        let mut cached = CacheInfo::empty(info.free_bytes, info.total_bytes);
        let shards = self.table.lock_all();
        let blocks = shards.iter().flat_map(|shard| shard.iter());
        let idle = blocks.filter(|block| block.state == State::Idle);
        idle.for_each(|block| cached.add_free(block.size_bytes));
        Ok(cached)
    }

    fn layout(&self) -> Vec<SegmentLayout> {
        self.layout_of(|_| true)
    }

    fn base_allocation(&self, allocation: &Allocation) -> Result<BaseAllocation, HandleError> {
        let name = BlockName::of(allocation, self.owner)?;
        let address = name.address;
        let size_bytes = self.table.lock(address).live(name)?.size_bytes;
        let base = self.callbacks.base_of.as_ref().map(|base_of| base_of(address));
        Ok(BaseAllocation {
            address: base.map_or(address, |base| base.address),
            size_bytes: base.and_then(|base| base.size_bytes).unwrap_or(size_bytes),
            expandable: false,
        })
    }
}

impl Counters for PluggableAllocator {
    fn statistics(&self) -> Statistics {
        self.table.statistics()
    }

    fn reset_peaks(&self) {
        self.table.counters().reset_peaks();
    }

    fn reset_accumulated(&self) {
        self.table.counters().reset_accumulated();
    }
}

impl PeerAccess for PluggableAllocator {
    /// Gives `device` access to memory that the driver itself allocates. User functions that map pages
    /// must enable access to those pages themselves.
    fn enable_peer_access(&self, device: DeviceId) -> Result<(), DriverError> {
        let mut peers = self.peers.lock();
        if peers.contains(&device) {
            return Ok(());
        }
        open_to_peer(&*self.driver, device)?;
        peers.push(device);
        Ok(())
    }

    fn peers(&self) -> Vec<DeviceId> {
        self.peers.lock().clone()
    }
}

impl Recording for PluggableAllocator {
    fn history(&self) -> &Arc<History> {
        &self.history
    }

    fn snapshot(&self) -> Snapshot {
        let (layout, captured) = self.layout_and(|_| true, || self.history.capture());
        self.history.snapshot_of(layout, captured, self.limit_bytes())
    }
}
