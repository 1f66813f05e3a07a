//! Records what goes through an allocator that records nothing itself. The registry puts it around those.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use super::layered::{Layer, Layered, raw_of};
use crate::allocator::{Allocation, Caching, DeviceAllocator, Place, Recording, Request};
use crate::error::{AllocError, FreeError, HandleError};
use crate::history::{
    Action, BlockLayout, BlockStateName, Event, History, SegmentLayout, Snapshot,
};
use crate::ids::PoolId;
use crate::size::PoolKind;

/// An allocator whose requests and frees are recorded.
#[derive(Debug)]
pub struct Record<A> {
    inner: A,
    history: Arc<History>,
    /// Live blocks that were handed out while the history was on: the event that says so.
    live: Mutex<HashMap<u64, Event>>,
}

/// `inner`, recording in `history`.
pub fn record<A: DeviceAllocator>(inner: A, history: Arc<History>) -> Layered<Record<A>> {
    Layered::new(Record { inner, history, live: Mutex::default() })
}

impl<A: DeviceAllocator> Record<A> {
    #[cold]
    fn handed_out(&self, request: Request, answer: &mut Result<Allocation, AllocError>) {
        let pool = match request.place {
            Place::Pool(pool) => pool,
            Place::Anywhere | Place::Address(_) => PoolId::DEFAULT,
        };
        let (stream, size_bytes) = (request.stream, request.bytes);
        let event = |action, address| Event { action, address, size_bytes, stream, pool };
        match answer {
            Ok(found) => {
                let event = event(Action::Alloc, found.address());
                self.live.lock().insert(found.address(), event);
                self.history.record(0, || event);
            }
            Err(AllocError::OutOfMemory(report)) => {
                let free_bytes = report.device_free_bytes.unwrap_or(0);
                self.history.record(0, || event(Action::OutOfMemory, free_bytes));
                self.history.explain(report);
            }
            Err(_) => {}
        }
    }

    /// Records a free, if `free` says that it was one. It happened before: afterwards another thread may have
    /// the address.
    #[cold]
    fn freed<T, E>(&self, address: u64, free: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let _asks = self.history.of_free();
        let moment = self.history.moment();
        let known = self.live.lock().remove(&address);
        let answer = free();
        let Some(event) = known else { return answer };
        match &answer {
            Ok(_) => {
                if let Some(moment) = moment {
                    let event = |action| Event { action, ..event };
                    self.history.push(0, moment, event(Action::FreeRequested));
                    self.history.push(0, moment.next(), event(Action::FreeCompleted));
                }
            }
            Err(_) => drop(self.live.lock().insert(address, event)),
        }
        answer
    }
}

impl<A: DeviceAllocator> Layer for Record<A> {
    type Inner = A;

    #[inline]
    fn inner(&self) -> &A {
        &self.inner
    }

    #[inline]
    fn allocate(&self, request: Request) -> Result<Allocation, AllocError> {
        let _asks = self.history.of_request();
        let mut answer = self.inner.allocate(request);
        if self.history.is_on() {
            self.handed_out(request, &mut answer);
        }
        answer
    }

    #[inline]
    fn free(&self, allocation: Allocation) -> Result<(), FreeError> {
        if self.history.is_on() {
            return self.freed(allocation.address(), || self.inner.free(allocation));
        }
        self.inner.free(allocation)
    }

    #[inline]
    fn free_raw(&self, address: u64) -> Result<u64, HandleError> {
        let free = || raw_of(&self.inner).free_raw(address);
        if self.history.is_on() { self.freed(address, free) } else { free() }
    }

    fn recording(&self) -> Option<&dyn Recording> {
        Some(self)
    }
}

impl<A: DeviceAllocator> Recording for Record<A> {
    fn history(&self) -> &Arc<History> {
        &self.history
    }

    /// As the allocator lays its memory out; where it does not say, each live block that was recorded is a
    /// segment of its own.
    fn snapshot(&self) -> Snapshot {
        let limit_bytes = self.inner.caching().and_then(Caching::limit_bytes);
        let told = self.inner.caching().map(Caching::layout);
        let live = self.live.lock();
        let segments = told.unwrap_or_else(|| live.values().map(alone).collect());
        let captured = self.history.capture();
        drop(live);
        self.history.snapshot_of(segments, captured, limit_bytes)
    }
}

fn alone(event: &Event) -> SegmentLayout {
    let Event { address, size_bytes, stream, pool, .. } = *event;
    let state = BlockStateName::ActiveAllocated;
    let block = BlockLayout { address, size_bytes, requested_bytes: size_bytes, state };
    let kind = PoolKind::of(size_bytes);
    SegmentLayout {
        address,
        size_bytes,
        stream,
        kind,
        pool,
        expandable: false,
        blocks: vec![block],
    }
}
