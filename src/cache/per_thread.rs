//! Streams that are another one on each thread, as CUDA's per-thread default stream is: one number, as
//! many streams as threads.
//!
//! Threads share the heap of such a number, and nothing orders their work. So a block of it counts as
//! used by the stream itself: its free records an event, on the freeing thread, and the block is free
//! for others when that has passed. Work that another thread gave it is its users' to order before the
//! free.
//!
//! In a capture of that very stream the graph can be the order, as for any other stream: for blocks of
//! private pools that one thread takes and frees in one capture, while no other thread's own stream takes
//! any in it. All other frees wait for the end of the capture.
//!
//! Hits of the default pool on all other streams know nothing of this: the table finds no such heap for
//! them. A request in a private pool asks the driver.

use std::thread::ThreadId;

use hashbrown::HashSet;
use parking_lot::Mutex;

use super::cell::{HeapCell, Home};
use super::engine::Engine;
use crate::allocator::{Allocation, Request};
use crate::driver::{CaptureStatus, NodeId};
use crate::error::{AllocError, DriverError};
use crate::heap::{BlockId, Heap, Slot, StreamUse};
use crate::ids::{PoolId, StreamId};

/// What threads took on their own streams in captures.
#[derive(Debug, Default)]
pub(super) struct OwnParts(Mutex<Vec<OwnPart>>);

/// One thread's part of one capture. A thread has one at most.
#[derive(Debug)]
struct OwnPart {
    capture: u64,
    thread: ThreadId,
    /// What it took there and has not freed there: numbers of heaps, and blocks.
    blocks: HashSet<(u32, BlockId)>,
    /// Where its stream was in the graph when it last freed one of them.
    freed_behind: Vec<NodeId>,
}

impl OwnParts {
    /// Forgets a capture that is over.
    pub(super) fn forget(&self, capture: u64) {
        self.0.lock().retain(|part| part.capture != capture);
    }
}

impl Engine {
    /// Allocates in the default pool on a stream that the table does not find: a new one, or one that
    /// is another on each thread.
    #[cold]
    #[inline(never)]
    pub(super) fn allocate_off_the_path(&self, request: Request) -> Result<Allocation, AllocError> {
        let stream = request.stream;
        if !self.driver.is_per_thread_stream(stream) {
            self.add_heap(stream, false)?;
            return self.allocate_by_default(request);
        }
        let cell = match self.heaps.find_per_thread(stream) {
            Some(cell) => cell,
            None => self.add_heap(stream, true)?,
        };
        let found = self.serve(cell, &mut cell.lock(), request.bytes);
        let made = match found {
            Some(made) => made,
            None => self.allocate_under_pressure(cell, Home::of(stream), request)?,
        };
        self.used_by_its_stream(made, stream)
    }

    /// The allocation, noted as used by its own stream if that is another one on each thread. Nobody
    /// else may know it yet.
    ///
    /// # Errors
    ///
    /// [`DriverError`]; the block is free again.
    pub(super) fn used_by_its_stream(
        &self,
        made: Allocation,
        stream: StreamId,
    ) -> Result<Allocation, AllocError> {
        let mut noted = Ok(());
        if self.driver.is_per_thread_stream(stream)
            && let Ok((cell, id)) = self.own(&made)
        {
            let mut state = cell.lock();
            if let Some(slot) = state.heap.live(id, made.address()) {
                noted = self.note_own_use(cell, &mut state.heap, slot);
            }
        }
        match noted {
            Ok(()) => Ok(made),
            Err(error) => {
                let freed = self.free(made);
                debug_assert!(freed.is_ok(), "nobody else knows it");
                Err(error.into())
            }
        }
    }

    /// Notes a new block of a heap that the caller has locked as used by its own stream if that is another
    /// one on each thread.
    ///
    /// # Errors
    ///
    /// [`DriverError`]; nothing is noted, and the block must not be handed out.
    pub(super) fn note_own_use(
        &self,
        cell: &HeapCell,
        heap: &mut Heap,
        slot: Slot,
    ) -> Result<(), DriverError> {
        let stream = cell.stream();
        if !self.driver.is_per_thread_stream(stream) {
            return Ok(());
        }
        // Asked also where nobody told of a capture: else nothing would serve twice in it.
        let status = self.driver.capture_status(stream)?;
        let capture = match status {
            CaptureStatus::Active { capture } => Some(capture),
            CaptureStatus::None | CaptureStatus::Invalidated => None,
        };
        self.note_own_part(stream, capture, (cell.number, heap.id(slot)))?;
        let captured = status != CaptureStatus::None;
        heap.record_use(slot, StreamUse { stream, captured });
        Ok(())
    }

    /// Notes which capture the calling thread's own stream takes a block in.
    fn note_own_part(
        &self,
        stream: StreamId,
        capture: Option<u64>,
        block: (u32, BlockId),
    ) -> Result<(), DriverError> {
        let thread = std::thread::current().id();
        let mut parts = self.captures.own_parts.0.lock();
        parts.retain(|part| part.thread != thread || Some(part.capture) == capture);
        let Some(capture) = capture else { return Ok(()) };
        if let Some(own) = parts.iter_mut().find(|part| part.thread == thread) {
            own.blocks.insert(block);
            return Ok(());
        }
        // The block may be one that another thread's stream freed in this very capture: from now on this
        // stream comes behind that.
        let others = parts.iter().filter(|part| part.capture == capture);
        let nodes: Vec<_> = others.flat_map(|part| part.freed_behind.iter().copied()).collect();
        if let Some(graph) = self.driver.capture()
            && !nodes.is_empty()
        {
            graph.add_to_frontier(stream, &nodes)?;
        }
        let blocks = HashSet::from_iter([block]);
        parts.push(OwnPart { capture, thread, blocks, freed_behind: Vec::new() });
        Ok(())
    }

    /// Notes a block of a heap that the caller has locked as a graph's that was captured before.
    pub(super) fn note_use_in_graph(&self, cell: &HeapCell, heap: &mut Heap, slot: Slot) {
        let stream = cell.stream();
        if self.driver.is_per_thread_stream(stream) {
            heap.record_use(slot, StreamUse { stream, captured: true });
        }
    }

    /// Whether nothing may be waited for or released on behalf of a heap's stream, whichever thread's it
    /// is.
    pub(super) fn may_be_captured(&self, cell: &HeapCell) -> bool {
        let foreign = self.captures.any_open() && self.is_left_in_use(cell);
        foreign || self.is_captured(cell.stream())
    }

    /// Whether free memory of a heap may be in use by streams that only other threads can name. In the
    /// default pool all of it is new or has passed its events.
    fn is_left_in_use(&self, cell: &HeapCell) -> bool {
        cell.pool() != PoolId::DEFAULT && self.driver.is_per_thread_stream(cell.stream())
    }

    /// Waits for all work on free memory of a heap, whichever threads gave it.
    ///
    /// # Errors
    ///
    /// [`DriverError`]; of the kind `CaptureActive` when it did not wait for a capture's sake.
    pub(super) fn wait_for_free_memory(&self, cell: &HeapCell) -> Result<(), DriverError> {
        if !self.driver.is_per_thread_stream(cell.stream()) {
            return self.driver.synchronize_stream(cell.stream());
        }
        if self.is_left_in_use(cell) { self.wait_for_device() } else { Ok(()) }
    }

    /// Whether a block that is freed now was only ever used by its own stream, in the capture that this
    /// thread runs on it: then the graph orders whoever gets it next behind all that was done with it.
    pub(super) fn is_ordered_by_graph(
        &self,
        cell: &HeapCell,
        id: BlockId,
        uses: &[StreamUse],
    ) -> bool {
        let own = cell.stream();
        let in_graph = |by: &StreamUse| by.stream == own && by.captured;
        // Memory of the default pool goes to other threads, which come behind no launch of the graph.
        let private = cell.pool() != PoolId::DEFAULT;
        private && !uses.is_empty() && uses.iter().all(in_graph) && self.was_taken_here(cell, id)
    }

    /// Whether the calling thread took the block in the capture that its own stream is in, and no other
    /// thread's stream takes blocks there. The thread is about to free it then.
    fn was_taken_here(&self, cell: &HeapCell, id: BlockId) -> bool {
        let own = cell.stream();
        let Ok(CaptureStatus::Active { capture }) = self.driver.capture_status(own) else {
            return false;
        };
        let Some(graph) = self.driver.capture() else { return false };
        let thread = std::thread::current().id();
        let mut parts = self.captures.own_parts.0.lock();
        let mut of_capture = parts.iter_mut().filter(|part| part.capture == capture);
        let (Some(part), None) = (of_capture.next(), of_capture.next()) else { return false };
        if part.thread != thread || !part.blocks.remove(&(cell.number, id)) {
            return false;
        }
        let Ok(nodes) = graph.frontier(own) else { return false };
        part.freed_behind = nodes;
        true
    }
}
