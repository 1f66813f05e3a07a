//! Maps an address to the heap it belongs to, for callers that free by address. Most reads need no lock.
//!
//! A table of two levels over granules of 2 MiB, for addresses below 2^48. Leaves are added and never
//! removed. Drivers need not align segments, so two segments may share a granule. Such granules are
//! marked, and an ordered map under a lock resolves them, as it does higher addresses.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::RwLock;

use crate::size::MIB;
use crate::sync::OnceArc;

const GRANULE_BYTES: u64 = 2 * MIB;
/// A leaf covers 16 GiB, the root 256 TiB.
const LEAF: usize = 1 << 13;
const ROOT: usize = 1 << 14;

/// Leaf values: no heap, look in the map, or the number of a heap plus 2.
const NO_HEAP: u32 = 0;
const SHARED: u32 = 1;
const FIRST_HEAP: u32 = 2;

// A fixed length: an index taken modulo the length then needs no bounds check.
type Leaf = [AtomicU32; LEAF];

#[derive(Debug)]
pub(super) struct AddressMap {
    /// `None` if addresses are not kept.
    root: Option<Box<[OnceArc<Leaf>]>>,
    /// End and heap of each segment, by start. Written under the growth lock.
    segments: RwLock<BTreeMap<u64, (u64, u32)>>,
}

/// Returns the index of a granule in the root and in its leaf. The highest granules are beyond the root.
#[inline]
fn path(granule: u64) -> (usize, usize) {
    let granule = usize::try_from(granule).unwrap_or(usize::MAX);
    (granule / LEAF, granule % LEAF)
}

impl AddressMap {
    pub(super) fn new(is_kept: bool) -> Self {
        let root = is_kept.then(|| (0..ROOT).map(|_| OnceArc::new()).collect());
        Self { root, segments: RwLock::default() }
    }

    #[inline]
    pub(super) fn is_kept(&self) -> bool {
        self.root.is_some()
    }

    /// Returns the number of the heap whose segment contains `address`. If one segment alone overlaps the
    /// granule of `address`, returns its heap even if it does not contain `address`.
    #[inline]
    pub(super) fn heap_of(&self, address: u64) -> Option<u32> {
        let (leaf, at) = path(address / GRANULE_BYTES);
        let Some(leaf) = self.root.as_ref()?.get(leaf) else { return self.find_in_map(address) };
        let value = leaf.get()?[at].load(Ordering::Acquire);
        // A single comparison in the common case.
        match value.checked_sub(FIRST_HEAP) {
            Some(heap) => Some(heap),
            None if value == SHARED => self.find_in_map(address),
            None => None,
        }
    }

    #[cold]
    fn find_in_map(&self, address: u64) -> Option<u32> {
        let segments = self.segments.read();
        let (_, &(end, heap)) = segments.range(..=address).next_back()?;
        (address < end).then_some(heap)
    }

    /// Adds a segment. Called under the growth lock.
    pub(super) fn add(&self, start: u64, size_bytes: u64, heap: u32) {
        self.set(start, size_bytes, Some(heap));
    }

    /// Removes a segment. Called under the growth lock.
    pub(super) fn remove(&self, start: u64, size_bytes: u64) {
        self.set(start, size_bytes, None);
    }

    fn set(&self, start: u64, size_bytes: u64, heap: Option<u32>) {
        let Some(root) = &self.root else { return };
        let mut segments = self.segments.write();
        let end = start + size_bytes;
        match heap {
            Some(heap) => drop(segments.insert(start, (end, heap))),
            None => drop(segments.remove(&start)),
        }
        let (first, last) = (start / GRANULE_BYTES, (end - 1) / GRANULE_BYTES);
        for granule in first..=last {
            let (leaf, at) = path(granule);
            let Some(leaf) = root.get(leaf) else { return };
            let new = || leaf.set(Arc::new([const { AtomicU32::new(NO_HEAP) }; LEAF]));
            let leaf = leaf.get().unwrap_or_else(new);
            // Only at its ends can a segment share a granule.
            let value = if granule == first || granule == last {
                leaf_value(&segments, granule)
            } else {
                heap.map_or(NO_HEAP, |heap| heap + FIRST_HEAP)
            };
            leaf[at].store(value, Ordering::Release);
        }
    }
}

/// Returns the leaf value of a granule, given all segments.
fn leaf_value(segments: &BTreeMap<u64, (u64, u32)>, granule: u64) -> u32 {
    let (start, end) = (granule * GRANULE_BYTES, (granule + 1) * GRANULE_BYTES);
    let before = segments.range(..start).next_back().filter(|(_, (e, _))| *e > start);
    let mut heaps = before.into_iter().chain(segments.range(start..end)).map(|(_, (_, h))| *h);
    match (heaps.next(), heaps.next()) {
        (None, _) => NO_HEAP,
        (Some(heap), None) => heap + FIRST_HEAP,
        (Some(_), Some(_)) => SHARED,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_are_found_by_any_address_inside_them() {
        let map = AddressMap::new(true);
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
    fn a_segment_may_lie_in_two_leaves() {
        let map = AddressMap::new(true);
        let border = 5 * LEAF as u64 * GRANULE_BYTES;
        map.add(border - 4 * MIB, 6 * MIB, 7);
        for address in [border - 4 * MIB, border - 1, border, border + 2 * MIB - 1] {
            assert_eq!(map.heap_of(address), Some(7));
        }
        assert_eq!(map.heap_of(border + 2 * MIB), None);
        map.remove(border - 4 * MIB, 6 * MIB);
        assert_eq!([border - 1, border].map(|at| map.heap_of(at)), [None; 2]);
    }

    #[test]
    fn addresses_above_48_bits_are_found_too() {
        let map = AddressMap::new(true);
        // A segment on both sides of the border.
        let (border, highest) = (1 << 48, 0xffff_8000_0000_0000);
        map.add(border - 2 * MIB, 6 * MIB, 1);
        map.add(highest, 2 * MIB, 2);
        for (address, heap) in
            [(border - 1, Some(1)), (border, Some(1)), (border + 4 * MIB - 1, Some(1))]
        {
            assert_eq!(map.heap_of(address), heap);
        }
        assert_eq!(map.heap_of(border + 4 * MIB), None);
        assert_eq!(map.heap_of(highest + MIB), Some(2));
        map.remove(border - 2 * MIB, 6 * MIB);
        assert_eq!([border - 1, border].map(|at| map.heap_of(at)), [None; 2]);
    }

    #[test]
    fn unaligned_segments_may_share_a_granule() {
        let map = AddressMap::new(true);
        map.add(512, 1024, 1);
        map.add(4096, 512, 2);
        assert_eq!(map.heap_of(512), Some(1));
        assert_eq!(map.heap_of(4096), Some(2));
        map.remove(512, 1024);
        assert_eq!(map.heap_of(4096), Some(2));
    }
}
