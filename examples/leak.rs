//! A server that leaks: it keeps the answers of each session and never ends a session. One word in the
//! configuration makes the library report the leak, and a snapshot shows how it grows.
//!
//! ```sh
//! CARGO_PROFILE_RELEASE_DEBUG=line-tables-only cargo run --release --features stacks --example leak
//! stratalloc report leak.pickle -o leak.html
//! ```

use std::error::Error;
use std::path::Path;
use std::sync::{Arc, Mutex};

use stratalloc::DeviceAllocator;
use stratalloc::config::Config;
use stratalloc::handle::{DeviceVec, Handle};
use stratalloc::history::{Context, RecordOptions, StackLevel};
use stratalloc::ids::StreamId;
use stratalloc::registry::key_table;
use stratalloc_sim::Sim;

const MIB: usize = 1 << 20;

/// The answers of all sessions, which are never removed.
static SESSIONS: Mutex<Vec<DeviceVec<u8>>> = Mutex::new(Vec::new());

fn main() -> Result<(), Box<dyn Error>> {
    let config = Config::parse("layers:[track]", &key_table())?;
    let handle = Handle::build(&config, Arc::new(Sim::new(Default::default())))?;
    let strategy = handle.strategy();
    let recording =
        strategy.control().recording.ok_or("every strategy that is built here records")?;
    let keep = RecordOptions::at_most(100_000).with_stacks(StackLevel::OfAllocations);
    recording.history().start(&keep);

    let weights = load_weights(&handle)?;
    for request in 0..400 {
        serve(&handle, request)?;
    }
    recording.snapshot().save(Path::new("leak.pickle"))?;
    println!("{} blocks live before the weights go", recording.history().live().blocks);
    drop(weights);
    Ok(())
}

fn load_weights(handle: &Handle) -> Result<Vec<DeviceVec<u8>>, Box<dyn Error>> {
    let _loading = Context::scope("weights");
    (0..8).map(|_| Ok(handle.uninit(40 * MIB, StreamId::DEFAULT)?)).collect()
}

fn serve(handle: &Handle, request: usize) -> Result<(), Box<dyn Error>> {
    let _activations = handle.uninit::<u8>((8 + request % 24) * MIB, StreamId::DEFAULT)?;
    let answer = key_value_cache(handle, request)?;
    if let Ok(mut sessions) = SESSIONS.lock() {
        sessions.push(answer);
    }
    Ok(())
}

fn key_value_cache(handle: &Handle, request: usize) -> Result<DeviceVec<u8>, Box<dyn Error>> {
    Ok(handle.uninit((1 + request % 3) * MIB, StreamId::DEFAULT)?)
}
