//! Sharing the engine's blocks with other processes, and opening blocks that they share.
//!
//! A block of a fixed segment is shared by the driver's IPC handle of that segment. A block of an
//! expandable segment is shared by its pages: by file descriptors, which [`sharing`](crate::sharing)
//! transfers, or by fabric handles. A block is shared under the growth lock, so that its segment or pages
//! are not released meantime. No lock is held while waiting for the other process.

use std::sync::{Arc, OnceLock};

use super::engine::Engine;
use super::growth::Growth;
use super::imports::{ImportedResources, Imports, Mapping, MappingContents, Range};
use crate::allocator::{Allocation, Imported, Sharing};
use crate::driver::{Driver, Exportable, Fabric, FabricHandle, VirtualMemory};
use crate::error::HandleError;
use crate::heap::{Reservation, SegmentRange};
use crate::sharing::{
    Contents, Exporter, Extent, FabricShare, Fetch, FixedShare, PAGES_MAX, PageEntry, PagesShare,
    ProcessMark, SharedHandle, SharingError,
};
use crate::size::{align_down, align_up};

/// The memory that an engine shares and the memory that it has opened.
#[derive(Debug)]
pub(super) struct Shared {
    /// Started when the first page is shared.
    exporter: OnceLock<Exporter>,
    pub(super) imports: Arc<Imports>,
}

impl Shared {
    pub(super) fn new(driver: &Arc<dyn Driver>) -> Self {
        Self { exporter: OnceLock::new(), imports: Imports::new(Arc::clone(driver)) }
    }

    /// Returns the exporter, after starting it if necessary. The caller holds the growth lock.
    fn exporter(&self) -> Result<&Exporter, SharingError> {
        if self.exporter.get().is_none() {
            let started = Exporter::start()?;
            // The growth lock is held, so no other thread can have started one.
            let _ = self.exporter.set(started);
        }
        let exporter = self.exporter.get().expect("it was set above");
        if exporter.is_forked() {
            return Err(SharingError::NotSupported { what: "pages once their process has forked" });
        }
        Ok(exporter)
    }

    /// Stops exporting the page, so that other processes can no longer open it.
    pub(super) fn withdraw(&self, page: &PageEntry) {
        if let Some(exporter) = self.exporter.get() {
            exporter.withdraw(page);
        }
    }

    /// Stops exporting all pages.
    pub(super) fn withdraw_all(&self) {
        if let Some(exporter) = self.exporter.get() {
            exporter.withdraw_all();
        }
    }
}

impl Sharing for Engine {
    fn share(&self, allocation: &Allocation) -> Result<SharedHandle, SharingError> {
        let mut growth = self.growth.lock();
        let segment = self.segment_of(allocation)?;
        let pool = self.own(allocation)?.0.pool();
        if !growth.pools.is_awake(pool) {
            return Err(SharingError::Asleep { address: allocation.address() });
        }
        if growth.pools.allocator_of(pool).is_some() {
            return Err(SharingError::NotSupported { what: "segments of a pool's own allocator" });
        }
        match segment.reservation {
            Some(reservation) => self.share_pages(&mut growth, allocation, &reservation),
            None => self.share_segment(allocation, &segment),
        }
    }

    fn share_raw(&self, address: u64) -> Result<SharedHandle, SharingError> {
        self.share(&self.at(address)?)
    }

    fn open(&self, handle: &SharedHandle) -> Result<Imported, SharingError> {
        // Ignored: failing to release other memory must not fail this call.
        let _ = self.shared.imports.release_leftovers();
        let (mapping, Extent { offset_bytes, size_bytes }) = match handle.contents() {
            Contents::Fixed(share) => (self.open_segment(share)?, share.extent),
            Contents::Pages(share) => (self.open_pages(share)?, share.extent),
            Contents::Fabric(share) => (self.open_fabric(share)?, share.extent),
        };
        Ok(Imported::new(mapping.address() + offset_bytes, size_bytes, mapping))
    }
}

impl Engine {
    /// Returns the segment that contains a live block.
    pub(super) fn segment_of(&self, allocation: &Allocation) -> Result<SegmentRange, HandleError> {
        let (cell, id) = self.own(allocation)?;
        let state = cell.lock();
        let address = allocation.address();
        let slot = state.heap.live(id, address).ok_or(HandleError::Stale { address })?;
        Ok(state.heap.segment_of(slot))
    }

    /// Shares a block of a fixed segment. The caller holds the growth lock.
    fn share_segment(
        &self,
        allocation: &Allocation,
        segment: &SegmentRange,
    ) -> Result<SharedHandle, SharingError> {
        let none = SharingError::NotSupported { what: "plain allocations between processes" };
        let handle = self.driver.ipc().ok_or(none)?.share(segment.address)?;
        let share = FixedShare {
            owner: ProcessMark::own(),
            extent: Extent {
                offset_bytes: allocation.address() - segment.address,
                size_bytes: allocation.size_bytes(),
            },
            segment_bytes: segment.size_bytes,
            handle,
        };
        Ok(SharedHandle::of(Contents::Fixed(share))?)
    }

    /// Shares the pages that cover a block.
    fn share_pages(
        &self,
        growth: &mut Growth,
        allocation: &Allocation,
        reservation: &Reservation,
    ) -> Result<SharedHandle, SharingError> {
        let memory = self.virtual_memory()?;
        let Reservation { address: base, page_bytes, .. } = *reservation;
        let (address, size_bytes) = (allocation.address(), allocation.size_bytes());
        let first = base + align_down(address - base, page_bytes);
        let end = base + align_up(address + size_bytes - base, page_bytes);
        let count = (end - first) / page_bytes;
        let most = PAGES_MAX as u64;
        if count > most {
            return Err(SharingError::TooManyPages { pages: count, most });
        }
        let addresses = (0..count).map(|page| first + page * page_bytes);
        // All pages are checked before the first is exported, so a failed check leaves none exported.
        let stays = |page: &u64| {
            growth.pages.get(page).is_none_or(|page| page.exportable == Exportable::No)
        };
        if let Some(address) = addresses.clone().find(stays) {
            return Err(SharingError::NotExportable { address });
        }
        let extent = Extent { offset_bytes: address - first, size_bytes };
        let for_fabric = |page: u64| growth.pages[&page].exportable == Exportable::Fabric;
        if let Some(fabric) = memory.fabric().filter(|_| addresses.clone().all(for_fabric)) {
            let mut pages = Vec::new();
            for address in addresses {
                let page = growth.pages.get_mut(&address).expect("it was found above");
                let handle = match page.handle {
                    Some(handle) => handle,
                    None => fabric.export_handle(page.piece)?,
                };
                page.handle = Some(handle);
                pages.push(handle.0);
            }
            let owner = ProcessMark::own();
            let share = FabricShare { owner, extent, page_bytes, pages: pages.into() };
            return Ok(SharedHandle::of(Contents::Fabric(share))?);
        }
        let exporter = self.shared.exporter()?;
        let mut pages = Vec::new();
        for address in addresses {
            let page = growth.pages.get_mut(&address).expect("pages of a live block are mapped");
            let entry = match page.shared {
                Some(entry) => entry,
                None => exporter.offer(memory.export(page.piece)?)?,
            };
            page.shared = Some(entry);
            pages.push(entry);
        }
        let share = PagesShare {
            owner: exporter.owner,
            extent,
            secret: exporter.secret,
            socket: exporter.socket,
            page_bytes,
            pages: pages.into(),
        };
        Ok(SharedHandle::of(Contents::Pages(share))?)
    }

    fn open_segment(&self, share: &FixedShare) -> Result<Arc<Mapping>, SharingError> {
        if share.owner.is_own() {
            return Err(SharingError::OwnProcess);
        }
        let contents = MappingContents::fixed(share);
        let imports = &self.shared.imports;
        let _growth = self.growth.lock();
        if let Some(mapping) = imports.find(&contents) {
            return Ok(mapping);
        }
        let none = SharingError::NotSupported { what: "plain allocations between processes" };
        let address = self.driver.ipc().ok_or(none)?.open(&share.handle)?;
        Ok(imports.add(
            contents,
            ImportedResources { used: true, opened: Some(address), ..ImportedResources::default() },
        ))
    }

    fn open_pages(&self, share: &PagesShare) -> Result<Arc<Mapping>, SharingError> {
        self.open_range(MappingContents::pages(share), share.page_bytes, |memory, resources| {
            import(memory, share, resources)
        })
    }

    fn open_fabric(&self, share: &FabricShare) -> Result<Arc<Mapping>, SharingError> {
        self.open_range(MappingContents::fabric(share), share.page_bytes, |memory, resources| {
            let none = SharingError::NotSupported { what: "pages of a fabric" };
            let fabric: &dyn Fabric = memory.fabric().ok_or(none)?;
            for handle in &share.pages {
                resources.pieces.push(fabric.import_handle(&FabricHandle(*handle))?);
            }
            Ok(())
        })
    }

    /// Maps pieces (physical handles of equal size) contiguously, or returns the existing mapping of
    /// `contents`. `import` adds the pieces to the resources, with no lock held. If it fails, the pieces
    /// it added are released.
    fn open_range(
        &self,
        contents: MappingContents,
        page_bytes: u64,
        import: impl FnOnce(&dyn VirtualMemory, &mut ImportedResources) -> Result<(), SharingError>,
    ) -> Result<Arc<Mapping>, SharingError> {
        let imports = &self.shared.imports;
        if let Some(mapping) = imports.find(&contents) {
            return Ok(mapping);
        }
        let none = SharingError::NotSupported { what: "pages: it has no virtual memory" };
        let memory = self.driver.virtual_memory().ok_or(none)?;
        let granularity_bytes = memory.granularity_bytes();
        if !page_bytes.is_multiple_of(granularity_bytes) {
            return Err(SharingError::PageSize { page_bytes, granularity_bytes });
        }
        let mut resources = ImportedResources::default();
        if let Err(error) = import(memory, &mut resources) {
            imports.discard(resources);
            return Err(error);
        }
        let growth = self.growth.lock();
        // Another thread may have opened the same memory after the first check.
        if let Some(mapping) = imports.find(&contents) {
            imports.discard(resources);
            return Ok(mapping);
        }
        if let Err(error) = self.map_imported(&growth, memory, page_bytes, &mut resources) {
            imports.discard(resources);
            return Err(error.into());
        }
        resources.used = true;
        Ok(imports.add(contents, resources))
    }

    /// Maps all pieces in order, with access for this device and its peers.
    fn map_imported(
        &self,
        growth: &Growth,
        memory: &dyn VirtualMemory,
        page_bytes: u64,
        resources: &mut ImportedResources,
    ) -> Result<(), crate::error::DriverError> {
        let size_bytes = page_bytes * resources.pieces.len() as u64;
        let address = memory.reserve(size_bytes)?;
        let range = resources.range.insert(Range { address, size_bytes, mapped_bytes: 0 });
        for piece in &resources.pieces {
            memory.map(address + range.mapped_bytes, page_bytes, *piece)?;
            range.mapped_bytes += page_bytes;
        }
        let mut devices = [self.device.device].into_iter().chain(growth.peers.iter().copied());
        devices.try_for_each(|device| memory.set_access(address, size_bytes, device))
    }
}

/// Fetches the descriptors of the pages and imports them. Imports each batch before fetching the next,
/// so that few descriptors are open at once, unless the driver keeps them open.
fn import(
    memory: &dyn VirtualMemory,
    share: &PagesShare,
    resources: &mut ImportedResources,
) -> Result<(), SharingError> {
    let mut fetch = Fetch::new(share);
    while let Some(descriptors) = fetch.next_pages()? {
        for descriptor in descriptors {
            resources.pieces.push(memory.import(descriptor, share.page_bytes)?);
        }
    }
    Ok(())
}
