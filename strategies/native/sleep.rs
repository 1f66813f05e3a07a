//! Tags: private pools that can be paused and resumed. `pause` and `resume` have the steps, `backup` the
//! contents, `copies` their transport.
//!
//! Every segment of a tag is a reservation of virtual memory. A pause copies the live blocks and unmaps
//! all pages; a resume maps new pages at the same addresses and copies the blocks back. Four rules:
//!
//! - Pages change only under the growth lock, and copies run without it. The state of the tag, which is
//!   set under the growth lock, keeps all other operations away until it ends.
//! - The heaps of a tag keep their blocks. A tag that is not awake has a policy that allows none of its
//!   free blocks ([`HitPolicy::asleep`](super::policy::HitPolicy::asleep)), so a hit checks nothing more
//!   than before.
//! - No page is unmapped before all contents are saved, and none is mapped before all physical memory
//!   exists.
//! - A live block of a tag that sleeps is marked as used by a stream that does not exist
//!   ([`StreamUse::BACKED_UP`]). Its free therefore leaves the fast path, drops the saved bytes, and
//!   waits for no stream.
//!
//! A pause that fails leaves the tag awake. If the driver fails to unmap a range after all was saved, the
//! pause goes on, and the range stays mapped for the next resume. A resume that fails leaves the tag
//! asleep with its backup.

use std::collections::BTreeMap;
use std::path::Path;

use parking_lot::MutexGuard;

use super::backup::SavedContents;
use super::cell::{HeapCell, HeapState};
use super::copies::BUFFER_BYTES;
use super::engine::Engine;
use super::expandable::Page;
use super::growth::Growth;
use super::pools::Pools;
use crate::allocator::{
    PauseOptions, Paused, PoolOptions, Resumed, SleepError, Sleeping, TagInfo, TagOptions,
    TagState, WhileAsleep,
};
use crate::diagnostics;
use crate::driver::{Exportable, PhysicalId, PinnedId, VirtualMemory};
use crate::error::{DriverError, HandleError, PoolError};
use crate::heap::{BlockId, PageRun, StreamUse};
use crate::history::Action;
use crate::ids::PoolId;
use crate::size::PoolKind;
use crate::stats::{ALL, CounterIndex};

pub(super) use super::copies::Copier;

/// The state of a tag. Protected by the growth lock.
#[derive(Debug)]
pub(super) struct Sleep {
    pub(super) options: TagOptions,
    pub(super) state: TagState,
    /// False while its pages are in `pages` and not in `Growth::pages`.
    pub(super) is_mapped: bool,
    /// The pages to map at the next resume, by address.
    pub(super) pages: BTreeMap<u64, SleepingPage>,
    /// Empty while a thread copies.
    pub(super) backup: SavedContents,
    pub(super) pauses: u64,
    pub(super) resumes: u64,
    /// The process that created the tag.
    process: u32,
}

/// A page of a tag that sleeps.
#[derive(Clone, Copy, Debug)]
pub(super) struct SleepingPage {
    pub(super) size_bytes: u64,
    pub(super) exportable: Exportable,
    pub(super) kind: PoolKind,
    /// The number of its heap, and the address of its reservation.
    pub(super) heap: u32,
    pub(super) reservation: u64,
    /// Its memory, if it could not be unmapped.
    pub(super) held: Option<PhysicalId>,
}

impl SleepingPage {
    /// Returns the page as one that is mapped.
    pub(super) fn mapped(&self, piece: PhysicalId) -> Page {
        Page { piece, exportable: self.exportable, shared: None, handle: None }
    }
}

impl Sleep {
    /// Returns the state of a new tag, which is awake.
    pub(super) fn new(options: TagOptions) -> Box<Self> {
        Box::new(Self {
            options,
            state: TagState::Awake,
            is_mapped: true,
            pages: BTreeMap::new(),
            backup: SavedContents::default(),
            pauses: 0,
            resumes: 0,
            process: std::process::id(),
        })
    }

    pub(super) fn is_awake(&self) -> bool {
        self.state == TagState::Awake
    }

    /// Returns true while a thread pauses or resumes the tag.
    pub(super) fn is_changing(&self) -> bool {
        matches!(self.state, TagState::Pausing | TagState::Resuming)
    }

    /// Returns true if the process has forked since the tag was created.
    fn is_of_parent(&self) -> bool {
        self.process != std::process::id()
    }

    /// Returns the bytes of pages whose memory was released.
    pub(super) fn asleep_bytes(&self) -> u64 {
        let released = self.pages.values().filter(|page| page.held.is_none());
        released.map(|page| page.size_bytes).sum()
    }
}

impl Pools {
    /// Removes and returns the pages of sleeping tags that could not be unmapped.
    pub(super) fn take_held_pages(&mut self) -> Vec<(u64, Page)> {
        let pages = self.tags_mut().flat_map(|tag| std::mem::take(&mut tag.pages));
        pages.filter_map(|(at, page)| Some((at, page.mapped(page.held?)))).collect()
    }

    /// Removes and returns the pinned memory of all tags.
    pub(super) fn take_stores(&mut self) -> Vec<PinnedId> {
        self.tags_mut().flat_map(|tag| tag.backup.take_stores()).collect()
    }
}

impl Engine {
    /// Fails if the options make the pool a tag and the device or another option prevents that.
    pub(super) fn check_tag(
        &self,
        growth: &Growth,
        pool: PoolId,
        options: &PoolOptions,
    ) -> Result<(), PoolError> {
        let Some(tag) = &options.tag else { return Ok(()) };
        let has_memory =
            self.driver.virtual_memory().is_some() && self.driver.pinned_memory().is_some();
        let what = if !has_memory {
            "tags on a device without virtual memory or without pinned memory"
        } else if options.allocator.is_some() {
            "tags with segments of a user's allocator"
        } else if options.use_on_oom {
            "tags with use_on_oom"
        } else if growth.pools.is_taken(&tag.name, pool) {
            "two tags of one name"
        } else {
            return Ok(());
        };
        Err(PoolError::NotSupported { pool, what })
    }

    /// Begins to pause or to resume a tag: sets the state `to`, in which no other operation changes it.
    /// Returns false if there is nothing to do. Waits for other threads that pause or resume it or
    /// serve a request in it.
    pub(super) fn begin_change(
        &self,
        growth: &mut MutexGuard<'_, Growth>,
        pool: PoolId,
        to: TagState,
    ) -> Result<bool, SleepError> {
        if self.history.is_in_tracker() {
            return Err(SleepError::InTracker { pool });
        }
        loop {
            growth.pools.in_use(pool)?;
            let sleep = growth.pools.tag(pool).ok_or(SleepError::NotATag { pool })?;
            if sleep.is_of_parent() {
                return Err(SleepError::Forked { pool });
            }
            match (sleep.state, to) {
                (TagState::Pausing | TagState::Resuming, _) => {
                    self.slept.wait(growth);
                    continue;
                }
                (TagState::Awake, TagState::Pausing) | (TagState::Asleep, TagState::Resuming) => {}
                _ => return Ok(false),
            }
            if !growth.pools.is_busy(pool) {
                break;
            }
            self.announced.wait(growth);
        }
        let cells = self.heaps_of(growth, pool);
        if self.scopes.any_capture() || cells.iter().any(|cell| self.is_captured(cell.stream())) {
            return Err(SleepError::Capturing { pool });
        }
        self.set_state(growth, pool, to);
        Ok(true)
    }

    /// Sets the state of a tag and the policy of its heaps, and wakes waiting threads.
    pub(super) fn set_state(&self, growth: &mut Growth, pool: PoolId, to: TagState) {
        if let Some(sleep) = growth.pools.tag_mut(pool) {
            sleep.state = to;
        }
        let policy = growth.policy_of(pool);
        for cell in self.heaps_of(growth, pool) {
            cell.lock().set_policy(policy);
        }
        self.slept.notify_all();
    }

    /// Waits until a tag is awake, if its options and the caller allow that. Returns false if the request
    /// must fail.
    #[cold]
    pub(super) fn wait_until_awake(
        &self,
        growth: &mut MutexGuard<'_, Growth>,
        pool: PoolId,
        capturing: bool,
    ) -> bool {
        if capturing || self.history.is_in_tracker() {
            return false;
        }
        loop {
            let Some(sleep) = growth.pools.tag(pool) else { return false };
            if sleep.is_awake() {
                return true;
            }
            let waits = sleep.options.requests == WhileAsleep::Wait && !sleep.is_of_parent();
            if !waits || !growth.pools.has_users(pool) {
                return false;
            }
            self.slept.wait(growth);
        }
    }

    /// Frees a live block of a tag that sleeps, and drops its saved contents first. All work that used the
    /// block has finished, so it becomes free at once. The caller holds no lock.
    ///
    /// While the growth lock is held, the tag is neither paused nor resumed, and the block is live. So no
    /// resume finds the saved contents of a block whose pages are gone, and the contents are not those of
    /// a later block at this address.
    #[cold]
    #[inline(never)]
    pub(super) fn free_asleep(
        &self,
        cell: &HeapCell,
        id: BlockId,
        address: u64,
    ) -> Result<(), HandleError> {
        let unused = {
            let mut growth = self.growth.lock();
            let mut state = cell.lock();
            if let Some(slot) = state.heap.live(id, address)
                && state.heap.uses(slot).any(|by| by == StreamUse::BACKED_UP)
            {
                state.heap.forget_uses(slot);
                // The contents of freed blocks of a pinned tag stay in the backup.
                if !growth.pools.is_pinned(cell.pool())
                    && let Some(sleep) = growth.pools.tag_mut(cell.pool())
                {
                    sleep.backup.forget(address);
                    sleep.backup.take_unused()
                } else {
                    None
                }
            } else {
                None
            }
        };
        drop(unused);
        let _context = self.history.of_free();
        self.free_unused(cell, address, id)
    }

    /// Marks all live blocks of a heap, whose tag is about to sleep.
    pub(super) fn mark_live(state: &mut HeapState) {
        for slot in state.heap.live_blocks() {
            state.heap.record_use(slot, StreamUse::BACKED_UP);
        }
    }

    /// Removes the marks of a heap's blocks.
    pub(super) fn unmark_live(state: &mut HeapState) {
        for slot in state.heap.live_blocks() {
            let uses: Vec<_> = state.heap.uses(slot).collect();
            state.heap.forget_uses(slot);
            let kept = uses.into_iter().rev().filter(|by| *by != StreamUse::BACKED_UP);
            kept.for_each(|by| state.heap.record_use(slot, by));
        }
    }

    /// Releases the addresses of whole pages inside a free block of a tag that sleeps. They have no
    /// memory, except those that the pause could not unmap. Returns the bytes of that memory.
    pub(super) fn release_sleeping_pages(
        &self,
        growth: &mut MutexGuard<'_, Growth>,
        memory: &dyn VirtualMemory,
        cell: &HeapCell,
        run: &PageRun,
    ) -> Result<u64, DriverError> {
        let removed = {
            let mut state = cell.lock();
            if state.heap.whole_pages(run.slot) != Some(*run) {
                return Ok(0);
            }
            state.heap.hold(run.slot);
            let gap = state.heap.unmapped(*run, self.now());
            state.heap.remove_reservation(gap)
        };
        let mut held_bytes = 0;
        let pages = growth.pools.tag_mut(cell.pool()).map(|sleep| &mut sleep.pages);
        let pages = pages.into_iter().flat_map(|pages| {
            pages.extract_if(run.address..run.address + run.size_bytes, |_, _| true)
        });
        for (address, page) in pages.collect::<Vec<_>>() {
            if let Some(piece) = page.held {
                growth.leftovers.mapped.push((address, page.size_bytes));
                growth.leftovers.pieces.push((piece, page.size_bytes));
                held_bytes += page.size_bytes;
            }
        }
        if held_bytes > 0 {
            growth.pages_removed(cell.pool(), run.kind, held_bytes);
        }
        self.record(Action::SegmentUnmap, run.address, run.size_bytes, cell);
        self.forget_reservation(growth, removed);
        growth.leftovers.offer(memory)?;
        Ok(held_bytes)
    }

    fn info_of(&self, growth: &Growth, pool: PoolId, sleep: &Sleep) -> TagInfo {
        let live = |cell: &HeapCell| {
            let live = cell.lock().counters.current(ALL).of(CounterIndex::AllocatedBytes);
            u64::try_from(live).unwrap_or(0)
        };
        let reserved = growth.reserved_by_pool.get(&pool);
        TagInfo {
            options: sleep.options.clone(),
            state: sleep.state,
            live_bytes: self.heaps_of(growth, pool).into_iter().map(live).sum(),
            mapped_bytes: reserved.map_or(0, |of| of.all.current.unsigned_abs()),
            asleep_bytes: sleep.asleep_bytes(),
            backed_bytes: sleep.backup.bytes(),
            kept_backup_bytes: sleep.backup.kept_bytes(),
            pauses: sleep.pauses,
            resumes: sleep.resumes,
        }
    }
}

impl Sleeping for Engine {
    fn pause(&self, pool: PoolId, options: &PauseOptions) -> Result<Paused, SleepError> {
        let _lines = diagnostics::lines();
        let _context = self.history.of_free();
        self.pause_tag(pool, options)
    }

    fn resume(&self, pool: PoolId) -> Result<Resumed, SleepError> {
        let _lines = diagnostics::lines();
        let _context = self.history.of_free();
        self.resume_tag(pool)
    }

    fn tag_info(&self, pool: PoolId) -> Result<TagInfo, SleepError> {
        let growth = self.growth.lock();
        if growth.pools.options_of(pool).is_none() {
            return Err(PoolError::missing(pool).into());
        }
        let sleep = growth.pools.tag(pool).ok_or(SleepError::NotATag { pool })?;
        Ok(self.info_of(&growth, pool, sleep))
    }

    fn set_directory(&self, pool: PoolId, directory: Option<&Path>) -> Result<(), SleepError> {
        let mut growth = self.growth.lock();
        growth.pools.in_use(pool)?;
        let sleep = growth.pools.tag_mut(pool).ok_or(SleepError::NotATag { pool })?;
        sleep.options.directory = directory.map(Path::to_owned);
        Ok(())
    }

    fn tags(&self) -> Vec<(PoolId, TagInfo)> {
        let growth = self.growth.lock();
        let used = growth.pools.tags().filter(|(pool, _)| growth.pools.has_users(*pool));
        used.map(|(pool, sleep)| (pool, self.info_of(&growth, pool, sleep))).collect()
    }

    fn read_backup(&self, address: u64, into: &mut [u8]) -> Result<(), SleepError> {
        let range = (address, into.len() as u64);
        // The lock is released between the parts, because requests need it.
        let mut at = 0;
        for part in into.chunks_mut(usize::try_from(BUFFER_BYTES).unwrap_or(usize::MAX)) {
            let mut growth = self.growth.lock();
            let read = growth
                .pools
                .tags_mut()
                .find_map(|sleep| self.read_saved(&mut sleep.backup, range, at, part));
            read.ok_or(SleepError::NoBackup { address })??;
            at += part.len() as u64;
        }
        Ok(())
    }
}
