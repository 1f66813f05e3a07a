//! The state under the growth lock: bytes held from the driver, the limit, private pools; and allocating
//! segments.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use hashbrown::HashMap;
use parking_lot::MutexGuard;

use super::cell::HeapCell;
use super::engine::Engine;
use super::expandable::{Leftovers, PageSize, Pages};
use super::policy::{HitPolicy, Plan, reserve_bytes};
use super::pools::Pools;
use crate::allocator::{Allocation, SegmentAllocator};
use crate::config::Settings;
use crate::error::{DriverError, DriverErrorKind};
use crate::history::Action;
use crate::ids::{DeviceId, PoolId, StreamId};
use crate::size::{MIN_BLOCK_BYTES, PoolKind, fraction_of, limit_of_fraction};
use crate::stats::{Counter, PerPool, Statistics};

/// The state that the growth lock protects.
#[derive(Debug)]
pub(super) struct Growth {
    pub(super) settings: Settings,
    device_total_bytes: u64,
    pub(super) limit_bytes: Option<u64>,
    /// The counters of segments, driver calls and failures. The heaps keep those of blocks.
    pub(super) counters: Statistics,
    /// The reserved bytes of private pools.
    pub(super) reserved_by_pool: HashMap<PoolId, PerPool>,
    /// All mapped pages, by address.
    pub(super) pages: Pages,
    /// Memory that the driver failed to release. The release is retried later.
    pub(super) leftovers: Leftovers,
    /// Other devices that may access every page.
    pub(super) peers: Vec<DeviceId>,
    pub(super) pools: Pools,
    /// The class of each stream that has one, for `expandable_segments_reserve_by_class`.
    pub(super) reserve_classes: HashMap<StreamId, String>,
    /// The number of each segment, in the order of allocation, by address.
    pub(super) numbers: BTreeMap<u64, u64>,
    /// Segments that must still be returned to their pools' own allocators.
    pub(super) returns: Vec<Return>,
    /// The number of ranges that are being announced to trackers. The lock is released during that.
    pub(super) announcing: u32,
    /// Bytes that misses and resumes are allocating with the lock released.
    pub(super) in_flight_bytes: u64,
    pub(super) reserved: Arc<Reserved>,
}

/// Bytes held from the driver, for readers without the growth lock.
#[derive(Debug, Default)]
pub(super) struct Reserved {
    now: AtomicI64,
    peak: AtomicI64,
}

impl Reserved {
    /// Stores the current value and the peak of the counter. The caller holds the growth lock.
    pub(super) fn store(&self, counter: Counter) {
        self.now.store(counter.current, Ordering::Relaxed);
        self.peak.store(counter.peak, Ordering::Relaxed);
    }

    /// Returns the current and the peak value.
    pub(super) fn bytes(&self) -> [i64; 2] {
        [&self.now, &self.peak].map(|bytes| bytes.load(Ordering::Relaxed))
    }
}

/// A segment to return to a pool's own allocator.
#[derive(Debug)]
pub(super) struct Return {
    pub(super) to: Arc<dyn SegmentAllocator>,
    pub(super) address: u64,
    pub(super) size_bytes: u64,
    pub(super) stream: StreamId,
}

/// The reason why no segment was allocated.
#[derive(Clone, Debug)]
pub(super) enum Refusal {
    /// The limit was reached.
    Limit,
    /// The driver has not enough memory.
    Driver(DriverError),
    /// `throw_on_cudamalloc_oom` forbids the driver call.
    Forbidden,
    /// An expandable segment reserves less address space than the request needs.
    Reserve {
        reserve_bytes: u64,
        /// The class of the stream, if it determines the reserve.
        class: Option<String>,
    },
}

impl Growth {
    pub(super) fn new(settings: Settings, device_total_bytes: u64) -> Self {
        let limit_bytes =
            limit_of(settings.per_process_memory_fraction, device_total_bytes, &settings);
        let max_split_size =
            settings.max_split_bytes.map_or(-1, |bytes| i64::try_from(bytes).unwrap_or(-1));
        Self {
            settings,
            device_total_bytes,
            limit_bytes,
            counters: Statistics { max_split_size, ..Statistics::default() },
            reserved_by_pool: HashMap::new(),
            pages: Pages::default(),
            leftovers: Leftovers::default(),
            peers: Vec::new(),
            pools: Pools::default(),
            reserve_classes: HashMap::new(),
            numbers: BTreeMap::new(),
            returns: Vec::new(),
            announcing: 0,
            in_flight_bytes: 0,
            reserved: Arc::default(),
        }
    }

    /// Returns true if decisions match PyTorch exactly (`compat:pytorch`). PyTorch differs from the
    /// default in these decisions:
    ///
    /// - It does not search again after it waited for events.
    /// - It empties the cache even for requests that cannot be served at all.
    /// - It keeps free memory of a pool with users.
    /// - It takes no expandable block from a pool with `use_on_oom`.
    /// - It compares the limit with the size of a fixed segment, even for a request that maps pages.
    /// - It maps pages of one size only, even if smaller ones would fit.
    /// - It counts the free blocks of a restored checkpoint as allocated and freed.
    /// - A checkpoint lists the blocks that the pool has lent (`use_on_oom`) as its own.
    /// - Opening a scope looks at no freed block.
    /// - It frees a fixed segment without waiting for work that other devices do on it.
    /// - It applies the rules for oversize blocks to expandable segments too (`HitPolicy`).
    pub(super) fn is_exact(&self) -> bool {
        self.settings.compat.is_pytorch()
    }

    /// Sets the limit to a fraction in [0, 1] of the device. 1 removes it.
    pub(super) fn limit_to_fraction(&mut self, fraction: f64) {
        self.limit_bytes = limit_of(fraction, self.device_total_bytes, &self.settings);
    }

    /// Returns the policy by which heaps of this pool serve hits.
    pub(super) fn policy_of(&self, pool: PoolId) -> HitPolicy {
        let hit = HitPolicy::new(&self.settings, self.limit_bytes.is_some());
        let own =
            self.pools.options_of(pool).map_or(hit, |options| hit.in_pool(options, &self.settings));
        if self.pools.is_awake(pool) { own } else { own.asleep() }
    }

    /// Returns the bytes held from the driver, plus those being requested from it.
    pub(super) fn reserved_bytes(&self) -> u64 {
        self.counters.reserved_bytes.all.current.unsigned_abs().saturating_add(self.in_flight_bytes)
    }

    /// Returns the reason why `segment_bytes` more may not be requested from the driver, if there is
    /// one. Assumes that `released_bytes` are released before.
    pub(super) fn refuses(&self, segment_bytes: u64, released_bytes: u64) -> Option<Refusal> {
        let reserved_bytes = self.reserved_bytes().saturating_sub(released_bytes);
        let after = reserved_bytes.saturating_add(segment_bytes);
        if self.limit_bytes.is_some_and(|limit| after > limit) {
            return Some(Refusal::Limit);
        }
        let Settings { throw_on_device_oom, per_process_memory_fraction, compat, .. } =
            self.settings;
        let total_bytes = self.device_total_bytes;
        let forbidden = throw_on_device_oom
            && after > fraction_of(per_process_memory_fraction, total_bytes, compat.rounding());
        forbidden.then_some(Refusal::Forbidden)
    }

    /// Returns how much address space an expandable segment of a stream reserves, and the class of the
    /// stream if that determines it.
    pub(super) fn reserve_of(&self, stream: StreamId) -> (u64, Option<&str>) {
        let class = self.reserve_classes.get(&stream);
        let known = class.and_then(|class| {
            let classes = &self.settings.expandable_reserve_by_class;
            classes.iter().find(|(name, _)| name == class)
        });
        let (configured, name) = match known {
            Some((name, reserve)) => (Some(*reserve), Some(name.as_str())),
            None => (self.settings.expandable_reserve, None),
        };
        (reserve_bytes(configured, self.device_total_bytes, self.settings.compat.rounding()), name)
    }

    pub(super) fn segment_added(&mut self, pool: PoolId, kind: PoolKind, size_bytes: u64) {
        self.pages_added(pool, kind, size_bytes);
        self.counters.segment.increase(kind, 1);
        if self.is_oversize(size_bytes) {
            self.counters.oversize_segments.increase(1);
        }
    }

    pub(super) fn segment_removed(&mut self, pool: PoolId, kind: PoolKind, size_bytes: u64) {
        self.pages_removed(pool, kind, size_bytes);
        self.counters.segment.decrease(kind, 1);
        if self.is_oversize(size_bytes) {
            self.counters.oversize_segments.decrease(1);
        }
    }

    fn is_oversize(&self, size_bytes: u64) -> bool {
        self.settings.max_split_bytes.is_some_and(|most| size_bytes >= most)
    }

    /// Counts reserved bytes and a driver call. Pages of expandable segments do not count as segments.
    pub(super) fn pages_added(&mut self, pool: PoolId, kind: PoolKind, size_bytes: u64) {
        self.counters.num_device_alloc += 1;
        self.reserve_changes(pool, kind, size_bytes, PerPool::increase);
    }

    /// Counts a page that a resume has mapped, without the driver calls.
    pub(super) fn pages_mapped_again(&mut self, pool: PoolId, kind: PoolKind, size_bytes: u64) {
        self.reserve_changes(pool, kind, size_bytes, PerPool::increase);
    }

    pub(super) fn pages_removed(&mut self, pool: PoolId, kind: PoolKind, size_bytes: u64) {
        self.counters.num_device_free += 1;
        self.reserve_changes(pool, kind, size_bytes, PerPool::decrease);
    }

    /// Counts bytes that a pool allocated from the driver or released to it.
    fn reserve_changes(
        &mut self,
        pool: PoolId,
        kind: PoolKind,
        size_bytes: u64,
        change: fn(&mut PerPool, PoolKind, i64),
    ) {
        let bytes = i64::try_from(size_bytes).expect("segments are below 2^63 bytes");
        change(&mut self.counters.reserved_bytes, kind, bytes);
        if pool != PoolId::DEFAULT {
            change(self.reserved_by_pool.entry(pool).or_default(), kind, bytes);
        }
        self.reserved.store(self.counters.reserved_bytes.all);
    }
}

fn limit_of(fraction: f64, device_total_bytes: u64, settings: &Settings) -> Option<u64> {
    limit_of_fraction(fraction, device_total_bytes, settings.compat.decisions().limit_rounding)
}

impl Engine {
    /// Allocates a fixed segment or maps pages, and serves the request from them. The inner error is the
    /// reason why there is no memory. The outer error is any other failure.
    pub(super) fn grow(
        &self,
        growth: &mut MutexGuard<'_, Growth>,
        cell: &HeapCell,
        plan: &Plan,
    ) -> Result<Result<Allocation, Refusal>, DriverError> {
        // By default only the missing pages count for an expandable segment: `map_pages` compares these.
        if (growth.is_exact() || !plan.expandable)
            && let Some(refusal) = growth.refuses(plan.segment_bytes, 0)
        {
            self.note_refusal(growth, cell, plan.segment_bytes, &refusal);
            return Ok(Err(refusal));
        }
        if plan.expandable {
            return self.grow_expandable(growth, cell, plan, PageSize::Usual);
        }
        let answer = self.take_segment(growth, cell, plan);
        self.note_segment(cell, plan, &answer);
        let address = match answer {
            Ok(address) => address,
            Err(error) if error.is_out_of_memory() => return Ok(Err(Refusal::Driver(error))),
            Err(error) => return Err(error),
        };
        growth.segment_added(cell.pool(), plan.kind, plan.segment_bytes);
        growth.numbers.insert(address, self.history.number_segment());
        self.addresses.add(address, plan.segment_bytes, cell.number);
        self.announce(growth, Action::SegmentAlloc, address, plan.segment_bytes, cell);
        // Recorded after the trackers ran: a snapshot that a tracker takes contains neither the segment
        // nor this entry.
        self.record(Action::SegmentAlloc, address, plan.segment_bytes, cell);
        let mut state = cell.lock();
        let clock = self.now();
        let slot = state.heap.add_segment(plan.kind, address, plan.segment_bytes, clock);
        Ok(Ok(self.allocate_slot(cell, &mut state, slot, plan.rounded_bytes, plan.requested_bytes)))
    }

    /// Allocates a fixed segment from the pool's own allocator or from the driver.
    fn take_segment(
        &self,
        growth: &mut MutexGuard<'_, Growth>,
        cell: &HeapCell,
        plan: &Plan,
    ) -> Result<u64, DriverError> {
        let own = growth.pools.allocator_of(cell.pool());
        let take = || match &own {
            None => self.driver.allocate(plan.segment_bytes),
            Some(own) => take_from(&**own, plan.segment_bytes, cell.stream()),
        };
        if own.is_none() && !growth.settings.release_lock_on_device_allocate {
            return take();
        }
        growth.in_flight_bytes = growth.in_flight_bytes.saturating_add(plan.segment_bytes);
        let result = MutexGuard::unlocked(growth, || catch_unwind(AssertUnwindSafe(take)));
        growth.in_flight_bytes = growth.in_flight_bytes.saturating_sub(plan.segment_bytes);
        result.unwrap_or_else(|panic| resume_unwind(panic))
    }

    /// Returns segments to the pools' own allocators, with no lock held. If one of these panics, the
    /// panic is resumed after all of them were called.
    pub(super) fn return_segments(growth: &mut MutexGuard<'_, Growth>) {
        let returns = std::mem::take(&mut growth.returns);
        if !returns.is_empty() {
            MutexGuard::unlocked(growth, || {
                let mut panicked = None;
                for Return { to, address, size_bytes, stream } in returns {
                    let free = || to.free(address, size_bytes, stream);
                    panicked = panicked.or(catch_unwind(AssertUnwindSafe(free)).err());
                }
                if let Some(panic) = panicked {
                    resume_unwind(panic);
                }
            });
        }
    }
}

/// Allocates a segment from a pool's own allocator, and checks its alignment.
fn take_from(
    own: &dyn SegmentAllocator,
    size_bytes: u64,
    stream: StreamId,
) -> Result<u64, DriverError> {
    let call = "SegmentAllocator::allocate";
    let Some(address) = own.allocate(size_bytes, stream) else {
        let message = format!("the pool's own allocator has no {size_bytes} bytes");
        return Err(DriverError::new(DriverErrorKind::OutOfMemory, call, 0, message));
    };
    let fits = address != 0 && address.checked_add(size_bytes).is_some();
    if fits && address.is_multiple_of(MIN_BLOCK_BYTES) {
        return Ok(address);
    }
    own.free(address, size_bytes, stream);
    let message = format!("the pool's own allocator returned {address:#x}: not aligned to 512");
    Err(DriverError::new(DriverErrorKind::InvalidValue, call, 0, message))
}
