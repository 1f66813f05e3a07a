//! The arena: each step takes memory front to back, and when its last block is freed the next begins anew.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use stratalloc::allocator::{Allocation, DeviceAllocator, Request, Token};
use stratalloc::error::{AllocError, FreeError, HandleError, OutOfMemory};
use stratalloc::{driver::Driver, ids::OwnerId, registry::Constructed};

#[derive(Debug)]
struct Arena {
    driver: Arc<dyn Driver>,
    start: u64,
    size_bytes: u64,
    owner: OwnerId,
    /// Bytes that this step has taken, the last number that a block got, and those that live.
    step: Mutex<(u64, u32, HashSet<u32>)>,
}

impl DeviceAllocator for Arena {
    fn allocate(&self, request: Request) -> Result<Allocation, AllocError> {
        request.refuse_place()?; // No private pools, no exact addresses.
        let (bytes, stream) = (request.bytes, request.stream);
        let (taken, last, live) = &mut *self.step.lock().unwrap_or_else(PoisonError::into_inner);
        if bytes == 0 {
            return Err(AllocError::ZeroBytes);
        } else if bytes > self.size_bytes - *taken {
            return Err(AllocError::OutOfMemory(Box::new(OutOfMemory::of(bytes, stream))));
        } else if *taken == 0 {
            self.driver.synchronize_device()?; // Work of the last step may still run, on any stream.
        }
        let address = self.start + *taken;
        (*taken, *last) = (*taken + bytes.next_multiple_of(512), last.wrapping_add(1));
        live.insert(*last);
        Ok(Allocation::new(address, bytes, self.owner, Token([*last, 0, 0])))
    }
    fn free(&self, allocation: Allocation) -> Result<(), FreeError> {
        let (taken, _, live) = &mut *self.step.lock().unwrap_or_else(PoisonError::into_inner);
        let address = allocation.address();
        if let Err(reason) = allocation.check_owner(self.owner) {
            return Err(FreeError { reason, allocation });
        } else if !live.remove(&allocation.token().0[0]) {
            return Err(FreeError { reason: HandleError::Stale { address }, allocation });
        } else if live.is_empty() {
            *taken = 0;
        }
        Ok(())
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        let _ = self.driver.free(self.start, self.size_bytes); // There is nobody to tell of an error.
    }
}
/// An arena whose steps take up to so many MiB.
pub(crate) fn arena(driver: Arc<dyn Driver>, mib: u64) -> Constructed {
    let (start, size_bytes, owner) = (driver.allocate(mib << 20)?, mib << 20, OwnerId::next());
    Ok(Box::new(Arena { driver, start, size_bytes, owner, step: Mutex::default() }))
}
