//! Virtual memory of the host device: which space is reserved and which pieces exist.
//!
//! Pieces cost bytes of the device from `create` until they are neither held nor mapped; address
//! space costs nothing. Unlike a real device, `unmap` notices unfinished work on the range and
//! refuses, where a device would fault later. No call here waits for work.
//!
//! Pieces that are mapped apart from each other cost one entry each in the system's table of
//! mappings (65,530 by default); a full table is reported as out of memory.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use hashbrown::{HashMap, HashSet};

use super::Host;
use super::backing::{Piece, Store};
use super::errors::{Refusal, length};
use super::memory::ALIGNMENT_BYTES;
use super::space::Reservation;
use super::span::Span;
use crate::driver::{DriverResult, Exportable, Held, PhysicalId, VirtualMemory};
use crate::ids::DeviceId;

const GRANULARITY_BYTES: u64 = ALIGNMENT_BYTES as u64;

/// All reservations and all pieces that are held.
#[derive(Debug, Default)]
pub(super) struct Space {
    reservations: BTreeMap<u64, Reservation>,
    pieces: HashMap<PhysicalId, Arc<Piece>>,
    last_piece: u64,
    /// Opened by the first piece that needs it.
    store: Option<Arc<Store>>,
}

impl Space {
    /// The bytes of a range, if mapped and accessible pieces of one reservation cover it.
    pub(super) fn span(&self, address: u64, size_bytes: u64) -> Option<Span> {
        let (start, reservation) = self.reservations.range(..=address).next_back()?;
        let offset = usize::try_from(address - start).ok()?;
        let parts = reservation.parts(offset, usize::try_from(size_bytes).ok()?)?;
        Some(Span::new(parts))
    }

    /// Adds what is reserved, mapped and made.
    pub(super) fn tell(&self, held: &mut Held) {
        let mut pieces: HashSet<_> = self.pieces.values().map(Arc::as_ptr).collect();
        for (start, reservation) in &self.reservations {
            held.reservations.push((*start, reservation.size_bytes() as u64));
            for (at, size_bytes, piece) in reservation.mapped() {
                held.mapped.push((at, size_bytes));
                pieces.insert(Arc::as_ptr(piece));
            }
        }
        held.pieces = pieces.len() as u64;
    }

    /// The reservation that holds a range, and the range in it as offset and size.
    fn within(
        &mut self,
        address: u64,
        size_bytes: u64,
    ) -> Result<(&mut Reservation, usize, usize), Refusal> {
        check_whole("address", address)?;
        check_whole("size", size_bytes)?;
        let before = self.reservations.range_mut(..=address).next_back();
        let found = before.and_then(|(start, reservation)| {
            let offset = usize::try_from(address - start).ok()?;
            let size = usize::try_from(size_bytes).ok()?;
            let fits = offset.checked_add(size)? <= reservation.size_bytes();
            fits.then_some((reservation, offset, size))
        });
        found.ok_or_else(|| {
            let message = format!("{size_bytes} bytes at {address:#x} are not in one reservation");
            Refusal::Illegal(message)
        })
    }

    fn unreserve(&mut self, address: u64, size_bytes: u64) -> Result<(), Refusal> {
        let found = self.reservations.get(&address);
        let exact = found.filter(|reservation| reservation.size_bytes() as u64 == size_bytes);
        let Some(reservation) = exact else {
            let message = format!("no reservation of {size_bytes} bytes starts at {address:#x}");
            return Err(Refusal::Illegal(message));
        };
        let mappings = reservation.mappings();
        if mappings > 0 {
            let message = format!("{mappings} pieces are mapped in the range at {address:#x}");
            return Err(Refusal::Illegal(message));
        }
        self.reservations.remove(&address);
        Ok(())
    }

    fn add(&mut self, piece: Piece) -> PhysicalId {
        self.last_piece += 1;
        let id = PhysicalId(self.last_piece);
        self.pieces.insert(id, Arc::new(piece));
        id
    }

    fn store(&mut self) -> Result<Arc<Store>, Refusal> {
        let store = match self.store.take() {
            Some(store) => store,
            None => Store::open()?,
        };
        Ok(Arc::clone(self.store.insert(store)))
    }

    /// The file that pieces share.
    #[cfg(test)]
    pub(super) fn store_for_tests(&self) -> Option<&Store> {
        self.store.as_deref()
    }

    fn piece(&self, id: PhysicalId) -> Result<&Arc<Piece>, Refusal> {
        self.pieces.get(&id).ok_or_else(|| unknown(id))
    }

    fn map(&mut self, address: u64, size_bytes: u64, id: PhysicalId) -> Result<(), Refusal> {
        let piece = Arc::clone(self.piece(id)?);
        if piece.size_bytes() as u64 != size_bytes {
            let piece_bytes = piece.size_bytes();
            let message =
                format!("a piece of {piece_bytes} bytes cannot be mapped as {size_bytes}");
            return Err(Refusal::Illegal(message));
        }
        let (reservation, offset, _) = self.within(address, size_bytes)?;
        reservation.map(offset, &piece)
    }
}

fn unknown(id: PhysicalId) -> Refusal {
    Refusal::Illegal(format!("no piece {} is held", id.0))
}

fn check_whole(what: &str, bytes: u64) -> Result<(), Refusal> {
    if bytes > 0 && bytes.is_multiple_of(GRANULARITY_BYTES) {
        return Ok(());
    }
    let message = format!("{what} {bytes:#x} is not a positive multiple of {GRANULARITY_BYTES:#x}");
    Err(Refusal::Illegal(message))
}

impl Host {
    fn new_piece(&self, size_bytes: u64, exportable: Exportable) -> Result<PhysicalId, Refusal> {
        check_whole("size", size_bytes)?;
        let hold = self.budget.take(size_bytes)?;
        let size = length(size_bytes)?;
        let space = &mut self.memory.lock().space;
        let piece = match exportable {
            Exportable::No => Piece::shared(&space.store()?, size, hold)?,
            Exportable::Descriptor | Exportable::Fabric => Piece::exportable(size, hold)?,
        };
        Ok(space.add(piece))
    }
}

impl VirtualMemory for Host {
    fn granularity_bytes(&self) -> u64 {
        GRANULARITY_BYTES
    }

    fn reserve(&self, size_bytes: u64) -> DriverResult<u64> {
        let refuse = |refusal: Refusal| refusal.of("reserve");
        check_whole("size", size_bytes).map_err(refuse)?;
        let size = length(size_bytes).map_err(refuse)?;
        let reservation = Reservation::take(size).map_err(|error| refuse(error.into()))?;
        let address = reservation.address();
        self.memory.lock().space.reservations.insert(address, reservation);
        Ok(address)
    }

    fn unreserve(&self, address: u64, size_bytes: u64) -> DriverResult<()> {
        let space = &mut self.memory.lock().space;
        space.unreserve(address, size_bytes).map_err(|refusal| refusal.of("unreserve"))
    }

    fn create(&self, size_bytes: u64, exportable: Exportable) -> DriverResult<PhysicalId> {
        self.new_piece(size_bytes, exportable).map_err(|refusal| refusal.of("create"))
    }

    fn release(&self, piece: PhysicalId) -> DriverResult<()> {
        let removed = self.memory.lock().space.pieces.remove(&piece);
        // A piece that is mapped nowhere goes here, with no lock held.
        removed.map(drop).ok_or_else(|| unknown(piece).of("release"))
    }

    fn map(&self, address: u64, size_bytes: u64, piece: PhysicalId) -> DriverResult<()> {
        let space = &mut self.memory.lock().space;
        space.map(address, size_bytes, piece).map_err(|refusal| refusal.of("map"))
    }

    fn set_access(&self, address: u64, size_bytes: u64, device: DeviceId) -> DriverResult<()> {
        let refuse = |refusal: Refusal| refusal.of("set_access");
        let own = self.options.device;
        if device != own {
            let message = format!("device {device} asked; only device {own} exists here");
            return Err(refuse(Refusal::Illegal(message)));
        }
        let space = &mut self.memory.lock().space;
        let (reservation, offset, size) = space.within(address, size_bytes).map_err(refuse)?;
        reservation.open(offset, size).map_err(refuse)
    }

    /// Refused while submitted work on the range is unfinished.
    fn unmap(&self, address: u64, size_bytes: u64) -> DriverResult<()> {
        let refuse = |refusal: Refusal| refusal.of("unmap");
        let space = &mut self.memory.lock().space;
        let (reservation, offset, size) = space.within(address, size_bytes).map_err(refuse)?;
        reservation.unmap(offset, size).map_err(refuse)
    }

    fn export(&self, piece: PhysicalId) -> DriverResult<OwnedFd> {
        let refuse = |refusal: Refusal| refusal.of("export");
        let space = &self.memory.lock().space;
        match space.piece(piece).map_err(refuse)?.export() {
            Some(descriptor) => descriptor.map_err(|error| refuse(error.into())),
            None => {
                let message = format!("piece {} was not created exportable", piece.0);
                Err(refuse(Refusal::Illegal(message)))
            }
        }
    }

    /// The memory counts where it was created, not here.
    fn import(&self, descriptor: OwnedFd, size_bytes: u64) -> DriverResult<PhysicalId> {
        let import = || {
            check_whole("size", size_bytes)?;
            Piece::imported(descriptor, length(size_bytes)?)
        };
        let piece = import().map_err(|refusal: Refusal| refusal.of("import"))?;
        Ok(self.memory.lock().space.add(piece))
    }
}
