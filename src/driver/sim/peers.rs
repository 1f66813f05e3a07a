//! Other devices that the simulated one can reach, if its options name any.
//!
//! They are ordinals and nothing more: there is no memory behind their addresses, so a copy checks
//! this device's side only.

use super::{Sim, invalid, not_supported};
use crate::driver::call::Call;
use crate::driver::{DriverResult, Peers};
use crate::ids::{DeviceId, StreamId};

impl Sim {
    /// Whether `other` is one of the lowest ordinals that are not this device's own.
    pub(super) fn reaches(&self, other: DeviceId) -> bool {
        let own = self.options.device;
        let before = other.0 - u32::from(own < other);
        other != own && before < self.options.reachable_devices
    }
}

impl Peers for Sim {
    fn can_access(&self, other: DeviceId) -> DriverResult<bool> {
        let _state = self.enter_other(Call::CanAccess);
        Ok(self.reaches(other))
    }

    fn enable_access(&self, other: DeviceId) -> DriverResult<()> {
        let call = Call::EnableAccess;
        let mut state = self.enter_other(call);
        if !self.reaches(other) {
            let message = format!("device {} cannot reach device {other}", self.options.device);
            return Err(not_supported(call, message));
        }
        state.peers.insert(other);
        Ok(())
    }

    fn copy_peer(
        &self,
        to: (DeviceId, u64),
        from: (DeviceId, u64),
        size_bytes: u64,
        stream: StreamId,
    ) -> DriverResult<()> {
        let call = Call::CopyPeer;
        let mut state = self.enter_other(call);
        for (device, address) in [to, from] {
            if device == self.options.device {
                state.check_reachable(call, address, size_bytes)?;
            } else if !state.peers.contains(&device) {
                return Err(invalid(call, format!("access to device {device} is not enabled")));
            }
        }
        state.submit(call, stream)
    }
}
