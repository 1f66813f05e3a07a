//! `backend:pluggable`: a user's own functions, and everything the framework can do around them.
//!
//! `allocate` and `free` go straight to the user's functions ([`Callbacks`]); nothing is cached and
//! nothing rounded. Around them: exact counters, history, a limit by our own count, waiting for other
//! streams, private pools, hooks and a full report under pressure, clean errors for wrong handles and
//! for functions that answer with nonsense. When to use: to bring an allocator of your own, as
//! closures or as a shared library that was written for PyTorch.
//!
//! A block of a stream that is another one on each thread counts as used by that stream: its free waits
//! for the freeing thread's work. Then it is no thread's, and whoever finds that gives it back. In a
//! capture of that very stream this is after the capture's end: a graph does not use such a block twice.
//!
//! No lock is held while a user's function runs. What it panics with reaches the caller; a request
//! has then changed nothing, and a block whose free panicked is gone. Dropping the allocator gives
//! every block back, also live ones. `table` keeps the account, `waiting` what other streams use,
//! `pools` the private pools, `pressure` what happens when there is no memory.

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
use crate::size::align_up;
use crate::tracepoints;

use pools::Pools;
use table::{Block, State, Table};
use waiting::Waiting;

/// Addresses below this alignment cannot hold what kernels load at once.
const ALIGNMENT_BYTES: u64 = 16;
/// What segment allocators of pools are promised.
const SEGMENT_BYTES: u64 = 512;

/// An allocator made of a user's functions, for one device.
#[derive(Debug)]
pub struct PluggableAllocator {
    name: String,
    driver: Arc<dyn Driver>,
    device: DeviceInfo,
    owner: OwnerId,
    callbacks: Callbacks,
    /// What it was built with: the library cannot be exchanged.
    built: Settings,
    table: Table,
    limit: Limit,
    waiting: Waiting,
    pools: Pools,
    /// What those know that came after this one was replaced.
    hooks: Hooks,
    pub(crate) history: Arc<History>,
    peers: Mutex<Vec<DeviceId>>,
}

/// Why the user's functions were of no use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refusal {
    /// Our own limit.
    Limit,
    /// The function returned nothing.
    Null,
}

impl PluggableAllocator {
    /// An allocator that holds nothing yet. Calls `init` with `device_count`, and `memory_fraction` if
    /// the settings limit the memory.
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
        self.limit.set_fraction(fraction, self.device.total_bytes);
        if let Some(tell) = &self.callbacks.memory_fraction {
            tell(fraction, self.device.device);
        }
    }

    fn record(&self, action: Action, address: u64, size_bytes: u64, block: (StreamId, PoolId)) {
        let (stream, pool) = block;
        tracepoints::of(action, address, self.device.device, size_bytes, stream);
        self.history.record(stream.0, || Event { action, address, size_bytes, stream, pool });
    }

    /// Calls trackers with memory that the user's functions gave or are about to get. No lock is held.
    fn announce(&self, action: Action, address: u64, size_bytes: u64, block: (StreamId, PoolId)) {
        let (stream, pool) = block;
        self.history.announce(Event { action, address, size_bytes, stream, pool });
    }

    fn serve(&self, pool: PoolId, request: Request) -> AllocResult {
        let _asks = self.history.of_request();
        request.check_size()?;
        if pool != PoolId::DEFAULT && self.may_be_captured(request.stream) {
            // The graph uses the pool's memory whenever it is launched.
            self.pools.lock().in_use(pool)?.fixed = true;
        }
        // Skipped where events must not be asked; what an event answers with an error goes on waiting.
        if self.waiting.any() && self.may_wait_for(request.stream) {
            // The request itself is sound; `process_events` tells of failures.
            let _ = self.poll();
        }
        match self.try_serve(pool, request)? {
            Ok(found) => Ok(found),
            Err(_) => self.serve_under_pressure(pool, request),
        }
    }

    /// One attempt: what is idle in the pool, then the user's function.
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

    /// Asks for new memory. Undoes everything when the function panics or answers with nonsense.
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
            self.hand_back(address, &block);
            return Err(AllocError::BadAddress { address, requested_bytes: bytes, fault });
        }
        self.pools.add_block(pool);
        let Some(serial) = self.table.lock(address).insert(address, block) else {
            self.pools.lock().remove_block(pool);
            // Freeing it would free the block that is live there.
            let fault = AddressFault::Live;
            return Err(AllocError::BadAddress { address, requested_bytes: bytes, fault });
        };
        charge.keep();
        self.announce(Action::SegmentAlloc, address, size_bytes, (stream, pool));
        self.record(Action::SegmentAlloc, address, size_bytes, (stream, pool));
        self.record(Action::Alloc, address, bytes, (stream, pool));
        Ok(Ok(Allocation::new(address, bytes, self.owner, Token::numbered(serial))))
    }

    /// Calls whoever takes the block back. The caller has forgotten it before: from here on its address
    /// may come back from another thread's request.
    fn hand_back(&self, address: u64, block: &Block) {
        match &block.source {
            Some(own) => own.free(address, block.size_bytes, block.stream),
            None => {
                (self.callbacks.free)(address, block.size_bytes, self.device.device, block.stream)
            }
        }
    }

    /// Frees the live block of this name.
    fn free_block(&self, name: BlockName) -> Result<u64, HandleError> {
        let _asks = self.history.of_free();
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

    /// Takes a block out of its caller's hands, or out of waiting: back to the user, or into its pool.
    /// False when it is not the block that was meant.
    fn retire(&self, address: u64, serial: u64, was: State, pool: PoolId) -> bool {
        // A private pool's lock comes before a shard's.
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
        let gone = if kept {
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
        if let Some(block) = gone {
            self.give_back(address, &block);
        }
        true
    }

    /// Gives a forgotten block's memory back and counts it.
    fn give_back(&self, address: u64, block: &Block) {
        let _charge = self.limit.kept(block.size_bytes);
        let of = (block.stream, block.pool);
        self.record(Action::SegmentFree, address, block.size_bytes, of);
        self.announce(Action::SegmentFree, address, block.size_bytes, of);
        self.hand_back(address, block);
    }
}

/// What is wrong with an answer.
fn fault_of(address: u64, size_bytes: u64) -> Option<AddressFault> {
    if !address.is_multiple_of(ALIGNMENT_BYTES) {
        return Some(AddressFault::Misaligned { alignment_bytes: ALIGNMENT_BYTES });
    }
    address.checked_add(size_bytes).is_none().then_some(AddressFault::PastTheEnd)
}

impl Drop for PluggableAllocator {
    /// Waits for other streams' work and gives every block back, also live ones: their allocations
    /// can no longer be freed. A function that panics here is not heard.
    fn drop(&mut self) {
        // A driver that fails now leaves blocks waiting, and they are given back all the same.
        let _ = catch_unwind(AssertUnwindSafe(|| self.drain()));
        let shards = self.table.lock_all();
        let all: Vec<_> = shards.iter().flat_map(|s| s.iter()).map(|live| live.address).collect();
        drop(shards);
        for address in all {
            if let Some(block) = self.table.lock(address).remove(address) {
                let _ = catch_unwind(AssertUnwindSafe(|| self.give_back(address, &block)));
            }
        }
        self.waiting.queue.destroy(&*self.driver);
    }
}
