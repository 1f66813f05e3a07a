//! Real memory of this machine with a device's semantics.
//!
//! Allocations are mappings; streams are queues that worker threads run; copies and fills move real
//! bytes in stream order. A block that is reused too early shows as wrong bytes. Streams that were
//! not created here are known by their handles alone, each a queue of its own, as recordings and
//! tests name them; a destroyed stream is refused.
//!
//! Not here: virtual memory, pools, sharing, capture. Tests hold a stream with [`Host::hold`].

mod memory;
mod work;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;

use super::{CaptureStatus, DeviceInfo, Driver, DriverResult, MemoryInfo};
use super::{ProcessUsage, Processes};
use crate::error::{DriverError, DriverErrorKind};
use crate::ids::{DeviceId, EventId, StreamId};
use memory::Region;
pub use work::Gate;
use work::{Mark, Work};

/// What a host device is like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostOptions {
    /// Its ordinal.
    pub device: DeviceId,
    /// The most bytes that may be allocated at once. Memory is taken when it is first touched.
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
#[derive(Debug)]
pub struct Host {
    options: HostOptions,
    memory: Mutex<Memory>,
    work: Arc<Work>,
}

#[derive(Debug, Default)]
struct Memory {
    regions: BTreeMap<u64, Arc<Region>>,
    used_bytes: u64,
}

fn error(kind: DriverErrorKind, call: &'static str, message: String) -> DriverError {
    DriverError::new(kind, call, 0, message)
}

fn invalid(call: &'static str, message: String) -> DriverError {
    error(DriverErrorKind::InvalidValue, call, message)
}

impl Host {
    /// A device that holds nothing yet. Worker threads start with the first work.
    #[must_use]
    pub fn new(options: HostOptions) -> Self {
        Self { options, memory: Mutex::default(), work: Arc::default() }
    }

    /// Holds a stream: work submitted to it from now on runs when the gate is opened or dropped.
    /// Whoever waits for the stream waits for the gate.
    #[must_use = "the stream goes on when the gate is dropped"]
    pub fn hold(&self, stream: StreamId) -> Gate {
        self.work.hold(stream)
    }

    fn check_stream(&self, call: &'static str, stream: StreamId) -> DriverResult<()> {
        if self.work.lock().is_destroyed(stream) {
            return Err(invalid(call, format!("stream {stream} is destroyed")));
        }
        Ok(())
    }

    /// The region that holds a range, and where the range begins in it.
    fn range(
        &self,
        call: &'static str,
        address: u64,
        size_bytes: u64,
    ) -> DriverResult<(Arc<Region>, usize)> {
        let memory = self.memory.lock();
        let before = memory.regions.range(..=address).next_back();
        let found = before.and_then(|(start, region)| {
            let offset = usize::try_from(address - start).ok()?;
            let size = usize::try_from(size_bytes).ok()?;
            let fits = offset.checked_add(size)? <= region.size_bytes();
            fits.then(|| (Arc::clone(region), offset))
        });
        found.ok_or_else(|| {
            invalid(call, format!("{size_bytes} bytes at {address:#x} are not in one allocation"))
        })
    }

    fn mark(&self, call: &'static str, event: EventId) -> DriverResult<Option<Mark>> {
        let mark = self.work.lock().mark(event);
        mark.ok_or_else(|| invalid(call, format!("event {event} is unknown")))
    }

    /// Submits a job and waits for it.
    fn run_and_wait(&self, stream: StreamId, job: Box<dyn FnOnce() + Send>) {
        self.work.submit(stream, job);
        let end = self.work.lock().end_of(stream);
        self.work.synchronize(&[end]);
    }
}

fn length(bytes: u64) -> usize {
    usize::try_from(bytes).expect("the range was found in a mapping")
}

impl Driver for Host {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            device: self.options.device,
            name: self.options.name.clone(),
            driver: "host",
            total_bytes: self.options.total_bytes,
        }
    }

    fn memory_info(&self) -> DriverResult<MemoryInfo> {
        let total_bytes = self.options.total_bytes;
        let free_bytes = total_bytes - self.memory.lock().used_bytes;
        Ok(MemoryInfo { free_bytes, total_bytes })
    }

    fn allocate(&self, size_bytes: u64) -> DriverResult<u64> {
        let call = "allocate";
        let mut memory = self.memory.lock();
        let free_bytes = self.options.total_bytes - memory.used_bytes;
        let short = || {
            let message = format!("{size_bytes} bytes asked for, {free_bytes} free");
            error(DriverErrorKind::OutOfMemory, call, message)
        };
        if size_bytes == 0 {
            return Err(invalid(call, "zero bytes".to_owned()));
        }
        if size_bytes > free_bytes {
            return Err(short());
        }
        let size = usize::try_from(size_bytes).map_err(|_| short())?;
        let region = Region::map(size).map_err(|_| short())?;
        let address = region.address();
        memory.regions.insert(address, Arc::new(region));
        memory.used_bytes += size_bytes;
        Ok(address)
    }

    /// Waits for all running work, as a device does.
    fn free(&self, address: u64, size_bytes: u64) -> DriverResult<()> {
        let is_whole = |region: &Arc<Region>| region.size_bytes() as u64 == size_bytes;
        if !self.memory.lock().regions.get(&address).is_some_and(is_whole) {
            let message = format!("no allocation of {size_bytes} bytes starts at {address:#x}");
            return Err(invalid("free", message));
        }
        self.synchronize_device()?;
        let mut memory = self.memory.lock();
        if memory.regions.remove(&address).is_some() {
            memory.used_bytes -= size_bytes;
        }
        Ok(())
    }

    fn create_stream(&self) -> DriverResult<StreamId> {
        Ok(self.work.lock().create_stream())
    }

    fn destroy_stream(&self, stream: StreamId) -> DriverResult<()> {
        if self.work.lock().destroy_stream(stream) {
            return Ok(());
        }
        Err(invalid("destroy_stream", format!("stream {stream} was not created here or is gone")))
    }

    fn synchronize_stream(&self, stream: StreamId) -> DriverResult<()> {
        self.check_stream("synchronize_stream", stream)?;
        let end = self.work.lock().end_of(stream);
        self.work.synchronize(&[end]);
        Ok(())
    }

    fn synchronize_device(&self) -> DriverResult<()> {
        let ends = self.work.lock().ends();
        self.work.synchronize(&ends);
        Ok(())
    }

    fn create_event(&self) -> DriverResult<EventId> {
        Ok(self.work.lock().create_event())
    }

    fn record_event(&self, event: EventId, stream: StreamId) -> DriverResult<()> {
        self.check_stream("record_event", stream)?;
        if self.work.lock().record(event, stream) {
            return Ok(());
        }
        Err(invalid("record_event", format!("event {event} is unknown")))
    }

    fn query_event(&self, event: EventId) -> DriverResult<bool> {
        let mark = self.mark("query_event", event)?;
        Ok(mark.is_none_or(|mark| self.work.lock().is_passed(mark)))
    }

    fn synchronize_event(&self, event: EventId) -> DriverResult<()> {
        if let Some(mark) = self.mark("synchronize_event", event)? {
            self.work.synchronize(&[mark]);
        }
        Ok(())
    }

    fn wait_event(&self, stream: StreamId, event: EventId) -> DriverResult<()> {
        self.check_stream("wait_event", stream)?;
        if let Some(mark) = self.mark("wait_event", event)? {
            self.work.wait_for(stream, mark);
        }
        Ok(())
    }

    fn destroy_event(&self, event: EventId) -> DriverResult<()> {
        if self.work.lock().destroy_event(event) {
            return Ok(());
        }
        Err(invalid("destroy_event", format!("event {event} is unknown")))
    }

    fn copy(&self, to: u64, from: u64, size_bytes: u64, stream: StreamId) -> DriverResult<()> {
        self.check_stream("copy", stream)?;
        let (to, to_offset) = self.range("copy", to, size_bytes)?;
        let (from, from_offset) = self.range("copy", from, size_bytes)?;
        let count = length(size_bytes);
        let copy = move || to.copy(to_offset, &from, from_offset, count);
        self.work.submit(stream, Box::new(copy));
        Ok(())
    }

    fn copy_from_host(&self, to: u64, from: &[u8], stream: StreamId) -> DriverResult<()> {
        self.check_stream("copy_from_host", stream)?;
        let (to, offset) = self.range("copy_from_host", to, from.len() as u64)?;
        let bytes = from.to_vec();
        self.run_and_wait(stream, Box::new(move || to.write(offset, &bytes)));
        Ok(())
    }

    fn copy_to_host(&self, to: &mut [u8], from: u64, stream: StreamId) -> DriverResult<()> {
        self.check_stream("copy_to_host", stream)?;
        let (from, offset) = self.range("copy_to_host", from, to.len() as u64)?;
        let bytes = Arc::new(Mutex::new(vec![0; to.len()]));
        let into = Arc::clone(&bytes);
        self.run_and_wait(stream, Box::new(move || from.read(offset, &mut into.lock())));
        to.copy_from_slice(&bytes.lock());
        Ok(())
    }

    fn fill(&self, to: u64, byte: u8, size_bytes: u64, stream: StreamId) -> DriverResult<()> {
        self.check_stream("fill", stream)?;
        let (to, offset) = self.range("fill", to, size_bytes)?;
        let count = length(size_bytes);
        self.work.submit(stream, Box::new(move || to.fill(offset, byte, count)));
        Ok(())
    }

    fn capture_status(&self, stream: StreamId) -> DriverResult<CaptureStatus> {
        self.check_stream("capture_status", stream)?;
        Ok(CaptureStatus::None)
    }

    fn processes(&self) -> Option<&dyn Processes> {
        Some(self)
    }
}

impl Processes for Host {
    fn list(&self) -> DriverResult<Vec<ProcessUsage>> {
        let used_bytes = self.memory.lock().used_bytes;
        Ok(vec![ProcessUsage { process: std::process::id(), used_bytes }])
    }
}

impl Drop for Host {
    /// Lets all submitted work finish, held or not, and gives the memory back.
    fn drop(&mut self) {
        self.work.end();
    }
}
