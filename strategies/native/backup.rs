//! The saved contents of tags that sleep. `copies` copies them from and to the device.
//!
//! The blocks of a backup lie one behind the other in one space of **positions**, in address order.
//! Blocks that are adjacent in memory and in this space are copied together, as one *run*. The positions
//! of a kept backup are in pinned memory, its *stores*. Those of any other backup are in ordinary memory of
//! the system, from which a free releases the whole pages of its block, or in files.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use super::files::Files;
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
    /// The place of the positions, if the tag does not keep its backup.
    unkept: Option<Unkept>,
}

/// Where the contents of a backup are that is not kept. To drop it takes time in proportion to its size: drop
/// it with no lock held.
#[derive(Debug)]
pub(super) enum Unkept {
    Memory(SystemBlock),
    Files(Files),
}

/// The bytes of a backup that is not kept.
#[derive(Debug)]
pub(super) enum UnkeptBytes<'a> {
    Memory(&'a mut [u8]),
    Files(&'a Files),
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

    /// Drops the contents of the block at this address, and releases the whole pages of its ordinary
    /// memory, or its disk space. After the last block, the caller takes the rest with
    /// [`take_unused`](Self::take_unused).
    pub(super) fn forget(&mut self, address: u64) {
        let Some(gone) = self.blocks.remove(&address) else { return };
        match &mut self.unkept {
            _ if self.blocks.is_empty() => {}
            Some(Unkept::Memory(memory)) => {
                // All bytes between the saved neighbours are unused. Those outside of the pages of this block
                // were released before.
                let before = self.blocks.range(..address).next_back();
                let start = before.map_or(0, |(_, place)| place.position + place.size_bytes);
                let start = start.max(gone.position / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES);
                let behind = self.blocks.range(address..).next();
                let end = behind.map_or(memory.size_bytes(), |(_, place)| place.position);
                let gone_end = (gone.position + gone.size_bytes).next_multiple_of(HUGE_PAGE_BYTES);
                memory.discard(index(start)..index(end.min(gone_end)));
            }
            Some(Unkept::Files(files)) => {
                files.discard(&(gone.position..gone.position + gone.size_bytes));
            }
            None => {}
        }
    }

    /// Drops all contents, and keeps the pinned memory. Returns the rest.
    pub(super) fn clear(&mut self) -> Option<Unkept> {
        self.blocks.clear();
        self.unkept.take()
    }

    /// Drops the contents of blocks for which `is_live` returns false. Their memory is released with the
    /// rest.
    pub(super) fn retain(&mut self, is_live: impl Fn(u64) -> bool) {
        self.blocks.retain(|address, _| is_live(*address));
    }

    /// Removes and returns the ordinary memory or the files if no block is left.
    pub(super) fn take_unused(&mut self) -> Option<Unkept> {
        if self.blocks.is_empty() { self.unkept.take() } else { None }
    }

    /// Removes and returns the pinned memory, whose contents are not needed any more.
    pub(super) fn take_stores(&mut self) -> Vec<PinnedId> {
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
        drop(self.clear());
        let mut position = 0;
        for (address, size_bytes) in blocks {
            self.blocks.insert(address, Place { position, size_bytes });
            position += size_bytes;
        }
    }

    /// Provides ordinary memory for `size_bytes` positions, if they are more than 0.
    pub(super) fn provide_memory(&mut self, size_bytes: u64) -> Result<(), SleepError> {
        self.unkept = match size_bytes {
            0 => None,
            _ => Some(Unkept::Memory(ordinary_memory(size_bytes)?)),
        };
        Ok(())
    }

    /// Provides files in `directory` for the positions of these runs, if there are any.
    pub(super) fn provide_files(
        &mut self,
        directory: &Path,
        runs: &[Run],
    ) -> Result<(), SleepError> {
        self.unkept = match runs {
            [] => None,
            _ => Some(Unkept::Files(Files::create(directory, runs)?)),
        };
        Ok(())
    }

    /// Returns the bytes of all positions, unless they are in pinned memory.
    pub(super) fn unkept_bytes(&mut self) -> Option<UnkeptBytes<'_>> {
        match &mut self.unkept {
            Some(Unkept::Memory(memory)) => memory.initialized().map(UnkeptBytes::Memory),
            Some(Unkept::Files(files)) => Some(UnkeptBytes::Files(files)),
            None => None,
        }
    }

    /// Returns true if the positions are in pinned memory.
    pub(super) fn is_pinned(&self) -> bool {
        self.unkept.is_none()
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

/// Fails if less host memory is available. The system provides pages when they are written or pinned, and
/// may end the program then if it has none.
pub(super) fn check_available(size_bytes: u64) -> Result<(), SleepError> {
    match memory_info() {
        Ok(info) if info.free_bytes < size_bytes => {
            let available_bytes = Some(info.free_bytes);
            Err(SleepError::HostMemory { size_bytes, available_bytes, driver: None })
        }
        _ => Ok(()),
    }
}

/// Returns zeroed memory of the system, in huge pages if it has them.
fn ordinary_memory(size_bytes: u64) -> Result<SystemBlock, SleepError> {
    check_available(size_bytes)?;
    let options = SystemOptions { huge_pages: true, ..SystemOptions::default() };
    let huge = SystemMemory::new(options).and_then(|memory| memory.take(size_bytes, 1));
    let plain = huge.or_else(|_| SystemMemory::default().take(size_bytes, 1));
    let mut block = plain.map_err(|_: DriverError| SleepError::HostMemory {
        size_bytes,
        available_bytes: None,
        driver: None,
    })?;
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

    fn bytes_of(saved: &mut SavedContents) -> &mut [u8] {
        match saved.unkept_bytes() {
            Some(UnkeptBytes::Memory(bytes)) => bytes,
            other => panic!("{other:?}"),
        }
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
        saved.provide_memory((2 << 20) + 300).unwrap();
        let all = |saved: &mut SavedContents, value| {
            bytes_of(saved)[8192..16_384].iter().all(|byte| *byte == value)
        };
        bytes_of(&mut saved).fill(7);
        saved.forget(2 << 20);
        assert!(all(&mut saved, 7));
        saved.forget(0);
        assert!(!cfg!(target_os = "linux") || all(&mut saved, 0));
        let small = saved.position_of(1 << 20, 100).map(index).unwrap();
        assert!(bytes_of(&mut saved)[small..small + 100].iter().all(|byte| *byte == 7));
        assert_eq!(
            saved.runs(),
            [run(1 << 20, 100, 1 << 20), run(3 << 20, (1 << 20) + 100, (1 << 20) + 200)]
        );
        // A page of two blocks is released with the second one.
        let shared = small + 300;
        saved.forget(3 << 20);
        assert_eq!(bytes_of(&mut saved)[shared], 7);
        saved.forget(1 << 20);
        assert!(saved.take_unused().is_none());
        assert!(!cfg!(target_os = "linux") || bytes_of(&mut saved)[shared] == 0);
        saved.forget(4 << 20);
        assert!(saved.take_unused().is_some());
        assert!(saved.unkept_bytes().is_none());
    }

    #[test]
    fn memory_is_released_when_no_block_is_left() {
        let mut saved = SavedContents::default();
        saved.place([(0, 100), (100, 100)]);
        saved.provide_memory(200).unwrap();
        saved.retain(|address| address == 100);
        assert!(saved.take_unused().is_none());
        saved.retain(|_| false);
        assert!(saved.take_unused().is_some());
        assert!(saved.unkept_bytes().is_none());
    }

    /// The system would accept the request, and end the program when the memory is written.
    #[test]
    fn a_backup_larger_than_the_available_memory_is_an_error() {
        let Ok(info) = memory_info() else { return };
        let between = info.free_bytes.midpoint(info.total_bytes);
        for size in [between, 1 << 60] {
            let refused = SavedContents::default().provide_memory(size);
            let Err(SleepError::HostMemory { size_bytes, available_bytes, .. }) = refused else {
                panic!("{size} of {info:?}: {refused:?}");
            };
            assert!(size_bytes == size && available_bytes.is_some_and(|bytes| bytes < size));
        }
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
