//! The layers of registered allocators. The registry gives each its registered name, and records the requests
//! and frees of those that do not record them.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use super::watch::{Freeing, Watch, Watched};
use crate::allocator::{Allocation, Caching, Control, DeviceAllocator, Place, Recording, Request};
use crate::error::{AllocError, AllocResult};
use crate::history::{
    Action, BlockLayout, BlockStateName, Event, History, SegmentLayout, Snapshot,
};
use crate::ids::PoolId;

/// The history, and the live blocks recorded in it.
#[derive(Debug)]
pub struct Record {
    history: Arc<History>,
    /// The event of each recorded allocation whose free was not recorded. Only calls made while the history
    /// is on are recorded.
    live: Mutex<HashMap<u64, Event>>,
    /// The name, if it is not that of the allocator below.
    name: Option<Name>,
}

/// The name that an allocator is registered with.
#[derive(Debug)]
pub struct Name(String);

/// Returns `inner`, recorded in `history`.
pub fn record<A: DeviceAllocator>(inner: A, history: Arc<History>) -> Watched<A, Record> {
    Watched::new(inner, Record { history, live: Mutex::default(), name: None })
}

/// Returns `inner` with another name, recorded in `history`.
pub fn record_as<A: DeviceAllocator>(
    inner: A,
    name: &str,
    history: Arc<History>,
) -> Watched<A, Record> {
    let name = Some(Name(name.to_owned()));
    Watched::new(inner, Record { history, live: Mutex::default(), name })
}

/// Returns `inner`, which records its history itself, with another name.
pub fn named<A: DeviceAllocator>(inner: A, name: &str) -> Watched<A, Name> {
    Watched::new(inner, Name(name.to_owned()))
}

impl Watch for Name {
    fn name<'n>(&'n self, _: &'n str) -> &'n str {
        &self.0
    }
}

impl Record {
    #[cold]
    fn allocated(&self, request: Request, answer: &mut Result<Allocation, AllocError>) {
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

    /// Records a free if `free` succeeds. The timestamp is taken before the free, because another
    /// thread may allocate the address right after the free.
    #[cold]
    fn freed<T, E>(&self, address: u64, free: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let _context = self.history.of_free();
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

impl Watch for Record {
    #[inline]
    fn allocate<A: DeviceAllocator>(&self, request: Request, below: &A) -> AllocResult {
        let _context = self.history.of_request();
        let mut answer = below.allocate(request);
        if self.history.is_on() {
            self.allocated(request, &mut answer);
        }
        answer
    }

    #[inline]
    fn free<T, E>(&self, block: Freeing, free: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        if self.history.is_on() { self.freed(block.address, free) } else { free() }
    }

    fn name<'n>(&'n self, below: &'n str) -> &'n str {
        self.name.as_ref().map_or(below, |name| name.name(below))
    }

    fn control<A: DeviceAllocator>(watched: &Watched<A, Self>) -> Control<'_> {
        Control { recording: Some(watched), ..watched.below().control() }
    }
}

impl<A: DeviceAllocator> Recording for Watched<A, Record> {
    fn history(&self) -> &Arc<History> {
        &self.history
    }

    /// Returns the layout of the allocator below. If it reports none, returns each recorded live block
    /// as a segment of its own.
    fn snapshot(&self) -> Snapshot {
        let caching = self.below().control().caching;
        let limit_bytes = caching.and_then(Caching::limit_bytes);
        let layout = caching.map(Caching::layout);
        let live = self.live.lock();
        let segments = layout.unwrap_or_else(|| live.values().map(alone).collect());
        let captured = self.history.capture();
        drop(live);
        self.history.snapshot_of(segments, captured, limit_bytes)
    }
}

fn alone(event: &Event) -> SegmentLayout {
    let Event { address, size_bytes, stream, pool, .. } = *event;
    let state = BlockStateName::ActiveAllocated;
    let block = BlockLayout { address, size_bytes, requested_bytes: size_bytes, state };
    SegmentLayout::of_block(block, stream, pool)
}
