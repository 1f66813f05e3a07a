//! Heaps with their locks, and how a stream or a token finds its heap without one.
//!
//! Cells are added and never removed, so finding one is a walk over `OnceLock`s. By stream: buckets
//! of short chains. By number: rows of 256.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, MutexGuard};

use super::policy::HitPolicy;
use crate::heap::Heap;
use crate::ids::StreamId;
use crate::stats::{HeapCounters, Heaps};

/// The most streams an allocator keeps heaps for.
pub(super) const CELLS_MAX: usize = 1 << 16;
const BUCKETS: usize = 256;
const ROW_CELLS: usize = 256;
const ROWS: usize = CELLS_MAX / ROW_CELLS;

/// One heap, its counters and its copy of the policy, under one lock.
#[derive(Debug)]
pub(super) struct HeapState {
    pub(super) heap: Heap,
    pub(super) counters: HeapCounters,
    pub(super) policy: HitPolicy,
}

/// A heap that can be shared. Alone on its cache lines.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct HeapCell {
    state: Mutex<HeapState>,
    /// Whether the counters changed since the ledger last visited. Stored under the lock.
    moved: AtomicBool,
    pub(super) stream: StreamId,
    pub(super) number: u32,
}

impl HeapCell {
    #[inline]
    pub(super) fn lock(&self) -> MutexGuard<'_, HeapState> {
        self.state.lock()
    }

    /// Says that the counters changed. The caller holds the lock.
    #[inline]
    pub(super) fn mark_moved(&self) {
        if !self.moved.load(Ordering::Relaxed) {
            self.moved.store(true, Ordering::Relaxed);
        }
    }
}

#[derive(Debug)]
struct Link {
    cell: Arc<HeapCell>,
    next: OnceLock<Box<Link>>,
}

type Row = Box<[OnceLock<Arc<HeapCell>>; ROW_CELLS]>;

/// All heaps of a device.
#[derive(Debug)]
pub(super) struct HeapTable {
    by_stream: [OnceLock<Box<Link>>; BUCKETS],
    by_number: [OnceLock<Row>; ROWS],
    len: AtomicUsize,
}

impl Default for HeapTable {
    fn default() -> Self {
        Self {
            by_stream: [const { OnceLock::new() }; BUCKETS],
            by_number: [const { OnceLock::new() }; ROWS],
            len: AtomicUsize::new(0),
        }
    }
}

impl HeapTable {
    #[inline]
    pub(super) fn find(&self, stream: StreamId) -> Option<&Arc<HeapCell>> {
        let mut at = &self.by_stream[bucket_of(stream)];
        while let Some(link) = at.get() {
            if link.cell.stream == stream {
                return Some(&link.cell);
            }
            at = &link.next;
        }
        None
    }

    #[inline]
    pub(super) fn get(&self, number: u32) -> Option<&Arc<HeapCell>> {
        let number = number as usize;
        self.by_number.get(number / ROW_CELLS)?.get()?[number % ROW_CELLS].get()
    }

    pub(super) fn len(&self) -> usize {
        self.len.load(Ordering::Acquire)
    }

    /// Adds a heap for `stream`, which has none. The caller holds the growth lock and has checked
    /// that there is room.
    pub(super) fn add(&self, stream: StreamId, state: HeapState) -> &Arc<HeapCell> {
        let len = self.len();
        let number = u32::try_from(len).expect("cells are at most 2^16");
        let cell = Arc::new(HeapCell {
            state: Mutex::new(state),
            moved: AtomicBool::new(false),
            stream,
            number,
        });
        let row = self.by_number[len / ROW_CELLS]
            .get_or_init(|| Box::new([const { OnceLock::new() }; ROW_CELLS]));
        row[len % ROW_CELLS].get_or_init(|| Arc::clone(&cell));
        self.len.store(len + 1, Ordering::Release);
        let mut at = &self.by_stream[bucket_of(stream)];
        while let Some(link) = at.get() {
            at = &link.next;
        }
        &at.get_or_init(|| Box::new(Link { cell, next: OnceLock::new() })).cell
    }

    /// All cells in the order of their numbers.
    pub(super) fn all(&self) -> impl Iterator<Item = &Arc<HeapCell>> + '_ {
        (0..self.len()).filter_map(|n| self.get(u32::try_from(n).ok()?))
    }

    /// All cells in the order of their streams' raw values.
    pub(super) fn by_stream(&self) -> Vec<&Arc<HeapCell>> {
        let mut cells: Vec<_> = self.all().collect();
        cells.sort_by_key(|cell| cell.stream);
        cells
    }
}

impl Heaps for HeapTable {
    fn moved(&self, heap: usize) -> bool {
        self.numbered(heap).moved.load(Ordering::Relaxed)
    }

    fn try_visit(&self, heap: usize, visit: &mut dyn FnMut(&mut HeapCounters)) -> bool {
        let cell = self.numbered(heap);
        let Some(mut state) = cell.state.try_lock() else {
            return false;
        };
        visit(&mut state.counters);
        cell.moved.store(false, Ordering::Relaxed);
        true
    }
}

impl HeapTable {
    fn numbered(&self, heap: usize) -> &HeapCell {
        let number = u32::try_from(heap).expect("cells are at most 2^16");
        self.get(number).expect("the ledger numbers heaps as they are added")
    }
}

#[inline]
fn bucket_of(stream: StreamId) -> usize {
    // Handles are addresses: their low bits are equal.
    let hash = stream.0.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56;
    usize::try_from(hash).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Settings;

    #[test]
    fn every_stream_finds_its_heap_by_stream_and_by_number() {
        let table = HeapTable::default();
        for n in 0..1000u64 {
            let policy = HitPolicy::new(&Settings::default(), false);
            let state =
                HeapState { heap: Heap::new(false), counters: HeapCounters::default(), policy };
            assert!(table.find(StreamId(n * 64)).is_none());
            table.add(StreamId(n * 64), state);
        }
        for n in 0..1000u64 {
            let cell = table.find(StreamId(n * 64)).unwrap();
            assert_eq!(table.get(cell.number).unwrap().stream, StreamId(n * 64));
        }
        assert!(table.get(1000).is_none());
        assert!(table.get(u32::MAX).is_none());
        assert!(table.by_stream().windows(2).all(|pair| pair[0].stream < pair[1].stream));
    }
}
