//! `backend:cudaMallocAsync`: the driver's own stream-ordered pools.
//!
//! The driver caches, splits and reuses; this strategy keeps what the driver does not: who holds
//! what, a limit of its own, uses by other streams, scopes and the rules of graph captures. A
//! request of `n` bytes is passed on as `n` bytes. Every request and every free is one driver call.
//!
//! `blocks` is the account of live blocks and `sums` what they add up to, `give_back` the ways of a free,
//! `capture` what is special inside a graph, `pools` private pools (one driver pool each), `pressure` what
//! is tried before a request fails, `capabilities` the trait's optional parts.
//!
//! Source of the rules: PyTorch's `cudaMallocAsync` backend; CUDA programming guide, "Stream Ordered
//! Memory Allocator".

mod blocks;
mod capabilities;
mod capture;
mod give_back;
mod pools;
mod pressure;
mod sums;

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

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
use crate::scopes::Scopes;
use crate::stats::OwnCounter;
use crate::tracepoints;

use blocks::{Block, Blocks};
use capture::Captures;
use pools::{Pools, destroy_if_empty};
use pressure::{Obtained, Refusal};

/// The stream-ordered allocator of one device.
#[derive(Debug)]
pub struct MallocAsyncAllocator {
    driver: Arc<dyn Driver>,
    device: DeviceInfo,
    owner: OwnerId,
    settings: RwLock<Settings>,
    /// Serves every request that no scope routes elsewhere.
    main: MainPool,
    blocks: Mutex<Blocks>,
    limit: Limit,
    pools: Mutex<Pools>,
    /// Each keeps its pool's name. Opened and closed under `pools`.
    scopes: Scopes<PoolId>,
    /// Shared while the driver is asked about a private pool, alone while one is destroyed: its number may
    /// be another pool's right after. Before `pools`.
    ending: RwLock<()>,
    captures: Captures,
    joins: Mutex<Joins>,
    /// Blocks that nobody has and that the driver refused to take back. They are offered again.
    leftovers: Mutex<Vec<u64>>,
    /// What the driver said about its pools the last time it answered.
    usage: Mutex<DriverPoolUsage>,
    notes: Notes,
    hooks: Hooks,
    pub(crate) history: Arc<History>,
}

/// The driver pool of the default pool.
#[derive(Clone, Copy, Debug)]
struct MainPool {
    id: DriverPoolId,
    /// Whether nobody else allocates from it.
    own: bool,
}

/// What frees of blocks with several streams need.
#[derive(Debug, Default)]
struct Joins {
    /// The stream that waits for all the others; made at the first such free.
    stream: Option<StreamId>,
    /// Events between two uses.
    spare: Vec<EventId>,
}

/// An event that is legal and worth a look. PyTorch prints a warning for each.
#[derive(Clone, Copy, Debug)]
enum Note {
    /// A free waits for the end of a capture, because the capture did not allocate the block.
    DeferredFree,
    /// A block of a captured graph was freed after the capture had ended: the graph can be launched again
    /// only when its memory was freed before.
    FreeAfterCapture,
    /// A block's own stream was recorded, which does nothing.
    OwnStreamRecorded,
    /// A request succeeded only after the device was waited for and its pool trimmed.
    TrimThatHelped,
}

/// How often each event happened since the start or since the last
/// [`reset_accumulated`](crate::allocator::Counters::reset_accumulated).
#[derive(Debug, Default)]
struct Notes([AtomicI64; 4]);

impl Notes {
    /// The names of the counters, in the order of [`Note`].
    const NAMES: [&str; 4] = [
        "malloc_async.deferred_frees",
        "malloc_async.frees_after_capture",
        "malloc_async.own_stream_recorded",
        "malloc_async.trims_that_helped",
    ];

    fn count(&self, note: Note) {
        self.0[note as usize].fetch_add(1, Ordering::Relaxed);
    }

    fn counters(&self) -> Vec<OwnCounter> {
        let counts = self.0.iter().map(|count| count.load(Ordering::Relaxed));
        Self::NAMES.iter().zip(counts).map(|(name, count)| OwnCounter { name, count }).collect()
    }

    fn reset(&self) {
        self.0.iter().for_each(|count| count.store(0, Ordering::Relaxed));
    }
}

/// Where a request goes.
#[derive(Clone, Copy, Debug)]
struct Route {
    pool: PoolId,
    driver_pool: DriverPoolId,
    /// The capture that the request's stream belongs to, as far as anybody looked.
    capture: Option<u64>,
}

impl MallocAsyncAllocator {
    /// An allocator over the device's default pool, or over a pool of its own when the settings say
    /// so. The pool keeps all memory it has got until somebody trims it.
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
                // The first error is the one to tell.
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
            captures: Captures::default(),
            joins: Mutex::default(),
            leftovers: Mutex::default(),
            usage: Mutex::default(),
            notes: Notes::default(),
            hooks: Hooks::new(),
            history: Arc::default(),
            device,
            driver,
        };
        let fraction = settings.per_process_memory_fraction;
        allocator.limit.set_fraction(fraction, allocator.device.total_bytes);
        Ok(allocator)
    }

    #[inline]
    fn memory_pools(&self) -> &dyn MemoryPools {
        self.driver.memory_pools().expect("asked for when the allocator was built")
    }

    /// One driver call and one small lock, unless a scope, a deferred free, a named pool or a limit asks
    /// for more.
    fn serve(&self, pool: Option<PoolId>, request: Request) -> AllocResult {
        let _asks = self.history.of_request();
        let Request { bytes, stream, .. } = request;
        request.check_size()?;
        if pool.is_some() || self.captures.ask_for_care() || self.limit.get().is_some() {
            return self.serve_with_care(pool, request);
        }
        match self.memory_pools().allocate_async(self.main.id, bytes, stream) {
            Ok(address) => {
                let obtained = Obtained { address, reserved_bytes: 0, kept: None };
                Ok(self.hand_out(&self.main_route(), request, obtained))
            }
            Err(error) => self.serve_refused(&self.main_route(), request, Refusal::Driver(error)),
        }
    }

    #[cold]
    fn serve_with_care(&self, pool: Option<PoolId>, request: Request) -> AllocResult {
        let route = if pool.is_none() && !self.captures.ask_for_care() {
            self.main_route()
        } else {
            self.route_with_care(pool, request.stream)?
        };
        match self.obtain(&route, request) {
            Ok(obtained) => Ok(self.hand_out(&route, request, obtained)),
            Err(refusal) => self.serve_refused(&route, request, refusal),
        }
    }

    #[cold]
    fn serve_refused(&self, route: &Route, request: Request, refusal: Refusal) -> AllocResult {
        let obtained = self.climb(route, request, refusal)?;
        Ok(self.hand_out(route, request, obtained))
    }

    /// Where requests go that nothing routes elsewhere.
    #[inline]
    fn main_route(&self) -> Route {
        Route { pool: PoolId::DEFAULT, driver_pool: self.main.id, capture: None }
    }

    /// Enters what the driver gave, while its pool is kept.
    #[inline]
    fn hand_out(&self, route: &Route, request: Request, obtained: Obtained<'_>) -> Allocation {
        let Obtained { address, reserved_bytes, kept: _kept } = obtained;
        let Request { bytes, stream, .. } = request;
        let block = Block::new(bytes, stream, route);
        let serial = {
            let mut blocks = self.blocks.lock();
            blocks.reserved_bytes -= reserved_bytes;
            blocks.enter(address, block)
        };
        self.record(Action::Alloc, address, bytes, stream, route.pool);
        Allocation::new(address, bytes, self.owner, Token::numbered(serial))
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

/// Memory stays in the pool until it is trimmed, and every reuse is welcome.
fn keep_everything(pools: &dyn MemoryPools, pool: DriverPoolId) -> Result<(), DriverError> {
    pools.keep_memory(pool, true)?;
    pools.allow_reuse(pool).inspect_err(|_| {
        // The first error is the one to tell.
        let _ = pools.keep_memory(pool, false);
    })
}

impl Drop for MallocAsyncAllocator {
    /// Frees every block, also live ones, in the order of its stream, and trims the pools and the
    /// idle memory of graphs. The release threshold of the device's default pool becomes what it was,
    /// when the last allocator over it goes.
    /// Blocks that a capture keeps from being freed stay with the driver.
    fn drop(&mut self) {
        // They stand in the way of waiting for the device; those of captures do so with reason.
        if !self.scopes.any_capture() {
            self.scopes.close_all();
        }
        // A driver that fails now keeps the memory; there is nobody to tell.
        let _ = self.settle_deferred();
        let (all, is_unused) = {
            let mut blocks = self.blocks.lock();
            (blocks.take_all(), blocks.is_unused())
        };
        // One that was never used has nothing to wait for: others may capture, and it knows no scope of them.
        let mut captured = is_unused && self.joins.lock().stream.is_none();
        for block in &all {
            captured |= matches!(self.capture_of(block.stream), Ok(Some(_)));
            let _ = self.free_with_care(block);
        }
        if !captured {
            // A capture under way would break.
            let _ = synchronize_outside_captures(&*self.driver);
        }
        let joins = std::mem::take(&mut *self.joins.lock());
        joins.spare.into_iter().for_each(|event| drop(self.driver.destroy_event(event)));
        if let Some(stream) = joins.stream {
            let _ = self.driver.destroy_stream(stream);
        }
        let pools = self.memory_pools();
        // Those that a capture still has blocks of stay with the driver.
        for pool in self.pools.lock().driver_pools() {
            destroy_if_empty(pools, pool);
        }
        let _ = pools.trim_graphs();
        if self.main.own {
            destroy_if_empty(pools, self.main.id);
        } else {
            let _ = pools.keep_memory(self.main.id, false);
            // Where other allocators still want all of it, this is all there can be.
            let kept = pools.release_threshold(self.main.id);
            let _ = kept.and_then(|kept_bytes| pools.trim(self.main.id, kept_bytes));
        }
    }
}
