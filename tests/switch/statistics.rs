//! Counters over the allocators from before and after a switch.

use stratalloc::size::EIB;
use stratalloc::stats::Usage;

use super::{ALL, ASYNC, Bed, EXPANDABLE, FRONT, NATIVE};
use crate::common::prelude::*;

fn peak_mib(bed: &Bed) -> i64 {
    let peak = bed.stats().allocated_bytes.all.peak;
    peak / i64::try_from(MIB).expect("it fits")
}

/// 20 EiB are allocated and freed: sums wrap modulo 2^64.
#[test]
fn sums_of_bytes_have_no_end() {
    for conf in [NATIVE, FRONT, "backend:native,layers:[statistics]"] {
        let bed = Bed::new(4 * EIB, conf);
        for _ in 0..20 {
            bed.give(bed.take(EIB));
        }
        bed.switch(NATIVE);
        let told = bed.stats().allocated_bytes.all;
        let sum = 20u64.wrapping_mul(EIB).cast_signed();
        assert_eq!((told.current, told.allocated, told.freed), (0, sum, sum), "{conf}");
    }
}

#[test]
fn currents_and_sums_span_all_allocators_also_those_that_have_gone() {
    let bed = Bed::new(8 * GIB, NATIVE);
    let mut blocks: Vec<Allocation> = Vec::new();
    let mut taken = 0;
    for round in 0..24 {
        blocks.extend((0..6).map(|n| bed.take(700 + n * 400_000)));
        taken += 6;
        blocks.drain(..blocks.len() / 2).for_each(|block| bed.give(block));
        bed.switch(ALL[round % 2]);
        let told = bed.stats();
        let live = i64::try_from(blocks.len()).expect("few");
        assert_eq!((told.allocation.all.current, told.allocation.all.allocated), (live, taken));
        assert_eq!(told.allocation.all.freed, taken - live);
        let usage = bed.usage();
        assert_eq!(usage, Usage::of(&told));
        let layout = bed.caching().layout();
        law::check_layout(&layout).expect("segments tile");
        law::check_statistics(&told, &layout).expect("counters equal a recount");
        assert_eq!(law::reserved_bytes(&layout), bed.used_bytes());
    }
    blocks.into_iter().for_each(|block| bed.give(block));
    let told = bed.stats();
    assert_eq!((told.allocation.all.current, told.allocation.all.freed), (0, taken));
    assert_eq!(told.hits + told.misses, u64::try_from(taken).expect("positive"));
}

#[test]
fn peaks_begin_anew_at_a_switch_and_are_the_sum_of_those_since() {
    let bed = Bed::new(8 * GIB, NATIVE);
    let (first, second) = (bed.take(40 * MIB), bed.take(10 * MIB));
    bed.give(first);
    assert_eq!(peak_mib(&bed), 50);
    bed.switch(EXPANDABLE);
    assert_eq!(peak_mib(&bed), 10, "what lives");
    let third = bed.take(30 * MIB);
    assert_eq!(peak_mib(&bed), 40);
    bed.give(second);
    let fourth = bed.take(18 * MIB);
    assert_eq!(peak_mib(&bed), 10 + 48, "too high by what the old one gave back");
    bed.switch(NATIVE);
    assert_eq!(peak_mib(&bed), 48);
    [third, fourth].into_iter().for_each(|block| bed.give(block));
    assert_eq!(peak_mib(&bed), 48);
}

#[test]
fn a_peak_is_never_too_low() {
    let bed = Bed::new(8 * GIB, NATIVE);
    let mut old: Vec<_> = (0..64).map(|_| bed.take(2 * MIB)).collect();
    bed.switch(EXPANDABLE);
    let mut new = Vec::new();
    while let Some(block) = old.pop() {
        new.push(bed.take(2 * MIB));
        bed.give(block);
        new.push(bed.take(2 * MIB));
        let now = 2 * i64::try_from(old.len() + new.len()).expect("few");
        assert!((now..=now + 128).contains(&peak_mib(&bed)), "{} and {now}", peak_mib(&bed));
    }
    assert_eq!(bed.retired(), 0);
    new.into_iter().for_each(|block| bed.give(block));
}

#[test]
fn resets_reach_all_allocators() {
    let bed = Bed::new(8 * GIB, NATIVE);
    let (big, old) = (bed.take(64 * MIB), bed.take(6 * MIB));
    bed.switch(EXPANDABLE);
    bed.give(big);
    let new = bed.take(4 * MIB);
    let counters = bed.counters();
    counters.reset_peaks();
    counters.reset_accumulated();
    let told = counters.statistics();
    assert_eq!(told.allocated_bytes.all.peak, told.allocated_bytes.all.current);
    assert_eq!((told.allocation.all.allocated, told.allocation.all.freed), (0, 0));
    bed.give(old);
    bed.give(new);
    let told = counters.statistics();
    assert_eq!((told.allocation.all.freed, told.allocation.all.current), (2, 0));
    assert_eq!(told.allocated_bytes.all.peak, 10 * i64::try_from(MIB).expect("it fits"));
}

#[test]
fn resetting_sums_lowers_no_peak() {
    let bed = Bed::new(8 * GIB, NATIVE);
    let old: Vec<_> = (0..12)
        .map(|n| {
            let block = bed.take(if n == 6 { 512 * MIB } else { MIB });
            bed.switch(NATIVE);
            block
        })
        .collect();
    let grown = bed.take(1024 * MIB);
    let mut old: Vec<_> = old.into_iter().map(Some).collect();
    bed.give(old[6].take().expect("it is there"));
    let before = peak_mib(&bed);
    assert!(before >= 11 + 512 + 1024, "{before}");
    bed.counters().reset_accumulated();
    assert_eq!(peak_mib(&bed), before);
    old.into_iter().flatten().chain([grown]).for_each(|block| bed.give(block));
}

#[test]
fn what_two_allocators_reserve_together_is_counted_once_also_when_one_has_gone() {
    let bed = Bed::new(8 * GIB, ASYNC);
    for _ in 0..4 {
        let block = bed.take(64 * MIB);
        bed.switch(ASYNC);
        bed.give(block);
        assert_eq!(bed.retired(), 0);
        let reserved = bed.stats().reserved_bytes.all;
        let mib = i64::try_from(MIB).expect("it fits");
        assert!(reserved.current <= reserved.peak && reserved.peak <= 64 * mib, "{reserved:?}");
        assert!(reserved.freed <= reserved.allocated, "{reserved:?}");
    }
}
