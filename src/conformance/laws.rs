//! The laws, one function each. A law looks at one step and at all that is known, and says in words
//! what is wrong.

use super::Checked;
use super::bed::{Bed, Step};

/// What must hold after each step.
pub type Law = fn(&mut Bed<'_>, &Step) -> Checked;

/// No byte belongs to two live blocks.
///
/// # Errors
///
/// The two blocks.
pub fn live_blocks_never_overlap(bed: &mut Bed<'_>, step: &Step) -> Checked {
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
