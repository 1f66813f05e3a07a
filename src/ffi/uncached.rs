//! Requests past the cache: each its own call of the driver, as PyTorch does when its cache is off.
//!
//! For tools that look at what programs do with device memory: in a cache they see one block where there are
//! many. Such blocks are in no counter, no history, no pool and under no limit.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use crate::driver::{Driver, DriverResult};

/// If one of them is set, to whatever, the cache of an allocator that the environment names is off.
///
/// Source: PyTorch's `forceUncachedAllocator`.
const VARIABLES: [&str; 2] = ["PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING"];

/// Blocks of one device that no cache knows.
#[derive(Debug)]
pub(super) struct Uncached {
    driver: Arc<dyn Driver>,
    is_on: AtomicBool,
    /// Sizes by address.
    blocks: Mutex<BTreeMap<u64, u64>>,
}

/// Whether the environment turns caches off.
pub(super) fn environment_asks() -> bool {
    VARIABLES.iter().any(|name| std::env::var_os(name).is_some())
}

impl Uncached {
    pub(super) fn new(driver: Arc<dyn Driver>) -> Self {
        Self { driver, is_on: AtomicBool::new(false), blocks: Mutex::default() }
    }

    /// Whether requests go past the cache.
    #[inline]
    pub(super) fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    pub(super) fn turn(&self, on: bool) {
        self.is_on.store(on, Ordering::Relaxed);
    }

    pub(super) fn allocate(&self, bytes: u64) -> DriverResult<u64> {
        let address = self.driver.allocate(bytes)?;
        self.blocks.lock().insert(address, bytes);
        Ok(address)
    }

    /// The size of the block that starts at an address.
    pub(super) fn size_of(&self, address: u64) -> Option<u64> {
        self.blocks.lock().get(&address).copied()
    }

    /// The block that an address lies in.
    pub(super) fn around(&self, address: u64) -> Option<(u64, u64)> {
        let blocks = self.blocks.lock();
        let (start, size_bytes) = blocks.range(..=address).next_back()?;
        (address - start < *size_bytes).then_some((*start, *size_bytes))
    }

    /// Gives a block back to the driver, which waits for all work that uses it. `None` if it is not here.
    pub(super) fn free(&self, address: u64) -> Option<DriverResult<()>> {
        let size_bytes = self.blocks.lock().remove(&address)?;
        let freed = self.driver.free(address, size_bytes);
        if freed.is_err() {
            self.blocks.lock().insert(address, size_bytes);
        }
        Some(freed)
    }
}

impl Drop for Uncached {
    fn drop(&mut self) {
        for (address, size_bytes) in std::mem::take(self.blocks.get_mut()) {
            // A driver that fails now keeps the memory; there is nobody to tell.
            let _ = self.driver.free(address, size_bytes);
        }
    }
}
