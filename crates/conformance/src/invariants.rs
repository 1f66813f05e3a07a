//! The invariants, one function each. A function compares one step of a test with the model (the state that
//! the allocator should have) and describes any violation. Read next: `accounts` (the invariant of the
//! counters).

use super::Checked;
use super::fixture::{Fixture, Step};

/// A check after each step.
pub(super) type Invariant = fn(&mut Fixture<'_>, &Step) -> Checked;

/// Checks that a new block overlaps no other live block.
///
/// # Errors
///
/// The two blocks.
pub(super) fn live_blocks_never_overlap(fixture: &mut Fixture<'_>, step: &Step) -> Checked {
    let (Step::Got, Some((last, before))) = (step, fixture.model.live.split_last()) else {
        return Ok(());
    };
    let hit = before.iter().find(|b| b.start() < last.end() && last.start() < b.end());
    match hit {
        None => Ok(()),
        Some(other) => Err(format!(
            "block {} ({} bytes at {:#x}) overlaps block {} ({} bytes at {:#x}), which is live",
            last.name,
            last.bytes,
            last.start(),
            other.name,
            other.bytes,
            other.start()
        )),
    }
}

/// Checks that a new block has at least the requested bytes, and that work of the device can use live blocks.
///
/// # Errors
///
/// The block.
pub(super) fn blocks_are_large_enough(fixture: &mut Fixture<'_>, step: &Step) -> Checked {
    let (Step::Got, Some(last)) = (step, fixture.model.live.last()) else { return Ok(()) };
    let (name, bytes, size) = (last.name, last.bytes, last.allocation.size_bytes());
    if size < bytes {
        return Err(format!("block {name} has {size} bytes; the request was for {bytes}"));
    }
    if last.start().checked_add(bytes).is_none() {
        return Err(format!("block {name} at {:#x} does not end within 64 bits", last.start()));
    }
    live_blocks_are_reachable(fixture, step)
}

/// Checks that work of the device can access live blocks. Applies only to memory of the driver, and only
/// after steps that may change its mappings.
///
/// # Errors
///
/// The block.
pub(super) fn live_blocks_are_reachable(fixture: &mut Fixture<'_>, step: &Step) -> Checked {
    if fixture.from_driver != Some(true) || !matches!(step, Step::Got | Step::Emptied | Step::Ended)
    {
        return Ok(());
    }
    // Filling real memory would take too long, so only both ends of blocks are written and read.
    if !fixture.machine.holds_work() {
        return bytes_stay_intact(fixture, step);
    }
    for live in &fixture.model.live {
        let filled = fixture.device.fill(live.start(), 0, live.bytes, live.stream);
        filled.map_err(|error| format!("block {} cannot be used: {error}", live.name))?;
    }
    Ok(())
}

/// Checks that bytes written into a block stay until the block is freed. Applies only to memory of the
/// driver.
///
/// # Errors
///
/// The block.
pub(super) fn bytes_stay_intact(fixture: &mut Fixture<'_>, step: &Step) -> Checked {
    if fixture.from_driver != Some(true) {
        return Ok(());
    }
    if let (Step::Got, Some(last)) = (step, fixture.model.live.last_mut()) {
        let seed = last.name as u64;
        last.seed = Some(seed);
        let written = fixture.machine.write(last.start(), last.bytes, seed, last.stream);
        written.map_err(|wrong| format!("block {} cannot be written: {wrong}", last.name))?;
    }
    // Reading a block waits for its stream, but memory should be reused while work runs. So all blocks are
    // read only at these steps. In addition, `Fixture::free` reads each block first.
    if !matches!(step, Step::Emptied | Step::Ended) {
        return Ok(());
    }
    // Delayed work that could overwrite live blocks must have run before the last check.
    if matches!(step, Step::Ended) {
        fixture.streams.iter().for_each(|stream| fixture.machine.finish_stream(*stream));
    }
    for live in &fixture.model.live {
        let Some(seed) = live.seed else { continue };
        let found = fixture.machine.verify(live.start(), live.bytes, seed, live.stream);
        found.map_err(|wrong| format!("block {}: {wrong}", live.name))?;
    }
    Ok(())
}

/// Checks that freed memory is allocated again only after earlier work that uses it: the work of the old
/// block's own stream and of all streams recorded on it. That work must have finished, or the new
/// block's stream must wait for it.
///
/// # Errors
///
/// The old and the new block, and the stream.
pub(super) fn reuse_waits_for_work(fixture: &mut Fixture<'_>, step: &Step) -> Checked {
    let (Step::Got, Some(last)) = (step, fixture.model.live.last()) else { return Ok(()) };
    if fixture.is_streamless() {
        return Ok(());
    }
    for freed in fixture.model.freed.iter().filter(|freed| !freed.excused) {
        if !freed.touches(last.start(), last.end()) {
            continue;
        }
        for &(stream, event) in freed.uses.iter().filter(|(stream, _)| *stream != last.stream) {
            if !fixture.comes_after(last.stream, event)? {
                return Err(format!(
                    "block {} for stream {} got memory of block {}, which work of stream {stream} \
                     still uses",
                    last.name, last.stream, freed.name
                ));
            }
        }
    }
    Ok(())
}

/// Checks that an illegal call is refused, that a refused free returns the allocation, and that the counters
/// of blocks and allocated bytes do not change.
///
/// # Errors
///
/// The way in which the call was not refused.
pub(super) fn misuse_is_refused(fixture: &mut Fixture<'_>, step: &Step) -> Checked {
    let Step::Misused(refused) = step else { return Ok(()) };
    refused.clone()?;
    let (Some(before), Some(after)) = (&fixture.before, fixture.statistics()) else {
        return Ok(());
    };
    // Requested bytes are not compared: a call may notice that other streams have finished, which
    // changes them.
    for (name, before, after) in [
        ("blocks", before.allocation.all, after.allocation.all),
        ("bytes", before.allocated_bytes.all, after.allocated_bytes.all),
    ] {
        if before != after {
            return Err(format!("a refused call changed the {name}: {before:?} to {after:?}"));
        }
    }
    Ok(())
}
