//! Layers whose blocks start elsewhere than those of the allocator below.
//!
//! [`Placement`] says how much more to ask for and where in it the caller's block starts; [`Shifted`] keeps
//! which block below belongs to which address above (one lock). Handles are this layer's own, so one of
//! another allocator or one that was freed is refused here. Capabilities that speak of blocks below by
//! address (private pools, sharing, exact addresses) are absent; layouts and base allocations are those
//! of the allocator below.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;

use parking_lot::Mutex;

use super::layered::{Layer, cross_of, raw_of};
use super::watch::Block;
use crate::allocator::{Allocation, DeviceAllocator, Request, Token};
use crate::error::{AllocError, DriverError, FreeError, HandleError};
use crate::ids::{OwnerId, StreamId};

/// Where a caller's block lies in the block below.
pub trait Placement: fmt::Debug + Send + Sync {
    /// Whether there is anything to place; without it all calls go straight through.
    fn acts(&self) -> bool {
        true
    }

    /// How many bytes to ask for; `None` when no number is large enough.
    fn below_bytes(&self, bytes: u64) -> Option<u64>;

    /// Where the block starts, in bytes from the start of the block below.
    fn offset_bytes(&self, below_address: u64) -> u64;

    /// The block is about to be handed out.
    ///
    /// # Errors
    ///
    /// Why it cannot be; it goes back then.
    fn placed(&self, block: &Block, below_address: u64) -> Result<(), DriverError>;

    /// The block is about to be given back; work on `used_by` was announced.
    fn leaving(&self, block: &Block, below_address: u64, used_by: &[StreamId]) {
        let _ = (block, below_address, used_by);
    }
}

#[derive(Debug)]
struct Placed {
    /// The block below.
    below: Allocation,
    block: Block,
    serial: u64,
    used_by: Vec<StreamId>,
}

#[derive(Debug, Default)]
struct Table {
    blocks: HashMap<u64, Placed>,
    serial: u64,
}

/// An allocator whose blocks are placed.
#[derive(Debug)]
pub struct Shifted<A: DeviceAllocator, P: Placement> {
    inner: A,
    place: P,
    owner: OwnerId,
    table: Mutex<Table>,
}

fn copy_of(allocation: &Allocation) -> Allocation {
    let (address, size_bytes) = (allocation.address(), allocation.size_bytes());
    Allocation::new(address, size_bytes, allocation.owner(), allocation.token())
}

fn token_of(serial: u64) -> Token {
    let [a, b, c, d, e, f, g, h] = serial.to_le_bytes();
    Token([u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]), 0])
}

impl<A: DeviceAllocator, P: Placement> Shifted<A, P> {
    pub(super) fn new(inner: A, place: P) -> Self {
        Self { inner, place, owner: OwnerId::next(), table: Mutex::default() }
    }

    pub(super) fn place(&self) -> &P {
        &self.place
    }

    fn request_below(&self, request: Request) -> Result<Request, AllocError> {
        if request.bytes == 0 {
            return Err(AllocError::ZeroBytes);
        }
        let bytes = self.place.below_bytes(request.bytes);
        let bytes = bytes.ok_or(AllocError::TooLarge { requested_bytes: request.bytes })?;
        Ok(Request { bytes, ..request })
    }

    /// Enters a block and returns its address above and its number.
    fn enter(&self, request: Request, below: Allocation) -> Result<(u64, u64), AllocError> {
        let start = below.address();
        let offset = self.place.offset_bytes(start);
        let block =
            Block { address: start + offset, size_bytes: request.bytes, stream: request.stream };
        if let Err(error) = self.place.placed(&block, start) {
            // Refused by its own maker: then it stays live there, as every block that is lost.
            let _ = self.inner.free(below);
            return Err(error.into());
        }
        let mut table = self.table.lock();
        table.serial += 1;
        let serial = table.serial;
        table.blocks.insert(block.address, Placed { below, block, serial, used_by: Vec::new() });
        Ok((block.address, serial))
    }

    /// Gives the block at `address` back, if `is_meant`; `missing` says why not.
    fn leave(
        &self,
        address: u64,
        is_meant: impl FnOnce(&Placed) -> bool,
        missing: HandleError,
    ) -> Result<u64, HandleError> {
        let found = match self.table.lock().blocks.entry(address) {
            Entry::Occupied(found) if is_meant(found.get()) => found.remove(),
            _ => return Err(missing),
        };
        let Placed { below, block, serial, used_by } = found;
        self.place.leaving(&block, below.address(), &used_by);
        match self.inner.free(below) {
            Ok(()) => Ok(block.size_bytes),
            Err(FreeError { reason, allocation: below }) => {
                let placed = Placed { below, block, serial, used_by };
                self.table.lock().blocks.insert(address, placed);
                Err(reason)
            }
        }
    }

    /// Whose handle it is not, if it is not ours.
    fn own(&self, allocation: &Allocation) -> Result<(), HandleError> {
        if allocation.owner() == self.owner {
            return Ok(());
        }
        Err(HandleError::Foreign { owner: allocation.owner(), asked: self.owner })
    }

    /// Announces a use of the block at `address`, if `is_meant`.
    fn announce(
        &self,
        address: u64,
        stream: StreamId,
        is_meant: impl FnOnce(&Placed) -> bool,
        missing: HandleError,
    ) -> Result<(), HandleError> {
        let below = {
            let mut table = self.table.lock();
            let found = table.blocks.get_mut(&address).filter(|placed| is_meant(placed));
            let placed = found.ok_or(missing)?;
            // Before the allocator below hears of it: one stream too many is waited for, never one
            // too few.
            if !placed.used_by.contains(&stream) {
                placed.used_by.push(stream);
            }
            copy_of(&placed.below)
        };
        cross_of(&self.inner).record_stream(&below, stream)
    }
}

impl<A: DeviceAllocator, P: Placement> Layer for Shifted<A, P> {
    type Inner = A;

    fn inner(&self) -> &A {
        &self.inner
    }

    fn moves_blocks(&self) -> bool {
        self.place.acts()
    }

    fn allocate(&self, request: Request) -> Result<Allocation, AllocError> {
        if !self.place.acts() {
            return self.inner.allocate(request);
        }
        request.refuse_place()?;
        let below = self.inner.allocate(self.request_below(request)?)?;
        let (address, serial) = self.enter(request, below)?;
        Ok(Allocation::new(address, request.bytes, self.owner, token_of(serial)))
    }

    fn free(&self, allocation: Allocation) -> Result<(), FreeError> {
        if !self.place.acts() {
            return self.inner.free(allocation);
        }
        let address = allocation.address();
        let is_meant = |placed: &Placed| token_of(placed.serial) == allocation.token();
        self.own(&allocation)
            .and_then(|()| self.leave(address, is_meant, HandleError::Stale { address }))
            .map(drop)
            .map_err(|reason| FreeError { reason, allocation })
    }

    fn free_raw(&self, address: u64) -> Result<u64, HandleError> {
        if !self.place.acts() {
            return raw_of(&self.inner).free_raw(address);
        }
        self.leave(address, |_| true, HandleError::UnknownAddress { address })
    }

    fn record_stream_raw(&self, address: u64, stream: StreamId) -> Result<(), HandleError> {
        if !self.place.acts() {
            return raw_of(&self.inner).record_stream_raw(address, stream);
        }
        self.announce(address, stream, |_| true, HandleError::UnknownAddress { address })
    }

    fn record_stream(&self, allocation: &Allocation, stream: StreamId) -> Result<(), HandleError> {
        if !self.place.acts() {
            return cross_of(&self.inner).record_stream(allocation, stream);
        }
        self.own(allocation)?;
        let address = allocation.address();
        let is_meant = |placed: &Placed| token_of(placed.serial) == allocation.token();
        self.announce(address, stream, is_meant, HandleError::Stale { address })
    }

    fn below(&self, allocation: &Allocation) -> Option<Allocation> {
        if allocation.owner() != self.owner {
            return None;
        }
        let table = self.table.lock();
        let placed = table.blocks.get(&allocation.address())?;
        (token_of(placed.serial) == allocation.token()).then(|| copy_of(&placed.below))
    }
}
