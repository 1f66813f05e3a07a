//! CUDA's per-thread default stream: one handle, but a separate stream for each thread.
//!
//! Threads share the heap of this handle, and nothing orders their work. So each block of that heap
//! counts as used by the stream itself. Freeing a block records an event on the freeing thread's stream,
//! and the block can be reused when that event has passed. Callers must order work of other threads
//! before the free.
//!
//! A block that is freed while the freeing thread's stream is captured waits for the end of the capture:
//! a graph orders the work of one thread only, and another thread may use the memory next.
//!
//! Hits of the default pool on other streams check nothing: the table by stream does not contain heaps of
//! per-thread default streams. Requests in private pools check with the driver.

use super::cell::{HeapCell, HeapKey};
use super::engine::Engine;
use crate::allocator::{Allocation, Request};
use crate::driver::synchronize_outside_captures;
use crate::error::{AllocError, DriverError, DriverErrorKind};
use crate::heap::{Heap, Slot, StreamUse};
use crate::ids::{PoolId, StreamId};

impl Engine {
    /// Allocates in the default pool on a stream that is not in the table by stream: a new one, or a
    /// per-thread default stream.
    #[cold]
    #[inline(never)]
    pub(super) fn allocate_off_the_path(
        &self,
        bytes: u64,
        stream: StreamId,
    ) -> Result<Allocation, AllocError> {
        if !self.driver.is_per_thread_stream(stream) {
            self.add_heap(stream, false)?;
            return self.allocate_by_default::<true>(bytes, stream);
        }
        let cell = match self.heaps.find_per_thread(stream) {
            Some(cell) => cell,
            None => self.add_heap(stream, true)?,
        };
        self.allocate_in_heap(cell, HeapKey::of(stream), Request::new(bytes, stream))
    }

    /// Allocates in a heap that serves `key`, off the hot path.
    pub(super) fn allocate_in_heap(
        &self,
        cell: &HeapCell,
        key: HeapKey,
        request: Request,
    ) -> Result<Allocation, AllocError> {
        let made = self.allocate_by_policy(cell, key, request)?;
        Ok(self.used_by_its_stream(made, request.stream))
    }

    /// Records that the allocation is used by its own stream, if that is a per-thread default stream.
    /// Must be called before the allocation is returned to the caller.
    pub(super) fn used_by_its_stream(&self, made: Allocation, stream: StreamId) -> Allocation {
        if self.driver.is_per_thread_stream(stream)
            && let Ok((cell, id)) = self.own(&made)
        {
            let captured = self.is_capturing(stream);
            let mut state = cell.lock();
            if let Some(slot) = state.heap.live(id, made.address()) {
                self.note_own_use(cell, &mut state.heap, slot, captured);
            }
        }
        made
    }

    /// Records that a new block is used by its own stream, if that is a per-thread default stream. The
    /// caller has locked the heap. `captured` is true if the stream is being captured.
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

    /// Returns true if a capture forbids waiting for a heap's stream and releasing the heap's memory. A
    /// capture of any thread does so for a per-thread default stream in a private pool.
    pub(super) fn may_not_be_released(&self, cell: &HeapCell) -> bool {
        let foreign = self.scopes.any_capture() && self.may_be_in_use(cell);
        foreign || self.is_captured(cell.stream())
    }

    /// Returns true if per-thread default streams of other threads may still use free memory of a heap.
    /// In the default pool all free memory is new or has passed its events.
    fn may_be_in_use(&self, cell: &HeapCell) -> bool {
        cell.pool() != PoolId::DEFAULT && self.driver.is_per_thread_stream(cell.stream())
    }

    /// Waits for the work of all threads that may still use free memory of a heap.
    ///
    /// # Errors
    ///
    /// [`DriverError`]; of the kind `CaptureActive` if a capture prevents the wait.
    pub(super) fn wait_for_free_memory(&self, cell: &HeapCell) -> Result<(), DriverError> {
        if !self.driver.is_per_thread_stream(cell.stream()) {
            return match self.driver.synchronize_stream(cell.stream()) {
                // The stream no longer exists, but its work may still run.
                Err(error) if error.kind() == DriverErrorKind::InvalidValue => {
                    synchronize_outside_captures(&*self.driver)
                }
                waited => waited,
            };
        }
        if self.may_be_in_use(cell) { synchronize_outside_captures(&*self.driver) } else { Ok(()) }
    }
}
