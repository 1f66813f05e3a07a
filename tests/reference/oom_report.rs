//! The report of a failed request: its numbers, and hints that fit the cause.

use stratalloc::error::{FreeRanges, Holder};
use stratalloc::size::RoundupDivisions;

use crate::common::prelude::*;

/// Returns the only hint that contains `words`, or `None`. Panics if there are two.
#[track_caller]
fn hint<'a>(report: &'a OutOfMemory, words: &str) -> Option<&'a str> {
    let mut found = report.hints.iter().filter(|hint| hint.contains(words));
    let first = found.next();
    assert!(found.next().is_none(), "{:?}", report.hints);
    first.map(String::as_str)
}

/// Allocates segments of 20 MiB, each with a live block of `live_mib` at its front and the rest free.
fn pinned_segments(fixture: &Fixture, count: usize, live_mib: u64) -> Vec<Allocation> {
    let both =
        (0..count).map(|_| (fixture.take(live_mib * MIB), fixture.take((19 - live_mib) * MIB)));
    let (front, back): (Vec<_>, Vec<_>) = both.unzip();
    back.into_iter().for_each(|block| fixture.give(block));
    front
}

#[test]
fn a_report_holds_every_number_of_the_moment() {
    let fixture = Fixture::new(128 * MIB, "");
    let _small = fixture.take(1000);
    let _large = fixture.take(50 * MIB);
    let pinned = pinned_segments(&fixture, 1, 9);
    assert_eq!(pinned.len(), 1);
    let draining = fixture.take_on(5 * MIB, SIDE);
    fixture.record(&draining, HOME);
    let report = fixture.fail(60 * MIB + 1, HOME);
    assert_eq!(
        report,
        OutOfMemory {
            device: DeviceId(0),
            stream: HOME,
            pool: PoolId::DEFAULT,
            requested_bytes: 60 * MIB + 1,
            rounded_bytes: 60 * MIB + 512,
            segment_bytes: 62 * MIB,
            device_free_bytes: Some((128 - 2 - 50 - 20 - 20) * MIB),
            device_total_bytes: Some(128 * MIB),
            limit_bytes: None,
            allocated_bytes: 1024 + (50 + 9 + 5) * MIB,
            reserved_bytes: 92 * MIB,
            cached_small_bytes: 2 * MIB - 1024,
            cached_large_bytes: (11 + 15) * MIB,
            cached_private_bytes: 0,
            free: report.free.clone(),
            draining_bytes: 0,
            driver: report.driver.clone(),
            holders: vec![Holder { process: std::process::id(), used_bytes: 92 * MIB }],
            live: Vec::new(),
            configuration: None,
            snapshot: None,
            hints: report.hints.clone(),
        }
    );
    assert!(report.driver.as_ref().unwrap().is_out_of_memory());
    assert_eq!(report.hints, [""; 0], "the device is simply too small");
    let text = report.to_string();
    for words in [
        "out of memory on device 0: tried to allocate 62.00 MiB",
        "for a request of 60.00 MiB (60.00 MiB rounded) on stream 0.",
        "The device has 128.00 MiB in total, of which 36.00 MiB is free.",
        "It holds 92.00 MiB: 64.00 MiB allocated, 26.00 MiB cached in large and 2.00 MiB in small",
        "Free on stream 64: 15.00 MiB, beside a block in use of 5.00 MiB.\n\
         Free on stream 0: 13.00 MiB in 2 ranges, the largest 11.00 MiB, beside 2 blocks in use of ",
        "Driver error: allocate failed",
        "(this one) holds 92.00 MiB of the device.",
    ] {
        assert!(text.contains(words), "no {words:?} in:\n{text}");
    }
    assert!(!text.contains("Hint:") && !text.contains("may reserve"));
    fixture.check();
}

#[test]
fn the_limit_is_blamed_when_the_device_has_room() {
    let fixture = Fixture::new(1024 * MIB, "");
    fixture.caching().set_limit_bytes(Some(100 * MIB));
    let _held = fixture.take(60 * MIB);
    let report = fixture.fail(50 * MIB, HOME);
    assert_eq!(report.limit_bytes, Some(100 * MIB));
    assert_eq!((report.driver.as_ref(), report.device_free_bytes), (None, Some(964 * MIB)));
    let words = hint(&report, "the limit of").unwrap();
    assert!(words.contains("100.00 MiB") && words.contains("964.00 MiB"), "{words}");
    assert_eq!(report.hints.len(), 1);
    assert!(report.to_string().contains("This allocator may reserve 100.00 MiB."));
}

#[test]
fn the_limit_is_not_blamed_when_the_device_is_full_too() {
    let fixture = Fixture::new(100 * MIB, "");
    fixture.caching().set_limit_bytes(Some(100 * MIB));
    let _held = fixture.take(60 * MIB);
    assert_eq!(hint(&fixture.fail(50 * MIB, HOME), "the limit of"), None);
}

#[test]
fn fragmentation_is_blamed_when_the_cache_has_enough_in_pieces() {
    let fixture = Fixture::new(80 * MIB, "");
    let _pinned = pinned_segments(&fixture, 4, 9);
    let report = fixture.fail(30 * MIB, HOME);
    assert_eq!((report.cached_large_bytes, report.allocated_bytes), (44 * MIB, 36 * MIB));
    assert_eq!(report.free[0].largest_bytes, 11 * MIB);
    let words = hint(&report, "cut into pieces").unwrap();
    assert!(words.contains("44.00 MiB"), "{words}");
    assert_eq!(hint(&report, "other streams"), None);
    assert_eq!(hint(&report, "held by others"), None);
}

/// Neither the cached memory nor the device's free memory suffices, but both together do.
#[test]
fn expandable_segments_are_named_when_they_would_join_cached_and_free_memory() {
    let live_after_a_large_one_was_cut = |fixture: &Fixture| {
        fixture.give(fixture.take(400 * MIB));
        [fixture.take(200 * MIB), fixture.take(350 * MIB)]
    };
    let fixture = Fixture::new(1000 * MIB, "");
    let _live = live_after_a_large_one_was_cut(&fixture);
    let report = fixture.fail(300 * MIB, HOME);
    let words = hint(&report, "expandable_segments:True may join").unwrap();
    assert!(
        words.contains("200.00 MiB are cached") && words.contains("250.00 MiB are free"),
        "{words}"
    );
    assert_eq!(report.hints.len(), 1);
    // With the recommended setting the request succeeds.
    let expandable = Settings { expandable_segments: true, ..Settings::default() };
    let fixture = Fixture::with(1000 * MIB, expandable);
    let _live = live_after_a_large_one_was_cut(&fixture);
    let _block = fixture.take(300 * MIB);
    // A limit has the same effect as a full device.
    let fixture = Fixture::new(4000 * MIB, "");
    fixture.caching().set_limit_bytes(Some(1000 * MIB));
    let _live = live_after_a_large_one_was_cut(&fixture);
    let report = fixture.fail(300 * MIB, HOME);
    assert!(hint(&report, "expandable_segments:True may join").is_some());
    let report = fixture.fail(470 * MIB, HOME);
    assert_eq!(hint(&report, "expandable_segments:True may join"), None, "it would not help");
}

#[test]
fn other_streams_are_blamed_when_they_cache_what_is_missing() {
    let fixture = Fixture::new(20 * MIB, "");
    let _pinned = fixture.take_on(2 * MIB, SIDE);
    let report = fixture.fail(12 * MIB, HOME);
    let free = FreeRanges {
        stream: SIDE,
        pool: PoolId::DEFAULT,
        bytes: 18 * MIB,
        ranges: 1,
        largest_bytes: 18 * MIB,
        between_blocks: 1,
        between_bytes: 2 * MIB,
    };
    assert_eq!(report.free, [free]);
    let words = hint(&report, "cached for other streams").unwrap();
    assert!(words.contains("18.00 MiB"), "{words}");
    assert_eq!(hint(&report, "cut into pieces"), None, "it is in one piece, elsewhere");
}

#[test]
fn other_holders_of_the_device_are_blamed_when_they_have_what_is_missing() {
    let fixture = Fixture::new(100 * MIB, "");
    fixture.device.allocate(70 * MIB).unwrap();
    let _held = fixture.take(20 * MIB);
    let report = fixture.fail(40 * MIB, HOME);
    assert_eq!((report.reserved_bytes, report.device_free_bytes), (20 * MIB, Some(10 * MIB)));
    let words = hint(&report, "held by others").unwrap();
    assert!(words.contains("70.00 MiB"), "{words}");
    assert_eq!(report.hints.len(), 1);
}

#[test]
fn rounding_is_blamed_when_it_costs_more_than_a_quarter() {
    let roundup = RoundupDivisions::new([2; 16]).unwrap();
    let fixture = Fixture::with(100 * MIB, Settings { roundup, ..Settings::default() });
    let report = fixture.fail(97 * MIB, HOME);
    assert_eq!((report.requested_bytes, report.rounded_bytes), (97 * MIB, 128 * MIB));
    let words = hint(&report, "roundup_power2_divisions").unwrap();
    assert!(words.contains("97.00 MiB") && words.contains("128.00 MiB"), "{words}");
}

// As in PyTorch, a request that is refused in advance does not count as out of memory, and calls neither
// observers nor the device.
#[test]
fn a_request_refused_in_advance_is_neither_counted_nor_reported() {
    let settings = Settings { throw_on_device_oom: true, ..Settings::default() };
    let fixture = Fixture::with(100 * MIB, settings);
    let hooks = fixture.hooks();
    hooks.add_oom_observer(std::sync::Arc::new(|_| panic!("no observer is called")));
    let calls = fixture.device.calls("allocate");
    let report = fixture.fail(101 * MIB, HOME);
    assert!(hint(&report, "throw_on_cudamalloc_oom").is_some());
    assert_eq!(fixture.stats().num_ooms, 0);
    assert_eq!(fixture.device.calls("allocate"), calls);
    fixture.give(fixture.take(100 * MIB));
}
