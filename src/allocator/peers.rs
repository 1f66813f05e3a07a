//! Access of other devices to an allocator's memory.

use crate::error::DriverError;
use crate::ids::DeviceId;

/// Access of other devices of this machine to an allocator's memory.
pub trait PeerAccess: Send + Sync {
    /// Gives `device` access to this allocator's memory: to all memory that is mapped now, own or
    /// imported, and to memory that is mapped later. The access is one-way, as with PyTorch's
    /// `enablePeerAccess(device, own)`. For the other direction, call this on the allocator of
    /// `device`. A repeated call is no error. The time grows with the number of mapped pages. Never
    /// waits for work.
    ///
    /// # Errors
    ///
    /// [`DriverError`] when `device` cannot access this device's memory, or the driver fails. `device`
    /// then gets no access to pages that are mapped later. It keeps access to the pages that were
    /// processed before the failure, because the driver cannot revoke it.
    fn enable_peer_access(&self, device: DeviceId) -> Result<(), DriverError>;

    /// Returns the devices that have access to this allocator's memory, in the order in which they were
    /// enabled.
    fn peers(&self) -> Vec<DeviceId>;
}
