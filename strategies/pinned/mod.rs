//! `backend:pinned`: page-locked host memory, cached.
//!
//! The device copies from and to such memory by itself, and the program reads and writes it at the address
//! of the block. Allocating it takes the driver long, so freed blocks are kept.
//!
//! **Sizes.** Each block outside the reserved segment is an allocation of its own, of the requested size
//! rounded up to 512 bytes, or to 4 KiB from 1 MiB on. A request takes the smallest free block that is at
//! most an eighth larger, and of equal blocks the one that was freed last. With
//! `pinned_rounding:power_of_two` sizes are powers of two, as in PyTorch, and a free block of exactly that
//! size is taken.
//!
//! **Streams.** A block is reused when the work that used it has finished. Only streams that were announced
//! with `record_stream` count, as in PyTorch; the stream of the request does not. So a program announces
//! each stream on which it copies from or to a block, also that of the request. A free records an event on
//! each of these streams (`waiting`). A block that was used in a stream capture is never reused, because
//! each launch of the graph may use it.
//!
//! **Release.** `release` releases blocks that are larger than `pinned_max_cached_size_mb` at once, and
//! others after `pinned_trim_age_s`, when the cache is emptied, and when memory or the limit runs out
//! (`pressure`).
//!
//! **Memory.** `source` allocates with the driver, or registers pages of the system, for example on the NUMA
//! node of the device. `reserve` is the segment that is allocated in advance.
//!
//! `blocks` is the bookkeeping, `background` the thread that queries events. One lock protects the blocks.
//! It is not held during driver calls and user code. Lock order: releases, event queue, blocks.
//!
//! Source of the rules: PyTorch's `CachingHostAllocator`.

mod background;
mod blocks;
mod capabilities;
mod pressure;
mod release;
mod reserve;
mod source;
mod times;
mod waiting;

use std::sync::Arc;
use std::time::Instant;

use parking_lot::{Mutex, RwLock};

use crate::allocator::{Allocation, Hooks, Request, Token};
use crate::config::{PinnedRounding, PinnedSettings, Settings};
use crate::driver::{DeviceInfo, Driver};
use crate::error::{
    AddressFault, AllocError, AllocResult, DriverError, DriverErrorKind, HandleError,
};
use crate::history::{Action, Event, History};
use crate::ids::{OwnerId, PoolId, StreamId};
use crate::limit::Limit;
use crate::live_blocks::BlockName;
use crate::refusal::Refusal;
use crate::size::{FractionRounding, MIB, align_up};
use crate::system::memory_info;
use crate::tracepoints;

use background::Background;
use blocks::{Block, Blocks, Origin, Served, State, Uses};
use reserve::Reserve;
use source::HostSource;
use waiting::Waiting;

/// The rounding of sizes below 1 MiB.
const SMALL_ALIGNMENT_BYTES: u64 = 512;
/// The rounding of larger sizes, and of registered memory.
const PAGE_BYTES: u64 = 4096;
/// A reused block is at most this part of the request larger.
const WASTE_PART: u64 = 8;

/// The allocator of page-locked host memory for one device.
#[derive(Debug)]
pub struct PinnedAllocator {
    core: Arc<Core>,
    /// Ends before the core's memory is released.
    background: Option<Background>,
}

/// The state of an allocator, shared with its background thread.
#[derive(Debug)]
struct Core {
    driver: Arc<dyn Driver>,
    device: DeviceInfo,
    owner: OwnerId,
    /// The settings with which the allocator was built.
    built: Settings,
    /// The settings in force. Keys that are fixed have the values of `built`.
    settings: RwLock<PinnedSettings>,
    source: HostSource,
    limit: Limit,
    blocks: Mutex<Blocks>,
    waiting: Waiting,
    /// Held shared while memory is being released to the driver, and exclusively to wait for that.
    releasing: RwLock<()>,
    start: Instant,
    hooks: Hooks,
    history: Arc<History>,
}

/// The sizes of blocks that may serve a request.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    /// The size of a new block.
    least_bytes: u64,
    most_bytes: u64,
}

impl PinnedAllocator {
    /// Creates an allocator. It holds no memory yet, apart from the reserved segment if one is configured.
    ///
    /// # Errors
    ///
    /// [`DriverError`] when the device has no page-locked host memory, the machine lacks the configured NUMA
    /// node, the reserved segment cannot be allocated, or the background thread cannot start.
    pub fn new(driver: Arc<dyn Driver>, settings: &Settings) -> Result<Self, DriverError> {
        Self::recording_in(driver, settings, Arc::default())
    }

    pub(crate) fn recording_in(
        driver: Arc<dyn Driver>,
        settings: &Settings,
        history: Arc<History>,
    ) -> Result<Self, DriverError> {
        let core = Core {
            device: driver.info(),
            owner: OwnerId::next(),
            built: settings.clone(),
            settings: RwLock::new(settings.pinned),
            source: HostSource::new(Arc::clone(&driver), &settings.pinned)?,
            limit: Limit::none(),
            blocks: Mutex::default(),
            waiting: Waiting::default(),
            releasing: RwLock::default(),
            start: Instant::now(),
            hooks: Hooks::new(),
            history,
            driver,
        };
        // Owned from here on, so that an error below releases what was allocated.
        let mut own = Self { core: Arc::new(core), background: None };
        if settings.per_process_memory_fraction < 1.0 {
            own.core.limit_to_fraction(settings.per_process_memory_fraction)?;
        }
        if let Some(bytes) = settings.pinned.reserve_segment_bytes {
            own.core.allocate_reserve(bytes)?;
        }
        if settings.pinned.use_background_threads {
            own.background = Some(Background::start(&own.core)?);
        }
        Ok(own)
    }
}

impl Core {
    /// Sets the limit to a fraction of the memory of this machine, or of the container if one limits this
    /// process.
    fn limit_to_fraction(&self, fraction: f64) -> Result<(), DriverError> {
        let total_bytes = if fraction < 1.0 { memory_info()?.total_bytes } else { 0 };
        self.limit.set_fraction(fraction, total_bytes, FractionRounding::Nearest);
        Ok(())
    }

    fn allocate_reserve(&self, bytes: u64) -> Result<(), DriverError> {
        let bytes = align_up(bytes, PAGE_BYTES);
        let charge = self.limit.charge(bytes).ok_or_else(|| {
            let message = format!("the limit forbids a reserved segment of {bytes} bytes");
            DriverError::new(DriverErrorKind::OutOfMemory, "build", 0, message)
        })?;
        let (address, origin) = self.take_timed(bytes)?;
        charge.keep();
        self.announce(Action::SegmentAlloc, address, bytes, StreamId::DEFAULT);
        let mut blocks = self.blocks.lock();
        blocks.count_segment(bytes);
        blocks.reserve = Some(Reserve::new(address, bytes, origin));
        self.record(Action::SegmentAlloc, address, bytes, StreamId::DEFAULT);
        Ok(())
    }

    fn record(&self, action: Action, address: u64, size_bytes: u64, stream: StreamId) {
        let pool = PoolId::DEFAULT;
        tracepoints::of(action, address, self.device.device, size_bytes, stream);
        self.history.record(0, || Event { action, address, size_bytes, stream, pool });
    }

    /// Calls trackers for memory that was allocated from the driver or is being released to it. The caller
    /// does not hold `blocks`.
    fn announce(&self, action: Action, address: u64, size_bytes: u64, stream: StreamId) {
        let pool = PoolId::DEFAULT;
        self.history.announce(Event { action, address, size_bytes, stream, pool });
    }

    fn now_ns(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Returns the sizes of blocks that may serve a request of `bytes`.
    fn sizes(&self, bytes: u64) -> Sizes {
        let settings = self.settings.read();
        let is_within = |most: Option<u64>| most.is_none_or(|most| bytes <= most);
        let rounds = settings.rounding == PinnedRounding::PowerOfTwo
            && is_within(settings.max_round_threshold_bytes)
            && is_within(settings.max_cached_bytes);
        let pages = bytes >= MIB || self.source.registers();
        let alignment_bytes = if pages { PAGE_BYTES } else { SMALL_ALIGNMENT_BYTES };
        if rounds {
            let bytes = align_up(bytes.next_power_of_two(), alignment_bytes);
            return Sizes { least_bytes: bytes, most_bytes: bytes };
        }
        let bytes = align_up(bytes, alignment_bytes);
        Sizes { least_bytes: bytes, most_bytes: bytes + bytes / WASTE_PART }
    }

    fn serve(&self, request: Request) -> AllocResult {
        let _context = self.history.of_request();
        request.plain()?;
        request.check_size()?;
        let sizes = self.sizes(request.bytes);
        if self.waiting.any() && !self.built.pinned.use_background_threads {
            // A failure here must not fail the request; `process_events` reports it.
            let _ = self.poll();
        }
        if let Some(found) = self.reuse(request, sizes) {
            return Ok(found);
        }
        self.trim_step();
        match self.take(request, sizes)? {
            Ok(found) => Ok(found),
            Err(refusal) => self.serve_under_pressure(request, sizes, refusal),
        }
    }

    fn allocation(&self, served: Served, request: Request) -> Allocation {
        let token = Token::numbered(served.serial);
        Allocation::new(served.address, request.bytes, self.owner, token)
    }

    /// Serves a request from the cache, or from the reserved segment.
    fn reuse(&self, request: Request, sizes: Sizes) -> Option<Allocation> {
        let Request { bytes, stream, .. } = request;
        let mut blocks = self.blocks.lock();
        let fits = (sizes.least_bytes, sizes.most_bytes);
        let served = match blocks.reuse(fits, bytes, stream) {
            Some(served) => served,
            None => {
                let address = blocks.reserve.as_mut()?.take(sizes.least_bytes)?;
                blocks.enter(address, new_block(request, sizes.least_bytes, Origin::Reserve))?
            }
        };
        self.record(Action::Alloc, served.address, bytes, stream);
        Some(self.allocation(served, request))
    }

    /// Allocates a new block from the driver.
    fn take(&self, request: Request, sizes: Sizes) -> AllocResult<Result<Allocation, Refusal>> {
        let Sizes { least_bytes: bytes, .. } = sizes;
        let stream = request.stream;
        let Some(charge) = self.limit.charge(bytes) else { return Ok(Err(Refusal::Limit)) };
        let (address, origin) = match self.take_timed(bytes) {
            Ok(taken) => taken,
            Err(error) => return Ok(Err(Refusal::Failed(error))),
        };
        self.announce(Action::SegmentAlloc, address, bytes, stream);
        let mut blocks = self.blocks.lock();
        let Some(served) = blocks.enter(address, new_block(request, bytes, origin)) else {
            // The new memory is not freed, because that would free the known block at the same address.
            let (requested_bytes, fault) = (request.bytes, AddressFault::Live);
            return Err(AllocError::BadAddress { address, requested_bytes, fault });
        };
        charge.keep();
        self.record(Action::SegmentAlloc, address, bytes, stream);
        self.record(Action::Alloc, address, request.bytes, stream);
        Ok(Ok(self.allocation(served, request)))
    }

    fn take_timed(&self, bytes: u64) -> Result<(u64, Origin), DriverError> {
        let start = Instant::now();
        let taken = self.source.take(bytes)?;
        self.blocks.lock().times.allocated(start.elapsed());
        Ok(taken)
    }

    /// Frees the live block with this name, or makes it wait for the streams that use it. Returns its
    /// requested bytes.
    fn free(&self, name: BlockName) -> Result<u64, HandleError> {
        let _context = self.history.of_free();
        let address = name.address;
        let mut blocks = self.blocks.lock();
        let block = blocks.live(name)?;
        let (requested_bytes, stream) = (block.requested_bytes, block.stream);
        if !block.uses.is_empty() {
            block.state = State::Freeing;
            let (uses, in_graph) = (block.uses.clone(), block.in_graph);
            drop(blocks);
            self.free_when_drained(address, uses, in_graph)?;
            return Ok(requested_bytes);
        }
        let now_ns = self.now_ns();
        blocks.make_idle(address, now_ns);
        self.record(Action::FreeRequested, address, requested_bytes, stream);
        self.record(Action::FreeCompleted, address, requested_bytes, stream);
        drop(blocks);
        self.after_free(address);
        Ok(requested_bytes)
    }
}

fn new_block(request: Request, bytes: u64, origin: Origin) -> Block {
    Block {
        bytes,
        requested_bytes: request.bytes,
        stream: request.stream,
        state: State::Live,
        uses: Uses::new(),
        in_graph: false,
        origin,
    }
}

impl Drop for PinnedAllocator {
    /// Waits for the streams that use freed blocks, then releases all memory, even that of live blocks.
    fn drop(&mut self) {
        self.background = None;
        self.core.release_everything();
    }
}
