//! Reserved address space, and the physical pieces mapped in it.
//!
//! A reservation is one address range without access. Pieces are mapped over parts of it and unmapped
//! again, only by the reservation itself. It does not unmap a piece that is in use: queued work keeps
//! its mappings alive, so bytes in use stay valid. Driver calls and streams are not known here but in
//! `virtual_memory`.
#![expect(unsafe_code, reason = "mapping files over reserved addresses, and seeing them as bytes")]

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap, mmap_anonymous, mprotect};

use super::backing::Piece;
use super::memory::AddressRange;
use super::span::Part;
use crate::refusal::{Done, ensure, invalid};

/// One range of reserved address space.
#[derive(Debug)]
pub(super) struct Reservation {
    range: Arc<AddressRange>,
    /// Mappings by offset. They do not overlap, and all lie inside the range.
    mapped: BTreeMap<usize, Arc<Mapping>>,
}

/// A whole piece mapped at an offset of a reservation.
#[derive(Debug)]
pub(super) struct Mapping {
    range: Arc<AddressRange>,
    offset: usize,
    piece: Arc<Piece>,
    /// Set once access is allowed. Never cleared while the mapping lives.
    open: AtomicBool,
}

impl Mapping {
    fn end(&self) -> usize {
        self.offset + self.piece.size_bytes
    }

    fn is_open(&self) -> bool {
        self.open.load(Ordering::Acquire)
    }

    /// Returns its bytes. Access must be allowed.
    pub(super) fn bytes(&self) -> &[AtomicU8] {
        assert!(self.is_open(), "bytes are seen only where access was allowed");
        let start = self.range.at(self.offset).cast();
        // SAFETY: `Reservation::map` mapped this whole piece here, and `open` made it readable and
        // writable. It stays mapped: `range` is kept alive, `Reservation::unmap` consumes a mapping
        // before it replaces it, and the piece's file does not shrink (see `backing`). Atomics of one
        // byte need no alignment.
        unsafe { std::slice::from_raw_parts(start, self.piece.size_bytes) }
    }
}

impl Reservation {
    /// Reserves at least 1 byte of address space.
    pub(super) fn take(size_bytes: usize) -> io::Result<Self> {
        let range = Arc::new(AddressRange::closed(size_bytes)?);
        Ok(Self { range, mapped: BTreeMap::new() })
    }

    pub(super) fn address(&self) -> u64 {
        self.range.address()
    }

    pub(super) fn size_bytes(&self) -> usize {
        self.range.size_bytes()
    }

    /// Returns start, size and piece of every mapping, in address order.
    pub(super) fn mapped(&self) -> impl Iterator<Item = (u64, u64, &Arc<Piece>)> {
        self.mapped.iter().map(|(offset, mapping)| {
            let start = self.address() + *offset as u64;
            (start, mapping.piece.size_bytes as u64, &mapping.piece)
        })
    }

    pub(super) fn mappings(&self) -> usize {
        self.mapped.len()
    }

    /// Maps a piece at `offset`. It cannot be accessed yet.
    pub(super) fn map(&mut self, offset: usize, piece: &Arc<Piece>) -> Done<()> {
        let size_bytes = piece.size_bytes;
        let (end, all) = (offset.saturating_add(size_bytes), self.size_bytes());
        ensure!(
            end <= all,
            "{size_bytes} bytes at offset {offset} reach over the end of {all} reserved bytes"
        );
        if let Some((start, other)) = self.mapped.range(..end).next_back() {
            let stop = other.end();
            ensure!(
                stop <= offset,
                "{size_bytes} bytes at offset {offset}: a piece is mapped at offset {start} to {stop}"
            );
        }
        let (start, flags) = (self.range.at(offset).cast(), MapFlags::SHARED | MapFlags::FIXED);
        // SAFETY: the target lies inside `range`, which this reservation owns. `mapped` lists all
        // mappings in it and has none there, so only inaccessible bytes are replaced.
        unsafe {
            mmap(start, size_bytes, ProtFlags::empty(), flags, piece.file(), piece.file_offset)
        }?;
        let (range, piece) = (Arc::clone(&self.range), Arc::clone(piece));
        let mapping = Mapping { range, offset, piece, open: AtomicBool::new(false) };
        self.mapped.insert(offset, Arc::new(mapping));
        Ok(())
    }

    /// Allows reading and writing in a range of whole pieces.
    pub(super) fn open(&mut self, offset: usize, size_bytes: usize) -> Done<()> {
        let starts = self.whole(offset, size_bytes)?;
        let (start, access) =
            (self.range.at(offset).cast(), MprotectFlags::READ | MprotectFlags::WRITE);
        // SAFETY: `whole` has checked that mappings cover the range without a gap. More access harms no
        // existing reader of these bytes.
        unsafe { mprotect(start, size_bytes, access) }?;
        for mapping in starts.iter().filter_map(|start| self.mapped.get(start)) {
            mapping.open.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// Unmaps whole pieces, all or none. Refused while one of them is in use.
    pub(super) fn unmap(&mut self, offset: usize, size_bytes: usize) -> Done<()> {
        let starts = self.whole(offset, size_bytes)?;
        let mut idle = Vec::with_capacity(starts.len());
        let mut used = None;
        for start in starts {
            match self.mapped.remove(&start).map(Arc::try_unwrap) {
                Some(Ok(mapping)) => idle.push(mapping),
                Some(Err(held)) => {
                    self.mapped.insert(start, held);
                    used = Some(start);
                    break;
                }
                None => {}
            }
        }
        if let Some(start) = used {
            self.keep(idle);
            let at = self.address() + start as u64;
            return Err(invalid(format!("unfinished work still uses the piece at {at:#x}")));
        }
        let start = self.range.at(offset).cast();
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: the mappings in `idle` cover the range exactly. They are owned here, so nothing else
        // can access their bytes, and they are dropped when this succeeds.
        let unmapped = unsafe { mmap_anonymous(start, size_bytes, ProtFlags::empty(), flags) };
        if unmapped.is_err() {
            self.keep(idle);
        }
        Ok(unmapped.map(drop)?)
    }

    /// Returns the bytes of a range, if mapped and accessible pieces cover it.
    pub(super) fn parts(&self, offset: usize, size_bytes: usize) -> Option<Vec<Part>> {
        let end = offset.checked_add(size_bytes)?;
        let mut parts = Vec::new();
        let mut at = offset;
        while at < end {
            let (_, mapping) = self.mapped.range(..=at).next_back()?;
            if mapping.end() <= at || !mapping.is_open() {
                return None;
            }
            let stop = end.min(mapping.end());
            parts.push(Part::of_mapping(mapping, at - mapping.offset, stop - at));
            at = stop;
        }
        Some(parts)
    }

    /// Returns the starts of the pieces that fill a range exactly.
    fn whole(&self, offset: usize, size_bytes: usize) -> Done<Vec<usize>> {
        let mut starts = Vec::new();
        let mut covered = 0;
        while covered < size_bytes {
            let Some(mapping) = self.mapped.get(&(offset + covered)) else { break };
            starts.push(mapping.offset);
            covered += mapping.piece.size_bytes;
        }
        ensure!(
            covered == size_bytes && size_bytes > 0,
            "{size_bytes} bytes at offset {offset} are not whole mapped pieces: {} of them cover \
             {covered} bytes",
            starts.len()
        );
        Ok(starts)
    }

    fn keep(&mut self, mappings: Vec<Mapping>) {
        self.mapped.extend(mappings.into_iter().map(|m| (m.offset, Arc::new(m))));
    }
}
