//! Fabric handles: handles of memory that other machines of the same fabric can import.
//!
//! A device with fabric support may still not be allowed to use it: creating memory with a fabric handle
//! fails if no fabric manager runs, or if the container has no IMEX channel. So the driver tries once,
//! with the smallest piece, and caches the result. Where fabric handles are not allowed, memory is
//! created with descriptors. Only success and refusal are cached. After any other failure, such as lack
//! of memory, the next query tries again.

use super::Cuda;
use super::api::got;
use super::mapping::DESCRIPTOR;
use crate::driver::{DriverResult, Fabric, FabricHandle, PhysicalId, VirtualMemory};
use crate::error::{DriverError, DriverErrorKind};

/// `CU_MEM_HANDLE_TYPE_FABRIC`.
const FABRIC: u32 = 8;

impl Cuda {
    /// Returns the handle types for a piece with a fabric handle. They include the descriptor if the
    /// device supports it.
    pub(super) fn fabric_kinds(&self) -> u32 {
        FABRIC | if self.can.descriptors { DESCRIPTOR } else { 0 }
    }

    /// Returns whether pieces can be created with fabric handles. The first call tries to create one.
    pub(super) fn has_fabric(&self) -> bool {
        if !self.can.fabric || !self.can.virtual_memory {
            return false;
        }
        let mut known = self.fabric.lock();
        if let Some(known) = *known {
            return known;
        }
        let tried = self.try_fabric().map_err(|error| error.kind());
        if matches!(
            tried,
            Ok(()) | Err(DriverErrorKind::NotSupported | DriverErrorKind::InvalidValue)
        ) {
            *known = Some(tried.is_ok());
        }
        tried.is_ok()
    }

    fn try_fabric(&self) -> DriverResult<()> {
        let piece = self.create_with(self.granularity_bytes, self.fabric_kinds())?;
        let exported = self.export_to_fabric(piece);
        self.release(piece)?;
        exported.map(drop)
    }

    fn export_to_fabric(&self, piece: PhysicalId) -> DriverResult<FabricHandle> {
        let _entered = self.enter()?;
        let mut handle = [0; 64];
        self.api.piece_export_fabric(&mut handle, piece.0, FABRIC, 0).ok()?;
        Ok(FabricHandle(handle))
    }

    fn check_fabric(&self, call: &'static str) -> DriverResult<()> {
        if self.has_fabric() {
            return Ok(());
        }
        let message = "this device, or the system, has no fabric handles";
        Err(DriverError::new(DriverErrorKind::NotSupported, call, 0, message))
    }
}

impl Fabric for Cuda {
    fn export_handle(&self, piece: PhysicalId) -> DriverResult<FabricHandle> {
        self.check_fabric("cuMemExportToShareableHandle")?;
        self.export_to_fabric(piece)
    }

    fn import_handle(&self, handle: &FabricHandle) -> DriverResult<PhysicalId> {
        self.check_fabric("cuMemImportFromShareableHandle")?;
        let _entered = self.enter()?;
        got(|piece| self.api.piece_import_fabric(piece, &handle.0, FABRIC)).map(PhysicalId)
    }
}

#[cfg(test)]
mod tests;
