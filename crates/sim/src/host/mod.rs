//! A device whose memory is real memory of this machine.
//!
//! Allocations are mappings. Streams are queues that four worker threads run. Events are positions in
//! these queues. Copies and fills move real bytes in stream order, so a block that is reused too early
//! shows as wrong bytes (`tests/host.rs`). Every byte is atomic: a data race of a program gives wrong
//! bytes, never undefined behaviour.
//!
//! Streams that were not created here are known by their handles alone, each with its own queue, because
//! recordings and tests name them. A destroyed stream is refused.
//!
//! Virtual memory and stream-ordered pools are in `virtual_memory` and `pools`. Pieces of virtual memory
//! can be shared with other processes as descriptors. Not supported: sharing of plain allocations,
//! peers, capture. Tests hold back the work of a stream with [`Host::hold`].

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

use crate::HeldResources;
use crate::refusal::{Done, ensure, invalid};
use budget::Budget;
use errors::length;
use memory::Region;
use pools::Pools;
use span::{Part, Span};
use stratalloc::driver::call::{Call, calls, forward};
use stratalloc::driver::{
    CaptureStatus, DeviceInfo, Driver, DriverResult, HoldsWork, MemoryInfo, MemoryPools,
    ProcessUsage, Processes, VirtualMemory,
};
use stratalloc::ids::{DeviceId, EventId, StreamId};
use virtual_memory::Space;
pub use work::Gate;
use work::{Mark, Work};

/// Properties of a host device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostOptions {
    /// Ordinal of the device.
    pub device: DeviceId,
    /// Maximum of the bytes in allocations, pools and physical pieces together. The system provides
    /// memory when a page is first accessed.
    pub total_bytes: u64,
    /// Human-readable name.
    pub name: String,
}

impl Default for HostOptions {
    /// Returns the options of a device with half of this machine's memory.
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

/// A device in host memory.
///
/// Dropping it finishes all submitted work, held back or not, and releases all memory.
#[derive(Debug)]
pub struct Host {
    device: Device,
}

/// The state of the device, on which calls run.
#[derive(Debug)]
struct Device {
    options: HostOptions,
    budget: Arc<Budget>,
    /// Lock order: before the queues. Not locked during waits for work.
    memory: Mutex<Memory>,
    work: Arc<Work>,
}

/// Everything that has an address.
#[derive(Debug, Default)]
struct Memory {
    regions: BTreeMap<u64, Arc<Region>>,
    space: Space,
    pools: Pools,
}

impl Memory {
    /// Returns the bytes of a range that lies in one allocation or in mapped, accessible pieces.
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
    /// Creates a device that holds no memory yet. Worker threads start with the first work.
    #[must_use]
    pub fn new(options: HostOptions) -> Self {
        let budget = Budget::new(options.total_bytes);
        let (memory, work) = (Mutex::default(), Arc::default());
        Self { device: Device { options, budget, memory, work } }
    }

    /// Holds back the work submitted to a stream from now on until the gate is opened or dropped. A call
    /// that waits for the stream waits for the gate.
    #[must_use = "the stream goes on when the gate is dropped"]
    pub fn hold(&self, stream: StreamId) -> Gate {
        self.device.work.hold(stream)
    }

    /// Returns the resources that callers hold. The file that pieces share, if any, stays open as long
    /// as the device and is not among them.
    #[must_use]
    pub fn held(&self) -> HeldResources {
        let memory = self.device.memory.lock();
        let regions = memory.regions.iter();
        let mut held = HeldResources {
            segments: regions.map(|(start, own)| (*start, own.size_bytes() as u64)).collect(),
            pool_ranges: memory.pools.ranges(),
            events: self.device.work.lock().events_alive(),
            ..HeldResources::default()
        };
        memory.space.add_to(&mut held);
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

    /// Returns the bytes of a range. They stay valid as long as the span lives.
    fn span(&self, address: u64, size_bytes: u64) -> Done<Span> {
        let text =
            format_args!("{size_bytes} bytes at {address:#x} are not in live memory of one kind");
        self.memory.lock().span(address, size_bytes).ok_or_else(|| invalid(text.to_string()))
    }

    /// Waits until the marks are reached. Then pools release memory above their thresholds.
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

    /// Waits for all running work, as a real device does.
    fn free(&self, address: u64, size_bytes: u64) -> Done<()> {
        let removed = {
            let regions = &mut self.memory.lock().regions;
            let found = regions.get(&address);
            let exact = found.is_some_and(|region| region.size_bytes() as u64 == size_bytes);
            if exact { regions.remove(&address) } else { None }
        };
        let is_exact = removed.is_some();
        ensure!(is_exact, "no allocation of {size_bytes} bytes starts at {address:#x}");
        // From here on no work can be submitted to the region. Submitted work keeps it mapped and is
        // waited for. Its address cannot be assigned again before it is unmapped.
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
    /// Finishes all submitted work, held back or not, and releases the memory.
    fn drop(&mut self) {
        self.device.work.end();
    }
}
