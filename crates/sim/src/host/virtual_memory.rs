//! Virtual memory of the host device: reservations and pieces.
//!
//! A piece uses memory of the device from `create` until it is neither referenced nor mapped. Address
//! space costs nothing. Unlike a real device, `unmap` detects unfinished work on the range and refuses,
//! where a device would fault later. No call here waits for work.
//!
//! Pieces that are not adjacent use one entry each in the system's table of mappings (65,530 by
//! default). A full table is reported as out of memory.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use hashbrown::{HashMap, HashSet};

use super::backing::{Piece, Store};
use super::errors::length;
use super::memory::ALIGNMENT_BYTES;
use super::space::Reservation;
use super::span::Span;
use super::{Device, Host};
use crate::HeldResources;
use crate::refusal::{Done, Refusal, check_whole, ensure, invalid};
use stratalloc::driver::call::{calls, forward};
use stratalloc::driver::{Exportable, PhysicalId, VirtualMemory};
use stratalloc::ids::DeviceId;

const GRANULARITY_BYTES: u64 = ALIGNMENT_BYTES as u64;

/// All reservations and all referenced pieces.
#[derive(Debug, Default)]
pub(super) struct Space {
    reservations: BTreeMap<u64, Reservation>,
    pieces: HashMap<PhysicalId, Arc<Piece>>,
    last_piece: u64,
    /// Opened by the first piece that needs it.
    store: Option<Arc<Store>>,
}

impl Space {
    /// Returns the bytes of a range, if mapped and accessible pieces of one reservation cover it.
    pub(super) fn span(&self, address: u64, size_bytes: u64) -> Option<Span> {
        let (start, reservation) = self.reservations.range(..=address).next_back()?;
        let offset = usize::try_from(address - start).ok()?;
        let parts = reservation.parts(offset, usize::try_from(size_bytes).ok()?)?;
        Some(Span(parts))
    }

    /// Adds reservations, mappings and pieces to `held`.
    pub(super) fn add_to(&self, held: &mut HeldResources) {
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

    /// Returns the reservation that contains a range, and the range's offset and size in it.
    fn within(&mut self, address: u64, size_bytes: u64) -> Done<(&mut Reservation, usize, usize)> {
        check_whole("address", address, GRANULARITY_BYTES)?;
        check_whole("size", size_bytes, GRANULARITY_BYTES)?;
        let before = self.reservations.range_mut(..=address).next_back();
        let found = before.and_then(|(start, reservation)| {
            let offset = usize::try_from(address - start).ok()?;
            let size = usize::try_from(size_bytes).ok()?;
            let fits = offset.checked_add(size)? <= reservation.size_bytes();
            fits.then_some((reservation, offset, size))
        });
        let text = format_args!("{size_bytes} bytes at {address:#x} are not in one reservation");
        found.ok_or_else(|| invalid(text.to_string()))
    }

    fn unreserve(&mut self, address: u64, size_bytes: u64) -> Done<()> {
        let found = self.reservations.get(&address);
        let exact = found.filter(|reservation| reservation.size_bytes() as u64 == size_bytes);
        let unknown = format_args!("no reservation of {size_bytes} bytes starts at {address:#x}");
        let mappings = exact.ok_or_else(|| invalid(unknown.to_string()))?.mappings();
        ensure!(mappings == 0, "{mappings} pieces are mapped in the range at {address:#x}");
        self.reservations.remove(&address);
        Ok(())
    }

    fn add(&mut self, piece: Piece) -> PhysicalId {
        self.last_piece += 1;
        let id = PhysicalId(self.last_piece);
        self.pieces.insert(id, Arc::new(piece));
        id
    }

    fn store(&mut self) -> Done<Arc<Store>> {
        let store = match self.store.take() {
            Some(store) => store,
            None => Store::open()?,
        };
        Ok(Arc::clone(self.store.insert(store)))
    }

    /// Returns the file that pieces share.
    #[cfg(test)]
    pub(super) fn store_for_tests(&self) -> Option<&Store> {
        self.store.as_deref()
    }

    fn piece(&self, id: PhysicalId) -> Done<&Arc<Piece>> {
        self.pieces.get(&id).ok_or_else(|| unknown(id))
    }

    fn map(&mut self, address: u64, size_bytes: u64, id: PhysicalId) -> Done<()> {
        let piece = Arc::clone(self.piece(id)?);
        let piece_bytes = piece.size_bytes as u64;
        let is_whole = piece_bytes == size_bytes;
        ensure!(is_whole, "a piece of {piece_bytes} bytes cannot be mapped as {size_bytes}");
        let (reservation, offset, _) = self.within(address, size_bytes)?;
        reservation.map(offset, &piece)
    }
}

fn unknown(id: PhysicalId) -> Refusal {
    invalid(format!("no piece {} is held", id.0))
}

impl Device {
    fn reserve(&self, size_bytes: u64) -> Done<u64> {
        check_whole("size", size_bytes, GRANULARITY_BYTES)?;
        let reservation = Reservation::take(length(size_bytes)?)?;
        let address = reservation.address();
        self.memory.lock().space.reservations.insert(address, reservation);
        Ok(address)
    }

    fn unreserve(&self, address: u64, size_bytes: u64) -> Done<()> {
        self.memory.lock().space.unreserve(address, size_bytes)
    }

    fn create(&self, size_bytes: u64, exportable: Exportable) -> Done<PhysicalId> {
        check_whole("size", size_bytes, GRANULARITY_BYTES)?;
        let hold = self.budget.take(size_bytes)?;
        let size = length(size_bytes)?;
        let space = &mut self.memory.lock().space;
        let piece = match exportable {
            Exportable::No => Piece::shared(&space.store()?, size, hold)?,
            Exportable::Descriptor | Exportable::Fabric => Piece::exportable(size, hold)?,
        };
        Ok(space.add(piece))
    }

    fn release(&self, piece: PhysicalId) -> Done<()> {
        let removed = self.memory.lock().space.pieces.remove(&piece);
        // A piece without mappings is freed here, with no lock held.
        removed.map(drop).ok_or_else(|| unknown(piece))
    }

    fn map(&self, address: u64, size_bytes: u64, piece: PhysicalId) -> Done<()> {
        self.memory.lock().space.map(address, size_bytes, piece)
    }

    fn set_access(&self, address: u64, size_bytes: u64, device: DeviceId) -> Done<()> {
        let own = self.options.device;
        ensure!(device == own, "device {device} requested; only device {own} exists here");
        let space = &mut self.memory.lock().space;
        let (reservation, offset, size) = space.within(address, size_bytes)?;
        reservation.open(offset, size)
    }

    /// Unmaps pieces. Refused while submitted work on the range is unfinished.
    fn unmap(&self, address: u64, size_bytes: u64) -> Done<()> {
        let space = &mut self.memory.lock().space;
        let (reservation, offset, size) = space.within(address, size_bytes)?;
        reservation.unmap(offset, size)
    }

    fn export(&self, piece: PhysicalId) -> Done<OwnedFd> {
        let space = &self.memory.lock().space;
        let exported = space.piece(piece)?.export();
        let stays = || invalid(format!("piece {} was not created exportable", piece.0));
        Ok(exported.ok_or_else(stays)??)
    }

    /// Imports a piece. Its memory counts where it was created, not here.
    fn import(&self, descriptor: OwnedFd, size_bytes: u64) -> Done<PhysicalId> {
        check_whole("size", size_bytes, GRANULARITY_BYTES)?;
        let piece = Piece::imported(descriptor, length(size_bytes)?)?;
        Ok(self.memory.lock().space.add(piece))
    }
}

impl VirtualMemory for Host {
    fn granularity_bytes(&self) -> u64 {
        GRANULARITY_BYTES
    }

    calls! { VirtualMemory forward Self::call; }
}
