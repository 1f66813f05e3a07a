//! Streams that are another one on each thread, as CUDA's per-thread default stream is: one number, as
//! many streams as threads.
//!
//! Threads share the heap of such a number, and nothing orders their work. So a block of it counts as
//! used by the stream itself: its free records an event, on the freeing thread, and the block is free
//! for others when that has passed. Work that another thread gave it is its users' to order before the
//! free.
//!
//! What is freed while that very stream is captured waits for the end of the capture: a graph orders what
//! one thread gave it, and who gets the memory next may be another.
//!
//! Hits of the default pool on all other streams know nothing of this: the table finds no such heap for
//! them. A request in a private pool asks the driver.

use super::cell::{HeapCell, Home};
use super::engine::Engine;
use crate::allocator::{Allocation, Request};
use crate::driver::synchronize_outside_captures;
use crate::error::{AllocError, DriverError, DriverErrorKind};
use crate::heap::{Heap, Slot, StreamUse};
use crate::ids::{PoolId, StreamId};

impl Engine {
    /// Allocates in the default pool on a stream that the table does not find: a new one, or one that
    /// is another on each thread.
    #[cold]
    #[inline(never)]
    pub(super) fn allocate_off_the_path(&self, request: Request) -> Result<Allocation, AllocError> {
        let stream = request.stream;
        if !self.driver.is_per_thread_stream(stream) {
            self.add_heap(stream, false)?;
            return self.allocate_by_default::<true>(request.bytes, request.stream);
        }
        let cell = match self.heaps.find_per_thread(stream) {
            Some(cell) => cell,
            None => self.add_heap(stream, true)?,
        };
        self.allocate_at_home(cell, Home::of(stream), request)
    }

    /// Allocates in a heap that serves `home`, off the path of hits.
    pub(super) fn allocate_at_home(
        &self,
        cell: &HeapCell,
        home: Home,
        request: Request,
    ) -> Result<Allocation, AllocError> {
        let found = self.serve::<true>(cell, &mut cell.lock_at(home)?, request.bytes);
        let made = match found {
            Some(made) => made,
            None => self.allocate_under_pressure(cell, home, request)?,
        };
        Ok(self.used_by_its_stream(made, request.stream))
    }

    /// The allocation, noted as used by its own stream if that is another one on each thread. Nobody
    /// else may know it yet.
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

    /// Notes a new block of a heap that the caller has locked as used by its own stream if that is another
    /// one on each thread; `captured` when it is a graph's.
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

    /// Whether nothing may be waited for or released on behalf of a heap's stream, whichever thread's it
    /// is.
    pub(super) fn is_left_alone(&self, cell: &HeapCell) -> bool {
        let foreign = self.scopes.any_capture() && self.is_left_in_use(cell);
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
            return match self.driver.synchronize_stream(cell.stream()) {
                // The stream is gone, and what it was given may still run.
                Err(error) if error.kind() == DriverErrorKind::InvalidValue => {
                    synchronize_outside_captures(&*self.driver)
                }
                waited => waited,
            };
        }
        if self.is_left_in_use(cell) { synchronize_outside_captures(&*self.driver) } else { Ok(()) }
    }
}
