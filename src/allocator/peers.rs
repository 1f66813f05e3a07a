//! Use of an allocator's memory by other devices.

use crate::error::DriverError;
use crate::ids::DeviceId;

/// Use of an allocator's memory by other devices of this machine.
pub trait PeerAccess: Send + Sync {
    /// Lets `device` access this allocator's memory: everything mapped now, of this process or
    /// imported, and everything that will be. One direction, as PyTorch's
    /// `enablePeerAccess(device, own)`: access of this device to memory on `device` is enabled at the
    /// allocator of `device`. Doing it twice is no error. Takes longer the more pages are mapped; never
    /// waits for work.
    ///
    /// # Errors
    ///
    /// [`DriverError`] when `device` cannot access this device's memory or the driver fails. `device`
    /// is then not remembered: later pages stay closed to it. Pages that were opened before the
    /// failure stay open, because no driver takes access back.
    fn enable_peer_access(&self, device: DeviceId) -> Result<(), DriverError>;

    /// The devices that may access this allocator's memory, in the order in which they were enabled.
    fn peers(&self) -> Vec<DeviceId>;
}
