//! Allocators that are wrong in one way each; the suite must say which.

use stratalloc::conformance::{
    Device, Failure, Options, Outcome, Property, constructor, run, test,
};
use stratalloc::layers::statistics::statistics;
use stratalloc::registry::Constructed;
use stratalloc::stats::{Counter, PerPool};

use super::bent::{Bend, bent};
use super::toy::{Defect, misstating, toy};
use crate::common::prelude::*;

/// Changes what an allocator tells.
type Misstate = fn(&mut Statistics);

/// What the suite says of a defect on the simulated device.
fn caught(defect: Defect, by: Property) -> Failure {
    caught_on(Device::Sim, defect, by)
}

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

#[test]
fn two_live_blocks_in_one_place_are_caught_in_four_operations() {
    let failure = caught(Defect::Overlaps, Property::LiveBlocksNeverOverlap);
    assert!(failure.what.contains("overlaps block"), "{failure}");
    assert_eq!(failure.lines.len(), 4, "allocate, free, allocate, allocate: {failure}");
}

#[test]
fn reuse_while_another_stream_works_is_caught() {
    let failure = caught(Defect::ReusesEarly, Property::ReuseWaitsForWork);
    assert_eq!(failure.lines.len(), 4, "allocate, use, free, allocate: {failure}");
}

#[test]
fn reuse_by_another_stream_is_caught() {
    let failure = caught(Defect::MixesStreams, Property::ReuseWaitsForWork);
    assert_eq!(failure.lines.len(), 3, "allocate, free, allocate: {failure}");
}

#[test]
fn a_block_that_is_lost_is_caught() {
    let failure = caught(Defect::LosesABlock, Property::EverythingIsGivenBack);
    assert!(failure.what.contains("still held"), "{failure}");
}

#[test]
fn counters_that_forget_are_caught() {
    caught(Defect::CountsWrong, Property::CountersEqualARecount);
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
        (|s| times(&mut s.reserved_bytes, 3), "the driver gave out"),
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
    let failure = failure.expect_err("three for ever");
    assert!(failure.what.contains("num_alloc_retries after all resets is 3"), "{failure}");
}

/// All numbers of a family so many times as high.
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

#[test]
fn a_handle_that_is_taken_twice_is_caught() {
    let failure = caught(Defect::FreesTwice, Property::WrongHandlesAreRefused);
    assert_eq!(failure.lines.len(), 3, "allocate, free, free: {failure}");
}

#[test]
fn a_foreign_handle_that_is_taken_is_caught() {
    let failure = caught(Defect::FreesForeign, Property::WrongHandlesAreRefused);
    assert_eq!(failure.lines.len(), 2, "allocate, free: {failure}");
}

#[test]
fn a_block_that_is_too_small_is_caught_with_its_size() {
    let failure = caught(Defect::TooSmall, Property::BlocksAreAsLargeAsAsked);
    assert_eq!(failure.lines.len(), 1, "{failure}");
}

#[test]
fn a_panic_on_zero_bytes_is_caught_with_its_words() {
    let failure = caught(Defect::PanicsOnZero, Property::IllegalRequestsAreRefused);
    assert!(failure.what.contains("nobody asks for nothing"), "{failure}");
    assert_eq!(failure.lines, ["allocate 0 bytes"]);
}

#[test]
fn an_allocator_that_ignores_where_a_block_must_lie_is_caught() {
    let failure = caught(Defect::IgnoresPlaces, Property::IllegalRequestsAreRefused);
    assert!(failure.what.contains("which nobody made"), "{failure}");
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
fn a_write_into_somebody_elses_block_is_caught() {
    let failure = caught_on(Device::Host, Defect::Scribbles, Property::BytesStayIntact);
    assert!(failure.what.contains("not intact"), "{failure}");
    assert_eq!(failure.lines.len(), 2, "allocate, allocate: {failure}");
}

#[test]
fn a_block_that_is_lost_when_the_driver_fails_is_caught_with_the_call() {
    let failure = caught(Defect::LeaksOnFailure, Property::DriverFailuresLoseNothing);
    assert!(failure.what.contains("driver call"), "{failure}");
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
        assert!(failure.what.contains(" at 0x7"), "addresses look as in the lines: {failure}");
    }
}

#[test]
fn threads_that_get_the_same_block_are_caught() {
    let failure = caught(Defect::Races, Property::ThreadsGetBlocksOfTheirOwn);
    assert!(failure.what.contains("while another thread holds"), "{failure}");
}

#[test]
fn an_error_without_numbers_is_caught() {
    let failure = caught(Defect::MuteOutOfMemory, Property::RunningOutIsAnError);
    assert!(failure.what.contains("speaks of 0 bytes"), "{failure}");
}

#[test]
fn idle_memory_that_keeps_a_larger_block_away_is_caught() {
    let failure = caught(Defect::KeepsIdle, Property::RunningOutIsAnError);
    assert!(failure.what.contains("do not fit"), "{failure}");
}

#[test]
fn capabilities_that_are_offered_and_do_nothing_are_caught() {
    for (bend, by, what) in [
        (Bend::TakesNoLimit, Property::LimitsAreRespected, "reserved under a limit"),
        (Bend::TakesAnyFraction, Property::LimitsAreRespected, "a fraction"),
        (Bend::EmptiesNothing, Property::EmptyingTheCacheKeepsLiveBlocks, "bytes are reserved"),
        (Bend::FreesAnyAddress, Property::BareAddressesAreChecked, "free_raw took"),
        (Bend::CallsNobody, Property::PressureHooksAreCalled, "no callback"),
        (Bend::HasOnePool, Property::PrivatePoolsAreApart, "says that its live blocks"),
        (Bend::RoutesNobody, Property::PrivatePoolsAreApart, "says that its live blocks"),
        (Bend::RoutesEverybody, Property::PrivatePoolsAreApart, "says that its live blocks"),
        (Bend::EndsNoPool, Property::PrivatePoolsAreApart, "should have Some(2) users"),
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
        assert!(matches!(found, Ok(Outcome::Held { .. })), "{found:?}");
    }
}

/// The layer counts what callers hold, not what is reserved below it.
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
fn an_allocator_that_serves_nobody_does_not_slip_through() {
    let failure = caught(Defect::ServesNobody, Property::RunningOutIsAnError);
    assert!(failure.what.contains("do not fit"), "{failure}");
}

#[test]
fn no_scripts_at_all_are_taken_for_one() {
    let options = Options { scripts: 0, longest: 0, device_bytes: 0, seed: u64::MAX };
    let build = toy(Defect::None);
    let held = test("toy", &build, Property::LiveBlocksNeverOverlap, Device::Sim, &options);
    assert_eq!(held, Ok(Outcome::Held { runs: 1 }));
}
