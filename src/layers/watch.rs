//! Layers that look on: told of every block that is had or given back, by whichever call.
//!
//! [`Watch`] is what such a layer does, [`Watching`] wears it. A book of live blocks by address remembers
//! what a block was when it comes back as a bare address. A free strikes the block from the book before the
//! allocator below hears of it, because the address may be handed out again at once, and enters it again if
//! the free is refused. No lock is held while the allocator below or a watcher runs.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use super::layered::{Layer, checkpoints_of, raw_of};
use crate::allocator::{
    Allocation, Counters, DeviceAllocator, PoolCheckpoint, Request, Restored, Token,
};
use crate::error::{AllocError, FreeError, HandleError, PoolError};
use crate::ids::{OwnerId, StreamId};
use crate::live_blocks::{Live, Sharded};
use crate::stats::Statistics;

/// A block as watchers see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Where it starts.
    pub address: u64,
    /// How many bytes were asked for.
    pub size_bytes: u64,
    /// The stream of the request.
    pub stream: StreamId,
}

/// What a layer that looks on does at each moment. Called with no lock held, by many threads at once.
pub trait Watch: fmt::Debug + Send + Sync + Sized {
    /// Whether live blocks are remembered. Without it [`freed`](Self::freed) is called for blocks that go
    /// back, instead of [`giving`](Self::giving) and [`kept`](Self::kept).
    const KEEPS_BOOK: bool = true;

    /// Before the allocator below is asked.
    ///
    /// # Errors
    ///
    /// What the caller gets instead of a block.
    fn ask(&self, request: Request) -> Result<(), AllocError> {
        let _ = request;
        Ok(())
    }

    /// A request that [`ask`](Self::ask) let through got no block: the allocator below refused it, or
    /// panicked.
    fn withdrawn(&self, request: Request) {
        let _ = request;
    }

    /// After a request has failed, here or below.
    fn failed(&self, request: Request, error: &AllocError) {
        let _ = (request, error);
    }

    /// Whether to ask the allocator below once more. `attempt` counts from 1.
    fn again<A: DeviceAllocator>(
        &self,
        inner: &A,
        request: Request,
        error: &AllocError,
        attempt: u32,
    ) -> bool {
        let _ = (inner, request, error, attempt);
        false
    }

    /// A block that nobody asked this layer for is about to be entered: a checkpoint's.
    fn adopted(&self, block: &Block) {
        let _ = block;
    }

    /// A block is in the caller's hands.
    fn took(&self, block: &Block) {
        let _ = block;
    }

    /// A block is about to be given back.
    fn giving(&self, block: &Block) {
        let _ = block;
    }

    /// The allocator below did not take it back.
    fn kept(&self, block: &Block) {
        let _ = block;
    }

    /// So many bytes were given back, where no book is kept.
    fn freed(&self, size_bytes: u64) {
        let _ = size_bytes;
    }

    /// The allocator goes.
    fn ends(&self) {}

    /// Whether it counts by itself, although nobody below does.
    const COUNTS: bool = false;

    /// The counters, given those of the allocator below.
    fn statistics(&self, below: Option<Statistics>) -> Statistics {
        below.unwrap_or_default()
    }

    /// Peaks become current values.
    fn reset_peaks(&self) {}

    /// Sums become zero.
    fn reset_accumulated(&self) {}
}

/// What the book says of a live block.
#[derive(Debug)]
struct Record {
    block: Block,
    /// Its handle.
    handle: (OwnerId, Token),
    /// How many were entered before.
    number: u64,
}

/// Live blocks by address.
#[derive(Debug, Default)]
struct Book {
    blocks: Sharded<Record>,
    /// How many were entered.
    entered: AtomicU64,
}

impl Book {
    fn enter(&self, block: Block, handle: (OwnerId, Token)) -> Option<Live<Record>> {
        let number = self.entered.fetch_add(1, Ordering::Relaxed);
        let record = Record { block, handle, number };
        self.blocks.lock(block.address).enter(block.address, record).1
    }

    /// Strikes the block at `address`, if `is_meant`.
    fn strike(&self, address: u64, is_meant: impl FnOnce(&Record) -> bool) -> Option<Live<Record>> {
        self.blocks.lock(address).take_if(address, |live| is_meant(live))
    }

    fn enter_again(&self, record: Live<Record>) {
        self.blocks.lock(record.address).put_back(record);
    }
}

/// A request under way, until it has its block.
struct Asked<'w, W: Watch> {
    watch: &'w W,
    request: Request,
}

impl<W: Watch> Drop for Asked<'_, W> {
    #[cold]
    fn drop(&mut self) {
        self.watch.withdrawn(self.request);
    }
}

/// An allocator that is looked at.
#[derive(Debug)]
pub struct Watching<A: DeviceAllocator, W: Watch> {
    inner: A,
    watch: W,
    book: Book,
}

impl<A: DeviceAllocator, W: Watch> Watching<A, W> {
    pub(super) fn new(inner: A, watch: W) -> Self {
        Self { inner, watch, book: Book::default() }
    }

    /// Who looks.
    pub(super) fn watch(&self) -> &W {
        &self.watch
    }

    /// The allocator below is not asked, so it is said here who holds the memory.
    #[cold]
    #[inline(never)]
    fn forbidden(&self, request: Request, mut error: AllocError) -> AllocError {
        if let (AllocError::OutOfMemory(report), Some(own)) = (&mut error, self.inner.recording()) {
            own.history().explain(report);
        }
        self.watch.failed(request, &error);
        error
    }

    /// A request was refused: asks again as long as the watcher wants it.
    #[cold]
    #[inline(never)]
    fn refused(&self, request: Request, mut error: AllocError) -> Result<Allocation, AllocError> {
        let mut attempt = 1;
        while self.watch.again(&self.inner, request, &error, attempt) {
            attempt += 1;
            error = match self.inner.allocate(request) {
                Ok(taken) => return Ok(taken),
                Err(error) => error,
            };
        }
        self.watch.failed(request, &error);
        Err(error)
    }

    #[inline]
    fn took(&self, block: Block, handle: (OwnerId, Token)) {
        self.watch.took(&block);
        if !W::KEEPS_BOOK {
            return;
        }
        // An allocator that hands out a live address has taken the old block back by itself.
        let _ = self.book.enter(block, handle);
    }

    /// Strikes a block, lets `give` free it, and enters it again if that fails.
    #[inline]
    fn gives<T, E>(
        &self,
        address: u64,
        is_meant: impl FnOnce(&Record) -> bool,
        give: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        let Some(record) = self.book.strike(address, is_meant) else {
            return give();
        };
        self.watch.giving(&record.block);
        give().inspect_err(|_| {
            self.watch.kept(&record.block);
            self.book.enter_again(record);
        })
    }
}

impl<A: DeviceAllocator, W: Watch> Layer for Watching<A, W> {
    type Inner = A;

    #[inline]
    fn inner(&self) -> &A {
        &self.inner
    }

    #[inline]
    fn allocate(&self, request: Request) -> Result<Allocation, AllocError> {
        if let Err(error) = self.watch.ask(request) {
            return Err(self.forbidden(request, error));
        }
        let asked = Asked { watch: &self.watch, request };
        let found = match self.inner.allocate(request) {
            Ok(found) => found,
            Err(error) => self.refused(request, error)?,
        };
        std::mem::forget(asked);
        let (address, size_bytes) = (found.address(), request.bytes);
        let block = Block { address, size_bytes, stream: request.stream };
        self.took(block, (found.owner(), found.token()));
        Ok(found)
    }

    #[inline]
    fn free(&self, allocation: Allocation) -> Result<(), FreeError> {
        if !W::KEEPS_BOOK {
            let size_bytes = allocation.size_bytes();
            // Nothing is copied where all goes well: an error is a hundred bytes.
            return match self.inner.free(allocation) {
                Ok(()) => {
                    self.watch.freed(size_bytes);
                    Ok(())
                }
                Err(refused) => Err(refused),
            };
        }
        let handle = (allocation.owner(), allocation.token());
        // A handle of another allocator may name the same address; so may one that is stale.
        let is_meant = |record: &Record| record.handle == handle;
        self.gives(allocation.address(), is_meant, || self.inner.free(allocation))
    }

    #[inline]
    fn free_raw(&self, address: u64) -> Result<u64, HandleError> {
        let free = || raw_of(&self.inner).free_raw(address);
        if !W::KEEPS_BOOK {
            return free().inspect(|size_bytes| self.watch.freed(*size_bytes));
        }
        self.gives(address, |_| true, free)
    }

    fn restore(&self, checkpoint: &PoolCheckpoint) -> Result<Restored, PoolError> {
        let before = self.book.entered.load(Ordering::Relaxed);
        let restored = checkpoints_of(&self.inner).restore(checkpoint)?;
        for freed in &restored.freed {
            if !W::KEEPS_BOOK {
                self.watch.freed(freed.size_bytes);
                continue;
            }
            // A block that was handed out since is another one.
            if let Some(gone) = self.book.strike(freed.address, |record| record.number < before) {
                self.watch.giving(&gone.block);
            }
        }
        for allocation in &restored.live {
            let address = allocation.address();
            let inside =
                |start: u64, size: u64| (start..start.saturating_add(size)).contains(&address);
            let segment = checkpoint.segments.iter().find(|s| inside(s.address, s.size_bytes));
            let stream = segment.map(|segment| segment.stream).unwrap_or_default();
            let block = Block { address, size_bytes: allocation.size_bytes(), stream };
            self.watch.adopted(&block);
            self.took(block, (allocation.owner(), allocation.token()));
        }
        Ok(restored)
    }

    fn counts(&self) -> bool {
        W::COUNTS || self.inner.counters().is_some()
    }

    fn statistics(&self) -> Statistics {
        self.watch.statistics(self.inner.counters().map(Counters::statistics))
    }

    fn reset_peaks(&self) {
        self.watch.reset_peaks();
        if let Some(counters) = self.inner.counters() {
            counters.reset_peaks();
        }
    }

    fn reset_accumulated(&self) {
        self.watch.reset_accumulated();
        if let Some(counters) = self.inner.counters() {
            counters.reset_accumulated();
        }
    }
}

impl<A: DeviceAllocator, W: Watch> Drop for Watching<A, W> {
    fn drop(&mut self) {
        self.watch.ends();
    }
}
