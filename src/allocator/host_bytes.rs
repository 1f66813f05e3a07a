//! Access to the bytes of blocks in host memory.

use super::Allocation;
use crate::error::HandleError;
use crate::system::ByteAccess;

/// Access to the bytes of blocks that are host memory which the device does not know, as those of
/// `backend:cpu`. Buffers use it instead of the device's copies.
pub trait HostBytes: Send + Sync {
    /// Accesses bytes of a live block, from `address` on, which lies inside the block. The access has
    /// finished when the call returns. Other calls of the allocator may wait for it.
    ///
    /// # Errors
    ///
    /// [`HandleError::Foreign`] or [`HandleError::UnknownAddress`] if the block is no host memory of this
    /// allocator or the bytes are not all inside it. [`HandleError::Stale`] if the block is not live. Nothing
    /// was accessed then.
    fn access(
        &self,
        allocation: &Allocation,
        address: u64,
        access: &mut ByteAccess<'_>,
    ) -> Result<(), HandleError>;
}
