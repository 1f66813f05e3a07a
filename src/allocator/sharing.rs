//! Sharing of blocks with other processes.

use std::any::Any;
use std::sync::Arc;

use super::Allocation;
use crate::sharing::{SharedHandle, SharingError};

/// Sharing of blocks between processes of the same user on one machine.
///
/// The device shares whole segments or whole pages, so a process that opens a block can also access
/// adjacent blocks. A shared block belongs to the process that allocated it. That process must not free
/// the block while others may still open it. The processes must order their work on the block
/// themselves.
pub trait Sharing: Send + Sync {
    /// Returns a handle with which another process can [`open`](Self::open) the block. Its bytes need no
    /// special channel, but may contain a secret, so send them only to that process. Sharing a block twice
    /// returns equal bytes.
    ///
    /// Pages are shared by fabric handles or file descriptors. The first share of pages by descriptors
    /// starts a thread, which sends descriptors to other processes until the allocator is dropped. Each
    /// such page needs one more descriptor while it is mapped. Does not wait for work.
    ///
    /// # Errors
    ///
    /// [`SharingError`]. Pages of the block that were exported before the failure may keep their
    /// descriptor, for a later attempt.
    fn share(&self, allocation: &Allocation) -> Result<SharedHandle, SharingError>;

    /// Shares the live block at `address`, if the allocator can find blocks by address.
    ///
    /// # Errors
    ///
    /// [`SharingError`]. Of the kind `NotSupported` if the allocator cannot find blocks by address.
    fn share_raw(&self, address: u64) -> Result<SharedHandle, SharingError> {
        let _ = address;
        Err(SharingError::NotSupported { what: "blocks by bare address" })
    }

    /// Maps a block of another process, with access for this device and its peers. For a block of an
    /// expandable segment, maps only the pages that contain the block; for a block of a fixed segment,
    /// the whole segment. Opening the same memory again while it is open returns the same mapping. A
    /// process may open its own block of an expandable segment, which then has a second address. It may
    /// not open its own block of a fixed segment.
    ///
    /// Fails if the owner has freed the block and released its memory, unless this allocator still has
    /// that memory open. Blocks that were opened before that stay valid. May wait some seconds for the
    /// other process, and for the driver.
    ///
    /// # Errors
    ///
    /// [`SharingError`]. Nothing stays mapped then.
    fn open(&self, handle: &SharedHandle) -> Result<Imported, SharingError>;
}

/// A block of another process. Its pages stay mapped while any value of this type for the same pages
/// exists, even after the allocator that opened it was dropped.
///
/// Dropping the last value waits for all work of the device and unmaps the pages. If the driver fails,
/// unmapping is retried later.
#[must_use = "the block is unmapped when this is dropped"]
#[derive(Debug)]
pub struct Imported {
    address: u64,
    size_bytes: u64,
    _keeps: Arc<dyn Any + Send + Sync>,
}

impl Imported {
    /// Creates a block of `size_bytes` at `address`, valid while `keeps` is alive. For implementations
    /// of allocators.
    pub fn new(address: u64, size_bytes: u64, keeps: Arc<dyn Any + Send + Sync>) -> Self {
        Self { address, size_bytes, _keeps: keeps }
    }

    /// Returns the address of the block in this process.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns the size that the block's owner requested, in bytes.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }
}
