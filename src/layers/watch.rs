//! Layers that look at calls and answers and hand out the blocks of the allocator below as they are.
//!
//! [`Watch`] is what the author of such a layer writes: only the calls that it looks at. [`Watched`] makes a
//! [`DeviceAllocator`] of it. A capability that the allocator below lacks stays absent. Read next: `limit`,
//! a small one.
//!
//! A layer that only looks at whether a request failed changes the answer where the allocator below wrote
//! it: a handle that was just written in pieces and is then moved as a whole costs a store-forwarding stall.

use std::fmt;
use std::ops::Deref;

use crate::allocator::{
    Allocation, Checkpoints, Control, DeviceAllocator, PoolCheckpoint, Request, Restored, Token,
};
use crate::error::{AllocError, AllocResult, FreeError, HandleError, OutOfMemory, PoolError};
use crate::ids::{OwnerId, PoolId, StreamId};
use crate::stats::Usage;

/// The block of a free.
#[derive(Clone, Copy, Debug)]
pub struct Freeing {
    /// Where it starts.
    pub address: u64,
    /// What its handle carries; `None` for a free by address.
    pub handle: Option<(OwnerId, Token)>,
}

/// What a layer does with the calls by which blocks come and go. Every default passes the call on.
pub trait Watch: fmt::Debug + Send + Sync + Sized {
    /// Serves a request with `below`, or refuses it. May wait as `below` does.
    ///
    /// # Errors
    ///
    /// [`AllocError`]; nothing has changed then.
    #[inline]
    fn allocate<A: DeviceAllocator>(&self, request: Request, below: &A) -> AllocResult {
        let mut answer = below.allocate(request);
        if let Err(error) = answer {
            answer = self.failed(request, error, below);
        }
        answer
    }

    /// Answers a request that `below` refused with this error.
    ///
    /// # Errors
    ///
    /// [`AllocError`]; nothing has changed then.
    #[cold]
    fn failed<A: DeviceAllocator>(&self, _: Request, error: AllocError, _: &A) -> AllocResult {
        Err(error)
    }

    /// Frees a block by calling `free`.
    ///
    /// # Errors
    ///
    /// That of `free`.
    #[inline]
    fn free<T, E>(&self, block: Freeing, free: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let _ = block;
        free()
    }

    /// A block was freed for which so many bytes had been requested.
    #[inline]
    fn freed(&self, size_bytes: u64) {
        let _ = size_bytes;
    }

    /// A restored checkpoint has made a block live for which so many bytes had been requested.
    fn revived(&self, size_bytes: u64) {
        let _ = size_bytes;
    }

    /// Takes a pool back to a checkpoint by calling `restore`.
    ///
    /// # Errors
    ///
    /// That of `restore`.
    fn restore(
        &self,
        checkpoint: &PoolCheckpoint,
        restore: impl FnOnce() -> Result<Restored, PoolError>,
    ) -> Result<Restored, PoolError> {
        let _ = checkpoint;
        let restored = restore()?;
        restored.freed.iter().for_each(|block| self.freed(block.size_bytes));
        restored.live.iter().for_each(|block| self.revived(block.size_bytes()));
        Ok(restored)
    }

    /// The counters, from those of the allocator below.
    fn usage(&self, below: Usage) -> Usage {
        below
    }

    /// The capabilities: those of the allocator below, with the layer's own in their place.
    fn control<A: DeviceAllocator>(watched: &Watched<A, Self>) -> Control<'_> {
        watched.below.control()
    }
}

/// An allocator that wears a layer. Dereferences to the layer, for what only that layer can answer.
#[derive(Debug)]
pub struct Watched<A, W> {
    below: A,
    watch: W,
}

impl<A: DeviceAllocator, W: Watch> Watched<A, W> {
    /// `below`, wearing `watch`.
    pub fn new(below: A, watch: W) -> Self {
        Self { below, watch }
    }

    /// The allocator below.
    pub fn below(&self) -> &A {
        &self.below
    }
}

impl<A, W> Deref for Watched<A, W> {
    type Target = W;

    fn deref(&self) -> &W {
        &self.watch
    }
}

impl<A: DeviceAllocator, W: Watch> DeviceAllocator for Watched<A, W> {
    #[inline]
    fn allocate(&self, request: Request) -> AllocResult {
        self.watch.allocate(request, &self.below)
    }

    #[inline]
    fn free(&self, allocation: Allocation) -> Result<(), FreeError> {
        let (address, size_bytes) = (allocation.address(), allocation.size_bytes());
        let block = Freeing { address, handle: Some((allocation.owner(), allocation.token())) };
        let freed = self.watch.free(block, || self.below.free(allocation));
        if freed.is_ok() {
            self.watch.freed(size_bytes);
        }
        freed
    }

    fn name(&self) -> &str {
        self.below.name()
    }

    #[inline]
    fn free_raw(&self, address: u64) -> Result<u64, HandleError> {
        let block = Freeing { address, handle: None };
        let freed = self.watch.free(block, || self.below.free_raw(address));
        freed.inspect(|size_bytes| self.watch.freed(*size_bytes))
    }

    fn record_stream_raw(&self, address: u64, stream: StreamId) -> Result<(), HandleError> {
        self.below.record_stream_raw(address, stream)
    }

    fn usage(&self) -> Usage {
        self.watch.usage(self.below.usage())
    }

    fn control(&self) -> Control<'_> {
        let checkpoints = self.below.control().checkpoints.map(|_| self as &dyn Checkpoints);
        Control { checkpoints, ..W::control(self) }
    }
}

impl<A: DeviceAllocator, W: Watch> Watched<A, W> {
    fn checkpoints_below(&self, pool: PoolId) -> Result<&dyn Checkpoints, PoolError> {
        let lacks = PoolError::NotSupported { pool, what: "checkpoints" };
        self.below.control().checkpoints.ok_or(lacks)
    }
}

impl<A: DeviceAllocator, W: Watch> Checkpoints for Watched<A, W> {
    fn checkpoint(&self, pool: PoolId) -> Result<PoolCheckpoint, PoolError> {
        self.checkpoints_below(pool)?.checkpoint(pool)
    }

    fn restore(&self, checkpoint: &PoolCheckpoint) -> Result<Restored, PoolError> {
        let below = self.checkpoints_below(checkpoint.pool)?;
        self.watch.restore(checkpoint, || below.restore(checkpoint))
    }
}

/// The error of a layer that refuses a request by itself: `report`, with the configuration and the largest
/// holders, which the allocator below would have added.
#[cold]
pub(super) fn out_of_memory<A: DeviceAllocator>(below: &A, mut report: OutOfMemory) -> AllocError {
    if let Some(own) = below.control().recording {
        own.history().explain(&mut report);
    }
    AllocError::OutOfMemory(Box::new(report))
}
