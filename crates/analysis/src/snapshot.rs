//! Snapshots of a replay, which show how a recorded program would allocate under another configuration.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::recording::Recording;
use super::trial::{Capacity, Watched, watch};
use stratalloc::allocator::DeviceAllocator;
use stratalloc::config::Config;
use stratalloc::history::{Frame, RecordOptions, Snapshot, Stack, StackLevel, StackProvider};
use stratalloc::strategies::Strategy;
use stratalloc_recording::{ReplayError, StackId, Trace};

/// Replays a recording once and takes a snapshot after its last operation. The requests have their
/// recorded stacks.
///
/// # Errors
///
/// The same as [`measure`](super::measure).
pub fn snapshot_of(recording: &Recording, config: &Config) -> Result<Snapshot, ReplayError> {
    let stacks: Arc<dyn StackProvider> = Arc::new(RecordedStacks::of(&recording.trace));
    let (last, taken) = (recording.workload.ops.len().saturating_sub(1), Cell::new(None));
    let level = match recording.trace.stacks.is_empty() {
        true => StackLevel::Never,
        false => StackLevel::OfAllocations,
    };
    let begun = |strategy: &Strategy| {
        if let Some(recording) = strategy.control().recording {
            recording.history().set_stack_provider(Some(Arc::clone(&stacks)));
            recording.history().start(&RecordOptions::default().with_stacks(level));
        }
    };
    watch(
        recording,
        config,
        Capacity::Limited,
        &begun,
        &mut |Watched { at, strategy, .. }| {
            if at == last {
                taken.set(strategy.control().recording.map(|recording| recording.snapshot()));
            }
        },
    )?;
    Ok(taken.into_inner().unwrap_or_default())
}

/// Provides the recorded stack of each request, in the order of the requests.
struct RecordedStacks {
    stacks: Vec<Arc<StackFrames>>,
    /// The stack of each request, by the number of the request.
    of_requests: Vec<Option<StackId>>,
    next: AtomicUsize,
}

#[derive(Debug)]
struct StackFrames(Vec<Frame>);

impl Stack for StackFrames {
    fn frames(&self) -> Vec<Frame> {
        self.0.clone()
    }
}

impl RecordedStacks {
    fn of(trace: &Trace) -> Self {
        let stacks = trace.stacks.ids().map(|id| {
            let frames = trace.stacks.frames(id).map(|frame| Frame {
                function: frame.function.to_owned(),
                file: frame.file.to_owned(),
                line: frame.line,
            });
            Arc::new(StackFrames(frames.collect()))
        });
        let of_requests = trace.requests().map(|event| event.stack).collect();
        Self { stacks: stacks.collect(), of_requests, next: AtomicUsize::new(0) }
    }
}

impl StackProvider for RecordedStacks {
    fn gather(&self) -> Option<Arc<dyn Stack>> {
        let id = *self.of_requests.get(self.next.fetch_add(1, Ordering::Relaxed))?;
        let stack: Arc<dyn Stack> = Arc::clone(self.stacks.get(id?.index())?) as _;
        Some(stack)
    }
}
