//! Real memory of this machine behind the addresses of a simulated device.
//!
//! Each allocation is a mapping of its own. Four worker threads run the work of streams. Copies and fills
//! move real bytes in stream order, so a block that is reused too early shows as wrong bytes
//! (`tests/host.rs`). Every byte is atomic: a data race of a program gives wrong bytes, never undefined
//! behaviour.
//!
//! A **piece** is physical memory that can be mapped, as a handle of `cuMemCreate` is. Pieces can be shared
//! with other processes as descriptors. Plain allocations cannot be shared, and peer access is not supported.
//! Tests hold back the work of a stream with [`Host::hold`].
//!
//! A mapped piece that the system cannot merge with its neighbours uses one entry of the process's table of
//! mappings (65,530 by default). A full table is reported as out of memory.

mod backing;
mod memory;
mod space;
mod span;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use hashbrown::HashMap;
use parking_lot::Mutex;
use rustix::io::Errno;

use crate::refusal::{Done, Refusal};
use crate::sim::backing::{Backing, Task};
use crate::sim::{CallCosts, EventMode, Gate, Kind, SimOptions, SimulatedDevice};
use backing::{Piece, Store};
use space::Reservation;
use span::Span;
use stratalloc::driver::{DriverResult, Exportable, HoldsWork, PhysicalId};
use stratalloc::ids::{DeviceId, StreamId};

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

/// A simulated device whose memory is host memory.
///
/// It accepts streams that it did not create, because recordings and tests name streams by their handles
/// alone. It refuses destroyed streams.
pub type Host = SimulatedDevice<Threads>;

/// The kind of [`Host`]: worker threads run the work.
#[derive(Debug)]
pub enum Threads {}

impl Kind for Threads {
    const DRIVER: &'static str = "host";
}

impl Host {
    /// Creates a device without allocations. Worker threads start with the first work.
    #[must_use]
    pub fn new(options: HostOptions) -> Self {
        let HostOptions { device, total_bytes, name } = options;
        let (event_mode, costs) = (EventMode::Manual, CallCosts::default());
        let options =
            SimOptions { device, total_bytes, name, event_mode, costs, ..SimOptions::default() };
        Self::with(options, Some(Arc::new(HostMemory::default())))
    }

    /// Holds back the work submitted to a stream from now on until the gate is opened or dropped. A call that
    /// waits for this work also waits for the gate.
    #[must_use = "the stream goes on when the gate is dropped"]
    pub fn hold(&self, stream: StreamId) -> Gate {
        self.gate(stream)
    }
}

impl HoldsWork for Host {
    type Gate = Gate;

    fn hold_back(&self, stream: StreamId) -> DriverResult<Gate> {
        Ok(self.hold(stream))
    }
}

#[derive(Debug, Default)]
struct HostMemory(Mutex<Tables>);

#[derive(Debug, Default)]
struct Tables {
    /// Ranges by start address.
    ranges: BTreeMap<u64, Reservation>,
    pieces: HashMap<PhysicalId, Arc<Piece>>,
    /// Created with the first piece that is not exportable.
    store: Option<Arc<Store>>,
}

impl Tables {
    /// Returns the range that an address lies in, and the offset in it.
    fn at(&mut self, address: u64) -> (&mut Reservation, usize) {
        let below = self.ranges.range_mut(..=address).next_back();
        let (start, range) = below.expect("the device knows its addresses");
        (range, in_range(address - start))
    }

    fn span(&mut self, address: u64, size_bytes: u64) -> Span {
        let (range, offset) = self.at(address);
        range.span(offset, in_range(size_bytes))
    }

    fn piece(&self, id: PhysicalId) -> &Arc<Piece> {
        self.pieces.get(&id).expect("the device knows its pieces")
    }

    fn store(&mut self) -> Done<Arc<Store>> {
        let store = match self.store.take() {
            Some(store) => store,
            None => Store::open()?,
        };
        Ok(Arc::clone(self.store.insert(store)))
    }
}

impl Backing for HostMemory {
    fn take(&self, size_bytes: u64, open: bool) -> Done<u64> {
        let range = Reservation::take(length(size_bytes)?, open)?;
        let address = range.address();
        self.0.lock().ranges.insert(address, range);
        Ok(address)
    }

    fn give(&self, address: u64, size_bytes: u64) {
        let tables = &mut *self.0.lock();
        let (range, offset) = tables.at(address);
        range.left_bytes -= size_bytes;
        if range.left_bytes > 0 {
            return range.discard(offset, in_range(size_bytes));
        }
        tables.ranges.remove(&(address - offset as u64));
    }

    fn create(&self, id: PhysicalId, size_bytes: u64, exportable: Exportable) -> Done<()> {
        let size = length(size_bytes)?;
        let tables = &mut *self.0.lock();
        let piece = match exportable {
            Exportable::No => Piece::shared(&tables.store()?, size)?,
            Exportable::Descriptor | Exportable::Fabric => Piece::exportable(size)?,
        };
        tables.pieces.insert(id, Arc::new(piece));
        Ok(())
    }

    fn drop_piece(&self, id: PhysicalId) {
        self.0.lock().pieces.remove(&id);
    }

    fn map(&self, address: u64, id: PhysicalId) -> Done<()> {
        let tables = &mut *self.0.lock();
        let piece = Arc::clone(tables.piece(id));
        let (range, offset) = tables.at(address);
        Ok(range.map(offset, &piece)?)
    }

    fn set_access(&self, address: u64, size_bytes: u64) -> Done<()> {
        let tables = &mut *self.0.lock();
        let (range, offset) = tables.at(address);
        Ok(range.open(offset, in_range(size_bytes))?)
    }

    fn unmap(&self, address: u64, size_bytes: u64) -> Done<()> {
        let tables = &mut *self.0.lock();
        let (range, offset) = tables.at(address);
        range.unmap(offset, in_range(size_bytes))
    }

    fn export(&self, id: PhysicalId) -> Done<OwnedFd> {
        Ok(self.0.lock().piece(id).export()?)
    }

    fn import(&self, id: PhysicalId, descriptor: OwnedFd, size_bytes: u64) -> Done<()> {
        let piece = Piece::imported(descriptor, length(size_bytes)?)?;
        self.0.lock().pieces.insert(id, Arc::new(piece));
        Ok(())
    }

    fn copy(&self, to: u64, from: u64, size_bytes: u64) -> Task {
        let tables = &mut *self.0.lock();
        let (to, from) = (tables.span(to, size_bytes), tables.span(from, size_bytes));
        Box::new(move || to.copy(&from))
    }

    fn fill(&self, to: u64, byte: u8, size_bytes: u64) -> Task {
        let to = self.0.lock().span(to, size_bytes);
        Box::new(move || to.fill(byte))
    }

    fn write(&self, to: u64, from: Arc<Mutex<Vec<u8>>>, range: Range<usize>) -> Task {
        let to = self.0.lock().span(to, range.len() as u64);
        Box::new(move || to.write(&from.lock()[range]))
    }

    fn read(&self, from: u64, into: Arc<Mutex<Vec<u8>>>, range: Range<usize>) -> Task {
        let from = self.0.lock().span(from, range.len() as u64);
        Box::new(move || from.read(&mut into.lock()[range]))
    }

    #[cfg(test)]
    fn stored_bytes(&self) -> (u64, u64) {
        self.0.lock().store.as_ref().map_or((0, 0), |store| store.taken_and_length_bytes())
    }
}

impl From<Errno> for Refusal {
    fn from(error: Errno) -> Self {
        io::Error::from(error).into()
    }
}

/// Converts device bytes to a size in this process. A size beyond the address space is out of memory.
fn length(bytes: u64) -> Done<usize> {
    usize::try_from(bytes).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory).into())
}

/// Converts an offset or a size inside a mapped range, which always fits.
fn in_range(bytes: u64) -> usize {
    usize::try_from(bytes).expect("the range exists in this process")
}
