//! Tags: memory that is paused and resumed at the same addresses, with its contents.
//!
//! Most tests run on the host device, so that contents can be compared. `interactions` has the defined
//! answers of other operations while a tag sleeps. `histories` compares random histories with a model,
//! `faults` fails each driver call, `threads` runs several threads, `orders` puts steps of threads into one
//! order.

mod basics;
mod disk;
mod faults;
mod histories;
mod interactions;
mod orders;
mod threads;

use stratalloc::allocator::{
    Backup, PauseOptions, SleepError, Sleeping, TagInfo, TagOptions, TagState,
};

use crate::common::prelude::*;

/// The tag of most tests.
const TAG: PoolId = PoolId { capture: 0, user: 77 };

/// The allocator `native` on a driver, with frees by address.
fn built(conf: &str, driver: Arc<dyn Driver>) -> Strategy {
    registry::build(&config(conf), driver, BuildOptions { raw_addresses: true }).expect("it can")
}

/// The host device with a few hundred MiB.
fn host() -> Arc<Host> {
    Arc::new(Host::with_bytes(512 * MIB))
}

fn sleeping(allocator: &Strategy) -> &dyn Sleeping {
    allocator.control().sleeping.expect("native has tags")
}

fn tagged(tag: TagOptions) -> PoolOptions {
    PoolOptions { tag: Some(tag), ..PoolOptions::default() }
}

#[track_caller]
fn create(allocator: &Strategy, tag: TagOptions) {
    allocator.private_pools().create_pool(TAG, tagged(tag)).expect("its id is new");
}

fn info(allocator: &Strategy) -> TagInfo {
    sleeping(allocator).tag_info(TAG).expect("it is a tag")
}

/// Fills a block with bytes that depend on its address and on `seed`.
fn write(device: &dyn Driver, address: u64, bytes: u64, seed: u64, stream: StreamId) {
    device.copy_from_host(address, &pattern(address, bytes, seed), stream).expect("it is mapped");
}

fn pattern(address: u64, bytes: u64, seed: u64) -> Vec<u8> {
    let first = (address / 512).wrapping_mul(0x9E37_79B9).wrapping_add(seed.wrapping_mul(77));
    let period: Vec<u8> =
        (0..2048).map(|at| (first.wrapping_add(at * 7) >> 3).to_le_bytes()[0]).collect();
    let bytes = usize::try_from(bytes).expect("it is small");
    let mut repeated = period.repeat(bytes.div_ceil(period.len()));
    repeated.truncate(bytes);
    repeated
}

fn holds(device: &dyn Driver, address: u64, bytes: u64, seed: u64, stream: StreamId) -> bool {
    let mut found = vec![0; usize::try_from(bytes).expect("it is small")];
    device.copy_to_host(&mut found, address, stream).expect("it is mapped");
    found == pattern(address, bytes, seed)
}

/// Options of a tag with each kind of backup that has contents.
fn kinds_of_backup() -> [TagOptions; 2] {
    [false, true].map(|keep_backup| TagOptions { keep_backup, ..TagOptions::host("weights") })
}

/// The bytes of a block that random tests write and compare: the first and the last ones.
fn ends(address: u64, bytes: u64) -> [(u64, u64); 2] {
    let end = bytes.min(600);
    [(address, end), (address + bytes - end, end)]
}

fn write_ends(device: &dyn Driver, block: &Allocation, seed: u64, stream: StreamId) {
    for (at, bytes) in ends(block.address(), block.size_bytes()) {
        write(device, at, bytes, seed, stream);
    }
}

fn holds_ends(device: &dyn Driver, block: &Allocation, seed: u64, stream: StreamId) -> bool {
    // The last bytes were written over the first ones if the block is short.
    let [(first, before), (last, bytes)] = ends(block.address(), block.size_bytes());
    let before = before.min(last - first);
    holds(device, last, bytes, seed, stream)
        && pattern(first, 600, seed).starts_with(&read(device, first, before, stream))
}

fn read(device: &dyn Driver, address: u64, bytes: u64, stream: StreamId) -> Vec<u8> {
    let mut found = vec![0; usize::try_from(bytes).expect("it is small")];
    device.copy_to_host(&mut found, address, stream).expect("it is mapped");
    found
}
