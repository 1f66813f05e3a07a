//! The law of the counters: they equal a recount of what was handed out and given back.

use super::Checked;
use super::bed::{Bed, Step};
use crate::stats::{Counter, PerPool, Statistics};

/// Counters equal a recount after each step.
///
/// What was asked for and is live is known exactly, and so is how many blocks there are. Blocks that
/// wait for other streams may count as active for as long as that work runs. How many bytes an
/// allocator rounds to is its own matter, but never fewer than asked for.
///
/// # Errors
///
/// The counter and what it should be.
pub(super) fn counters_equal_a_recount(bed: &mut Bed<'_>, step: &Step) -> Checked {
    let asked = bed.model.requested_bytes();
    let waiting: u64 = bed.model.freed.iter().map(|freed| freed.bytes).sum();
    if let Some(cross) = bed.allocator.cross_stream() {
        cross.process_events().map_err(|error| error.to_string())?;
    }
    let Some(s) = bed.statistics() else { return Ok(()) };
    let (asked, waiting) = (signed(asked), signed(waiting));
    let blocks = signed(bed.model.live.len() as u64);
    let most = signed(bed.model.most_live as u64);
    let counted = s.allocation.all;
    is(counted.current == blocks, || {
        format!("{blocks} blocks are live, {} are counted", counted.current)
    })?;
    is(counted.peak == most, || {
        format!("{most} blocks were live at most, {} are counted", counted.peak)
    })?;
    let (allocated, active) = (s.allocated_bytes.all.current, s.active_bytes.all.current);
    let (requested, reserved) = (s.requested_bytes.all.current, s.reserved_bytes.all.current);
    is(allocated >= asked, || {
        format!("{asked} bytes were asked for and are live; allocated bytes are {allocated}")
    })?;
    is(blocks > 0 || allocated == 0, || {
        format!("no block is live; allocated bytes are {allocated}")
    })?;
    is((asked..=asked + waiting).contains(&requested), || {
        format!("{asked} bytes are live and {waiting} may wait; requested bytes are {requested}")
    })?;
    is(active >= allocated, || format!("{active} bytes active, {allocated} allocated"))?;
    is(reserved >= allocated, || format!("{reserved} bytes reserved, {allocated} allocated"))?;
    families_add_up(&s)?;
    if let (Step::PeaksReset, Some(before)) = (step, &bed.before) {
        // Work may have finished since, on a device that runs it by itself: counters fall then.
        for ((name, family), (_, before)) in families(&s).into_iter().zip(families(before)) {
            let (least, peak, most) = (family.all.current, family.all.peak, before.all.current);
            let fits = (least..=most.max(least)).contains(&peak);
            is(fits, || format!("{name}: peak {peak} after a reset at {least} to {most}"))?;
        }
    }
    Ok(())
}

/// What counters say when nothing is live and no work runs, and after their resets.
///
/// # Errors
///
/// The counter and what it should be.
pub(super) fn counters_end_at_nothing(bed: &mut Bed<'_>) -> Checked {
    let Some(s) = bed.statistics() else { return Ok(()) };
    for (name, family) in [
        ("blocks", s.allocation),
        ("active blocks", s.active),
        ("allocated bytes", s.allocated_bytes),
        ("active bytes", s.active_bytes),
        ("requested bytes", s.requested_bytes),
    ] {
        let current = family.all.current;
        is(current == 0, || format!("nothing is live, {name} are {current}"))?;
    }
    let Some(counters) = bed.allocator.counters() else { return Ok(()) };
    counters.reset_peaks();
    counters.reset_accumulated();
    let s = counters.statistics();
    for (name, family) in families(&s) {
        let Counter { current, peak, allocated, freed } = family.all;
        is((current, allocated, freed) == (peak, 0, 0), || {
            format!("{name} after all resets: {:?}", family.all)
        })?;
    }
    Ok(())
}

fn signed(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

fn is(holds: bool, what: impl Fn() -> String) -> Checked {
    if holds { Ok(()) } else { Err(what()) }
}

fn families(s: &Statistics) -> [(&'static str, PerPool); 5] {
    [
        ("blocks", s.allocation),
        ("allocated bytes", s.allocated_bytes),
        ("reserved bytes", s.reserved_bytes),
        ("active bytes", s.active_bytes),
        ("requested bytes", s.requested_bytes),
    ]
}

fn families_add_up(s: &Statistics) -> Checked {
    for (name, family) in families(s) {
        let PerPool { all, large, small } = family;
        // Where memory lies is not every allocator's to know: both kinds at nothing say so.
        let kinds = large.allocated != 0 || small.allocated != 0;
        is(!kinds || all.current == large.current + small.current, || {
            format!("{name}: {} are not {} and {}", all.current, large.current, small.current)
        })?;
        is(all.peak >= all.current, || format!("{name}: peak below {}", all.current))?;
        // The driver may tell what it holds for us, and not how that came to be.
        let sums = name != "reserved bytes" || all.allocated != 0 || all.freed != 0;
        is(!sums || all.current == all.allocated - all.freed, || {
            format!("{name}: {} are not {} - {}", all.current, all.allocated, all.freed)
        })?;
    }
    Ok(())
}
