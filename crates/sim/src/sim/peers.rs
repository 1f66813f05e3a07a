//! Other devices that the simulated device can access.
//!
//! They exist only as ordinals, without memory. So a copy between devices checks only the addresses on this
//! device, and that access to the other device is enabled.

use super::{Done, Kind, SimulatedDevice, State, ensure, invalid, not_supported};
use stratalloc::driver::Peers;
use stratalloc::driver::call::{calls, forward};
use stratalloc::ids::{DeviceId, StreamId};

impl State {
    /// Returns whether `other` is one of the reachable devices: the lowest ordinals, without this
    /// device's.
    pub(super) fn reaches(&self, other: DeviceId) -> bool {
        let own = self.options.device;
        let before = other.0 - u32::from(own < other);
        other != own && before < self.options.reachable_devices
    }

    fn can_access(&mut self, other: DeviceId) -> Done<bool> {
        Ok(self.reaches(other))
    }

    fn enable_access(&mut self, other: DeviceId) -> Done<()> {
        let (own, is_reached) = (self.options.device, self.reaches(other));
        ensure!(is_reached, not_supported: "device {own} cannot reach device {other}");
        self.peers.insert(other);
        Ok(())
    }

    fn copy_peer(
        &mut self,
        to: (DeviceId, u64),
        from: (DeviceId, u64),
        size_bytes: u64,
        stream: StreamId,
    ) -> Done<()> {
        for (device, address) in [to, from] {
            if device == self.options.device {
                self.check_reachable(address, size_bytes)?;
            } else {
                let is_enabled = self.peers.contains(&device);
                ensure!(is_enabled, "access to device {device} is not enabled");
            }
        }
        self.submit(stream).map(drop)
    }
}

impl<K: Kind> Peers for SimulatedDevice<K> {
    calls! { Peers forward Self::call; }
}
