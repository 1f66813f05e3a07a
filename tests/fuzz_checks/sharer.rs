//! The side that shares memory: an engine with live blocks, and where the fields of their handles are.

use std::sync::Arc;

use stratalloc::allocator::{Allocation, DeviceAllocator, Request, Sharing};
use stratalloc::config::{Config, KeyTable};
use stratalloc::driver::Driver;
use stratalloc::ids::StreamId;
use stratalloc::sharing::SharedHandle;
use stratalloc::strategies::native::{Engine, EngineOptions};

/// The position, in a handle, of the secret of its pages.
pub(super) const SECRET: std::ops::Range<usize> = 40..56;
/// The position, in a handle, of the name of the sharer's socket.
pub(super) const SOCKET: std::ops::Range<usize> = 56..72;
/// The offset of the first page's description in a handle, and the size of each description.
pub(super) const PAGES_AT: usize = 88;
pub(super) const PAGE_BYTES: usize = 32;

/// Returns an engine whose pages can be exported.
pub(super) fn engine(driver: Arc<dyn Driver>) -> Engine {
    let text = "expandable_segments:True,expandable_segments_ipc:True";
    let config = Config::parse(text, &KeyTable::default()).expect("the text is legal");
    let options = EngineOptions { settings: config.settings().clone(), ..EngineOptions::default() };
    Engine::new(driver, &options).expect("the device can do it")
}

/// Allocates a block and shares it.
pub(super) fn shared(engine: &Engine, bytes: u64) -> (Allocation, SharedHandle) {
    let block = engine.allocate(Request::new(bytes, StreamId::DEFAULT)).expect("there is memory");
    let handle = engine.share(&block).expect("the pages can leave");
    (block, handle)
}

/// Recomputes the checksum at the end of a handle, as a forger would.
pub(super) fn seal(bytes: &mut [u8]) {
    let Some((before, sum)) = bytes.split_last_chunk_mut::<8>() else { return };
    let step = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    *sum = before.iter().fold(0xcbf2_9ce4_8422_2325, step).to_le_bytes();
}
