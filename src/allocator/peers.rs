//! Use of an allocator's memory by other devices.

use crate::error::DriverError;
use crate::ids::DeviceId;

/// Use of an allocator's memory by other devices of this machine.
pub trait PeerAccess: Send + Sync {
    /// Lets this device and `device` reach each other's memory: everything mapped now, of this
    /// process or imported, and everything that will be. Doing it twice is no error. Takes longer
    /// the more pages are mapped; never waits for work.
    ///
    /// # Errors
    ///
    /// [`DriverError`] when the devices cannot reach each other or the driver fails. `device` is
    /// then not remembered: later pages stay closed to it. Pages that were opened before the
    /// failure stay open, because no driver takes access back.
    fn enable_peer_access(&self, device: DeviceId) -> Result<(), DriverError>;

    /// The devices that were let in, in the order in which they were.
    fn peers(&self) -> Vec<DeviceId>;
}
