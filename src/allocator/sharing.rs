//! Blocks in other processes.

use std::any::Any;
use std::sync::Arc;

use super::Allocation;
use crate::sharing::{SharedHandle, SharingError};

/// Sharing of blocks between processes that run for the same user on one machine.
///
/// The device shares whole segments or whole pages, so who opens a block could touch its
/// neighbours too. A shared block belongs to the process that allocated it, which keeps it while
/// others may still open it; work of both processes is ordered by their own means.
pub trait Sharing: Send + Sync {
    /// What another process needs to [`open`](Self::open) the block: bytes for any channel. They
    /// carry a secret, so they are for nobody else. Sharing a block twice gives equal bytes.
    ///
    /// The first time pages are shared a thread starts that answers other processes, until the
    /// allocator goes. Each page costs one more descriptor while it is mapped. Does not wait for
    /// work.
    ///
    /// # Errors
    ///
    /// [`SharingError`]. Pages of a block that were found fit before the failure may keep the
    /// descriptor for a later attempt.
    fn share(&self, allocation: &Allocation) -> Result<SharedHandle, SharingError>;

    /// The same for the live block that starts at `address`, where blocks can be found by that.
    ///
    /// # Errors
    ///
    /// [`SharingError`]; of the kind `NotSupported` where they cannot.
    fn share_raw(&self, address: u64) -> Result<SharedHandle, SharingError> {
        let _ = address;
        Err(SharingError::NotSupported { what: "blocks by bare address" })
    }

    /// Maps a block of another process, with access for this device and its peers. Only what is
    /// shared takes address space. Opening the same pages again while they are open gives the same
    /// mapping. A block of pages may also be opened by its own process; it has a second address
    /// then. A block of a plain allocation may not.
    ///
    /// If the owner has freed the block and released its pages this fails; what was opened before
    /// stays valid. May wait some seconds for the other process, and for the driver.
    ///
    /// # Errors
    ///
    /// [`SharingError`]; nothing stays mapped then.
    fn open(&self, handle: &SharedHandle) -> Result<Imported, SharingError>;
}

/// A block of another process. It stays mapped as long as one of these for the same pages lives,
/// also when the allocator that opened it has gone.
///
/// Dropping the last one waits for all work of the device and unmaps the pages. What the driver
/// refuses to take back then is offered to it again later.
#[must_use = "the block is unmapped when this goes"]
#[derive(Debug)]
pub struct Imported {
    address: u64,
    size_bytes: u64,
    _keeps: Arc<dyn Any + Send + Sync>,
}

impl Imported {
    /// For makers of allocators: a block of `size_bytes` at `address`, valid as long as `keeps`
    /// lives.
    pub fn new(address: u64, size_bytes: u64, keeps: Arc<dyn Any + Send + Sync>) -> Self {
        Self { address, size_bytes, _keeps: keeps }
    }

    /// Where the block starts on this device, in this process.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The size of the block in bytes, as its owner asked for it.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }
}
