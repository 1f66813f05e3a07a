//! Which heap an address belongs to, read without a lock. Kept only for callers that know nothing
//! but addresses.
//!
//! A radix tree over granules of 2 MiB. Nodes are added and never removed. A granule that parts of
//! two segments share (drivers need not align segments) is marked, and an ordered map under a lock
//! answers for it.

use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::RwLock;

use crate::size::MIB;

const GRANULE_BYTES: u64 = 2 * MIB;
const LEVEL_BITS: [u32; 4] = [11, 11, 11, 10];
const INNER: usize = 1 << LEVEL_BITS[0];
const LEAF: usize = 1 << LEVEL_BITS[3];
const _: () = assert!(LEVEL_BITS[1] == LEVEL_BITS[0] && LEVEL_BITS[2] == LEVEL_BITS[0]);

/// Leaf values: nobody, ask the map, or a heap's number plus 2.
const NOBODY: u32 = 0;
const SHARED: u32 = 1;
const FIRST_HEAP: u32 = 2;

// Of fixed lengths: a masked index needs no check then.
type Leaf = Box<[AtomicU32; LEAF]>;
type Inner<T> = Box<[OnceLock<T>; INNER]>;

#[derive(Debug)]
pub(super) struct AddressMap {
    root: Inner<Inner<Inner<Leaf>>>,
    /// End and heap of each segment by start. Written under the growth lock.
    segments: RwLock<BTreeMap<u64, (u64, u32)>>,
}

impl Default for AddressMap {
    fn default() -> Self {
        Self { root: inner(), segments: RwLock::default() }
    }
}

fn inner<T>() -> Inner<T> {
    Box::new([const { OnceLock::new() }; INNER])
}

/// The index of each level for a granule.
#[inline]
fn path(granule: u64) -> [usize; 4] {
    let [_, b, c, d] = LEVEL_BITS;
    let part =
        |shift: u32, bits: u32| usize::try_from(granule >> shift & ((1 << bits) - 1)).unwrap_or(0);
    [part(b + c + d, LEVEL_BITS[0]), part(c + d, b), part(d, c), part(0, d)]
}

impl AddressMap {
    /// The number of the heap whose segment holds `address`.
    #[inline]
    pub(super) fn heap_of(&self, address: u64) -> Option<u32> {
        let [a, b, c, d] = path(address / GRANULE_BYTES);
        let leaf = self.root[a].get()?[b].get()?[c].get()?;
        match leaf[d].load(Ordering::Acquire) {
            NOBODY => None,
            SHARED => self.ask_map(address),
            heap => Some(heap - FIRST_HEAP),
        }
    }

    #[cold]
    fn ask_map(&self, address: u64) -> Option<u32> {
        let segments = self.segments.read();
        let (_, &(end, heap)) = segments.range(..=address).next_back()?;
        (address < end).then_some(heap)
    }

    fn leaf_of(&self, granule: u64) -> &AtomicU32 {
        let [a, b, c, d] = path(granule);
        let second = self.root[a].get_or_init(inner);
        let third = second[b].get_or_init(inner);
        let leaf = third[c].get_or_init(|| Box::new([const { AtomicU32::new(NOBODY) }; LEAF]));
        &leaf[d]
    }

    /// Adds a segment. Called under the growth lock.
    pub(super) fn add(&self, start: u64, size_bytes: u64, heap: u32) {
        let mut segments = self.segments.write();
        segments.insert(start, (start + size_bytes, heap));
        for granule in granules(start, size_bytes) {
            self.leaf_of(granule).store(leaf_value(&segments, granule), Ordering::Release);
        }
    }

    /// Removes a segment. Called under the growth lock.
    pub(super) fn remove(&self, start: u64, size_bytes: u64) {
        let mut segments = self.segments.write();
        segments.remove(&start);
        for granule in granules(start, size_bytes) {
            self.leaf_of(granule).store(leaf_value(&segments, granule), Ordering::Release);
        }
    }
}

fn granules(start: u64, size_bytes: u64) -> impl Iterator<Item = u64> {
    start / GRANULE_BYTES..=(start + size_bytes - 1) / GRANULE_BYTES
}

/// What the leaf of a granule says, given all segments.
fn leaf_value(segments: &BTreeMap<u64, (u64, u32)>, granule: u64) -> u32 {
    let (start, end) = (granule * GRANULE_BYTES, (granule + 1) * GRANULE_BYTES);
    let before = segments.range(..start).next_back().filter(|(_, (e, _))| *e > start);
    let mut heaps = before.into_iter().chain(segments.range(start..end)).map(|(_, (_, h))| *h);
    match (heaps.next(), heaps.next()) {
        (None, _) => NOBODY,
        (Some(heap), None) => heap + FIRST_HEAP,
        (Some(_), Some(_)) => SHARED,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_are_found_by_any_address_inside_them() {
        let map = AddressMap::default();
        let base = 0x7f12_3450_0000;
        map.add(base, 20 * MIB, 3);
        map.add(base + 20 * MIB, 2 * MIB, 4);
        for (at, heap) in [(0, 3), (20 * MIB - 1, 3), (20 * MIB, 4), (22 * MIB - 1, 4)] {
            assert_eq!(map.heap_of(base + at), Some(heap));
        }
        map.remove(base, 20 * MIB);
        assert_eq!(map.heap_of(base + MIB), None);
        assert_eq!(map.heap_of(base + 20 * MIB), Some(4));
        assert_eq!(map.heap_of(u64::MAX), None);
        assert_eq!(map.heap_of(0), None);
    }

    #[test]
    fn unaligned_segments_may_share_a_granule() {
        let map = AddressMap::default();
        map.add(512, 1024, 1);
        map.add(4096, 512, 2);
        assert_eq!(map.heap_of(512), Some(1));
        assert_eq!(map.heap_of(4096), Some(2));
        map.remove(512, 1024);
        assert_eq!(map.heap_of(4096), Some(2));
    }
}
