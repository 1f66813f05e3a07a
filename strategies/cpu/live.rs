//! One map for all instances of the process: from an address to the instance that made the block.
//!
//! An address is in the map from its allocation by the system until its release, whether the block is
//! live or free. So hits do not touch the map, and frees only read it. A free by address finds the
//! instance that made the block, even if its allocator was dropped, because an instance lives until its
//! last block is freed. The map is sharded by address. Each shard has a lock; no other lock is taken
//! while one is held.

use std::sync::{Arc, Weak};

use hashbrown::HashMap;

use super::Core;
use crate::sync::{Global, Rank};

const SHARDS: usize = 64;

#[derive(Debug)]
struct Entry {
    core: Weak<Core>,
    slot: u32,
}

/// A shard, alone on its cache lines so that threads on different shards do not slow each other down.
#[derive(Debug)]
#[repr(align(128))]
struct Shard(Global<Map>);

type Map = Option<HashMap<u64, Entry>>;

static SHARED: [Shard; SHARDS] = [const { Shard(Global::new(Rank::CpuBlocks, None)) }; SHARDS];

#[inline]
fn shard(address: u64) -> &'static Global<Map> {
    // Multiplied, because the low bits of aligned addresses are all zero.
    let hash = address.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 58;
    &SHARED[usize::try_from(hash).unwrap_or(0) % SHARDS].0
}

/// The owner of an address.
pub(super) enum Owner {
    /// The calling instance; the number is the block's slot.
    Caller(u32),
    Other(Arc<Core>, u32),
    Unknown,
}

/// Adds an address that the system has just allocated.
pub(super) fn enter(address: u64, core: Weak<Core>, slot: u32) {
    shard(address).lock().get_or_insert_default().insert(address, Entry { core, slot });
}

/// Removes an address of `core` that is about to be released to the system.
pub(super) fn leave(address: u64, core: &Core) {
    let mut shard = shard(address).lock();
    let Some(entries) = shard.as_mut() else { return };
    let own = entries.get(&address).is_some_and(|entry| std::ptr::eq(core, entry.core.as_ptr()));
    // The entry is dropped after the lock is released, because dropping it may free memory.
    let entry = own.then(|| entries.remove(&address)).flatten();
    drop(shard);
    drop(entry);
}

/// Returns the owner of the block at this address, or `Owner::Caller` if that is `caller`.
#[inline]
pub(super) fn find(address: u64, caller: Option<&Core>) -> Owner {
    let shard = shard(address).read();
    let Some(entry) = shard.as_ref().and_then(|entries| entries.get(&address)) else {
        return Owner::Unknown;
    };
    if caller.is_some_and(|caller| std::ptr::eq(caller, entry.core.as_ptr())) {
        return Owner::Caller(entry.slot);
    }
    entry.core.upgrade().map_or(Owner::Unknown, |core| Owner::Other(core, entry.slot))
}
