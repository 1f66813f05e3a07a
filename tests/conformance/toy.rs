//! A small caching allocator with one selectable defect.

use std::thread::ThreadId;

use stratalloc::size::REQUEST_MAX_BYTES;

use crate::common::prelude::*;

/// The defect of a toy allocator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Defect {
    None,
    /// When a cached block serves a request, it also stays in the cache if it is larger than the
    /// request.
    Overlaps,
    /// Forgets that other streams use a block.
    ReusesEarly,
    /// May serve a request from another stream's free blocks.
    MixesStreams,
    /// Leaks blocks above 1 MiB when they are freed.
    LosesABlock,
    /// Does not count the free of a block that waits for other streams.
    CountsWrong,
    /// Accepts a free of a handle that is not live.
    FreesTwice,
    /// Accepts a free of another allocator's handle.
    FreesForeign,
    /// Allocates half of the requested size from the driver if a request exceeds 1 MiB.
    TooSmall,
    /// Panics if a request has 0 bytes.
    PanicsOnZero,
    /// Leaks the block when an event cannot be created or recorded.
    LeaksOnFailure,
    /// Finds a cached block and removes it in two steps, so two threads may find the same one.
    Races,
    /// Returns an out-of-memory error for every request.
    ServesNothing,
    /// Ignores the place that was requested, such as an address.
    IgnoresPlaces,
    /// Returns an out-of-memory error whose requested size is 0.
    MuteOutOfMemory,
    /// Writes into the first live block when another block is allocated.
    Scribbles,
    /// Does not release free memory when the driver is out of memory.
    KeepsIdle,
    /// Leaks the remaining free blocks when the driver fails to free one.
    ForgetsTheRest,
}

#[derive(Clone, Debug)]
struct Block {
    address: u64,
    segment_bytes: u64,
    bytes: u64,
    stream: StreamId,
    others: BTreeSet<StreamId>,
}

#[derive(Debug, Default)]
struct State {
    live: BTreeMap<u32, Block>,
    next: u32,
    free: Vec<Block>,
    /// For [`Defect::Races`]: the blocks that a thread found in the cache, with that thread.
    found: Vec<(ThreadId, Block)>,
    waiting: Vec<(Block, Vec<EventId>)>,
    statistics: Statistics,
}

/// Adds or removes one segment in the counters, depending on `change`.
fn count_segment(s: &mut Statistics, change: fn(&mut PerPool, u64), bytes: u64) {
    change(&mut s.reserved_bytes, bytes);
    change(&mut s.segment, 1);
}

fn grow(family: &mut PerPool, by: u64) {
    let by = i64::try_from(by).expect("device bytes fit");
    family.all.increase(by);
    family.large.increase(by);
}

fn shrink(family: &mut PerPool, by: u64) {
    let by = i64::try_from(by).expect("device bytes fit");
    family.all.decrease(by);
    family.large.decrease(by);
}

#[derive(Debug)]
pub(crate) struct Toy {
    driver: Arc<dyn Driver>,
    owner: OwnerId,
    defect: Defect,
    misstate: fn(&mut Statistics),
    state: Mutex<State>,
}

/// Returns a constructor of toy allocators with a defect.
pub(crate) fn toy(defect: Defect) -> impl Fn(Arc<dyn Driver>) -> Constructed + Sync {
    made(defect, |_| {})
}

/// Returns a constructor of toy allocators without a defect whose counters are falsified.
pub(crate) fn misstating(
    misstate: fn(&mut Statistics),
) -> impl Fn(Arc<dyn Driver>) -> Constructed + Sync {
    made(Defect::None, misstate)
}

fn made(
    defect: Defect,
    misstate: fn(&mut Statistics),
) -> impl Fn(Arc<dyn Driver>) -> Constructed + Sync {
    move |driver| {
        let (owner, state) = (OwnerId::next(), Mutex::default());
        Ok(Box::new(Toy { driver, owner, defect, misstate, state }))
    }
}

impl Toy {
    /// Returns a cached block that fits the request.
    fn cached(&self, request: Request) -> Option<Block> {
        let fits = |block: &Block| {
            let own = block.stream == request.stream || self.defect == Defect::MixesStreams;
            own && block.segment_bytes >= request.bytes
        };
        if self.defect == Defect::Races {
            return self.found_twice(fits);
        }
        let mut state = self.state.lock();
        let at = state.free.iter().position(fits)?;
        if self.defect == Defect::Overlaps && state.free[at].segment_bytes > request.bytes {
            return Some(state.free[at].clone());
        }
        Some(state.free.swap_remove(at))
    }

    /// Returns a block that another thread found and still holds, as if both had found it at once; otherwise
    /// a cached block. So the defect appears without a real race.
    fn found_twice(&self, fits: impl Fn(&Block) -> bool) -> Option<Block> {
        let (own, mut state) = (std::thread::current().id(), self.state.lock());
        let State { live, free, found, .. } = &mut *state;
        found.retain(|(_, block)| live.values().any(|other| other.address == block.address));
        if let Some(at) = found.iter().position(|(by, block)| *by != own && fits(block)) {
            return Some(found.swap_remove(at).1);
        }
        let block = free.swap_remove(free.iter().position(fits)?);
        found.push((own, block.clone()));
        Some(block)
    }

    fn fresh(&self, request: Request) -> Result<Block, AllocError> {
        let segment_bytes = request.bytes.next_multiple_of(512);
        let from_driver = match self.defect {
            Defect::TooSmall if request.bytes > MIB => segment_bytes / 2,
            _ => segment_bytes,
        };
        let mut taken = self.driver.allocate(from_driver);
        let short = |error: &DriverError| error.is_out_of_memory();
        if taken.as_ref().is_err_and(short) && self.defect != Defect::KeepsIdle {
            self.release()?;
            taken = self.driver.allocate(from_driver);
        }
        let address = taken.map_err(|error| {
            if !error.is_out_of_memory() {
                return AllocError::Driver(error);
            }
            self.state.lock().statistics.num_ooms += 1;
            let requested_bytes =
                if self.defect == Defect::MuteOutOfMemory { 0 } else { request.bytes };
            AllocError::OutOfMemory(Box::new(OutOfMemory {
                requested_bytes,
                driver: Some(error),
                ..OutOfMemory::default()
            }))
        })?;
        count_segment(&mut self.state.lock().statistics, grow, from_driver);
        let (bytes, stream, others) = (request.bytes, request.stream, BTreeSet::new());
        Ok(Block { address, segment_bytes: from_driver, bytes, stream, others })
    }

    /// Waits for the device and releases free memory to the driver.
    fn release(&self) -> Result<(), DriverError> {
        self.driver.synchronize_device()?;
        self.settle()?;
        if self.defect == Defect::ForgetsTheRest {
            let idle = std::mem::take(&mut self.state.lock().free);
            return idle.into_iter().try_for_each(|block| {
                self.driver.free(block.address, block.segment_bytes)?;
                count_segment(&mut self.state.lock().statistics, shrink, block.segment_bytes);
                Ok(())
            });
        }
        loop {
            let Some(block) = self.state.lock().free.pop() else { return Ok(()) };
            if let Err(error) = self.driver.free(block.address, block.segment_bytes) {
                self.state.lock().free.push(block);
                return Err(error);
            }
            count_segment(&mut self.state.lock().statistics, shrink, block.segment_bytes);
        }
    }

    /// Moves blocks to the free list once the work of their other streams has finished.
    fn settle(&self) -> Result<(), DriverError> {
        let mut state = self.state.lock();
        let mut at = 0;
        while at < state.waiting.len() {
            while let Some(&event) = state.waiting[at].1.last() {
                if !self.driver.query_event(event)? {
                    break;
                }
                self.driver.destroy_event(event)?;
                state.waiting[at].1.pop();
            }
            if state.waiting[at].1.is_empty() {
                let (block, _) = state.waiting.swap_remove(at);
                shrink(&mut state.statistics.requested_bytes, block.bytes);
                shrink(&mut state.statistics.active_bytes, block.segment_bytes);
                shrink(&mut state.statistics.active, 1);
                state.free.push(block);
            } else {
                at += 1;
            }
        }
        Ok(())
    }

    /// Records an event on each other stream that uses the block.
    fn marks(&self, block: &Block) -> Result<Vec<EventId>, DriverError> {
        let mut events = Vec::new();
        for stream in &block.others {
            let made = self.driver.create_event().and_then(|event| {
                events.push(event);
                self.driver.record_event(event, *stream)
            });
            if let Err(error) = made {
                // If `destroy_event` failed too, the event would leak. The suite makes only one call fail.
                events.iter().for_each(|event| drop(self.driver.destroy_event(*event)));
                return Err(error);
            }
        }
        Ok(events)
    }

    fn check(&self, allocation: &Allocation) -> Result<(), HandleError> {
        allocation.check_owner(self.owner)?;
        if self.state.lock().live.contains_key(&allocation.token().0[0]) {
            return Ok(());
        }
        Err(HandleError::Stale { address: allocation.address() })
    }

    fn take_back(&self, token: u32) -> Result<(), HandleError> {
        let Some(mut block) = self.state.lock().live.get(&token).cloned() else { return Ok(()) };
        if self.defect == Defect::ReusesEarly {
            block.others.clear();
        }
        let marks = self.marks(&block);
        let mut state = self.state.lock();
        if marks.is_err() && self.defect != Defect::LeaksOnFailure {
            return marks.map(drop).map_err(HandleError::Driver);
        }
        state.live.remove(&token);
        let events = marks?;
        if events.is_empty() || self.defect != Defect::CountsWrong {
            shrink(&mut state.statistics.allocation, 1);
            shrink(&mut state.statistics.allocated_bytes, block.segment_bytes);
        }
        if events.is_empty() {
            shrink(&mut state.statistics.requested_bytes, block.bytes);
            shrink(&mut state.statistics.active_bytes, block.segment_bytes);
            shrink(&mut state.statistics.active, 1);
            if self.defect != Defect::LosesABlock || block.bytes <= MIB {
                state.free.push(block);
            }
        } else {
            state.waiting.push((block, events));
        }
        Ok(())
    }
}

impl DeviceAllocator for Toy {
    fn allocate(&self, request: Request) -> Result<Allocation, AllocError> {
        if self.defect == Defect::PanicsOnZero {
            assert!(request.bytes > 0, "a request has no bytes");
        }
        if request.bytes == 0 {
            return Err(AllocError::ZeroBytes);
        }
        if self.defect != Defect::IgnoresPlaces {
            request.plain()?;
        }
        if request.bytes > REQUEST_MAX_BYTES {
            return Err(AllocError::TooLarge { requested_bytes: request.bytes });
        }
        if self.defect == Defect::ServesNothing {
            let requested_bytes = request.bytes;
            let report = OutOfMemory { requested_bytes, ..OutOfMemory::default() };
            return Err(AllocError::OutOfMemory(Box::new(report)));
        }
        self.settle()?;
        let found = self.cached(request);
        let block = found.map_or_else(|| self.fresh(request), Ok)?;
        let Request { bytes, stream, .. } = request;
        let block = Block { bytes, stream, others: BTreeSet::new(), ..block };
        let mut state = self.state.lock();
        if self.defect == Defect::Scribbles
            && let Some(other) = state.live.values().next()
        {
            self.driver.fill(other.address, 0xAA, 1, other.stream)?;
        }
        grow(&mut state.statistics.allocation, 1);
        grow(&mut state.statistics.allocated_bytes, block.segment_bytes);
        grow(&mut state.statistics.active_bytes, block.segment_bytes);
        grow(&mut state.statistics.active, 1);
        grow(&mut state.statistics.requested_bytes, bytes);
        state.next += 1;
        let (token, address) = (state.next, block.address);
        state.live.insert(token, block);
        Ok(Allocation::new(address, bytes, self.owner, Token([token, 0, 0])))
    }

    fn free(&self, allocation: Allocation) -> Result<(), FreeError> {
        let forgiven = |reason: &HandleError| match reason {
            HandleError::Stale { .. } => self.defect == Defect::FreesTwice,
            HandleError::Foreign { .. } => self.defect == Defect::FreesForeign,
            _ => false,
        };
        let checked = self
            .check(&allocation)
            .or_else(|reason| if forgiven(&reason) { Ok(()) } else { Err(reason) });
        let done = checked.and_then(|()| self.take_back(allocation.token().0[0]));
        done.map_err(|reason| FreeError { reason, allocation })
    }

    fn control(&self) -> Control<'_> {
        let mut control = Control::default();
        control.cross_stream = Some(self);
        control.counters = Some(self);
        control
    }
}

impl CrossStream for Toy {
    fn record_stream(&self, allocation: &Allocation, stream: StreamId) -> Result<(), HandleError> {
        self.check(allocation)?;
        let mut state = self.state.lock();
        if let Some(block) = state.live.get_mut(&allocation.token().0[0])
            && block.stream != stream
        {
            block.others.insert(stream);
        }
        Ok(())
    }

    fn process_events(&self) -> Result<(), DriverError> {
        self.settle()
    }
}

/// Returns the counters that a toy maintains.
fn families(s: &mut Statistics) -> [&mut PerPool; 7] {
    [
        &mut s.allocation,
        &mut s.active,
        &mut s.segment,
        &mut s.allocated_bytes,
        &mut s.active_bytes,
        &mut s.reserved_bytes,
        &mut s.requested_bytes,
    ]
}

impl Counters for Toy {
    fn statistics(&self) -> Statistics {
        let mut statistics = self.state.lock().statistics.clone();
        (self.misstate)(&mut statistics);
        statistics
    }

    fn reset_peaks(&self) {
        for family in families(&mut self.state.lock().statistics) {
            family.all.peak = family.all.current;
            family.large.peak = family.large.current;
        }
    }

    fn reset_accumulated(&self) {
        let statistics = &mut self.state.lock().statistics;
        for family in families(statistics) {
            for counter in [&mut family.all, &mut family.large] {
                (counter.allocated, counter.freed) = (0, 0);
            }
        }
        statistics.num_ooms = 0;
    }
}

impl Drop for Toy {
    fn drop(&mut self) {
        let live = std::mem::take(&mut self.state.get_mut().live);
        self.state.get_mut().free.extend(live.into_values());
        // If the driver fails here, the memory leaks, because a drop cannot report errors.
        drop(self.release());
    }
}
