//! Allocators that are wrong in one way each; the suite must say which.

use stratalloc::conformance::{Device, Failure, Options, Property, run, test};

use super::toy::{Defect, toy};

/// What the suite says of a defect on the simulated device.
fn caught(defect: Defect, by: Property) -> Failure {
    let name = format!("{defect:?}");
    let found = test(&name, &toy(defect), by, Device::Sim, &Options::default());
    let failure = found.expect_err("it is broken");
    assert_eq!((failure.property, failure.device), (by, Device::Sim));
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
