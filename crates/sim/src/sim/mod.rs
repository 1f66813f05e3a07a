//! A simulated device without memory: any size, a simulated clock, events under the test's control.
//!
//! It keeps exact books of addresses, bytes and order, and refuses calls that a real device would
//! refuse. No byte exists behind an address: copies check their ranges and move nothing, and copies to
//! the host return zeros. No call waits. A call that would wait on a real device finishes that work and
//! moves the clock instead. The costs of calls on the clock were measured on an H200.
//!
//! Read next: `work` (streams and events), `ranges` (addresses and bytes), `control` (controls for
//! tests).

use std::collections::BTreeSet;

use parking_lot::Mutex;

use crate::refusal::{Done, Refusal, check_whole, ensure, invalid, out_of_memory};
use stratalloc::driver::call::{Call, calls, forward};
use stratalloc::driver::{
    Capture, CaptureStatus, DeviceInfo, Driver, DriverResult, MemoryInfo, MemoryPools, Peers,
    ProcessUsage, Processes, VirtualMemory,
};
use stratalloc::error::DriverErrorKind;
use stratalloc::ids::{DeviceId, EventId, StreamId};
use stratalloc::size::MIB;

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

/// Granularity of addresses and of pieces of virtual memory.
const GRANULARITY_BYTES: u64 = 2 * MIB;

/// When events count as finished.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EventMode {
    /// When the test finishes them, or when a call waits for them.
    Manual,
    /// Immediately.
    #[default]
    Immediate,
    /// This many nanoseconds after they were recorded. Events of a stream finish in order, and after the
    /// events that the stream waited for.
    After(u64),
}

/// Order in which a simulated device assigns addresses to new segments and reservations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AddressOrder {
    /// The lowest free addresses that fit.
    #[default]
    Lowest,
    /// Above all addresses that were assigned before.
    Rising,
    /// Below all addresses that were assigned before.
    Falling,
}

/// Properties of a simulated device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SimOptions {
    /// Ordinal of the device.
    pub device: DeviceId,
    /// Total memory.
    pub total_bytes: u64,
    /// Human-readable name.
    pub name: String,
    /// When events finish.
    pub event_mode: EventMode,
    /// Cost of each call on the clock.
    pub costs: CallCosts,
    /// Number of other devices that it can access: those with the lowest ordinals. With 0 there is no
    /// [`Peers`].
    pub reachable_devices: u32,
    /// Whether pieces have fabric handles. Only this device can import them.
    pub fabric: bool,
    /// Addresses of new segments and reservations.
    pub addresses: AddressOrder,
}

impl Default for Sim {
    fn default() -> Self {
        Self::new(SimOptions::default())
    }
}

impl Default for SimOptions {
    /// Returns the options of an H200 whose events finish immediately.
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

/// A simulated device without memory.
///
/// It accepts streams that it did not create, because recordings contain raw handles. It refuses
/// destroyed streams. A call that waits finishes the work that it waits for, in every [`EventMode`].
#[derive(Debug)]
pub struct Sim {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    options: SimOptions,
    now_ns: u64,
    counts: [u64; Call::ALL.len()],
    budget: Budget,
    memory: AddressSpace,
    work: Work,
    mappings: Mappings,
    graphs: Graphs,
    pools: Pools,
    /// Other devices for which access was enabled.
    peers: BTreeSet<DeviceId>,
}

impl Sim {
    /// Creates a device that holds no memory yet.
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
            options,
        };
        Self { state: Mutex::new(state) }
    }

    /// Runs and counts a call. `act` advances the clock by the call's cost.
    fn sized<T>(&self, call: Call, act: impl FnOnce(&mut State) -> Done<T>) -> DriverResult<T> {
        let state = &mut *self.state.lock();
        state.counts[call as usize] += 1;
        act(state).map_err(|refusal| refusal.of(call, code_of))
    }

    /// Runs and counts a call with the cost `other`, except for calls with a cost of their own.
    fn call<T>(&self, call: Call, act: impl FnOnce(&mut State) -> Done<T>) -> DriverResult<T> {
        self.sized(call, |state| {
            if !matches!(call, Call::Allocate | Call::Free) {
                state.pass(state.options.costs.other.fixed_ns);
            }
            act(state)
        })
    }
}

impl State {
    fn pass(&mut self, ns: u64) {
        self.now_ns = self.now_ns.saturating_add(ns);
    }

    /// Ends a wait for work that finishes at `ready_ns`. Driver pools release memory then.
    fn synchronized_at(&mut self, ready_ns: u64) {
        self.now_ns = self.now_ns.max(ready_ns);
        self.shrink_pools();
    }

    /// Checks the stream of a submission. On a captured stream the submission becomes a node.
    fn submit(&mut self, stream: StreamId) -> Done<()> {
        self.work.stream(stream)?;
        self.graphs.add_node(stream).map(drop)
    }

    /// Checks that all of these bytes are valid device memory.
    fn check_reachable(&self, address: u64, size_bytes: u64) -> Done<()> {
        let is_valid = self.memory.holds(address, size_bytes)
            || self.mappings.holds(address, size_bytes)
            || self.pools.holds(address, size_bytes);
        ensure!(is_valid, "{size_bytes} bytes at {address:#x} are not all valid memory");
        Ok(())
    }

    fn make_current(&mut self) -> Done<()> {
        Ok(())
    }

    fn memory_info(&mut self) -> Done<MemoryInfo> {
        Ok(MemoryInfo {
            free_bytes: self.budget.free_bytes(),
            total_bytes: self.budget.total_bytes,
        })
    }

    fn allocate(&mut self, size_bytes: u64) -> Done<u64> {
        self.pass(self.options.costs.allocate.of(size_bytes));
        self.budget.check(size_bytes)?;
        let address = self.memory.take(size_bytes)?;
        self.budget.take(size_bytes);
        Ok(address)
    }

    /// Frees memory without finishing any work. A real device usually waits for running work here, but
    /// callers must not rely on that.
    fn free(&mut self, address: u64, size_bytes: u64) -> Done<()> {
        self.pass(self.options.costs.free.of(size_bytes));
        self.graphs.check_may_wait()?;
        self.memory.give(address, size_bytes)?;
        self.budget.give(size_bytes);
        Ok(())
    }

    fn create_stream(&mut self) -> Done<StreamId> {
        Ok(self.work.create_stream())
    }

    fn destroy_stream(&mut self, stream: StreamId) -> Done<()> {
        self.graphs.check_not_captured(stream)?;
        self.work.destroy_stream(stream)
    }

    fn synchronize_stream(&mut self, stream: StreamId) -> Done<()> {
        self.graphs.check_may_wait_for(stream)?;
        let stream = self.work.stream(stream)?;
        let ready_ns = self.work.finish_stream(stream);
        self.synchronized_at(ready_ns);
        Ok(())
    }

    fn synchronize_device(&mut self) -> Done<()> {
        self.graphs.check_none()?;
        let ready_ns = self.work.finish_all();
        self.synchronized_at(ready_ns);
        Ok(())
    }

    fn create_event(&mut self) -> Done<EventId> {
        Ok(self.work.create_event())
    }

    fn record_event(&mut self, event: EventId, stream: StreamId) -> Done<()> {
        self.work.event(event)?;
        let index = self.work.stream(stream)?;
        let recorded = match self.graphs.add_node(stream)? {
            Some((capture, node)) => Event::Captured { capture, node },
            None => Event::Marked(self.work.mark(index, self.now_ns)),
        };
        self.work.set_event(event, recorded);
        Ok(())
    }

    fn query_event(&mut self, event: EventId) -> Done<bool> {
        self.graphs.check_may_wait()?;
        match self.work.event(event)? {
            Event::Fresh => Ok(true),
            Event::Marked(mark) => Ok(self.work.is_finished(mark, self.now_ns)),
            Event::Captured { capture, .. } => Err(self.graphs.refusal_of(capture)),
        }
    }

    fn synchronize_event(&mut self, event: EventId) -> Done<()> {
        self.graphs.check_may_wait()?;
        match self.work.event(event)? {
            Event::Fresh => Ok(()),
            Event::Marked(mark) => {
                let ready_ns = self.work.finish(mark);
                self.synchronized_at(ready_ns);
                Ok(())
            }
            Event::Captured { capture, .. } => Err(self.graphs.refusal_of(capture)),
        }
    }

    fn wait_event(&mut self, stream: StreamId, event: EventId) -> Done<()> {
        let event = self.work.event(event)?;
        let index = self.work.stream(stream)?;
        match event {
            Event::Fresh => Ok(()),
            Event::Marked(mark) => {
                self.graphs.check_no_wait_outside(stream)?;
                self.work.wait(index, mark, self.now_ns);
                Ok(())
            }
            Event::Captured { capture, node } => self.graphs.join(stream, capture, node),
        }
    }

    fn destroy_event(&mut self, event: EventId) -> Done<()> {
        self.work.destroy_event(event)
    }

    fn copy(&mut self, to: u64, from: u64, size_bytes: u64, stream: StreamId) -> Done<()> {
        self.check_reachable(to, size_bytes)?;
        self.check_reachable(from, size_bytes)?;
        let is_apart = to.abs_diff(from) >= size_bytes;
        ensure!(is_apart, "{size_bytes} bytes at {to:#x} and {from:#x} overlap");
        self.submit(stream)
    }

    fn copy_from_host(&mut self, to: u64, from: &[u8], stream: StreamId) -> Done<()> {
        self.check_reachable(to, from.len() as u64)?;
        self.synchronize_stream(stream)
    }

    /// Fills `to` with zeros: there is no memory to read.
    fn copy_to_host(&mut self, to: &mut [u8], from: u64, stream: StreamId) -> Done<()> {
        self.check_reachable(from, to.len() as u64)?;
        self.synchronize_stream(stream)?;
        to.fill(0);
        Ok(())
    }

    fn fill(&mut self, to: u64, _byte: u8, size_bytes: u64, stream: StreamId) -> Done<()> {
        self.check_reachable(to, size_bytes)?;
        self.submit(stream)
    }

    fn capture_status(&mut self, stream: StreamId) -> Done<CaptureStatus> {
        self.work.stream(stream)?;
        Ok(self.graphs.status(stream))
    }

    /// Returns this process alone: no other process can hold memory of a simulated device.
    fn list(&mut self) -> Done<Vec<ProcessUsage>> {
        Ok(vec![ProcessUsage { process: std::process::id(), used_bytes: self.budget.used_bytes }])
    }
}

impl Driver for Sim {
    fn info(&self) -> DeviceInfo {
        let SimOptions { device, name, total_bytes, .. } = self.state.lock().options.clone();
        DeviceInfo { device, name, driver: "sim", total_bytes }
    }

    calls! { Driver forward Self::call; }

    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        Some(self)
    }

    fn memory_pools(&self) -> Option<&dyn MemoryPools> {
        Some(self)
    }

    fn peers(&self) -> Option<&dyn Peers> {
        (self.state.lock().options.reachable_devices > 0).then_some(self as &dyn Peers)
    }

    fn capture(&self) -> Option<&dyn Capture> {
        Some(self)
    }

    fn processes(&self) -> Option<&dyn Processes> {
        Some(self)
    }
}

impl Processes for Sim {
    calls! { Processes forward Self::call; }
}

/// Returns CUDA's code for the kind, so that a message reads the same as on a real device.
fn code_of(kind: DriverErrorKind) -> i64 {
    match kind {
        DriverErrorKind::InvalidValue => 1,
        DriverErrorKind::OutOfMemory => 2,
        DriverErrorKind::NotSupported => 801,
        DriverErrorKind::CaptureActive => 900,
        _ => 0,
    }
}

fn not_supported(message: impl Into<String>) -> Refusal {
    Refusal::new(DriverErrorKind::NotSupported, None, message)
}

fn capture_active(message: impl Into<String>) -> Refusal {
    Refusal::new(DriverErrorKind::CaptureActive, None, message)
}
