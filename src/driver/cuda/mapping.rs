//! Virtual memory of a CUDA device.
//!
//! Pieces are pinned device memory, with GPUDirect RDMA if the device supports it. Under WSL2 devices report
//! that they do, but `cuMemSetAccess` then fails for such a piece. So before the first piece is created, the
//! driver maps one and caches whether that works. Source: pytorch/pytorch#192330.
//!
//! A piece can be shared only in the ways it was created for: with other processes as a file descriptor, with
//! other machines as a fabric handle (`fabric`).

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use super::api::{AccessDescription, AllocationProperties, Location, got};
use super::{Cuda, size};
use crate::driver::{DriverResult, Exportable, Fabric, PhysicalId, VirtualMemory};
use crate::error::{DriverError, DriverErrorKind};
use crate::ids::DeviceId;

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
pub(super) const DESCRIPTOR: u32 = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
const READ_AND_WRITE: u32 = 3;

impl Cuda {
    fn properties(&self, handles: u32, direct: bool) -> AllocationProperties {
        AllocationProperties {
            kind: 1,
            handles,
            location: Location::device(self.device),
            windows: 0,
            compression: 0,
            direct: u8::from(direct),
            usage: 0,
            reserved: [0; 4],
        }
    }

    pub(super) fn query_granularity(&self) -> DriverResult<u64> {
        let bytes: usize =
            got(|bytes| self.api.granularity(bytes, &self.properties(0, self.can.direct), 0))?;
        Ok(bytes as u64)
    }

    /// Creates a piece that can be exported as the handle types in the bit set `handles`.
    pub(super) fn create_with(&self, size_bytes: u64, handles: u32) -> DriverResult<PhysicalId> {
        let _ready = self.enter_relaxed()?;
        self.create_piece(size_bytes, self.properties(handles, self.uses_direct()))
    }

    fn create_piece(
        &self,
        size_bytes: u64,
        properties: AllocationProperties,
    ) -> DriverResult<PhysicalId> {
        let bytes = size(size_bytes)?;
        got(|piece| self.api.piece_create(piece, bytes, &properties, 0)).map(PhysicalId)
    }

    /// Returns whether pieces are created for GPUDirect RDMA. The first call maps a piece. Only a clear
    /// result is cached: after a failure that a piece without RDMA has too, such as lack of memory, the next
    /// call tries again.
    fn uses_direct(&self) -> bool {
        if !self.can.direct {
            return false;
        }
        let mut known = self.direct.lock();
        if let Some(known) = *known {
            return known;
        }
        match self.try_to_map(true) {
            Ok(()) => *known = Some(true),
            Err(error) if !error.is_out_of_memory() && self.try_to_map(false).is_ok() => {
                let device = self.info.device;
                log::warn!("device {device}: memory is mapped without GPUDirect RDMA: {error}");
                *known = Some(false);
            }
            Err(_) => {}
        }
        known.unwrap_or(true)
    }

    /// Maps a piece of the smallest size and releases it again.
    fn try_to_map(&self, direct: bool) -> DriverResult<()> {
        let bytes = self.granularity_bytes;
        let piece = self.create_piece(bytes, self.properties(0, direct))?;
        let mapped = self.reserve(bytes).and_then(|address| {
            let mapped = self.map(address, bytes, piece).and_then(|()| {
                let allowed = self.set_access(address, bytes, self.info.device);
                allowed.and(self.unmap(address, bytes))
            });
            mapped.and(self.unreserve(address, bytes))
        });
        mapped.and(self.release(piece))
    }

    fn check_descriptors(&self, call: &'static str) -> DriverResult<()> {
        if self.can.descriptors {
            return Ok(());
        }
        let message = "this device cannot pass memory as file descriptors";
        Err(DriverError::new(DriverErrorKind::NotSupported, call, 0, message))
    }
}

impl VirtualMemory for Cuda {
    fn granularity_bytes(&self) -> u64 {
        self.granularity_bytes
    }

    fn reserve(&self, size_bytes: u64) -> DriverResult<u64> {
        let _ready = self.enter_relaxed()?;
        let bytes = size(size_bytes)?;
        got(|address| self.api.address_reserve(address, bytes, 0, 0, 0))
    }

    fn unreserve(&self, address: u64, size_bytes: u64) -> DriverResult<()> {
        let _ready = self.enter_relaxed()?;
        self.api.address_free(address, size(size_bytes)?).ok()
    }

    fn create(&self, size_bytes: u64, exportable: Exportable) -> DriverResult<PhysicalId> {
        if exportable == Exportable::Fabric && self.has_fabric() {
            match self.create_with(size_bytes, self.fabric_kinds()) {
                // The system no longer allows fabric handles: create a piece with a descriptor.
                Err(error) if error.kind() == DriverErrorKind::NotSupported => {}
                done => return done,
            }
        }
        if exportable == Exportable::No {
            return self.create_with(size_bytes, 0);
        }
        self.check_descriptors("cuMemCreate")?;
        self.create_with(size_bytes, DESCRIPTOR)
    }

    fn fabric(&self) -> Option<&dyn Fabric> {
        self.has_fabric().then_some(self as &dyn Fabric)
    }

    fn release(&self, piece: PhysicalId) -> DriverResult<()> {
        let _ready = self.enter_relaxed()?;
        self.api.piece_release(piece.0).ok()
    }

    fn map(&self, address: u64, size_bytes: u64, piece: PhysicalId) -> DriverResult<()> {
        let _ready = self.enter_relaxed()?;
        self.api.piece_map(address, size(size_bytes)?, 0, piece.0, 0).ok()
    }

    fn set_access(&self, address: u64, size_bytes: u64, device: DeviceId) -> DriverResult<()> {
        let _ready = self.enter_relaxed()?;
        let id = if device == self.info.device {
            self.device
        } else {
            i32::try_from(device.0).unwrap_or(i32::MAX)
        };
        let access = AccessDescription { location: Location::device(id), flags: READ_AND_WRITE };
        self.api.set_access(address, size(size_bytes)?, &access, 1).ok()
    }

    fn unmap(&self, address: u64, size_bytes: u64) -> DriverResult<()> {
        let _ready = self.enter_relaxed()?;
        self.api.piece_unmap(address, size(size_bytes)?).ok()
    }

    #[expect(unsafe_code, reason = "taking over the descriptor that the library made")]
    fn export(&self, piece: PhysicalId) -> DriverResult<OwnedFd> {
        self.check_descriptors("cuMemExportToShareableHandle")?;
        let _entered = self.enter()?;
        let mut descriptor = -1;
        self.api.piece_export(&mut descriptor, piece.0, DESCRIPTOR, 0).ok()?;
        if descriptor < 0 {
            let message = format!("the driver returned descriptor {descriptor}");
            let call = "cuMemExportToShareableHandle";
            return Err(DriverError::new(DriverErrorKind::Other, call, 0, message));
        }
        // SAFETY: the library has just opened this descriptor for this call, so nothing else owns it.
        Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
    }

    fn import(&self, descriptor: OwnedFd, _size_bytes: u64) -> DriverResult<PhysicalId> {
        self.check_descriptors("cuMemImportFromShareableHandle")?;
        let _entered = self.enter()?;
        // The library takes the descriptor in place of a pointer. A wrong size is detected by `map`.
        let number = u64::try_from(descriptor.as_raw_fd()).unwrap_or(u64::MAX);
        got(|piece| self.api.piece_import(piece, number, DESCRIPTOR)).map(PhysicalId)
    }
}

#[cfg(test)]
mod tests;
