//! A small device cut out of a large one: tests run on a real GPU without taking all of it.
//!
//! It counts what it gives out, which a real device cannot tell, and refuses what goes beyond its size.
//! Streams may be plain numbers, as on devices that follow no handles: each gets a stream of the inner
//! device. It has neither pools nor captures of its own.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard};

use stratalloc::driver::{
    CaptureStatus, DeviceInfo, Driver, DriverResult, Exportable, Held, HoldsWork, MemoryInfo,
    PhysicalId, VirtualMemory,
};
use stratalloc::error::{DriverError, DriverErrorKind};
use stratalloc::ids::{DeviceId, EventId, StreamId};

/// The GPU that tests use, opened once; without one a word why.
#[cfg(all(feature = "cuda", target_os = "linux"))]
pub(crate) fn gpu() -> Option<Arc<stratalloc::driver::Cuda>> {
    use stratalloc::driver::Cuda;
    static GPU: std::sync::OnceLock<DriverResult<Arc<Cuda>>> = std::sync::OnceLock::new();
    match GPU.get_or_init(|| Cuda::open(DeviceId(0)).map(Arc::new)) {
        Ok(cuda) => Some(Arc::clone(cuda)),
        Err(error) => {
            println!("skipped: no CUDA device ({error})");
            None
        }
    }
}

/// A part of the GPU.
#[cfg(all(feature = "cuda", target_os = "linux"))]
pub(crate) type Gpu = Part<Arc<stratalloc::driver::Cuda>>;

/// A physical piece: its size, whether it is held, and how often it is mapped.
#[derive(Clone, Copy, Debug)]
struct Piece {
    bytes: u64,
    holds: u32,
    mappings: u32,
}

#[derive(Debug, Default)]
struct Book {
    segments: BTreeMap<u64, u64>,
    reservations: BTreeMap<u64, u64>,
    mapped: BTreeMap<u64, (u64, PhysicalId)>,
    pieces: HashMap<PhysicalId, Piece>,
    events: u64,
    /// Streams of the inner device, by the names that they have here.
    streams: HashMap<StreamId, StreamId>,
}

impl Book {
    fn used_bytes(&self) -> u64 {
        let pieces = self.pieces.values().map(|piece| piece.bytes);
        self.segments.values().copied().chain(pieces).sum()
    }

    fn change(&mut self, piece: PhysicalId, change: impl FnOnce(&mut Piece)) {
        let own = self.pieces.get_mut(&piece).expect("the driver knew the piece");
        change(own);
        if own.holds == 0 && own.mappings == 0 {
            self.pieces.remove(&piece);
        }
    }
}

/// A device of `total_bytes` on another one.
#[derive(Debug)]
pub(crate) struct Part<D: Driver> {
    inner: D,
    total_bytes: u64,
    book: Mutex<Book>,
}

impl<D: Driver> Part<D> {
    pub(crate) fn new(inner: D, total_bytes: u64) -> Self {
        Self { inner, total_bytes, book: Mutex::default() }
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().expect("no test panics with the book in hand")
    }

    /// The inner device's stream of this name.
    fn real(&self, stream: StreamId) -> DriverResult<StreamId> {
        if stream == StreamId::DEFAULT {
            return Ok(stream);
        }
        let mut book = self.book();
        if let Some(real) = book.streams.get(&stream) {
            return Ok(*real);
        }
        let real = self.inner.create_stream()?;
        book.streams.insert(stream, real);
        Ok(real)
    }

    /// Refuses what goes beyond the size. Two threads may both be let in: tests here are alone.
    fn admit(&self, call: &'static str, bytes: u64) -> DriverResult<()> {
        let used = self.book().used_bytes();
        if used.checked_add(bytes).is_some_and(|sum| sum <= self.total_bytes) {
            return Ok(());
        }
        let message = format!("{bytes} bytes beside {used} of {}", self.total_bytes);
        Err(DriverError::new(DriverErrorKind::OutOfMemory, call, 2, message))
    }

    fn memory(&self) -> &dyn VirtualMemory {
        self.inner.virtual_memory().expect("announced only when the inner device has it")
    }

    pub(crate) fn held(&self) -> Held {
        let book = self.book();
        let pairs =
            |map: &BTreeMap<u64, u64>| map.iter().map(|(at, bytes)| (*at, *bytes)).collect();
        Held {
            segments: pairs(&book.segments),
            reservations: pairs(&book.reservations),
            mapped: book.mapped.iter().map(|(at, (bytes, _))| (*at, *bytes)).collect(),
            pieces: book.pieces.len() as u64,
            events: book.events,
            ..Held::default()
        }
    }
}

impl<D: Driver> Drop for Part<D> {
    fn drop(&mut self) {
        let streams = std::mem::take(&mut self.book().streams);
        for stream in streams.into_values() {
            self.inner.destroy_stream(stream).expect("it was made here");
        }
    }
}

impl<D: HoldsWork> HoldsWork for Part<D> {
    type Gate = D::Gate;

    fn hold_back(&self, stream: StreamId) -> DriverResult<D::Gate> {
        self.inner.hold_back(self.real(stream)?)
    }
}

impl<D: Driver> Driver for Part<D> {
    fn info(&self) -> DeviceInfo {
        DeviceInfo { total_bytes: self.total_bytes, ..self.inner.info() }
    }

    fn memory_info(&self) -> DriverResult<MemoryInfo> {
        let (total_bytes, used) = (self.total_bytes, self.book().used_bytes());
        Ok(MemoryInfo { free_bytes: total_bytes - used, total_bytes })
    }

    fn allocate(&self, size_bytes: u64) -> DriverResult<u64> {
        self.admit("allocate", size_bytes)?;
        let address = self.inner.allocate(size_bytes)?;
        self.book().segments.insert(address, size_bytes);
        Ok(address)
    }

    fn free(&self, address: u64, size_bytes: u64) -> DriverResult<()> {
        self.inner.free(address, size_bytes)?;
        assert_eq!(self.book().segments.remove(&address), Some(size_bytes), "{address:#x}");
        Ok(())
    }

    fn create_stream(&self) -> DriverResult<StreamId> {
        let real = self.inner.create_stream()?;
        self.book().streams.insert(real, real);
        Ok(real)
    }

    fn destroy_stream(&self, stream: StreamId) -> DriverResult<()> {
        let real = self.book().streams.remove(&stream);
        self.inner.destroy_stream(real.unwrap_or(stream))
    }

    fn synchronize_stream(&self, stream: StreamId) -> DriverResult<()> {
        self.inner.synchronize_stream(self.real(stream)?)
    }

    fn synchronize_device(&self) -> DriverResult<()> {
        self.inner.synchronize_device()
    }

    fn create_event(&self) -> DriverResult<EventId> {
        let event = self.inner.create_event()?;
        self.book().events += 1;
        Ok(event)
    }

    fn record_event(&self, event: EventId, stream: StreamId) -> DriverResult<()> {
        self.inner.record_event(event, self.real(stream)?)
    }

    fn query_event(&self, event: EventId) -> DriverResult<bool> {
        self.inner.query_event(event)
    }

    fn synchronize_event(&self, event: EventId) -> DriverResult<()> {
        self.inner.synchronize_event(event)
    }

    fn wait_event(&self, stream: StreamId, event: EventId) -> DriverResult<()> {
        self.inner.wait_event(self.real(stream)?, event)
    }

    fn destroy_event(&self, event: EventId) -> DriverResult<()> {
        self.inner.destroy_event(event)?;
        self.book().events -= 1;
        Ok(())
    }

    fn copy(&self, to: u64, from: u64, size_bytes: u64, stream: StreamId) -> DriverResult<()> {
        self.inner.copy(to, from, size_bytes, self.real(stream)?)
    }

    fn copy_from_host(&self, to: u64, from: &[u8], stream: StreamId) -> DriverResult<()> {
        self.inner.copy_from_host(to, from, self.real(stream)?)
    }

    fn copy_to_host(&self, to: &mut [u8], from: u64, stream: StreamId) -> DriverResult<()> {
        self.inner.copy_to_host(to, from, self.real(stream)?)
    }

    fn fill(&self, to: u64, byte: u8, size_bytes: u64, stream: StreamId) -> DriverResult<()> {
        self.inner.fill(to, byte, size_bytes, self.real(stream)?)
    }

    fn capture_status(&self, stream: StreamId) -> DriverResult<CaptureStatus> {
        self.inner.capture_status(self.real(stream)?)
    }

    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        self.inner.virtual_memory().map(|_| self as _)
    }
}

impl<D: Driver> VirtualMemory for Part<D> {
    fn granularity_bytes(&self) -> u64 {
        self.memory().granularity_bytes()
    }

    fn reserve(&self, size_bytes: u64) -> DriverResult<u64> {
        let address = self.memory().reserve(size_bytes)?;
        self.book().reservations.insert(address, size_bytes);
        Ok(address)
    }

    fn unreserve(&self, address: u64, size_bytes: u64) -> DriverResult<()> {
        self.memory().unreserve(address, size_bytes)?;
        assert_eq!(self.book().reservations.remove(&address), Some(size_bytes), "{address:#x}");
        Ok(())
    }

    fn create(&self, size_bytes: u64, exportable: Exportable) -> DriverResult<PhysicalId> {
        self.admit("create", size_bytes)?;
        let piece = self.memory().create(size_bytes, exportable)?;
        self.book().pieces.insert(piece, Piece { bytes: size_bytes, holds: 1, mappings: 0 });
        Ok(piece)
    }

    fn release(&self, piece: PhysicalId) -> DriverResult<()> {
        self.memory().release(piece)?;
        self.book().change(piece, |piece| piece.holds -= 1);
        Ok(())
    }

    fn map(&self, address: u64, size_bytes: u64, piece: PhysicalId) -> DriverResult<()> {
        self.memory().map(address, size_bytes, piece)?;
        let mut book = self.book();
        book.change(piece, |piece| piece.mappings += 1);
        assert_eq!(book.mapped.insert(address, (size_bytes, piece)), None, "{address:#x}");
        Ok(())
    }

    fn set_access(&self, address: u64, size_bytes: u64, device: DeviceId) -> DriverResult<()> {
        self.memory().set_access(address, size_bytes, device)
    }

    fn unmap(&self, address: u64, size_bytes: u64) -> DriverResult<()> {
        self.memory().unmap(address, size_bytes)?;
        let mut book = self.book();
        let rest = book.mapped.split_off(&address);
        for (at, (bytes, piece)) in rest {
            if at < address + size_bytes {
                assert!(at + bytes <= address + size_bytes, "{at:#x} was unmapped in part");
                book.change(piece, |piece| piece.mappings -= 1);
            } else {
                book.mapped.insert(at, (bytes, piece));
            }
        }
        Ok(())
    }

    fn export(&self, piece: PhysicalId) -> DriverResult<OwnedFd> {
        self.memory().export(piece)
    }

    fn import(&self, descriptor: OwnedFd, size_bytes: u64) -> DriverResult<PhysicalId> {
        let piece = self.memory().import(descriptor, size_bytes)?;
        let mut book = self.book();
        let fresh = Piece { bytes: size_bytes, holds: 0, mappings: 0 };
        book.pieces.entry(piece).or_insert(fresh).holds += 1;
        Ok(piece)
    }
}
