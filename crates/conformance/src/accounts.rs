//! The invariant of the counters: they equal the test's own count of allocations and frees. Counters that the
//! test cannot count itself (reserved bytes, segments, retries) must at least be plausible.

use super::Checked;
use super::fixture::{Fixture, Step};
use stratalloc::stats::{Counter, PerPool, Statistics};

/// Checks after each step that counters equal the test's own count.
///
/// The test knows the requested bytes and the number of live blocks exactly. Freed blocks that work of other
/// streams still uses may count as active until that work has finished. An allocator may round sizes up,
/// never down.
///
/// # Errors
///
/// The counter and its expected value.
pub(super) fn counters_equal_a_recount(fixture: &mut Fixture<'_>, step: &Step) -> Checked {
    let expected = fixture.model.requested_bytes();
    let waiting: u64 = fixture.model.freed.iter().map(|freed| freed.bytes).sum();
    if let Some(cross) = fixture.allocator.control().cross_stream {
        cross.process_events().map_err(|error| error.to_string())?;
    }
    let Some(s) = fixture.statistics() else { return Ok(()) };
    possible(&s)?;
    let (expected, waiting) = (signed(expected), signed(waiting));
    let blocks = signed(fixture.model.live.len() as u64);
    let most = signed(fixture.model.most_live as u64);
    let counted = s.allocation.all;
    is(counted.current == blocks, || {
        format!("{blocks} blocks are live, {} are counted", counted.current)
    })?;
    is(counted.peak == most, || {
        format!("{most} blocks were live at most, {} are counted", counted.peak)
    })?;
    let (allocated, active) = (s.allocated_bytes.all.current, s.active_bytes.all.current);
    let (requested, reserved) = (s.requested_bytes.all.current, s.reserved_bytes.all.current);
    is(allocated >= expected, || {
        format!(
            "{expected} requested bytes are live, but only {allocated} bytes are counted as allocated"
        )
    })?;
    is(blocks > 0 || allocated == 0, || {
        format!("no block is live; allocated bytes are {allocated}")
    })?;
    is((expected..=expected + waiting).contains(&requested), || {
        format!(
            "{expected} requested bytes are live and {waiting} may wait, but {requested} are counted"
        )
    })?;
    is(active >= allocated, || format!("{active} bytes active, {allocated} allocated"))?;
    // On a device that runs its work by itself, the test does not know how many freed blocks still wait for
    // work, so there is no upper limit.
    let drain =
        if fixture.machine.holds_work() { fixture.model.freed.len() as u64 } else { u64::MAX };
    let actives = s.active.all.current;
    let most = blocks.saturating_add(signed(drain));
    is(!is_counted(s.active) || (blocks..=most).contains(&actives), || {
        format!("{blocks} blocks are live and at most {most} active; {actives} blocks are active")
    })?;
    fixture.reserved_is_counted |= is_counted(s.reserved_bytes);
    is(reserved >= active || !fixture.reserved_is_counted, || {
        format!("{active} bytes are active, {reserved} are reserved")
    })?;
    nothing_is_made_up(fixture, &s)?;
    if let (Step::PeaksReset, Some(before)) = (step, &fixture.before) {
        // On a device that runs its work by itself, work may finish between the reading before the reset and
        // the one after it. Counters then fall. Only those of inactive splits rise, so they are not checked.
        for ((name, counter), (_, before)) in counters(&s).zip(counters(before)) {
            if name.starts_with("inactive") {
                continue;
            }
            let (least, peak, most) = (counter.current, counter.peak, before.current);
            let fits = (least..=most.max(least)).contains(&peak);
            is(fits, || format!("{name}.peak is {peak} after a reset at {least} to {most}"))?;
        }
    }
    Ok(())
}

/// Checks the counters after all blocks were freed and all work has finished, before and after they are
/// reset.
///
/// # Errors
///
/// The counter and its expected value.
pub(super) fn counters_end_at_nothing(fixture: &mut Fixture<'_>) -> Checked {
    let Some(s) = fixture.statistics() else { return Ok(()) };
    for (name, family) in [
        ("allocation", s.allocation),
        ("active", s.active),
        ("allocated_bytes", s.allocated_bytes),
        ("active_bytes", s.active_bytes),
        ("requested_bytes", s.requested_bytes),
    ] {
        let current = family.all.current;
        is(current == 0, || format!("nothing is live, {name}.all.current is {current}"))?;
    }
    let Some(counters) = fixture.allocator.control().counters else { return Ok(()) };
    counters.reset_peaks();
    counters.reset_accumulated();
    let s = counters.statistics();
    for (name, counter) in self::counters(&s) {
        let Counter { current, peak, allocated, freed } = counter;
        is((current, allocated, freed) == (peak, 0, 0), || {
            format!("{name} after all resets is {counter:?}")
        })?;
    }
    for (name, count) in events(&s) {
        is(count == 0, || format!("{name} after all resets is {count}"))?;
    }
    Ok(())
}

fn signed(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

fn is(holds: bool, what: impl Fn() -> String) -> Checked {
    if holds { Ok(()) } else { Err(what()) }
}

/// Returns true if an allocator maintains these counters. An allocator that does not leaves them at zero.
fn is_counted(family: PerPool) -> bool {
    family != PerPool::default()
}

/// Returns the name of each counter, and the counter.
fn counters(s: &Statistics) -> impl Iterator<Item = (String, Counter)> {
    let alone = [
        ("oversize_allocations".to_owned(), s.oversize_allocations),
        ("oversize_segments".to_owned(), s.oversize_segments),
    ];
    let of_family = |(name, family): (&'static str, &PerPool)| {
        [("all", family.all), ("large", family.large), ("small", family.small)]
            .map(|(kind, counter)| (format!("{name}.{kind}"), counter))
    };
    s.families().into_iter().flat_map(of_family).chain(alone)
}

/// Returns the counts of occurrences, such as retries, since the start or the last reset.
fn events(s: &Statistics) -> impl Iterator<Item = (&'static str, i64)> {
    let known = [
        ("num_alloc_retries", s.num_alloc_retries),
        ("num_ooms", s.num_ooms),
        ("num_oom_rejections", s.num_oom_rejections),
        ("num_sync_all_streams", s.num_sync_all_streams),
        ("num_device_alloc", s.num_device_alloc),
        ("num_device_free", s.num_device_free),
    ];
    known.into_iter().chain(s.own.iter().map(|own| (own.name, own.count)))
}

/// Checks that some sequence of calls could have led to these counters.
fn possible(s: &Statistics) -> Checked {
    for (name, counter) in counters(s) {
        let Counter { current, peak, allocated, freed } = counter;
        for (part, number) in
            [("current", current), ("peak", peak), ("allocated", allocated), ("freed", freed)]
        {
            is(number >= 0, || format!("{name}.{part} is {number}"))?;
        }
        is(peak >= current, || format!("{name}.peak is {peak} at a current {current}"))?;
        // Some allocators know only the current bytes, from their driver, and not the sums of allocations and
        // frees.
        let may_lack_sums = name.starts_with("reserved_bytes.") || name.starts_with("segment.");
        if may_lack_sums && (allocated, freed) == (0, 0) {
            continue;
        }
        is(current == allocated - freed, || {
            let left = allocated - freed;
            format!(
                "{name}.current is {current}; {allocated} allocated less {freed} freed are {left}"
            )
        })?;
        is(peak <= allocated, || {
            format!("{name}.peak is {peak}; all that was allocated is {allocated}")
        })?;
    }
    for (name, &PerPool { all, large, small }) in s.families() {
        // An allocator that does not count small and large blocks separately leaves both at zero.
        if (large, small) == Default::default() {
            continue;
        }
        // An allocator wrapped in `layers::statistics` may correct `allocated` and `freed` of the families
        // `active` by freed blocks that still wait, separately for each kind. So these sums need not add up.
        let is_active = name.starts_with("active");
        for (part, of) in [
            ("current", (|counter| counter.current) as fn(Counter) -> i64),
            ("allocated", |counter| counter.allocated),
            ("freed", |counter| counter.freed),
        ] {
            let (all, large, small) = (of(all), of(large), of(small));
            is(all == large + small || is_active && part != "current", || {
                format!("{name}.all.{part} is {all}; large and small have {large} and {small}")
            })?;
        }
    }
    for (name, count) in events(s) {
        is(count >= 0, || format!("{name} is {count}"))?;
    }
    is(s.max_split_size >= -1, || format!("max_split_size is {}", s.max_split_size))
}

/// Checks that the allocator does not count more reserved bytes than the driver has allocated. It may
/// count fewer.
fn nothing_is_made_up(fixture: &Fixture<'_>, s: &Statistics) -> Checked {
    let Some(provided_bytes) = fixture.provided_bytes() else { return Ok(()) };
    let (bytes, reserved) = (signed(provided_bytes), s.reserved_bytes.all.current);
    is(reserved <= bytes, || format!("{reserved} bytes are reserved; the driver provided {bytes}"))
}
