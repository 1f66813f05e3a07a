//! A strategy of one's own: an arena that hands out memory front to back, and begins again when every
//! block of a step has been freed.
//!
//! ```sh
//! ALLOC_CONF=backend:arena,arena_mb:64 cargo run --release --example arena
//! ```

use std::error::Error;
use std::sync::{Arc, Mutex, PoisonError};

use stratalloc::allocator::{Allocation, DeviceAllocator, Request, Token};
use stratalloc::config::{UserKey, from_environment};
use stratalloc::driver::sim::SimOptions;
use stratalloc::driver::{Driver, Sim};
use stratalloc::error::{AllocError, FreeError, HandleError, OutOfMemory};
use stratalloc::ids::{OwnerId, StreamId};
use stratalloc::registry::{self, BuildOptions, Registration};

const MIB: u64 = 1 << 20;

#[derive(Debug)]
struct Arena {
    driver: Arc<dyn Driver>,
    start: u64,
    size_bytes: u64,
    owner: OwnerId,
    step: Mutex<Step>,
}

#[derive(Debug, Default)]
struct Step {
    number: u32,
    live: u64,
    taken_bytes: u64,
}

impl DeviceAllocator for Arena {
    fn allocate(&self, request: Request) -> Result<Allocation, AllocError> {
        let mut step = self.step.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = request.bytes.checked_next_multiple_of(512).filter(|bytes| *bytes > 0);
        let Some(bytes) = bytes.filter(|bytes| *bytes <= self.size_bytes - step.taken_bytes) else {
            let requested_bytes = request.bytes;
            let report = OutOfMemory { requested_bytes, ..OutOfMemory::default() };
            return Err(AllocError::OutOfMemory(Box::new(report)));
        };
        if step.taken_bytes == 0 {
            // The last step's work may still run, on any stream.
            self.driver.synchronize_device()?;
        }
        let address = self.start + step.taken_bytes;
        step.taken_bytes += bytes;
        step.live += 1;
        Ok(Allocation::new(address, request.bytes, self.owner, Token([step.number, 0, 0])))
    }

    fn free(&self, allocation: Allocation) -> Result<(), FreeError> {
        let mut step = self.step.lock().unwrap_or_else(PoisonError::into_inner);
        let (owner, address) = (allocation.owner(), allocation.address());
        if owner != self.owner {
            let reason = HandleError::Foreign { owner, asked: self.owner };
            return Err(FreeError { reason, allocation });
        }
        if allocation.token().0[0] != step.number || step.live == 0 {
            return Err(FreeError { reason: HandleError::Stale { address }, allocation });
        }
        step.live -= 1;
        if step.live == 0 {
            *step = Step { number: step.number.wrapping_add(1), ..Step::default() };
        }
        Ok(())
    }

    fn name(&self) -> &str {
        "arena"
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // A driver that fails now keeps the memory; there is nobody to tell.
        let _ = self.driver.free(self.start, self.size_bytes);
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let size = UserKey::whole("arena_mb", 1..=1 << 20, "MiB that a step may take");
    Registration::new("arena", |driver, settings| {
        let said = settings.extra.iter().find(|(key, _)| key == "arena_mb");
        let size_bytes = said.map_or(Ok(64), |(_, mib)| mib.parse::<u64>())? * MIB;
        let (start, owner) = (driver.allocate(size_bytes)?, OwnerId::next());
        Ok(Box::new(Arena { driver, start, size_bytes, owner, step: Mutex::default() }))
    })
    .about("front to back, and anew each step")
    .key(size)
    .register()?;

    let config = from_environment(&registry::key_table(), |name| std::env::var(name).ok())?.config;
    let device = Arc::new(Sim::new(SimOptions::default()));
    let allocator = registry::build(&config, device, BuildOptions::default())?;
    for step in 1..=3 {
        let blocks = (1..=4u64)
            .map(|n| allocator.allocate(Request::new(n * MIB, StreamId::DEFAULT)))
            .collect::<Result<Vec<_>, _>>()?;
        let places: Vec<String> = blocks.iter().map(|b| format!("{:#x}", b.address())).collect();
        println!("backend:{}, step {step}: {}", allocator.name(), places.join(" "));
        blocks.into_iter().try_for_each(|block| allocator.free(block))?;
    }
    Ok(())
}
