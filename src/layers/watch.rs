//! Layers that observe calls and return the blocks of the allocator below unchanged.
//!
//! A layer implements [`Watch`], with only the calls that it observes. [`Watched`] makes it a
//! [`DeviceAllocator`]. A capability that the allocator below lacks stays absent. Read next: `limit`, a
//! small layer.
//!
//! A layer that only checks whether a request failed replaces the result in place. Moving the result
//! would load a handle that was just written in parts, which causes a store-forwarding stall.

use std::fmt;
use std::ops::Deref;

use crate::allocator::{
    Allocation, Checkpoints, Control, DeviceAllocator, PoolCheckpoint, Request, Restored, Token,
};
use crate::error::{AllocError, AllocResult, FreeError, HandleError, OutOfMemory, PoolError};
use crate::ids::{OwnerId, PoolId, StreamId};
use crate::stats::Usage;

/// The block that a caller frees.
#[derive(Clone, Copy, Debug)]
pub struct Freeing {
    /// The address of its first byte.
    pub address: u64,
    /// The owner and token of its handle. `None` for a free by address.
    pub handle: Option<(OwnerId, Token)>,
}

/// The calls that a layer may observe. The default methods forward the call to the allocator below.
pub trait Watch: fmt::Debug + Send + Sync + Sized {
    /// Serves a request by calling `below`, or refuses it. May wait as `below` does.
    ///
    /// # Errors
    ///
    /// [`AllocError`]. The failed request has changed nothing.
    #[inline]
    fn allocate<A: DeviceAllocator>(&self, request: Request, below: &A) -> AllocResult {
        let mut answer = below.allocate(request);
        if let Err(error) = answer {
            answer = self.failed(request, error, below);
        }
        answer
    }

    /// Returns the result for a request that `below` has refused with `error`.
    ///
    /// # Errors
    ///
    /// [`AllocError`]. The failed request has changed nothing.
    #[cold]
    fn failed<A: DeviceAllocator>(&self, _: Request, error: AllocError, _: &A) -> AllocResult {
        Err(error)
    }

    /// Frees a block by calling `free`.
    ///
    /// # Errors
    ///
    /// Those of `free`.
    #[inline]
    fn free<T, E>(&self, block: Freeing, free: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let _ = block;
        free()
    }

    /// Called after a successful free, with the bytes that the block's request asked for.
    #[inline]
    fn freed(&self, size_bytes: u64) {
        let _ = size_bytes;
    }

    /// Called when a restored checkpoint made a block live, with the bytes that the block's request
    /// asked for.
    fn revived(&self, size_bytes: u64) {
        let _ = size_bytes;
    }

    /// Restores a pool's checkpoint by calling `restore`.
    ///
    /// # Errors
    ///
    /// Those of `restore`.
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

    /// Returns the name for messages, given the name of the allocator below.
    fn name<'n>(&'n self, below: &'n str) -> &'n str {
        below
    }

    /// Returns the counters, given the counters `below` of the allocator below.
    fn usage(&self, below: Usage) -> Usage {
        below
    }

    /// Returns the capabilities. By default, those of the allocator below. A layer can replace some of
    /// them.
    fn control<A: DeviceAllocator>(watched: &Watched<A, Self>) -> Control<'_> {
        watched.below.control()
    }
}

/// An allocator wrapped in a layer. Dereferences to the layer, for its own methods.
#[derive(Debug)]
pub struct Watched<A, W> {
    below: A,
    watch: W,
}

impl<A: DeviceAllocator, W: Watch> Watched<A, W> {
    /// Returns `below` wrapped in the layer `watch`.
    pub fn new(below: A, watch: W) -> Self {
        Self { below, watch }
    }

    /// Returns the allocator below.
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
        self.watch.name(self.below.name())
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

/// Returns the error of a layer that refuses a request itself. If the allocator below records a history,
/// adds the configuration and the largest holders of memory to the report, as that allocator does for its
/// own errors.
#[cold]
pub(super) fn out_of_memory<A: DeviceAllocator>(below: &A, mut report: OutOfMemory) -> AllocError {
    if let Some(own) = below.control().recording {
        own.history().explain(&mut report);
    }
    AllocError::OutOfMemory(Box::new(report))
}
