//! Allocators with one defect each. The suite must report that defect.

use stratalloc::layers::statistics::statistics;
use stratalloc::stats::Counter;
use stratalloc_conformance::{Device, Failure, Options, Outcome, Property, constructor, run, test};

use super::bent::{Bend, bent};
use super::toy::{Defect, misstating, toy};
use crate::common::prelude::*;

/// A function that falsifies the counters that an allocator returns.
type Misstate = fn(&mut Statistics);

/// Returns the failure that the suite reports for a defect.
fn caught_on(device: Device, defect: Defect, by: Property) -> Failure {
    let name = format!("{defect:?}");
    let found = test(&name, &toy(defect), by, device, &Options::default());
    let failure = found.expect_err("it is broken");
    assert_eq!((failure.property, failure.device), (by, device));
    println!("{failure}");
    failure
}

#[test]
fn the_same_allocator_without_a_defect_conforms() {
    match run("toy", &toy(Defect::None), &Options::default()) {
        Ok(report) => print!("{report}"),
        Err(failure) => panic!("{failure}"),
    }
}

/// A defect, the property that it breaks, words of the failure, and the shortest sequence that causes
/// it.
type Caught = (Defect, Property, &'static str, Option<&'static str>);

#[test]
fn each_defect_is_caught_with_its_words_and_the_shortest_history() {
    use Property::*;
    let cases: [Caught; 15] = [
        (Defect::Overlaps, LiveBlocksNeverOverlap, "overlaps block", Some("a f a a")),
        (Defect::ReusesEarly, ReuseWaitsForWork, "still uses", Some("a s f a")),
        (Defect::MixesStreams, ReuseWaitsForWork, "still uses", Some("a f a")),
        (Defect::LosesABlock, EverythingIsReleased, "still held", None),
        (Defect::CountsWrong, CountersEqualARecount, "", None),
        (Defect::FreesTwice, WrongHandlesAreRefused, "", Some("a f f")),
        (Defect::FreesForeign, WrongHandlesAreRefused, "", Some("a f")),
        (Defect::TooSmall, BlocksAreLargeEnough, "", Some("a")),
        (Defect::PanicsOnZero, IllegalRequestsAreRefused, "a request has no bytes", Some("a")),
        (Defect::IgnoresPlaces, IllegalRequestsAreRefused, "which was never created", None),
        (Defect::LeaksOnFailure, DriverFailuresLoseNothing, "driver call", None),
        (Defect::Races, ThreadsGetBlocksOfTheirOwn, "while another thread holds", None),
        (Defect::MuteOutOfMemory, RunningOutIsAnError, "reports 0 bytes", None),
        (Defect::KeepsIdle, RunningOutIsAnError, "do not fit", None),
        (Defect::ServesNothing, RunningOutIsAnError, "do not fit", None),
    ];
    for (defect, by, words, history) in cases {
        let failure = caught_on(Device::Sim, defect, by);
        assert!(failure.what.contains(words), "{failure}");
        if let Some(history) = history {
            // The first letter of each line: `allocate`, `stream .. uses` or `free`.
            let letters: Vec<_> = failure.lines.iter().map(|line| &line[..1]).collect();
            assert_eq!(letters.join(" "), history, "{failure}");
        }
    }
}

#[test]
fn counters_that_cannot_be_are_caught_by_name() {
    let misstatements: [(Misstate, &str); 13] = [
        (|s| s.segment.all.current = -7, "segment.all.current is -7"),
        (|s| s.inactive_split_bytes.small.freed = -1, "inactive_split_bytes.small.freed is -1"),
        (|s| s.oversize_segments.allocated = -2, "oversize_segments.allocated is -2"),
        (|s| s.num_sync_all_streams = -1, "num_sync_all_streams is -1"),
        (|s| s.max_split_size = -2, "max_split_size is -2"),
        (|s| s.segment.large.peak = 0, "segment.large.peak is 0 at a current"),
        (|s| s.active.all.peak = 1 << 20, "active.all.peak is 1048576; all that was allocated is"),
        (|s| s.active_bytes.all.freed += 1, "active_bytes.all.current is"),
        (
            |s| s.segment.all.allocated += 1,
            "segment.all.current is 1; 2 allocated less 0 freed are 2",
        ),
        (|s| s.segment.large.freed += 1, "segment.large.current is"),
        (|s| s.segment.small.increase(1), "segment.all.current is 1; large and small have 1 and 1"),
        (|s| times(&mut s.active, 3), "blocks are active"),
        (|s| times(&mut s.reserved_bytes, 3), "the driver provided"),
    ];
    for (misstate, what) in misstatements {
        let by = Property::CountersEqualARecount;
        let build = misstating(misstate);
        let found = test("misstated", &build, by, Device::Sim, &Options::default());
        let failure = found.expect_err(what);
        println!("{failure}");
        assert!(failure.what.contains(what), "{what}: {failure}");
    }
}

#[test]
fn reserved_bytes_below_what_is_active_are_caught() {
    let build = misstating(|s| s.reserved_bytes = s.allocated_bytes);
    let by = Property::CountersEqualARecount;
    let failure = test("idle", &build, by, Device::Sim, &Options::default());
    let failure = failure.expect_err("blocks that wait are not counted");
    assert!(failure.what.contains("bytes are active"), "{failure}");
}

#[test]
fn events_that_are_not_reset_are_caught() {
    let build = misstating(|s| s.num_alloc_retries = 3);
    let by = Property::CountersEqualARecount;
    let failure = test("proud", &build, by, Device::Sim, &Options::default());
    let failure = failure.expect_err("it stays at three");
    assert!(failure.what.contains("num_alloc_retries after all resets is 3"), "{failure}");
}

/// Multiplies all numbers of a family by `n`.
fn times(family: &mut PerPool, n: i64) {
    for counter in [&mut family.all, &mut family.large, &mut family.small] {
        let Counter { current, peak, allocated, freed } = counter;
        [current, peak, allocated, freed].into_iter().for_each(|number| *number *= n);
    }
}

#[test]
fn what_is_not_counted_is_not_judged() {
    let misstatements: [Misstate; 3] = [
        |s| s.reserved_bytes = PerPool::default(),
        |s| (s.segment, s.active) = (PerPool::default(), PerPool::default()),
        |s| s.num_ooms = 0,
    ];
    for misstate in misstatements {
        let by = Property::CountersEqualARecount;
        let found = test("silent", &misstating(misstate), by, Device::Sim, &Options::default());
        assert!(found.is_ok(), "{found:?}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn work_that_really_runs_shows_reuse_that_is_too_early() {
    for defect in [Defect::ReusesEarly, Defect::MixesStreams] {
        caught_on(Device::Host, defect, Property::ReuseWaitsForWork);
        let failure = caught_on(Device::Host, defect, Property::BytesStayIntact);
        assert!(failure.what.contains("not intact"), "{failure}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_write_into_another_block_is_caught() {
    let failure = caught_on(Device::Host, Defect::Scribbles, Property::BytesStayIntact);
    assert!(failure.what.contains("not intact"), "{failure}");
    assert_eq!(failure.lines.len(), 2, "allocate, allocate: {failure}");
}

#[test]
fn idle_blocks_that_are_lost_when_the_driver_does_not_take_one_back_are_caught() {
    for seed in [1, 1000, 2000, 3000] {
        let options = Options { seed, ..Options::default() };
        let by = Property::DriverFailuresLoseNothing;
        let found = test("forgetful", &toy(Defect::ForgetsTheRest), by, Device::Sim, &options);
        let failure = found.expect_err("it is broken");
        println!("{failure}");
        assert!(failure.what.contains("still held"), "{failure}");
        assert!(
            failure.what.contains(" at 0x7"),
            "addresses have the format of the lines: {failure}"
        );
    }
}

#[test]
fn capabilities_that_are_offered_and_do_nothing_are_caught() {
    for (bend, by, what) in [
        (Bend::TakesNoLimit, Property::LimitsAreRespected, "reserved under a limit"),
        (Bend::TakesAnyFraction, Property::LimitsAreRespected, "a fraction"),
        (Bend::EmptiesNothing, Property::EmptyingTheCacheKeepsLiveBlocks, "bytes are reserved"),
        (Bend::FreesAnyAddress, Property::BareAddressesAreChecked, "free_raw took"),
        (Bend::CallsNoHook, Property::PressureHooksAreCalled, "no free-memory callback"),
        (Bend::HasOnePool, Property::PrivatePoolsAreApart, "to allocate in it was not refused"),
        (Bend::RoutesNothing, Property::PrivatePoolsAreApart, "lists its live blocks"),
        (Bend::RoutesEverything, Property::PrivatePoolsAreApart, "lists its live blocks"),
        (Bend::EndsNoPool, Property::PrivatePoolsAreApart, "should have Some(3) users"),
    ] {
        for counts in [true, false] {
            let name = format!("{bend:?}, counts: {counts}");
            let found = test(&name, &bent(bend, counts), by, Device::Sim, &Options::default());
            let failure = found.expect_err("it is broken");
            assert!(failure.what.contains(what), "{failure}");
        }
    }
}

#[test]
fn a_cache_without_counters_is_judged_by_the_device() {
    for by in [
        Property::LimitsAreRespected,
        Property::EmptyingTheCacheKeepsLiveBlocks,
        Property::PrivatePoolsAreApart,
    ] {
        let whole = bent(Bend::Nothing, false);
        let found = test("whole", &whole, by, Device::Sim, &Options::default());
        assert!(matches!(found, Ok(Outcome::Passed { .. })), "{found:?}");
    }
}

/// The `statistics` layer counts the blocks of callers, but not the memory reserved below it.
#[test]
fn a_cache_below_a_layer_that_counts_is_judged_by_the_device() {
    for (bend, holds) in [(Bend::Nothing, true), (Bend::EmptiesNothing, false)] {
        let uncounted = bent(bend, false);
        let counting = |driver| -> Constructed { Ok(Box::new(statistics(uncounted(driver)?))) };
        let by = Property::EmptyingTheCacheKeepsLiveBlocks;
        let found = test("counting", &constructor(counting), by, Device::Sim, &Options::default());
        assert_eq!(found.is_ok(), holds, "{found:?}");
    }
}

#[test]
fn no_scripts_at_all_are_taken_for_one() {
    let options = Options { scripts: 0, longest: 0, device_bytes: 0, seed: u64::MAX };
    let build = toy(Defect::None);
    let held = test("toy", &build, Property::LiveBlocksNeverOverlap, Device::Sim, &options);
    assert_eq!(held, Ok(Outcome::Passed { runs: 1 }));
}

#[test]
fn a_history_of_a_tests_own_operations_is_shortened_until_no_part_can_go() {
    let large = |ops: &[u8]| ops.iter().filter(|op| **op > 9).count();
    let failed = std::panic::catch_unwind(|| {
        histories(10, 50, |ops| if large(ops) < 2 { Ok(()) } else { Err("two".to_owned()) });
    });
    let text = failed.expect_err("it fails").downcast::<String>().expect("in words");
    assert_eq!(*text, "two\nafter:\n  10,\n  10");
}
