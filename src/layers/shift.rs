//! Layers whose blocks start at other addresses than those of the allocator below.
//!
//! A [`Placement`] returns the bytes to request from the allocator below, and the start of the caller's
//! block within them. [`Shifted`] keeps a table, under one lock, from callers' addresses to the blocks
//! below. Handles are made by this layer, so it detects foreign and freed handles itself. Capabilities that
//! use addresses of blocks below (private pools, checkpoints, sharing, exact addresses) are absent. Layouts
//! and base allocations are those of the allocator below.

use std::fmt;

use parking_lot::Mutex;

use super::below::Above;
use crate::allocator::{
    Allocation, Caching, Control, CrossStream, DeviceAllocator, HostBytes, Request, Token,
};
use crate::error::{AllocError, AllocResult, DriverError, FreeError, HandleError};
use crate::ids::{OwnerId, StreamId};
use crate::live_blocks::{BlockName, Live, LiveBlocks};
use crate::stats::Usage;

/// A block as its caller sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// The address of its first byte.
    pub address: u64,
    /// The requested bytes.
    pub size_bytes: u64,
    /// The stream of the request.
    pub stream: StreamId,
}

/// The position of a caller's block in the block of the allocator below.
pub trait Placement: fmt::Debug + Send + Sync {
    /// Returns the bytes to request from the allocator below. `None` on overflow.
    fn below_bytes(&self, bytes: u64) -> Option<u64>;

    /// Returns the offset of the caller's block in the block that starts at `below_address`.
    fn offset_bytes(&self, below_address: u64) -> u64;

    /// Called before the block is returned to the caller.
    ///
    /// # Errors
    ///
    /// The reason to refuse the block. The block is freed then.
    fn placed(&self, block: &Block, below_address: u64) -> Result<(), DriverError>;

    /// Called before the block is freed. `used_by` holds the streams that were announced with
    /// `record_stream`.
    fn freeing(&self, block: &Block, below_address: u64, used_by: &[StreamId]) {
        let _ = (block, below_address, used_by);
    }
}

#[derive(Debug)]
struct Placed {
    /// The block of the allocator below.
    below: Allocation,
    block: Block,
    used_by: Vec<StreamId>,
}

/// An allocator whose blocks are moved by a [`Placement`].
#[derive(Debug)]
pub struct Shifted<A: DeviceAllocator, P: Placement> {
    inner: A,
    place: P,
    owner: OwnerId,
    table: Mutex<LiveBlocks<Placed>>,
}

fn copy_of(allocation: &Allocation) -> Allocation {
    let (address, size_bytes) = (allocation.address(), allocation.size_bytes());
    Allocation::new(address, size_bytes, allocation.owner(), allocation.token())
}

impl<A: DeviceAllocator, P: Placement> Shifted<A, P> {
    pub(super) fn new(inner: A, place: P) -> Self {
        Self { inner, place, owner: OwnerId::next(), table: Mutex::default() }
    }

    pub(super) fn place(&self) -> &P {
        &self.place
    }

    fn request_below(&self, request: Request) -> AllocResult<Request> {
        let bytes = self.place.below_bytes(request.plain()?);
        let bytes = bytes.ok_or(AllocError::TooLarge { requested_bytes: request.bytes })?;
        Ok(Request { bytes, ..request })
    }

    /// Adds a block to the table. Returns the caller's address and the serial number of the block.
    fn enter(&self, request: Request, below: Allocation) -> AllocResult<(u64, u64)> {
        let start = below.address();
        let offset = self.place.offset_bytes(start);
        let block =
            Block { address: start + offset, size_bytes: request.bytes, stream: request.stream };
        if let Err(error) = self.place.placed(&block, start) {
            // If this free is refused, the block stays live in the allocator below.
            let _ = self.inner.free(below);
            return Err(error.into());
        }
        let placed = Placed { below, block, used_by: Vec::new() };
        // Blocks of the allocator below do not overlap, so the table has no block at this address.
        let (serial, _) = self.table.lock().enter(block.address, placed);
        Ok((block.address, serial))
    }

    /// Frees the block with this handle or address. Returns its requested bytes.
    fn leave(&self, name: BlockName) -> Result<u64, HandleError> {
        let Live { address, serial, value } = self.table.lock().take(name)?;
        let Placed { below, block, used_by } = value;
        self.place.freeing(&block, below.address(), &used_by);
        match self.inner.free(below) {
            Ok(()) => Ok(block.size_bytes),
            Err(FreeError { reason, allocation: below }) => {
                let value = Placed { below, block, used_by };
                self.table.lock().put_back(Live { address, serial, value });
                Err(reason)
            }
        }
    }

    /// Announces that a stream uses the block with this handle or address.
    fn announce(&self, name: BlockName, stream: StreamId) -> Result<(), HandleError> {
        let below = {
            let mut table = self.table.lock();
            let placed = table.find_mut(name)?;
            // Added before the call below: if that call fails, the free waits for one stream more than
            // necessary, which is safe.
            if !placed.used_by.contains(&stream) {
                placed.used_by.push(stream);
            }
            copy_of(&placed.below)
        };
        self.cross().record_stream(&below, stream)
    }
}

impl<A: DeviceAllocator, P: Placement> DeviceAllocator for Shifted<A, P> {
    fn allocate(&self, request: Request) -> AllocResult {
        let below = self.inner.allocate(self.request_below(request)?)?;
        let (address, serial) = self.enter(request, below)?;
        Ok(Allocation::new(address, request.bytes, self.owner, Token::numbered(serial)))
    }

    fn free(&self, allocation: Allocation) -> Result<(), FreeError> {
        let freed = BlockName::of(&allocation, self.owner).and_then(|name| self.leave(name));
        freed.map(drop).map_err(|reason| FreeError { reason, allocation })
    }

    fn name(&self) -> &str {
        self.inner.name()
    }

    fn free_raw(&self, address: u64) -> Result<u64, HandleError> {
        self.leave(BlockName::at(address))
    }

    fn record_stream_raw(&self, address: u64, stream: StreamId) -> Result<(), HandleError> {
        self.announce(BlockName::at(address), stream)
    }

    fn usage(&self) -> Usage {
        self.inner.usage()
    }

    fn control(&self) -> Control<'_> {
        let below = self.inner.control();
        Control {
            cross_stream: below.cross_stream.map(|_| self as &dyn CrossStream),
            caching: below.caching.map(|_| self as &dyn Caching),
            host_bytes: below.host_bytes.map(|_| self as &dyn HostBytes),
            private_pools: None,
            checkpoints: None,
            sharing: None,
            // A check of guards would read memory that is not mapped.
            sleeping: None,
            ..below
        }
    }
}

impl<A: DeviceAllocator, P: Placement> CrossStream for Shifted<A, P> {
    fn record_stream(&self, allocation: &Allocation, stream: StreamId) -> Result<(), HandleError> {
        self.announce(BlockName::of(allocation, self.owner)?, stream)
    }

    fn needs_own_stream(&self) -> bool {
        self.cross().needs_own_stream()
    }

    fn process_events(&self) -> Result<(), DriverError> {
        self.cross().process_events()
    }
}

impl<A: DeviceAllocator, P: Placement> Above for Shifted<A, P> {
    fn inner(&self) -> &dyn DeviceAllocator {
        &self.inner
    }

    fn below(&self, allocation: &Allocation) -> Option<Allocation> {
        let name = BlockName::of(allocation, self.owner).ok()?;
        self.table.lock().find_mut(name).ok().map(|placed| copy_of(&placed.below))
    }
}
