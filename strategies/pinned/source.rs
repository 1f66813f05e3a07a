//! Where memory comes from: the driver's own allocation, or pages of the system that are registered.

use std::sync::Arc;

use super::blocks::Origin;
use crate::config::{PinnedNuma, PinnedSettings};
use crate::driver::{Driver, DriverResult, HostMemory};
use crate::error::{DriverError, DriverErrorKind};
use crate::system::{SystemMemory, SystemOptions};

#[derive(Debug)]
pub(super) struct HostSource {
    driver: Arc<dyn Driver>,
    /// The system's memory, if pages are registered. `None`: the driver allocates.
    system: Option<SystemMemory>,
    /// The threads that touch new pages.
    threads: usize,
}

impl HostSource {
    /// # Errors
    ///
    /// [`DriverError`] when the driver has no host memory, or the system does not have the node that
    /// `pinned_numa` names.
    pub(super) fn new(driver: Arc<dyn Driver>, settings: &PinnedSettings) -> DriverResult<Self> {
        let host = driver.host_memory().ok_or_else(|| {
            let device = driver.info().device;
            let message = format!("device {device} has no page-locked host memory");
            DriverError::new(DriverErrorKind::NotSupported, "host_memory", 0, message)
        })?;
        let on_node = |node| {
            SystemMemory::new(SystemOptions { numa_node: Some(node), ..SystemOptions::default() })
        };
        let system = match settings.numa {
            PinnedNuma::Node(node) => Some(on_node(node)?),
            // A container may forbid the choice of a node. It serves the program too.
            PinnedNuma::Auto => host.host_node()?.and_then(|node| {
                let chosen = on_node(node);
                if let Err(error) = &chosen {
                    log::warn!("pinned_numa:auto has no effect: node {node}: {error}");
                }
                chosen.ok()
            }),
            PinnedNuma::Any => None,
        };
        let system = system.or_else(|| settings.use_host_register.then(SystemMemory::default));
        let threads = usize::try_from(settings.register_threads).unwrap_or(1);
        Ok(Self { driver, system, threads })
    }

    /// Returns true if memory consists of whole pages that are registered.
    pub(super) fn registers(&self) -> bool {
        self.system.is_some()
    }

    fn host(&self) -> &dyn HostMemory {
        self.driver.host_memory().expect("checked when the source was built")
    }

    /// Allocates memory and returns its address.
    pub(super) fn take(&self, bytes: u64) -> DriverResult<(u64, Origin)> {
        let Some(system) = &self.system else {
            return Ok((self.host().allocate_host(bytes)?, Origin::Driver));
        };
        let mut pages = system.map_pages(bytes)?;
        pages.touch_pages(self.threads);
        self.host().register_host(pages.address(), bytes)?;
        Ok((pages.address(), Origin::Registered(pages)))
    }

    /// Releases memory to the driver. Dropping `origin` then releases registered pages to the system.
    pub(super) fn release(&self, address: u64, bytes: u64, origin: &Origin) -> DriverResult<()> {
        match origin {
            Origin::Driver => self.host().free_host(address, bytes),
            Origin::Registered(_) => self.host().unregister_host(address),
            Origin::Reserve => unreachable!("parts of the reserved segment are not released"),
        }
    }
}
