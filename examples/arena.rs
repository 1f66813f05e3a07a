//! A user's own strategy with its own configuration key. A configuration string selects it, and the
//! conformance suite tests it.
//!
//! ```sh
//! ALLOC_CONF=backend:arena,arena_mb:64 cargo run --release --example arena
//! cargo run --release --example arena -- bench --conf backend:native --conf backend:arena --case pair
//! cargo test --example arena
//! ```
//!
//! With arguments, it is the complete command line with the arena as an additional strategy.

#[path = "arena/strategy.rs"]
mod strategy;

use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;

use stratalloc::allocator::{DeviceAllocator, Request};
use stratalloc::config::UserKey;
use stratalloc::ids::StreamId;
use stratalloc::registry::Registration;
use stratalloc_sim::{Sim, SimOptions};
use strategy::arena;

const MIB: u64 = 1 << 20;

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let size = UserKey::whole("arena_mb", 1..=1 << 20, "MiB that a step may take");
    Registration::new("arena", |driver, settings| {
        let size = settings.extra.iter().find(|(key, _)| key == "arena_mb");
        arena(driver, size.map_or(Ok(64), |(_, mib)| mib.parse())?)
    })
    .about("front to back, reset at each step")
    .key(size)
    .register()?;
    if std::env::args().len() > 1 {
        return Ok(stratalloc_cli::main());
    }
    show_three_steps()?;
    Ok(ExitCode::SUCCESS)
}

fn show_three_steps() -> Result<(), Box<dyn Error>> {
    let allocator = stratalloc::from_environment(Arc::new(Sim::new(SimOptions::default())))?;
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
stratalloc_conformance::conformance_tests!(conforms, |driver| arena(driver, 64));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_never_hands_a_place_out_twice_and_the_next_begins_at_the_front() {
        let arena = arena(Arc::new(Sim::new(SimOptions::default())), 1).unwrap();
        let take = || arena.allocate(Request::new(512, StreamId::DEFAULT)).unwrap();
        let (first, second) = (take(), take());
        let front = first.address();
        arena.free(first).unwrap();
        let third = take();
        assert!(third.address() > second.address(), "the step goes on while a block is held");
        arena.free(second).unwrap();
        arena.free(third).unwrap();
        assert_eq!(take().address(), front);
    }
}
