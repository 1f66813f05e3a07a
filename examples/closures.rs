//! An allocator made of two closures, registered under a name, with the complete command line.
//!
//! ```sh
//! cargo run --release --example closures -- compare tests/traces/serve.default.pickle.xz \
//!     --conf backend:native --conf backend:exact
//! ```
//!
//! The closures reuse a freed block for the next request of the same size on the same stream. The
//! addresses are plain numbers, which suffices for `compare` on a simulated device; real closures would
//! call their own library.
//!
//! The framework adds counters, uses by other streams and reports. It counts the blocks that the
//! closures return, not those that they cache, so cached blocks are not part of the reserved bytes.

use std::collections::HashMap;
use std::error::Error;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

use stratalloc::ids::StreamId;
use stratalloc::registry;
use stratalloc::strategies::plugin::Callbacks;

const MIN_BLOCK_BYTES: u64 = 512;

#[derive(Default)]
struct Cache {
    idle: HashMap<(u64, StreamId), Vec<u64>>,
    taken_bytes: u64,
}

impl Cache {
    fn take(&mut self, bytes: u64, stream: StreamId) -> Option<u64> {
        if let Some(address) = self.idle.get_mut(&(bytes, stream)).and_then(Vec::pop) {
            return Some(address);
        }
        let address = self.taken_bytes.checked_add(MIN_BLOCK_BYTES)?;
        self.taken_bytes =
            self.taken_bytes.checked_add(bytes.checked_next_multiple_of(MIN_BLOCK_BYTES)?)?;
        Some(address)
    }
}

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let cache = Arc::new(Mutex::new(Cache::default()));
    let same = Arc::clone(&cache);
    let callbacks = Callbacks::new(
        move |bytes, _device, stream| {
            cache.lock().unwrap_or_else(PoisonError::into_inner).take(bytes, stream)
        },
        move |address, bytes, _device, stream| {
            let mut cache = same.lock().unwrap_or_else(PoisonError::into_inner);
            cache.idle.entry((bytes, stream)).or_default().push(address);
        },
    );
    registry::register_callbacks("exact", callbacks)?;
    Ok(stratalloc_cli::main())
}
