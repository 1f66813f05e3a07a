//! A device without memory: any capacity, a simulated clock, events under the test's control.
//!
//! It keeps exact books of addresses, bytes and order, and refuses what a real device would refuse,
//! but no byte exists behind an address: copies check their ranges and move nothing, and what is
//! copied to the host reads as zeros. Nothing ever waits; what a real device would wait for is
//! finished by the call, and the clock moves instead.
//! Read next: `work` (streams and events), `ranges` (addresses and bytes), `control` (what a test
//! may do to it).

use parking_lot::{Mutex, MutexGuard};

use super::call::Call;
use super::{CaptureStatus, DeviceInfo, Driver, DriverResult, MemoryInfo};
use crate::error::{DriverError, DriverErrorKind};
use crate::ids::{DeviceId, EventId, StreamId};
use crate::size::MIB;

mod control;
mod costs;
mod ranges;
#[cfg(test)]
mod tests;
mod work;

pub use costs::{CallCosts, Cost};
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
        }
    }
}

/// A device without memory. See the [module](self) for what it does and does not do.
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
}

impl Sim {
    /// A device that holds nothing yet.
    #[must_use]
    pub fn new(options: SimOptions) -> Self {
        let state = State {
            now_ns: 0,
            counts: [0; Call::ALL.len()],
            budget: Budget { used_bytes: 0, total_bytes: options.total_bytes },
            memory: AddressSpace::new(0x7f00_0000_0000, 0x7fff_ffe0_0000_0000),
            work: Work::new(options.event_mode),
        };
        Self { options, state: Mutex::new(state) }
    }

    /// Opens the books for one call: counts it and lets its cost pass.
    fn enter(&self, call: Call, cost_ns: u64) -> MutexGuard<'_, State> {
        let mut state = self.state.lock();
        state.counts[call as usize] += 1;
        state.now_ns = state.now_ns.saturating_add(cost_ns);
        state
    }

    /// [`enter`](Self::enter) for calls without a cost of their own.
    fn enter_other(&self, call: Call) -> MutexGuard<'_, State> {
        self.enter(call, self.options.costs.other.fixed_ns)
    }
}

impl State {
    fn wait_until(&mut self, ready_ns: u64) {
        self.now_ns = self.now_ns.max(ready_ns);
    }

    /// Whether device code could reach all of these bytes.
    fn check_reachable(&self, call: Call, address: u64, size_bytes: u64) -> DriverResult<()> {
        if self.memory.holds(address, size_bytes) {
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
        state.memory.give(call, address, size_bytes)?;
        state.budget.give(size_bytes);
        Ok(())
    }

    fn create_stream(&self) -> DriverResult<StreamId> {
        Ok(self.enter_other(Call::CreateStream).work.create_stream())
    }

    fn destroy_stream(&self, stream: StreamId) -> DriverResult<()> {
        let mut state = self.enter_other(Call::DestroyStream);
        state.work.destroy_stream(stream)
    }

    fn synchronize_stream(&self, stream: StreamId) -> DriverResult<()> {
        let call = Call::SynchronizeStream;
        let mut state = self.enter_other(call);
        let stream = state.work.stream(call, stream)?;
        let ready_ns = state.work.finish_stream(stream);
        state.wait_until(ready_ns);
        Ok(())
    }

    fn synchronize_device(&self) -> DriverResult<()> {
        let mut state = self.enter_other(Call::SynchronizeDevice);
        let ready_ns = state.work.finish_all();
        state.wait_until(ready_ns);
        Ok(())
    }

    fn create_event(&self) -> DriverResult<EventId> {
        Ok(self.enter_other(Call::CreateEvent).work.create_event())
    }

    fn record_event(&self, event: EventId, stream: StreamId) -> DriverResult<()> {
        let call = Call::RecordEvent;
        let state = &mut *self.enter_other(call);
        state.work.event(call, event)?;
        let stream = state.work.stream(call, stream)?;
        let mark = state.work.mark(stream, state.now_ns);
        state.work.set_event(event, Event::Marked(mark));
        Ok(())
    }

    fn query_event(&self, event: EventId) -> DriverResult<bool> {
        let call = Call::QueryEvent;
        let state = self.enter_other(call);
        match state.work.event(call, event)? {
            Event::Fresh => Ok(true),
            Event::Marked(mark) => Ok(state.work.is_finished(mark, state.now_ns)),
        }
    }

    fn synchronize_event(&self, event: EventId) -> DriverResult<()> {
        let call = Call::SynchronizeEvent;
        let mut state = self.enter_other(call);
        if let Event::Marked(mark) = state.work.event(call, event)? {
            let ready_ns = state.work.finish(mark);
            state.wait_until(ready_ns);
        }
        Ok(())
    }

    fn wait_event(&self, stream: StreamId, event: EventId) -> DriverResult<()> {
        let call = Call::WaitEvent;
        let state = &mut *self.enter_other(call);
        let event = state.work.event(call, event)?;
        let stream = state.work.stream(call, stream)?;
        if let Event::Marked(mark) = event {
            state.work.wait(stream, mark, state.now_ns);
        }
        Ok(())
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
        state.work.stream(call, stream).map(drop)
    }

    fn copy_from_host(&self, to: u64, from: &[u8], stream: StreamId) -> DriverResult<()> {
        let call = Call::CopyFromHost;
        let mut state = self.enter_other(call);
        state.check_reachable(call, to, from.len() as u64)?;
        let stream = state.work.stream(call, stream)?;
        let ready_ns = state.work.finish_stream(stream);
        state.wait_until(ready_ns);
        Ok(())
    }

    /// Fills `to` with zeros: there is no memory to read.
    fn copy_to_host(&self, to: &mut [u8], from: u64, stream: StreamId) -> DriverResult<()> {
        let call = Call::CopyToHost;
        let mut state = self.enter_other(call);
        state.check_reachable(call, from, to.len() as u64)?;
        let stream = state.work.stream(call, stream)?;
        let ready_ns = state.work.finish_stream(stream);
        state.wait_until(ready_ns);
        to.fill(0);
        Ok(())
    }

    fn fill(&self, to: u64, _byte: u8, size_bytes: u64, stream: StreamId) -> DriverResult<()> {
        let call = Call::Fill;
        let mut state = self.enter_other(call);
        state.check_reachable(call, to, size_bytes)?;
        state.work.stream(call, stream).map(drop)
    }

    fn capture_status(&self, stream: StreamId) -> DriverResult<CaptureStatus> {
        let call = Call::CaptureStatus;
        let mut state = self.enter_other(call);
        state.work.stream(call, stream)?;
        Ok(CaptureStatus::None)
    }
}

// The codes are CUDA's, so that a message reads the same on a real device.

fn invalid(call: Call, message: impl Into<String>) -> DriverError {
    DriverError::new(DriverErrorKind::InvalidValue, call.name(), 1, message)
}

fn out_of_memory(call: Call, message: impl Into<String>) -> DriverError {
    DriverError::new(DriverErrorKind::OutOfMemory, call.name(), 2, message)
}
