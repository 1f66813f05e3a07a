//! An arena: allocates memory from front to back. When its last block is freed, it starts again at the
//! front; the time in between is a *step*.

use std::sync::{Arc, Mutex, PoisonError};

use stratalloc::error::OutOfMemory;
use stratalloc::prelude::*;

#[derive(Debug)]
struct Arena {
    device: Arc<dyn Driver>,
    start: u64,
    size_bytes: u64,
    blocks: Blocks,
    /// The bytes allocated in this step. Locked while a block is allocated or freed.
    taken: Mutex<u64>,
}

impl DeviceAllocator for Arena {
    fn allocate(&self, request: Request) -> Result<Allocation, AllocError> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        self.blocks.allocate(request, |bytes| {
            if bytes > self.size_bytes - *taken {
                return Err(AllocError::OutOfMemory(Box::<OutOfMemory>::default()));
            } else if *taken == 0 {
                self.device.synchronize_device()?; // Work of the last step may still run, on any stream.
            }
            let address = self.start + *taken;
            *taken = (*taken + bytes.next_multiple_of(512)).min(self.size_bytes);
            Ok(address)
        })
    }

    fn free(&self, block: Allocation) -> Result<(), FreeError> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        self.blocks.free(block)?;
        if self.blocks.is_empty() {
            *taken = 0;
        }
        Ok(())
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        let _ = self.device.free(self.start, self.size_bytes); // A drop returns no error.
    }
}

/// Builds an arena of `mib` MiB.
pub(crate) fn arena(device: Arc<dyn Driver>, mib: u64) -> Constructed {
    let (start, size_bytes) = (device.allocate(mib << 20)?, mib << 20);
    let (blocks, taken) = (Blocks::new(|_, _| Ok(())), Mutex::new(0));
    Ok(Box::new(Arena { device, start, size_bytes, blocks, taken }))
}
