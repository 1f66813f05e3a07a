//! Pausing a tag: wait, save the live blocks, unmap. See `sleep`.

use parking_lot::MutexGuard;

use super::backup::SavedContents;
use super::cell::HeapCell;
use super::copies::Copied;
use super::engine::Engine;
use super::growth::Growth;
use super::sleep::SleepingPage;
use crate::allocator::{Backup, Freed, PauseOptions, Paused, SleepError, TagOptions, TagState};
use crate::driver::synchronize_outside_captures;
use crate::error::{DriverError, DriverErrorKind};
use crate::heap::Reservation;
use crate::history::Action;
use crate::ids::{PoolId, StreamId};
use crate::stats::{ALL, CounterIndex};

/// A mapped range of pages of a tag.
#[derive(Clone, Copy, Debug)]
struct MappedRange<'a> {
    cell: &'a HeapCell,
    address: u64,
    size_bytes: u64,
    reservation: Reservation,
}

impl Engine {
    /// See [`Sleeping::pause`](crate::allocator::Sleeping::pause).
    pub(super) fn pause_tag(
        &self,
        pool: PoolId,
        options: &PauseOptions,
    ) -> Result<Paused, SleepError> {
        let (tag, mut saved) = {
            let mut growth = self.growth.lock();
            if !self.begin_change(&mut growth, pool, TagState::Pausing)? {
                return Ok(Paused::default());
            }
            if let Err(error) = self.check_not_shared(&growth, pool) {
                self.set_state(&mut growth, pool, TagState::Awake);
                return Err(error);
            }
            let tag = growth.pools.tag_mut(pool).expect("its state was set");
            (tag.options.clone(), std::mem::take(&mut tag.backup))
        };
        let backup = options.backup.unwrap_or(tag.backup);
        let copied = self.empty_streams(pool, options).and_then(|()| {
            let copied = self.save_blocks(pool, backup, &tag, &mut saved)?;
            self.finish_frees(pool)?;
            Ok(copied)
        });
        let mut growth = self.growth.lock();
        let done = copied.and_then(|copied| {
            let dropped = self.close_blocks(&mut growth, pool, backup, &mut saved)?;
            Ok((copied, dropped))
        });
        let unused = if done.is_err() { saved.clear() } else { saved.take_unused() };
        if let Some(sleep) = growth.pools.tag_mut(pool) {
            sleep.backup = saved;
        }
        let paused = done.map(|(copied, dropped)| {
            let mut paused = Paused {
                copied_bytes: copied.bytes,
                copies: copied.copies,
                dropped,
                ..Paused::default()
            };
            self.unmap_tag(&mut growth, pool, &mut paused);
            if let Some(sleep) = growth.pools.tag_mut(pool) {
                sleep.pauses += 1;
            }
            paused
        });
        let state = if paused.is_ok() { TagState::Asleep } else { TagState::Awake };
        self.set_state(&mut growth, pool, state);
        // The memory or the files are large, so they are dropped without the lock.
        drop(growth);
        drop(unused);
        paused
    }

    /// Returns the heaps of a tag in ascending order of their numbers.
    pub(super) fn heaps_of_tag(&self, growth: &Growth, pool: PoolId) -> Vec<&HeapCell> {
        let mut cells = self.heaps_of(growth, pool);
        cells.sort_by_key(|cell| cell.number);
        cells
    }

    /// Returns the live blocks of a tag, address and size, in address order.
    pub(super) fn live_blocks_of(&self, growth: &Growth, pool: PoolId) -> Vec<(u64, u64)> {
        let mut blocks = Vec::new();
        for cell in self.heaps_of(growth, pool) {
            let heap = &cell.lock().heap;
            let live = heap.live_blocks().into_iter().map(|slot| heap.view(slot));
            blocks.extend(live.map(|block| (block.address, block.size_bytes)));
        }
        blocks.sort_unstable();
        blocks
    }

    /// Waits for all work that uses a tag.
    fn empty_streams(&self, pool: PoolId, options: &PauseOptions) -> Result<(), SleepError> {
        self.drain_events(Some(pool))?;
        if options.synchronized {
            return Ok(());
        }
        let mut streams = options.streams.clone();
        let is_pinned = {
            let growth = self.growth.lock();
            for cell in self.heaps_of_tag(&growth, pool) {
                streams.push(cell.stream());
                let heap = &cell.lock().heap;
                let live = heap.live_blocks();
                streams.extend(live.iter().flat_map(|slot| heap.uses(*slot)).map(|by| by.stream));
            }
            growth.pools.is_pinned(pool)
        };
        streams.sort_unstable();
        streams.dedup();
        let is_unknown =
            is_pinned || streams.iter().any(|&stream| self.driver.is_per_thread_stream(stream));
        let waited = match is_unknown {
            true => synchronize_outside_captures(&*self.driver),
            false => self.wait_for_streams(&streams),
        };
        waited.map_err(|error| match error.kind() {
            DriverErrorKind::CaptureActive => SleepError::NeedsSynchronization { pool },
            _ => error.into(),
        })
    }

    fn wait_for_streams(&self, streams: &[StreamId]) -> Result<(), DriverError> {
        let events = self.events.record(&*self.driver, streams.iter().copied())?;
        let mut waits = events.iter().map(|(event, _)| self.driver.synchronize_event(*event));
        let waited = waits.try_for_each(|waited| waited);
        drop(waits);
        self.events.return_unused(&events);
        waited
    }

    /// Saves the live blocks, unless the backup is `None`. Releases whole free pages during the copies. Of
    /// a pinned tag, saves all mapped ranges and releases nothing.
    fn save_blocks(
        &self,
        pool: PoolId,
        backup: Backup,
        tag: &TagOptions,
        saved: &mut SavedContents,
    ) -> Result<Copied, SleepError> {
        let (idle, blocks) = {
            let growth = self.growth.lock();
            if growth.pools.is_pinned(pool) {
                // A graph or a checkpoint may refer to the contents of freed blocks too.
                let ranges = self.mapped_ranges_of(&growth, pool).into_iter();
                let all = ranges.map(|range| (range.address, range.size_bytes)).collect();
                (Vec::new(), all)
            } else {
                // The free pages are listed before the live blocks: a block that is freed between the two is
                // in neither list.
                let idle = match tag.keep_free {
                    true => Vec::new(),
                    false => self.idle_memory(&growth, pool),
                };
                (idle, self.live_blocks_of(&growth, pool))
            }
        };
        let release = || {
            // Pages that are not released here are unmapped with the others.
            let _ = self.release_listed(&mut self.growth.lock(), idle);
        };
        if backup == Backup::None {
            drop(saved.clear());
            release();
            return Ok(Copied::default());
        }
        let (copied, is_over) = self
            .with_copier(|copier| self.save(saved, copier, blocks.iter().copied(), tag, release));
        if !is_over {
            // A copy may still write to the pinned memory.
            let stores = saved.take_stores();
            self.growth.lock().leftovers.pinned.extend(stores);
        }
        copied
    }

    /// Waits until no freed block of the tag waits for other streams.
    fn finish_frees(&self, pool: PoolId) -> Result<(), SleepError> {
        self.drain_events(Some(pool))?;
        if self.captures.has_deferred(pool) {
            return Err(SleepError::Capturing { pool });
        }
        Ok(())
    }

    /// Waits until no freed block waits for streams. Then marks the live blocks, and drops the contents of
    /// blocks that were freed during the copies. Returns the live blocks if there is no backup.
    fn close_blocks(
        &self,
        growth: &mut MutexGuard<'_, Growth>,
        pool: PoolId,
        backup: Backup,
        saved: &mut SavedContents,
    ) -> Result<Vec<Freed>, SleepError> {
        loop {
            let mut states: Vec<_> =
                self.heaps_of_tag(growth, pool).into_iter().map(HeapCell::lock).collect();
            let drains = states.iter().any(|state| {
                let now = state.counters.current(ALL);
                now.of(CounterIndex::ActiveBytes) != now.of(CounterIndex::AllocatedBytes)
            });
            if !drains {
                let mut live = Vec::new();
                for state in &mut states {
                    let blocks = state.heap.live_blocks().into_iter();
                    live.extend(blocks.map(|slot| Freed {
                        address: state.heap.view(slot).address,
                        size_bytes: state.heap.requested_bytes(slot),
                    }));
                }
                states.iter_mut().for_each(|state| Self::mark_live(state));
                live.sort_unstable_by_key(|block| block.address);
                if backup == Backup::None {
                    return Ok(live);
                }
                if !growth.pools.is_pinned(pool) {
                    saved.retain(|address| {
                        live.binary_search_by_key(&address, |block| block.address).is_ok()
                    });
                }
                return Ok(Vec::new());
            }
            // A block was freed since the last wait. Its events may be in the hands of another thread.
            drop(states);
            MutexGuard::unlocked(growth, || {
                std::thread::yield_now();
                self.finish_frees(pool)
            })?;
        }
    }

    /// Returns the mapped ranges of a tag, each inside one reservation.
    fn mapped_ranges_of<'a>(&'a self, growth: &Growth, pool: PoolId) -> Vec<MappedRange<'a>> {
        let mut found = Vec::new();
        for cell in self.heaps_of_tag(growth, pool) {
            let heap = &cell.lock().heap;
            let mut reservations: Vec<_> = heap.reservations().collect();
            reservations.sort_unstable_by_key(|reservation| reservation.address);
            for (address, size_bytes) in heap.mapped_ranges() {
                let behind = reservations.partition_point(|of| of.address <= address);
                if let Some(&reservation) = behind.checked_sub(1).map(|at| &reservations[at]) {
                    found.push(MappedRange { cell, address, size_bytes, reservation });
                }
            }
        }
        found.sort_unstable_by_key(|range| range.address);
        found
    }

    /// Unmaps all pages of a tag and keeps the list of them for a resume. A range that the driver fails to
    /// unmap stays in the list with its memory.
    pub(super) fn unmap_tag(
        &self,
        growth: &mut MutexGuard<'_, Growth>,
        pool: PoolId,
        paused: &mut Paused,
    ) {
        let Ok(memory) = self.virtual_memory() else { return };
        for range in self.mapped_ranges_of(growth, pool) {
            let MappedRange { cell, address, size_bytes, .. } = range;
            self.announce(growth, Action::SegmentUnmap, address, size_bytes, cell);
            let unmapped = memory.unmap(address, size_bytes);
            self.keep_pages(growth, &range, unmapped.is_err());
            match unmapped {
                Ok(()) => {
                    paused.unmapped_bytes += size_bytes;
                    growth.pages_removed(pool, range.reservation.kind, size_bytes);
                    self.record(Action::TagPause, address, size_bytes, cell);
                }
                Err(error) => {
                    paused.still_held_bytes += size_bytes;
                    paused.error.get_or_insert(error);
                    self.announce(growth, Action::SegmentMap, address, size_bytes, cell);
                }
            }
        }
        if let Some(sleep) = growth.pools.tag_mut(pool) {
            sleep.is_mapped = false;
        }
        if let Err(error) = growth.leftovers.offer(memory) {
            paused.error.get_or_insert(error);
        }
    }

    /// Keeps all pages of a tag mapped, and lists them for a resume.
    pub(super) fn hold_tag(&self, growth: &mut Growth, pool: PoolId) {
        for range in self.mapped_ranges_of(growth, pool) {
            self.keep_pages(growth, &range, true);
        }
        if let Some(sleep) = growth.pools.tag_mut(pool) {
            sleep.is_mapped = false;
        }
    }

    /// Moves the pages of a range to the list of the tag, with their memory if `held`.
    fn keep_pages(&self, growth: &mut Growth, range: &MappedRange<'_>, held: bool) {
        let Reservation { address: reservation, page_bytes, kind, .. } = range.reservation;
        let addresses = (range.address..range.address + range.size_bytes)
            .step_by(usize::try_from(page_bytes).unwrap_or(usize::MAX));
        for address in addresses {
            let Some(page) = growth.pages.remove(&address) else { continue };
            if !held {
                growth.leftovers.pieces.push((page.piece, page_bytes));
            }
            let kept = SleepingPage {
                size_bytes: page_bytes,
                exportable: page.exportable,
                kind,
                heap: range.cell.number,
                reservation,
                held: held.then_some(page.piece),
            };
            if let Some(sleep) = growth.pools.tag_mut(range.cell.pool()) {
                sleep.pages.insert(address, kept);
            }
        }
    }

    /// Fails if another process may have a page of the tag open.
    pub(super) fn check_not_shared(&self, growth: &Growth, pool: PoolId) -> Result<(), SleepError> {
        for MappedRange { address, size_bytes, reservation, .. } in
            self.mapped_ranges_of(growth, pool)
        {
            let step = usize::try_from(reservation.page_bytes).unwrap_or(usize::MAX);
            let shared = |address: &u64| {
                let page = growth.pages.get(address);
                page.is_some_and(|page| page.shared.is_some() || page.handle.is_some())
            };
            if let Some(address) = (address..address + size_bytes).step_by(step).find(shared) {
                return Err(SleepError::Shared { address });
            }
        }
        Ok(())
    }
}
