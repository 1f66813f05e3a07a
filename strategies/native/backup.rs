//! The saved contents of tags that sleep. `copies` copies them from and to the device.
//!
//! The blocks of a backup lie one behind the other in one space of **positions**, in address order.
//! Blocks that are adjacent in memory and in this space are copied together, as one *run*. The positions
//! of a kept backup are in pinned memory, its *stores*. Those of any other backup are in ordinary memory of
//! the system, from which a free releases the whole pages of its block.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::allocator::SleepError;
use crate::driver::PinnedId;
use crate::error::DriverError;
use crate::system::{
    Fill, HUGE_PAGE_BYTES, Source as _, SystemBlock, SystemMemory, SystemOptions, memory_info,
};

/// The saved contents of a tag, and the pinned memory that it keeps for the next pause.
#[derive(Debug, Default)]
pub(super) struct SavedContents {
    /// The place of each saved block, by address. Positions ascend with the addresses.
    blocks: BTreeMap<u64, Place>,
    /// The pinned memory of the positions, if the tag keeps its backup.
    stores: Vec<Store>,
    /// The memory of the positions, if the tag does not keep its backup.
    own: Option<SystemBlock>,
}

/// The place of a block in the space of positions.
#[derive(Clone, Copy, Debug)]
struct Place {
    position: u64,
    size_bytes: u64,
}

#[derive(Clone, Copy, Debug)]
struct Store {
    pinned: PinnedId,
    size_bytes: u64,
}

/// A range of addresses, and its place in the space of positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) address: u64,
    pub(super) size_bytes: u64,
    pub(super) position: u64,
}

impl Run {
    pub(super) fn end(&self) -> u64 {
        self.position + self.size_bytes
    }

    /// Returns the part of the run at these positions.
    pub(super) fn within(&self, positions: &Range<u64>) -> Option<Self> {
        let start = self.position.max(positions.start);
        let end = self.end().min(positions.end);
        let address = self.address + start.saturating_sub(self.position);
        (start < end).then(|| Self { address, size_bytes: end - start, position: start })
    }
}

/// Joins neighbours that are adjacent in addresses and in positions.
fn joined(blocks: impl IntoIterator<Item = Run>) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for block in blocks {
        match runs.last_mut() {
            Some(last)
                if last.address + last.size_bytes == block.address
                    && last.end() == block.position =>
            {
                last.size_bytes += block.size_bytes;
            }
            _ => runs.push(block),
        }
    }
    runs
}

/// Returns the parts of the runs, which are in the order of their positions, at these positions.
pub(super) fn parts(runs: &[Run], positions: Range<u64>) -> impl Iterator<Item = Run> {
    let first = runs.partition_point(|run| run.end() <= positions.start);
    runs[first..].iter().map_while(move |run| run.within(&positions))
}

impl SavedContents {
    /// Returns the bytes of all saved blocks.
    pub(super) fn bytes(&self) -> u64 {
        self.blocks.values().map(|place| place.size_bytes).sum()
    }

    /// Returns the bytes of the pinned memory.
    pub(super) fn kept_bytes(&self) -> u64 {
        self.stores.iter().map(|store| store.size_bytes).sum()
    }

    /// Drops the contents of the block at this address. Ordinary memory is released by whole pages.
    pub(super) fn forget(&mut self, address: u64) {
        let Some(gone) = self.blocks.remove(&address) else { return };
        if self.blocks.is_empty() {
            self.own = None;
        }
        let Some(own) = &mut self.own else { return };
        // All bytes between the saved neighbours are unused. Those outside of the pages of this block were
        // released before.
        let before = self.blocks.range(..address).next_back();
        let start = before.map_or(0, |(_, place)| place.position + place.size_bytes);
        let start = start.max(gone.position / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES);
        let behind = self.blocks.range(address..).next();
        let end = behind.map_or(own.size_bytes(), |(_, place)| place.position);
        let end = end.min((gone.position + gone.size_bytes).next_multiple_of(HUGE_PAGE_BYTES));
        own.discard(index(start)..index(end));
    }

    /// Drops all contents, and keeps the pinned memory.
    pub(super) fn clear(&mut self) {
        self.blocks.clear();
        self.own = None;
    }

    /// Drops the contents of blocks for which `is_live` returns false. Their memory is released with the
    /// rest.
    pub(super) fn retain(&mut self, is_live: impl Fn(u64) -> bool) {
        self.blocks.retain(|address, _| is_live(*address));
    }

    /// Drops all contents. Returns their ordinary memory, which is large: release it with no lock held.
    pub(super) fn take_own(&mut self) -> Option<SystemBlock> {
        self.blocks.clear();
        self.own.take()
    }

    /// Drops all contents. Removes and returns the pinned memory.
    pub(super) fn take_stores(&mut self) -> Vec<PinnedId> {
        self.clear();
        std::mem::take(&mut self.stores).into_iter().map(|store| store.pinned).collect()
    }

    /// Returns the saved blocks, adjacent ones joined.
    pub(super) fn runs(&self) -> Vec<Run> {
        let run = |(&address, place): (&u64, &Place)| {
            let Place { position, size_bytes } = *place;
            Run { address, size_bytes, position }
        };
        joined(self.blocks.iter().map(run))
    }

    /// Makes these blocks (address and size, in address order) the saved ones, and gives them positions in
    /// their order.
    pub(super) fn place(&mut self, blocks: impl IntoIterator<Item = (u64, u64)>) {
        self.clear();
        let mut position = 0;
        for (address, size_bytes) in blocks {
            self.blocks.insert(address, Place { position, size_bytes });
            position += size_bytes;
        }
    }

    /// Provides ordinary memory for `size_bytes` positions, if they are more than 0.
    pub(super) fn provide_own(&mut self, size_bytes: u64) -> Result<(), SleepError> {
        self.own = if size_bytes > 0 { Some(ordinary_memory(size_bytes)?) } else { None };
        Ok(())
    }

    /// Returns the bytes of all positions, if they are in ordinary memory.
    pub(super) fn own_bytes(&mut self) -> Option<&mut [u8]> {
        self.own.as_mut().and_then(SystemBlock::initialized)
    }

    /// Adds pinned memory behind the last position.
    pub(super) fn add_store(&mut self, pinned: PinnedId, size_bytes: u64) {
        self.stores.push(Store { pinned, size_bytes });
    }

    /// Returns each store with its positions.
    pub(super) fn stores(&self) -> impl Iterator<Item = (PinnedId, Range<u64>)> {
        let mut start = 0;
        self.stores.iter().map(move |store| {
            let positions = start..start + store.size_bytes;
            start = positions.end;
            (store.pinned, positions)
        })
    }

    /// Returns the position of `address`, if the bytes from there on are all in one saved block.
    pub(super) fn position_of(&self, address: u64, size_bytes: u64) -> Option<u64> {
        let (start, place) = self.blocks.range(..=address).next_back()?;
        let offset = address - start;
        let end = offset.checked_add(size_bytes)?;
        (end <= place.size_bytes).then_some(place.position + offset)
    }
}

/// Returns zeroed memory of the system, in huge pages if it has them.
fn ordinary_memory(size_bytes: u64) -> Result<SystemBlock, SleepError> {
    let refused = |_: DriverError| SleepError::HostMemory { size_bytes, driver: None };
    // The system provides the pages when they are written, and ends the program then if it has none.
    if memory_info().is_ok_and(|info| info.total_bytes < size_bytes) {
        return Err(SleepError::HostMemory { size_bytes, driver: None });
    }
    let options = SystemOptions { huge_pages: true, ..SystemOptions::default() };
    let huge = SystemMemory::new(options).and_then(|memory| memory.take(size_bytes, 1));
    let plain = huge.or_else(|_| SystemMemory::default().take(size_bytes, 1));
    let mut block = plain.map_err(refused)?;
    if block.initialized().is_none() {
        block.fill(Fill::Zero);
    }
    Ok(block)
}

/// Returns an offset as an index into host memory.
pub(super) fn index(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(address: u64, size_bytes: u64, position: u64) -> Run {
        Run { address, size_bytes, position }
    }

    fn in_order(blocks: impl IntoIterator<Item = (u64, u64)>) -> Vec<Run> {
        let mut saved = SavedContents::default();
        saved.place(blocks);
        saved.runs()
    }

    #[test]
    fn neighbours_are_joined_if_they_are_adjacent_in_both_spaces() {
        let runs = in_order([(0, 4), (4, 2), (8, 2), (10, 6)]);
        assert_eq!(runs, [run(0, 6, 0), run(8, 8, 6)]);
        let apart = [run(0, 4, 0), run(4, 2, 6)];
        assert_eq!(joined(apart), apart);
        assert!(joined([]).is_empty());
    }

    #[test]
    fn memory_of_forgotten_blocks_is_released_up_to_saved_neighbours() {
        let mut saved = SavedContents::default();
        saved.place([
            (0, 1 << 20),
            (1 << 20, 100),
            (2 << 20, 100),
            (3 << 20, 1 << 20),
            (4 << 20, 100),
        ]);
        saved.provide_own((2 << 20) + 300).unwrap();
        let all = |saved: &mut SavedContents, value| {
            let bytes = saved.own_bytes().expect("some blocks are left");
            bytes[8192..16_384].iter().all(|byte| *byte == value)
        };
        saved.own_bytes().unwrap().fill(7);
        saved.forget(2 << 20);
        assert!(all(&mut saved, 7));
        saved.forget(0);
        assert!(!cfg!(target_os = "linux") || all(&mut saved, 0));
        let small = saved.position_of(1 << 20, 100).map(index).unwrap();
        assert!(saved.own_bytes().unwrap()[small..small + 100].iter().all(|byte| *byte == 7));
        assert_eq!(
            saved.runs(),
            [run(1 << 20, 100, 1 << 20), run(3 << 20, (1 << 20) + 100, (1 << 20) + 200)]
        );
        // A page of two blocks is released with the second one.
        let shared = small + 300;
        saved.forget(3 << 20);
        assert_eq!(saved.own_bytes().unwrap()[shared], 7);
        saved.forget(1 << 20);
        assert!(!cfg!(target_os = "linux") || saved.own_bytes().unwrap()[shared] == 0);
        saved.forget(4 << 20);
        assert!(saved.own_bytes().is_none());
    }

    #[test]
    fn a_backup_that_no_machine_can_hold_is_an_error() {
        let refused = SavedContents::default().provide_own(1 << 60);
        assert!(
            matches!(refused, Err(SleepError::HostMemory { size_bytes, .. }) if size_bytes == 1 << 60)
        );
    }

    #[test]
    fn parts_of_runs_are_cut_at_the_borders() {
        let runs = [run(100, 6, 0), run(200, 8, 6)];
        let at = |range| parts(&runs, range).collect::<Vec<_>>();
        assert_eq!(at(0..14), runs);
        assert_eq!(at(2..8), [run(102, 4, 2), run(200, 2, 6)]);
        assert_eq!(at(6..7), [run(200, 1, 6)]);
        assert_eq!(at(13..99), [run(207, 1, 13)]);
        assert!(at(14..99).is_empty() && at(3..3).is_empty());
    }
}
