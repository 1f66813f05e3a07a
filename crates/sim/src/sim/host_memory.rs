//! Page-locked host memory, known by address. Its addresses differ from those of device memory.
//!
//! Memory that a caller registers is counted, but the device cannot access it, because it does not own the
//! bytes.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::backing::Backing;
use super::ranges::{AddressSpace, Budget};
use super::{AddressOrder, Done, Kind, SimOptions, SimulatedDevice, State, ensure, invalid};
use stratalloc::driver::HostMemory;
use stratalloc::driver::call::{calls, forward};

/// The page size of registered memory.
const PAGE_BYTES: u64 = 4096;

/// All page-locked host memory that is known by address.
#[derive(Debug)]
pub(super) struct PageLocked {
    budget: Budget,
    space: AddressSpace,
    /// Start and size of registered ranges.
    registered: BTreeMap<u64, u64>,
}

impl PageLocked {
    pub(super) fn new(options: &SimOptions, backing: Option<Arc<dyn Backing>>) -> Self {
        let total_bytes = options.host_bytes.unwrap_or(options.total_bytes);
        let addresses = 0x1000_0000_0000..0x2000_0000_0000;
        Self {
            budget: Budget { used_bytes: 0, peak_used_bytes: 0, total_bytes },
            space: AddressSpace::new(addresses, AddressOrder::Lowest, backing, true),
            registered: BTreeMap::new(),
        }
    }

    /// Returns the bytes that are allocated or registered.
    pub(super) fn bytes(&self) -> u64 {
        self.budget.used_bytes
    }

    /// Returns whether one allocation contains all of these bytes.
    pub(super) fn holds(&self, address: u64, size_bytes: u64) -> bool {
        self.space.holds(address, size_bytes)
    }
}

impl State {
    fn allocate_host(&mut self, size_bytes: u64) -> Done<u64> {
        self.host.budget.check(size_bytes)?;
        let address = self.host.space.take(size_bytes)?;
        self.host.budget.take(size_bytes);
        Ok(address)
    }

    fn free_host(&mut self, address: u64, size_bytes: u64) -> Done<()> {
        self.host.space.give(address, size_bytes)?;
        self.host.budget.give(size_bytes);
        Ok(())
    }

    fn register_host(&mut self, address: u64, size_bytes: u64) -> Done<()> {
        let is_whole = |n: u64| n > 0 && n.is_multiple_of(PAGE_BYTES);
        let pages = is_whole(address) && is_whole(size_bytes);
        ensure!(pages, "{size_bytes} bytes at {address:#x} are not whole pages");
        self.host.budget.check(size_bytes)?;
        let below = self.host.registered.range(..address + size_bytes).next_back();
        let overlaps = below.is_some_and(|(start, bytes)| start + bytes > address);
        ensure!(!overlaps, "a part of {size_bytes} bytes at {address:#x} is registered already");
        self.host.registered.insert(address, size_bytes);
        self.host.budget.take(size_bytes);
        Ok(())
    }

    fn unregister_host(&mut self, address: u64) -> Done<()> {
        let known = self.host.registered.remove(&address);
        let size_bytes =
            known.ok_or_else(|| invalid(format!("nothing is registered at {address:#x}")))?;
        self.host.budget.give(size_bytes);
        Ok(())
    }

    fn host_node(&mut self) -> Done<Option<u32>> {
        Ok(self.options.host_node)
    }
}

impl<K: Kind> HostMemory for SimulatedDevice<K> {
    calls! { HostMemory forward Self::call; }
}
