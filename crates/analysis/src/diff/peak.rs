//! The layout at the peak of reserved bytes in a replay.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use super::super::moments::room_of;
use super::super::recording::Recording;
use super::super::trial::open_with_start;
use stratalloc::allocator::DeviceAllocator as _;
use stratalloc::config::Config;
use stratalloc::history::SegmentLayout;
use stratalloc_recording::{Blocks, Op, ReplayError, walk};
use stratalloc_sim::WorkGate;

/// Returns the layout at the peak of reserved bytes; of several peaks, at the one with the most live bytes.
/// Also returns the workload's number of each live block, by its address.
///
/// # Errors
///
/// [`ReplayError`] when the configuration builds no allocator, or the allocator fails for a reason other
/// than memory.
pub(super) fn at_peak(
    recording: &Recording,
    config: &Config,
) -> Result<(Vec<SegmentLayout>, HashMap<u64, u32>), ReplayError> {
    let (mut most, mut peak) = ((0, 0), None);
    let mut live_bytes = vec![0; recording.workload.blocks as usize];
    let (mut now_bytes, mut counted) = (0_u64, 0);
    replay(recording, config, |at, used_bytes, blocks, _| {
        for op in recording.workload.ops.range(counted..at + 1) {
            match op {
                Op::Allocate { id, bytes, .. } if blocks.get(id).is_some() => {
                    live_bytes[id as usize] = bytes;
                    now_bytes = now_bytes.saturating_add(bytes);
                }
                Op::Free { id } | Op::FreeInUse { id, .. } => {
                    let bytes = std::mem::take(&mut live_bytes[id as usize]);
                    now_bytes = now_bytes.saturating_sub(bytes);
                }
                _ => {}
            }
        }
        counted = at + 1;
        if (used_bytes, now_bytes) > most {
            (most, peak) = ((used_bytes, now_bytes), Some(at));
        }
        ControlFlow::Continue(())
    })?;
    let mut found = (Vec::new(), HashMap::new());
    let Some(peak) = peak else { return Ok(found) };
    replay(recording, config, |at, _, blocks, layout| {
        if at < peak {
            return ControlFlow::Continue(());
        }
        let live =
            (0..recording.workload.blocks).filter_map(|id| Some((blocks.get(id)?.address(), id)));
        found = (layout(), live.collect());
        ControlFlow::Break(())
    })?;
    Ok(found)
}

/// Replays a recording. Passes the number of each operation, the bytes allocated from the device, the live
/// blocks and a function that returns the layout.
fn replay(
    recording: &Recording,
    config: &Config,
    mut see: impl FnMut(usize, u64, &dyn Blocks, &dyn Fn() -> Vec<SegmentLayout>) -> ControlFlow<()>,
) -> Result<(), ReplayError> {
    let room = room_of(recording, config);
    let (strategy, sim, held) = open_with_start(recording, config, room)?;
    let work_gate = Some(Arc::clone(&sim) as Arc<dyn WorkGate>);
    let layout = || strategy.control().caching.map(|caching| caching.layout()).unwrap_or_default();
    walk(&recording.workload, &strategy, work_gate, held, |step| {
        see(step.at, sim.used_bytes(), step.blocks, &layout)
    })
}
