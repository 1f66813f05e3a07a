//! Graph captures: blocks that are freed while a capture is active.
//!
//! While a graph is captured, no event is queried or recorded and no memory is released for its streams.
//! So a block that other streams used and that is freed during the capture is **deferred** until the
//! capture ends.
//!
//! To *finish* a deferred block means to record an event for each use outside the capture, or to free the
//! block if there is none. A use inside the capture needs no event, because it is part of the graph.
//!
//! With `graph_capture_record_stream_reuse` a deferred block may be reused inside the capture. When the
//! block is freed, the last graph nodes of all its streams are stored. The block is free as soon as the
//! last node of its own stream depends on all of them. To check that, the graph is searched backwards
//! from the last node of the stream, visiting each node once.
//!
//! Source: PyTorch's rules for `record_stream` inside captures.

use std::sync::atomic::{AtomicBool, Ordering};

use hashbrown::{HashMap, HashSet};
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::cell::HeapCell;
use super::engine::Engine;
use crate::allocator::ScopeFilter;
use crate::config::Settings;
use crate::driver::{CaptureStatus, NodeId, expects_captures, may_be_captured, thread_of};
use crate::error::{DriverError, DriverErrorKind, HandleError};
use crate::heap::{BlockId, Slot, StreamUse};
use crate::ids::{PoolId, StreamId, ThreadNumber};

/// The deferred blocks, and how captures are treated.
#[derive(Debug, Default)]
pub(super) struct Captures {
    reuse: AtomicBool,
    /// Whether an open scope of a pool counts as a capture, as in PyTorch up to 2.12.
    routing_is_capture: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    deferred: Vec<Deferred>,
    /// The serial number of the most recently deferred block.
    last_serial: u64,
    /// For each stream, the nodes on which its last node in the capture depends. During a capture these
    /// sets only grow.
    behind: HashMap<StreamId, Behind>,
}

/// The last nodes of one stream in one capture, and all nodes on which they depend, as of the latest search
/// of the graph.
#[derive(Debug)]
struct Behind {
    capture: u64,
    nodes: HashSet<NodeId>,
}

/// A block that was freed inside a capture.
#[derive(Debug)]
struct Deferred {
    /// Identifies the deferral, because slots are reused. Later deferrals have larger numbers.
    serial: u64,
    heap: u32,
    slot: Slot,
    pool: PoolId,
    stream: StreamId,
    uses: SmallVec<[StreamUse; 4]>,
    /// The thread whose per-thread default stream uses the block, if one does.
    thread: Option<ThreadNumber>,
    /// The capture that all the block's streams were in when it was freed, and their last nodes in its
    /// graph. `None` if there was no such capture or reuse is off.
    ends: Option<(u64, SmallVec<[NodeId; 4]>)>,
}

impl Captures {
    pub(super) fn apply(&self, settings: &Settings) {
        self.reuse.store(settings.graph_capture_record_stream_reuse, Ordering::Relaxed);
        let is_capture = settings.compat.decisions().routing_is_capture;
        self.routing_is_capture.store(is_capture, Ordering::Relaxed);
    }

    /// Returns true if a block of the pool is deferred.
    pub(super) fn has_deferred(&self, pool: PoolId) -> bool {
        self.state.lock().deferred.iter().any(|block| block.pool == pool)
    }
}

impl Engine {
    /// Frees deferred and draining blocks that can be freed by now. Called before a request on `stream`
    /// is served.
    #[inline]
    pub(super) fn finish_waiting(
        &self,
        stream: StreamId,
        status: CaptureStatus,
    ) -> Result<(), DriverError> {
        match status {
            CaptureStatus::Active { capture } if self.captures.reuse.load(Ordering::Relaxed) => {
                self.reuse_deferred(stream, capture)
            }
            CaptureStatus::None if !self.scopes.captures_here() && !self.counts_as_captured() => {
                self.finish_deferred()?;
                if self.attention.any_event() { self.poll_events() } else { Ok(()) }
            }
            _ => Ok(()),
        }
    }

    /// Counts an open scope of a pool as a capture, whatever the configured PyTorch version, until the
    /// settings change. For replays, which open a scope for each request that was made in a capture.
    #[doc(hidden)]
    pub fn count_scopes_as_captures(&self) {
        self.captures.routing_is_capture.store(true, Ordering::Relaxed);
    }

    /// Frees deferred and draining blocks that can be freed by now, before a scope is opened. A capture may
    /// begin in the scope, and no event is queried during a capture. So captures that follow each other
    /// reuse memory, even if no request comes between them. Does nothing if a capture may be active.
    pub(super) fn finish_before_scope(&self, filter: &ScopeFilter) -> Result<(), DriverError> {
        let waits = self.attention.any_event() || self.attention.any_other();
        let may_be_in_capture = match filter {
            ScopeFilter::Capture(_) => true,
            ScopeFilter::Stream(stream) => may_be_captured(&*self.driver, *stream),
            ScopeFilter::Thread(_) | ScopeFilter::Where(_) => false,
        };
        let may_query = !may_be_in_capture && !self.scopes.any_capture();
        if !waits || !may_query || self.growth.lock().is_exact() {
            return Ok(());
        }
        self.finish_deferred()?;
        self.poll_events()
    }

    /// Returns true if an open scope counts as a capture by the rules of the configured PyTorch version.
    #[inline]
    pub(super) fn counts_as_captured(&self) -> bool {
        self.captures.routing_is_capture.load(Ordering::Relaxed) && self.scopes.any()
    }

    /// Returns true if this thread has an open capture, or the stream may be captured. The caller may
    /// then neither wait for the stream nor release its memory. Queries the driver too, because a capture
    /// need not have a scope.
    pub(super) fn is_captured(&self, stream: StreamId) -> bool {
        self.scopes.captures_here() || may_be_captured(&*self.driver, stream)
    }

    /// Returns true if the driver reports that the stream is being captured, with or without a scope.
    pub(super) fn is_capturing(&self, stream: StreamId) -> bool {
        let status = self.driver.capture_status(stream);
        matches!(status, Ok(CaptureStatus::Active { .. } | CaptureStatus::Invalidated))
    }

    /// Defers the free of a block during a capture. `uses` are the other streams that use the block.
    pub(super) fn defer_free(
        &self,
        cell: &HeapCell,
        address: u64,
        id: BlockId,
        uses: SmallVec<[StreamUse; 4]>,
    ) -> Result<(), HandleError> {
        let ends = self.ends_in_graph(cell.stream(), &uses);
        let thread = uses.iter().find_map(|by| thread_of(&*self.driver, by.stream));
        // Locked until the block is in the list, so that a concurrent end of the capture finds the
        // block.
        let mut state = self.captures.state.lock();
        let Some(slot) = self.start_draining(cell, address, id, &uses, 1) else {
            drop(state);
            return self.free_unused(cell, address, id);
        };
        let (heap, pool, stream) = (cell.number, cell.pool(), cell.stream());
        state.last_serial += 1;
        let serial = state.last_serial;
        state.deferred.push(Deferred { serial, heap, slot, pool, stream, uses, thread, ends });
        self.attention.add_other();
        Ok(())
    }

    /// Returns the capture of a block's streams and their last nodes in its graph. Returns `None` if
    /// reuse is off, or a stream or a use is not in that capture.
    fn ends_in_graph(
        &self,
        own: StreamId,
        uses: &[StreamUse],
    ) -> Option<(u64, SmallVec<[NodeId; 4]>)> {
        if !self.captures.reuse.load(Ordering::Relaxed) {
            return None;
        }
        let graph = self.driver.capture()?;
        let mut of = None;
        let mut ends = SmallVec::new();
        for stream in uses.iter().map(|by| by.stream).chain([own]) {
            // This may be the per-thread default stream of another thread, which only that thread can
            // query.
            if self.driver.is_per_thread_stream(stream) {
                return None;
            }
            let Ok(CaptureStatus::Active { capture }) = self.driver.capture_status(stream) else {
                return None;
            };
            if *of.get_or_insert(capture) != capture {
                return None;
            }
            ends.extend(graph.frontier(stream).ok()?);
        }
        // A use from before the capture is not in the graph. Only an event can wait for it.
        let all_inside = uses.iter().all(|by| by.captured);
        of.filter(|_| all_inside).map(|capture| (capture, ends))
    }

    /// Frees the deferred blocks of `stream` for which all uses in the graph precede the stream's last
    /// node.
    fn reuse_deferred(&self, stream: StreamId, capture: u64) -> Result<(), DriverError> {
        let Some(graph) = self.driver.capture() else {
            return Ok(());
        };
        let state = &mut *self.captures.state.lock();
        let waits = |d: &Deferred| {
            d.stream == stream && d.ends.as_ref().is_some_and(|(of, _)| *of == capture)
        };
        if !state.deferred.iter().any(waits) {
            return Ok(());
        }
        let none = || Behind { capture, nodes: HashSet::new() };
        let known = state.behind.entry(stream).or_insert_with(none);
        if known.capture != capture {
            *known = none();
        }
        let behind = &mut known.nodes;
        let mut ahead = graph.frontier(stream)?;
        while let Some(node) = ahead.pop() {
            if behind.insert(node) {
                ahead.extend(graph.dependencies(node)?);
            }
        }
        state.deferred.retain(|block| {
            let ends = block.ends.as_ref().filter(|_| waits(block));
            let joined =
                ends.is_some_and(|(_, ends)| ends.iter().all(|node| behind.contains(node)));
            if joined {
                self.attention.remove_other();
                let cell = self.heaps.get(block.heap).expect("heaps are never removed");
                self.complete(cell, block.slot);
            }
            !joined
        });
        Ok(())
    }

    /// Handles the end of a capture. With reuse on, finishes the deferred blocks of the capture's pool;
    /// otherwise the next request finishes them. With reuse on or off, blocks that only the calling
    /// thread can finish are finished now, because this thread may not call again.
    pub(super) fn end_capture(&self, pool: PoolId) -> Result<(), DriverError> {
        let state = &mut *self.captures.state.lock();
        let all_over = !self.scopes.any_capture();
        if all_over {
            state.behind.clear();
        }
        let reuse = self.captures.reuse.load(Ordering::Relaxed);
        let here = Some(ThreadNumber::current());
        // A captured use may belong to a capture that is still active. Then it is not over.
        let is_over = |d: &Deferred| {
            all_over || d.uses.iter().all(|by| !by.captured || by.stream == d.stream)
        };
        let ours = |d: &Deferred| d.thread == here && is_over(d);
        self.finish_picked(state, |d| ours(d) || (reuse && d.pool == pool))
    }

    /// Finishes all deferred blocks, unless a capture is active. Blocks that only another thread can
    /// finish stay deferred.
    #[inline]
    pub(super) fn finish_deferred(&self) -> Result<(), DriverError> {
        self.finish_all_deferred(|_| {})
    }

    /// Finishes deferred blocks as [`finish_deferred`](Self::finish_deferred) does. If some remain that only
    /// another thread could finish without waiting, synchronizes the device and finishes these too, unless
    /// a capture may be active.
    pub(super) fn finish_deferred_or_wait(&self) -> Result<(), DriverError> {
        let finished = self.finish_deferred();
        let last = {
            let state = self.captures.state.lock();
            let any = state.deferred.iter().any(|block| self.is_of_another_thread(block));
            // Captures may still be active, and synchronizing the device would break them.
            if !any || expects_captures(&*self.driver) {
                return finished;
            }
            state.last_serial
        };
        // The list is not locked during the wait, because requests lock it.
        self.driver.synchronize_device()?;
        finished.and(self.finish_all_deferred(|block| {
            if block.serial <= last && self.is_of_another_thread(block) {
                // The synchronization covers per-thread default streams. Other streams may belong to
                // another device, so they still need an event.
                block.uses.retain(|by| !self.driver.is_per_thread_stream(by.stream));
            }
        }))
    }

    #[inline]
    fn finish_all_deferred(&self, first: impl FnMut(&mut Deferred)) -> Result<(), DriverError> {
        if self.scopes.any_capture() || !self.attention.any_other() {
            return Ok(());
        }
        let state = &mut *self.captures.state.lock();
        state.deferred.iter_mut().for_each(first);
        self.finish_picked(state, |_| true)
    }

    /// Returns true if the per-thread default stream of another thread uses a block. An event recorded
    /// by the calling thread does not cover that stream.
    fn is_of_another_thread(&self, block: &Deferred) -> bool {
        block.thread.is_some_and(|thread| thread != ThreadNumber::current())
            && block.uses.iter().any(|by| {
                // Uses inside the capture are part of the graph and need no event, except a use by the
                // block's own stream.
                self.driver.is_per_thread_stream(by.stream)
                    && (!by.captured || by.stream == block.stream)
            })
    }

    /// Finishes those blocks among the picked ones that the calling thread can finish, and whose streams
    /// are not captured. Records events for the uses outside the capture. A block's own per-thread
    /// default stream gets an event even if its use was captured: it may have run other work since, for
    /// which `record_stream` is not called.
    ///
    /// The list stays locked: another thread that found a block neither in the list nor among the events
    /// would treat it as in use.
    #[inline(never)]
    fn finish_picked(
        &self,
        state: &mut State,
        picked: impl Fn(&Deferred) -> bool,
    ) -> Result<(), DriverError> {
        let may_not_query = self.scopes.captures_here();
        let mut failed = None;
        let mut queried = SmallVec::<[(StreamId, bool); 4]>::new();
        state.deferred.retain_mut(|block| {
            if !picked(block) {
                return true;
            }
            block.uses.retain(|by| !by.captured || by.stream == block.stream);
            if self.is_of_another_thread(block) {
                return true;
            }
            // The stream may be in another capture by now, or in a capture whose scope closed early. An
            // event recorded in a capture never passes.
            let mut is_captured = |stream| match queried.iter().find(|(of, _)| *of == stream) {
                Some((_, captured)) => *captured,
                None => {
                    let captured = may_be_captured(&*self.driver, stream);
                    queried.push((stream, captured));
                    captured
                }
            };
            if block.uses.iter().any(|by| may_not_query || is_captured(by.stream)) {
                return true;
            }
            match self.add_events(block) {
                Ok(()) => {
                    self.attention.remove_other();
                    false
                }
                // Another thread began a capture after the check.
                Err(error) if error.kind() == DriverErrorKind::CaptureActive => true,
                Err(error) => {
                    let _ = failed.get_or_insert(error);
                    true
                }
            }
        });
        failed.map_or(Ok(()), Err)
    }

    /// Records events for a deferred block's uses and makes the block wait for them. Frees the block if
    /// it has no uses.
    fn add_events(&self, block: &Deferred) -> Result<(), DriverError> {
        let waits = self.record_events(&block.uses)?;
        let cell = self.heaps.get(block.heap).expect("heaps are never removed");
        if waits.is_empty() {
            self.complete(cell, block.slot);
            return Ok(());
        }
        let count = u32::try_from(waits.len()).expect("streams of a block are few");
        cell.lock().heap.wait_for(block.slot, count);
        self.wait_for_events(&waits, cell, block.slot);
        Ok(())
    }
}
