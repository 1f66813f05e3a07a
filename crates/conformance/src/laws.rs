//! The laws, one function each. A law checks one step against the model and describes any violation.
//! Read next: `accounts` (the law of the counters).

use super::Checked;
use super::bed::{Bed, Step};

/// A check after each step.
pub(super) type Law = fn(&mut Bed<'_>, &Step) -> Checked;

/// Checks that no byte belongs to two live blocks.
///
/// # Errors
///
/// The two blocks.
pub(super) fn live_blocks_never_overlap(bed: &mut Bed<'_>, step: &Step) -> Checked {
    let (Step::Got, Some((last, before))) = (step, bed.model.live.split_last()) else {
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

/// Checks that a block has all the requested bytes, and that work can use them.
///
/// # Errors
///
/// The block.
pub(super) fn blocks_are_as_large_as_asked(bed: &mut Bed<'_>, step: &Step) -> Checked {
    let (Step::Got, Some(last)) = (step, bed.model.live.last()) else { return Ok(()) };
    let (name, bytes, says) = (last.name, last.bytes, last.allocation.size_bytes());
    if says < bytes {
        return Err(format!("block {name} says {says} bytes; asked for were {bytes}"));
    }
    if last.start().checked_add(bytes).is_none() {
        return Err(format!("block {name} at {:#x} does not end within 64 bits", last.start()));
    }
    live_blocks_are_reachable(bed, step)
}

/// Checks that work can use every byte of every live block. Checks only memory of the driver.
///
/// # Errors
///
/// The block.
pub(super) fn live_blocks_are_reachable(bed: &mut Bed<'_>, step: &Step) -> Checked {
    if bed.from_driver != Some(true) || !matches!(step, Step::Got | Step::Emptied | Step::Ended) {
        return Ok(());
    }
    // Filling real memory takes too long: only both ends of a block are written there.
    if !bed.machine.holds_work() {
        return bytes_stay_intact(bed, step);
    }
    for live in &bed.model.live {
        let filled = bed.device.fill(live.start(), 0, live.bytes, live.stream);
        filled.map_err(|error| format!("block {} cannot be used: {error}", live.name))?;
    }
    Ok(())
}

/// Checks that bytes written into a block stay until the block is freed. Checks only memory of the
/// driver.
///
/// # Errors
///
/// The block.
pub(super) fn bytes_stay_intact(bed: &mut Bed<'_>, step: &Step) -> Checked {
    if bed.from_driver != Some(true) {
        return Ok(());
    }
    if let (Step::Got, Some(last)) = (step, bed.model.live.last_mut()) {
        let seed = last.name as u64;
        last.seed = Some(seed);
        let written = bed.machine.write(last.start(), last.bytes, seed, last.stream);
        written.map_err(|wrong| format!("block {} cannot be written: {wrong}", last.name))?;
    }
    // Reading waits for work, so it is done rarely: blocks are then reused while work runs. In addition,
    // each block is checked before it is freed.
    if !matches!(step, Step::Emptied | Step::Ended) {
        return Ok(());
    }
    // Work that was held back runs before the last check.
    if matches!(step, Step::Ended) {
        bed.streams.iter().for_each(|stream| bed.machine.finish_stream(*stream));
    }
    for live in &bed.model.live {
        let Some(seed) = live.seed else { continue };
        let found = bed.machine.verify(live.start(), live.bytes, seed, live.stream);
        found.map_err(|wrong| format!("block {}: {wrong}", live.name))?;
    }
    Ok(())
}

/// Checks that freed memory is allocated again only when earlier work is done with it. The work of the
/// block's own stream and of all announced streams must have finished, or the new block's work must be
/// ordered after it.
///
/// # Errors
///
/// The old and the new block, and the stream.
pub(super) fn reuse_waits_for_work(bed: &mut Bed<'_>, step: &Step) -> Checked {
    let (Step::Got, Some(last)) = (step, bed.model.live.last()) else { return Ok(()) };
    if bed.is_streamless() {
        return Ok(());
    }
    for freed in bed.model.freed.iter().filter(|freed| !freed.excused) {
        if !freed.touches(last.start(), last.end()) {
            continue;
        }
        for &(stream, event) in freed.uses.iter().filter(|(stream, _)| *stream != last.stream) {
            if !bed.comes_after(last.stream, event)? {
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

/// Checks that an illegal call is refused, that a refused free returns the allocation, and that no
/// counter changes.
///
/// # Errors
///
/// The way in which the call was not refused.
pub(super) fn misuse_is_refused(bed: &mut Bed<'_>, step: &Step) -> Checked {
    let Step::Misused(refused) = step else { return Ok(()) };
    refused.clone()?;
    let (Some(before), Some(after)) = (&bed.before, bed.statistics()) else { return Ok(()) };
    // Requested bytes may change: a call may notice that other streams have finished.
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
