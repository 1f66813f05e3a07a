//! A device without memory: any capacity, a simulated clock, events under the test's control.
//!
//! It keeps exact books of addresses, bytes and order, and refuses what a real device would refuse,
//! but no byte exists behind an address: copies check their ranges and move nothing, and what is
//! copied to the host reads as zeros. Nothing ever waits; what a real device would wait for is
//! finished by the call, and the clock moves instead.
//! Read next: `work` (streams and events), `ranges` (addresses and bytes), `control` (what a test
//! may do to it).

use std::collections::BTreeSet;

use parking_lot::{Mutex, MutexGuard};

use super::call::Call;
use super::{
    Capture, CaptureStatus, DeviceInfo, Driver, DriverResult, MemoryInfo, MemoryPools, Peers,
    ProcessUsage, Processes, VirtualMemory,
};
use crate::error::{DriverError, DriverErrorKind};
use crate::ids::{DeviceId, EventId, StreamId};
use crate::size::MIB;

mod control;
mod costs;
mod graph;
mod idle;
mod mapping;
mod peers;
mod pools;
mod ranges;
#[cfg(test)]
mod tests;
mod work;

pub use costs::{CallCosts, Cost};
use graph::Graphs;
use mapping::Mappings;
use pools::Pools;
use ranges::{AddressSpace, Budget};
use work::{Event, Work};

/// Addresses are multiples of this, and so are pieces of virtual memory.
const GRANULARITY_BYTES: u64 = 2 * MIB;

/// When an event counts as finished.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EventMode {
    /// When the test says so, or when somebody waits for it.
    Manual,
    /// At once.
    #[default]
    Immediate,
    /// When the clock has advanced by this many nanoseconds since it was recorded, and not before
    /// what its stream recorded or waited for earlier.
    After(u64),
}

/// Which addresses a simulated device gives to new segments and reservations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AddressOrder {
    /// The lowest free ones that fit.
    #[default]
    Lowest,
    /// The ones above all that were given before.
    Rising,
    /// The ones below all that were given before.
    Falling,
}

/// What a simulated device is like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SimOptions {
    /// Its ordinal.
    pub device: DeviceId,
    /// All the memory it has.
    pub total_bytes: u64,
    /// Its name, for people.
    pub name: String,
    /// When events finish.
    pub event_mode: EventMode,
    /// What each call costs on the clock.
    pub costs: CallCosts,
    /// How many other devices it can reach: those with the lowest ordinals. With none there is no
    /// [`Peers`].
    pub reachable_devices: u32,
    /// Whether its pieces have fabric handles. Only this device understands them.
    pub fabric: bool,
    /// Where new segments and reservations lie.
    pub addresses: AddressOrder,
}

impl Default for Sim {
    fn default() -> Self {
        Self::new(SimOptions::default())
    }
}

impl Default for SimOptions {
    /// An H200 whose events finish at once.
    fn default() -> Self {
        Self {
            device: DeviceId(0),
            total_bytes: 150_109_880_320,
            name: "simulated H200".to_owned(),
            event_mode: EventMode::default(),
            costs: CallCosts::default(),
            reachable_devices: 0,
            fabric: false,
            addresses: AddressOrder::default(),
        }
    }
}

/// A device without memory. See the [module](self) for what it does and does not do.
///
/// Streams that it did not make are accepted, because recordings name raw handles; destroyed ones
/// are refused. A call that waits finishes what it would wait for, in every [`EventMode`].
#[derive(Debug)]
pub struct Sim {
    options: SimOptions,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    now_ns: u64,
    counts: [u64; Call::ALL.len()],
    budget: Budget,
    memory: AddressSpace,
    work: Work,
    mappings: Mappings,
    graphs: Graphs,
    pools: Pools,
    /// Other devices to which access was enabled.
    peers: BTreeSet<DeviceId>,
}

impl Sim {
    /// A device that holds nothing yet.
    #[must_use]
    pub fn new(options: SimOptions) -> Self {
        let state = State {
            now_ns: 0,
            counts: [0; Call::ALL.len()],
            budget: Budget { used_bytes: 0, peak_used_bytes: 0, total_bytes: options.total_bytes },
            memory: AddressSpace::new(0x7f00_0000_0000, 0x7fff_ffe0_0000_0000, options.addresses),
            work: Work::new(options.event_mode),
            mappings: Mappings::new(options.addresses),
            graphs: Graphs::default(),
            pools: Pools::new(),
            peers: BTreeSet::new(),
        };
        Self { options, state: Mutex::new(state) }
    }

    /// Opens the books for one call: counts it and lets its cost pass.
    fn enter(&self, call: Call, cost_ns: u64) -> MutexGuard<'_, State> {
        let mut state = self.state.lock();
        state.counts[call as usize] += 1;
        state.pass(cost_ns);
        state
    }

    /// [`enter`](Self::enter) for calls without a cost of their own.
    fn enter_other(&self, call: Call) -> MutexGuard<'_, State> {
        self.enter(call, self.options.costs.other.fixed_ns)
    }
}

impl State {
    fn pass(&mut self, ns: u64) {
        self.now_ns = self.now_ns.saturating_add(ns);
    }

    fn finish_stream(&mut self, stream: usize) {
        let ready_ns = self.work.finish_stream(stream);
        self.synchronized_at(ready_ns);
    }

    /// After a wait that took until `ready_ns`; driver pools give memory back then.
    fn synchronized_at(&mut self, ready_ns: u64) {
        self.now_ns = self.now_ns.max(ready_ns);
        let State { pools, work, graphs, budget, now_ns, .. } = self;
        pools.synchronized(work, graphs, *now_ns, budget);
    }

    /// Checks the stream of a submission; on a captured stream it becomes a node.
    fn submit(&mut self, call: Call, stream: StreamId) -> DriverResult<()> {
        self.work.stream(call, stream)?;
        self.graphs.add_node(call, stream).map(drop)
    }

    /// Whether device code could reach all of these bytes.
    fn check_reachable(&self, call: Call, address: u64, size_bytes: u64) -> DriverResult<()> {
        if self.memory.holds(address, size_bytes)
            || self.mappings.holds(address, size_bytes)
            || self.pools.holds(address, size_bytes)
        {
            return Ok(());
        }
        Err(invalid(call, format!("{size_bytes} bytes at {address:#x} are not all valid memory")))
    }
}

impl Driver for Sim {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            device: self.options.device,
            name: self.options.name.clone(),
            driver: "sim",
            total_bytes: self.options.total_bytes,
        }
    }

    fn make_current(&self) -> DriverResult<()> {
        drop(self.enter_other(Call::MakeCurrent));
        Ok(())
    }

    fn memory_info(&self) -> DriverResult<MemoryInfo> {
        let state = self.enter_other(Call::MemoryInfo);
        Ok(MemoryInfo {
            free_bytes: state.budget.free_bytes(),
            total_bytes: state.budget.total_bytes,
        })
    }

    fn allocate(&self, size_bytes: u64) -> DriverResult<u64> {
        let call = Call::Allocate;
        let mut state = self.enter(call, self.options.costs.allocate.of(size_bytes));
        state.budget.check(call, size_bytes)?;
        let address = state.memory.take(call, size_bytes)?;
        state.budget.take(size_bytes);
        Ok(address)
    }

    /// Finishes nothing: a real device usually waits for running work here, but no caller may rely
    /// on it.
    fn free(&self, address: u64, size_bytes: u64) -> DriverResult<()> {
        let call = Call::Free;
        let mut state = self.enter(call, self.options.costs.free.of(size_bytes));
        state.graphs.check_may_wait(call)?;
        state.memory.give(call, address, size_bytes)?;
        state.budget.give(size_bytes);
        Ok(())
    }

    fn create_stream(&self) -> DriverResult<StreamId> {
        Ok(self.enter_other(Call::CreateStream).work.create_stream())
    }

    fn destroy_stream(&self, stream: StreamId) -> DriverResult<()> {
        let call = Call::DestroyStream;
        let mut state = self.enter_other(call);
        state.graphs.check_not_captured(call, stream)?;
        state.work.destroy_stream(stream)
    }

    fn synchronize_stream(&self, stream: StreamId) -> DriverResult<()> {
        let call = Call::SynchronizeStream;
        let mut state = self.enter_other(call);
        state.graphs.check_may_wait_for(call, stream)?;
        let stream = state.work.stream(call, stream)?;
        state.finish_stream(stream);
        Ok(())
    }

    fn synchronize_device(&self) -> DriverResult<()> {
        let call = Call::SynchronizeDevice;
        let mut state = self.enter_other(call);
        state.graphs.check_none(call)?;
        let ready_ns = state.work.finish_all();
        state.synchronized_at(ready_ns);
        Ok(())
    }

    fn create_event(&self) -> DriverResult<EventId> {
        Ok(self.enter_other(Call::CreateEvent).work.create_event())
    }

    fn record_event(&self, event: EventId, stream: StreamId) -> DriverResult<()> {
        let call = Call::RecordEvent;
        let state = &mut *self.enter_other(call);
        state.work.event(call, event)?;
        let index = state.work.stream(call, stream)?;
        let recorded = match state.graphs.add_node(call, stream)? {
            Some((capture, node)) => Event::Captured { capture, node },
            None => Event::Marked(state.work.mark(index, state.now_ns)),
        };
        state.work.set_event(event, recorded);
        Ok(())
    }

    fn query_event(&self, event: EventId) -> DriverResult<bool> {
        let call = Call::QueryEvent;
        let state = self.enter_other(call);
        state.graphs.check_may_wait(call)?;
        match state.work.event(call, event)? {
            Event::Fresh => Ok(true),
            Event::Marked(mark) => Ok(state.work.is_finished(mark, state.now_ns)),
            Event::Captured { capture, .. } => state.graphs.refuse_captured(call, capture),
        }
    }

    fn synchronize_event(&self, event: EventId) -> DriverResult<()> {
        let call = Call::SynchronizeEvent;
        let mut state = self.enter_other(call);
        state.graphs.check_may_wait(call)?;
        match state.work.event(call, event)? {
            Event::Fresh => Ok(()),
            Event::Marked(mark) => {
                let ready_ns = state.work.finish(mark);
                state.synchronized_at(ready_ns);
                Ok(())
            }
            Event::Captured { capture, .. } => {
                state.graphs.refuse_captured(call, capture).map(drop)
            }
        }
    }

    fn wait_event(&self, stream: StreamId, event: EventId) -> DriverResult<()> {
        let call = Call::WaitEvent;
        let state = &mut *self.enter_other(call);
        let event = state.work.event(call, event)?;
        let index = state.work.stream(call, stream)?;
        match event {
            Event::Fresh => Ok(()),
            Event::Marked(mark) => {
                state.graphs.check_no_wait_outside(call, stream)?;
                state.work.wait(index, mark, state.now_ns);
                Ok(())
            }
            Event::Captured { capture, node } => state.graphs.join(call, stream, capture, node),
        }
    }

    fn destroy_event(&self, event: EventId) -> DriverResult<()> {
        let mut state = self.enter_other(Call::DestroyEvent);
        state.work.destroy_event(event)
    }

    fn copy(&self, to: u64, from: u64, size_bytes: u64, stream: StreamId) -> DriverResult<()> {
        let call = Call::Copy;
        let mut state = self.enter_other(call);
        state.check_reachable(call, to, size_bytes)?;
        state.check_reachable(call, from, size_bytes)?;
        if to.abs_diff(from) < size_bytes {
            let message = format!("{size_bytes} bytes at {to:#x} and {from:#x} overlap");
            return Err(invalid(call, message));
        }
        state.submit(call, stream)
    }

    fn copy_from_host(&self, to: u64, from: &[u8], stream: StreamId) -> DriverResult<()> {
        let call = Call::CopyFromHost;
        let mut state = self.enter_other(call);
        state.check_reachable(call, to, from.len() as u64)?;
        state.graphs.check_may_wait_for(call, stream)?;
        let stream = state.work.stream(call, stream)?;
        state.finish_stream(stream);
        Ok(())
    }

    /// Fills `to` with zeros: there is no memory to read.
    fn copy_to_host(&self, to: &mut [u8], from: u64, stream: StreamId) -> DriverResult<()> {
        let call = Call::CopyToHost;
        let mut state = self.enter_other(call);
        state.check_reachable(call, from, to.len() as u64)?;
        state.graphs.check_may_wait_for(call, stream)?;
        let stream = state.work.stream(call, stream)?;
        state.finish_stream(stream);
        to.fill(0);
        Ok(())
    }

    fn fill(&self, to: u64, _byte: u8, size_bytes: u64, stream: StreamId) -> DriverResult<()> {
        let call = Call::Fill;
        let mut state = self.enter_other(call);
        state.check_reachable(call, to, size_bytes)?;
        state.submit(call, stream)
    }

    fn capture_status(&self, stream: StreamId) -> DriverResult<CaptureStatus> {
        let call = Call::CaptureStatus;
        let mut state = self.enter_other(call);
        state.work.stream(call, stream)?;
        Ok(state.graphs.status(stream))
    }

    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        Some(self)
    }

    fn memory_pools(&self) -> Option<&dyn MemoryPools> {
        Some(self)
    }

    fn peers(&self) -> Option<&dyn Peers> {
        (self.options.reachable_devices > 0).then_some(self as &dyn Peers)
    }

    fn capture(&self) -> Option<&dyn Capture> {
        Some(self)
    }

    fn processes(&self) -> Option<&dyn Processes> {
        Some(self)
    }
}

/// Only this process can hold memory that does not exist.
impl Processes for Sim {
    fn list(&self) -> DriverResult<Vec<ProcessUsage>> {
        let state = self.enter_other(Call::List);
        Ok(vec![ProcessUsage { process: std::process::id(), used_bytes: state.budget.used_bytes }])
    }
}

// The codes are CUDA's, so that a message reads the same on a real device.

fn invalid(call: Call, message: impl Into<String>) -> DriverError {
    DriverError::new(DriverErrorKind::InvalidValue, call.name(), 1, message)
}

fn out_of_memory(call: Call, message: impl Into<String>) -> DriverError {
    DriverError::new(DriverErrorKind::OutOfMemory, call.name(), 2, message)
}

fn not_supported(call: Call, message: impl Into<String>) -> DriverError {
    DriverError::new(DriverErrorKind::NotSupported, call.name(), 801, message)
}

fn capture_active(call: Call, message: impl Into<String>) -> DriverError {
    DriverError::new(DriverErrorKind::CaptureActive, call.name(), 900, message)
}
