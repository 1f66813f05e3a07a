//! Ages and averages in garbage collection, computed as PyTorch does.
//!
//! A segment's age is the number of searches of the large pool since its last free, counted while a
//! limit and a threshold are set. One pass releases every free segment that is at least as old as the
//! average of the free segments. It does not stop early.

use crate::common::prelude::*;

fn with_threshold(threshold: Option<f64>, limit_bytes: Option<u64>) -> Fixture {
    let settings = Settings { garbage_collection_threshold: threshold, ..Settings::default() };
    let fixture = Fixture::with(GIB, settings);
    fixture.caching().set_limit_bytes(limit_bytes);
    fixture
}

/// Creates segments of 12, 14 and 16 MiB that are freed at searches 4, 6 and 10 of the large pool, and a
/// live segment of `live_mib`. The next search is number 11.
fn aged(fixture: &Fixture, live_mib: u64) {
    let idle = [12, 14, 16].map(|mib| fixture.take(mib * MIB));
    let mut live = fixture.take(live_mib * MIB);
    for (block, searches) in idle.into_iter().zip([2, 4, 0]) {
        fixture.give(block);
        for _ in 0..searches {
            fixture.give(live);
            live = fixture.take(live_mib * MIB);
        }
    }
    assert_eq!(fixture.stats().num_device_alloc, 4, "all other searches were hits");
}

const LIMIT: Option<u64> = Some(120 * MIB);

// 62 MiB are reserved and the threshold is 60 MiB, so 2 must be released. The ages are 7, 5 and 1, on
// average 4.33. Both older segments are released, although the first alone would suffice.
#[test]
fn one_pass_releases_all_segments_at_least_as_old_as_the_average() {
    let fixture = with_threshold(Some(0.5), LIMIT);
    aged(&fixture, 20);
    drop(fixture.take(22 * MIB));
    assert_eq!(fixture.segment_sizes(), [16 * MIB, 20 * MIB, 22 * MIB]);
    fixture.check();
}

// The threshold is 30 MiB, so 32 must be released. The first pass releases 26, the second the segment of 16.
#[test]
fn passes_are_repeated_with_a_new_average_until_enough_was_released() {
    let fixture = with_threshold(Some(0.25), LIMIT);
    aged(&fixture, 20);
    drop(fixture.take(22 * MIB));
    assert_eq!(fixture.segment_sizes(), [20 * MIB, 22 * MIB]);
    fixture.check();
}

// The reserved bytes must exceed the threshold. If they equal it, nothing is collected.
#[test]
fn nothing_is_collected_at_exactly_the_threshold() {
    let fixture = with_threshold(Some(0.5), LIMIT);
    aged(&fixture, 18);
    drop(fixture.take(22 * MIB));
    assert_eq!(fixture.segment_sizes(), [12, 14, 16, 18, 22].map(|mib| mib * MIB));
}

#[test]
fn without_a_limit_or_a_threshold_nothing_is_collected() {
    for (threshold, limit) in [(Some(0.25), None), (None, LIMIT)] {
        let fixture = with_threshold(threshold, limit);
        aged(&fixture, 20);
        drop(fixture.take(22 * MIB));
        assert_eq!(fixture.segment_sizes(), [12, 14, 16, 20, 22].map(|mib| mib * MIB));
    }
}

// Segments of equal age are all at least as old as the average.
#[test]
fn segments_of_equal_age_go_together() {
    let fixture = with_threshold(Some(0.25), LIMIT);
    let idle = [12, 14, 16].map(|mib| fixture.take(mib * MIB));
    idle.into_iter().for_each(|block| fixture.give(block));
    drop(fixture.take(22 * MIB));
    assert_eq!(fixture.segment_sizes(), [22 * MIB]);
}

// Split segments, small segments and live blocks are never collected. A miss in the small pool triggers
// a collection too.
#[test]
fn only_whole_idle_large_segments_are_collected_for_any_request() {
    let fixture = with_threshold(Some(0.1), LIMIT);
    fixture.give(fixture.take(1));
    fixture.give(fixture.take(30 * MIB));
    let piece = fixture.take(11 * MIB);
    fixture.give(fixture.take_on(24 * MIB, SIDE));
    let before = fixture.stats().num_device_alloc;
    // Two blocks of 1 MiB fill the only segment of the small pool, so the third is a miss.
    let small = [fixture.take(MIB), fixture.take(MIB), fixture.take(MIB)];
    assert_eq!(fixture.stats().num_device_alloc, before + 1);
    assert_eq!(
        fixture.segment_sizes(),
        [2 * MIB, 2 * MIB, 30 * MIB],
        "the 24 of the other stream went"
    );
    for block in small {
        fixture.give(block);
    }
    fixture.give(piece);
    fixture.check();
}

// From PyTorch's tests: with a limit of 120 MiB, blocks of 40 MiB on two streams are freed; then 80 MiB
// fit.
#[test]
fn a_large_request_fits_after_the_idle_blocks_of_two_streams_were_collected() {
    let fixture = with_threshold(Some(0.5), LIMIT);
    let blocks = [fixture.take_on(40 * MIB, HOME), fixture.take_on(40 * MIB, SIDE)];
    blocks.into_iter().for_each(|block| fixture.give(block));
    drop(fixture.take(80 * MIB));
    assert_eq!(fixture.stats().num_sync_all_streams, 0, "no pressure was needed");
    fixture.check();
}
