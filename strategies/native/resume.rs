//! Resuming a tag: take all memory, map it at the same addresses, copy the blocks back. See `sleep`.

use std::cmp::Reverse;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use parking_lot::MutexGuard;

use super::copies::{Copier, KeptCopies};
use super::engine::Engine;
use super::growth::Growth;
use super::sleep::{Sleep, SleepingPage};
use crate::allocator::{MissingMemory, Paused, Resumed, SleepError, TagState};
use crate::driver::{PhysicalId, VirtualMemory, largest_holders, unless_captured};
use crate::error::DriverError;
use crate::history::Action;
use crate::ids::PoolId;
use crate::size::MIB;

/// The most pools that the error of a resume names.
const POOLS_MAX: usize = 5;

/// The most bytes of a range of several pages. The copies to a range are submitted before the next range is
/// mapped. To copy this many bytes takes a few milliseconds.
const RANGE_BYTES: u64 = 256 * MIB;

/// The pages that were mapped when a call failed.
#[derive(Clone, Copy, Debug)]
struct Mapped {
    /// The number of pages, in address order.
    pages: usize,
    /// False if copies to them may still run.
    is_over: bool,
}

/// A page to map, by address.
type ToMap = (u64, SleepingPage);

/// A contiguous range of pages of one reservation.
#[derive(Clone, Copy, Debug)]
struct PageRange {
    address: u64,
    size_bytes: u64,
    first: SleepingPage,
}

impl Engine {
    /// See [`Sleeping::resume`](crate::allocator::Sleeping::resume).
    pub(super) fn resume_tag(&self, pool: PoolId) -> Result<Resumed, SleepError> {
        let memory = self.virtual_memory()?;
        let has_backup = {
            let mut growth = self.growth.lock();
            if !self.begin_change(&mut growth, pool, TagState::Resuming)? {
                return Ok(Resumed::default());
            }
            growth.pools.tag(pool).is_some_and(|sleep| sleep.backup.bytes() > 0)
        };
        let (resumed, is_over) = match has_backup {
            true => self.with_copier(|copier| self.wake(memory, pool, Some(copier))),
            false => (self.wake(memory, pool, None), true),
        };
        if resumed.is_err() {
            let mut growth = self.growth.lock();
            if growth.pools.is_mapped(pool) {
                self.forget_freed(&mut growth, pool);
                self.unmap_after(&mut growth, pool, is_over);
            }
            let tag = growth.pools.tag_mut(pool);
            let unused = tag.and_then(|sleep| sleep.backup.take_unused());
            self.set_state(&mut growth, pool, TagState::Asleep);
            drop(growth);
            drop(unused);
        }
        resumed
    }

    /// Maps the pages of a tag and copies its blocks back. If that fails, the backup is complete, and the
    /// pages are all mapped or not at all. Needs a copier if there is a backup.
    fn wake(
        &self,
        memory: &dyn VirtualMemory,
        pool: PoolId,
        mut copier: Option<&mut Copier>,
    ) -> Result<Resumed, SleepError> {
        let mut growth = self.growth.lock();
        self.forget_freed(&mut growth, pool);
        let mapped_bytes = self.map_tag(&mut growth, memory, pool, copier.as_deref())?;
        let sleep = growth.pools.tag_mut(pool).expect("a tag that changes is not removed");
        let mut saved = std::mem::take(&mut sleep.backup);
        let copied = MutexGuard::unlocked(&mut growth, || match copier.take() {
            Some(copier) => self.finish_load(&mut saved, copier),
            None => Ok(0),
        });
        let copied_bytes = match copied {
            Ok(bytes) => bytes,
            Err(error) => {
                if let Some(sleep) = growth.pools.tag_mut(pool) {
                    sleep.backup = saved;
                }
                return Err(error);
            }
        };
        for cell in self.heaps_of_tag(&growth, pool) {
            Self::unmark_live(&mut cell.lock());
        }
        let unkept = saved.clear();
        if let Some(sleep) = growth.pools.tag_mut(pool) {
            sleep.backup = saved;
            sleep.resumes += 1;
        }
        self.set_state(&mut growth, pool, TagState::Awake);
        drop(growth);
        drop(unkept);
        Ok(Resumed { mapped_bytes, copied_bytes })
    }

    /// Drops the saved contents of blocks that are no longer live, because their pages may be released from
    /// now on. The contents of freed blocks of a pinned tag stay.
    fn forget_freed(&self, growth: &mut Growth, pool: PoolId) {
        if growth.pools.is_pinned(pool) {
            return;
        }
        let live = self.live_blocks_of(growth, pool);
        if let Some(sleep) = growth.pools.tag_mut(pool) {
            sleep.backup.retain(|address| {
                live.binary_search_by_key(&address, |(address, _)| *address).is_ok()
            });
        }
    }

    /// Takes the memory for all pages of a tag and maps it. Submits the copies of a kept backup, those of
    /// each range as soon as it is mapped. Returns the bytes mapped.
    fn map_tag(
        &self,
        growth: &mut MutexGuard<'_, Growth>,
        memory: &dyn VirtualMemory,
        pool: PoolId,
        copier: Option<&Copier>,
    ) -> Result<u64, SleepError> {
        let is_pinned = growth.pools.is_pinned(pool);
        let keeps_free = growth.pools.tag(pool).is_some_and(|sleep| sleep.options.keep_free);
        if !is_pinned && !keeps_free {
            self.release_free_pages(growth, pool);
        }
        match self.map_pages_of(growth, memory, pool, copier) {
            Err(SleepError::OutOfMemory(_)) if !is_pinned && keeps_free => {
                self.release_free_pages(growth, pool);
                self.map_pages_of(growth, memory, pool, copier)
            }
            mapped => mapped,
        }
    }

    /// Releases the free pages of a tag that sleeps, so that its resume does not map them. Ignores errors:
    /// after one, the pages that were not reached are mapped.
    fn release_free_pages(&self, growth: &mut MutexGuard<'_, Growth>, pool: PoolId) {
        let idle = self.idle_memory(growth, pool);
        let _ = self.release_listed(growth, idle);
    }

    fn map_pages_of(
        &self,
        growth: &mut MutexGuard<'_, Growth>,
        memory: &dyn VirtualMemory,
        pool: PoolId,
        copier: Option<&Copier>,
    ) -> Result<u64, SleepError> {
        let (pages, missing, bytes) = pages_of(growth, pool);
        if self.has_room(growth, bytes) {
            // Nothing has to be released first, so the copies begin with the first range.
            match self.map_all(growth, memory, pool, (&pages, &missing), Vec::new(), copier) {
                // Another process took the memory.
                Err(SleepError::Driver(error)) if error.is_out_of_memory() => {}
                mapped => return mapped.map(|()| bytes),
            }
        }
        let (pages, missing, bytes) = pages_of(growth, pool);
        let pieces = self.create_all(growth, memory, pool, &missing, bytes)?;
        self.map_all(growth, memory, pool, (&pages, &missing), pieces, copier)?;
        Ok(bytes)
    }

    /// Returns true if the limit allows so many bytes more and the device reports them as free.
    fn has_room(&self, growth: &Growth, bytes: u64) -> bool {
        let limit_bytes = growth.limit_bytes.unwrap_or(u64::MAX);
        growth.reserved_bytes().saturating_add(bytes) <= limit_bytes
            && self.driver.memory_info().is_ok_and(|info| info.free_bytes >= bytes)
    }

    /// Creates the memory for all of these pages, `bytes` in total. Releases cached memory if there is not
    /// enough.
    fn create_all(
        &self,
        growth: &mut MutexGuard<'_, Growth>,
        memory: &dyn VirtualMemory,
        pool: PoolId,
        missing: &[ToMap],
        bytes: u64,
    ) -> Result<Vec<PhysicalId>, SleepError> {
        growth.in_flight_bytes = growth.in_flight_bytes.saturating_add(bytes);
        let mut pieces = Vec::new();
        let created = catch_unwind(AssertUnwindSafe(|| {
            self.create_pieces(growth, memory, pool, missing, &mut pieces)
        }));
        growth.in_flight_bytes = growth.in_flight_bytes.saturating_sub(bytes);
        if matches!(created, Ok(Ok(0))) {
            return Ok(pieces);
        }
        let sizes = missing.iter().map(|(_, page)| page.size_bytes);
        growth.leftovers.pieces.extend(pieces.into_iter().zip(sizes));
        // The caller gets the first error. What fails is kept for a later try.
        let _ = growth.leftovers.offer(memory);
        match created {
            Ok(Ok(short)) => Err(self.missing_memory(growth, pool, bytes, short)),
            Ok(Err(error)) => Err(error.into()),
            // An allocator of another pool panicked. Threads that pause or resume this tag wait until its
            // state is no longer `Resuming`.
            Err(panic) => {
                self.set_state(growth, pool, TagState::Asleep);
                resume_unwind(panic);
            }
        }
    }

    /// Maps all pages, range by range, and submits the copies to each range. Creates the memory of the
    /// missing pages that have no piece yet. If that fails, nothing stays mapped, except what cannot be
    /// unmapped.
    fn map_all(
        &self,
        growth: &mut MutexGuard<'_, Growth>,
        memory: &dyn VirtualMemory,
        pool: PoolId,
        (pages, missing): (&[ToMap], &[ToMap]),
        mut pieces: Vec<PhysicalId>,
        copier: Option<&Copier>,
    ) -> Result<(), SleepError> {
        let mut copies = growth.pools.tag(pool).zip(copier).map(|(sleep, copier)| {
            // Copies run beside the calls that map the next range.
            KeptCopies::new(&sleep.backup, copier)
        });
        let mut done = 0;
        let mut map = || -> Result<(), SleepError> {
            let mut unmapped = missing.iter().peekable();
            for PageRange { address, size_bytes, .. } in ranges_of(pages, RANGE_BYTES) {
                let end = address + size_bytes;
                while let Some((at, page)) = unmapped.next_if(|(at, _)| *at < end) {
                    if pieces.len() == done {
                        pieces.push(memory.create(page.size_bytes, page.exportable)?);
                    }
                    memory.map(*at, page.size_bytes, pieces[done])?;
                    done += 1;
                }
                let peers = growth.peers.iter().copied();
                for device in [self.device.device].into_iter().chain(peers) {
                    memory.set_access(address, size_bytes, device)?;
                }
                if let Some(copies) = &mut copies {
                    self.submit_below(copies, end)?;
                }
            }
            Ok(())
        };
        if let Err(error) = map() {
            // Copies may run from or to the pages.
            let is_over = copies.is_none_or(|copies| copies.is_over(&*self.driver));
            let mapped = Mapped { pages: done, is_over };
            self.take_back(growth, memory, pool, missing, &pieces, mapped);
            return Err(error);
        }
        self.note_mapped(growth, pool, pages, missing, pieces);
        Ok(())
    }

    /// Counts and announces the pages of a tag, all of which are mapped.
    fn note_mapped(
        &self,
        growth: &mut MutexGuard<'_, Growth>,
        pool: PoolId,
        pages: &[ToMap],
        missing: &[ToMap],
        pieces: Vec<PhysicalId>,
    ) {
        let pieces = missing
            .iter()
            .zip(pieces)
            .map(|((address, page), piece)| (*address, page.mapped(piece)));
        let held = pages.iter().filter_map(|(at, page)| Some((*at, page.mapped(page.held?))));
        growth.pages.extend(pieces.chain(held).collect::<Vec<_>>());
        if let Some(sleep) = growth.pools.tag_mut(pool) {
            sleep.pages.clear();
            sleep.is_mapped = true;
        }
        for (_, page) in missing {
            growth.pages_mapped_again(pool, page.kind, page.size_bytes);
        }
        for PageRange { address, size_bytes, first } in ranges_of(missing, u64::MAX) {
            if let Some(cell) = self.heaps.get(first.heap) {
                growth.counters.num_device_alloc += 1;
                self.announce(growth, Action::SegmentMap, address, size_bytes, cell);
                self.record(Action::TagResume, address, size_bytes, cell);
            }
        }
    }

    /// Creates the memory for these pages. Releases cached memory if it is short. Returns the bytes that
    /// are missing all the same, or 0.
    fn create_pieces(
        &self,
        growth: &mut MutexGuard<'_, Growth>,
        memory: &dyn VirtualMemory,
        pool: PoolId,
        pages: &[ToMap],
        pieces: &mut Vec<PhysicalId>,
    ) -> Result<u64, DriverError> {
        // The release is retried of what a pause could not release: it may suffice.
        let _ = growth.leftovers.offer(memory);
        let mut waited = false;
        loop {
            let short = self.try_create(growth, memory, pages, pieces)?;
            if short == 0 {
                return Ok(0);
            }
            if self.trim(growth, pool, short)? > 0 {
                continue;
            }
            if std::mem::replace(&mut waited, true) || !self.attention.any_event() {
                return Ok(short);
            }
            self.drain_events(None)?;
        }
    }

    /// Creates further pieces until there is one for each page. Returns the bytes that are missing, or 0.
    fn try_create(
        &self,
        growth: &Growth,
        memory: &dyn VirtualMemory,
        pages: &[ToMap],
        pieces: &mut Vec<PhysicalId>,
    ) -> Result<u64, DriverError> {
        let limit = growth.limit_bytes.unwrap_or(u64::MAX);
        let over_limit = growth.reserved_bytes().saturating_sub(limit);
        if over_limit > 0 {
            return Ok(over_limit);
        }
        for (_, page) in &pages[pieces.len()..] {
            match memory.create(page.size_bytes, page.exportable) {
                Ok(piece) => pieces.push(piece),
                Err(error) if error.is_out_of_memory() => {
                    let left = pages[pieces.len()..].iter().map(|(_, page)| page.size_bytes);
                    let free = self.driver.memory_info().map_or(0, |info| info.free_bytes);
                    let short = left.sum::<u64>().saturating_sub(free);
                    // A device may refuse although it reports enough free memory.
                    return Ok(if short > 0 { short } else { page.size_bytes });
                }
                Err(error) => return Err(error),
            }
        }
        Ok(0)
    }

    /// Releases free memory of other pools until `wanted_bytes` are released. Returns the bytes released.
    /// If there are none, returns the driver's first error, unless a capture caused it.
    fn trim(
        &self,
        growth: &mut MutexGuard<'_, Growth>,
        pool: PoolId,
        wanted_bytes: u64,
    ) -> Result<u64, DriverError> {
        // Pools without users are trimmed before pools with users.
        let mut pools: Vec<_> = growth.pools.by_id.keys().copied().collect();
        pools.retain(|other| *other != pool);
        pools.sort_by_key(|other| !growth.pools.is_freeable(*other));
        pools.insert(0, PoolId::DEFAULT);
        let may_trim = |growth: &Growth, other| {
            other == PoolId::DEFAULT
                || growth.pools.is_freeable(other)
                || !growth.is_exact() && growth.pools.may_shrink(other)
        };
        let before_bytes = growth.reserved_bytes();
        let released = |growth: &Growth| before_bytes.saturating_sub(growth.reserved_bytes());
        let mut failed = Ok(());
        for other in pools {
            for one in self.idle_memory(growth, other) {
                // Checked each time: during the calls of trackers, another thread may begin to pause or
                // resume the pool.
                let wanted = wanted_bytes.saturating_sub(released(growth));
                if wanted == 0 || !may_trim(growth, other) {
                    break;
                }
                failed = failed.and(self.release_one(growth, &one, wanted));
            }
        }
        Self::return_segments(growth);
        match released(growth) {
            0 => unless_captured(failed).map(|()| 0),
            bytes => Ok(bytes),
        }
    }

    fn missing_memory(
        &self,
        growth: &Growth,
        pool: PoolId,
        needed_bytes: u64,
        missing_bytes: u64,
    ) -> SleepError {
        let reserved = growth.reserved_by_pool.iter();
        let mut pools: Vec<_> = reserved
            .map(|(pool, of)| (*pool, of.all.current.unsigned_abs()))
            .filter(|(_, bytes)| *bytes > 0)
            .collect();
        let reserved_bytes = growth.reserved_bytes();
        let private: u64 = pools.iter().map(|(_, bytes)| bytes).sum();
        if reserved_bytes > private {
            pools.push((PoolId::DEFAULT, reserved_bytes - private));
        }
        pools.sort_unstable_by_key(|(pool, bytes)| (Reverse(*bytes), *pool));
        pools.truncate(POOLS_MAX);
        let name = |sleep: &Sleep| sleep.options.name.clone();
        SleepError::OutOfMemory(Box::new(MissingMemory {
            tag: growth.pools.tag(pool).map(name).unwrap_or_default(),
            needed_bytes,
            missing_bytes,
            device_free_bytes: self.driver.memory_info().ok().map(|info| info.free_bytes),
            limit_bytes: growth.limit_bytes,
            reserved_bytes,
            pools,
            holders: largest_holders(&*self.driver),
        }))
    }

    /// Unmaps those of these pages that were mapped, and releases the pieces. A page that the driver fails to
    /// unmap, or that copies may still use, stays in the tag's list with its memory.
    fn take_back(
        &self,
        growth: &mut Growth,
        memory: &dyn VirtualMemory,
        pool: PoolId,
        pages: &[ToMap],
        pieces: &[PhysicalId],
        mapped: Mapped,
    ) {
        for (at, ((address, page), &piece)) in pages.iter().zip(pieces).enumerate() {
            let unmap = || mapped.is_over && memory.unmap(*address, page.size_bytes).is_ok();
            if at >= mapped.pages || unmap() {
                growth.leftovers.pieces.push((piece, page.size_bytes));
                continue;
            }
            growth.pages_mapped_again(pool, page.kind, page.size_bytes);
            let kept = growth.pools.tag_mut(pool).and_then(|sleep| sleep.pages.get_mut(address));
            if let Some(kept) = kept {
                kept.held = Some(piece);
            }
        }
        let _ = growth.leftovers.offer(memory);
    }

    /// Unmaps the pages of a tag whose copies have failed. If copies may still run, the pages stay mapped
    /// for the next resume.
    fn unmap_after(&self, growth: &mut MutexGuard<'_, Growth>, pool: PoolId, is_over: bool) {
        if is_over {
            self.unmap_tag(growth, pool, &mut Paused::default());
        } else {
            self.hold_tag(growth, pool);
        }
    }
}

/// Returns the pages of a tag that sleeps, those without memory, and the bytes of the latter.
fn pages_of(growth: &Growth, pool: PoolId) -> (Vec<ToMap>, Vec<ToMap>, u64) {
    let sleep = growth.pools.tag(pool).into_iter();
    let pages: Vec<_> = sleep.flat_map(|sleep| &sleep.pages).map(|(at, of)| (*at, *of)).collect();
    let missing: Vec<_> = pages.iter().copied().filter(|(_, page)| page.held.is_none()).collect();
    let bytes = missing.iter().map(|(_, page)| page.size_bytes).sum();
    (pages, missing, bytes)
}

/// Returns the contiguous ranges of pages, which are in address order, each inside one reservation. A range
/// of several pages has at most `most_bytes`.
fn ranges_of(pages: &[ToMap], most_bytes: u64) -> Vec<PageRange> {
    let mut ranges: Vec<PageRange> = Vec::new();
    for (address, page) in pages {
        match ranges.last_mut() {
            Some(last)
                if last.address + last.size_bytes == *address
                    && last.first.reservation == page.reservation
                    && last.size_bytes + page.size_bytes <= most_bytes =>
            {
                last.size_bytes += page.size_bytes;
            }
            _ => {
                let size_bytes = page.size_bytes;
                ranges.push(PageRange { address: *address, size_bytes, first: *page });
            }
        }
    }
    ranges
}
