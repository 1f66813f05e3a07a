//! Graph captures: what may not be asked while one runs, and blocks freed inside one.
//!
//! While a graph is captured its events cannot be queried, so a block that other streams used and
//! that is freed meanwhile is **deferred**: it drains until the capture ends. Uses that were
//! announced inside the capture end with it; earlier ones get their events then. With
//! `graph_capture_record_stream_reuse` a deferred block may be handed out again inside the capture:
//! at its free the ends of all its streams are noted, and it is free as soon as all of them lie
//! behind the end of its own stream in the graph.
//!
//! Source: PyTorch's rules for `record_stream` inside captures.

use std::sync::atomic::{AtomicBool, Ordering};

use hashbrown::{HashMap, HashSet};
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::cell::HeapCell;
use super::engine::Engine;
use crate::config::Settings;
use crate::driver::{CaptureStatus, NodeId, expects_captures, may_be_captured, thread_of};
use crate::error::{DriverError, DriverErrorKind, HandleError};
use crate::heap::{BlockId, Slot, StreamUse};
use crate::ids::{PoolId, StreamId, ThreadNumber};

/// The blocks that wait for the ends of captures.
#[derive(Debug, Default)]
pub(super) struct Captures {
    reuse: AtomicBool,
    /// Whether any open scope counts as a capture, as it did in PyTorch until 2.12.
    routing_is_capture: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    deferred: Vec<Deferred>,
    /// Of the block that was deferred last.
    last_serial: u64,
    /// Nodes behind the end of a stream in its capture, for each stream that asked. They only grow.
    behind: HashMap<StreamId, Behind>,
}

/// A stream belongs to one capture at a time.
#[derive(Debug)]
struct Behind {
    capture: u64,
    nodes: HashSet<NodeId>,
}

/// A block that was freed inside a capture.
#[derive(Debug)]
struct Deferred {
    /// Which one it is: a slot may come again.
    serial: u64,
    heap: u32,
    slot: Slot,
    pool: PoolId,
    stream: StreamId,
    uses: SmallVec<[StreamUse; 4]>,
    /// The thread whose per-thread streams use the block, if any do.
    thread: Option<ThreadNumber>,
    /// The capture in which all its streams were when it was freed, and their ends in the graph.
    ends: Option<(u64, SmallVec<[NodeId; 4]>)>,
}

impl Captures {
    pub(super) fn apply(&self, settings: &Settings) {
        self.reuse.store(settings.graph_capture_record_stream_reuse, Ordering::Relaxed);
        let is_capture = settings.compat.decisions().routing_is_capture;
        self.routing_is_capture.store(is_capture, Ordering::Relaxed);
    }
}

impl Engine {
    /// Frees what waits and may be free by now, before a request on `stream` is served.
    #[inline]
    pub(super) fn settle_waiting(
        &self,
        stream: StreamId,
        status: CaptureStatus,
    ) -> Result<(), DriverError> {
        match status {
            CaptureStatus::Active { capture } if self.captures.reuse.load(Ordering::Relaxed) => {
                self.reuse_deferred(stream, capture)
            }
            CaptureStatus::None if !self.scopes.captures_here() && !self.counts_as_captured() => {
                self.settle_deferred()?;
                if self.attention.any_event() { self.poll_events() } else { Ok(()) }
            }
            _ => Ok(()),
        }
    }

    /// Whether an open scope counts as a capture, by the rules of the version in force.
    #[inline]
    pub(super) fn counts_as_captured(&self) -> bool {
        self.captures.routing_is_capture.load(Ordering::Relaxed) && self.scopes.any()
    }

    /// Whether nothing may be waited for or released on behalf of a stream, whoever was told of a capture.
    pub(super) fn is_captured(&self, stream: StreamId) -> bool {
        self.scopes.captures_here() || may_be_captured(&*self.driver, stream)
    }

    /// Whether work on a stream is known to become part of a graph, also one that nobody told the engine of.
    pub(super) fn is_capturing(&self, stream: StreamId) -> bool {
        let status = self.driver.capture_status(stream);
        matches!(status, Ok(CaptureStatus::Active { .. } | CaptureStatus::Invalidated))
    }

    /// Takes back, inside a capture, a block that these other streams use.
    pub(super) fn defer_free(
        &self,
        cell: &HeapCell,
        address: u64,
        id: BlockId,
        uses: SmallVec<[StreamUse; 4]>,
    ) -> Result<(), HandleError> {
        let ends = self.ends_in_graph(cell.stream(), &uses);
        let thread = uses.iter().find_map(|by| thread_of(&*self.driver, by.stream));
        // Held until the block is listed: the end of the capture must find it.
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

    /// The ends of a block's streams, if reuse is on and all of them are in one capture.
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
            // The end of this thread's stream says nothing of another's, and that may be the user.
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
        // A use from before the capture is not in the graph: its work must be waited for.
        let all_inside = uses.iter().all(|by| by.captured);
        of.filter(|_| all_inside).map(|capture| (capture, ends))
    }

    /// Frees deferred blocks of `stream` whose streams have all been joined in its capture.
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

    /// A capture has ended. With reuse on, the blocks of its pool that were freed in it are settled
    /// at once, otherwise when the next request comes. Blocks that only the calling thread can settle are
    /// in any case: it may never come again.
    pub(super) fn end_capture(&self, pool: PoolId) -> Result<(), DriverError> {
        let state = &mut *self.captures.state.lock();
        let all_over = !self.scopes.any_capture();
        if all_over {
            state.behind.clear();
        }
        let reuse = self.captures.reuse.load(Ordering::Relaxed);
        let here = Some(ThreadNumber::current());
        // Uses inside other captures go on.
        let is_over = |d: &Deferred| {
            all_over || d.uses.iter().all(|by| !by.captured || by.stream == d.stream)
        };
        let ours = |d: &Deferred| d.thread == here && is_over(d);
        self.settle(state, |d| ours(d) || (reuse && d.pool == pool))
    }

    /// Settles all deferred blocks, unless a capture is under way. Those that only another thread can settle
    /// stay.
    #[inline]
    pub(super) fn settle_deferred(&self) -> Result<(), DriverError> {
        self.settle_all(|_| {})
    }

    /// The same, also those that only another thread could settle without waiting. Waits for the device
    /// if there are any.
    pub(super) fn settle_deferred_surely(&self) -> Result<(), DriverError> {
        let settled = self.settle_deferred();
        let last = {
            let state = self.captures.state.lock();
            let any = state.deferred.iter().any(|block| self.is_of_another_thread(block));
            // What waits for the end of a capture goes on waiting.
            if !any || expects_captures(&*self.driver) {
                return settled;
            }
            state.last_serial
        };
        // With the list unlocked: every request looks at it.
        self.driver.synchronize_device()?;
        settled.and(self.settle_all(|block| {
            if block.serial <= last && self.is_of_another_thread(block) {
                // Other streams may be of another device.
                block.uses.retain(|by| !self.driver.is_per_thread_stream(by.stream));
            }
        }))
    }

    fn settle_all(&self, first: impl FnMut(&mut Deferred)) -> Result<(), DriverError> {
        if self.scopes.any_capture() || !self.attention.any_other() {
            return Ok(());
        }
        let state = &mut *self.captures.state.lock();
        state.deferred.iter_mut().for_each(first);
        self.settle(state, |_| true)
    }

    /// Whether a block was used by streams that another thread than this one has of its own: an event that
    /// this thread records says nothing of them.
    fn is_of_another_thread(&self, block: &Deferred) -> bool {
        block.thread.is_some_and(|thread| thread != ThreadNumber::current())
            && block.uses.iter().any(|by| {
                // Other uses from inside the capture end with it.
                self.driver.is_per_thread_stream(by.stream)
                    && (!by.captured || by.stream == block.stream)
            })
    }

    /// Settles those of the deferred blocks that are picked, as far as this thread can. Uses from inside the
    /// capture have ended with it: what remains gets its events. A use by the block's own stream remains:
    /// nobody announces what it does after the capture.
    ///
    /// The list stays locked: who finds a block neither in it nor among the events takes it for in use.
    fn settle(
        &self,
        state: &mut State,
        picked: impl Fn(&Deferred) -> bool,
    ) -> Result<(), DriverError> {
        let may_not_ask = self.scopes.captures_here();
        let mut failed = None;
        let mut asked = SmallVec::<[(StreamId, bool); 4]>::new();
        state.deferred.retain_mut(|block| {
            if !picked(block) {
                return true;
            }
            block.uses.retain(|by| !by.captured || by.stream == block.stream);
            if self.is_of_another_thread(block) {
                return true;
            }
            // The stream may be in another capture by now, or in one whose scope closed before it
            // ended: an event that is recorded there never passes.
            let mut is_captured = |stream| match asked.iter().find(|(of, _)| *of == stream) {
                Some((_, captured)) => *captured,
                None => {
                    let captured = may_be_captured(&*self.driver, stream);
                    asked.push((stream, captured));
                    captured
                }
            };
            if block.uses.iter().any(|by| may_not_ask || is_captured(by.stream)) {
                return true;
            }
            match self.give_events(block) {
                Ok(()) => {
                    self.attention.remove_other();
                    false
                }
                // A capture has begun meanwhile.
                Err(error) if error.kind() == DriverErrorKind::CaptureActive => true,
                Err(error) => {
                    let _ = failed.get_or_insert(error);
                    true
                }
            }
        });
        failed.map_or(Ok(()), Err)
    }

    /// Makes a deferred block wait for events on its streams, or free if there is nothing to wait for.
    fn give_events(&self, block: &Deferred) -> Result<(), DriverError> {
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
