//! Allocators for tests of layers: a user's allocator with only the two required methods, and the native
//! strategy on a simulated device.

use crate::common::prelude::*;

pub(crate) const DEFAULT: StreamId = StreamId::DEFAULT;

/// An allocator with only the two required methods. It returns ever higher addresses, up to a limit on live
/// bytes, and records live blocks.
#[derive(Debug)]
pub(crate) struct Two {
    owner: OwnerId,
    pub(crate) state: Mutex<TwoState>,
}

#[derive(Debug)]
pub(crate) struct TwoState {
    next: u64,
    pub(crate) live: HashMap<u64, u64>,
    pub(crate) limit_bytes: u64,
    /// While this is true, every free fails.
    pub(crate) stubborn: bool,
}

impl Two {
    pub(crate) fn new(limit_bytes: u64) -> Arc<Self> {
        let state = TwoState { next: 1000, live: HashMap::new(), limit_bytes, stubborn: false };
        Arc::new(Self { owner: OwnerId::next(), state: Mutex::new(state) })
    }

    pub(crate) fn live_bytes(&self) -> u64 {
        self.state.lock().live.values().sum()
    }
}

impl DeviceAllocator for Two {
    fn allocate(&self, request: Request) -> Result<Allocation, AllocError> {
        let mut state = self.state.lock();
        let live: u64 = state.live.values().sum();
        if request.bytes == 0 {
            return Err(AllocError::ZeroBytes);
        }
        if live + request.bytes > state.limit_bytes {
            let report = OutOfMemory { requested_bytes: request.bytes, ..OutOfMemory::default() };
            return Err(AllocError::OutOfMemory(Box::new(report)));
        }
        let address = state.next;
        state.next += request.bytes + 24;
        state.live.insert(address, request.bytes);
        Ok(Allocation::new(address, request.bytes, self.owner, Token([1, 2, 3])))
    }

    fn free(&self, allocation: Allocation) -> Result<(), FreeError> {
        let address = allocation.address();
        let foreign = HandleError::Foreign { owner: allocation.owner(), called: self.owner };
        let mut state = self.state.lock();
        if allocation.owner() != self.owner {
            return Err(FreeError { reason: foreign, allocation });
        }
        let whole = state.live.get(&address) == Some(&allocation.size_bytes());
        if state.stubborn || !whole {
            return Err(FreeError { reason: HandleError::Stale { address }, allocation });
        }
        state.live.remove(&address);
        Ok(())
    }
}

pub(crate) fn sim() -> Arc<Sim> {
    Arc::new(Sim::new(SimOptions { event_mode: EventMode::Manual, ..SimOptions::default() }))
}

pub(crate) fn native(sim: &Arc<Sim>, raw_addresses: bool) -> Engine {
    let options =
        EngineOptions { settings: Settings::default(), raw_addresses, ..EngineOptions::default() };
    Engine::new(Arc::clone(sim) as Arc<dyn Driver>, &options).expect("the options are valid")
}

pub(crate) fn built(text: &str, driver: Arc<dyn Driver>, raw_addresses: bool) -> Strategy {
    let config = config(text);
    registry::build(&config, driver, BuildOptions { raw_addresses }).expect(text)
}

pub(crate) fn allocated<A: DeviceAllocator>(allocator: &A) -> i64 {
    allocator.stats().allocation.all.current
}
