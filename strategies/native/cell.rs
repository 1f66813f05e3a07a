//! Heaps with their locks, and lock-free lookup of the heap of a stream or a token.
//!
//! A cell is a heap with its lock. Cells are added and never removed, so a lookup needs no lock.
//! The cells of the default pool are found by stream: the first of each of 256 buckets with one load, the
//! others in a table that grows. The cells of all pools are in a table by number, in rows of 256. The
//! empty cells of a removed private pool are reused by other pools; no other cell ever changes its stream.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::policy::HitPolicy;
use crate::allocator::{Allocation, Token};
use crate::error::{AllocError, PoolError};
use crate::heap::{BlockId, Heap};
use crate::ids::{OwnerId, PoolId, StreamId};
use crate::stats::{HeapCounters, Heaps};
use crate::sync::{GrowingMap, OnceArc, ShortGuard, ShortLock};

/// The maximum number of heaps of an allocator.
pub(super) const CELLS_MAX: usize = 1 << 16;
const BUCKETS: usize = 256;
const ROW_CELLS: usize = 256;
const ROWS: usize = CELLS_MAX / ROW_CELLS;
const _: () = assert!(CELLS_MAX <= <GrowingMap<HeapCell>>::VALUES_MAX);

/// One heap, its counters and its copy of the policy, under one lock.
#[derive(Debug)]
pub(super) struct HeapState {
    pub(super) heap: Heap,
    pub(super) counters: HeapCounters,
    pub(super) policy: HitPolicy,
    /// True if a hit needs no special rule of the policy and updates no ages or birth times.
    pub(super) is_plain: bool,
}

impl HeapState {
    pub(super) fn new(raw_addresses: bool, policy: HitPolicy) -> Self {
        let heap = Heap::new(raw_addresses, policy.ties);
        let counters = HeapCounters::default();
        let mut state = Self { heap, counters, policy, is_plain: false };
        state.set_policy(policy);
        state
    }

    /// Applies a policy. Visits every block if the tie rule changes.
    pub(super) fn set_policy(&mut self, policy: HitPolicy) {
        self.heap.set_tie_rule(policy.ties);
        if policy.clock_runs {
            self.heap.keep_births();
        }
        self.policy = policy;
        self.is_plain = policy.is_plain() && !self.heap.order_has_extras();
    }
}

/// The access of the thread that has locked a heap.
pub(super) type HeapGuard<'a> = ShortGuard<'a, HeapState>;

/// The pool and the stream that a heap serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HeapKey {
    pub(super) pool: PoolId,
    pub(super) stream: StreamId,
}

impl HeapKey {
    /// Returns the key for a stream in the default pool.
    pub(super) const fn of(stream: StreamId) -> Self {
        Self { pool: PoolId::DEFAULT, stream }
    }
}

/// A heap and its lock, alone on its cache lines.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct HeapCell {
    state: ShortLock<HeapState>,
    /// `stream` and `pool` form the key. It changes only under the lock and only while the heap is empty.
    stream: AtomicU64,
    pool: [AtomicU64; 2],
    pub(super) number: u32,
    /// The allocator. Stored here, too, because a handle contains it next to the number.
    owner: OwnerId,
}

impl HeapCell {
    #[inline]
    pub(super) fn lock(&self) -> HeapGuard<'_> {
        self.state.lock()
    }

    #[inline]
    pub(super) fn stream(&self) -> StreamId {
        StreamId(self.stream.load(Ordering::Relaxed))
    }

    pub(super) fn pool(&self) -> PoolId {
        let [capture, user] = [0, 1].map(|at: usize| self.pool[at].load(Ordering::Relaxed));
        PoolId { capture, user }
    }

    /// Locks the heap if it still serves `key`: its pool may have been removed since the lookup.
    #[inline]
    pub(super) fn lock_at(&self, key: HeapKey) -> Result<HeapGuard<'_>, PoolError> {
        let state = self.lock();
        let now = HeapKey { pool: self.pool(), stream: self.stream() };
        if now == key { Ok(state) } else { Err(PoolError::Unknown { pool: key.pool }) }
    }

    /// Returns the handle of a block of this heap.
    #[inline(always)]
    pub(super) fn handle_of(&self, address: u64, requested_bytes: u64, id: BlockId) -> Allocation {
        let token = Token([id.index, id.generation, self.number]);
        Allocation::in_halves(address, requested_bytes, self.owner, token)
    }

    /// Moves an empty heap to another pool or stream. The caller holds the growth lock.
    pub(super) fn move_to(&self, key: HeapKey, policy: HitPolicy) {
        let mut state = self.lock();
        debug_assert_eq!(state.heap.block_count(), 0, "only empty heaps move");
        state.set_policy(policy);
        self.stream.store(key.stream.0, Ordering::Relaxed);
        self.pool[0].store(key.pool.capture, Ordering::Relaxed);
        self.pool[1].store(key.pool.user, Ordering::Relaxed);
    }
}

type Row = [OnceArc<HeapCell>; ROW_CELLS];

/// All heaps of a device.
#[derive(Debug)]
pub(super) struct HeapTable {
    owner: OwnerId,
    /// The first heap of the default pool in each bucket.
    first_by_stream: [OnceArc<HeapCell>; BUCKETS],
    /// The other heaps of the default pool, by stream.
    others_by_stream: GrowingMap<HeapCell>,
    /// Heaps of per-thread default streams. They are in neither of the two above, so that a hit need not
    /// check whether its stream is a per-thread default stream.
    per_thread: GrowingMap<HeapCell>,
    /// Heaps by number. Those in `first_row` are found with one step less; `later_rows[0]` stays empty.
    first_row: Row,
    later_rows: [OnceArc<Row>; ROWS],
    len: AtomicUsize,
}

impl HeapTable {
    /// Creates a table without heaps for this allocator.
    pub(super) fn new(owner: OwnerId) -> Self {
        Self {
            owner,
            first_by_stream: empty(),
            others_by_stream: GrowingMap::new(),
            per_thread: GrowingMap::new(),
            first_row: empty(),
            later_rows: empty(),
            len: AtomicUsize::new(0),
        }
    }

    /// Returns the heap of a stream if it is the first one of its bucket.
    #[inline(always)]
    pub(super) fn first_of_bucket(&self, stream: StreamId) -> Option<&HeapCell> {
        self.first_by_stream[bucket_of(stream)].get().filter(|first| first.stream() == stream)
    }

    /// Returns the heap of a stream if it is not the first one of its bucket. May miss a heap that was added
    /// since the last lookup, unless the caller holds the growth lock.
    #[inline]
    pub(super) fn find_behind_first(&self, stream: StreamId) -> Option<&HeapCell> {
        self.others_by_stream.get(stream.0)
    }

    /// Returns the heap of a stream that is not a per-thread default stream. The caller holds the growth
    /// lock.
    pub(super) fn find(&self, stream: StreamId) -> Option<&HeapCell> {
        self.first_of_bucket(stream).or_else(|| self.find_behind_first(stream))
    }

    /// Returns the heap of a per-thread default stream.
    pub(super) fn find_per_thread(&self, stream: StreamId) -> Option<&HeapCell> {
        self.per_thread.get(stream.0)
    }

    #[inline]
    pub(super) fn get(&self, number: u32) -> Option<&HeapCell> {
        let number = number as usize;
        if let Some(first) = self.first_row.get(number) {
            return first.get();
        }
        self.later_rows.get(number / ROW_CELLS)?.get()?[number % ROW_CELLS].get()
    }

    pub(super) fn len(&self) -> usize {
        self.len.load(Ordering::Acquire)
    }

    /// Adds a heap to the table by number. The caller holds the growth lock.
    pub(super) fn add(&self, key: HeapKey, state: HeapState) -> Result<&HeapCell, AllocError> {
        self.add_shared(key, state).map(|(_, place)| place)
    }

    fn add_shared(
        &self,
        key: HeapKey,
        state: HeapState,
    ) -> Result<(Arc<HeapCell>, &HeapCell), AllocError> {
        let len = self.len();
        if len == CELLS_MAX {
            return Err(AllocError::TooManyStreams { stream: key.stream, limit: CELLS_MAX });
        }
        let number = u32::try_from(len).expect("cells are at most 2^16");
        let place = self.first_row.get(len).unwrap_or_else(|| {
            let row = &self.later_rows[len / ROW_CELLS];
            let new = || row.set(Arc::new(empty()));
            &row.get().unwrap_or_else(new)[len % ROW_CELLS]
        });
        let cell = Arc::new(HeapCell {
            state: ShortLock::new(state),
            stream: AtomicU64::new(key.stream.0),
            pool: [key.pool.capture, key.pool.user].map(AtomicU64::new),
            number,
            owner: self.owner,
        });
        let placed = place.set(Arc::clone(&cell));
        self.len.store(len + 1, Ordering::Release);
        Ok((cell, placed))
    }

    /// Adds a heap of the default pool for a stream that has none. The caller holds the growth lock.
    pub(super) fn add_for_stream(
        &self,
        stream: StreamId,
        is_per_thread: bool,
        state: HeapState,
    ) -> Result<&HeapCell, AllocError> {
        let (cell, _) = self.add_shared(HeapKey::of(stream), state)?;
        let first = &self.first_by_stream[bucket_of(stream)];
        Ok(match is_per_thread {
            true => self.per_thread.add(stream.0, cell),
            false if first.get().is_none() => first.set(cell),
            false => self.others_by_stream.add(stream.0, cell),
        })
    }

    /// Returns all cells in the order of their numbers.
    pub(super) fn all(&self) -> impl Iterator<Item = &HeapCell> + '_ {
        (0..self.len()).filter_map(|n| self.get(u32::try_from(n).ok()?))
    }

    /// Returns the cells of the default pool in the order of their streams' raw values.
    pub(super) fn of_default_pool(&self) -> Vec<&HeapCell> {
        let first = self.first_by_stream.iter().filter_map(OnceArc::get);
        let others = self.others_by_stream.values().chain(self.per_thread.values());
        let mut cells: Vec<&HeapCell> = first.chain(others).collect();
        cells.sort_by_key(|cell| cell.stream());
        cells
    }
}

fn empty<T, const N: usize>() -> [OnceArc<T>; N] {
    std::array::from_fn(|_| OnceArc::new())
}

impl Heaps for HeapTable {
    #[inline]
    fn with_counters<R>(&self, heap: u32, read: impl FnOnce(&mut HeapCounters) -> R) -> Option<R> {
        let cell = self.get(heap).expect("the ledger lists heaps that were added");
        Some(read(&mut cell.state.try_lock()?.counters))
    }
}

#[inline]
fn bucket_of(stream: StreamId) -> usize {
    // Stream handles are addresses with equal low bits, so the high bits of a product are used. With this
    // factor 128 handles at any distance of 2^4 to 2^19 bytes have a bucket each.
    let hash = stream.0.wrapping_mul(0xAA78_4E2B_66CE_E669) >> 56;
    usize::try_from(hash).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::config::Settings;

    #[test]
    fn handles_at_equal_distances_have_a_bucket_each() {
        for distance in (4..20).map(|bits| 1u64 << bits) {
            let bucket = |n: u64| bucket_of(StreamId(n * distance));
            assert_eq!((1..=128).map(bucket).collect::<HashSet<_>>().len(), 128, "{distance}");
        }
    }

    fn state() -> HeapState {
        let policy = HitPolicy::new(&Settings::default(), false);
        HeapState::new(false, policy)
    }

    #[test]
    fn every_stream_finds_its_heap_by_stream_and_by_number() {
        let table = HeapTable::new(OwnerId::next());
        for n in 0..1000u64 {
            let stream = StreamId(n * 64);
            assert!(table.find(stream).is_none());
            table.add_for_stream(stream, false, state()).unwrap();
        }
        for n in 0..1000u64 {
            let cell = table.find(StreamId(n * 64)).unwrap();
            assert_eq!(table.get(cell.number).unwrap().stream(), StreamId(n * 64));
        }
        assert!(table.get(1000).is_none());
        assert!(table.get(u32::MAX).is_none());
        let cells = table.of_default_pool();
        assert_eq!(cells.len(), 1000);
        assert!(cells.windows(2).all(|pair| pair[0].stream() < pair[1].stream()));
    }

    #[test]
    fn a_heap_of_a_private_pool_is_found_by_number_only_and_can_move() {
        let table = HeapTable::new(OwnerId::next());
        let stream = StreamId(7);
        let key = |user| HeapKey { pool: PoolId { capture: 0, user }, stream };
        let cell = table.add(key(1), state()).unwrap();
        assert!(table.find(stream).is_none());
        assert!(table.of_default_pool().is_empty());
        assert!(cell.lock_at(key(1)).is_ok());
        let policy = cell.lock().policy;
        cell.move_to(key(2), policy);
        assert!(cell.lock_at(key(1)).is_err());
        assert!(cell.lock_at(key(2)).is_ok());
    }
}
