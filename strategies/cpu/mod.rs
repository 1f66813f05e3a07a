//! `backend:cpu`: host memory, cached by exact size.
//!
//! A request is served by the most recently freed block of exactly its size, or else by the system.
//! Freed blocks are cached until the cache is emptied, trimmed by age or watermark, or the instance is
//! dropped. When the system has no memory, all cached blocks are released and the request is tried once
//! more. That retry also waits for blocks that other threads are releasing.
//!
//! Linux overcommits memory. So a block of 1 MiB or more is refused only if it exceeds a limit, or if it
//! is to be filled and the machine lacks the memory. Set a limit. Streams have no effect: host memory is
//! used synchronously, so a freed block can be reused at once.
//!
//! When to use: programs on the host that request the same sizes repeatedly.
//!
//! All instances share one map of addresses (`live`). Each instance accepts any address and passes it to
//! the instance that made the block. Dropping an instance releases its cached blocks. Its live blocks
//! stay valid and are released when they are freed, by address through any instance or with
//! [`CpuAllocator::free_shared`]. A hit takes only the instance's lock; the map is read when a block is
//! freed by address.
//!
//! Modules: `blocks` is the bookkeeping, `current` the instance of a thread, `buffer` owned blocks,
//! `pressure` the handling of failures.
//!
//! Source of the rules: PyTorch's `CPUCachingAllocator`.

mod blocks;
mod buffer;
mod capabilities;
mod current;
mod live;
mod pressure;
mod release;

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard, RwLock};

use crate::allocator::{Allocation, Hooks, Request, Token};
use crate::config::{CpuSettings, Settings};
use crate::error::{AllocError, DriverError, DriverErrorKind, FreeError, HandleError};
use crate::history::{Action, Event, History};
use crate::ids::{DeviceId, OwnerId, PoolId, StreamId};
use crate::limit::Limit;
use crate::refusal::Refusal;
use crate::size::FractionRounding;
use crate::system::{
    Fill, MAPPING_MIN_BYTES, Source, SystemBlock, SystemMemory, SystemOptions, memory_info,
};
use crate::tracepoints;

use blocks::{AllocatedBlock, BlockId, Blocks};
use live::Owner;

pub use buffer::CpuBuffer;
pub use current::{CpuCachingGuard, current, with_cpu_caching_allocator};

/// The value of the watermark or the age when there is none.
const UNLIMITED: u64 = u64::MAX;

/// The system's error number for "out of memory" (`ENOMEM`).
const NO_MEMORY: i64 = 12;
/// The maximum number of blocks that one miss or free releases because of their age.
const TRIM_STEP: usize = 4;
/// The possible initial contents of a block.
const FILLS: [Option<Fill>; 3] = [None, Some(Fill::Zero), Some(Fill::Junk)];

/// A clock for trimming by age: returns the time since a fixed moment.
pub type Clock = Arc<dyn Fn() -> Duration + Send + Sync>;

/// The CPU caching allocator. Each instance has its own cache, alone on its cache lines, so that threads
/// that use separate instances do not slow each other down.
#[derive(Debug)]
#[repr(align(128))]
pub struct CpuAllocator {
    core: Arc<Core>,
}

/// The state of an instance, alone on its cache lines. It outlives its [`CpuAllocator`] while blocks are
/// live.
#[repr(align(128))]
struct Core {
    me: Weak<Core>,
    owner: OwnerId,
    device: DeviceId,
    source: Arc<dyn Source>,
    clock: Clock,
    alignment_bytes: u64,
    /// The settings with which the instance was built. The fill, the watermark and the age may change
    /// later.
    built: Settings,
    /// The initial contents of blocks: an index into [`FILLS`].
    fill: AtomicUsize,
    limit: Limit,
    cached_max_bytes: AtomicU64,
    trim_age_ns: AtomicU64,
    /// `cpu_stop_caching_on_oom`.
    stops_caching: AtomicBool,
    /// True once the system has had no memory for a request.
    ran_out: AtomicBool,
    blocks: Mutex<Blocks>,
    /// Held shared while a block is being released to the system, and exclusively to wait for all such
    /// releases. Locked before `blocks`. Trackers run while it is held, so it must not be locked inside
    /// a tracker.
    releasing: RwLock<()>,
    /// A reference to the instance itself, set when its allocator is dropped, so that the instance lives
    /// until its last live block is freed.
    retired: Mutex<Option<Arc<Core>>>,
    hooks: Hooks,
    history: Arc<History>,
}

impl CpuAllocator {
    /// Creates an empty instance over the system's memory.
    ///
    /// # Errors
    ///
    /// [`DriverError`] when the settings request both fills, an invalid alignment, or huge pages or a
    /// NUMA node that the machine does not have.
    pub fn new(device: DeviceId, settings: &Settings) -> Result<Self, DriverError> {
        Self::recording_in(device, settings, Arc::default())
    }

    /// Creates an instance like [`new`](Self::new), which records in `history`.
    pub(crate) fn recording_in(
        device: DeviceId,
        settings: &Settings,
        history: Arc<History>,
    ) -> Result<Self, DriverError> {
        let cpu = &settings.cpu;
        let options = SystemOptions { huge_pages: cpu.huge_pages, numa_node: cpu.numa_node };
        let system = Arc::new(SystemMemory::new(options)?);
        let start = Instant::now();
        Self::build(device, settings, (system, Arc::new(move || start.elapsed())), history)
    }

    /// Creates an instance over any source of memory, with a clock for trimming by age.
    ///
    /// # Errors
    ///
    /// [`DriverError`] when the settings request both fills or an invalid alignment.
    pub fn with_source(
        device: DeviceId,
        settings: &Settings,
        source: Arc<dyn Source>,
        clock: Clock,
    ) -> Result<Self, DriverError> {
        Self::build(device, settings, (source, clock), Arc::default())
    }

    fn build(
        device: DeviceId,
        settings: &Settings,
        (source, clock): (Arc<dyn Source>, Clock),
        history: Arc<History>,
    ) -> Result<Self, DriverError> {
        let (cpu, fraction) = (settings.cpu, settings.per_process_memory_fraction);
        let alignment_bytes = cpu.alignment_bytes;
        if !alignment_bytes.is_power_of_two() || !CpuSettings::ALIGNMENTS.contains(&alignment_bytes)
        {
            let message = format!("cpu_alignment {alignment_bytes} is no power of two in range");
            return Err(DriverError::new(DriverErrorKind::InvalidValue, "build", 0, message));
        }
        let fill = fill_of(&cpu)?;
        let owner = OwnerId::next();
        let core = Arc::new_cyclic(|me| Core {
            me: Weak::clone(me),
            owner,
            device,
            source,
            clock,
            alignment_bytes,
            built: settings.clone(),
            fill: AtomicUsize::new(0),
            limit: Limit::none(),
            cached_max_bytes: AtomicU64::new(UNLIMITED),
            trim_age_ns: AtomicU64::new(UNLIMITED),
            stops_caching: AtomicBool::new(false),
            ran_out: AtomicBool::new(false),
            blocks: Mutex::default(),
            releasing: RwLock::default(),
            retired: Mutex::default(),
            hooks: Hooks::new(),
            history,
        });
        core.tune(&cpu, fill);
        if (0.0..1.0).contains(&fraction) {
            core.limit_to_fraction(fraction)?;
        }
        Ok(Self { core })
    }

    /// Releases blocks that have been free for longer than `cpu_trim_age_s`, and returns their bytes.
    /// Frees and misses do this automatically, a few blocks at a time. Call it when the program pauses.
    pub fn trim(&self) -> u64 {
        self.core.trim(usize::MAX)
    }

    /// Allocates a block that is freed when it is dropped. Access to its bytes needs no unsafe code.
    ///
    /// # Errors
    ///
    /// As [`DeviceAllocator::allocate`](crate::allocator::DeviceAllocator::allocate).
    pub fn buffer(&self, bytes: u64) -> Result<CpuBuffer, AllocError> {
        CpuBuffer::of(&self.core, bytes)
    }

    /// Removes a live block whose memory other code will free. Call it before the memory is freed:
    /// afterwards the system may have given the address to another instance.
    ///
    /// Returns the memory. To release it, pass it to the source's [`release`](Source::release). If its
    /// new owner frees it, pass it to `std::mem::forget`; the owner then calls the C library's `free`
    /// for less than 1 MiB, and `munmap` from 1 MiB on.
    ///
    /// # Errors
    ///
    /// [`HandleError::UnknownAddress`]: no instance of this process has a live block there, or the block
    /// belongs to a [`CpuBuffer`].
    pub fn record_free(&self, address: u64) -> Result<SystemBlock, HandleError> {
        self.core.with_maker(address, |core, slot| core.record_free(slot, address))
    }

    /// Frees the live block at an address. Calls `foreign` if no instance of this process has the
    /// address, for example to call the C library's `free`. Freeing a block that is already free and
    /// still cached is an error, as in [`free_raw`](crate::allocator::DeviceAllocator::free_raw). A
    /// block that was released to the system is unknown, so a second free of it calls `foreign`.
    ///
    /// # Errors
    ///
    /// [`HandleError::UnknownAddress`]; nothing has changed then.
    pub fn free_or(&self, address: u64, foreign: impl FnOnce(u64)) -> Result<(), HandleError> {
        match live::find(address, Some(&self.core)) {
            Owner::Unknown => {
                foreign(address);
                Ok(())
            }
            _ => self.core.free_address(address).map(drop),
        }
    }

    /// Frees a block of any instance, even one whose allocator was dropped.
    ///
    /// # Errors
    ///
    /// [`FreeError`], which contains the allocation; nothing has changed then.
    pub fn free_shared(allocation: Allocation) -> Result<(), FreeError> {
        let address = allocation.address();
        let freed = match live::find(address, None) {
            Owner::Other(core, _) if core.owner == allocation.owner() => core.free(&allocation),
            _ => Err(HandleError::UnknownAddress { address }),
        };
        freed.map_err(|reason| FreeError { reason, allocation })
    }
}

impl Drop for CpuAllocator {
    /// Releases the cached blocks. Live blocks are released when they are freed.
    fn drop(&mut self) {
        *self.core.retired.lock() = Some(Arc::clone(&self.core));
        self.core.blocks.lock().retired = true;
        self.core.release_retired();
    }
}

fn token_of(id: BlockId) -> Token {
    #[expect(clippy::cast_possible_truncation, reason = "cut into two halves")]
    Token([id.slot, id.life as u32, (id.life >> 32) as u32])
}

fn id_of(Token([slot, low, high]): Token) -> BlockId {
    BlockId { slot, life: u64::from(low) | u64::from(high) << 32 }
}

fn is_old(freed_at_ns: u64, now_ns: u64, age_ns: u64) -> bool {
    age_ns != UNLIMITED && freed_at_ns.saturating_add(age_ns) <= now_ns
}

/// Returns the initial contents of blocks that the settings request.
fn fill_of(cpu: &CpuSettings) -> Result<Option<Fill>, DriverError> {
    match (cpu.zero_fill, cpu.junk_fill) {
        (false, false) => Ok(None),
        (true, false) => Ok(Some(Fill::Zero)),
        (false, true) => Ok(Some(Fill::Junk)),
        (true, true) => {
            let message =
                "cpu_zero_fill and cpu_junk_fill are both True; blocks start as one of them";
            Err(DriverError::new(DriverErrorKind::InvalidValue, "build", 0, message))
        }
    }
}

impl std::fmt::Debug for Core {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (owner, source) = (self.owner, &self.source);
        write!(f, "Core {{ owner: {owner:?}, source: {source:?}, .. }}")
    }
}

impl Core {
    fn tune(&self, cpu: &CpuSettings, fill: Option<Fill>) {
        let age = cpu.trim_age.map(|age| u64::try_from(age.as_nanos()).unwrap_or(UNLIMITED));
        let number = FILLS.iter().position(|known| *known == fill).unwrap_or(0);
        self.fill.store(number, Ordering::Relaxed);
        self.stops_caching.store(cpu.stop_caching_on_oom, Ordering::Relaxed);
        let keeps_nothing = cpu.stop_caching_on_oom && self.ran_out.load(Ordering::Relaxed);
        let most = if keeps_nothing { Some(0) } else { cpu.cached_max_bytes };
        self.cached_max_bytes.store(most.unwrap_or(UNLIMITED), Ordering::Relaxed);
        let before = self.trim_age_ns.swap(age.unwrap_or(UNLIMITED), Ordering::Relaxed);
        if before == UNLIMITED && age.is_some() {
            // The times of earlier frees were not recorded, because no age was set. Count from now.
            self.blocks.lock().date_all_idle(self.now_ns());
        }
    }

    /// Handles a failed request to the system: may stop caching.
    fn has_run_out(&self) {
        self.ran_out.store(true, Ordering::Relaxed);
        if self.stops_caching.load(Ordering::Relaxed) {
            self.cached_max_bytes.store(0, Ordering::Relaxed);
        }
    }

    fn limit_to_fraction(&self, fraction: f64) -> Result<(), DriverError> {
        let total_bytes = if fraction < 1.0 { memory_info()?.total_bytes } else { 0 };
        self.limit.set_fraction(fraction, total_bytes, FractionRounding::Nearest);
        Ok(())
    }

    fn record(&self, action: Action, address: u64, size_bytes: u64, stream: StreamId) {
        let pool = PoolId::DEFAULT;
        tracepoints::of(action, address, self.device, size_bytes, stream);
        self.history.record(0, || Event { action, address, size_bytes, stream, pool });
    }

    /// Calls trackers for memory that was allocated from the source or is being released. The caller
    /// does not hold `blocks`.
    fn announce(&self, action: Action, address: u64, size_bytes: u64, stream: StreamId) {
        let pool = PoolId::DEFAULT;
        self.history.announce(Event { action, address, size_bytes, stream, pool });
    }

    #[inline]
    fn serve(&self, request: Request) -> Result<AllocatedBlock, AllocError> {
        let _context = self.history.of_request();
        match self.reuse(request) {
            Some(found) => {
                self.filled(found);
                Ok(found)
            }
            None => self.miss(request),
        }
    }

    /// Serves a request from the cache.
    #[inline]
    fn reuse(&self, request: Request) -> Option<AllocatedBlock> {
        let Request { bytes, stream, .. } = request;
        let mut blocks = self.blocks.lock();
        let found = blocks.reuse(bytes, stream)?;
        self.record(Action::Alloc, found.address, bytes, stream);
        Some(found)
    }

    #[cold]
    fn miss(&self, request: Request) -> Result<AllocatedBlock, AllocError> {
        request.check_size()?;
        if self.trim_age_ns.load(Ordering::Relaxed) != UNLIMITED {
            self.trim(TRIM_STEP);
        }
        let found = match self.take(request) {
            Ok(found) => found,
            Err(refusal) => self.serve_under_pressure(request, refusal)?,
        };
        self.filled(found);
        Ok(found)
    }

    /// Allocates a new block from the source.
    fn take(&self, request: Request) -> Result<AllocatedBlock, Refusal> {
        let Request { bytes, stream, .. } = request;
        let charge = self.limit.charge(bytes).ok_or(Refusal::Limit)?;
        self.check_can_be_filled(bytes).map_err(Refusal::Failed)?;
        let block = self.source.take(bytes, self.alignment_bytes).map_err(Refusal::Failed)?;
        let (address, got) = (block.address(), block.size_bytes());
        if got != bytes || !address.is_multiple_of(self.alignment_bytes) {
            self.source.release(block);
            let aligned = self.alignment_bytes;
            let message = format!(
                "the source returned {got} bytes at {address:#x} for {bytes} bytes aligned to {aligned}"
            );
            let kind = DriverErrorKind::InvalidValue;
            return Err(Refusal::Failed(DriverError::new(kind, "take", 0, message)));
        }
        self.announce(Action::SegmentAlloc, address, bytes, stream);
        let mut blocks = self.blocks.lock();
        charge.keep();
        let allocated = blocks.enter(block, stream);
        self.record(Action::SegmentAlloc, allocated.address, bytes, stream);
        self.record(Action::Alloc, allocated.address, bytes, stream);
        drop(blocks);
        live::enter(allocated.address, Weak::clone(&self.me), allocated.id.slot);
        Ok(allocated)
    }

    /// Checks that the machine has enough memory for a block that will be filled. Linux grants large
    /// blocks without it, and kills the program when it touches the bytes.
    fn check_can_be_filled(&self, bytes: u64) -> Result<(), DriverError> {
        let fills = FILLS[self.fill.load(Ordering::Relaxed)].is_some();
        if !fills || bytes < MAPPING_MIN_BYTES {
            return Ok(());
        }
        match memory_info() {
            Ok(info) if info.free_bytes < bytes => {
                let free = info.free_bytes;
                let message = format!("{bytes} bytes are to be filled, and {free} are available");
                Err(DriverError::new(DriverErrorKind::OutOfMemory, "fill", NO_MEMORY, message))
            }
            _ => Ok(()),
        }
    }

    /// Writes the initial contents of a block. During that, the block is out of its slot, so that
    /// freeing its address fails.
    #[inline]
    fn filled(&self, allocated: AllocatedBlock) {
        if let Some(fill) = FILLS[self.fill.load(Ordering::Relaxed)] {
            self.fill(allocated, fill);
        }
    }

    #[cold]
    fn fill(&self, allocated: AllocatedBlock, fill: Fill) {
        let lent = self.blocks.lock().lend(allocated.id, allocated.address);
        if let Some(mut block) = lent {
            block.fill(fill);
            self.blocks.lock().restore(allocated.id, block);
        }
    }

    /// Serves a request and moves the block out of its slot, so that the caller owns the memory itself.
    fn serve_lent(&self, request: Request) -> Result<(AllocatedBlock, SystemBlock), AllocError> {
        loop {
            let allocated = self.serve(request)?;
            // Before `lend`, another thread may by mistake free the same address a second time. `lend`
            // then fails, and the request starts again.
            if let Some(block) = self.blocks.lock().lend(allocated.id, allocated.address) {
                return Ok((allocated, block));
            }
        }
    }

    /// Frees a lent block.
    fn free_lent(&self, id: BlockId, block: SystemBlock) {
        let address = block.address();
        let age = self.trim_age_ns.load(Ordering::Relaxed);
        let now_ns = if age == UNLIMITED { 0 } else { self.now_ns() };
        let mut blocks = self.blocks.lock();
        blocks.restore(id, block);
        self.free_locked(blocks, (id.slot, address, Some(id.life)), (now_ns, age));
    }

    fn allocation(&self, allocated: AllocatedBlock, bytes: u64) -> Allocation {
        Allocation::new(allocated.address, bytes, self.owner, token_of(allocated.id))
    }

    /// Frees a block of this instance by its handle.
    #[inline]
    fn free(&self, allocation: &Allocation) -> Result<(), HandleError> {
        let address = allocation.address();
        allocation.check_owner(self.owner)?;
        let id = id_of(allocation.token());
        let freed = self.free_slot(id.slot, address, Some(id.life));
        freed.map(drop).ok_or(HandleError::Stale { address })
    }

    /// Calls `act` with the instance that made the block at this address, and with the block's slot.
    #[inline]
    fn with_maker<R>(
        &self,
        address: u64,
        act: impl FnOnce(&Self, u32) -> Option<R>,
    ) -> Result<R, HandleError> {
        let done = match live::find(address, Some(self)) {
            Owner::Caller(slot) => act(self, slot),
            Owner::Other(core, slot) => act(&core, slot),
            Owner::Unknown => None,
        };
        done.ok_or(HandleError::UnknownAddress { address })
    }

    /// Frees the block at this address, whichever instance made it.
    #[inline]
    fn free_address(&self, address: u64) -> Result<u64, HandleError> {
        self.with_maker(address, |core, slot| core.free_slot(slot, address, None))
    }

    /// Frees a live block. Returns `None` if no such block is live in the slot.
    #[inline]
    fn free_slot(&self, slot: u32, address: u64, life: Option<u64>) -> Option<u64> {
        let _context = self.history.of_free();
        let age = self.trim_age_ns.load(Ordering::Relaxed);
        let now_ns = if age == UNLIMITED { 0 } else { self.now_ns() };
        self.free_locked(self.blocks.lock(), (slot, address, life), (now_ns, age))
    }

    #[inline]
    fn free_locked(
        &self,
        mut blocks: MutexGuard<'_, Blocks>,
        (slot, address, life): (u32, u64, Option<u64>),
        (now_ns, age): (u64, u64),
    ) -> Option<u64> {
        let (bytes, stream, life) = blocks.free(slot, address, life, now_ns)?;
        self.record(Action::FreeRequested, address, bytes, stream);
        self.record(Action::FreeCompleted, address, bytes, stream);
        let retired = blocks.retired;
        drop(blocks);
        if retired {
            self.release_retired();
        } else if age != UNLIMITED || self.cached_max_bytes.load(Ordering::Relaxed) != UNLIMITED {
            self.after_free((slot, address, life), now_ns, age);
        }
        Some(bytes)
    }

    fn now_ns(&self) -> u64 {
        u64::try_from((self.clock)().as_nanos()).unwrap_or(u64::MAX)
    }
}
