//! Private memory pools: memory that is kept apart from the default pool and serves only requests to the
//! pool, except with [`PoolOptions::use_on_oom`].
//!
//! A request names its pool, or an open **scope** routes it to one. A scope selects the requests of a
//! thread, of a stream, of a graph's capture, or of streams that a function selects. A pool serves requests
//! while it has users. After that, its free memory is released to the driver whenever the allocator releases
//! memory, and the pool ends with its last memory. The guards in this module close scopes and remove users
//! when they are dropped, so this also happens when a capture fails.
//!
//! Source: PyTorch's `MemPool`, `use_mem_pool` and the pools of CUDA graphs.

use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use super::{Allocation, TagOptions};
use crate::error::PoolError;
use crate::history::{BlockStateName, SegmentLayout};
use crate::ids::{PoolId, StreamId, ThreadNumber};

/// A source of segments for a pool, in place of the driver. Called with no lock held. It may use the
/// allocator, but not the pool that it serves.
pub trait SegmentAllocator: fmt::Debug + Send + Sync {
    /// Returns the address of `size_bytes` (a multiple of 512) for `stream`, aligned to 512. `None`
    /// when there is not enough memory.
    fn allocate(&self, size_bytes: u64, stream: StreamId) -> Option<u64>;
    /// Frees memory that [`allocate`](Self::allocate) returned.
    fn free(&self, address: u64, size_bytes: u64, stream: StreamId);
}

/// Options of a pool.
#[derive(Clone, Debug, Default)]
pub struct PoolOptions {
    /// The source of segments, in place of the driver. Segments from it are never expandable.
    pub allocator: Option<Arc<dyn SegmentAllocator>>,
    /// Whether requests to the default pool may use free blocks of this pool before they fail. Has no
    /// effect for a pool in which a graph was captured or a checkpoint was taken, because the graph or
    /// checkpoint needs these blocks.
    pub use_on_oom: bool,
    /// Whether blocks are never split, except for requests at exact addresses.
    pub no_split: bool,
    /// Makes the pool a tag, which can be [paused](super::Sleeping). Only `backend:native` has tags, on
    /// devices with virtual memory. A tag has no `allocator` and no `use_on_oom`, and it may have several
    /// open scopes.
    pub tag: Option<TagOptions>,
}

/// The requests that a scope routes to its pool.
///
/// While an open scope routes requests of a capture, whatever its filter, the allocator queries no
/// events of the captured streams and releases no memory for these requests.
#[derive(Clone)]
pub enum ScopeFilter {
    /// The requests of one thread.
    Thread(ThreadNumber),
    /// The requests on one stream.
    Stream(StreamId),
    /// The requests on streams of a capture, by the driver's capture id.
    Capture(u64),
    /// The requests on streams for which a function returns true. It is called at each request, on the
    /// requesting thread. It must not call the allocator and must not panic.
    Where(Arc<dyn Fn(StreamId) -> bool + Send + Sync>),
}

impl ScopeFilter {
    /// Selects the requests of the calling thread.
    #[must_use]
    pub fn this_thread() -> Self {
        Self::Thread(ThreadNumber::current())
    }
}

impl fmt::Debug for ScopeFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Thread(thread) => f.debug_tuple("Thread").field(thread).finish(),
            Self::Stream(stream) => f.debug_tuple("Stream").field(stream).finish(),
            Self::Capture(capture) => f.debug_tuple("Capture").field(capture).finish(),
            Self::Where(_) => f.debug_tuple("Where").finish_non_exhaustive(),
        }
    }
}

/// The blocks of a pool at one moment, for [`Checkpoints::restore`]. Created by
/// [`Checkpoints::checkpoint`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolCheckpoint {
    /// The pool.
    pub pool: PoolId,
    /// The segments of the pool, without unmapped ranges. Segments in one reserved range are adjacent
    /// in the list.
    pub segments: Vec<SegmentLayout>,
}

/// The result of [`Checkpoints::restore`].
#[derive(Debug, Default)]
pub struct Restored {
    /// Blocks that were live before and were freed. All handles of these blocks are stale now.
    pub freed: Vec<Freed>,
    /// Blocks that were live at the checkpoint and are live again, each with a new handle.
    pub live: Vec<Allocation>,
}

/// A block that was freed without its handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Freed {
    /// The address of the block.
    pub address: u64,
    /// The requested size in bytes.
    pub size_bytes: u64,
}

/// Private pools. A request names a pool by [`Request::in_pool`](super::Request::in_pool), or an open
/// scope routes it to one. A method of this trait waits only if its documentation states it.
pub trait PrivatePools: Send + Sync {
    /// Creates a pool with one user: the caller.
    ///
    /// # Errors
    ///
    /// [`PoolError`] when a pool with this id exists, or when the id is that of the default pool. Also when
    /// the allocator does not support the options.
    fn create_pool(&self, pool: PoolId, options: PoolOptions) -> Result<(), PoolError>;

    /// Changes the options of a pool that has users. The option `allocator` is ignored. `no_split` may
    /// change only while the pool has served no request. The same holds for `tag`, which makes the pool a
    /// tag; `None` leaves it as it is.
    ///
    /// # Errors
    ///
    /// [`PoolError`] when the pool is unknown or has no users any more. Also when the strategy does not
    /// support the options; `cudaMallocAsync` does not support `no_split`.
    fn set_pool_options(&self, pool: PoolId, options: &PoolOptions) -> Result<(), PoolError> {
        let _ = options;
        Err(PoolError::NotSupported { pool, what: "other options for an existing pool" })
    }

    /// Adds a user to a pool.
    ///
    /// # Errors
    ///
    /// [`PoolError`] when the pool is unknown or has no users any more.
    fn retain_pool(&self, pool: PoolId) -> Result<(), PoolError>;

    /// Removes a user from a pool. A pool without users serves no requests. Its blocks can still be
    /// freed, and its free memory is released to the driver whenever the allocator releases memory. An
    /// open scope still routes requests to the pool until [`close_scope`](Self::close_scope), so close
    /// it first.
    ///
    /// # Errors
    ///
    /// [`PoolError`] when the pool is unknown or has no users any more.
    fn release_pool(&self, pool: PoolId) -> Result<(), PoolError>;

    /// Returns the number of users. `None` when the pool is unknown or all its memory was released.
    fn pool_users(&self, pool: PoolId) -> Option<u32>;

    /// Opens a scope that routes requests to a pool. It takes precedence over the scopes that are open
    /// already. Adds a user to the pool. Creates the pool if it is unknown.
    ///
    /// # Errors
    ///
    /// [`PoolError`] when the pool already has an open scope and is no tag, or has no users any more.
    fn open_scope(&self, pool: PoolId, filter: ScopeFilter) -> Result<(), PoolError>;

    /// Closes the scope of a pool that [`open_scope`](Self::open_scope) opened. If a tag has several,
    /// closes the newest one that the calling thread opened, or else the newest. (A guard closes its
    /// own scope.) The user that the scope added stays until [`release_pool`](Self::release_pool). If a
    /// graph is captured in the scope, end the capture first.
    ///
    /// # Errors
    ///
    /// [`PoolError`] when the pool has no open scope. Of the kind `Driver` when the driver failed after
    /// the scope was closed.
    fn close_scope(&self, pool: PoolId) -> Result<(), PoolError>;

    /// Releases the free memory of a pool without users to the driver. Waits for the events of blocks
    /// that were freed while other streams used them. Does nothing for a pool that has users.
    ///
    /// # Errors
    ///
    /// [`PoolError`] when the pool is unknown or the driver fails.
    fn empty_pool(&self, pool: PoolId) -> Result<(), PoolError>;

    /// Returns the addresses of the pool's live blocks, in ascending order.
    ///
    /// # Errors
    ///
    /// [`PoolError`] when the pool is unknown.
    fn live_addresses(&self, pool: PoolId) -> Result<Vec<u64>, PoolError> {
        let layout = self.pool_layout(pool)?;
        let blocks = layout.iter().flat_map(|segment| &segment.blocks);
        let live = blocks.filter(|block| block.state == BlockStateName::ActiveAllocated);
        Ok(live.map(|block| block.address).collect())
    }

    /// Returns all segments of the pool with their blocks, in address order.
    ///
    /// # Errors
    ///
    /// [`PoolError`] when the pool is unknown.
    fn pool_layout(&self, pool: PoolId) -> Result<Vec<SegmentLayout>, PoolError>;
}

/// Private pools whose live blocks can be saved and restored. No method of this trait waits.
pub trait Checkpoints: Send + Sync {
    /// Returns the pool's blocks. From now on, the pool's free memory is not released while the pool
    /// has users. Except under `compat:pytorch`, a block that a request of the default pool has taken
    /// (`use_on_oom`) counts as free, and a restore leaves it as it is.
    ///
    /// # Errors
    ///
    /// [`PoolError`] when the pool is unknown, has no users, or has blocks that wait for other streams.
    fn checkpoint(&self, pool: PoolId) -> Result<PoolCheckpoint, PoolError>;

    /// Restores the pool's blocks to those of the checkpoint. Frees all live blocks, and allocates the
    /// blocks that were live at the checkpoint again. Memory that the pool has taken since then stays
    /// in the pool, free.
    ///
    /// # Errors
    ///
    /// [`PoolError`] when the state cannot be restored, or when other streams use a live block of the
    /// pool. Nothing has changed then.
    fn restore(&self, checkpoint: &PoolCheckpoint) -> Result<Restored, PoolError>;
}

impl fmt::Debug for dyn PrivatePools + '_ {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PrivatePools")
    }
}

/// A private pool. Dropping it removes its user. If the pool then has no other user, such as an open scope
/// or a [`PoolHold`], its free memory is released to the driver. The memory that live blocks then keep
/// is released after they are freed, the next time the allocator releases memory.
#[must_use = "dropping it releases the pool"]
#[derive(Debug)]
pub struct MemoryPool<'a> {
    pools: &'a dyn PrivatePools,
    id: PoolId,
}

impl<'a> MemoryPool<'a> {
    /// Creates a pool.
    ///
    /// # Errors
    ///
    /// [`PoolError`] when the id is in use, because a pool with this id was created by
    /// [`PrivatePools::create_pool`].
    pub fn new(pools: &'a dyn PrivatePools, options: PoolOptions) -> Result<Self, PoolError> {
        let id = PoolId::next_user();
        pools.create_pool(id, options)?;
        Ok(Self { pools, id })
    }

    /// Returns the id of the pool.
    #[must_use]
    pub fn id(&self) -> PoolId {
        self.id
    }

    /// Routes the calling thread's requests to this pool until the guard is dropped.
    ///
    /// # Errors
    ///
    /// [`PoolError`] when the pool already has an open scope.
    pub fn enter(&self) -> Result<PoolScope<'a>, PoolError> {
        PoolScope::open(self.pools, self.id, ScopeFilter::this_thread())
    }
}

impl Drop for MemoryPool<'_> {
    fn drop(&mut self) {
        // If the driver fails, the memory stays cached. It is released later.
        let _ = self.pools.release_pool(self.id).and_then(|()| self.pools.empty_pool(self.id));
    }
}

/// An open scope. Dropping it closes the scope and removes the user that the scope added, so a failed
/// capture leaves nothing behind. It stays on the thread that opened it, whose newest scope of the pool a
/// drop closes.
#[must_use = "dropping it closes the scope"]
#[derive(Debug)]
pub struct PoolScope<'a> {
    pools: &'a dyn PrivatePools,
    pool: PoolId,
    /// Not sent to other threads.
    opened_here: PhantomData<*const ()>,
}

impl<'a> PoolScope<'a> {
    /// Opens a scope of a pool. Creates the pool if it is unknown.
    ///
    /// # Errors
    ///
    /// [`PoolError`] when the pool already has an open scope or has no users any more.
    pub fn open(
        pools: &'a dyn PrivatePools,
        pool: PoolId,
        filter: ScopeFilter,
    ) -> Result<Self, PoolError> {
        pools.open_scope(pool, filter)?;
        Ok(Self { pools, pool, opened_here: PhantomData })
    }

    /// Returns the pool of the scope.
    #[must_use]
    pub fn pool(&self) -> PoolId {
        self.pool
    }

    /// Closes the scope and keeps its user of the pool. For a graph that was captured in the scope.
    pub fn finish(self) -> PoolHold<'a> {
        ManuallyDrop::new(self).close()
    }

    /// Closes the scope. Returns the user that the scope added.
    fn close(&self) -> PoolHold<'a> {
        let hold = PoolHold { pools: self.pools, pool: self.pool };
        // An error needs no action: other code has closed the scope, or the driver failed after the
        // scope was closed.
        let _ = self.pools.close_scope(self.pool);
        hold
    }
}

impl Drop for PoolScope<'_> {
    fn drop(&mut self) {
        drop(self.close());
    }
}

/// A user of a pool, which keeps the pool in use until dropped.
#[must_use = "dropping it releases the pool"]
#[derive(Debug)]
pub struct PoolHold<'a> {
    pools: &'a dyn PrivatePools,
    pool: PoolId,
}

impl PoolHold<'_> {
    /// Returns the pool that is kept in use.
    #[must_use]
    pub fn pool(&self) -> PoolId {
        self.pool
    }
}

impl Drop for PoolHold<'_> {
    fn drop(&mut self) {
        // Fails only if other code has released the pool more often than it retained it.
        let _ = self.pools.release_pool(self.pool);
    }
}
