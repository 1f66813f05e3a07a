//! The caching calls of layers that return handles of their own. `Front` and `Shifted` convert such a
//! handle into the handle of the allocator below.

use crate::allocator::{
    Allocation, BaseAllocation, ByteAccess, CacheInfo, Caching, CrossStream, DeviceAllocator,
    HostBytes,
};
use crate::config::Config;
use crate::error::{DriverError, FractionError, HandleError};
use crate::history::SegmentLayout;

/// A layer with handles of its own.
pub(super) trait Above: Send + Sync {
    /// Returns the allocator below.
    fn inner(&self) -> &dyn DeviceAllocator;

    /// Returns the handle that the allocator below made for the block. `None` if `allocation` is not a
    /// valid handle of this layer.
    fn below(&self, allocation: &Allocation) -> Option<Allocation>;

    /// Called by `empty_cache`, before the allocator below releases idle memory.
    fn empties(&self) {}

    /// Returns the caching capability of the allocator below.
    fn cache(&self) -> &dyn Caching {
        self.inner().control().caching.expect(PRESENT)
    }

    /// Returns the cross-stream capability of the allocator below.
    fn cross(&self) -> &dyn CrossStream {
        self.inner().control().cross_stream.expect(PRESENT)
    }

    /// Calls `call` with the handle that the allocator below made for the block, or with `allocation` if
    /// [`below`](Self::below) returns `None`.
    fn with_handle_below<R>(
        &self,
        allocation: &Allocation,
        call: impl FnOnce(&Allocation) -> R,
    ) -> R
    where
        Self: Sized,
    {
        call(self.below(allocation).as_ref().unwrap_or(allocation))
    }
}

pub(super) const PRESENT: &str = "a layer has a capability only while the allocator below has it";

impl<L: Above> Caching for L {
    fn empty_cache(&self) -> Result<(), DriverError> {
        self.empties();
        self.cache().empty_cache()
    }

    fn set_limit_bytes(&self, limit_bytes: Option<u64>) {
        self.cache().set_limit_bytes(limit_bytes);
    }

    fn set_memory_fraction(&self, fraction: f64) -> Result<(), FractionError> {
        self.cache().set_memory_fraction(fraction)
    }

    fn limit_bytes(&self) -> Option<u64> {
        self.cache().limit_bytes()
    }

    fn total_bytes(&self) -> Result<u64, DriverError> {
        self.cache().total_bytes()
    }

    fn apply(&self, config: &Config) -> Result<(), DriverError> {
        self.cache().apply(config)
    }

    fn cache_info(&self) -> Result<CacheInfo, DriverError> {
        self.cache().cache_info()
    }

    fn layout(&self) -> Vec<SegmentLayout> {
        self.cache().layout()
    }

    fn base_allocation(&self, allocation: &Allocation) -> Result<BaseAllocation, HandleError> {
        self.with_handle_below(allocation, |below| self.cache().base_allocation(below))
    }
}

impl<L: Above> HostBytes for L {
    fn access(
        &self,
        allocation: &Allocation,
        address: u64,
        access: &mut ByteAccess<'_>,
    ) -> Result<(), HandleError> {
        let bytes = self.inner().control().host_bytes.expect(PRESENT);
        self.with_handle_below(allocation, |below| bytes.access(below, address, access))
    }
}
