//! Memory of other processes that is mapped in this one.
//!
//! The table holds a weak reference to each mapping. Its key, the contents, identifies the memory.
//! Opening the same memory again returns the same mapping; dropping the last reference unmaps it. Memory
//! that the driver fails to release is kept and released again later. Lock order: growth, then this
//! table. No mapping is dropped while the table is locked.

use std::sync::{Arc, Weak};

use hashbrown::HashMap;
use parking_lot::Mutex;

use crate::driver::{Driver, PhysicalId};
use crate::error::DriverError;
use crate::sharing::{FabricShare, FixedShare, PagesShare, ProcessMark};

/// The contents of a mapping: identifies the memory that it maps.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum MappingContents {
    Fixed { owner: ProcessMark, segment_bytes: u64, handle: [u8; 64] },
    Pages { owner: ProcessMark, secret: [u8; 16], page_bytes: u64, identities: Box<[u64]> },
    Fabric { page_bytes: u64, handles: Box<[[u8; 64]]> },
}

impl MappingContents {
    pub(super) fn fixed(share: &FixedShare) -> Self {
        let FixedShare { owner, segment_bytes, handle, .. } = *share;
        Self::Fixed { owner, segment_bytes, handle }
    }

    pub(super) fn fabric(share: &FabricShare) -> Self {
        Self::Fabric { page_bytes: share.page_bytes, handles: share.pages.clone() }
    }

    pub(super) fn pages(share: &PagesShare) -> Self {
        let identities = share.pages.iter().map(|page| page.identity).collect();
        let PagesShare { owner, secret, page_bytes, .. } = *share;
        Self::Pages { owner, secret, page_bytes, identities }
    }
}

/// Everything that is imported into one engine.
#[derive(Debug)]
pub(super) struct Imports {
    driver: Arc<dyn Driver>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    mappings: HashMap<MappingContents, Weak<Mapping>>,
    /// Memory that the driver failed to release.
    leftovers: Vec<ImportedResources>,
}

/// A mapping in use.
#[derive(Debug)]
pub(super) struct Mapping {
    imports: Arc<Imports>,
    resources: ImportedResources,
}

/// Resources held from the driver, in any state from none to a whole mapping.
#[derive(Debug, Default)]
pub(super) struct ImportedResources {
    /// True if work may have used the memory: the device is then synchronized before unmapping.
    pub(super) used: bool,
    /// The reserved address space, its size, and the bytes that are mapped from its start on.
    pub(super) range: Option<Range>,
    pub(super) pieces: Vec<PhysicalId>,
    /// The address of an allocation of another process.
    pub(super) opened: Option<u64>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Range {
    pub(super) address: u64,
    pub(super) size_bytes: u64,
    pub(super) mapped_bytes: u64,
}

impl ImportedResources {
    fn address(&self) -> u64 {
        self.range.map(|range| range.address).or(self.opened).unwrap_or(0)
    }

    fn is_nothing(&self) -> bool {
        self.range.is_none() && self.pieces.is_empty() && self.opened.is_none()
    }

    /// Releases as much as the driver allows; the rest is kept. Returns the error, if there is one.
    fn close(&mut self, driver: &dyn Driver) -> Result<(), DriverError> {
        if self.used {
            driver.synchronize_device()?;
            self.used = false;
        }
        if let Some(memory) = driver.virtual_memory() {
            if let Some(range) = self.range.as_mut().filter(|range| range.mapped_bytes > 0) {
                memory.unmap(range.address, range.mapped_bytes)?;
                range.mapped_bytes = 0;
            }
            let mut refused = Ok(());
            self.pieces.retain(|piece| {
                let done = memory.release(*piece);
                let kept = done.is_err();
                refused = std::mem::replace(&mut refused, Ok(())).and(done);
                kept
            });
            if let Some(range) = self.range {
                memory.unreserve(range.address, range.size_bytes)?;
                self.range = None;
            }
            refused?;
        }
        if let (Some(ipc), Some(address)) = (driver.ipc(), self.opened) {
            ipc.close(address)?;
            self.opened = None;
        }
        Ok(())
    }
}

impl Imports {
    pub(super) fn new(driver: Arc<dyn Driver>) -> Arc<Self> {
        Arc::new(Self { driver, state: Mutex::default() })
    }

    pub(super) fn find(&self, contents: &MappingContents) -> Option<Arc<Mapping>> {
        self.state.lock().mappings.get(contents)?.upgrade()
    }

    /// Adds a mapping that [`find`](Self::find) does not find. The caller holds the growth lock.
    pub(super) fn add(
        self: &Arc<Self>,
        contents: MappingContents,
        resources: ImportedResources,
    ) -> Arc<Mapping> {
        let mapping = Arc::new(Mapping { imports: Arc::clone(self), resources });
        self.state.lock().mappings.insert(contents, Arc::downgrade(&mapping));
        mapping
    }

    /// Releases the resources. Keeps those that the driver fails to release, for a later try.
    pub(super) fn discard(&self, mut resources: ImportedResources) {
        // The error is ignored: what could not be released is kept below.
        let _ = resources.close(&*self.driver);
        if !resources.is_nothing() {
            self.state.lock().leftovers.push(resources);
        }
    }

    /// Tries again to release memory that the driver failed to release.
    pub(super) fn release_leftovers(&self) -> Result<(), DriverError> {
        let mut refused = Ok(());
        self.state.lock().leftovers.retain_mut(|resources| {
            let done = resources.close(&*self.driver);
            refused = std::mem::replace(&mut refused, Ok(())).and(done);
            !resources.is_nothing()
        });
        refused
    }

    /// Returns all mappings in use. The caller must not drop them while the table is locked.
    pub(super) fn mappings(&self) -> Vec<Arc<Mapping>> {
        self.state.lock().mappings.values().filter_map(Weak::upgrade).collect()
    }
}

impl Drop for Imports {
    fn drop(&mut self) {
        // The error is ignored, because a drop cannot report it. Memory that the driver fails to release
        // leaks.
        let _ = self.release_leftovers();
    }
}

impl Mapping {
    pub(super) fn address(&self) -> u64 {
        self.resources.address()
    }

    /// Returns the address and the mapped bytes, if the mapping consists of pages.
    pub(super) fn pages(&self) -> Option<(u64, u64)> {
        self.resources.range.map(|range| (range.address, range.mapped_bytes))
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // The same memory may have been opened again since the last reference was dropped: remove dead
        // entries only.
        self.imports.state.lock().mappings.retain(|_, mapping| mapping.strong_count() > 0);
        let resources = std::mem::take(&mut self.resources);
        self.imports.discard(resources);
    }
}
