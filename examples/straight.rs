//! The smallest strategy: passes each request and each free on to the device.
//!
//! ```sh
//! cargo run --release --example straight
//! cargo test --example straight
//! ```

use std::sync::Arc;

use stratalloc::prelude::*;
use stratalloc_sim::Sim;

#[derive(Debug)]
struct Straight {
    device: Arc<dyn Driver>,
    blocks: Blocks,
}

impl DeviceAllocator for Straight {
    fn allocate(&self, request: Request) -> Result<Allocation, AllocError> {
        self.blocks.allocate(request, |bytes| self.device.allocate(bytes))
    }
    fn free(&self, block: Allocation) -> Result<(), FreeError> {
        self.blocks.free(block)
    }
    fn free_raw(&self, address: u64) -> Result<u64, HandleError> {
        self.blocks.free_raw(address)
    }
    fn record_stream_raw(&self, address: u64, _: StreamId) -> Result<(), HandleError> {
        self.blocks.size_of(address).map(drop) // The device waits for all streams when it frees.
    }
    fn control(&self) -> Control<'_> {
        self.blocks.control()
    }
}

fn straight(device: Arc<dyn Driver>) -> Constructed {
    let own = Arc::clone(&device);
    let blocks = Blocks::new(move |address, bytes| own.free(address, bytes));
    Ok(Box::new(Straight { device, blocks }))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    stratalloc::register("straight", |device, _| straight(device))?;
    let allocator = stratalloc::build("backend:straight", Arc::new(Sim::default()))?;
    let block = allocator.allocate(Request::new(4 << 20, StreamId::DEFAULT))?;
    println!("4 MiB at {:#x}", block.address());
    Ok(allocator.free(block)?)
}

#[cfg(test)]
stratalloc_conformance::conformance_tests!(conforms, straight);
