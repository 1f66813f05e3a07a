//! `backend:pluggable`: a user's own functions, with bookkeeping around them.
//!
//! `allocate` and `free` call the user's functions directly ([`Callbacks`]) with the requested size. Only
//! private pools cache blocks. This strategy adds exact counters, history, a limit, waiting for other
//! streams, private pools, hooks and a full out-of-memory report. It returns errors for wrong handles and
//! for invalid results of the functions.
//!
//! Use it for an allocator of your own, in the form of closures or of a shared library that was written
//! for PyTorch.
//!
//! For a block of a per-thread default stream, the user's `free` is called after the work of the thread
//! that frees the block, as if another stream used the block. Any thread may make that call. If the
//! stream is being captured, the user's `free` is called after the end of the capture, so a graph does
//! not reuse such a block.
//!
//! No lock of the allocator is held while a user's function runs. Its panics reach the caller. A request
//! that panicked has changed nothing; a block whose free panicked is removed. Dropping the allocator
//! frees every block, even live ones.
//!
//! `table` holds the blocks and counters, `waiting` the blocks that other streams use, `pools` the
//! private pools; `pressure` handles failures. Lock order: pools, a shard of the table, counters.

mod capabilities;
pub mod plugin;
mod pools;
mod pressure;
mod table;
mod waiting;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use parking_lot::Mutex;

use self::plugin::Callbacks;
use crate::allocator::{Allocation, Hooks, Request, SegmentAllocator, Token};
use crate::config::Settings;
use crate::driver::{DeviceInfo, Driver};
use crate::error::{AddressFault, AllocError, AllocResult, HandleError};
use crate::history::{Action, Event, History};
use crate::ids::{DeviceId, OwnerId, PoolId, StreamId};
use crate::limit::Limit;
use crate::live_blocks::{BlockName, Live};
use crate::size::{FractionRounding, align_up};
use crate::tracepoints;

use pools::Pools;
use table::{Block, State, Table};
use waiting::Waiting;

/// The minimum alignment of a block, for the widest loads of kernels.
const ALIGNMENT_BYTES: u64 = 16;
/// The rounding of requests to a pool's own segment allocator.
const SEGMENT_BYTES: u64 = 512;

/// An allocator made of a user's functions, for one device.
#[derive(Debug)]
pub struct PluggableAllocator {
    name: String,
    driver: Arc<dyn Driver>,
    device: DeviceInfo,
    owner: OwnerId,
    callbacks: Callbacks,
    /// The settings with which the allocator was built. The library cannot be exchanged later.
    built: Settings,
    table: Table,
    limit: Limit,
    waiting: Waiting,
    pools: Pools,
    /// The free-memory callbacks and out-of-memory observers.
    hooks: Hooks,
    pub(crate) history: Arc<History>,
    peers: Mutex<Vec<DeviceId>>,
}

/// The reason why a request got no memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refusal {
    /// The limit forbade the call of the user's function.
    Limit,
    /// The function returned no address.
    Null,
}

impl PluggableAllocator {
    /// Creates an allocator that holds no memory. Calls the user's `init` with `device_count`, and the
    /// user's function for the memory fraction if the settings limit the memory.
    #[must_use]
    pub fn new(
        name: &str,
        driver: Arc<dyn Driver>,
        callbacks: Callbacks,
        settings: &Settings,
        device_count: u32,
    ) -> Self {
        let (device, owner) = (driver.info(), OwnerId::next());
        if let Some(init) = &callbacks.init {
            init(device_count.max(device.device.0 + 1));
        }
        let pools = Pools::new(Arc::clone(&driver));
        let own = Self {
            name: name.to_owned(),
            driver,
            device,
            owner,
            callbacks,
            built: settings.clone(),
            table: Table::default(),
            limit: Limit::none(),
            waiting: Waiting::default(),
            pools,
            hooks: Hooks::new(),
            history: Arc::default(),
            peers: Mutex::default(),
        };
        if settings.per_process_memory_fraction < 1.0 {
            own.limit_to_fraction(settings.per_process_memory_fraction);
        }
        own
    }

    fn limit_to_fraction(&self, fraction: f64) {
        self.limit.set_fraction(fraction, self.device.total_bytes, FractionRounding::Nearest);
        if let Some(set_fraction) = &self.callbacks.memory_fraction {
            set_fraction(fraction, self.device.device);
        }
    }

    fn record(&self, action: Action, address: u64, size_bytes: u64, block: (StreamId, PoolId)) {
        let (stream, pool) = block;
        tracepoints::of(action, address, self.device.device, size_bytes, stream);
        self.history.record(stream.0, || Event { action, address, size_bytes, stream, pool });
    }

    /// Calls trackers for memory that a user's function has returned or is about to free. The caller
    /// holds no lock.
    fn announce(&self, action: Action, address: u64, size_bytes: u64, block: (StreamId, PoolId)) {
        let (stream, pool) = block;
        self.history.announce(Event { action, address, size_bytes, stream, pool });
    }

    fn serve(&self, pool: PoolId, request: Request) -> AllocResult {
        let _context = self.history.of_request();
        request.check_size()?;
        if pool != PoolId::DEFAULT && self.may_be_captured(request.stream) {
            // The stream is being captured. The graph uses the block again at each launch, so the pool
            // must keep it.
            self.pools.lock().in_use(pool)?.fixed = true;
        }
        // Events are not queried while a capture is active, because that would break the capture. The
        // waiting blocks then wait longer.
        if self.waiting.any() && self.may_wait_for(request.stream) {
            // A failure here must not fail the request; `process_events` reports it.
            let _ = self.poll();
        }
        match self.try_serve(pool, request)? {
            Ok(found) => Ok(found),
            Err(_) => self.serve_under_pressure(pool, request),
        }
    }

    /// Tries once: an idle block of a private pool, then the user's function or the pool's own allocator.
    fn try_serve(
        &self,
        pool: PoolId,
        request: Request,
    ) -> AllocResult<Result<Allocation, Refusal>> {
        let mut source = None;
        if pool != PoolId::DEFAULT {
            let mut known = self.pools.lock();
            source = known.in_use(pool)?.options.allocator.clone();
            if let Some(found) = self.revive(&mut known, pool, request) {
                return Ok(Ok(found));
            }
        }
        self.take(pool, request, source)
    }

    /// Allocates new memory from `source`, or else from the user's function. Undoes everything if that
    /// panics or returns an invalid address.
    fn take(
        &self,
        pool: PoolId,
        request: Request,
        source: Option<Arc<dyn SegmentAllocator>>,
    ) -> AllocResult<Result<Allocation, Refusal>> {
        let Request { bytes, stream, .. } = request;
        let size_bytes = if source.is_some() { align_up(bytes, SEGMENT_BYTES) } else { bytes };
        let Some(charge) = self.limit.charge(size_bytes) else {
            return Ok(Err(Refusal::Limit));
        };
        let found = match &source {
            Some(own) => own.allocate(size_bytes, stream),
            None => (self.callbacks.allocate)(size_bytes, self.device.device, stream),
        };
        let Some(address) = found.filter(|address| *address != 0) else {
            return Ok(Err(Refusal::Null));
        };
        let block = Block {
            is_lent: false,
            size_bytes,
            requested_bytes: bytes,
            stream,
            pool,
            state: State::Live,
            uses: smallvec::SmallVec::new(),
            events: 0,
            source,
        };
        if let Some(fault) = fault_of(address, size_bytes) {
            self.call_free(address, &block);
            return Err(AllocError::BadAddress { address, requested_bytes: bytes, fault });
        }
        self.pools.add_block(pool);
        let Some(serial) = self.table.lock(address).insert(address, block) else {
            self.pools.lock().remove_block(pool);
            // The new address is not freed, because that would free the known block at the same address.
            let fault = AddressFault::Live;
            return Err(AllocError::BadAddress { address, requested_bytes: bytes, fault });
        };
        charge.keep();
        self.announce(Action::SegmentAlloc, address, size_bytes, (stream, pool));
        self.record(Action::SegmentAlloc, address, size_bytes, (stream, pool));
        self.record(Action::Alloc, address, bytes, (stream, pool));
        Ok(Ok(Allocation::new(address, bytes, self.owner, Token::numbered(serial))))
    }

    /// Calls the function that frees the block's memory. The block must not be in the table, because
    /// another thread's request may get the address as soon as the function frees it.
    fn call_free(&self, address: u64, block: &Block) {
        match &block.source {
            Some(own) => own.free(address, block.size_bytes, block.stream),
            None => {
                (self.callbacks.free)(address, block.size_bytes, self.device.device, block.stream)
            }
        }
    }

    /// Frees the live block with this name, or makes it wait for other streams. Returns its requested
    /// bytes.
    fn free_block(&self, name: BlockName) -> Result<u64, HandleError> {
        let _context = self.history.of_free();
        let (stream, uses, pool, serial, bytes) = {
            let shard = self.table.lock(name.address);
            let block = shard.live(name)?;
            (block.stream, block.uses.clone(), block.pool, block.serial, block.requested_bytes)
        };
        let address = name.address;
        if !uses.is_empty() || self.driver.is_per_thread_stream(stream) {
            return self.free_when_drained(address, serial, stream, &uses).map(|()| bytes);
        }
        if self.retire(address, serial, State::Live, pool) {
            Ok(bytes)
        } else {
            Err(HandleError::Stale { address })
        }
    }

    /// Ends a live or draining block: frees it by the user's function, or keeps it idle in its pool.
    /// Returns false if the block has been freed or used by another stream since.
    fn retire(&self, address: u64, serial: u64, was: State, pool: PoolId) -> bool {
        // Lock order: private pools before shards.
        let mut known = (pool != PoolId::DEFAULT).then(|| self.pools.lock());
        let mut shard = self.table.lock(address);
        let same = |block: &&Live<Block>| {
            block.serial == serial
                && block.state == was
                && (was == State::Draining || block.uses.is_empty())
        };
        let Some(block) = shard.get(address).filter(same) else {
            return false;
        };
        let (stream, size, requested) = (block.stream, block.size_bytes, block.requested_bytes);
        let keeps = self.callbacks.begin_pool.is_none();
        let kept =
            keeps && known.as_mut().is_some_and(|known| known.keep(pool, (stream, size, address)));
        let removed = if kept {
            shard.keep(address);
            None
        } else {
            if let Some(known) = known.as_mut() {
                known.remove_block(pool);
            }
            shard.remove(address)
        };
        if was == State::Live {
            self.record(Action::FreeRequested, address, requested, (stream, pool));
        }
        self.record(Action::FreeCompleted, address, requested, (stream, pool));
        drop(shard);
        drop(known);
        if let Some(block) = removed {
            self.free_removed(address, &block);
        }
        true
    }

    /// Frees the memory of a block that was removed from the table.
    fn free_removed(&self, address: u64, block: &Block) {
        let _charge = self.limit.kept(block.size_bytes);
        let of = (block.stream, block.pool);
        self.record(Action::SegmentFree, address, block.size_bytes, of);
        self.announce(Action::SegmentFree, address, block.size_bytes, of);
        self.call_free(address, block);
    }
}

/// Returns the fault of an address that a user's function returned, if there is one.
fn fault_of(address: u64, size_bytes: u64) -> Option<AddressFault> {
    if !address.is_multiple_of(ALIGNMENT_BYTES) {
        return Some(AddressFault::Misaligned { alignment_bytes: ALIGNMENT_BYTES });
    }
    address.checked_add(size_bytes).is_none().then_some(AddressFault::PastTheEnd)
}

impl Drop for PluggableAllocator {
    /// Waits for other streams' work and frees every block, even live ones, because no caller can free
    /// them any more. Panics of the user's functions are ignored.
    fn drop(&mut self) {
        // If the wait fails, blocks are freed without it.
        let _ = catch_unwind(AssertUnwindSafe(|| self.drain()));
        let shards = self.table.lock_all();
        let all: Vec<_> = shards.iter().flat_map(|s| s.iter()).map(|live| live.address).collect();
        drop(shards);
        for address in all {
            if let Some(block) = self.table.lock(address).remove(address) {
                let _ = catch_unwind(AssertUnwindSafe(|| self.free_removed(address, &block)));
            }
        }
        self.waiting.queue.destroy(&*self.driver);
    }
}
