//! The contents of tags that sleep: copies between live blocks and host memory.
//!
//! The blocks of a backup lie one behind the other in one space of **positions**, in address order.
//! Blocks that are adjacent in memory and in this space are copied together, as one *run*. A kept backup
//! is pinned: its stores cover the positions, and each run is copied straight to its place. Any other
//! backup has memory of its own for each block, so that a free drops exactly the block's bytes. Its
//! copies pass through a ring of small pinned buffers, several of them in flight.
//!
//! No lock is held during copies. The stream and the buffers stay with the engine for the next pause or
//! resume.

use std::collections::BTreeMap;
use std::ops::Range;

use super::engine::Engine;
use super::growth::Growth;
use crate::allocator::SleepError;
use crate::driver::{PinnedId, PinnedMemory, PinnedRange, synchronize_outside_captures};
use crate::error::{DriverError, DriverErrorKind};
use crate::ids::{EventId, StreamId};
use crate::size::MIB;

/// The size of a buffer of the ring. On the bus it takes less than a millisecond.
pub(super) const BUFFER_BYTES: u64 = 4 * MIB;
/// The number of buffers of the ring.
const BUFFERS: u64 = 4;

/// The saved contents of a tag, and the pinned memory that it keeps for the next pause.
#[derive(Debug, Default)]
pub(super) struct SavedContents {
    blocks: BTreeMap<u64, Saved>,
    stores: Vec<Store>,
}

/// The contents of one block.
#[derive(Debug)]
enum Saved {
    /// In the stores, at this position.
    Pinned { position: u64, size_bytes: u64 },
    /// In memory of its own.
    Own(Vec<u8>),
}

impl Saved {
    fn size_bytes(&self) -> u64 {
        match self {
            Self::Pinned { size_bytes, .. } => *size_bytes,
            Self::Own(bytes) => bytes.len() as u64,
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Store {
    pinned: PinnedId,
    size_bytes: u64,
}

/// A range of addresses, and its place in the space of positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    address: u64,
    size_bytes: u64,
    position: u64,
}

impl Run {
    fn end(&self) -> u64 {
        self.position + self.size_bytes
    }

    /// Returns the part of the run at these positions.
    fn within(&self, positions: &Range<u64>) -> Option<Self> {
        let start = self.position.max(positions.start);
        let end = self.end().min(positions.end);
        let address = self.address + start.saturating_sub(self.position);
        (start < end).then(|| Self { address, size_bytes: end - start, position: start })
    }
}

/// Joins neighbours that are adjacent in addresses and in positions.
fn joined(blocks: &[Run]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for block in blocks {
        match runs.last_mut() {
            Some(last)
                if last.address + last.size_bytes == block.address
                    && last.end() == block.position =>
            {
                last.size_bytes += block.size_bytes;
            }
            _ => runs.push(*block),
        }
    }
    runs
}

/// Returns the parts of the runs, which are in the order of their positions, at these positions.
fn parts(runs: &[Run], positions: Range<u64>) -> impl Iterator<Item = Run> {
    let first = runs.partition_point(|run| run.end() <= positions.start);
    runs[first..].iter().map_while(move |run| run.within(&positions))
}

/// Gives blocks (address and size) positions in their order.
fn in_order(blocks: impl IntoIterator<Item = (u64, u64)>) -> Vec<Run> {
    let mut position = 0;
    let place = |(address, size_bytes)| {
        let run = Run { address, size_bytes, position };
        position += size_bytes;
        run
    };
    blocks.into_iter().map(place).collect()
}

/// Bytes and number of copies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Copied {
    pub(super) bytes: u64,
    pub(super) copies: u64,
}

impl SavedContents {
    /// Returns the bytes of all saved blocks.
    pub(super) fn bytes(&self) -> u64 {
        self.blocks.values().map(Saved::size_bytes).sum()
    }

    /// Returns the bytes of the pinned memory.
    pub(super) fn kept_bytes(&self) -> u64 {
        self.stores.iter().map(|store| store.size_bytes).sum()
    }

    /// Drops the contents of the block at this address.
    pub(super) fn forget(&mut self, address: u64) {
        self.blocks.remove(&address);
    }

    /// Drops all contents, and keeps the pinned memory.
    pub(super) fn clear(&mut self) {
        self.blocks.clear();
    }

    /// Drops the contents of blocks for which `is_live` returns false.
    pub(super) fn retain(&mut self, is_live: impl Fn(u64) -> bool) {
        self.blocks.retain(|address, _| is_live(*address));
    }

    /// Removes and returns the pinned memory.
    pub(super) fn take_stores(&mut self) -> Vec<PinnedId> {
        self.blocks.clear();
        std::mem::take(&mut self.stores).into_iter().map(|store| store.pinned).collect()
    }

    /// Returns each store with its positions.
    fn stores(&self) -> impl Iterator<Item = (PinnedId, Range<u64>)> {
        let mut start = 0;
        self.stores.iter().map(move |store| {
            let positions = start..start + store.size_bytes;
            start = positions.end;
            (store.pinned, positions)
        })
    }

    /// Returns the bytes of one saved block behind `address`, and their offset in the block.
    fn find(&self, address: u64, size_bytes: u64) -> Option<(&Saved, u64)> {
        let (start, saved) = self.blocks.range(..=address).next_back()?;
        let offset = address - start;
        let end = offset.checked_add(size_bytes)?;
        (end <= saved.size_bytes()).then_some((saved, offset))
    }
}

/// The stream of copies, and the buffers of the ring.
#[derive(Debug)]
pub(super) struct Copier {
    stream: StreamId,
    buffers: Vec<Buffer>,
}

/// A buffer of the ring. Its event follows the last copy that uses it.
#[derive(Clone, Copy, Debug)]
struct Buffer {
    pinned: PinnedId,
    event: EventId,
}

/// A share of the positions that is copied through one buffer at a time.
#[derive(Clone, Debug)]
struct Share {
    buffer: Buffer,
    positions: Range<u64>,
}

impl Share {
    /// Returns the place of a part in the buffer.
    fn place(&self, part: &Run) -> PinnedRange {
        PinnedRange {
            pinned: self.buffer.pinned,
            offset_bytes: part.position - self.positions.start,
            size_bytes: part.size_bytes,
        }
    }
}

/// Returns the bytes of a block's own memory that a part of the block covers.
fn own_bytes<'a>(blocks: &'a mut BTreeMap<u64, Saved>, block: &Run, part: &Run) -> &'a mut [u8] {
    let Some(Saved::Own(bytes)) = blocks.get_mut(&block.address) else {
        unreachable!("the block has memory of its own")
    };
    let index = |bytes: u64| usize::try_from(bytes).expect("it is a size of host memory");
    let start = index(part.position - block.position);
    &mut bytes[start..start + index(part.size_bytes)]
}

impl Engine {
    /// Returns the calls for pinned memory.
    pub(super) fn pinned_memory(&self) -> Result<&dyn PinnedMemory, DriverError> {
        self.driver.pinned_memory().ok_or_else(|| {
            let message = "this device has no pinned memory, which tags need";
            DriverError::new(DriverErrorKind::NotSupported, "pinned_memory", 0, message)
        })
    }

    /// Calls `copy` with a stream for copies. Waits for the stream if `copy` fails, so that no copy
    /// runs afterwards; the second value is true unless this wait fails.
    pub(super) fn with_copier<T>(
        &self,
        copy: impl FnOnce(&mut Copier) -> Result<T, SleepError>,
    ) -> (Result<T, SleepError>, bool) {
        let kept = self.copier.lock().take();
        let mut copier = match kept {
            Some(copier) => copier,
            None => match self.driver.create_stream() {
                Ok(stream) => Copier { stream, buffers: Vec::new() },
                Err(error) => return (Err(error.into()), true),
            },
        };
        let copied = copy(&mut copier);
        let is_over = copied.is_ok() || self.driver.synchronize_stream(copier.stream).is_ok();
        // A copy that may still run uses the buffers, so they are given up then.
        let unused = {
            let mut kept = self.copier.lock();
            if is_over && kept.is_none() { kept.replace(copier) } else { Some(copier) }
        };
        if let Some(copier) = unused {
            self.drop_copier(&mut self.growth.lock(), copier, is_over);
        }
        (copied, is_over)
    }

    /// Copies blocks (address and size, in address order) to host memory. Calls
    /// `during` while copies run or before they start. Waits for the copies.
    pub(super) fn save(
        &self,
        saved: &mut SavedContents,
        copier: &mut Copier,
        blocks: impl IntoIterator<Item = (u64, u64)>,
        keep: bool,
        during: impl FnOnce(),
    ) -> Result<Copied, SleepError> {
        saved.blocks.clear();
        let blocks = in_order(blocks);
        let runs = joined(&blocks);
        let bytes = runs.last().map_or(0, Run::end);
        if keep {
            let copies = self.save_kept(saved, copier, &blocks, &runs, during)?;
            return Ok(Copied { bytes, copies });
        }
        for block in &blocks {
            let own = Saved::Own(zeroes(block.size_bytes)?);
            saved.blocks.insert(block.address, own);
        }
        during();
        let copies = self.save_own(saved, copier, &blocks, &runs)?;
        Ok(Copied { bytes, copies })
    }

    fn save_kept(
        &self,
        saved: &mut SavedContents,
        copier: &Copier,
        blocks: &[Run],
        runs: &[Run],
        during: impl FnOnce(),
    ) -> Result<u64, SleepError> {
        let memory = self.pinned_memory()?;
        let bytes = runs.last().map_or(0, Run::end);
        let size_bytes = bytes.saturating_sub(saved.kept_bytes());
        if size_bytes > 0 {
            let pinned = memory.pin(size_bytes).map_err(|error| no_memory(size_bytes, error))?;
            saved.stores.push(Store { pinned, size_bytes });
        }
        let mut copies = 0;
        for (pinned, positions) in saved.stores() {
            for part in parts(runs, positions.clone()) {
                let offset_bytes = part.position - positions.start;
                let to = PinnedRange { pinned, offset_bytes, size_bytes: part.size_bytes };
                memory.copy_out(to, part.address, copier.stream)?;
                copies += 1;
            }
        }
        during();
        self.driver.synchronize_stream(copier.stream)?;
        let place = |block: &Run| {
            let Run { address, size_bytes, position } = *block;
            (address, Saved::Pinned { position, size_bytes })
        };
        saved.blocks.extend(blocks.iter().map(place));
        Ok(copies)
    }

    fn save_own(
        &self,
        saved: &mut SavedContents,
        copier: &mut Copier,
        blocks: &[Run],
        runs: &[Run],
    ) -> Result<u64, SleepError> {
        let memory = self.pinned_memory()?;
        let shares = self.shares(copier, runs)?;
        let stream = copier.stream;
        let mut copies = 0;
        let mut collect = |share: &Share| -> Result<(), DriverError> {
            self.driver.synchronize_event(share.buffer.event)?;
            let first = blocks.partition_point(|block| block.end() <= share.positions.start);
            for block in &blocks[first..] {
                let Some(part) = block.within(&share.positions) else { break };
                let from = share.place(&part);
                let into = own_bytes(&mut saved.blocks, block, &part);
                memory.read_pinned(from.pinned, from.offset_bytes, into)?;
            }
            Ok(())
        };
        let in_flight = copier.buffers.len();
        for (at, share) in shares.iter().enumerate() {
            if let Some(before) = at.checked_sub(in_flight) {
                collect(&shares[before])?;
            }
            for part in parts(runs, share.positions.clone()) {
                memory.copy_out(share.place(&part), part.address, stream)?;
                copies += 1;
            }
            self.driver.record_event(share.buffer.event, stream)?;
        }
        let rest = shares.len().saturating_sub(in_flight);
        shares[rest..].iter().try_for_each(collect)?;
        Ok(copies)
    }

    /// Copies all saved blocks back to their addresses. Waits for the copies.
    pub(super) fn load(
        &self,
        saved: &mut SavedContents,
        copier: &mut Copier,
    ) -> Result<Copied, SleepError> {
        let memory = self.pinned_memory()?;
        let bytes = saved.bytes();
        let stream = copier.stream;
        let mut copies = 0;
        let kept = saved.blocks.iter().filter_map(|(&address, block)| match *block {
            Saved::Pinned { position, size_bytes } => Some(Run { address, size_bytes, position }),
            Saved::Own(_) => None,
        });
        let runs = joined(&kept.collect::<Vec<_>>());
        for (pinned, positions) in saved.stores() {
            for part in parts(&runs, positions.clone()) {
                let offset_bytes = part.position - positions.start;
                let from = PinnedRange { pinned, offset_bytes, size_bytes: part.size_bytes };
                memory.copy_in(part.address, from, stream)?;
                copies += 1;
            }
        }
        let own = saved.blocks.iter().filter_map(|(&address, block)| match block {
            Saved::Own(bytes) => Some((address, bytes.len() as u64)),
            Saved::Pinned { .. } => None,
        });
        let blocks = in_order(own);
        let runs = joined(&blocks);
        let shares = self.shares(copier, &runs)?;
        for (at, share) in shares.iter().enumerate() {
            if at >= copier.buffers.len() {
                self.driver.synchronize_event(share.buffer.event)?;
            }
            let first = blocks.partition_point(|block| block.end() <= share.positions.start);
            for block in &blocks[first..] {
                let Some(part) = block.within(&share.positions) else { break };
                let to = share.place(&part);
                let from = own_bytes(&mut saved.blocks, block, &part);
                memory.write_pinned(to.pinned, to.offset_bytes, from)?;
            }
            for part in parts(&runs, share.positions.clone()) {
                memory.copy_in(part.address, share.place(&part), stream)?;
                copies += 1;
            }
            self.driver.record_event(share.buffer.event, stream)?;
        }
        if copies > 0 {
            self.driver.synchronize_stream(stream)?;
        }
        Ok(Copied { bytes, copies })
    }

    /// Divides the positions of the runs into shares of one buffer each. Adds buffers to the ring as
    /// needed.
    fn shares(&self, copier: &mut Copier, runs: &[Run]) -> Result<Vec<Share>, SleepError> {
        let memory = self.pinned_memory()?;
        let bytes = runs.last().map_or(0, Run::end);
        let count = bytes.div_ceil(BUFFER_BYTES);
        while (copier.buffers.len() as u64) < count.min(BUFFERS) {
            let event = self.driver.create_event()?;
            let pinned = memory.pin(BUFFER_BYTES).inspect_err(|_| {
                self.events.return_unused(&[(event, copier.stream)]);
            });
            let pinned = pinned.map_err(|error| no_memory(BUFFER_BYTES, error))?;
            copier.buffers.push(Buffer { pinned, event });
        }
        let buffers = copier.buffers.iter().copied().cycle();
        let share = |(number, buffer): (u64, Buffer)| {
            let start = number * BUFFER_BYTES;
            Share { buffer, positions: start..bytes.min(start + BUFFER_BYTES) }
        };
        Ok((0..count).zip(buffers).map(share).collect())
    }

    /// Reads the saved bytes from `address + at` on, if those from `address` to `address + size_bytes` are
    /// all in one saved block. `None` if they are not.
    pub(super) fn read_saved(
        &self,
        saved: &SavedContents,
        (address, size_bytes): (u64, u64),
        at: u64,
        into: &mut [u8],
    ) -> Option<Result<(), DriverError>> {
        let (found, start) = saved.find(address, size_bytes)?;
        let offset = start + at;
        match found {
            Saved::Own(bytes) => {
                let start = usize::try_from(offset).ok()?;
                into.copy_from_slice(bytes.get(start..start.checked_add(into.len())?)?);
                Some(Ok(()))
            }
            Saved::Pinned { position, .. } => {
                Some(self.read_stores(saved, position + offset, into))
            }
        }
    }

    fn read_stores(
        &self,
        saved: &SavedContents,
        from: u64,
        into: &mut [u8],
    ) -> Result<(), DriverError> {
        let memory = self.pinned_memory()?;
        let whole = Run { address: 0, size_bytes: into.len() as u64, position: from };
        for (pinned, positions) in saved.stores() {
            let Some(part) = whole.within(&positions) else { continue };
            // The run's addresses count from 0, so they are indices here.
            let [start, size] = [part.address, part.size_bytes]
                .map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
            let to = &mut into[start..start + size];
            memory.read_pinned(pinned, part.position - positions.start, to)?;
        }
        Ok(())
    }

    /// Releases pinned memory. What fails is kept for a later try.
    pub(super) fn unpin(&self, growth: &mut Growth, mut stores: Vec<PinnedId>) {
        stores.retain(|store| match self.driver.pinned_memory() {
            Some(memory) => memory.unpin(*store).is_err(),
            None => true,
        });
        growth.leftovers.pinned.extend(stores);
    }

    /// Releases the stream and the buffers for copies, unless a pause or a resume uses them. Releases other
    /// pinned memory that is not used any more, after a wait for copies that may still use it.
    pub(super) fn release_copier(&self, growth: &mut Growth) {
        let copier = self.copier.lock().take();
        if let Some(copier) = copier {
            self.drop_copier(growth, copier, true);
        }
        if !growth.leftovers.pinned.is_empty()
            && synchronize_outside_captures(&*self.driver).is_ok()
        {
            let stores = std::mem::take(&mut growth.leftovers.pinned);
            self.unpin(growth, stores);
        }
    }

    /// Releases the stream and the buffers for copies. If copies may still run, keeps the pinned memory for a
    /// later try.
    fn drop_copier(&self, growth: &mut Growth, copier: Copier, is_over: bool) {
        let pinned = copier.buffers.iter().map(|buffer| buffer.pinned);
        if is_over {
            self.unpin(growth, pinned.collect());
        } else {
            growth.leftovers.pinned.extend(pinned);
        }
        let events: Vec<_> =
            copier.buffers.iter().map(|buffer| (buffer.event, copier.stream)).collect();
        self.events.return_unused(&events);
        // A stream that the driver fails to destroy is destroyed with its context.
        let _ = self.driver.destroy_stream(copier.stream);
    }

    /// Releases the backups of all tags when the engine is dropped. Memory that copies may still use leaks
    /// if the wait for them fails.
    pub(super) fn drop_backups(&self) {
        let mut growth = self.growth.lock();
        let stores = growth.pools.take_stores();
        self.unpin(&mut growth, stores);
        self.release_copier(&mut growth);
    }
}

/// Returns zeroed host memory.
fn zeroes(size_bytes: u64) -> Result<Vec<u8>, SleepError> {
    let mut bytes = Vec::new();
    let size = usize::try_from(size_bytes).unwrap_or(usize::MAX);
    match bytes.try_reserve_exact(size) {
        Ok(()) => bytes.resize(size, 0),
        Err(_) => return Err(SleepError::HostMemory { size_bytes, driver: None }),
    }
    Ok(bytes)
}

fn no_memory(size_bytes: u64, error: DriverError) -> SleepError {
    if error.is_out_of_memory() {
        SleepError::HostMemory { size_bytes, driver: Some(error) }
    } else {
        error.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(address: u64, size_bytes: u64, position: u64) -> Run {
        Run { address, size_bytes, position }
    }

    #[test]
    fn neighbours_are_joined_if_they_are_adjacent_in_both_spaces() {
        let blocks = in_order([(0, 4), (4, 2), (8, 2), (10, 6)]);
        assert_eq!(joined(&blocks), [run(0, 6, 0), run(8, 8, 6)]);
        let apart = [run(0, 4, 0), run(4, 2, 6)];
        assert_eq!(joined(&apart), apart);
        assert!(joined(&[]).is_empty());
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
