//! Counters that include the allocators from before and after a switch.

use stratalloc::size::EIB;
use stratalloc::stats::Usage;

use super::{ALL, ASYNC, EXPANDABLE, FRONT, Fixture, NATIVE};
use crate::common::prelude::*;

fn peak_mib(fixture: &Fixture) -> i64 {
    let peak = fixture.stats().allocated_bytes.all.peak;
    peak / i64::try_from(MIB).expect("it fits")
}

/// Allocates and frees 20 EiB in total, so that the sums wrap around at 2^64.
#[test]
fn sums_of_bytes_have_no_end() {
    for conf in [NATIVE, FRONT, "backend:native,layers:[statistics]"] {
        let fixture = Fixture::new(4 * EIB, conf);
        for _ in 0..20 {
            fixture.give(fixture.take(EIB));
        }
        fixture.switch(NATIVE);
        let stats = fixture.stats().allocated_bytes.all;
        let sum = 20u64.wrapping_mul(EIB).cast_signed();
        assert_eq!((stats.current, stats.allocated, stats.freed), (0, sum, sum), "{conf}");
    }
}

#[test]
fn currents_and_sums_span_all_allocators_also_those_that_have_gone() {
    let fixture = Fixture::new(8 * GIB, NATIVE);
    let mut blocks: Vec<Allocation> = Vec::new();
    let mut taken = 0;
    for round in 0..24 {
        blocks.extend((0..6).map(|n| fixture.take(700 + n * 400_000)));
        taken += 6;
        blocks.drain(..blocks.len() / 2).for_each(|block| fixture.give(block));
        fixture.switch(ALL[round % 2]);
        let stats = fixture.stats();
        let live = i64::try_from(blocks.len()).expect("few");
        assert_eq!((stats.allocation.all.current, stats.allocation.all.allocated), (live, taken));
        assert_eq!(stats.allocation.all.freed, taken - live);
        let usage = fixture.usage();
        assert_eq!(usage, Usage::of(&stats));
        let layout = fixture.caching().layout();
        invariants::check_layout(&layout).expect("segments tile");
        invariants::check_statistics(&stats, &layout).expect("counters equal a recount");
        assert_eq!(invariants::reserved_bytes(&layout), fixture.used_bytes());
    }
    blocks.into_iter().for_each(|block| fixture.give(block));
    let stats = fixture.stats();
    assert_eq!((stats.allocation.all.current, stats.allocation.all.freed), (0, taken));
    assert_eq!(stats.hits + stats.misses, u64::try_from(taken).expect("positive"));
}

#[test]
fn peaks_restart_at_a_switch_and_are_the_sum_of_those_since() {
    let fixture = Fixture::new(8 * GIB, NATIVE);
    let (first, second) = (fixture.take(40 * MIB), fixture.take(10 * MIB));
    fixture.give(first);
    assert_eq!(peak_mib(&fixture), 50);
    fixture.switch(EXPANDABLE);
    assert_eq!(peak_mib(&fixture), 10, "what lives");
    let third = fixture.take(30 * MIB);
    assert_eq!(peak_mib(&fixture), 40);
    fixture.give(second);
    let fourth = fixture.take(18 * MIB);
    assert_eq!(peak_mib(&fixture), 10 + 48, "too high by what the old one released");
    fixture.switch(NATIVE);
    assert_eq!(peak_mib(&fixture), 48);
    [third, fourth].into_iter().for_each(|block| fixture.give(block));
    assert_eq!(peak_mib(&fixture), 48);
}

#[test]
fn a_peak_is_never_too_low() {
    let fixture = Fixture::new(8 * GIB, NATIVE);
    let mut old: Vec<_> = (0..64).map(|_| fixture.take(2 * MIB)).collect();
    fixture.switch(EXPANDABLE);
    let mut new = Vec::new();
    while let Some(block) = old.pop() {
        new.push(fixture.take(2 * MIB));
        fixture.give(block);
        new.push(fixture.take(2 * MIB));
        let now = 2 * i64::try_from(old.len() + new.len()).expect("few");
        assert!(
            (now..=now + 128).contains(&peak_mib(&fixture)),
            "{} and {now}",
            peak_mib(&fixture)
        );
    }
    assert_eq!(fixture.retired(), 0);
    new.into_iter().for_each(|block| fixture.give(block));
}

#[test]
fn resets_reach_all_allocators() {
    let fixture = Fixture::new(8 * GIB, NATIVE);
    let (big, old) = (fixture.take(64 * MIB), fixture.take(6 * MIB));
    fixture.switch(EXPANDABLE);
    fixture.give(big);
    let new = fixture.take(4 * MIB);
    let counters = fixture.counters();
    counters.reset_peaks();
    counters.reset_accumulated();
    let stats = counters.statistics();
    assert_eq!(stats.allocated_bytes.all.peak, stats.allocated_bytes.all.current);
    assert_eq!((stats.allocation.all.allocated, stats.allocation.all.freed), (0, 0));
    fixture.give(old);
    fixture.give(new);
    let stats = counters.statistics();
    assert_eq!((stats.allocation.all.freed, stats.allocation.all.current), (2, 0));
    assert_eq!(stats.allocated_bytes.all.peak, 10 * i64::try_from(MIB).expect("it fits"));
}

#[test]
fn resetting_sums_lowers_no_peak() {
    let fixture = Fixture::new(8 * GIB, NATIVE);
    let old: Vec<_> = (0..12)
        .map(|n| {
            let block = fixture.take(if n == 6 { 512 * MIB } else { MIB });
            fixture.switch(NATIVE);
            block
        })
        .collect();
    let grown = fixture.take(1024 * MIB);
    let mut old: Vec<_> = old.into_iter().map(Some).collect();
    fixture.give(old[6].take().expect("it is there"));
    let before = peak_mib(&fixture);
    assert!(before >= 11 + 512 + 1024, "{before}");
    fixture.counters().reset_accumulated();
    assert_eq!(peak_mib(&fixture), before);
    old.into_iter().flatten().chain([grown]).for_each(|block| fixture.give(block));
}

#[test]
fn what_two_allocators_reserve_together_is_counted_once_also_when_one_has_gone() {
    let fixture = Fixture::new(8 * GIB, ASYNC);
    for _ in 0..4 {
        let block = fixture.take(64 * MIB);
        fixture.switch(ASYNC);
        fixture.give(block);
        assert_eq!(fixture.retired(), 0);
        let reserved = fixture.stats().reserved_bytes.all;
        let mib = i64::try_from(MIB).expect("it fits");
        assert!(reserved.current <= reserved.peak && reserved.peak <= 64 * mib, "{reserved:?}");
        assert!(reserved.freed <= reserved.allocated, "{reserved:?}");
    }
}
