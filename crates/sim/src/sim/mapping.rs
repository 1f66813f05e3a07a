//! Virtual memory of the simulated device: reservations, pieces and mappings.
//!
//! A piece is physical memory, as a handle of `cuMemCreate` is. It uses memory of the device from `create`
//! until it is neither referenced nor mapped. Address space costs nothing.
//!
//! Without memory behind the addresses, an exported descriptor is a duplicate of the end of a pipe that the
//! piece keeps. It identifies the piece while the piece exists, and other descriptors are refused. With
//! memory, the descriptor is that of the piece's file, and an imported descriptor is checked.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use hashbrown::HashMap;

use super::backing::Backing;
use super::ranges::{AddressSpace, Budget};
use super::{
    AddressOrder, Done, GRANULARITY_BYTES, Kind, SimulatedDevice, State, check_whole, ensure,
    invalid, not_supported,
};
use crate::HeldResources;
use stratalloc::driver::call::{calls, forward};
use stratalloc::driver::{Exportable, Fabric, FabricHandle, PhysicalId, VirtualMemory};
use stratalloc::ids::DeviceId;

#[derive(Debug)]
pub(super) struct Mappings {
    space: AddressSpace,
    /// By address; no two overlap.
    mapped: BTreeMap<u64, Mapping>,
    pieces: HashMap<PhysicalId, Piece>,
    last_piece: u64,
    backing: Option<Arc<dyn Backing>>,
}

#[derive(Debug)]
struct Mapping {
    size_bytes: u64,
    piece: PhysicalId,
    accessible: bool,
    /// Other devices that may access it.
    peers: Vec<DeviceId>,
}

impl Mapping {
    fn allow(&mut self, device: DeviceId, own: DeviceId) {
        if device == own {
            self.accessible = true;
        } else if !self.peers.contains(&device) {
            self.peers.push(device);
        }
    }
}

#[derive(Debug)]
struct Piece {
    size_bytes: u64,
    /// Whether it was imported, so that its memory does not count here.
    imported: bool,
    exportable: Exportable,
    /// Number of references: one for `create` and for each `import`, minus one for each `release`.
    holds: u32,
    mappings: u32,
    /// The end of a pipe of which [`VirtualMemory::export`] returns duplicates. Created by the first export.
    exported: Option<File>,
}

impl Mappings {
    pub(super) fn new(order: AddressOrder, backing: Option<Arc<dyn Backing>>) -> Self {
        let addresses = 0x1000_0000_0000..0x7000_0000_0000;
        Self {
            space: AddressSpace::new(addresses, order, backing.clone(), false),
            mapped: BTreeMap::new(),
            pieces: HashMap::new(),
            last_piece: 0,
            backing,
        }
    }

    /// Returns whether mapped and accessible pieces cover all of these bytes.
    pub(super) fn holds(&self, address: u64, size_bytes: u64) -> bool {
        let Some(end) = address.checked_add(size_bytes) else {
            return false;
        };
        let mut at = address;
        loop {
            let below = self.mapped.range(..=at).next_back();
            match below.map(|(start, mapping)| (start + mapping.size_bytes, mapping.accessible)) {
                Some((stop, true)) if stop > at && stop >= end => return true,
                Some((stop, true)) if stop > at => at = stop,
                _ => return false,
            }
        }
    }

    /// Returns the bytes of all mapped pieces that another device may access.
    pub(super) fn peer_bytes(&self, device: DeviceId) -> u64 {
        let open = self.mapped.values().filter(|mapping| mapping.peers.contains(&device));
        open.map(|mapping| mapping.size_bytes).sum()
    }

    /// Returns the number of references to all pieces together.
    pub(super) fn holds_of_pieces(&self) -> u64 {
        self.pieces.values().map(|piece| u64::from(piece.holds)).sum()
    }

    /// Adds reservations, mappings and pieces to `held`.
    pub(super) fn add_to(&self, held: &mut HeldResources) {
        held.reservations = self.space.live().collect();
        held.mapped = self.mapped.iter().map(|(start, own)| (*start, own.size_bytes)).collect();
        held.pieces = self.pieces.len() as u64;
    }

    fn next_id(&mut self) -> PhysicalId {
        self.last_piece += 1;
        PhysicalId(self.last_piece)
    }

    fn add(&mut self, id: PhysicalId, size_bytes: u64, imported: bool, exportable: Exportable) {
        let piece =
            Piece { size_bytes, imported, exportable, holds: 1, mappings: 0, exported: None };
        self.pieces.insert(id, piece);
    }

    fn piece(&mut self, id: PhysicalId) -> Done<&mut Piece> {
        let held = self.pieces.get_mut(&id).filter(|piece| piece.holds > 0);
        held.ok_or_else(|| invalid(format!("no piece {} is held", id.0)))
    }

    fn map(&mut self, address: u64, size_bytes: u64, id: PhysicalId) -> Done<()> {
        check_whole("address", address, GRANULARITY_BYTES)?;
        let piece_bytes = self.piece(id)?.size_bytes;
        let is_whole = size_bytes == piece_bytes;
        ensure!(is_whole, "a piece of {piece_bytes} bytes cannot be mapped as {size_bytes}");
        let is_reserved = self.space.holds(address, size_bytes);
        ensure!(is_reserved, "{size_bytes} bytes at {address:#x} are not all reserved");
        self.check_unmapped(address, size_bytes)?;
        self.backing.as_ref().map_or(Ok(()), |backing| backing.map(address, id))?;
        self.piece(id)?.mappings += 1;
        let mapping = Mapping { size_bytes, piece: id, accessible: false, peers: Vec::new() };
        self.mapped.insert(address, mapping);
        Ok(())
    }

    fn check_unmapped(&self, address: u64, size_bytes: u64) -> Done<()> {
        if let Some((start, mapping)) = self.mapped.range(..address + size_bytes).next_back() {
            let is_below = start + mapping.size_bytes <= address;
            ensure!(is_below, "{size_bytes} bytes at {address:#x}: {start:#x} is mapped");
        }
        Ok(())
    }

    /// Returns the starts of the mapped pieces, which must fill the range exactly.
    fn whole_pieces(&self, address: u64, size_bytes: u64) -> Done<Vec<u64>> {
        let mut starts = Vec::new();
        let mut covered = 0;
        while covered < size_bytes {
            let Some(mapping) = self.mapped.get(&(address + covered)) else { break };
            starts.push(address + covered);
            covered += mapping.size_bytes;
        }
        ensure!(
            covered == size_bytes && size_bytes > 0,
            "{size_bytes} bytes at {address:#x} are not whole mapped pieces: the first {} cover \
             {covered} bytes",
            starts.len()
        );
        Ok(starts)
    }

    fn unmap(&mut self, starts: &[u64], budget: &mut Budget) {
        for start in starts {
            let mapping = self.mapped.remove(start);
            let id = mapping.expect("whole_pieces found it").piece;
            let piece = self.pieces.get_mut(&id).expect("mapped pieces exist");
            piece.mappings -= 1;
            self.drop_unused(id, budget);
        }
    }

    fn drop_unused(&mut self, id: PhysicalId, budget: &mut Budget) {
        if let Some(piece) = self.pieces.get(&id)
            && piece.holds == 0
            && piece.mappings == 0
        {
            budget.give(if piece.imported { 0 } else { piece.size_bytes });
            self.pieces.remove(&id);
            self.backing.iter().for_each(|backing| backing.drop_piece(id));
        }
    }
}

impl State {
    fn reserve(&mut self, size_bytes: u64) -> Done<u64> {
        self.pass(self.options.costs.reserve.of(size_bytes));
        check_whole("size", size_bytes, GRANULARITY_BYTES)?;
        self.mappings.space.take(size_bytes)
    }

    fn unreserve(&mut self, address: u64, size_bytes: u64) -> Done<()> {
        self.pass(self.options.costs.reserve.of(size_bytes));
        let mappings = &mut self.mappings;
        mappings.space.check_exact(address, size_bytes)?;
        mappings.check_unmapped(address, size_bytes)?;
        mappings.space.give(address, size_bytes)
    }

    fn create(&mut self, size_bytes: u64, exportable: Exportable) -> Done<PhysicalId> {
        self.pass(self.options.costs.create.of(size_bytes));
        check_whole("size", size_bytes, GRANULARITY_BYTES)?;
        self.budget.check(size_bytes)?;
        let id = self.mappings.next_id();
        let backing = self.backing.as_ref();
        backing.map_or(Ok(()), |backing| backing.create(id, size_bytes, exportable))?;
        self.budget.take(size_bytes);
        self.mappings.add(id, size_bytes, false, exportable);
        Ok(id)
    }

    fn release(&mut self, piece: PhysicalId) -> Done<()> {
        let size_bytes = self.mappings.pieces.get(&piece).map_or(0, |p| p.size_bytes);
        self.pass(self.options.costs.release.of(size_bytes));
        self.mappings.piece(piece)?.holds -= 1;
        self.mappings.drop_unused(piece, &mut self.budget);
        Ok(())
    }

    fn map(&mut self, address: u64, size_bytes: u64, piece: PhysicalId) -> Done<()> {
        self.pass(self.options.costs.map.of(size_bytes));
        self.mappings.map(address, size_bytes, piece)
    }

    fn set_access(&mut self, address: u64, size_bytes: u64, device: DeviceId) -> Done<()> {
        let cost_ns = self.options.costs.set_access.of(size_bytes);
        self.pass(cost_ns);
        let own = self.options.device;
        let may_access = device == own || self.peers.contains(&device);
        ensure!(may_access, "device {device} is neither device {own} nor an enabled peer");
        let starts = self.mappings.whole_pieces(address, size_bytes)?;
        self.pass(cost_ns * (starts.len() as u64 - 1));
        if device == own
            && let Some(backing) = &self.backing
        {
            backing.set_access(address, size_bytes)?;
        }
        for start in starts {
            let mapping = self.mappings.mapped.get_mut(&start);
            mapping.expect("whole_pieces found it").allow(device, own);
        }
        Ok(())
    }

    /// Unlike a real device, a device with a backing returns an error if unfinished work uses the range.
    fn unmap(&mut self, address: u64, size_bytes: u64) -> Done<()> {
        let cost_ns = self.options.costs.unmap.of(size_bytes);
        self.pass(cost_ns);
        let starts = self.mappings.whole_pieces(address, size_bytes)?;
        self.pass(cost_ns * (starts.len() as u64 - 1));
        let backing = self.backing.as_ref();
        backing.map_or(Ok(()), |backing| backing.unmap(address, size_bytes))?;
        self.mappings.unmap(&starts, &mut self.budget);
        Ok(())
    }

    /// Returns a descriptor of the piece. Without a backing, the descriptor does not keep the piece alive,
    /// unlike on a real device.
    fn export(&mut self, piece: PhysicalId) -> Done<OwnedFd> {
        self.pass(self.options.costs.export.fixed_ns);
        let held = self.mappings.piece(piece)?;
        let may_leave = held.exportable != Exportable::No;
        ensure!(may_leave, "piece {} was not created exportable", piece.0);
        if let Some(backing) = &self.backing {
            return backing.export(piece);
        }
        let exported = match &mut held.exported {
            Some(exported) => exported,
            none => {
                let (reader, _) = io::pipe()?;
                none.insert(OwnedFd::from(reader).into())
            }
        };
        Ok(exported.try_clone()?.into())
    }

    /// Without a backing: adds a reference to the piece of this device that the descriptor identifies, and
    /// refuses other descriptors. With a backing: adds a new piece, whose memory does not count here.
    fn import(&mut self, descriptor: OwnedFd, size_bytes: u64) -> Done<PhysicalId> {
        self.pass(self.options.costs.export.fixed_ns);
        if let Some(backing) = &self.backing {
            check_whole("size", size_bytes, GRANULARITY_BYTES)?;
            let id = self.mappings.next_id();
            backing.import(id, descriptor, size_bytes)?;
            self.mappings.add(id, size_bytes, true, Exportable::Descriptor);
            return Ok(id);
        }
        let identity = identity_of(&descriptor.into())?;
        let is_it = |own: &File| identity_of(own).is_ok_and(|own| own == identity);
        let mut pieces = self.mappings.pieces.iter_mut();
        let found = pieces.find(|(_, piece)| piece.exported.as_ref().is_some_and(is_it));
        let Some((id, piece)) = found else {
            let message = "the descriptor is not of a living piece of this simulated device";
            return Err(not_supported(message));
        };
        let own_bytes = piece.size_bytes;
        ensure!(own_bytes == size_bytes, "the piece has {own_bytes} bytes, not {size_bytes}");
        piece.holds += 1;
        Ok(*id)
    }
}

impl<K: Kind> VirtualMemory for SimulatedDevice<K> {
    fn granularity_bytes(&self) -> u64 {
        GRANULARITY_BYTES
    }

    fn fabric(&self) -> Option<&dyn Fabric> {
        self.shared.state.lock().options.fabric.then_some(self as _)
    }

    calls! { VirtualMemory forward Self::sized; }
}

/// A simulated fabric handle contains the piece's number. Like a simulated descriptor, it does not keep
/// the piece alive.
impl State {
    fn export_handle(&mut self, piece: PhysicalId) -> Done<FabricHandle> {
        self.pass(self.options.costs.export.fixed_ns);
        let may_leave = self.mappings.piece(piece)?.exportable == Exportable::Fabric;
        ensure!(may_leave, "piece {} was not created for the fabric", piece.0);
        let mut handle = [0; 64];
        handle[..8].copy_from_slice(&piece.0.to_le_bytes());
        Ok(FabricHandle(handle))
    }

    fn import_handle(&mut self, handle: &FabricHandle) -> Done<PhysicalId> {
        self.pass(self.options.costs.export.fixed_ns);
        let (number, rest) = handle.0.split_first_chunk().expect("it is longer than a number");
        let id = PhysicalId(u64::from_le_bytes(*number));
        let found = self.mappings.pieces.get_mut(&id);
        match found.filter(|piece| piece.exportable == Exportable::Fabric) {
            Some(piece) if rest.iter().all(|byte| *byte == 0) => {
                piece.holds += 1;
                Ok(id)
            }
            _ => Err(invalid("the handle is of no living piece of this simulated device")),
        }
    }
}

impl<K: Kind> Fabric for SimulatedDevice<K> {
    calls! { Fabric forward Self::sized; }
}

/// Returns device and inode of a file.
fn identity_of(file: &File) -> io::Result<(u64, u64)> {
    let metadata = file.metadata()?;
    Ok((metadata.dev(), metadata.ino()))
}
