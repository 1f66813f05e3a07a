//! Private pools: memory that only those share who ask for it.
//!
//! A pool serves the requests that a **scope** routes to it: those of a thread, of a stream, or of a
//! graph's capture. It lives as long as somebody uses it; after that its idle memory goes back to
//! the driver whenever memory is released. The guards here close and release by themselves, also
//! when a capture fails half-way.
//!
//! Source: PyTorch's `MemPool`, `use_mem_pool` and the pools of CUDA graphs.

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use super::Allocation;
use crate::error::PoolError;
use crate::history::{BlockStateName, SegmentLayout};
use crate::ids::{PoolId, StreamId, ThreadNumber};

/// Where a pool takes segments from instead of the driver. Called with no lock held, so it may use the
/// allocator, but not from the pool that it serves.
pub trait SegmentAllocator: fmt::Debug + Send + Sync {
    /// The address of `size_bytes` (a multiple of 512) for `stream`, aligned to 512; `None` when
    /// there is not as much.
    fn allocate(&self, size_bytes: u64, stream: StreamId) -> Option<u64>;
    /// Takes back what [`allocate`](Self::allocate) returned.
    fn free(&self, address: u64, size_bytes: u64, stream: StreamId);
}

/// How a pool behaves.
#[derive(Clone, Debug, Default)]
pub struct PoolOptions {
    /// Where segments come from instead of the driver. They are never expandable.
    pub allocator: Option<Arc<dyn SegmentAllocator>>,
    /// Whether requests to the default pool may take idle blocks from this one before they fail.
    /// Not from a pool in which a graph was captured or a checkpoint taken: those blocks are in use.
    pub use_on_oom: bool,
    /// Whether blocks are always handed out whole, except at exact addresses.
    pub no_split: bool,
}

/// Which requests a scope routes to its pool.
///
/// While one is open that routes requests of a capture, whatever its filter, no event is queried on behalf
/// of the captured streams, and nothing is released for them.
#[derive(Clone)]
pub enum ScopeFilter {
    /// Those of one thread.
    Thread(ThreadNumber),
    /// Those on one stream.
    Stream(StreamId),
    /// Those on streams that belong to a capture, by the driver's id.
    Capture(u64),
    /// Those on streams that a function accepts. It is asked on the requesting thread at each request, and
    /// must neither call the allocator nor panic.
    Where(Arc<dyn Fn(StreamId) -> bool + Send + Sync>),
}

impl ScopeFilter {
    /// The calling thread's requests.
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

/// A pool's blocks at one moment, to go back to. Made by [`Checkpoints::checkpoint`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolCheckpoint {
    /// The pool.
    pub pool: PoolId,
    /// Its segments, with unmapped ranges left out: those of one reservation follow each other.
    pub segments: Vec<SegmentLayout>,
}

/// What [`Checkpoints::restore`] did.
#[derive(Debug, Default)]
pub struct Restored {
    /// Blocks that were live before; all handles to them are stale now.
    pub freed: Vec<Freed>,
    /// The blocks that were live at the checkpoint, live again, each with a new handle.
    pub live: Vec<Allocation>,
}

/// A block that was freed without its handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Freed {
    /// Where it started.
    pub address: u64,
    /// How many bytes were asked for.
    pub size_bytes: u64,
}

/// Control over private pools. A request names one by [`Request::in_pool`](super::Request::in_pool), or
/// is routed there by an open scope. Nothing here waits unless it says so.
pub trait PrivatePools: Send + Sync {
    /// Makes a pool with one user: the caller.
    ///
    /// # Errors
    ///
    /// [`PoolError`] when the id is taken or that of the default pool.
    fn create_pool(&self, pool: PoolId, options: PoolOptions) -> Result<(), PoolError>;

    /// Changes how a pool with users behaves. Its `allocator` stays; `no_split` may change only while the
    /// pool has served no request.
    ///
    /// # Errors
    ///
    /// [`PoolError`] when the pool is unknown, its last user has gone, or the strategy does not support
    /// the options, as `cudaMallocAsync` does not support `no_split`.
    fn set_pool_options(&self, pool: PoolId, options: &PoolOptions) -> Result<(), PoolError> {
        let _ = options;
        Err(PoolError::NotSupported { pool, what: "other options for a pool that is there" })
    }

    /// Adds a user.
    ///
    /// # Errors
    ///
    /// [`PoolError`] when the pool is unknown or its last user has gone.
    fn retain_pool(&self, pool: PoolId) -> Result<(), PoolError>;

    /// Removes a user. With the last one the pool serves nobody any more, and its memory goes back
    /// to the driver, as its blocks are freed, whenever memory is released. An open scope stays open until
    /// [`close_scope`](Self::close_scope) and still routes requests to the pool: close it first.
    ///
    /// # Errors
    ///
    /// [`PoolError`] when the pool is unknown or its last user has gone.
    fn release_pool(&self, pool: PoolId) -> Result<(), PoolError>;

    /// How many users a pool has; `None` when it is unknown or its memory has gone.
    fn pool_users(&self, pool: PoolId) -> Option<u32>;

    /// Routes requests to a pool, before all scopes that are open already, and adds a user. A pool
    /// that is unknown is made.
    ///
    /// # Errors
    ///
    /// [`PoolError`] when the pool has an open scope already, or its last user has gone.
    fn open_scope(&self, pool: PoolId, filter: ScopeFilter) -> Result<(), PoolError>;

    /// Ends the routing. The user that the scope added stays until it is released. For scopes that were
    /// opened by hand: a guard closes its own. A capture should end before its scope is closed.
    ///
    /// # Errors
    ///
    /// [`PoolError`] when the pool has no open scope; of the kind `Driver` when the driver fails after the
    /// scope was closed.
    fn close_scope(&self, pool: PoolId) -> Result<(), PoolError>;

    /// Gives the idle memory of a pool without users back to the driver. Waits for the events that
    /// its blocks wait for. Does nothing for a pool that is in use.
    ///
    /// # Errors
    ///
    /// [`PoolError`] when the pool is unknown or the driver fails.
    fn empty_pool(&self, pool: PoolId) -> Result<(), PoolError>;

    /// Addresses of the pool's live blocks, ascending.
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

    /// Every block of every segment of the pool, in address order.
    ///
    /// # Errors
    ///
    /// [`PoolError`] when the pool is unknown.
    fn pool_layout(&self, pool: PoolId) -> Result<Vec<SegmentLayout>, PoolError>;
}

/// Private pools that can go back to an earlier state. Nothing here waits.
pub trait Checkpoints: Send + Sync {
    /// The pool's blocks now. From here on its idle memory stays while it has users.
    ///
    /// # Errors
    ///
    /// [`PoolError`] when the pool is unknown, has no users, or has blocks that wait for other
    /// streams.
    fn checkpoint(&self, pool: PoolId) -> Result<PoolCheckpoint, PoolError>;

    /// Makes the pool's blocks what they were at the checkpoint: all live blocks are freed, and the
    /// checkpoint's are handed out again. Memory that the pool took since stays, free.
    ///
    /// # Errors
    ///
    /// [`PoolError`] when the pool cannot go back, or other streams use a live block of it; nothing has
    /// changed then.
    fn restore(&self, checkpoint: &PoolCheckpoint) -> Result<Restored, PoolError>;
}

impl fmt::Debug for dyn PrivatePools + '_ {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PrivatePools")
    }
}

/// A pool of one's own. Dropping it releases the pool and gives back what is idle in it; blocks that
/// are still live keep their memory until they are freed and memory is released.
#[must_use = "dropping it releases the pool"]
#[derive(Debug)]
pub struct MemoryPool<'a> {
    pools: &'a dyn PrivatePools,
    id: PoolId,
}

impl<'a> MemoryPool<'a> {
    /// A new pool.
    ///
    /// # Errors
    ///
    /// [`PoolError`] when somebody made a pool with this very id by hand.
    pub fn new(pools: &'a dyn PrivatePools, options: PoolOptions) -> Result<Self, PoolError> {
        let id = PoolId::next_user();
        pools.create_pool(id, options)?;
        Ok(Self { pools, id })
    }

    /// Its id.
    #[must_use]
    pub fn id(&self) -> PoolId {
        self.id
    }

    /// Routes the calling thread's requests here until the guard goes.
    ///
    /// # Errors
    ///
    /// [`PoolError`] when a scope of this pool is open already.
    pub fn enter(&self) -> Result<PoolScope<'a>, PoolError> {
        PoolScope::open(self.pools, self.id, ScopeFilter::this_thread())
    }
}

impl Drop for MemoryPool<'_> {
    fn drop(&mut self) {
        // A driver that fails now keeps the memory cached; the next release offers it again.
        let _ = self.pools.release_pool(self.id).and_then(|()| self.pools.empty_pool(self.id));
    }
}

/// A scope that is open while this lives. Dropping it also removes the user that the scope added, so
/// a capture that fails leaves nothing behind.
#[must_use = "dropping it closes the scope"]
#[derive(Debug)]
pub struct PoolScope<'a> {
    pools: &'a dyn PrivatePools,
    pool: PoolId,
}

impl<'a> PoolScope<'a> {
    /// Opens a scope of a pool. A pool that is unknown is made.
    ///
    /// # Errors
    ///
    /// [`PoolError`] when the pool has an open scope already, or its last user has gone.
    pub fn open(
        pools: &'a dyn PrivatePools,
        pool: PoolId,
        filter: ScopeFilter,
    ) -> Result<Self, PoolError> {
        pools.open_scope(pool, filter)?;
        Ok(Self { pools, pool })
    }

    /// Its pool.
    #[must_use]
    pub fn pool(&self) -> PoolId {
        self.pool
    }

    /// Closes the scope and keeps the pool in use, for a graph that was captured in it.
    pub fn finish(self) -> PoolHold<'a> {
        ManuallyDrop::new(self).close()
    }

    /// Closes the scope, whose user the result is.
    fn close(&self) -> PoolHold<'a> {
        let hold = PoolHold { pools: self.pools, pool: self.pool };
        // It fails only if somebody closed the scope by hand, or behind the close: then it is closed.
        let _ = self.pools.close_scope(self.pool);
        hold
    }
}

impl Drop for PoolScope<'_> {
    fn drop(&mut self) {
        drop(self.close());
    }
}

/// Keeps a pool in use while it lives.
#[must_use = "dropping it releases the pool"]
#[derive(Debug)]
pub struct PoolHold<'a> {
    pools: &'a dyn PrivatePools,
    pool: PoolId,
}

impl PoolHold<'_> {
    /// Its pool.
    #[must_use]
    pub fn pool(&self) -> PoolId {
        self.pool
    }
}

impl Drop for PoolHold<'_> {
    fn drop(&mut self) {
        // It fails only if somebody released more often than he retained.
        let _ = self.pools.release_pool(self.pool);
    }
}
