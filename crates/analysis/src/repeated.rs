//! The lifetimes of a replay's blocks and segments. Logs of requests contain no decisions of an allocator,
//! and a recording contains none for another memory.
//!
//! Each event of the replay is applied and dropped, so none is stored.

use std::cell::RefCell;

use crate::lives::{Columns, EVENTS_MAX, Lives, LivesWalk};
use crate::moments::room_of;
use crate::{Recording, Watched, watch};
use stratalloc::allocator::{Caching as _, Recording as _};
use stratalloc::config::{Compat, Config};
use stratalloc::history::{Action, Event, RecordOptions};
use stratalloc::strategies::Strategy;
use stratalloc_recording::{
    BlockStack, Blocks, PoolRouting, ReplayError, Start, Trace, TraceEvent,
};

/// Returns the lifetimes of a replay of the recorded requests, with at most `columns` columns of a time line.
///
/// # Errors
///
/// [`ReplayError`] when the replay fails for a reason other than memory.
pub(crate) fn lives_of_replay(recording: &Recording, columns: usize) -> Result<Lives, ReplayError> {
    let config = recording.config.clone().unwrap_or_default().with_compat(Compat::PyTorch);
    // One column contains all moments. More have equal widths, for which the number of events must be known.
    let columns = match columns {
        0 | 1 => Columns::new(1, EVENTS_MAX),
        _ => Columns::new(columns, count(recording, &config)?),
    };
    let mut walk = LivesWalk::new(config.settings(), PoolRouting::default(), columns);
    let mut requests = recording.trace.requests();
    let mut time_us = 0;
    // Events of a replay contain their pools, so the layout at the start is all that must be known.
    replay(recording, &config, &mut |change| match change {
        Change::Begin(start) => walk.begin(&start),
        Change::Event(event) => {
            let mut stack = None;
            if matches!(event.action, Action::Alloc | Action::OutOfMemory)
                && let Some(request) = requests.next()
            {
                stack = request.stack;
                time_us = time_us.max(request.time_us);
            }
            walk.see(&TraceEvent { stack, time_us, ..event.into() });
        }
    })?;
    Ok(walk.finish())
}

/// Returns the number of events of a replay.
fn count(recording: &Recording, config: &Config) -> Result<u32, ReplayError> {
    let mut events = 0_u32;
    replay(recording, config, &mut |change| {
        if matches!(change, Change::Event(_)) {
            events = events.saturating_add(1).min(EVENTS_MAX);
        }
    })?;
    Ok(events)
}

/// A part of a replay.
enum Change {
    /// The memory before the first event.
    Begin(Start),
    /// The next event.
    Event(Event),
}

/// Replays the recorded requests. Calls `see` with the memory before the first event, then with each event.
fn replay(
    recording: &Recording,
    config: &Config,
    see: &mut dyn FnMut(Change),
) -> Result<(), ReplayError> {
    let room = room_of(recording, config);
    let segments = RefCell::new(Vec::new());
    let begun = |strategy: &Strategy| {
        if let Some(engine) = strategy.engine() {
            *segments.borrow_mut() = engine.layout();
            engine.history().start(&RecordOptions::default());
        }
    };
    let seeded = recording.workload.seeded as usize;
    let (mut seen, mut is_begun) = (Vec::new(), false);
    watch(recording, config, room, &begun, &mut |Watched { at, strategy, blocks, .. }| {
        let Some(engine) = strategy.engine().filter(|_| at + 1 >= seeded) else { return };
        if !std::mem::replace(&mut is_begun, true) {
            let block_stacks = stacks_from_before(recording, blocks);
            let segments = segments.take();
            let begin = Trace { segments, block_stacks, ..Trace::default() };
            see(Change::Begin(Start::of(&begin)));
        }
        engine.history().drain_into(&mut seen);
        seen.drain(..).for_each(|event| see(Change::Event(event)));
    })?;
    if !is_begun {
        let begin = Trace { segments: segments.take(), ..Trace::default() };
        see(Change::Begin(Start::of(&begin)));
    }
    Ok(())
}

/// Returns the stacks of blocks from before the recording that a replay requests before its first event.
/// `blocks` are its live blocks.
fn stacks_from_before(recording: &Recording, blocks: &dyn Blocks) -> Vec<BlockStack> {
    let before = recording.start.iter().flat_map(|start| (0..).zip(&start.blocks));
    let with_stack = before.filter_map(|(number, before)| {
        Some(BlockStack { address: blocks.get(number)?.address(), stack: before.stack? })
    });
    let mut stacks: Vec<_> = with_stack.collect();
    stacks.sort_unstable_by_key(|block| block.address);
    stacks
}
