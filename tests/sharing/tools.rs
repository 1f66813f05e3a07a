//! Engines that share memory, and functions that modify handles.

use crate::common::prelude::*;

pub(crate) const SHARED: &str = "expandable_segments:True,expandable_segments_ipc:True";

pub(crate) fn sim() -> Arc<Sim> {
    sim_with(false)
}

/// Returns a device with or without fabric handles.
pub(crate) fn sim_with(fabric: bool) -> Arc<Sim> {
    let options = SimOptions {
        fabric,
        total_bytes: 1024 * MIB,
        costs: CallCosts::default(),
        reachable_devices: 2,
        ..SimOptions::default()
    };
    Arc::new(Sim::new(options))
}

/// Returns an engine with these settings.
pub(crate) fn engine(driver: Arc<dyn Driver>, text: &str) -> Engine {
    let config = config(text);
    let options = EngineOptions { settings: config.settings().clone(), ..EngineOptions::default() };
    Engine::new(driver, &options).expect("the device can do it")
}

pub(crate) fn allocate(engine: &Engine, bytes: u64) -> Allocation {
    engine.take(bytes)
}

/// Returns two allocators on one device.
pub(crate) fn two(sim: Arc<Sim>) -> (Arc<Sim>, Engine, Engine) {
    let [ours, theirs] = [(); 2].map(|()| engine(sim.clone(), SHARED));
    (sim, ours, theirs)
}

/// Allocates a block and shares it.
#[track_caller]
pub(crate) fn shared(engine: &Engine, bytes: u64) -> (Allocation, SharedHandle) {
    let block = allocate(engine, bytes);
    let handle = engine.share(&block).expect("the pages can leave");
    (block, handle)
}

/// Returns the error for bytes that are not a handle.
#[track_caller]
pub(crate) fn wrong(bytes: &[u8]) -> FormatError {
    SharedHandle::from_bytes(bytes).expect_err("these bytes are no handle")
}

/// Returns a handle of three pages of 20 MiB, by fabric handles or by descriptors.
pub(crate) fn handle(fabric: bool) -> SharedHandle {
    shared(&engine(sim_with(fabric), SHARED), 45 * MIB + 512).1
}

/// Recomputes the checksum at the end of a handle, as a forger would.
pub(crate) fn seal(bytes: &mut [u8]) {
    let (before, sum) = bytes.split_at_mut(bytes.len() - 8);
    let step = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    let value = before.iter().fold(0xcbf2_9ce4_8422_2325, step);
    sum.copy_from_slice(&value.to_le_bytes());
}

/// Replaces some of the bytes and corrects the checksum.
pub(crate) fn forged(bytes: &[u8], at: usize, with: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[at..at + with.len()].copy_from_slice(with);
    seal(&mut bytes);
    bytes
}
