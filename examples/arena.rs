//! A strategy of one's own: an arena that hands out memory front to back, and begins again when every
//! block of a step has been freed.
//!
//! ```sh
//! ALLOC_CONF=backend:arena,arena_mb:64 cargo run --release --example arena
//! ```

use std::collections::BTreeSet;
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
    /// Addresses in callers' hands; none is given out twice in a step.
    live: BTreeSet<u64>,
    taken_bytes: u64,
}

impl DeviceAllocator for Arena {
    fn allocate(&self, request: Request) -> Result<Allocation, AllocError> {
        let mut step = self.step.lock().unwrap_or_else(PoisonError::into_inner);
        if request.bytes == 0 {
            return Err(AllocError::ZeroBytes);
        }
        let bytes = request.bytes.checked_next_multiple_of(512);
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
        step.live.insert(address);
        Ok(Allocation::new(address, request.bytes, self.owner, Token([step.number, 0, 0])))
    }

    fn free(&self, allocation: Allocation) -> Result<(), FreeError> {
        let mut step = self.step.lock().unwrap_or_else(PoisonError::into_inner);
        let (owner, address) = (allocation.owner(), allocation.address());
        if owner != self.owner {
            let reason = HandleError::Foreign { owner, asked: self.owner };
            return Err(FreeError { reason, allocation });
        }
        if allocation.token().0[0] != step.number || !step.live.remove(&address) {
            return Err(FreeError { reason: HandleError::Stale { address }, allocation });
        }
        if step.live.is_empty() {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn arena() -> Arena {
        let driver: Arc<dyn Driver> = Arc::new(Sim::new(SimOptions::default()));
        let start = driver.allocate(MIB).unwrap();
        let (owner, step) = (OwnerId::next(), Mutex::default());
        Arena { driver, start, size_bytes: MIB, owner, step }
    }

    #[test]
    fn a_block_that_was_freed_in_this_step_is_refused_and_others_stay() {
        let arena = arena();
        let take = || arena.allocate(Request::new(512, StreamId::DEFAULT)).unwrap();
        let (first, second) = (take(), take());
        let again = Allocation::new(first.address(), 512, first.owner(), first.token());
        arena.free(first).unwrap();
        let refused = arena.free(again).unwrap_err();
        assert_eq!(refused.reason, HandleError::Stale { address: refused.allocation.address() });
        let third = take();
        assert!(third.address() > second.address(), "the step goes on while a block is held");
        arena.free(second).unwrap();
        arena.free(third).unwrap();
        let next = take();
        assert_eq!(next.address(), arena.start, "a new step begins at the front");
        assert!(arena.free(refused.allocation).is_err(), "its address lives again, it does not");
        arena.free(next).unwrap();
    }

    #[test]
    fn zero_bytes_and_too_many_are_told_apart() {
        let arena = arena();
        let ask = |bytes| arena.allocate(Request::new(bytes, StreamId::DEFAULT)).unwrap_err();
        assert!(matches!(ask(0), AllocError::ZeroBytes));
        assert!(matches!(ask(MIB + 1), AllocError::OutOfMemory(_)));
        assert!(matches!(ask(u64::MAX), AllocError::OutOfMemory(_)));
    }
}
