//! Requests with the cache turned off. Each is one call of the driver, as in PyTorch.
//!
//! This is for tools that observe a program's use of device memory. With a cache, they would see one
//! allocation of the driver for many blocks. Uncached blocks appear in no counter, history or pool, and
//! no limit applies to them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use stratalloc::driver::{Driver, DriverResult};

/// If one of these variables is set to any value, allocators that get their configuration from the
/// environment start with the cache off.
///
/// Source: PyTorch's `forceUncachedAllocator`.
const VARIABLES: [&str; 2] = ["PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING"];

/// The uncached blocks of one device.
#[derive(Debug)]
pub(super) struct Uncached {
    driver: Arc<dyn Driver>,
    is_on: AtomicBool,
    /// The size of each block, by address.
    blocks: Mutex<BTreeMap<u64, u64>>,
}

/// Returns true if the environment turns caches off.
pub(super) fn is_set_in_environment() -> bool {
    VARIABLES.iter().any(|name| std::env::var_os(name).is_some())
}

impl Uncached {
    pub(super) fn new(driver: Arc<dyn Driver>) -> Self {
        Self { driver, is_on: AtomicBool::new(false), blocks: Mutex::default() }
    }

    /// Returns true if the cache was turned off.
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

    /// Returns the size of the block that starts at an address.
    pub(super) fn size_of(&self, address: u64) -> Option<u64> {
        self.blocks.lock().get(&address).copied()
    }

    /// Returns the block that contains an address.
    pub(super) fn around(&self, address: u64) -> Option<(u64, u64)> {
        let blocks = self.blocks.lock();
        let (start, size_bytes) = blocks.range(..=address).next_back()?;
        (address - start < *size_bytes).then_some((*start, *size_bytes))
    }

    /// Frees a block to the driver, which waits for all work that uses it. Returns `None` for an
    /// unknown address.
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
            // If the driver fails, the memory stays allocated. No caller could receive the error.
            let _ = self.driver.free(address, size_bytes);
        }
    }
}
