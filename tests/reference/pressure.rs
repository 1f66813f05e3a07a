//! The steps of a miss before the request fails, under the default rules and under PyTorch's.

use super::{rules, signed};
use crate::common::prelude::*;

/// Returns a full device: one segment of 20 MiB, of which 9 MiB are live and 9 MiB drain.
fn full_device_with_a_draining_piece(compat: Compat) -> (Fixture, u64) {
    let fixture = Fixture::with(20 * MIB, rules(compat));
    let (_live, draining) = (fixture.take(9 * MIB), fixture.take(9 * MIB));
    let address = draining.address();
    fixture.record(&draining, SIDE);
    fixture.give(draining);
    (fixture, address)
}

// PyTorch waits for events and then allocates from the device, without searching the pool again.
#[test]
fn what_waiting_for_events_freed_is_found_instead_of_a_false_out_of_memory() {
    let (fixture, address) = full_device_with_a_draining_piece(Compat::Default);
    let found = fixture.take(9 * MIB);
    assert_eq!(found.address(), address);
    let now = fixture.stats();
    assert_eq!((now.num_ooms, now.num_sync_all_streams, now.num_alloc_retries), (0, 1, 0));
    fixture.check();
}

#[test]
fn compat_makes_the_references_false_out_of_memory_and_its_retry_succeeds() {
    let (fixture, address) = full_device_with_a_draining_piece(Compat::PyTorch);
    let report = fixture.fail(9 * MIB, HOME);
    assert_eq!(report.free[0].largest_bytes, 11 * MIB, "enough was free all along");
    let now = fixture.stats();
    assert_eq!((now.num_ooms, now.num_sync_all_streams, now.num_alloc_retries), (1, 1, 1));
    assert_eq!(fixture.take(9 * MIB).address(), address);
    fixture.check();
}

/// Returns an allocator with free segments of 40, 30 and 20 MiB.
fn idle_segments(total_bytes: u64, compat: Compat) -> Fixture {
    let fixture = Fixture::with(total_bytes, rules(compat));
    let blocks = [40, 30, 20].map(|mib| fixture.take(mib * MIB));
    blocks.into_iter().for_each(|block| fixture.give(block));
    assert_eq!(fixture.segment_sizes(), [20 * MIB, 30 * MIB, 40 * MIB]);
    fixture
}

// As in PyTorch, all free segments are released, because keeping some would leave the memory in more
// pieces. A limit has the same effect as a full device.
#[test]
fn pressure_releases_every_idle_segment() {
    for compat in [Compat::Default, Compat::PyTorch] {
        for (total_bytes, limit_bytes) in [(100 * MIB, None), (GIB, Some(100 * MIB))] {
            let fixture = idle_segments(total_bytes, compat);
            fixture.caching().set_limit_bytes(limit_bytes);
            drop(fixture.take(44 * MIB));
            assert_eq!(fixture.segment_sizes(), [44 * MIB]);
            let now = fixture.stats();
            assert_eq!((now.num_device_free, now.num_alloc_retries), (3, 1));
            fixture.check();
        }
    }
}

// PyTorch waits and empties the cache even for requests that can never fit. The default rules do not.
#[test]
fn a_request_larger_than_the_device_leaves_the_cache_alone() {
    for (compat, left, waits) in
        [(Compat::Default, vec![20 * MIB, 30 * MIB, 40 * MIB], 0), (Compat::PyTorch, vec![], 1)]
    {
        let fixture = idle_segments(100 * MIB, compat);
        let report = fixture.fail(102 * MIB, HOME);
        assert_eq!(fixture.segment_sizes(), left);
        assert_eq!(report.reserved_bytes, left.iter().sum::<u64>());
        assert_eq!(fixture.stats().num_sync_all_streams, waits);
        fixture.check();
    }
}

#[test]
fn a_request_larger_than_the_limit_leaves_the_cache_alone() {
    let fixture = idle_segments(100 * MIB, Compat::Default);
    fixture.caching().set_limit_bytes(Some(60 * MIB));
    fixture.fail(62 * MIB, HOME);
    assert_eq!(fixture.segment_sizes(), [20 * MIB, 30 * MIB, 40 * MIB]);
    drop(fixture.take(60 * MIB));
    assert_eq!(fixture.segment_sizes(), [60 * MIB]);
    fixture.check();
}

#[test]
fn idle_segments_of_other_streams_and_of_small_blocks_are_released_too() {
    let fixture = Fixture::new(42 * MIB, "");
    let small = fixture.take(1);
    let (side, here) = (fixture.take_on(20 * MIB, SIDE), fixture.take(20 * MIB));
    for block in [small, side, here] {
        fixture.give(block);
    }
    drop(fixture.take(42 * MIB));
    assert_eq!(fixture.segment_sizes(), [42 * MIB]);
    fixture.check();
}

/// Returns an allocator whose segment of 100 MiB has a live block of 30 and a free one of 70, on a device of
/// 120 MiB. Then sets `max_split_size_mb` to 40.
fn free_piece_that_became_oversize(compat: Compat) -> (Fixture, stratalloc::allocator::Allocation) {
    let fixture = Fixture::with(120 * MIB, rules(compat));
    fixture.give(fixture.take(100 * MIB));
    let live = fixture.take(30 * MIB);
    fixture.apply(Settings { max_split_bytes: Some(40 * MIB), ..rules(compat) });
    (fixture, live)
}

// PyTorch compares only the size, and would release a part of a segment as if it were the whole. This
// library never does that, not even under PyTorch's rules.
#[test]
fn a_free_piece_is_never_released_when_it_becomes_oversize_at_run_time() {
    for compat in [Compat::Default, Compat::PyTorch] {
        let (fixture, live) = free_piece_that_became_oversize(compat);
        fixture.fail(80 * MIB, HOME);
        assert_eq!(fixture.segment_sizes(), [100 * MIB]);
        assert_eq!(fixture.device.calls("free"), 0, "nothing was given to the device");
        fixture.check();
        fixture.give(live);
        // The segment is whole again and too large to be reused for 80 MiB, so it is released.
        drop(fixture.take(80 * MIB));
        assert_eq!(fixture.segment_sizes(), [80 * MIB]);
        fixture.check();
    }
}

#[test]
fn a_free_piece_does_not_hide_the_whole_oversize_segment_behind_it() {
    let fixture = Fixture::new(226 * MIB, "");
    fixture.give(fixture.take(116 * MIB));
    // Leaves a free block of 86 MiB. In the order of sizes, the free segment of 100 MiB comes after it.
    let live = fixture.take(30 * MIB);
    fixture.give(fixture.take(100 * MIB));
    fixture.apply(Settings { max_split_bytes: Some(40 * MIB), ..Settings::default() });
    drop(fixture.take(60 * MIB));
    assert_eq!(fixture.segment_sizes(), [60 * MIB, 116 * MIB]);
    assert_eq!(fixture.stats().num_sync_all_streams, 0, "oversize blocks go before any waiting");
    fixture.give(live);
    fixture.check();
}

// As in PyTorch, an oversize block does not serve a smaller request and is not split. It is reused only
// if it exceeds the request by less than the slack.
#[test]
fn oversize_blocks_are_neither_split_nor_wasted_on_small_requests() {
    let settings = Settings { max_split_bytes: Some(40 * MIB), ..Settings::default() };
    let fixture = Fixture::with(GIB, settings);
    fixture.give(fixture.take(60 * MIB));
    let small = fixture.take(30 * MIB);
    assert_eq!(fixture.segment_sizes(), [30 * MIB, 60 * MIB], "30 MiB do not come from the 60");
    let close = fixture.take(41 * MIB);
    assert_eq!(fixture.segment_sizes(), [30 * MIB, 60 * MIB], "60 < 41 + 20");
    assert_eq!(fixture.stats().allocated_bytes.all.current, signed(90 * MIB), "not split");
    assert_eq!(fixture.stats().oversize_allocations.current, 1);
    fixture.give(close);
    let far = fixture.take(40 * MIB);
    assert_eq!(fixture.segment_sizes(), [30 * MIB, 40 * MIB, 60 * MIB], "60 is not < 40 + 20");
    for block in [small, far] {
        fixture.give(block);
    }
    fixture.check();
}

// From PyTorch's tests: with a limit of 120 MiB and three blocks of 40 on two streams, a fourth block fails.
// After all are freed, one block of 120 MiB fits.
#[test]
fn three_oversize_blocks_fill_a_limit_and_their_space_comes_back_whole() {
    let fixture =
        Fixture::with(GIB, Settings { max_split_bytes: Some(40 * MIB), ..Settings::default() });
    fixture.caching().set_limit_bytes(Some(120 * MIB));
    let blocks = [(HOME, 40), (SIDE, 40), (HOME, 40)].map(|(s, mib)| fixture.take_on(mib * MIB, s));
    fixture.fail(40 * MIB, HOME);
    blocks.into_iter().for_each(|block| fixture.give(block));
    fixture.give(fixture.take(120 * MIB));
    fixture.check();
}
