//! Streams that are another one on each thread, as CUDA's per-thread default stream is: one number, as
//! many streams as threads.
//!
//! Threads share the heap of such a number, and nothing orders their work. So a block of it counts as
//! used by the stream itself: its free records an event, on the freeing thread, and the block is free
//! for others when that has passed. Work that another thread gave it is its users' to order before the
//! free. In a capture of that very stream the graph is the order, as for any other stream.
//!
//! Hits on all other streams know nothing of this: the table finds no such heap for them.

use super::cell::{HeapCell, Home};
use super::engine::Engine;
use crate::allocator::{Allocation, Request};
use crate::error::{AllocError, DriverError};
use crate::heap::{Heap, Slot, StreamUse};
use crate::ids::StreamId;

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
        Ok(self.used_by_its_stream(made, stream))
    }

    /// The allocation, noted as used by its own stream if that is another one on each thread. Nobody
    /// else may know it yet.
    pub(super) fn used_by_its_stream(&self, made: Allocation, stream: StreamId) -> Allocation {
        if self.driver.is_per_thread_stream(stream)
            && let Ok((cell, id)) = self.own(&made)
        {
            let captured = self.captures.any_open() && self.is_capturing(stream);
            let mut state = cell.lock();
            if let Some(slot) = state.heap.live(id, made.address()) {
                state.heap.record_use(slot, StreamUse { stream, captured });
            }
        }
        made
    }

    /// The same for a block of a heap that the caller has locked; `captured` when it is a graph's.
    pub(super) fn note_own_use(
        &self,
        cell: &HeapCell,
        heap: &mut Heap,
        slot: Slot,
        captured: bool,
    ) {
        let stream = cell.stream();
        if self.driver.is_per_thread_stream(stream) {
            heap.record_use(slot, StreamUse { stream, captured });
        }
    }

    /// Whether nothing may be waited for or released on behalf of a stream, whichever thread's it is.
    pub(super) fn may_be_captured(&self, stream: StreamId) -> bool {
        let foreign = self.captures.any_open() && self.driver.is_per_thread_stream(stream);
        foreign || self.is_captured(stream)
    }

    /// Waits for all work of a stream, whichever threads gave it.
    ///
    /// # Errors
    ///
    /// [`DriverError`]; of the kind `CaptureActive` when it did not wait for a capture's sake.
    pub(super) fn wait_for_stream(&self, stream: StreamId) -> Result<(), DriverError> {
        match self.driver.is_per_thread_stream(stream) {
            true => self.wait_for_device(),
            false => self.driver.synchronize_stream(stream),
        }
    }

    /// Whether a block that is freed now was only ever used by its own stream, in the capture that this
    /// thread runs on it: then the graph orders whoever gets it next behind all that was done with it.
    pub(super) fn is_ordered_by_graph(&self, own: StreamId, uses: &[StreamUse]) -> bool {
        !uses.is_empty()
            && uses.iter().all(|by| by.stream == own && by.captured)
            && self.is_capturing(own)
    }
}
