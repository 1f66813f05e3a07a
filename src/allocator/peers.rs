//! Access of other devices to an allocator's memory.

use crate::error::DriverError;
use crate::ids::DeviceId;

/// Access of other devices of this machine to an allocator's memory.
pub trait PeerAccess: Send + Sync {
    /// Gives `device` access to this allocator's memory: to all memory mapped now, own or imported, and
    /// to memory mapped later. It is one direction, as PyTorch's `enablePeerAccess(device, own)`. For the
    /// other direction, call it on the allocator of `device`. Calling it twice is not an error. Takes
    /// longer the more pages are mapped; never waits for work.
    ///
    /// # Errors
    ///
    /// [`DriverError`] when `device` cannot access this device's memory, or the driver fails. Then
    /// `device` gets no access to later pages. Pages opened before the failure stay open, because the
    /// driver cannot revoke access.
    fn enable_peer_access(&self, device: DeviceId) -> Result<(), DriverError>;

    /// Returns the devices that have access to this allocator's memory, in the order in which they were
    /// enabled.
    fn peers(&self) -> Vec<DeviceId>;
}
