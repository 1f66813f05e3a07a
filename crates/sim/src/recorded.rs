//! A driver that returns the addresses of a recording.
//!
//! An allocator may decide by address (among free blocks of equal size, it takes the lowest), so an exact
//! replay needs the recorded addresses. The inner driver does all the work, at addresses of its own. This
//! wrapper returns recorded addresses to the caller, and in later calls translates them into the inner
//! driver's. Other addresses, such as those of driver pools, pass unchanged.

use std::collections::BTreeMap;
use std::ops::Range;

use parking_lot::Mutex;

use stratalloc::driver::call::Call;
use stratalloc::driver::{Driver, DriverResult, Intercepted, Interceptor, VirtualMemory, lacking};
use stratalloc::error::{DriverError, DriverErrorKind};
use stratalloc::ids::DeviceId;

/// The addresses of a recording, in the order in which the recorded device returned them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecordedAddresses {
    /// Addresses that [`Driver::allocate`] returned.
    pub segments: Vec<u64>,
    /// The address range of each recorded mapping of pages, with the number of the heap that mapped it, if
    /// known. A heap is a part of an allocator that reserves its own addresses. Recordings contain no
    /// reservations, so a new reservation begins at its heap's next recorded mapping that does not continue a
    /// live reservation.
    pub mappings: Vec<(Range<u64>, Option<u64>)>,
}

/// A driver that returns the addresses of a recording.
pub type Recorded<D> = Intercepted<D, RecordedState>;

/// The state of a [`Recorded`] driver: the recorded addresses, which of them are used up, and the live
/// ranges.
#[derive(Debug)]
pub struct RecordedState {
    /// Locked while the inner driver allocates, reserves and frees, so that recorded addresses are used in
    /// order.
    lists: Mutex<Lists>,
}

impl RecordedState {
    /// Sets the heap that makes the next reservations. `None` if it is not known.
    pub fn set_heap(&self, heap: Option<u64>) {
        self.lists.lock().heap = heap;
    }
}

#[derive(Debug)]
struct Lists {
    segments: AddressList,
    reservations: AddressList,
    /// End of each recorded mapping, and its heap.
    mappings: Vec<(u64, Option<u64>)>,
    /// The heap that makes the next reservations, if known.
    heap: Option<u64>,
}

/// Reservations without recorded mappings begin at multiples of this. It is larger than any device's memory,
/// and a multiple of every granularity.
const FAR_BYTES: u64 = 1 << 44;

impl Lists {
    /// Marks the next recorded mapping as used, and extends `reached` of its reservation.
    fn mapped(&mut self) {
        let reservations = &mut self.reservations;
        let at = reservations.used;
        reservations.used += 1;
        let Some((&start, &(end, _))) = reservations.recorded.get(at).zip(self.mappings.get(at))
        else {
            return;
        };
        if let Some((_, inner)) = reservations.live.range_mut(..=start).next_back() {
            inner.reached = inner.reached.max(end);
        }
    }
}

/// The recorded addresses of one kind, and how many of them are used up.
#[derive(Debug)]
struct AddressList {
    what: &'static str,
    /// The call that returns addresses, and the call that frees them.
    calls: [Call; 2],
    recorded: Vec<u64>,
    used: usize,
    /// The inner driver's range for each recorded address that is live.
    live: BTreeMap<u64, Inner>,
}

#[derive(Clone, Copy, Debug)]
struct Inner {
    address: u64,
    size_bytes: u64,
    /// End of the recorded mappings in this reservation so far. A recorded mapping that begins above it
    /// belongs to another reservation.
    reached: u64,
    /// The heap of the reservation.
    heap: Option<u64>,
}

impl RecordedAddresses {
    /// Wraps a driver so that it returns these addresses.
    #[must_use]
    pub fn before<D: Driver>(self, inner: D) -> Recorded<D> {
        let list = |what, calls, recorded| {
            let live = BTreeMap::new();
            AddressList { what, calls, recorded, used: 0, live }
        };
        let starts = self.mappings.iter().map(|(mapping, _)| mapping.start).collect();
        let ends = self.mappings.iter().map(|(mapping, heap)| (mapping.end, *heap));
        let lists = Lists {
            segments: list("segment", [Call::Allocate, Call::Free], self.segments),
            reservations: list("reservation", [Call::Reserve, Call::Unreserve], starts),
            mappings: ends.collect(),
            heap: None,
        };
        Intercepted::with(inner, RecordedState { lists: Mutex::new(lists) })
    }
}

impl AddressList {
    /// Returns the next unused recorded address, or an error if there is none.
    fn next(&self) -> DriverResult<u64> {
        self.recorded.get(self.used).copied().ok_or_else(|| self.used_up())
    }

    fn used_up(&self) -> DriverError {
        let message = format!("the recording has no further {}", self.what);
        DriverError::new(DriverErrorKind::Other, self.calls[0].name(), 0, message)
    }

    /// Returns the address of a new reservation of a heap: the start of the heap's next recorded mapping that
    /// does not continue a live reservation. If there is none, no pages were mapped in the recorded
    /// reservation. Its address is then above all others; if the heap is unknown, an error is returned.
    fn next_base(&self, mappings: &[(u64, Option<u64>)], heap: Option<u64>) -> DriverResult<u64> {
        let is_same = |other: Option<u64>| heap.zip(other).is_none_or(|(own, other)| own == other);
        let mut live = self.live.clone();
        live.retain(|_, inner| is_same(inner.heap));
        let rest = self.recorded.iter().zip(mappings).skip(self.used);
        for (&start, &(end, _)) in rest.filter(|(_, (_, of))| is_same(*of)) {
            // The recorded reservation may have been smaller than `size_bytes`. So a mapping continues it
            // only if it also begins at or below `reached`.
            let below = live.range_mut(..=start).next_back();
            let continued = below.filter(|(base, inner)| {
                start - **base < inner.size_bytes && start <= inner.reached
            });
            match continued {
                Some((_, inner)) => inner.reached = inner.reached.max(end),
                None => return Ok(start),
            }
        }
        let highest = self.recorded.iter().chain(self.live.keys()).max().copied();
        let far = highest.unwrap_or_default().checked_add(FAR_BYTES).filter(|_| heap.is_some());
        far.map(|far| far & !(FAR_BYTES - 1)).ok_or_else(|| self.used_up())
    }

    /// Obtains a range from `act` and enters it under a recorded address. Whether that address is still live
    /// is checked only after `act`. If the device lacks memory, `act` fails first: the caller then releases
    /// memory, which may free the recorded address, and retries.
    fn enter(
        &mut self,
        recorded: u64,
        size_bytes: u64,
        heap: Option<u64>,
        act: impl FnOnce() -> DriverResult<u64>,
    ) -> DriverResult<()> {
        let address = act()?;
        if self.live.contains_key(&recorded) {
            let message = format!("the recording gives {recorded:#x} again, which is still in use");
            let call = self.calls[0].name();
            return Err(DriverError::new(DriverErrorKind::Other, call, 0, message));
        }
        self.live.insert(recorded, Inner { address, size_bytes, reached: recorded, heap });
        Ok(())
    }

    /// Frees the range that starts at exactly this recorded address with `act`.
    fn leave(
        &mut self,
        recorded: u64,
        act: impl FnOnce(u64) -> DriverResult<()>,
    ) -> DriverResult<()> {
        let found = self.live.get(&recorded).ok_or_else(|| {
            let message = format!("no {} starts at {recorded:#x}", self.what);
            DriverError::new(DriverErrorKind::InvalidValue, self.calls[1].name(), 1, message)
        })?;
        act(found.address)?;
        self.live.remove(&recorded);
        Ok(())
    }

    fn inner_address(&self, address: u64) -> Option<u64> {
        let (start, inner) = self.live.range(..=address).next_back()?;
        let offset = address - start;
        (offset < inner.size_bytes).then(|| inner.address + offset)
    }
}

fn memory(inner: &dyn Driver, call: Call) -> DriverResult<&dyn VirtualMemory> {
    inner.virtual_memory().ok_or_else(|| lacking(call))
}

impl Interceptor for RecordedState {
    fn allocate(&self, inner: &dyn Driver, size_bytes: u64) -> DriverResult<u64> {
        let segments = &mut self.lists.lock().segments;
        let recorded = segments.next()?;
        segments.enter(recorded, size_bytes, None, || inner.allocate(size_bytes))?;
        segments.used += 1;
        Ok(recorded)
    }

    fn free(&self, inner: &dyn Driver, address: u64, size_bytes: u64) -> DriverResult<()> {
        let act = |address| inner.free(address, size_bytes);
        self.lists.lock().segments.leave(address, act)
    }

    fn reserve(&self, inner: &dyn Driver, size_bytes: u64) -> DriverResult<u64> {
        let memory = memory(inner, Call::Reserve)?;
        let Lists { reservations, mappings, heap, .. } = &mut *self.lists.lock();
        let recorded = reservations.next_base(mappings, *heap)?;
        let act = || memory.reserve(size_bytes);
        reservations.enter(recorded, size_bytes, *heap, act)?;
        Ok(recorded)
    }

    fn unreserve(&self, inner: &dyn Driver, address: u64, size_bytes: u64) -> DriverResult<()> {
        let memory = memory(inner, Call::Unreserve)?;
        let act = |address| memory.unreserve(address, size_bytes);
        self.lists.lock().reservations.leave(address, act)
    }

    /// Grants access, and then marks the next recorded mapping as used.
    fn set_access(
        &self,
        inner: &dyn Driver,
        address: u64,
        size_bytes: u64,
        device: DeviceId,
    ) -> DriverResult<()> {
        let address = self.address(address);
        memory(inner, Call::SetAccess)?.set_access(address, size_bytes, device)?;
        self.lists.lock().mapped();
        Ok(())
    }

    fn address(&self, address: u64) -> u64 {
        let lists = self.lists.lock();
        let found = lists.segments.inner_address(address);
        found.or_else(|| lists.reservations.inner_address(address)).unwrap_or(address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Sim, SimOptions};
    use stratalloc::driver::Exportable;
    use stratalloc::ids::StreamId;
    use stratalloc::size::MIB;

    fn recorded(segments: &[u64], mappings: &[u64]) -> Recorded<Sim> {
        let mappings = mappings.iter().map(|start| (*start..start + 2 * MIB, None)).collect();
        let addresses = RecordedAddresses { segments: segments.to_vec(), mappings };
        addresses.before(Sim::new(SimOptions::default()))
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
        assert_eq!(error.kind(), DriverErrorKind::Other);
        assert_eq!(error.message(), "the recording has no further segment");
        let error = driver.reserve(2 * MIB).unwrap_err();
        assert_eq!(error.message(), "the recording has no further reservation");
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
        assert_eq!(error.kind(), DriverErrorKind::Other);
    }

    #[test]
    fn a_refused_free_changes_nothing() {
        let driver = recorded(&[0x1000_0000], &[]);
        let address = driver.allocate(2 * MIB).unwrap();
        for (address, bytes) in [(address, MIB), (address + MIB, MIB)] {
            let error = driver.free(address, bytes).unwrap_err();
            assert_eq!(error.kind(), DriverErrorKind::InvalidValue);
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
    fn a_copy_between_devices_reaches_the_inner_address_of_its_own_side_only() {
        let sim = Sim::new(SimOptions { reachable_devices: 1, ..SimOptions::default() });
        let addresses = RecordedAddresses { segments: vec![0x1000_0000], mappings: vec![] };
        let driver = addresses.before(sim);
        let own = (DeviceId(0), driver.allocate(MIB).unwrap());
        let (other, peers) = (DeviceId(1), driver.peers().unwrap());
        peers.enable_access(other).unwrap();
        peers.copy_peer((other, own.1), own, MIB, StreamId::DEFAULT).unwrap();
        peers.copy_peer(own, (other, own.1 + MIB), MIB, StreamId::DEFAULT).unwrap();
        let beside = (own.0, own.1 + MIB);
        peers.copy_peer(beside, own, MIB, StreamId::DEFAULT).unwrap_err();
    }

    #[test]
    fn a_reservation_in_which_nothing_was_mapped_overlaps_no_other() {
        let driver = recorded(&[], &[0x2000_0000, 0x2020_0000, 0x6000_0000]);
        let first = driver.reserve(8 * MIB).unwrap();
        let map = |address| {
            let piece = driver.create(2 * MIB, Exportable::No).unwrap();
            driver.map(address, 2 * MIB, piece).unwrap();
            driver.set_access(address, 2 * MIB, DeviceId(0)).unwrap();
        };
        map(first);
        // The next recorded mapping, 0x2020_0000, continues the first reservation.
        let second = driver.reserve(8 * MIB).unwrap();
        assert_eq!(second, 0x6000_0000);
        map(first + 2 * MIB);
        driver.unmap(first + 2 * MIB, 2 * MIB).unwrap();
        driver.unreserve(second, 8 * MIB).unwrap();
    }

    /// If the replayed device is larger than the recorded one, its reservations are larger too. The next
    /// recorded reservation may then begin inside one.
    #[test]
    fn a_reservation_begins_in_another_one_that_reaches_too_far() {
        let driver = recorded(&[], &[0x2000_0000, 0x2040_0000]);
        let first = driver.reserve(64 * MIB).unwrap();
        let piece = driver.create(2 * MIB, Exportable::No).unwrap();
        driver.map(first, 2 * MIB, piece).unwrap();
        driver.set_access(first, 2 * MIB, DeviceId(0)).unwrap();
        assert_eq!(driver.reserve(64 * MIB), Ok(0x2040_0000));
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

    /// Heaps may map in another order than they reserve: a heap that lacks memory after its reservation maps
    /// later. A recording contains only the mappings.
    #[test]
    fn a_reservation_is_answered_with_a_mapping_of_its_own_heap() {
        let mappings =
            [(0x2000_0000, Some(1)), (0x6000_0000, Some(2))].map(|(at, heap)| (at..at + MIB, heap));
        let addresses = RecordedAddresses { segments: vec![], mappings: mappings.to_vec() };
        let driver = addresses.before(Sim::new(SimOptions::default()));
        let reserve = |heap| {
            driver.interceptor().set_heap(Some(heap));
            driver.reserve(4 * MIB).unwrap()
        };
        assert_eq!(reserve(2), 0x6000_0000);
        assert_eq!(reserve(1), 0x2000_0000);
        let far = [reserve(1), reserve(3)];
        assert!(0x6000_0000 + FAR_BYTES / 2 < far[0] && far[0] < far[1], "{far:x?}");
    }
}
