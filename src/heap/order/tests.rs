//! Tests each rule against a simple model: lists of blocks per segment, and best fit by exhaustive
//! search.

use quickcheck::{Arbitrary, Gen};

use super::*;
use crate::heap::{AllocatedBlock, FitRules, Growing, Reservation};
use crate::size::{MIB, PoolKind, SMALL_SEGMENT_BYTES};

const RULES: [TieRule; 3] = [TieRule::Address, TieRule::SegmentAge, TieRule::BlockAge];
const SMALL: PoolKind = PoolKind::Small;
/// High enough that later segments fit below the first ones.
const SEGMENT: u64 = 0x7000_0000;

fn heap(rule: TieRule, segments: &[u64]) -> Heap {
    let mut heap = Heap::new(true, rule);
    for address in segments {
        heap.add_segment(SMALL, *address, SMALL_SEGMENT_BYTES, 0);
    }
    heap
}

fn take(heap: &mut Heap, bytes: u64) -> AllocatedBlock {
    let slot = heap.best_fit(SMALL, bytes, &FitRules::NONE).unwrap();
    heap.allocate(slot, bytes, bytes, &FitRules::NONE, 0)
}

#[test]
fn the_older_segment_is_taken_first_although_it_lies_higher() {
    let (old, young) = (SEGMENT + SMALL_SEGMENT_BYTES, SEGMENT);
    for (rule, first) in RULES.into_iter().zip([young, old, old]) {
        let mut heap = heap(rule, &[old, young]);
        assert_eq!(take(&mut heap, 512).address, first, "{rule:?}");
    }
}

#[test]
fn a_split_gives_the_front_a_new_number_and_a_join_keeps_the_number_of_the_freed_block() {
    let mut heap = heap(TieRule::BlockAge, &[SEGMENT]);
    // The remainder keeps number 1; the fronts are 2, 3, 4 and 5.
    let blocks: Vec<_> = (0..4).map(|_| take(&mut heap, 512)).collect();
    let keys = |heap: &Heap| -> Vec<u64> {
        let head = heap.chain_heads().next().unwrap();
        heap.chain(head).map(|(slot, _)| heap.slab.get(slot).key).collect()
    };
    assert_eq!(keys(&heap), [2, 3, 4, 5, 1]);
    heap.free(blocks[0].slot, 0);
    heap.free(blocks[1].slot, 0);
    assert_eq!(keys(&heap), [3, 4, 5, 1], "the second was freed, and absorbed the first");
    heap.free(blocks[3].slot, 0);
    assert_eq!(keys(&heap), [3, 4, 5]);
    heap.free(blocks[2].slot, 0);
    assert_eq!(keys(&heap), [4]);
    assert_eq!(heap.check(), Ok(()));
}

#[test]
fn mapped_pages_keep_the_number_of_the_gap_and_the_rest_of_it_is_new() {
    for rule in RULES {
        let mut heap = Heap::new(false, rule);
        let page_bytes = 2 * MIB;
        let (address, size_bytes) = (SEGMENT, 8 * page_bytes);
        heap.add_reservation(Reservation { address, size_bytes, page_bytes, kind: SMALL });
        let start = heap.room_for(SMALL, page_bytes, false).unwrap();
        let before = heap.slab.get(start).key;
        let Some(Growing::Map(run)) = heap.plan_growth(start, 2 * page_bytes) else { panic!() };
        let mapped = heap.mapped(run);
        heap.complete(mapped, 0);
        assert_eq!(heap.slab.get(mapped).key, before, "{rule:?}");
        assert_eq!(heap.check(), Ok(()));
        // Allocates a block in the middle of the first page, then unmaps the second page.
        let out = heap.allocate(mapped, 512, 512, &FitRules::NONE, 0);
        let (rest, _) = heap.free_blocks(SMALL).next().unwrap();
        let age = heap.slab.get(rest).key;
        let pages = heap.whole_pages(rest).unwrap();
        heap.hold(rest);
        let gap = heap.unmapped(pages, 0);
        if rule == TieRule::BlockAge {
            assert_eq!(heap.slab.get(gap).key, age, "the gap keeps the number");
            let (left, _) = heap.free_blocks(SMALL).next().unwrap();
            assert!(heap.slab.get(left).key > age, "what is left before it is new");
        }
        assert_eq!(heap.check(), Ok(()), "{rule:?}");
        heap.free(out.slot, 0);
        assert_eq!(heap.check(), Ok(()), "{rule:?}");
    }
}

#[test]
fn a_segment_that_the_driver_refused_to_release_is_as_old_as_before() {
    for rule in RULES {
        let (old, young) = (SEGMENT + SMALL_SEGMENT_BYTES, SEGMENT);
        let mut heap = heap(rule, &[old, young]);
        let first = heap.best_fit(SMALL, 512, &FitRules::NONE).unwrap();
        let address = heap.view(first).address;
        let segment = heap.remove_segment(first);
        heap.restore_segment(segment);
        assert_eq!(take(&mut heap, 512).address, address, "{rule:?}");
    }
}

#[test]
fn positions_that_run_out_are_assigned_again_in_the_same_order() {
    let at = |n: u64| SEGMENT - n * SMALL_SEGMENT_BYTES;
    let mut heap = heap(TieRule::SegmentAge, &[at(0), at(1)]);
    let held = take(&mut heap, 512);
    heap.order.next = u64::MAX - SMALL_SEGMENT_BYTES / 2;
    heap.add_segment(SMALL, at(2), SMALL_SEGMENT_BYTES, 0);
    assert_eq!(heap.order.next, 3 * SMALL_SEGMENT_BYTES);
    assert_eq!(heap.check(), Ok(()));
    heap.free(held.slot, 0);
    let whole: Vec<_> = heap.free_blocks(SMALL).map(|(_, block)| block.address).collect();
    assert_eq!(whole, [at(0), at(1), at(2)]);
}

#[test]
fn under_a_new_rule_memory_that_is_there_is_as_old_as_its_address_is_low() {
    for (from, to) in RULES.into_iter().flat_map(|from| RULES.map(|to| (from, to))) {
        let mut heap = heap(from, &[SEGMENT + SMALL_SEGMENT_BYTES, SEGMENT]);
        let blocks: Vec<_> = (0..8).map(|_| take(&mut heap, 512)).collect();
        blocks.iter().step_by(2).for_each(|block| {
            heap.free(block.slot, 0);
        });
        heap.set_tie_rule(to);
        assert_eq!(heap.check(), Ok(()), "{from:?} to {to:?}");
        heap.add_segment(SMALL, SEGMENT - SMALL_SEGMENT_BYTES, SMALL_SEGMENT_BYTES, 0);
        if from == to {
            continue;
        }
        let order: Vec<_> =
            heap.free_blocks(SMALL).map(|(_, b)| (b.size_bytes, b.address)).collect();
        let holes = order.iter().filter(|(size, _)| *size == 512).map(|(_, address)| *address);
        assert!(holes.is_sorted(), "{from:?} to {to:?}");
    }
}

/// One step of a random sequence.
#[derive(Clone, Copy, Debug)]
enum Op {
    Take { units: u8 },
    Free { pick: u16 },
    AddSegment { above: bool },
    RemoveIdle,
}

impl Arbitrary for Op {
    fn arbitrary(g: &mut Gen) -> Self {
        match u8::arbitrary(g) % 16 {
            // Mostly a few sizes, for many ties; sometimes any size.
            0..7 => Self::Take { units: u8::arbitrary(g) % 4 + 1 },
            7 => Self::Take { units: u8::arbitrary(g) % 64 + 1 },
            8..14 => Self::Free { pick: u16::arbitrary(g) },
            14 => Self::AddSegment { above: bool::arbitrary(g) },
            _ => Self::RemoveIdle,
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct ModelBlock {
    address: u64,
    size_bytes: u64,
    is_free: bool,
    number: u64,
}

/// Segments in the order of arrival, each with its blocks by address.
#[derive(Default)]
struct Model {
    segments: Vec<Vec<ModelBlock>>,
    numbers: u64,
}

impl Model {
    fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    fn add_segment(&mut self, address: u64) {
        let number = self.number();
        let size_bytes = SMALL_SEGMENT_BYTES;
        self.segments.push(vec![ModelBlock { address, size_bytes, is_free: true, number }]);
    }

    /// Allocates the best block and returns its address.
    fn take(&mut self, rule: TieRule, bytes: u64) -> Option<u64> {
        let blocks = self.segments.iter().enumerate().flat_map(|(age, segment)| {
            segment.iter().enumerate().map(move |(at, block)| (age, at, *block))
        });
        let fits = blocks.filter(|(.., block)| block.is_free && block.size_bytes >= bytes);
        let (age, at, whole) = fits.min_by_key(|(age, _, block)| match rule {
            TieRule::Address => (block.size_bytes, 0, block.address),
            TieRule::SegmentAge => (block.size_bytes, *age as u64, block.address),
            TieRule::BlockAge => (block.size_bytes, block.number, 0),
        })?;
        if whole.size_bytes == bytes {
            self.segments[age][at].is_free = false;
            return Some(whole.address);
        }
        let number = self.number();
        let front = ModelBlock { size_bytes: bytes, is_free: false, number, ..whole };
        let (address, size_bytes) = (whole.address + bytes, whole.size_bytes - bytes);
        self.segments[age][at] = ModelBlock { address, size_bytes, ..whole };
        self.segments[age].insert(at, front);
        Some(whole.address)
    }

    fn free(&mut self, address: u64) {
        let holds = |segment: &&mut Vec<ModelBlock>| segment.iter().any(|b| b.address == address);
        let segment = self.segments.iter_mut().find(holds).unwrap();
        let mut at = segment.iter().position(|block| block.address == address).unwrap();
        segment[at].is_free = true;
        if segment.get(at + 1).is_some_and(|next| next.is_free) {
            segment[at].size_bytes += segment.remove(at + 1).size_bytes;
        }
        if at > 0 && segment[at - 1].is_free {
            let before = segment.remove(at - 1);
            at -= 1;
            segment[at].address = before.address;
            segment[at].size_bytes += before.size_bytes;
        }
    }
}

fn follows(rule: TieRule, ops: &[Op]) {
    let (mut heap, mut model) = (Heap::new(true, rule), Model::default());
    let mut live: Vec<AllocatedBlock> = Vec::new();
    let (mut above, mut below) = (SEGMENT, SEGMENT);
    for op in ops {
        match *op {
            Op::Take { units } => {
                let bytes = u64::from(units) * 512;
                let found = heap.best_fit(SMALL, bytes, &FitRules::NONE);
                let out = found.map(|slot| heap.allocate(slot, bytes, bytes, &FitRules::NONE, 0));
                assert_eq!(out.map(|out| out.address), model.take(rule, bytes));
                live.extend(out);
            }
            Op::Free { pick } if !live.is_empty() => {
                let out = live.swap_remove(pick as usize % live.len());
                assert_eq!(heap.live_at(out.address), Some(out.slot));
                heap.free(out.slot, 0);
                assert_eq!(heap.live_at(out.address), None);
                model.free(out.address);
            }
            Op::Free { .. } => {}
            Op::AddSegment { above: is_above } => {
                below -= if is_above { 0 } else { SMALL_SEGMENT_BYTES };
                let address = if is_above { above } else { below };
                above += if is_above { SMALL_SEGMENT_BYTES } else { 0 };
                heap.add_segment(SMALL, address, SMALL_SEGMENT_BYTES, 0);
                model.add_segment(address);
            }
            Op::RemoveIdle => {
                let idle = heap.free_blocks(SMALL).find(|(_, block)| !block.is_split);
                let Some((slot, _)) = idle else { continue };
                let gone = heap.remove_segment(slot).address;
                model.segments.retain(|segment| segment[0].address != gone);
            }
        }
        heap.check().unwrap_or_else(|broken| panic!("{broken:?}"));
    }
}

quickcheck::quickcheck! {
    fn each_rule_takes_what_a_search_of_all_blocks_takes(ops: Vec<Op>) -> bool {
        RULES.into_iter().for_each(|rule| follows(rule, &ops));
        true
    }
}
