//! Tests of the heap by example; `order/tests.rs` compares it with a model.

use super::*;
use crate::ids::StreamId;
use crate::size::{MIB, SMALL_SEGMENT_BYTES};

const SEGMENT: u64 = 0x7000_0000;

fn small_heap() -> Heap {
    let mut heap = Heap::new(true, TieRule::Address);
    heap.add_segment(PoolKind::Small, SEGMENT, SMALL_SEGMENT_BYTES, 0);
    heap
}

fn take(heap: &mut Heap, bytes: u64) -> AllocatedBlock {
    let slot = heap.best_fit(PoolKind::Small, bytes, &FitRules::NONE).unwrap();
    heap.allocate(slot, bytes, bytes, &FitRules::NONE, 0)
}

#[test]
fn the_front_is_allocated_and_the_rest_stays_free() {
    let mut heap = small_heap();
    let out = take(&mut heap, 512);
    assert_eq!((out.address, out.size_bytes), (SEGMENT, 512));
    assert_eq!(out.inactive, SplitChange { count: 1, bytes: 2 * 1024 * 1024 - 512 });
    let second = take(&mut heap, 1024);
    assert_eq!(second.address, SEGMENT + 512);
    assert_eq!(second.inactive, SplitChange { count: 0, bytes: -1024 });
    assert_eq!(heap.check(), Ok(()));
}

#[test]
fn equal_holes_are_taken_from_the_lowest_address() {
    let mut heap = small_heap();
    let blocks: Vec<_> = (0..9).map(|_| take(&mut heap, 512)).collect();
    for i in [5, 1, 7, 3] {
        heap.free(blocks[i].slot, 0);
    }
    let again: Vec<_> = (0..4).map(|_| take(&mut heap, 512).address).collect();
    assert_eq!(again, [1, 3, 5, 7].map(|i| SEGMENT + i * 512));
}

#[test]
fn a_freed_block_is_joined_with_both_neighbours() {
    let mut heap = small_heap();
    heap.keep_births();
    let blocks: Vec<_> = (0..3).map(|_| take(&mut heap, 512)).collect();
    heap.free(blocks[0].slot, 0);
    heap.free(blocks[2].slot, 0);
    let done = heap.free(blocks[1].slot, 7);
    assert_eq!(done.inactive, SplitChange { count: -2, bytes: -(2 * 1024 * 1024 - 512) });
    let (slot, whole) = heap.free_blocks(PoolKind::Small).next().unwrap();
    assert_eq!((whole.size_bytes, whole.is_split, whole.birth), (SMALL_SEGMENT_BYTES, false, 7));
    assert_eq!(heap.remove_segment(slot).address, SEGMENT);
    assert_eq!((heap.block_count(), heap.check()), (0, Ok(())));
}

#[test]
fn an_id_is_stale_after_its_block_was_freed_even_when_the_slot_lives_again() {
    let mut heap = small_heap();
    let out = take(&mut heap, 512);
    let id = heap.id(out.slot);
    assert_eq!(heap.live(id, out.address), Some(out.slot));
    heap.free(out.slot, 0);
    assert_eq!(heap.live(id, out.address), None);
    let again = take(&mut heap, 512);
    assert_eq!(again.address, out.address);
    assert_eq!(heap.live(id, out.address), None);
    for index in [id.index + 1, u32::MAX] {
        let forged = BlockId { index, ..heap.id(again.slot) };
        assert_eq!(heap.live(forged, again.address), None);
    }
}

#[test]
fn large_rests_of_one_mebibyte_are_not_cut_off() {
    for (segment, pieces) in [(3 * MIB, 1), (3 * MIB + 512, 2)] {
        let mut heap = Heap::new(false, TieRule::Address);
        let slot = heap.add_segment(PoolKind::Large, SEGMENT, segment, 0);
        heap.allocate(slot, 2 * MIB, 2 * MIB, &FitRules::NONE, 0);
        assert_eq!(heap.block_count(), pieces);
    }
}

#[test]
fn oversize_blocks_serve_oversize_requests_of_about_their_size() {
    let rules =
        FitRules { max_split_bytes: 32 * MIB, oversize_slack_bytes: 20 * MIB, ..FitRules::NONE };
    let mut heap = Heap::new(false, TieRule::Address);
    heap.add_segment(PoolKind::Large, SEGMENT, 60 * MIB, 0);
    let fit = |bytes| heap.best_fit(PoolKind::Large, bytes, &rules).is_some();
    assert!(!fit(20 * MIB), "too small a request for an oversize block");
    assert!(!fit(40 * MIB), "exactly the slack larger is too large");
    assert!(fit(40 * MIB + 512));
    assert!(!rules.splits(PoolKind::Large, 40 * MIB, 20 * MIB));
}

#[test]
fn a_draining_block_is_free_after_its_last_event_and_joins_nothing_before() {
    let mut heap = small_heap();
    let (first, second) = (take(&mut heap, 512), take(&mut heap, 512));
    let by = |stream, captured| StreamUse { stream: StreamId(stream), captured };
    heap.record_use(first.slot, by(3, true));
    heap.record_use(first.slot, by(4, true));
    heap.record_use(first.slot, by(3, false));
    heap.record_use(first.slot, by(3, true));
    let uses: Vec<_> = heap.uses(first.slot).collect();
    assert_eq!(uses, [by(4, true), by(3, false)], "a use outside a capture outlives it");
    let id = heap.id(first.slot);
    heap.drain(first.slot, 2);
    assert_eq!(heap.live(id, first.address), None);
    heap.free(second.slot, 0);
    assert_eq!(heap.check(), Ok(()));
    assert!(!heap.event_passed(first.slot));
    assert!(heap.event_passed(first.slot));
    heap.complete(first.slot, 0);
    assert_eq!((heap.block_count(), heap.check()), (1, Ok(())));
}

#[test]
fn a_bin_of_several_sizes_that_fills_from_the_back_becomes_a_tree() {
    let mut heap = Heap::new(false, TieRule::Address);
    let all = 0..1_000;
    for i in all.clone().rev() {
        heap.add_segment(PoolKind::Large, SEGMENT + i * 4 * MIB, 2 * MIB, 0);
    }
    assert_eq!(heap.check(), Ok(()));
    assert!(heap.free[1].longest_list() < 10);
    assert!(heap.best_fit(PoolKind::Large, 2 * MIB + 512, &FitRules::NONE).is_none());
    let order: Vec<_> = heap.free_blocks(PoolKind::Large).map(|(_, b)| b.address).collect();
    assert!(order.into_iter().eq(all.map(|i| SEGMENT + i * 4 * MIB)));
}

#[test]
fn many_equal_and_many_different_holes_keep_their_order() {
    let mut heap = Heap::new(true, TieRule::Address);
    for i in 0..40 {
        heap.add_segment(
            PoolKind::Small,
            SEGMENT + i * SMALL_SEGMENT_BYTES,
            SMALL_SEGMENT_BYTES,
            0,
        );
    }
    let sizes = [512, 1024, 512, 2048, 512];
    let blocks: Vec<_> = (0..20_000).map(|i| take(&mut heap, sizes[i % 5])).collect();
    let mut order: Vec<usize> = (0..blocks.len()).step_by(2).collect();
    order.sort_by_key(|i| i.wrapping_mul(2_654_435_761) & 0xFFFF);
    for i in order {
        heap.free(blocks[i].slot, 0);
    }
    assert_eq!(heap.check(), Ok(()));
    let metadata = heap.metadata_bytes() - 2 * size_of::<FreeIndex>();
    assert!(metadata <= 128 * heap.block_count(), "{metadata} for {}", heap.block_count());
}

#[test]
fn any_number_of_streams_use_a_block_each_once() {
    let mut heap = small_heap();
    let [first, second] = [(); 2].map(|()| take(&mut heap, 512).slot);
    let by = |n: u64, captured| StreamUse { stream: StreamId(n), captured };
    for round in 0..2 {
        for n in 0..100 {
            // The first use of each even stream is part of a capture only.
            heap.record_use(first, by(n, n % 2 == 0 && round == 0));
            heap.record_use(second, by(n / 10, false));
        }
        let mut uses: Vec<_> = heap.uses(first).map(|by| (by.stream.0, by.captured)).collect();
        uses.sort_unstable();
        assert!(uses.into_iter().eq((0..100).map(|n| (n, n % 2 == 0 && round == 0))));
        assert_eq!(heap.uses(second).count(), 10);
    }
    heap.forget_uses(first);
    assert_eq!(heap.uses(first).count(), 0);
    heap.record_use(first, by(7, true));
    assert!(heap.uses(first).eq([by(7, true)]), "nothing is left of the long list");
    assert_eq!(heap.uses(second).count(), 10);
}
