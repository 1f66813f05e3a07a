//! Access from other devices to this device's memory.
//!
//! Fixed segments are accessible to a peer once the driver has enabled its access; mapped pages are
//! opened range by range. The growth lock protects the list of peers and the mapping of pages. So no page
//! is mapped between opening the existing pages and adding the peer to the list.

use super::engine::Engine;
use super::growth::Growth;
use crate::allocator::PeerAccess;
use crate::driver::open_to_peer;
use crate::error::DriverError;
use crate::ids::DeviceId;

impl PeerAccess for Engine {
    fn enable_peer_access(&self, device: DeviceId) -> Result<(), DriverError> {
        let mut growth = self.growth.lock();
        if growth.peers.contains(&device) {
            return Ok(());
        }
        open_to_peer(&*self.driver, device)?;
        self.open_pages_to(&growth, device)?;
        growth.peers.push(device);
        Ok(())
    }

    fn peers(&self) -> Vec<DeviceId> {
        self.growth.lock().peers.clone()
    }
}

impl Engine {
    /// Opens all mapped pages, own and imported, to the device. A resume opens those of a tag that sleeps.
    /// The caller holds the growth lock.
    fn open_pages_to(&self, growth: &Growth, device: DeviceId) -> Result<(), DriverError> {
        let Some(memory) = self.driver.virtual_memory() else { return Ok(()) };
        let mut opened = 0u64;
        let mut open = |(address, size_bytes)| {
            let done = memory.set_access(address, size_bytes, device);
            opened += u64::from(done.is_ok());
            done.map_err(|error| {
                let after = format!("{}; {opened} ranges were opened before", error.message());
                error.with_message(after)
            })
        };
        let imported = self.shared.imports.mappings();
        imported.iter().filter_map(|mapping| mapping.pages()).try_for_each(&mut open)?;
        for cell in self.heaps.all().filter(|cell| growth.pools.is_mapped(cell.pool())) {
            let ranges = cell.lock().heap.mapped_ranges();
            ranges.into_iter().try_for_each(&mut open)?;
        }
        Ok(())
    }
}
