//! `backend:cudaMallocAsync`: the driver's own stream-ordered pools.
//!
//! The driver caches, splits and reuses memory. This strategy adds what the driver does not have: a table
//! of live blocks, a limit, uses by other streams, scopes and the rules of graph captures. A request of
//! `n` bytes is passed on as `n` bytes. Without scopes and uses by other streams, every request and every
//! free is one driver call.
//!
//! `blocks` is the table of live blocks, `counters` their counters, `frees` the paths of a free.
//! `capture` handles graphs, `pools` the private pools (one driver pool each). `pressure` handles
//! requests that fail; `capabilities` implements the optional traits.
//!
//! Before memory is released, only the request's stream and those on which blocks were freed are
//! synchronized, because synchronizing the device would break captures on all threads. The device is
//! synchronized only if one of these streams no longer exists or is a per-thread default stream, and no
//! scope is open.
//!
//! Source of the rules: PyTorch's `cudaMallocAsync` backend; CUDA programming guide, "Stream Ordered
//! Memory Allocator".

mod blocks;
mod capabilities;
mod capture;
mod counters;
mod frees;
mod pools;
mod pressure;

use std::sync::Arc;

use parking_lot::{Mutex, RwLock};

use crate::allocator::{Allocation, Hooks, Request, Token};
use crate::config::Settings;
use crate::driver::{
    DeviceInfo, Driver, DriverPoolId, DriverPoolUsage, MemoryPools, synchronize_outside_captures,
};
use crate::error::{AllocResult, DriverError, DriverErrorKind};
use crate::history::{Action, Event, History};
use crate::ids::{EventId, OwnerId, PoolId, StreamId};
use crate::limit::Limit;
use crate::live_blocks::Live;
use crate::scopes::Scopes;
use crate::tracepoints;

use blocks::{Block, Blocks};
use capture::Captures;
use pools::{Pools, destroy_if_empty};
use pressure::Obtained;

/// The stream-ordered allocator of one device.
#[derive(Debug)]
pub struct MallocAsyncAllocator {
    driver: Arc<dyn Driver>,
    device: DeviceInfo,
    owner: OwnerId,
    settings: RwLock<Settings>,
    /// Serves every request that is not for a private pool.
    main: MainPool,
    blocks: Mutex<Blocks>,
    /// Each block is charged from its request until the driver has freed it.
    limit: Limit,
    pools: Mutex<Pools>,
    /// Each open scope stores the id of its pool. Scopes are opened and closed under `pools`.
    scopes: Scopes<PoolId>,
    /// Locked exclusively while private pools are destroyed, because the driver may give the pool's id to
    /// a new pool at once. Locked shared during driver calls about a private pool that are made without
    /// holding `pools`. Locked before `pools`.
    ending: RwLock<()>,
    /// Locked shared from the driver call that allocates or frees an address until `blocks` agrees with the
    /// driver. Locked exclusively while a block of a capture is freed by its address: if its graph was
    /// destroyed, the driver may give the address to another request at any time. Locked after `ending`,
    /// before the others.
    addresses: RwLock<()>,
    captures: Captures,
    joins: Mutex<Joins>,
    /// The last usage of the main pool and of graphs that the driver reported.
    usage: Mutex<DriverPoolUsage>,
    hooks: Hooks,
    pub(crate) history: Arc<History>,
}

/// The driver pool of the default pool.
#[derive(Clone, Copy, Debug)]
struct MainPool {
    id: DriverPoolId,
    /// True if only this allocator allocates from it.
    own: bool,
}

/// Resources for frees of blocks that several streams use.
#[derive(Debug, Default)]
struct Joins {
    /// The internal joining stream, which waits for all the others; created at the first such free.
    stream: Option<StreamId>,
    /// Events that are not in use.
    spare: Vec<EventId>,
}

/// A legal but unusual case, which is counted. PyTorch prints a warning for each kind.
#[derive(Clone, Copy, Debug)]
enum Note {
    /// A free was deferred until the end of a capture.
    DeferredFree,
    /// A block that was allocated in a capture was freed after the capture had ended. CUDA does not
    /// launch the graph again until all memory that the graph allocated is freed.
    FreeAfterCapture,
    /// The caller recorded a use by the block's own stream, which has no effect.
    OwnStreamRecorded,
    /// A request succeeded only after waiting for streams and trimming the pools.
    TrimThatHelped,
}

impl Note {
    /// The names of the counters, in the order of the variants.
    const NAMES: [&str; 4] = [
        "malloc_async.deferred_frees",
        "malloc_async.frees_after_capture",
        "malloc_async.own_stream_recorded",
        "malloc_async.trims_that_helped",
    ];
}

/// The pool that serves a request.
#[derive(Clone, Copy, Debug)]
struct Route {
    pool: PoolId,
    driver_pool: DriverPoolId,
    /// The capture that the request's stream is in, if any. `None` also if the status was not queried.
    capture: Option<u64>,
}

impl MallocAsyncAllocator {
    /// Creates an allocator over the device's default pool, or over its own pool if `settings` request
    /// one. The pool keeps all memory until it is trimmed.
    ///
    /// # Errors
    ///
    /// [`DriverError`] when the device has no stream-ordered pools, or the driver fails.
    pub fn new(driver: Arc<dyn Driver>, settings: &Settings) -> Result<Self, DriverError> {
        let (device, settings) = (driver.info(), settings.clone().in_range());
        let pools = driver.memory_pools().ok_or_else(|| {
            let message = format!("device {} has no stream-ordered memory pools", device.device);
            DriverError::new(DriverErrorKind::NotSupported, "memory_pools", 0, message)
        })?;
        let own = settings.malloc_async_own_pool;
        let id = if own { pools.create_pool()? } else { pools.default_pool()? };
        let main = MainPool { id, own };
        keep_everything(pools, id).inspect_err(|_| {
            if own {
                // Ignored, because the error that led here is the one to report.
                let _ = pools.destroy_pool(id);
            }
        })?;
        let owner = OwnerId::next();
        let allocator = Self {
            owner,
            settings: RwLock::new(settings.clone()),
            main,
            blocks: Mutex::default(),
            limit: Limit::none(),
            pools: Mutex::default(),
            scopes: Scopes::new(Arc::clone(&driver)),
            ending: RwLock::default(),
            addresses: RwLock::default(),
            captures: Captures::default(),
            joins: Mutex::default(),
            usage: Mutex::default(),
            hooks: Hooks::new(),
            history: Arc::default(),
            device,
            driver,
        };
        allocator.limit_to_fraction(settings.per_process_memory_fraction);
        Ok(allocator)
    }

    fn limit_to_fraction(&self, fraction: f64) {
        let rounding = self.settings.read().compat.rounding();
        self.limit.set_fraction(fraction, self.device.total_bytes, rounding);
    }

    #[inline]
    fn memory_pools(&self) -> &dyn MemoryPools {
        self.driver.memory_pools().expect("checked when the allocator was built")
    }

    /// Serves a request, normally with one driver call and one lock. If the request names a pool, a scope
    /// is open or a free is deferred, its pool is found by `route_checked`.
    fn serve(&self, pool: Option<PoolId>, request: Request) -> AllocResult {
        let _context = self.history.of_request();
        request.check_size()?;
        let route = if pool.is_none() && !self.scopes.any() && self.captures.deferred() == 0 {
            self.main_route()
        } else {
            self.route_checked(pool, request.stream)?
        };
        let under_pressure = |refusal| self.allocate_under_pressure(&route, request, refusal);
        let obtained = self.obtain(&route, request).or_else(under_pressure)?;
        Ok(self.enter(&route, request, obtained))
    }

    /// Returns the route to the main pool.
    #[inline]
    fn main_route(&self) -> Route {
        Route { pool: PoolId::DEFAULT, driver_pool: self.main.id, capture: None }
    }

    /// Adds the block that the driver allocated to the table. `obtained` holds the guards for the
    /// time until then.
    #[inline]
    fn enter(&self, route: &Route, request: Request, obtained: Obtained<'_>) -> Allocation {
        let Obtained { address, charge, _pool_guard, _address_guard } = obtained;
        let Request { bytes, stream, .. } = request;
        let block = Block::new(bytes, stream, route);
        charge.keep();
        let (serial, replaced) = self.blocks.lock().enter(address, block);
        self.end_charge(replaced.as_ref());
        self.record(Action::Alloc, address, bytes, stream, route.pool);
        Allocation::new(address, bytes, self.owner, Token::numbered(serial))
    }

    /// Ends the charge of a block that has left the table.
    #[inline]
    fn end_charge(&self, block: Option<&Live<Block>>) {
        drop(block.map(|block| self.limit.kept(block.bytes)));
    }

    #[inline]
    fn record(
        &self,
        action: Action,
        address: u64,
        size_bytes: u64,
        stream: StreamId,
        pool: PoolId,
    ) {
        tracepoints::of(action, address, self.device.device, size_bytes, stream);
        self.history.record(stream.0, || Event { action, address, size_bytes, stream, pool });
    }
}

/// Makes a pool keep its memory until it is trimmed, and allows every kind of reuse.
fn keep_everything(pools: &dyn MemoryPools, pool: DriverPoolId) -> Result<(), DriverError> {
    pools.keep_memory(pool, true)?;
    pools.allow_reuse(pool).inspect_err(|_| {
        // Ignored, because the error that led here is the one to report.
        let _ = pools.keep_memory(pool, false);
    })
}

impl Drop for MallocAsyncAllocator {
    /// Frees every block in stream order, even live ones, and trims the pools and the unused memory of
    /// graphs. Restores the release threshold of the device's default pool if no other allocator uses
    /// that pool. Blocks that cannot be freed because of a capture stay allocated in the driver.
    fn drop(&mut self) {
        // The synchronization below does not run while a scope is open. During a capture all scopes stay
        // open.
        if !self.scopes.any_capture() {
            self.scopes.close_all();
        }
        // Errors are ignored here, because a drop cannot report them. Memory that the driver fails to
        // free leaks.
        let _ = self.free_deferred();
        let (all, is_unused) = {
            let mut blocks = self.blocks.lock();
            (blocks.take_all(), blocks.is_unused())
        };
        // True also for an unused allocator: it has no work to wait for, and synchronizing could break a
        // capture of another allocator, for which this one has no scope.
        let mut captured = is_unused && self.joins.lock().stream.is_none();
        for block in &all {
            captured |= matches!(self.capture_of(block.stream), Ok(Some(_)));
            let _ = self.free_checked(block);
        }
        if !captured {
            // Skipped if the allocator is unused, or if a block's stream is being captured, because
            // synchronizing would break the capture.
            let _ = synchronize_outside_captures(&*self.driver);
        }
        let joins = std::mem::take(&mut *self.joins.lock());
        joins.spare.into_iter().for_each(|event| drop(self.driver.destroy_event(event)));
        if let Some(stream) = joins.stream {
            let _ = self.driver.destroy_stream(stream);
        }
        let pools = self.memory_pools();
        // Pools that still have blocks, such as those of a capture, are not destroyed.
        for pool in self.pools.lock().driver_pools() {
            destroy_if_empty(pools, pool);
        }
        let _ = pools.trim_graphs();
        if self.main.own {
            destroy_if_empty(pools, self.main.id);
        } else {
            let _ = pools.keep_memory(self.main.id, false);
            // Trimmed to the release threshold only, because another allocator may still make this pool
            // keep memory.
            let kept = pools.release_threshold(self.main.id);
            let _ = kept.and_then(|kept_bytes| pools.trim(self.main.id, kept_bytes));
        }
    }
}
