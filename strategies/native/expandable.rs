//! Expandable segments: reserved address space that is mapped page by page.
//!
//! A fixed segment is one allocation of the driver. A setting selects whether new segments are fixed or
//! expandable. It may change while blocks are live, so one heap may contain both kinds.
//!
//! A miss maps the missing pages in the lowest unmapped range where the request fits. To release pages
//! under memory pressure, the engine withholds a free block from allocation and synchronizes its stream.
//! It then unmaps the whole pages inside the block and makes the rest free again.
//!
//! Driver calls are made with no heap locked. A range of pages is mapped completely or not at all.
//! Memory that the driver fails to release is kept, and its release is retried later, so nothing is lost
//! and no range is mapped twice.
//!
//! Source of the order of choices: PyTorch's expandable segments.

use hashbrown::HashMap;
use parking_lot::MutexGuard;

use super::cell::HeapCell;
use super::engine::Engine;
use super::growth::{Growth, Refusal};
use super::hints::page_of;
use super::policy::Plan;
use crate::allocator::{Allocation, Expandable, ExpandableSegment};
use crate::config::{HandleType, Settings};
use crate::driver::{
    Exportable, FabricHandle, PhysicalId, PinnedId, VirtualMemory, synchronize_outside_captures,
};
use crate::error::{DriverError, DriverErrorKind};
use crate::heap::{Growing, PageRun, Reservation};
use crate::history::Action;
use crate::ids::{PoolId, StreamId};
use crate::sharing::PageEntry;
use crate::size::{OWN_SEGMENT_MIN_BYTES, OWN_SEGMENT_ROUND_BYTES, PoolKind, align_up};

/// Mapped pages by address.
pub(super) type Pages = HashMap<u64, Page>;

#[derive(Clone, Copy, Debug)]
pub(super) struct Page {
    pub(super) piece: PhysicalId,
    pub(super) exportable: Exportable,
    /// The page's entry in the exporter, once it was shared with other processes.
    pub(super) shared: Option<PageEntry>,
    /// The page's fabric handle, once it was shared over the fabric.
    pub(super) handle: Option<FabricHandle>,
}

/// Memory that the driver failed to release. The release is retried whenever the engine releases free
/// memory or maps pages.
#[derive(Debug, Default)]
pub(super) struct Leftovers {
    /// Pages that are mapped but unused: address and size.
    pub(super) mapped: Vec<(u64, u64)>,
    /// Physical handles to release, with their sizes.
    pub(super) pieces: Vec<(PhysicalId, u64)>,
    /// Reserved address space that is not needed: address and size.
    ranges: Vec<(u64, u64)>,
    /// Pinned host memory.
    pub(super) pinned: Vec<PinnedId>,
}

impl Leftovers {
    /// Returns the unused bytes of the device that the driver failed to release.
    pub(super) fn bytes(&self) -> u64 {
        self.pieces.iter().map(|(_, size_bytes)| size_bytes).sum()
    }

    /// Tries to release everything again. Keeps what fails again, for a later try.
    pub(super) fn offer(&mut self, memory: &dyn VirtualMemory) -> Result<(), DriverError> {
        let mut refused = None;
        let mut keep = |result: Result<(), DriverError>| match result {
            Ok(()) => false,
            Err(error) => {
                refused = Some(error);
                true
            }
        };
        self.mapped.retain(|&(address, size_bytes)| keep(memory.unmap(address, size_bytes)));
        self.pieces.retain(|&(piece, _)| keep(memory.release(piece)));
        self.ranges.retain(|&(address, size_bytes)| keep(memory.unreserve(address, size_bytes)));
        refused.map_or(Ok(()), Err)
    }
}

/// The size of the pages that a request maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PageSize {
    /// The size of a fixed segment, because a driver call costs the same for a small page.
    Usual,
    /// 2 MiB, or the driver's granularity. Only for large requests for which usual pages exceed the limit
    /// or the memory of the device. These pages have reservations of their own.
    Fine,
}

impl Growth {
    /// Returns the usual page size of a new reservation for a request. If new segments are fixed, a segment
    /// of a tag is a reservation of one page.
    fn usual_page_bytes(&self, memory: &dyn VirtualMemory, pool: PoolId, plan: &Plan) -> u64 {
        let page_bytes = match self.has_one_page(pool) {
            true => plan.segment_bytes,
            false => page_of(plan.kind, self.settings.large_segment_bytes),
        };
        align_up(page_bytes, memory.granularity_bytes())
    }

    /// Returns the size of fine pages, if the request may map them.
    fn fine_page_bytes(
        &self,
        memory: &dyn VirtualMemory,
        pool: PoolId,
        plan: &Plan,
    ) -> Option<u64> {
        let fine = align_up(OWN_SEGMENT_ROUND_BYTES, memory.granularity_bytes());
        let may_map = plan.kind == PoolKind::Large && !self.is_exact();
        let usual = self.usual_page_bytes(memory, pool, plan);
        (may_map && fine < usual && fine < OWN_SEGMENT_MIN_BYTES).then_some(fine)
    }

    /// Returns the size of the smallest pages that a request may map.
    pub(super) fn least_page_bytes(
        &self,
        memory: &dyn VirtualMemory,
        pool: PoolId,
        plan: &Plan,
    ) -> u64 {
        let fine = self.fine_page_bytes(memory, pool, plan);
        fine.unwrap_or_else(|| self.usual_page_bytes(memory, pool, plan))
    }

    /// Returns true if a new reservation of the pool has one page, the size of a fixed segment.
    fn has_one_page(&self, pool: PoolId) -> bool {
        !self.settings.expandable_segments && self.pools.tag(pool).is_some()
    }
}

impl Engine {
    pub(super) fn virtual_memory(&self) -> Result<&dyn VirtualMemory, DriverError> {
        self.driver.virtual_memory().ok_or_else(|| {
            let message = "this device has no virtual memory, which expandable_segments needs";
            DriverError::new(DriverErrorKind::NotSupported, "virtual_memory", 0, message)
        })
    }

    /// Maps fine pages for a request that was refused, if these may fit where usual pages do not. Returns
    /// the reason if they do not fit either.
    pub(super) fn grow_by_fine_pages(
        &self,
        growth: &mut MutexGuard<'_, Growth>,
        cell: &HeapCell,
        plan: &Plan,
        refusal: Refusal,
    ) -> Result<Result<Allocation, Refusal>, DriverError> {
        let memory = self.driver.virtual_memory().filter(|_| plan.expandable);
        let is_short = !matches!(refusal, Refusal::Reserve { .. });
        let page_bytes =
            memory.filter(|_| is_short).and_then(|m| growth.fine_page_bytes(m, cell.pool(), plan));
        if page_bytes.is_none() {
            return Ok(Err(refusal));
        }
        // A request that `throw_on_cudamalloc_oom` rejected stays a rejection.
        let was_rejected = matches!(refusal, Refusal::Forbidden);
        let refused = |again| if was_rejected { Refusal::Forbidden } else { again };
        let step = self.grow_expandable(growth, cell, plan, PageSize::Fine)?;
        if step.is_err() {
            self.unreserve_addresses(growth, cell, true);
        }
        Ok(step.map_err(refused))
    }

    /// Maps the missing pages for a request and allocates its block.
    pub(super) fn grow_expandable(
        &self,
        growth: &mut MutexGuard<'_, Growth>,
        cell: &HeapCell,
        plan: &Plan,
        pages: PageSize,
    ) -> Result<Result<Allocation, Refusal>, DriverError> {
        let memory = self.virtual_memory()?;
        growth.leftovers.offer(memory)?;
        let (rounded, requested) = (plan.rounded_bytes, plan.requested_bytes);
        let (mut grown, fine) = (None, pages == PageSize::Fine);
        let mut state = cell.lock();
        loop {
            let start = grown.or_else(|| state.heap.room_for(plan.kind, rounded, fine));
            match start.and_then(|start| state.heap.plan_growth(start, rounded)) {
                Some(Growing::Enough(slot)) => {
                    return Ok(Ok(self.allocate_slot(cell, &mut state, slot, rounded, requested)));
                }
                Some(Growing::Map(run)) => {
                    drop(state);
                    if let Some(refusal) = self.map_pages(growth, memory, cell, &run)? {
                        return Ok(Err(refusal));
                    }
                    let slot = cell.lock().heap.mapped(run);
                    self.announce(growth, Action::SegmentMap, run.address, run.size_bytes, cell);
                    state = cell.lock();
                    state.heap.complete(slot, self.now());
                    grown = Some(slot);
                }
                // While the heap was unlocked, another request took the start of the block that was
                // growing: search again.
                None if grown.take().is_some() => {}
                None => {
                    drop(state);
                    if let Some(refusal) = self.reserve(growth, memory, cell, (plan, pages))? {
                        return Ok(Err(refusal));
                    }
                    state = cell.lock();
                }
            }
        }
    }

    /// Reserves address space for the small or large blocks of one stream's heap, if the limit allows
    /// the pages of the request: all of them are missing.
    fn reserve(
        &self,
        growth: &mut Growth,
        memory: &dyn VirtualMemory,
        cell: &HeapCell,
        (plan, pages): (&Plan, PageSize),
    ) -> Result<Option<Refusal>, DriverError> {
        let page_bytes = match pages {
            PageSize::Usual => growth.usual_page_bytes(memory, cell.pool(), plan),
            PageSize::Fine => growth.least_page_bytes(memory, cell.pool(), plan),
        };
        let missing_bytes = align_up(plan.rounded_bytes, page_bytes);
        if let Some(refusal) = self.refuses_pages(growth, cell, missing_bytes) {
            return Ok(Some(refusal));
        }
        let (reserve, class) = growth.reserve_of(cell.stream());
        let size_bytes = match growth.has_one_page(cell.pool()) {
            true => missing_bytes,
            false => align_up(reserve.max(1), page_bytes),
        };
        if size_bytes < plan.rounded_bytes {
            let class = class.map(str::to_owned);
            return Ok(Some(Refusal::Reserve { reserve_bytes: size_bytes, class }));
        }
        let address = match memory.reserve(size_bytes) {
            Ok(address) => address,
            Err(error) if error.is_out_of_memory() => return Ok(Some(Refusal::Driver(error))),
            Err(error) => return Err(error),
        };
        let reservation = Reservation { address, size_bytes, page_bytes, kind: plan.kind };
        let added = cell.lock().heap.add_reservation(reservation);
        if added.is_none() {
            growth.leftovers.ranges.push((address, size_bytes));
            growth.leftovers.offer(memory)?;
            return Ok(Some(Refusal::Reserve { reserve_bytes: 0, class: None }));
        }
        growth.numbers.insert(address, self.history.number_segment());
        self.addresses.add(address, size_bytes, cell.number);
        Ok(None)
    }

    /// Returns the reason why pages may not be requested from the driver. By PyTorch's rules there is none:
    /// the limit was compared with the size of a fixed segment.
    fn refuses_pages(&self, growth: &Growth, cell: &HeapCell, size_bytes: u64) -> Option<Refusal> {
        let refusal = growth.refuses(size_bytes, 0).filter(|_| !growth.is_exact())?;
        self.note_refusal(growth, cell, size_bytes, &refusal);
        Some(refusal)
    }

    /// Unreserves those reservations of a heap in which nothing is mapped, or only those with fine pages. A
    /// failed request may leave one.
    pub(super) fn unreserve_addresses(
        &self,
        growth: &mut Growth,
        cell: &HeapCell,
        only_fine: bool,
    ) {
        let bare = cell.lock().heap.remove_bare_reservations(only_fine);
        if bare.is_empty() {
            return;
        }
        for Reservation { address, size_bytes, .. } in bare {
            growth.numbers.remove(&address);
            self.addresses.remove(address, size_bytes);
            growth.leftovers.ranges.push((address, size_bytes));
        }
        // Ranges that fail are kept for a later try.
        let _ = self.release_leftovers(growth);
    }

    /// Maps a range of pages, completely or not at all.
    fn map_pages(
        &self,
        growth: &mut Growth,
        memory: &dyn VirtualMemory,
        cell: &HeapCell,
        run: &PageRun,
    ) -> Result<Option<Refusal>, DriverError> {
        if let Some(refusal) = self.refuses_pages(growth, cell, run.size_bytes) {
            return Ok(Some(refusal));
        }
        let page_bytes = run.page_bytes;
        let count = run.size_bytes / page_bytes;
        let addresses = (0..count).map(|page| run.address + page * page_bytes);
        // Checking for fabric support may create a handle, so this is done only if pages are to be
        // shared.
        let exportable = match growth.settings.expandable_segments_handle_type {
            _ if !growth.settings.expandable_segments_ipc => Exportable::No,
            HandleType::PosixFd => Exportable::Descriptor,
            HandleType::Fabric => Exportable::Fabric,
            HandleType::Unspecified if memory.fabric().is_some() => Exportable::Fabric,
            HandleType::Unspecified => Exportable::Descriptor,
        };
        let mut pieces = Vec::new();
        let mut mapped = Vec::new();
        let mut map = || -> Result<(), DriverError> {
            for _ in 0..count {
                pieces.push(memory.create(page_bytes, exportable)?);
            }
            for (address, &piece) in addresses.clone().zip(&pieces) {
                memory.map(address, page_bytes, piece)?;
                mapped.push((address, page_bytes));
            }
            let mut devices = [self.device.device].into_iter().chain(growth.peers.iter().copied());
            devices.try_for_each(|device| memory.set_access(run.address, run.size_bytes, device))
        };
        if let Err(error) = map() {
            self.note(cell, || format!("no pages for {} bytes: {error}", run.size_bytes));
            growth.leftovers.mapped.append(&mut mapped);
            growth.leftovers.pieces.extend(pieces.into_iter().map(|piece| (piece, page_bytes)));
            // The caller gets the first error. Memory that cannot be released now is kept for a later
            // try.
            let _ = growth.leftovers.offer(memory);
            return if error.is_out_of_memory() {
                Ok(Some(Refusal::Driver(error)))
            } else {
                Err(error)
            };
        }
        let pages =
            pieces.into_iter().map(|piece| Page { piece, exportable, shared: None, handle: None });
        growth.pages.extend(addresses.zip(pages));
        growth.pages_added(cell.pool(), run.kind, run.size_bytes);
        self.record(Action::SegmentMap, run.address, run.size_bytes, cell);
        self.note(cell, || {
            format!("mapped {} bytes of pages at {:#x}", run.size_bytes, run.address)
        });
        Ok(None)
    }

    /// Unmaps the whole pages of one free block, after waiting for work that may still use them. Returns
    /// the number of bytes unmapped: 0 if a request has taken the block or `may_release` forbids it.
    pub(super) fn release_pages(
        &self,
        growth: &mut MutexGuard<'_, Growth>,
        cell: &HeapCell,
        run: &PageRun,
    ) -> Result<u64, DriverError> {
        let memory = self.virtual_memory()?;
        let page_bytes = run.page_bytes;
        if !growth.pools.is_mapped(cell.pool()) {
            return self.release_sleeping_pages(growth, memory, cell, run);
        }
        {
            let mut state = cell.lock();
            let is_idle = state.heap.has_whole_pages(run);
            if !is_idle || !self.history.may_release(run.address, run.size_bytes) {
                return Ok(0);
            }
            state.heap.hold(run.slot);
        }
        let unmapped = self.wait_for_free_memory(cell).and_then(|()| {
            self.announce(growth, Action::SegmentUnmap, run.address, run.size_bytes, cell);
            let unmapped = memory.unmap(run.address, run.size_bytes);
            if unmapped.is_err() {
                self.announce(growth, Action::SegmentMap, run.address, run.size_bytes, cell);
            }
            unmapped
        });
        if let Err(error) = unmapped {
            let clock = self.now();
            cell.lock().heap.complete(run.slot, clock);
            return Err(error);
        }
        let removed = {
            let mut state = cell.lock();
            let gap = state.heap.unmapped(*run, self.now());
            state.heap.remove_reservation(gap)
        };
        growth.pages_removed(cell.pool(), run.kind, run.size_bytes);
        self.record(Action::SegmentUnmap, run.address, run.size_bytes, cell);
        self.note(cell, || {
            format!("unmapped {} bytes of pages at {:#x}", run.size_bytes, run.address)
        });
        for page in 0..run.size_bytes / page_bytes {
            if let Some(page) = growth.pages.remove(&(run.address + page * page_bytes)) {
                page.shared.iter().for_each(|entry| self.shared.withdraw(entry));
                growth.leftovers.pieces.push((page.piece, page_bytes));
            }
        }
        self.forget_reservation(growth, removed);
        growth.leftovers.offer(memory)?;
        Ok(run.size_bytes)
    }

    /// Forgets a reservation that was removed from its heap, and adds its addresses to the leftovers. The
    /// caller then calls [`Leftovers::offer`], which releases them.
    pub(super) fn forget_reservation(&self, growth: &mut Growth, removed: Option<Reservation>) {
        if let Some(reservation) = removed {
            growth.numbers.remove(&reservation.address);
            self.addresses.remove(reservation.address, reservation.size_bytes);
            growth.leftovers.ranges.push((reservation.address, reservation.size_bytes));
        }
    }

    /// Checks that the device supports the settings for expandable segments.
    ///
    /// # Errors
    ///
    /// [`DriverError`] of the kind `NotSupported`.
    pub(super) fn check_pages(&self, settings: &Settings) -> Result<(), DriverError> {
        if !settings.expandable_segments {
            return Ok(());
        }
        let memory = self.virtual_memory()?;
        let handle_type = settings.expandable_segments_handle_type;
        let needs_fabric = settings.expandable_segments_ipc && handle_type == HandleType::Fabric;
        if needs_fabric && memory.fabric().is_none() {
            let message = "expandable_segments_handle_type:fabric, and this device, or the system, has no \
                           fabric handles: use posix_fd";
            let kind = DriverErrorKind::NotSupported;
            return Err(DriverError::new(kind, "create", 0, message));
        }
        Ok(())
    }

    /// Returns the unused bytes of the device that the driver failed to release so far.
    #[must_use]
    pub fn unreleased_bytes(&self) -> u64 {
        self.growth.lock().leftovers.bytes()
    }

    /// Tries again to release memory that the driver failed to release.
    pub(super) fn release_leftovers(&self, growth: &mut Growth) -> Result<(), DriverError> {
        // Ignored: failing to release imported memory must not prevent the release of our own.
        let _ = self.shared.imports.release_leftovers();
        self.driver.virtual_memory().map_or(Ok(()), |memory| growth.leftovers.offer(memory))
    }

    /// Releases all pages and reservations when the engine is dropped. Before pages are unmapped, waits
    /// for all work of the device, because it may still use blocks.
    pub(super) fn drop_pages(&self) {
        self.shared.withdraw_all();
        let _ = self.shared.imports.release_leftovers();
        let Some(memory) = self.driver.virtual_memory() else { return };
        let (pages, mut leftovers) = {
            let mut growth = self.growth.lock();
            let mut pages = std::mem::take(&mut growth.pages);
            pages.extend(growth.pools.take_held_pages());
            // Pinned memory is released after this.
            let pinned = std::mem::take(&mut growth.leftovers.pinned);
            let kept = Leftovers { pinned, ..Leftovers::default() };
            (pages, std::mem::replace(&mut growth.leftovers, kept))
        };
        // The error is ignored, because a drop cannot report it. Memory that the driver fails to release
        // leaks.
        let _ = leftovers.offer(memory);
        // If the wait fails, the pages leak: running work or a graph may still access them.
        if !pages.is_empty() && synchronize_outside_captures(&*self.driver).is_err() {
            return;
        }
        let mut reservations = Vec::new();
        for cell in self.heaps.all() {
            reservations.extend(cell.lock().heap.reservations());
        }
        for (address, Page { piece, .. }) in pages {
            let own = |r: &&Reservation| (r.address..r.address + r.size_bytes).contains(&address);
            if let Some(reservation) = reservations.iter().find(own) {
                let _ = memory.unmap(address, reservation.page_bytes);
            }
            let _ = memory.release(piece);
        }
        for reservation in reservations {
            let _ = memory.unreserve(reservation.address, reservation.size_bytes);
        }
    }
}

impl Expandable for Engine {
    /// Returns the expandable segments of all streams and pools, in address order.
    fn expandable_segments(&self) -> Vec<ExpandableSegment> {
        let growth = self.growth.lock();
        let mut found = Vec::new();
        for cell in self.all_heaps(&growth) {
            let state = cell.lock();
            let is_mapped = growth.pools.is_mapped(cell.pool());
            let mapped = |of: &Reservation| match is_mapped {
                true => of.size_bytes - state.heap.gap_bytes(of.address, of.size_bytes),
                false => 0,
            };
            found.extend(state.heap.reservations().map(|of| ExpandableSegment {
                address: of.address,
                stream: cell.stream(),
                pool: cell.pool(),
                kind: of.kind,
                page_bytes: of.page_bytes,
                reserved_bytes: of.size_bytes,
                mapped_bytes: mapped(&of),
            }));
        }
        found.sort_by_key(|segment| segment.address);
        found
    }

    /// Assigns a stream to a class of `expandable_segments_reserve_by_class`, or removes it from its
    /// class.
    fn set_reserve_class(&self, stream: StreamId, class: Option<&str>) {
        let classes = &mut self.growth.lock().reserve_classes;
        match class.filter(|class| !class.is_empty()) {
            Some(class) => drop(classes.insert(stream, class.to_owned())),
            None => drop(classes.remove(&stream)),
        }
    }
}
