//! Real memory of this machine with a device's semantics.
//!
//! Allocations are mappings; streams are queues that worker threads run; copies and fills move real
//! bytes in stream order. A block that is reused too early shows as wrong bytes. Streams that were
//! not created here are known by their handles alone, each a queue of its own, as recordings and
//! tests name them; a destroyed stream is refused.
//!
//! Virtual memory and stream-ordered pools are `virtual_memory` and `pools`. Not here: sharing of
//! plain allocations between processes (pieces are shared by descriptor), peers, capture. Tests hold
//! a stream with [`Host::hold`].

mod backing;
mod budget;
mod errors;
mod memory;
mod pools;
mod space;
mod span;
mod virtual_memory;
mod work;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;

use super::call::{Call, calls, forward};
use super::refusal::{Done, ensure, invalid};
use super::{CaptureStatus, DeviceInfo, Driver, DriverResult, Held, MemoryInfo, MemoryPools};
use super::{HoldsWork, ProcessUsage, Processes, VirtualMemory};
use crate::ids::{DeviceId, EventId, StreamId};
use budget::Budget;
use errors::length;
use memory::Region;
use pools::Pools;
use span::{Part, Span};
use virtual_memory::Space;
pub use work::Gate;
use work::{Mark, Work};

/// What a host device is like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostOptions {
    /// Its ordinal.
    pub device: DeviceId,
    /// The most bytes that allocations, pools and physical pieces may have at once. The machine's
    /// memory is taken when it is first touched.
    pub total_bytes: u64,
    /// Its name, for people.
    pub name: String,
}

impl Default for HostOptions {
    /// Half of this machine's memory.
    fn default() -> Self {
        let info = rustix::system::sysinfo();
        let machine_bytes = info.totalram.saturating_mul(u64::from(info.mem_unit));
        Self {
            device: DeviceId(0),
            total_bytes: machine_bytes / 2,
            name: "memory of this machine".to_owned(),
        }
    }
}

/// Real memory with a device's semantics. See the [module](self).
///
/// Dropping it lets all submitted work finish, held or not, and gives everything back.
#[derive(Debug)]
pub struct Host {
    device: Device,
}

/// What does the calls.
#[derive(Debug)]
struct Device {
    options: HostOptions,
    budget: Arc<Budget>,
    /// Locked before the queues, never while work is waited for.
    memory: Mutex<Memory>,
    work: Arc<Work>,
}

/// What has addresses.
#[derive(Debug, Default)]
struct Memory {
    regions: BTreeMap<u64, Arc<Region>>,
    space: Space,
    pools: Pools,
}

impl Memory {
    /// The bytes of a range that lies in one allocation or in mapped, accessible pieces.
    fn span(&self, address: u64, size_bytes: u64) -> Option<Span> {
        let plain = || {
            let (start, region) = self.regions.range(..=address).next_back()?;
            let offset = usize::try_from(address - start).ok()?;
            let size = usize::try_from(size_bytes).ok()?;
            let fits = offset.checked_add(size)? <= region.size_bytes();
            fits.then(|| Span(vec![Part::of_region(region, offset, size)]))
        };
        plain()
            .or_else(|| self.pools.span(address, size_bytes))
            .or_else(|| self.space.span(address, size_bytes))
    }
}

impl Host {
    /// A device that holds nothing yet. Worker threads start with the first work.
    #[must_use]
    pub fn new(options: HostOptions) -> Self {
        let budget = Budget::new(options.total_bytes);
        let (memory, work) = (Mutex::default(), Arc::default());
        Self { device: Device { options, budget, memory, work } }
    }

    /// Holds a stream: work submitted to it from now on runs when the gate is opened or dropped.
    /// Whoever waits for the stream waits for the gate.
    #[must_use = "the stream goes on when the gate is dropped"]
    pub fn hold(&self, stream: StreamId) -> Gate {
        self.device.work.hold(stream)
    }

    /// What the device has given out and not taken back. Its one shared file of pieces, if any, stays
    /// open as long as the device.
    #[must_use]
    pub fn held(&self) -> Held {
        let memory = self.device.memory.lock();
        let regions = memory.regions.iter();
        let mut held = Held {
            segments: regions.map(|(start, own)| (*start, own.size_bytes() as u64)).collect(),
            pool_ranges: memory.pools.ranges(),
            events: self.device.work.lock().events_alive(),
            ..Held::default()
        };
        memory.space.tell(&mut held);
        held
    }

    fn call<T>(&self, call: Call, act: impl FnOnce(&Device) -> Done<T>) -> DriverResult<T> {
        act(&self.device).map_err(|refusal| refusal.of(call, |_| 0))
    }
}

impl Device {
    fn check_stream(&self, stream: StreamId) -> Done<()> {
        self.work.lock().check(stream)
    }

    /// The bytes of a range. They stay valid as long as the span lives.
    fn span(&self, address: u64, size_bytes: u64) -> Done<Span> {
        let text =
            format_args!("{size_bytes} bytes at {address:#x} are not in live memory of one kind");
        self.memory.lock().span(address, size_bytes).ok_or_else(|| invalid(text.to_string()))
    }

    /// Waits for marks; then pools give back what they keep beyond their thresholds.
    fn wait_until_passed(&self, marks: &[Mark]) {
        self.work.synchronize(marks);
        self.memory.lock().pools.synchronized(&self.work.lock());
    }

    /// Submits a job and waits for it.
    fn run_and_wait(&self, stream: StreamId, job: Box<dyn FnOnce() + Send>) {
        self.work.submit(stream, job);
        let end = self.work.lock().end_of(stream);
        self.work.synchronize(&[end]);
    }

    fn make_current(&self) -> Done<()> {
        Ok(())
    }

    fn memory_info(&self) -> Done<MemoryInfo> {
        let budget = &self.budget;
        Ok(MemoryInfo { free_bytes: budget.free_bytes(), total_bytes: budget.total_bytes })
    }

    fn allocate(&self, size_bytes: u64) -> Done<u64> {
        ensure!(size_bytes > 0, "zero bytes");
        let hold = self.budget.take(size_bytes)?;
        let region = Region::map(length(size_bytes)?, hold)?;
        let address = region.address();
        self.memory.lock().regions.insert(address, Arc::new(region));
        Ok(address)
    }

    /// Waits for all running work, as a device does.
    fn free(&self, address: u64, size_bytes: u64) -> Done<()> {
        let removed = {
            let regions = &mut self.memory.lock().regions;
            let found = regions.get(&address);
            let exact = found.is_some_and(|region| region.size_bytes() as u64 == size_bytes);
            if exact { regions.remove(&address) } else { None }
        };
        let is_exact = removed.is_some();
        ensure!(is_exact, "no allocation of {size_bytes} bytes starts at {address:#x}");
        // From here on no work can be submitted to it; what was submitted holds it and is waited
        // for. Its address is not given out again before it is unmapped.
        self.synchronize_device()?;
        drop(removed);
        Ok(())
    }

    fn create_stream(&self) -> Done<StreamId> {
        Ok(self.work.lock().create_stream())
    }

    fn destroy_stream(&self, stream: StreamId) -> Done<()> {
        self.work.lock().destroy_stream(stream)
    }

    fn synchronize_stream(&self, stream: StreamId) -> Done<()> {
        self.check_stream(stream)?;
        let end = self.work.lock().end_of(stream);
        self.wait_until_passed(&[end]);
        Ok(())
    }

    fn synchronize_device(&self) -> Done<()> {
        let ends = self.work.lock().ends();
        self.wait_until_passed(&ends);
        Ok(())
    }

    fn create_event(&self) -> Done<EventId> {
        Ok(self.work.lock().create_event())
    }

    fn record_event(&self, event: EventId, stream: StreamId) -> Done<()> {
        self.check_stream(stream)?;
        self.work.lock().record(event, stream)
    }

    fn query_event(&self, event: EventId) -> Done<bool> {
        let queues = self.work.lock();
        Ok(queues.mark(event)?.is_none_or(|mark| queues.is_passed(mark)))
    }

    fn synchronize_event(&self, event: EventId) -> Done<()> {
        let mark = self.work.lock().mark(event)?;
        if let Some(mark) = mark {
            self.wait_until_passed(&[mark]);
        }
        Ok(())
    }

    fn wait_event(&self, stream: StreamId, event: EventId) -> Done<()> {
        self.check_stream(stream)?;
        let mark = self.work.lock().mark(event)?;
        if let Some(mark) = mark {
            self.work.wait_for(stream, mark);
        }
        Ok(())
    }

    fn destroy_event(&self, event: EventId) -> Done<()> {
        self.work.lock().destroy_event(event)
    }

    fn copy(&self, to: u64, from: u64, size_bytes: u64, stream: StreamId) -> Done<()> {
        self.check_stream(stream)?;
        let to = self.span(to, size_bytes)?;
        let from = self.span(from, size_bytes)?;
        self.work.submit(stream, Box::new(move || to.copy(&from)));
        Ok(())
    }

    fn copy_from_host(&self, to: u64, from: &[u8], stream: StreamId) -> Done<()> {
        self.check_stream(stream)?;
        let to = self.span(to, from.len() as u64)?;
        let bytes = from.to_vec();
        self.run_and_wait(stream, Box::new(move || to.write(&bytes)));
        Ok(())
    }

    fn copy_to_host(&self, to: &mut [u8], from: u64, stream: StreamId) -> Done<()> {
        self.check_stream(stream)?;
        let from = self.span(from, to.len() as u64)?;
        let bytes = Arc::new(Mutex::new(vec![0; to.len()]));
        let into = Arc::clone(&bytes);
        self.run_and_wait(stream, Box::new(move || from.read(&mut into.lock())));
        to.copy_from_slice(&bytes.lock());
        Ok(())
    }

    fn fill(&self, to: u64, byte: u8, size_bytes: u64, stream: StreamId) -> Done<()> {
        self.check_stream(stream)?;
        let to = self.span(to, size_bytes)?;
        self.work.submit(stream, Box::new(move || to.fill(byte)));
        Ok(())
    }

    fn capture_status(&self, stream: StreamId) -> Done<CaptureStatus> {
        self.check_stream(stream)?;
        Ok(CaptureStatus::None)
    }

    fn list(&self) -> Done<Vec<ProcessUsage>> {
        let used_bytes = self.budget.taken_bytes();
        Ok(vec![ProcessUsage { process: std::process::id(), used_bytes }])
    }
}

impl Driver for Host {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            device: self.device.options.device,
            name: self.device.options.name.clone(),
            driver: "host",
            total_bytes: self.device.options.total_bytes,
        }
    }

    calls! { Driver forward Self::call; }

    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        Some(self)
    }

    fn memory_pools(&self) -> Option<&dyn MemoryPools> {
        Some(self)
    }

    fn processes(&self) -> Option<&dyn Processes> {
        Some(self)
    }
}

impl Processes for Host {
    calls! { Processes forward Self::call; }
}

impl HoldsWork for Host {
    type Gate = Gate;

    fn hold_back(&self, stream: StreamId) -> DriverResult<Gate> {
        Ok(self.hold(stream))
    }
}

impl Drop for Host {
    /// Lets all submitted work finish, held or not, and gives the memory back.
    fn drop(&mut self) {
        self.device.work.end();
    }
}
