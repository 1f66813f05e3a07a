//! A block owned by a Rust value: safe access to its bytes, and a free when it is dropped.

use std::fmt;
use std::mem::MaybeUninit;
use std::sync::Arc;

use super::blocks::BlockId;
use super::{Core, current};
use crate::allocator::Request;
use crate::error::AllocError;
use crate::ids::StreamId;
use crate::system::{Fill, Source, SystemBlock, SystemMemory};

/// A buffer of host memory. Dropping it frees the block to the [`CpuAllocator`](super::CpuAllocator)
/// that allocated it. This works on any thread, even after that allocator was dropped. A block that was
/// allocated directly from the system is released to the system.
pub struct CpuBuffer {
    /// `None` only during the drop.
    block: Option<SystemBlock>,
    owner: Option<(Arc<Core>, BlockId)>,
}

/// The alignment of blocks that are allocated directly from the system.
///
/// Source: PyTorch's `alloc_cpu`.
const ALIGNMENT_BYTES: u64 = 64;

impl CpuBuffer {
    /// Allocates `bytes` from the instance that [`current`] returns on this thread. Without one,
    /// allocates directly from the system.
    ///
    /// # Errors
    ///
    /// [`AllocError`]; nothing has changed then.
    pub fn new(bytes: u64) -> Result<Self, AllocError> {
        match current() {
            Some(own) => own.buffer(bytes),
            None => {
                Request::new(bytes, StreamId::DEFAULT).check_size()?;
                let block = SystemMemory::default().take(bytes, ALIGNMENT_BYTES)?;
                Ok(Self { block: Some(block), owner: None })
            }
        }
    }

    /// Allocates like [`new`](Self::new), and fills the buffer with zeros.
    ///
    /// # Errors
    ///
    /// [`AllocError`]; nothing has changed then.
    pub fn zeroed(bytes: u64) -> Result<Self, AllocError> {
        let mut own = Self::new(bytes)?;
        own.fill(Fill::Zero);
        Ok(own)
    }

    pub(super) fn of(core: &Arc<Core>, bytes: u64) -> Result<Self, AllocError> {
        let (allocated, block) = core.serve_lent(Request::new(bytes, StreamId::DEFAULT))?;
        Ok(Self { block: Some(block), owner: Some((Arc::clone(core), allocated.id)) })
    }

    fn block(&mut self) -> &mut SystemBlock {
        self.block.as_mut().expect("the block is present until the drop")
    }

    /// Returns the buffer's address.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.block.as_ref().map_or(0, SystemBlock::address)
    }

    /// Returns the buffer's size in bytes.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.block.as_ref().map_or(0, SystemBlock::size_bytes)
    }

    /// Returns the bytes, which may be uninitialized.
    pub fn bytes(&mut self) -> &mut [MaybeUninit<u8>] {
        self.block().bytes()
    }

    /// Returns the bytes if all of them are known to be initialized.
    pub fn initialized(&mut self) -> Option<&mut [u8]> {
        self.block().initialized()
    }

    /// Fills all bytes.
    pub fn fill(&mut self, fill: Fill) {
        self.block().fill(fill);
    }
}

impl Drop for CpuBuffer {
    fn drop(&mut self) {
        if let Some(block) = self.block.take()
            && let Some((core, id)) = &self.owner
        {
            core.free_lent(*id, block);
        }
    }
}

impl fmt::Debug for CpuBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CpuBuffer({:#x}, {} bytes)", self.address(), self.size_bytes())
    }
}
