//! The events of a replay, in the form of a recording. Logs of requests contain no decisions of an allocator,
//! and a recording contains none for another memory.

use crate::moments::room_of;
use crate::{Recording, watch};
use stratalloc::allocator::{Caching as _, Recording as _};
use stratalloc::config::Compat;
use stratalloc::history::{Action, Event, RecordOptions};
use stratalloc::strategies::Strategy;
use stratalloc_recording::{ReplayError, Trace, TraceEvent};

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
    let mut segments = Vec::new();
    let mut requests = recording.trace.requests();
    let last = recording.workload.ops.len().saturating_sub(1);
    let mut time_us = 0;
    let begun = |strategy: &Strategy| {
        if let Some(engine) = strategy.engine() {
            engine.history().start(&RecordOptions::default());
        }
    };
    watch(recording, &config, room, &begun, &mut |at, strategy, _| {
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
        }
    })?;
    let Trace { conf, device, other_devices, stacks, .. } = &recording.trace;
    let (conf, stacks) = (conf.clone(), stacks.clone());
    let (device, other_devices) = (*device, *other_devices);
    Ok(Trace { events, segments, conf, device, other_devices, stacks, ..Trace::default() })
}
