//! Private memory pools: memory that serves only requests to the pool.
//!
//! A pool serves the requests that a **scope** routes to it: those of a thread, of a stream, or of a
//! graph's capture. It exists while it has users. After that, its free memory is released to the driver
//! whenever memory is released. The guards in this module close scopes and release pools when dropped, so
//! also when a capture fails.
//!
//! Source: PyTorch's `MemPool`, `use_mem_pool` and the pools of CUDA graphs.

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use super::Allocation;
use crate::error::PoolError;
use crate::history::{BlockStateName, SegmentLayout};
use crate::ids::{PoolId, StreamId, ThreadNumber};

/// The source of a pool's segments, instead of the driver. Called with no lock held. It may use the
/// allocator, but not the pool that it serves.
pub trait SegmentAllocator: fmt::Debug + Send + Sync {
    /// Returns the address of `size_bytes` (a multiple of 512) for `stream`, aligned to 512; `None` when
    /// there is not enough memory.
    fn allocate(&self, size_bytes: u64, stream: StreamId) -> Option<u64>;
    /// Frees memory that [`allocate`](Self::allocate) returned.
    fn free(&self, address: u64, size_bytes: u64, stream: StreamId);
}

/// Options of a pool.
#[derive(Clone, Debug, Default)]
pub struct PoolOptions {
    /// The source of segments, instead of the driver. Such segments are never expandable.
    pub allocator: Option<Arc<dyn SegmentAllocator>>,
    /// Whether requests to the default pool may use free blocks of this pool before they fail. Not those
    /// of a pool in which a graph was captured or a checkpoint was taken: the graph or checkpoint uses
    /// them.
    pub use_on_oom: bool,
    /// Whether blocks are never split, except for requests at exact addresses.
    pub no_split: bool,
}

/// The requests that a scope routes to its pool.
///
/// While an open scope, with any filter, routes requests of a capture, the allocator queries no events of
/// the captured streams and releases no memory for them.
#[derive(Clone)]
pub enum ScopeFilter {
    /// The requests of one thread.
    Thread(ThreadNumber),
    /// The requests on one stream.
    Stream(StreamId),
    /// The requests on streams of a capture, by the driver's capture id.
    Capture(u64),
    /// The requests on streams that a function accepts. It is called at each request, on the requesting
    /// thread. It must not call the allocator and must not panic.
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
    /// The segments of the pool, without unmapped ranges. Segments of one reservation are adjacent in the
    /// list.
    pub segments: Vec<SegmentLayout>,
}

/// The result of [`Checkpoints::restore`].
#[derive(Debug, Default)]
pub struct Restored {
    /// Blocks that were live before and were freed. All their handles are stale now.
    pub freed: Vec<Freed>,
    /// Blocks that were live at the checkpoint and are live again, each with a new handle.
    pub live: Vec<Allocation>,
}

/// A block that was freed without its handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Freed {
    /// Its address.
    pub address: u64,
    /// Its requested size in bytes.
    pub size_bytes: u64,
}

/// Private pools. A request names a pool by [`Request::in_pool`](super::Request::in_pool), or an open
/// scope routes it there. No method of this trait waits unless its documentation states it.
pub trait PrivatePools: Send + Sync {
    /// Creates a pool with one user: the caller.
    ///
    /// # Errors
    ///
    /// [`PoolError`] when the id is in use or is that of the default pool.
    fn create_pool(&self, pool: PoolId, options: PoolOptions) -> Result<(), PoolError>;

    /// Changes the options of a pool that has users. Its `allocator` does not change. `no_split` may
    /// change only while the pool has served no request.
    ///
    /// # Errors
    ///
    /// [`PoolError`] when the pool is unknown, it has no users any more, or the strategy does not support
    /// the options, as `cudaMallocAsync` does not support `no_split`.
    fn set_pool_options(&self, pool: PoolId, options: &PoolOptions) -> Result<(), PoolError> {
        let _ = options;
        Err(PoolError::NotSupported { pool, what: "other options for an existing pool" })
    }

    /// Adds a user.
    ///
    /// # Errors
    ///
    /// [`PoolError`] when the pool is unknown or has no users any more.
    fn retain_pool(&self, pool: PoolId) -> Result<(), PoolError>;

    /// Removes a user. Without users the pool serves no requests, and its memory is released to the
    /// driver, as its blocks are freed, whenever memory is released. An open scope stays open until
    /// [`close_scope`](Self::close_scope) and still routes requests to the pool: close it first.
    ///
    /// # Errors
    ///
    /// [`PoolError`] when the pool is unknown or has no users any more.
    fn release_pool(&self, pool: PoolId) -> Result<(), PoolError>;

    /// Returns the number of users; `None` when the pool is unknown or all its memory is released.
    fn pool_users(&self, pool: PoolId) -> Option<u32>;

    /// Opens a scope that routes requests to a pool, before all scopes that are open already, and adds a
    /// user. Creates the pool if it is unknown.
    ///
    /// # Errors
    ///
    /// [`PoolError`] when the pool already has an open scope or has no users any more.
    fn open_scope(&self, pool: PoolId, filter: ScopeFilter) -> Result<(), PoolError>;

    /// Closes the scope. The user that the scope added stays until it is released. For scopes opened with
    /// [`open_scope`](Self::open_scope): a guard closes its own scope. A capture should end before its
    /// scope is closed.
    ///
    /// # Errors
    ///
    /// [`PoolError`] when the pool has no open scope; of the kind `Driver` when the driver fails after
    /// the scope was closed.
    fn close_scope(&self, pool: PoolId) -> Result<(), PoolError>;

    /// Releases the free memory of a pool without users to the driver. Waits for the events of its
    /// draining blocks. Does nothing for a pool that has users.
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

/// Private pools whose blocks can be restored to an earlier state. No method of this trait waits.
pub trait Checkpoints: Send + Sync {
    /// Returns the pool's blocks. From now on its free memory is kept while it has users.
    ///
    /// # Errors
    ///
    /// [`PoolError`] when the pool is unknown, has no users, or has blocks that wait for other streams.
    fn checkpoint(&self, pool: PoolId) -> Result<PoolCheckpoint, PoolError>;

    /// Restores the pool's blocks to those of the checkpoint: frees all live blocks and allocates those
    /// of the checkpoint again. Memory that the pool took since then stays in it, free.
    ///
    /// # Errors
    ///
    /// [`PoolError`] when the state cannot be restored, or other streams use a live block of the pool;
    /// nothing has changed then.
    fn restore(&self, checkpoint: &PoolCheckpoint) -> Result<Restored, PoolError>;
}

impl fmt::Debug for dyn PrivatePools + '_ {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PrivatePools")
    }
}

/// A private pool. Dropping it releases the pool and its free memory. Live blocks keep their memory until
/// they are freed and memory is released.
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
    /// [`PoolError`] when its id is in use, because a pool with this id was created by
    /// [`PrivatePools::create_pool`].
    pub fn new(pools: &'a dyn PrivatePools, options: PoolOptions) -> Result<Self, PoolError> {
        let id = PoolId::next_user();
        pools.create_pool(id, options)?;
        Ok(Self { pools, id })
    }

    /// Returns its id.
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
        // If the driver fails, the memory stays cached and is released later.
        let _ = self.pools.release_pool(self.id).and_then(|()| self.pools.empty_pool(self.id));
    }
}

/// An open scope. Dropping it closes the scope and removes the user that the scope added, so a failed
/// capture leaves nothing behind.
#[must_use = "dropping it closes the scope"]
#[derive(Debug)]
pub struct PoolScope<'a> {
    pools: &'a dyn PrivatePools,
    pool: PoolId,
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
        Ok(Self { pools, pool })
    }

    /// Returns its pool.
    #[must_use]
    pub fn pool(&self) -> PoolId {
        self.pool
    }

    /// Closes the scope and keeps the pool in use, for a graph that was captured in it.
    pub fn finish(self) -> PoolHold<'a> {
        ManuallyDrop::new(self).close()
    }

    /// Closes the scope. The result is the user that the scope added.
    fn close(&self) -> PoolHold<'a> {
        let hold = PoolHold { pools: self.pools, pool: self.pool };
        // An error leaves nothing to do: the scope was closed by other code, or the driver failed after
        // the scope was closed.
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
    /// Returns its pool.
    #[must_use]
    pub fn pool(&self) -> PoolId {
        self.pool
    }
}

impl Drop for PoolHold<'_> {
    fn drop(&mut self) {
        // Fails only if other code released the pool more often than it retained it.
        let _ = self.pools.release_pool(self.pool);
    }
}
