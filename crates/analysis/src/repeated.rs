//! The events of a replay, in the form of a recording. Logs of requests contain no decisions of an allocator,
//! and a recording contains none for another memory.

use crate::moments::room_of;
use crate::{Recording, Watched, watch};
use stratalloc::allocator::{Allocation, Caching as _, Recording as _};
use stratalloc::config::Compat;
use stratalloc::history::{Action, Event, RecordOptions};
use stratalloc::strategies::Strategy;
use stratalloc_recording::{BlockStack, ReplayError, Trace, TraceEvent};

/// Returns the events of a replay of the recorded requests, in the form of a recording.
///
/// # Errors
///
/// [`ReplayError`] when the replay fails for a reason other than memory.
pub(crate) fn repeated(recording: &Recording) -> Result<Trace, ReplayError> {
    let config = recording.config.clone().unwrap_or_default().with_compat(Compat::PyTorch);
    let room = room_of(recording, &config);
    let mut events: Vec<TraceEvent> = Vec::new();
    let mut seen: Vec<Event> = Vec::new();
    let (mut segments, mut block_stacks) = (Vec::new(), Vec::new());
    let mut requests = recording.trace.requests();
    let last = recording.workload.ops.len().saturating_sub(1);
    let mut time_us = 0;
    let begun = |strategy: &Strategy| {
        if let Some(engine) = strategy.engine() {
            engine.history().start(&RecordOptions::default());
        }
    };
    watch(recording, &config, room, &begun, &mut |Watched { at, strategy, blocks, .. }| {
        let Some(engine) = strategy.engine() else { return };
        engine.history().drain_into(&mut seen);
        for event in seen.drain(..) {
            let mut stack = None;
            if matches!(event.action, Action::Alloc | Action::OutOfMemory)
                && let Some(request) = requests.next()
            {
                stack = request.stack;
                time_us = time_us.max(request.time_us);
            }
            events.push(TraceEvent { stack, time_us, ..event.into() });
        }
        if at == last {
            segments = engine.layout();
            block_stacks = stacks_from_before(recording, blocks);
        }
    })?;
    let Trace { conf, device, devices, stacks, .. } = &recording.trace;
    let (conf, stacks) = (conf.clone(), stacks.clone());
    let (device, devices) = (*device, devices.clone());
    let about = Trace { conf, device, devices, stacks, ..Trace::default() };
    Ok(Trace { events, segments, block_stacks, ..about })
}

/// Returns the stacks of blocks from before the recording that live at the end of a replay, which requests
/// them before its first event. `blocks` are its live blocks, by their numbers.
fn stacks_from_before(recording: &Recording, blocks: &[Option<Allocation>]) -> Vec<BlockStack> {
    let before = recording.start.iter().flat_map(|start| &start.blocks).zip(blocks);
    let with_stack = before.filter_map(|(before, block)| {
        Some(BlockStack { address: block.as_ref()?.address(), stack: before.stack? })
    });
    let mut stacks: Vec<_> = with_stack.collect();
    stacks.sort_unstable_by_key(|block| block.address);
    stacks
}
