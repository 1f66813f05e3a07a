//! The engine and its hot path: hits and frees.
//!
//! Read `pressure` next, which handles misses.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::{Condvar, Mutex};

use super::addresses::AddressMap;
use super::capabilities::of_address;
use super::capture::Captures;
use super::cell::{HeapCell, HeapGuard, HeapKey, HeapState, HeapTable};
use super::events::{Attention, Waiting};
use super::growth::{Growth, Reserved};
use super::pools::PoolHeaps;
use super::sharing::Shared;
use super::sleep::Copier;
use crate::allocator::{Allocation, Hooks, Request, Token};
use crate::config::Settings;
use crate::driver::{DeviceInfo, Driver};
use crate::error::{AllocError, DriverError, HandleError};
use crate::event_queue::EventQueue;
use crate::heap::{AllocatedBlock, BlockId, Heap, Slot, StreamUse};
use crate::history::{Action, Event, History, Moment, StackLevel};
use crate::ids::{OwnerId, PoolId, StreamId};
use crate::scopes::Scopes;
use crate::size::{MIN_BLOCK_BYTES, PoolKind, REQUEST_MAX_BYTES, align_up};
use crate::stats::Ledger;
use crate::tracepoints;

/// The options for creating an engine.
#[derive(Clone, Debug, Default)]
pub struct EngineOptions {
    /// The settings.
    pub settings: Settings,
    /// Whether live blocks can be found by address alone. Adds a small cost to each call.
    pub raw_addresses: bool,
    /// Records events while recording is on.
    pub history: Arc<History>,
}

/// The caching allocator of one device.
#[derive(Debug)]
pub struct Engine {
    pub(super) driver: Arc<dyn Driver>,
    pub(super) device: DeviceInfo,
    pub(super) owner: OwnerId,
    pub(super) heaps: HeapTable,
    pub(super) attention: Arc<Attention>,
    pub(super) events: EventQueue<Waiting>,
    pub(super) scopes: Scopes<Arc<PoolHeaps>>,
    pub(super) captures: Captures,
    pub(super) ledger: Ledger,
    pub(super) growth: Mutex<Growth>,
    /// Notified whenever a call of trackers by `announce` has ended.
    pub(super) announced: Condvar,
    /// Notified when the state of a tag has changed.
    pub(super) slept: Condvar,
    /// The stream and the buffer for copies of tags, while no thread uses them.
    pub(super) copier: Mutex<Option<Copier>>,
    pub(super) reserved: Arc<Reserved>,
    pub(super) addresses: AddressMap,
    pub(super) hooks: Hooks,
    pub(super) shared: Shared,
    /// The garbage collector's clock: counts searches for large blocks of the default pool while both a
    /// limit and `garbage_collection_threshold` are set.
    pub(super) clock: AtomicU64,
    pub(super) history: Arc<History>,
}

impl Engine {
    /// Creates an engine that holds no memory.
    ///
    /// # Errors
    ///
    /// [`DriverError`] when the device does not support a setting.
    pub fn new(driver: Arc<dyn Driver>, options: &EngineOptions) -> Result<Self, DriverError> {
        let device = driver.info();
        let growth = Growth::new(options.settings.clone().in_range(), device.total_bytes);
        let owner = OwnerId::next();
        let shared = Shared::new(&driver);
        let scopes = Scopes::new(Arc::clone(&driver));
        let engine = Self {
            driver,
            device,
            owner,
            heaps: HeapTable::new(owner),
            attention: Arc::default(),
            events: EventQueue::default(),
            scopes,
            captures: Captures::default(),
            ledger: Ledger::default(),
            reserved: Arc::clone(&growth.reserved),
            growth: Mutex::new(growth),
            announced: Condvar::new(),
            slept: Condvar::new(),
            copier: Mutex::default(),
            addresses: AddressMap::new(options.raw_addresses),
            hooks: Hooks::new(),
            shared,
            clock: AtomicU64::new(0),
            history: Arc::clone(&options.history),
        };
        let attention: Weak<Attention> = Arc::downgrade(&engine.attention);
        engine.history.listen(attention);
        engine.check_pages(&options.settings)?;
        engine.captures.apply(&options.settings);
        Ok(engine)
    }

    /// Returns the owner id in this engine's allocations.
    #[must_use]
    pub fn owner(&self) -> OwnerId {
        self.owner
    }

    /// Returns the driver from which this engine allocates memory.
    #[must_use]
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    /// Serves a request that names neither a pool nor an address. Every path ends in a tail call, so a
    /// caller into which this function is inlined needs no stack frame.
    #[inline(always)]
    pub(super) fn allocate_anywhere(
        &self,
        bytes: u64,
        stream: StreamId,
    ) -> Result<Allocation, AllocError> {
        if self.attention.any() || !is_valid_size(bytes) {
            return self.allocate_rarely(bytes, stream);
        }
        self.allocate_by_default::<false>(bytes, stream)
    }

    /// As [`allocate_anywhere`](Self::allocate_anywhere), if `attention` is not zero or the size is not
    /// valid.
    #[cold]
    #[inline(never)]
    fn allocate_rarely(&self, bytes: u64, stream: StreamId) -> Result<Allocation, AllocError> {
        check_size(bytes)?;
        if !self.attention.only_records() {
            return self.allocate_checked(Request::new(bytes, stream));
        }
        let is_plain = self.history.is_plain(StackLevel::OfLiveBlocks);
        let _context = if is_plain { None } else { self.history.of_request() };
        self.allocate_by_default::<true>(bytes, stream)
    }

    /// Allocates in the default pool. `RECORDS` is false if the history was found to be off.
    #[inline]
    pub(super) fn allocate_by_default<const RECORDS: bool>(
        &self,
        bytes: u64,
        stream: StreamId,
    ) -> Result<Allocation, AllocError> {
        match self.heaps.first_of_bucket(stream) {
            Some(cell) => self.allocate_in::<RECORDS>(cell, bytes, stream),
            None => self.allocate_in_any::<RECORDS>(bytes, stream),
        }
    }

    /// As [`allocate_by_default`](Self::allocate_by_default), for a stream whose heap is not the first of
    /// its bucket.
    #[inline(never)]
    fn allocate_in_any<const RECORDS: bool>(
        &self,
        bytes: u64,
        stream: StreamId,
    ) -> Result<Allocation, AllocError> {
        match self.heaps.find_behind_first(stream) {
            Some(cell) => self.allocate_in::<RECORDS>(cell, bytes, stream),
            None => self.allocate_off_the_path(bytes, stream),
        }
    }

    /// Allocates a free block of a heap of the default pool. If `is_plain` is false or no block fits,
    /// calls [`allocate_by_policy`](Self::allocate_by_policy). Not inlined, so that callers end in a tail
    /// call and need no stack frame.
    #[inline(never)]
    fn allocate_in<const RECORDS: bool>(
        &self,
        cell: &HeapCell,
        bytes: u64,
        stream: StreamId,
    ) -> Result<Allocation, AllocError> {
        let mut state = cell.lock();
        let HeapState { heap, counters, policy, is_plain } = &mut *state;
        let rounded_bytes = align_up(bytes, MIN_BLOCK_BYTES);
        let kind = PoolKind::of(rounded_bytes);
        let rules = &policy.rules;
        let account = counters.account(kind);
        if *is_plain && let Some(out) = heap.take(kind, rounded_bytes, bytes, rules, account) {
            counters.hits += 1;
            if counters.allocated(&out, out.inactive, bytes, false) {
                self.ledger.raise_limits(cell.number, kind, counters, &self.heaps);
            }
            if RECORDS {
                self.record(Action::Alloc, out.address, bytes, cell);
            }
            // The id and the address are read only now, which keeps two registers free until here.
            let (id, address) = heap.name_of(out.slot);
            tracepoints::malloc(address, self.device.device, bytes, || cell.stream());
            return Ok(cell.handle_of(address, bytes, id));
        }
        drop(state);
        self.allocate_by_policy(cell, HeapKey::of(stream), Request::new(bytes, stream))
    }

    /// Allocates in a heap that serves `key`, under any policy.
    #[inline(never)]
    pub(super) fn allocate_by_policy(
        &self,
        cell: &HeapCell,
        key: HeapKey,
        request: Request,
    ) -> Result<Allocation, AllocError> {
        let mut state = cell.lock_at(key)?;
        let rounded_bytes = state.policy.roundup.round(request.bytes);
        let kind = PoolKind::of(rounded_bytes);
        if state.policy.clock_runs && kind == PoolKind::Large {
            self.clock.fetch_add(1, Ordering::Relaxed);
        }
        if let Some(slot) = state.heap.best_fit(kind, rounded_bytes, &state.policy.rules) {
            state.counters.hits += 1;
            return Ok(self.allocate_slot(cell, &mut state, slot, rounded_bytes, request.bytes));
        }
        state.counters.misses += 1;
        drop(state);
        self.allocate_under_pressure(cell, key, request)
    }

    /// Allocates the free block at `slot`.
    #[inline(never)]
    pub(super) fn allocate_slot(
        &self,
        cell: &HeapCell,
        state: &mut HeapState,
        slot: Slot,
        rounded_bytes: u64,
        requested_bytes: u64,
    ) -> Allocation {
        let rules = state.policy.rules;
        let out = state.heap.allocate(slot, rounded_bytes, requested_bytes, &rules, self.now());
        self.record_allocated(cell, state, &out, requested_bytes)
    }

    /// Counts and records a block that the heap has allocated. Returns its handle.
    #[inline(always)]
    pub(super) fn record_allocated(
        &self,
        cell: &HeapCell,
        state: &mut HeapState,
        out: &AllocatedBlock,
        requested_bytes: u64,
    ) -> Allocation {
        let HeapState { counters, policy, .. } = state;
        let oversize = policy.is_oversize(out.size_bytes);
        let parts = counters.count_parts(out.kind, out.inactive);
        if counters.allocated(out, parts, requested_bytes, oversize) {
            self.ledger.raise_limits(cell.number, out.kind, counters, &self.heaps);
        }
        self.record(Action::Alloc, out.address, requested_bytes, cell);
        tracepoints::malloc(out.address, self.device.device, requested_bytes, || cell.stream());
        let id = state.heap.id(out.slot);
        cell.handle_of(out.address, requested_bytes, id)
    }

    /// Returns the heap and the block id that an allocation's token contains.
    #[inline]
    pub(super) fn own(&self, allocation: &Allocation) -> Result<(&HeapCell, BlockId), HandleError> {
        allocation.check_owner(self.owner)?;
        let Token([index, generation, number]) = allocation.token();
        let cell = self.heaps.get(number);
        let stale = || HandleError::Stale { address: allocation.address() };
        Ok((cell.ok_or_else(stale)?, BlockId { index, generation }))
    }

    /// Frees the live block at `address` in the heap of `cell`, or makes it wait for other streams that
    /// use it. Returns its requested bytes. If `id` is given, it must match.
    #[inline(always)]
    pub(super) fn free_block(
        &self,
        cell: &HeapCell,
        address: u64,
        id: Option<BlockId>,
    ) -> Result<u64, HandleError> {
        let refused = |error| if id.is_some() { error } else { of_address(error) };
        let mut state = cell.lock();
        let Some(slot) = live(&state.heap, address, id) else {
            return Err(refused(HandleError::Stale { address }));
        };
        tracepoints::free(address);
        if state.heap.is_used_by_other_streams(slot) {
            let requested_bytes = state.heap.requested_bytes(slot);
            let freed = self.free_when_drained(cell, state, slot, address);
            return freed.map(|()| requested_bytes).map_err(refused);
        }
        let requested_bytes = match state.is_plain {
            true => self.free_plainly(cell, &mut state, slot),
            false => self.free_by_policy(cell, &mut state, slot),
        };
        if self.history.is_on() {
            self.record_freed(cell, state, address, requested_bytes);
        }
        Ok(requested_bytes)
    }

    /// Calls [`free_block`](Self::free_block) again after the block's uses by other streams were removed
    /// or have changed.
    pub(super) fn free_unused(
        &self,
        cell: &HeapCell,
        address: u64,
        id: BlockId,
    ) -> Result<(), HandleError> {
        self.free_block(cell, address, Some(id)).map(drop)
    }

    /// Frees the live block at `slot`, which no other stream uses.
    #[inline(never)]
    pub(super) fn free_slot(&self, cell: &HeapCell, state: &mut HeapState, slot: Slot) {
        let address = state.heap.view(slot).address;
        let requested_bytes = self.free_by_policy(cell, state, slot);
        if let Some(moment) = self.history.moment() {
            self.push_freed(moment, cell, address, requested_bytes);
        }
    }

    /// Frees a block of a heap for which `is_plain` is true. Returns its requested bytes.
    #[inline(always)]
    fn free_plainly(&self, cell: &HeapCell, state: &mut HeapState, slot: Slot) -> u64 {
        let HeapState { heap, counters, .. } = state;
        let done = heap.put_back(slot, |kind| counters.account(kind));
        if counters.freed(&done, done.inactive, false) {
            self.ledger.park(cell.number, done.kind, counters, &self.heaps);
        }
        done.requested_bytes
    }

    /// Frees a block under any policy. Returns its requested bytes.
    #[inline(never)]
    fn free_by_policy(&self, cell: &HeapCell, state: &mut HeapState, slot: Slot) -> u64 {
        let HeapState { heap, counters, policy, .. } = state;
        let done = heap.free(slot, self.now());
        let parts = counters.count_parts(done.kind, done.inactive);
        if counters.freed(&done, parts, policy.is_oversize(done.size_bytes)) {
            self.ledger.list(cell.number, done.kind, counters, &self.heaps);
        }
        done.requested_bytes
    }

    /// Records a free. The timestamp is taken under the heap's lock. The stack, if one is recorded, is
    /// collected after the heap is unlocked.
    #[cold]
    #[inline(never)]
    fn record_freed(
        &self,
        cell: &HeapCell,
        state: HeapGuard<'_>,
        address: u64,
        requested_bytes: u64,
    ) {
        let Some(moment) = self.history.moment() else { return };
        if self.history.is_plain(StackLevel::OfFrees) {
            self.push_freed(moment, cell, address, requested_bytes);
            drop(state);
            self.history.release();
            return;
        }
        let late = self.history.late();
        drop(state);
        let _context = self.history.of_free();
        self.push_freed(moment, cell, address, requested_bytes);
        // Before `_context` is dropped: that calls trackers, which may take snapshots.
        drop(late);
    }

    fn push_freed(&self, moment: Moment, cell: &HeapCell, address: u64, requested_bytes: u64) {
        let event = |action| event(action, address, requested_bytes, cell);
        let (requested, completed) = (event(Action::FreeRequested), event(Action::FreeCompleted));
        let events = [(moment, requested), (moment.next(), completed)];
        self.history.push_all(cell.number.into(), &events);
    }

    /// Counts one completed event of a draining block, and makes the block free if it was the last.
    #[inline]
    pub(super) fn complete(&self, cell: &HeapCell, slot: Slot) {
        let mut state = cell.lock();
        let HeapState { heap, counters, .. } = &mut *state;
        if !heap.event_passed(slot) {
            return;
        }
        let address = heap.view(slot).address;
        let done = heap.complete(slot, self.now());
        if counters.drained(&done) {
            self.ledger.list(cell.number, done.kind, counters, &self.heaps);
        }
        self.record(Action::FreeCompleted, address, done.requested_bytes, cell);
    }

    pub(super) fn record_use(
        &self,
        cell: &HeapCell,
        address: u64,
        stream: StreamId,
        id: Option<BlockId>,
    ) -> Result<(), HandleError> {
        // False for a stream outside of all captures, because its work runs now.
        let captured = self.scopes.any_capture() && self.is_capturing(stream);
        let mut state = cell.lock();
        let slot = live(&state.heap, address, id).ok_or(HandleError::Stale { address })?;
        if stream != cell.stream() {
            state.heap.record_use(slot, StreamUse { stream, captured });
        }
        Ok(())
    }

    /// Returns the heap of a stream in the default pool. Adds it if there is none.
    pub(super) fn add_heap(
        &self,
        stream: StreamId,
        is_per_thread: bool,
    ) -> Result<&HeapCell, AllocError> {
        let growth = self.growth.lock();
        let known = match is_per_thread {
            true => self.heaps.find_per_thread(stream),
            false => self.heaps.find(stream),
        };
        if let Some(cell) = known {
            return Ok(cell);
        }
        let policy = growth.policy_of(PoolId::DEFAULT);
        let state = HeapState::new(self.addresses.is_kept(), policy);
        self.heaps.add_for_stream(stream, is_per_thread, state)
    }

    pub(super) fn apply_policy_to_heaps(&self, growth: &Growth) {
        for cell in self.heaps.all() {
            cell.lock().set_policy(growth.policy_of(cell.pool()));
        }
    }

    /// Returns the garbage collector's clock, which is the birth time of blocks that become free now.
    #[inline]
    pub(super) fn now(&self) -> u64 {
        self.clock.load(Ordering::Relaxed)
    }

    #[inline]
    pub(super) fn record(&self, action: Action, address: u64, size_bytes: u64, cell: &HeapCell) {
        self.history.record(cell.number.into(), || event(action, address, size_bytes, cell));
    }
}

/// Returns the live block at `address`. If `id` is given, it must match.
#[inline]
pub(super) fn live(heap: &Heap, address: u64, id: Option<BlockId>) -> Option<Slot> {
    match id {
        Some(id) => heap.live(id, address),
        None => heap.live_at(address),
    }
}

pub(super) fn event(action: Action, address: u64, size_bytes: u64, cell: &HeapCell) -> Event {
    Event { action, address, size_bytes, stream: cell.stream(), pool: cell.pool() }
}

/// Refuses requests of zero bytes and of more than [`REQUEST_MAX_BYTES`].
#[inline]
pub(super) fn check_size(bytes: u64) -> Result<(), AllocError> {
    if is_valid_size(bytes) { Ok(()) } else { Err(AllocError::of_size(bytes)) }
}

/// Returns true if `bytes` is neither 0 nor above [`REQUEST_MAX_BYTES`], which is a power of two.
#[inline(always)]
const fn is_valid_size(bytes: u64) -> bool {
    bytes.wrapping_sub(1) >> REQUEST_MAX_BYTES.trailing_zeros() == 0
}
