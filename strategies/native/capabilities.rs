//! The engine as the trait's capabilities.

use super::cell::HeapCell;
use super::engine::Engine;
use crate::allocator::{
    Allocation, BaseAllocation, CacheInfo, Caching, Control, CrossStream, DeviceAllocator,
    PeerAccess, Place, Request,
};
use crate::config::Config;
use crate::error::{AllocError, DriverError, FractionError, FreeError, HandleError};
use crate::history::SegmentLayout;
use crate::ids::{DeviceId, StreamId};
use crate::stats::Usage;

impl DeviceAllocator for Engine {
    #[inline(always)]
    fn allocate(&self, request: Request) -> Result<Allocation, AllocError> {
        match request.place {
            Place::Anywhere => self.allocate_anywhere(request.bytes, request.stream),
            _ => self.allocate_with_care(request),
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
        match self.free_block(cell, address, None) {
            Ok(size_bytes) => Ok(size_bytes),
            Err(error) => Err(of_address(error)),
        }
    }

    fn record_stream_raw(&self, address: u64, stream: StreamId) -> Result<(), HandleError> {
        let Some(cell) = self.cell_of(address) else {
            return Err(HandleError::UnknownAddress { address });
        };
        self.record_use(cell, address, stream, None).map_err(of_address)
    }

    fn usage(&self) -> Usage {
        Self::usage(self)
    }

    fn control(&self) -> Control<'_> {
        Control {
            cross_stream: Some(self),
            caching: Some(self),
            counters: Some(self),
            by_address: self.addresses.is_kept(),
            hooks: Some(&self.hooks),
            private_pools: Some(self),
            checkpoints: Some(self),
            expandable: Some(self),
            peer_access: self.reaches_others().then_some(self as &dyn PeerAccess),
            sharing: Some(self),
            recording: Some(self),
        }
    }
}

impl PeerAccess for Engine {
    fn enable_peer_access(&self, device: DeviceId) -> Result<(), DriverError> {
        self.let_in(device)
    }

    fn peers(&self) -> Vec<DeviceId> {
        self.growth.lock().peers.clone()
    }
}

impl CrossStream for Engine {
    fn record_stream(&self, allocation: &Allocation, stream: StreamId) -> Result<(), HandleError> {
        Self::record_stream(self, allocation, stream)
    }

    fn process_events(&self) -> Result<(), DriverError> {
        if self.scopes.captures_here() {
            return Ok(());
        }
        let _asks = self.history.of_free();
        self.settle_deferred()?;
        self.poll_events_surely()
    }
}

impl Caching for Engine {
    fn empty_cache(&self) -> Result<(), DriverError> {
        Self::empty_cache(self)
    }

    fn set_limit_bytes(&self, limit_bytes: Option<u64>) {
        self.set_limit(limit_bytes);
    }

    fn limit_bytes(&self) -> Option<u64> {
        self.growth.lock().limit_bytes
    }

    fn set_memory_fraction(&self, fraction: f64) -> Result<(), FractionError> {
        Self::set_memory_fraction(self, fraction)
    }

    fn apply(&self, config: &Config) -> Result<(), DriverError> {
        self.apply_settings(config.settings())?;
        self.history.configured(config);
        Ok(())
    }

    fn cache_info(&self) -> Result<CacheInfo, DriverError> {
        Self::cache_info(self)
    }

    fn layout(&self) -> Vec<SegmentLayout> {
        Self::layout(self)
    }

    fn base_allocation(&self, allocation: &Allocation) -> Result<BaseAllocation, HandleError> {
        self.base_of(allocation)
    }
}

impl Engine {
    /// The heap that may hold a block at `address`.
    #[inline]
    fn cell_of(&self, address: u64) -> Option<&HeapCell> {
        let number = self.addresses.heap_of(address)?;
        Some(self.heaps.get(number)?)
    }

    /// The handle of the live block at `address`, for a call that only looks.
    pub(super) fn at(&self, address: u64) -> Result<Allocation, HandleError> {
        let unknown = HandleError::UnknownAddress { address };
        let cell = self.cell_of(address).ok_or(unknown.clone())?;
        let state = cell.lock();
        let slot = state.heap.live_at(address).ok_or(unknown)?;
        let (id, size_bytes) = (state.heap.id(slot), state.heap.requested_bytes(slot));
        Ok(self.handle_of(cell, address, size_bytes, id))
    }
}

/// The same refusal for who named the block by its address.
#[cold]
fn of_address(error: HandleError) -> HandleError {
    match error {
        HandleError::Stale { address } => HandleError::UnknownAddress { address },
        other => other,
    }
}
