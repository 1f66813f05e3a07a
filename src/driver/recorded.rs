//! A driver that answers with a recording's addresses.
//!
//! Decisions of an allocator can depend on addresses (equal sizes are taken lowest first), so an
//! exact replay needs the recorded ones. The wrapped driver still does all the work and keeps all
//! the books; this wrapper only translates, inwards for every call that names an address.
//! Addresses that no list of the recording gave out (those of driver pools) pass unchanged.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

use parking_lot::Mutex;

use super::forward::{forward, part};
use super::{
    Capture, CaptureStatus, DeviceInfo, Driver, DriverResult, Exportable, Ipc, MemoryInfo,
    MemoryPools, Peers, PhysicalId, Processes, VirtualMemory,
};
use crate::error::{DriverError, DriverErrorKind};
use crate::ids::{DeviceId, EventId, StreamId};

/// The addresses of a recording, each list in the order in which they were given out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecordedAddresses {
    /// Answers to [`Driver::allocate`].
    pub segments: Vec<u64>,
    /// Where each recorded run of pages was mapped. A reservation is answered with the next one:
    /// recordings say where memory was mapped, not where space was reserved.
    pub mappings: Vec<u64>,
}

/// A driver that answers with a recording's addresses; everything else is `D`'s.
#[derive(Debug)]
pub struct Recorded<D> {
    inner: D,
    /// Held while the inner driver allocates and frees, so that answers keep the recorded order.
    /// Calls without addresses do not take it.
    books: Mutex<Books>,
}

#[derive(Debug)]
struct Books {
    segments: Answers,
    reservations: Answers,
}

/// One list of the recording and what of it is given out.
#[derive(Debug)]
struct Answers {
    what: &'static str,
    recorded: Vec<u64>,
    given: usize,
    /// Recorded address to the inner driver's.
    live: BTreeMap<u64, Inner>,
}

#[derive(Clone, Copy, Debug)]
struct Inner {
    address: u64,
    size_bytes: u64,
}

impl<D: Driver> Recorded<D> {
    /// Wraps a driver.
    #[must_use]
    pub fn new(inner: D, addresses: RecordedAddresses) -> Self {
        let answers = |what, recorded| Answers { what, recorded, given: 0, live: BTreeMap::new() };
        Self {
            inner,
            books: Mutex::new(Books {
                segments: answers("segment", addresses.segments),
                reservations: answers("reservation", addresses.mappings),
            }),
        }
    }

    /// The driver that does the work. Its addresses are not the recorded ones.
    #[must_use]
    pub fn inner(&self) -> &D {
        &self.inner
    }

    /// The inner driver's address for a recorded one.
    fn inward(&self, address: u64) -> u64 {
        let books = self.books.lock();
        let found = books.segments.inward(address);
        found.or_else(|| books.reservations.inward(address)).unwrap_or(address)
    }
}

impl Answers {
    /// The next address of the recording. It counts as given once [`put`](Self::put) has it.
    fn peek(&self, call: &'static str) -> DriverResult<u64> {
        let fail = |message| DriverError::new(DriverErrorKind::Other, call, 0, message);
        let Some(&next) = self.recorded.get(self.given) else {
            let message = format!("the recording has no further {}", self.what);
            return Err(fail(message));
        };
        if self.live.contains_key(&next) {
            let message = format!("the recording gives {next:#x} again, which is still in use");
            return Err(fail(message));
        }
        Ok(next)
    }

    fn put(&mut self, recorded: u64, inner: Inner) {
        self.given += 1;
        self.live.insert(recorded, inner);
    }

    /// What starts at exactly this recorded address.
    fn at(&self, call: &'static str, recorded: u64) -> DriverResult<Inner> {
        self.live.get(&recorded).copied().ok_or_else(|| {
            let message = format!("no {} starts at {recorded:#x}", self.what);
            DriverError::new(DriverErrorKind::InvalidValue, call, 1, message)
        })
    }

    fn inward(&self, address: u64) -> Option<u64> {
        let (start, inner) = self.live.range(..=address).next_back()?;
        let offset = address - start;
        (offset < inner.size_bytes).then(|| inner.address + offset)
    }
}

impl<D: Driver> Driver for Recorded<D> {
    fn info(&self) -> DeviceInfo {
        self.inner.info()
    }

    forward! { @driver_without_addresses inner }

    fn allocate(&self, size_bytes: u64) -> DriverResult<u64> {
        let segments = &mut self.books.lock().segments;
        let recorded = segments.peek("allocate")?;
        let address = self.inner.allocate(size_bytes)?;
        segments.put(recorded, Inner { address, size_bytes });
        Ok(recorded)
    }

    fn free(&self, address: u64, size_bytes: u64) -> DriverResult<()> {
        let segments = &mut self.books.lock().segments;
        let inner = segments.at("free", address)?;
        self.inner.free(inner.address, size_bytes)?;
        segments.live.remove(&address);
        Ok(())
    }

    fn copy(&self, to: u64, from: u64, size_bytes: u64, stream: StreamId) -> DriverResult<()> {
        let (to, from) = (self.inward(to), self.inward(from));
        self.inner.copy(to, from, size_bytes, stream)
    }

    fn copy_from_host(&self, to: u64, from: &[u8], stream: StreamId) -> DriverResult<()> {
        self.inner.copy_from_host(self.inward(to), from, stream)
    }

    fn copy_to_host(&self, to: &mut [u8], from: u64, stream: StreamId) -> DriverResult<()> {
        self.inner.copy_to_host(to, self.inward(from), stream)
    }

    fn fill(&self, to: u64, byte: u8, size_bytes: u64, stream: StreamId) -> DriverResult<()> {
        self.inner.fill(self.inward(to), byte, size_bytes, stream)
    }

    fn is_per_thread_stream(&self, stream: StreamId) -> bool {
        self.inner.is_per_thread_stream(stream)
    }

    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        self.inner.virtual_memory().map(|_| self as _)
    }

    fn memory_pools(&self) -> Option<&dyn MemoryPools> {
        self.inner.memory_pools()
    }

    fn ipc(&self) -> Option<&dyn Ipc> {
        self.inner.ipc().map(|_| self as _)
    }

    fn peers(&self) -> Option<&dyn Peers> {
        self.inner.peers().map(|_| self as _)
    }

    fn capture(&self) -> Option<&dyn Capture> {
        self.inner.capture()
    }

    fn processes(&self) -> Option<&dyn Processes> {
        self.inner.processes()
    }
}

impl<D: Driver> VirtualMemory for Recorded<D> {
    fn granularity_bytes(&self) -> u64 {
        let part = self.inner.virtual_memory();
        part.expect("announced only when the inner driver has it").granularity_bytes()
    }

    forward! { @virtual_without_addresses inner_virtual }

    fn reserve(&self, size_bytes: u64) -> DriverResult<u64> {
        let reservations = &mut self.books.lock().reservations;
        let recorded = reservations.peek("reserve")?;
        let address = inner_virtual(self, "reserve")?.reserve(size_bytes)?;
        reservations.live.insert(recorded, Inner { address, size_bytes });
        Ok(recorded)
    }

    fn unreserve(&self, address: u64, size_bytes: u64) -> DriverResult<()> {
        let reservations = &mut self.books.lock().reservations;
        let inner = reservations.at("unreserve", address)?;
        inner_virtual(self, "unreserve")?.unreserve(inner.address, size_bytes)?;
        reservations.live.remove(&address);
        Ok(())
    }

    fn map(&self, address: u64, size_bytes: u64, piece: PhysicalId) -> DriverResult<()> {
        let inner = inner_virtual(self, "map")?;
        inner.map(self.inward(address), size_bytes, piece)
    }

    fn set_access(&self, address: u64, size_bytes: u64, device: DeviceId) -> DriverResult<()> {
        let inner = inner_virtual(self, "set_access")?;
        inner.set_access(self.inward(address), size_bytes, device)?;
        self.books.lock().reservations.given += 1;
        Ok(())
    }

    fn unmap(&self, address: u64, size_bytes: u64) -> DriverResult<()> {
        let inner = inner_virtual(self, "unmap")?;
        inner.unmap(self.inward(address), size_bytes)
    }
}

impl<D: Driver> Ipc for Recorded<D> {
    fn share(&self, base: u64) -> DriverResult<[u8; 64]> {
        inner_ipc(self, "share")?.share(self.inward(base))
    }

    forward! { inner_ipc:
        open(handle: &[u8; 64]) -> u64;
        close(address: u64) -> ();
    }
}

impl<D: Driver> Peers for Recorded<D> {
    forward! { @peers_without_addresses inner_peers }

    /// Translates both addresses where they are on this device; another device's recording is not
    /// known here.
    fn copy_peer(
        &self,
        to: (DeviceId, u64),
        from: (DeviceId, u64),
        size_bytes: u64,
        stream: StreamId,
    ) -> DriverResult<()> {
        let own = self.inner.info().device;
        let inward = |(device, address)| match device == own {
            true => (device, self.inward(address)),
            false => (device, address),
        };
        inner_peers(self, "copy_peer")?.copy_peer(inward(to), inward(from), size_bytes, stream)
    }
}

#[expect(clippy::unnecessary_wraps, reason = "the shape that `forward!` asks for")]
fn inner<'a, D: Driver>(wrapper: &'a Recorded<D>, _call: &str) -> DriverResult<&'a D> {
    Ok(&wrapper.inner)
}

fn inner_virtual<'a, D: Driver>(
    wrapper: &'a Recorded<D>,
    call: &'static str,
) -> DriverResult<&'a dyn VirtualMemory> {
    part(call, wrapper.inner.virtual_memory())
}

fn inner_ipc<'a, D: Driver>(
    wrapper: &'a Recorded<D>,
    call: &'static str,
) -> DriverResult<&'a dyn Ipc> {
    part(call, wrapper.inner.ipc())
}

fn inner_peers<'a, D: Driver>(
    wrapper: &'a Recorded<D>,
    call: &'static str,
) -> DriverResult<&'a dyn Peers> {
    part(call, wrapper.inner.peers())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::sim::{Sim, SimOptions};
    use crate::size::MIB;

    fn recorded(segments: &[u64], mappings: &[u64]) -> Recorded<Sim> {
        let addresses =
            RecordedAddresses { segments: segments.to_vec(), mappings: mappings.to_vec() };
        Recorded::new(Sim::new(SimOptions::default()), addresses)
    }

    #[test]
    fn allocations_get_the_recorded_addresses_in_order() {
        let driver = recorded(&[0x9000_0000, 0x1000_0000, 0x9000_0000], &[]);
        assert_eq!(driver.allocate(2 * MIB), Ok(0x9000_0000));
        assert_eq!(driver.allocate(4 * MIB), Ok(0x1000_0000));
        driver.free(0x9000_0000, 2 * MIB).unwrap();
        assert_eq!(driver.allocate(MIB), Ok(0x9000_0000));
        let used = driver.info().total_bytes - driver.memory_info().unwrap().free_bytes;
        assert_eq!(used, 5 * MIB);
    }

    #[test]
    fn an_exhausted_recording_is_an_error_and_nothing_is_allocated() {
        let driver = recorded(&[], &[]);
        let error = driver.allocate(MIB).unwrap_err();
        assert_eq!(error.kind, DriverErrorKind::Other);
        assert_eq!(error.message, "the recording has no further segment");
        let error = driver.reserve(2 * MIB).unwrap_err();
        assert_eq!(error.message, "the recording has no further reservation");
        assert_eq!(driver.inner().total_calls(), 0);
    }

    #[test]
    fn a_refused_allocation_does_not_use_up_an_address() {
        let driver = recorded(&[0x1000_0000], &[]);
        assert!(driver.allocate(1 << 50).unwrap_err().is_out_of_memory());
        assert_eq!(driver.allocate(MIB), Ok(0x1000_0000));
    }

    #[test]
    fn an_address_in_use_is_not_given_again() {
        let driver = recorded(&[0x1000_0000, 0x1000_0000], &[]);
        driver.allocate(MIB).unwrap();
        let error = driver.allocate(MIB).unwrap_err();
        assert_eq!(error.kind, DriverErrorKind::Other);
    }

    #[test]
    fn a_refused_free_changes_nothing() {
        let driver = recorded(&[0x1000_0000], &[]);
        let address = driver.allocate(2 * MIB).unwrap();
        for (address, bytes) in [(address, MIB), (address + MIB, MIB)] {
            let error = driver.free(address, bytes).unwrap_err();
            assert_eq!(error.kind, DriverErrorKind::InvalidValue);
        }
        driver.free(address, 2 * MIB).unwrap();
    }

    #[test]
    fn copies_and_mappings_reach_the_inner_addresses() {
        let driver = recorded(&[0x1000_0000], &[0x2000_0000]);
        let a = driver.allocate(2 * MIB).unwrap();
        let b = driver.reserve(4 * MIB).unwrap();
        assert_eq!(b, 0x2000_0000);
        let piece = driver.create(2 * MIB, Exportable::No).unwrap();
        driver.map(b + 2 * MIB, 2 * MIB, piece).unwrap();
        driver.set_access(b + 2 * MIB, 2 * MIB, DeviceId(0)).unwrap();
        let stream = StreamId::DEFAULT;
        driver.copy(b + 3 * MIB, a + MIB, MIB, stream).unwrap();
        driver.fill(a, 0, 2 * MIB, stream).unwrap();
        driver.fill(b, 0, MIB, stream).unwrap_err();
        driver.unmap(b + 2 * MIB, 2 * MIB).unwrap();
        driver.unreserve(b, 4 * MIB).unwrap();
    }

    #[test]
    fn a_reservation_is_answered_with_the_next_recorded_mapping() {
        let driver = recorded(&[], &[0x2000_0000, 0x2020_0000, 0x6000_0000]);
        let first = driver.reserve(4 * MIB).unwrap();
        for page in 0..2 {
            let piece = driver.create(2 * MIB, Exportable::No).unwrap();
            driver.map(first + page * 2 * MIB, 2 * MIB, piece).unwrap();
            driver.set_access(first + page * 2 * MIB, 2 * MIB, DeviceId(0)).unwrap();
        }
        assert_eq!(first, 0x2000_0000);
        assert_eq!(driver.reserve(4 * MIB), Ok(0x6000_0000));
    }
}
