//! Live blocks by address.
//!
//! Each block has a serial number that is unique in its table. A handle contains the address and the
//! serial number, so a stale handle is rejected. [`LiveBlocks`] has no lock. [`Sharded`] has locks, for
//! use by several threads.

use std::ops::Deref;

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;
use parking_lot::{Mutex, MutexGuard};

use crate::allocator::Allocation;
use crate::error::HandleError;
use crate::ids::OwnerId;

/// Identifies a block by its address and, if the name is from a handle, its serial number.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockName {
    pub(crate) address: u64,
    pub(crate) serial: Option<u64>,
}

impl BlockName {
    /// Returns the name in a handle. Fails if `owner` did not make the handle.
    #[inline]
    pub(crate) fn of(allocation: &Allocation, owner: OwnerId) -> Result<Self, HandleError> {
        allocation.check_owner(owner)?;
        Ok(Self { address: allocation.address(), serial: Some(allocation.token().number()) })
    }

    /// Returns the name of the block at an address, whatever its serial number.
    #[inline]
    pub(crate) const fn at(address: u64) -> Self {
        Self { address, serial: None }
    }

    /// Returns the error for a name if no live block has it.
    #[cold]
    pub(crate) fn missing(self) -> HandleError {
        let address = self.address;
        match self.serial {
            Some(_) => HandleError::Stale { address },
            None => HandleError::UnknownAddress { address },
        }
    }
}

/// A block of a table.
#[derive(Debug)]
pub(crate) struct Live<T> {
    pub(crate) address: u64,
    pub(crate) serial: u64,
    /// The allocator's data for the block.
    pub(crate) value: T,
}

impl<T> Live<T> {
    /// Returns true if `serial` is the block's serial number or `None`.
    #[inline]
    pub(crate) fn has(&self, serial: Option<u64>) -> bool {
        serial.is_none_or(|serial| serial == self.serial)
    }
}

impl<T> Deref for Live<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.value
    }
}

/// A table of live blocks.
#[derive(Debug)]
pub(crate) struct LiveBlocks<T> {
    table: HashTable<Live<T>>,
    last_serial: u64,
}

impl<T> Default for LiveBlocks<T> {
    fn default() -> Self {
        Self { table: HashTable::new(), last_serial: 0 }
    }
}

/// Returns a hash of an address. Addresses are multiples of a power of two, so the hash mixes both
/// halves of the product.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "the two halves of a product")]
fn hash_of(address: u64) -> u64 {
    let product = u128::from(address) * 0x9E37_79B9_7F4A_7C15;
    product as u64 ^ (product >> 64) as u64
}

impl<T> LiveBlocks<T> {
    fn next_serial(&mut self) -> u64 {
        self.last_serial += 1;
        self.last_serial
    }

    /// Adds a block with a new serial number. Returns this number, and the block that was at the same
    /// address before.
    #[inline]
    pub(crate) fn enter(&mut self, address: u64, value: T) -> (u64, Option<Live<T>>) {
        let serial = self.next_serial();
        (serial, self.put_back(Live { address, serial, value }))
    }

    /// Adds a block that was removed, with its old serial number. Returns the block that was at the
    /// same address before.
    #[inline]
    pub(crate) fn put_back(&mut self, block: Live<T>) -> Option<Live<T>> {
        let address = block.address;
        let hash = |live: &Live<T>| hash_of(live.address);
        match self.table.entry(hash_of(address), |live| live.address == address, hash) {
            Entry::Vacant(room) => {
                room.insert(block);
                None
            }
            Entry::Occupied(mut found) => Some(std::mem::replace(found.get_mut(), block)),
        }
    }

    /// Returns true if a block starts at this address.
    pub(crate) fn contains(&self, address: u64) -> bool {
        self.get(address).is_some()
    }

    /// Returns the block at an address.
    #[inline]
    pub(crate) fn get(&self, address: u64) -> Option<&Live<T>> {
        self.table.find(hash_of(address), |live| live.address == address)
    }

    /// Returns the block at an address, mutably.
    #[inline]
    pub(crate) fn get_mut(&mut self, address: u64) -> Option<&mut Live<T>> {
        self.table.find_mut(hash_of(address), |live| live.address == address)
    }

    /// Returns the data of the block with this name.
    ///
    /// # Errors
    ///
    /// [`HandleError::Stale`] if the name has a serial number, otherwise
    /// [`HandleError::UnknownAddress`].
    #[inline]
    pub(crate) fn find_mut(&mut self, name: BlockName) -> Result<&mut T, HandleError> {
        let found = self.get_mut(name.address).filter(|live| live.has(name.serial));
        found.map(|live| &mut live.value).ok_or_else(|| name.missing())
    }

    /// Removes the block with this name.
    ///
    /// # Errors
    ///
    /// As [`find_mut`](Self::find_mut).
    #[inline]
    pub(crate) fn take(&mut self, name: BlockName) -> Result<Live<T>, HandleError> {
        self.take_if(name.address, |live| live.has(name.serial)).ok_or_else(|| name.missing())
    }

    /// Removes the block at an address if `is_wanted` returns true for it.
    #[inline]
    pub(crate) fn take_if(
        &mut self,
        address: u64,
        is_wanted: impl FnOnce(&Live<T>) -> bool,
    ) -> Option<Live<T>> {
        let found = self.table.find_entry(hash_of(address), |live| live.address == address).ok()?;
        is_wanted(found.get()).then(|| found.remove().0)
    }

    /// Gives the block at an address a new serial number, so that existing handles to it become stale.
    pub(crate) fn renew(&mut self, address: u64) -> Option<(u64, &mut T)> {
        let serial = self.next_serial();
        let live = self.get_mut(address)?;
        live.serial = serial;
        Some((serial, &mut live.value))
    }

    /// Returns the number of blocks.
    pub(crate) fn len(&self) -> usize {
        self.table.len()
    }

    /// Returns all blocks, in no order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Live<T>> {
        self.table.iter()
    }

    /// Removes and returns all blocks, in no order.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = Live<T>> {
        self.table.drain()
    }

    /// Returns true if no block was ever added.
    pub(crate) fn is_unused(&self) -> bool {
        self.last_serial == 0
    }
}

const SHARDS: usize = 64;

/// A shard. Aligned, so that no two shards share a cache line.
#[derive(Debug)]
#[repr(align(128))]
struct Shard<T>(Mutex<LiveBlocks<T>>);

/// Live blocks in several tables, each with its own lock. The address determines the table (*shard*). A
/// serial number is unique within its shard.
#[derive(Debug)]
pub(crate) struct Sharded<T> {
    shards: Box<[Shard<T>]>,
}

impl<T> Default for Sharded<T> {
    fn default() -> Self {
        Self { shards: (0..SHARDS).map(|_| Shard(Mutex::default())).collect() }
    }
}

impl<T> Sharded<T> {
    /// Locks the shard of an address.
    #[inline]
    pub(crate) fn lock(&self, address: u64) -> MutexGuard<'_, LiveBlocks<T>> {
        let number = usize::try_from(hash_of(address) >> 58).unwrap_or(0) % SHARDS;
        self.shards[number].0.lock()
    }

    /// Locks all shards.
    pub(crate) fn lock_all(&self) -> Vec<MutexGuard<'_, LiveBlocks<T>>> {
        self.shards.iter().map(|shard| shard.0.lock()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn handle(serial: u64) -> BlockName {
        BlockName { address: 0x100, serial: Some(serial) }
    }

    #[test]
    fn a_block_that_reuses_an_address_is_not_the_one_before() {
        let mut blocks = LiveBlocks::default();
        let (first, _) = blocks.enter(0x100, "first");
        blocks.take(handle(first)).unwrap();
        let (second, _) = blocks.enter(0x100, "second");
        let stale = blocks.take(handle(first)).unwrap_err();
        assert_eq!(stale, HandleError::Stale { address: 0x100 });
        assert_eq!(blocks.take(handle(second)).unwrap().value, "second");
        let gone = blocks.take(BlockName::at(0x100)).unwrap_err();
        assert_eq!(gone, HandleError::UnknownAddress { address: 0x100 });
    }

    #[test]
    fn a_block_whose_address_is_allocated_again_is_returned() {
        let mut blocks = LiveBlocks::default();
        let (gone, _) = blocks.enter(0x100, 5);
        let (_, lost) = blocks.enter(0x100, 6);
        assert_eq!(lost.map(|live| (live.serial, live.value)), Some((gone, 5)));
        assert!(blocks.find_mut(handle(gone)).is_err());
    }

    #[test]
    fn a_block_that_is_renewed_has_no_old_handles() {
        let mut blocks = LiveBlocks::default();
        let (old, _) = blocks.enter(0x100, 5);
        let (new, _) = blocks.renew(0x100).unwrap();
        assert!(blocks.find_mut(handle(old)).is_err());
        assert!(blocks.find_mut(handle(new)).is_ok());
    }

    #[test]
    fn addresses_that_differ_in_few_bits_do_not_meet() {
        for step in [256u64, 512, 2 << 20, 1 << 32] {
            let hashes = || (0..1024).map(|n| hash_of(0x7000_0000_0000 + n * step));
            let low: std::collections::HashSet<u64> = hashes().map(|hash| hash % 4096).collect();
            assert!(low.len() > 800, "{step}: {} of 1024 places", low.len());
            let high: std::collections::HashSet<u64> = hashes().map(|hash| hash >> 58).collect();
            assert!(high.len() > 32, "{step}: {} of 64 shards", high.len());
        }
    }
}
