//! The parts [`Ipc`] and [`Peers`]: sharing with other processes, and access from other devices.

use super::api::{IpcHandle, got};
use super::{Cuda, size};
use crate::driver::{DriverResult, Ipc, Peers};
use crate::ids::{DeviceId, StreamId};

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`.
const LAZY_PEERS: u32 = 1;
/// `CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED`.
const ENABLED_ALREADY: u32 = 704;

impl Ipc for Cuda {
    fn share(&self, base: u64) -> DriverResult<[u8; 64]> {
        let _entered = self.enter()?;
        let mut handle = IpcHandle([0; 64]);
        self.api.ipc_share(&mut handle, base).ok()?;
        Ok(handle.0)
    }

    fn open(&self, handle: &[u8; 64]) -> DriverResult<u64> {
        let _entered = self.enter()?;
        got(|address| self.api.ipc_open(address, IpcHandle(*handle), LAZY_PEERS))
    }

    fn close(&self, address: u64) -> DriverResult<()> {
        let _ready = self.enter_relaxed()?;
        self.api.ipc_close(address).ok()
    }
}

impl Peers for Cuda {
    fn can_access(&self, other: DeviceId) -> DriverResult<bool> {
        let other = self.number_of(other)?;
        got(|can| self.api.peer_possible(can, other, self.device)).map(|can| can != 0)
    }

    fn enable_access(&self, other: DeviceId) -> DriverResult<()> {
        // CUDA enables access in the context that gets it: the other device's.
        let _entered = self.enter_context(self.context_of(other)?)?;
        let enabled = self.api.peer_enable(self.context, 0);
        if enabled.code() == Some(ENABLED_ALREADY) {
            return Ok(());
        }
        enabled.ok()
    }

    fn copy_peer(
        &self,
        to: (DeviceId, u64),
        from: (DeviceId, u64),
        size_bytes: u64,
        stream: StreamId,
    ) -> DriverResult<()> {
        let (there, here) = (self.context_of(to.0)?, self.context_of(from.0)?);
        let _entered = self.enter()?;
        let bytes = size(size_bytes)?;
        self.api.copy_peer(to.1, there, from.1, here, bytes, stream.0).ok()
    }
}
