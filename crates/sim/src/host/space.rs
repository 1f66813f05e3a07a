//! Address ranges, and the memory mapped in them.
//!
//! A reservation is one address range. An *open* reservation is memory from the start. Any other gets its
//! memory piece by piece: the [`Reservation`] maps pieces into parts of the range and unmaps them. It does
//! not unmap a piece that queued work accesses, because that work keeps the [`Mapping`] alive. So bytes in
//! use stay valid.
#![expect(unsafe_code, reason = "mapping files over reserved addresses, and seeing them as bytes")]

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap, mmap_anonymous, mprotect};

use super::backing::Piece;
use super::memory::AddressRange;
use super::span::{Part, Span};
use crate::refusal::{Done, invalid};

/// One range of addresses.
#[derive(Debug)]
pub(super) struct Reservation {
    range: Arc<AddressRange>,
    /// Mappings by offset. They do not overlap, and all lie inside the range.
    mapped: BTreeMap<usize, Arc<Mapping>>,
    /// Bytes of the range that the device has not freed yet.
    pub(super) left_bytes: u64,
}

/// A whole piece mapped at an offset of a reservation, or the memory of an open reservation.
#[derive(Debug)]
pub(super) struct Mapping {
    range: Arc<AddressRange>,
    offset: usize,
    size_bytes: usize,
    /// Keeps the piece alive. `None` for the memory of an open reservation.
    _piece: Option<Arc<Piece>>,
    /// Set once access is allowed. Never cleared while the mapping lives.
    open: AtomicBool,
}

impl Mapping {
    fn end(&self) -> usize {
        self.offset + self.size_bytes
    }

    /// Returns the bytes of the mapping. Panics if access is not allowed yet.
    pub(super) fn bytes(&self) -> &[AtomicU8] {
        assert!(
            self.open.load(Ordering::Acquire),
            "bytes are accessed only where that was allowed"
        );
        let start = self.range.at(self.offset).cast();
        // SAFETY: `Reservation::take` mapped this memory readable and writable, or `Reservation::map` mapped
        // a whole piece here and `Reservation::open` allowed access. It stays mapped: `range` is kept alive,
        // `Reservation::unmap` refuses mappings that are referenced elsewhere, and the piece's file does not
        // shrink (see `backing`). Atomics of one byte need no alignment.
        unsafe { std::slice::from_raw_parts(start, self.size_bytes) }
    }
}

impl Reservation {
    /// Reserves addresses: zeroed memory if `open`, otherwise a range to map pieces in.
    pub(super) fn take(size_bytes: usize, open: bool) -> io::Result<Self> {
        let range = Arc::new(AddressRange::take(size_bytes, open)?);
        let left_bytes = size_bytes as u64;
        let mut own = Self { range, mapped: BTreeMap::new(), left_bytes };
        if open {
            own.add(0, size_bytes, None, true);
        }
        Ok(own)
    }

    pub(super) fn address(&self) -> u64 {
        self.range.address()
    }

    pub(super) fn size_bytes(&self) -> usize {
        self.range.size_bytes()
    }

    /// Releases the memory of pages that the device has freed. The reservation must be open.
    pub(super) fn discard(&self, offset: usize, size_bytes: usize) {
        self.range.discard(offset, size_bytes);
    }

    fn add(&mut self, offset: usize, size_bytes: usize, piece: Option<Arc<Piece>>, open: bool) {
        let (range, open) = (Arc::clone(&self.range), AtomicBool::new(open));
        let mapping = Mapping { range, offset, size_bytes, _piece: piece, open };
        self.mapped.insert(offset, Arc::new(mapping));
    }

    /// Maps a piece at `offset`, where nothing may be mapped. [`open`](Self::open) then allows access.
    pub(super) fn map(&mut self, offset: usize, piece: &Arc<Piece>) -> io::Result<()> {
        let size_bytes = piece.size_bytes;
        let end = offset.checked_add(size_bytes).filter(|end| *end <= self.size_bytes());
        let below =
            self.mapped.range(..end.expect("a piece is mapped inside the range")).next_back();
        assert!(below.is_none_or(|(_, below)| below.end() <= offset), "nothing is mapped there");
        let (start, flags) = (self.range.at(offset).cast(), MapFlags::SHARED | MapFlags::FIXED);
        // SAFETY: the target lies inside `range`, which this reservation owns. `mapped` lists all
        // mappings in it and has none there, so only inaccessible bytes are replaced.
        unsafe {
            mmap(start, size_bytes, ProtFlags::empty(), flags, piece.file(), piece.file_offset)
        }?;
        self.add(offset, size_bytes, Some(Arc::clone(piece)), false);
        Ok(())
    }

    /// Allows reading and writing in a range of whole pieces.
    pub(super) fn open(&mut self, offset: usize, size_bytes: usize) -> io::Result<()> {
        let within = self.whole(offset, size_bytes);
        let (start, access) =
            (self.range.at(offset).cast(), MprotectFlags::READ | MprotectFlags::WRITE);
        // SAFETY: `whole` has checked that mappings cover the range without a gap. To allow more access harms
        // no existing reader of these bytes.
        unsafe { mprotect(start, size_bytes, access) }?;
        let mapped = self.mapped.range(within);
        mapped.for_each(|(_, mapping)| mapping.open.store(true, Ordering::Release));
        Ok(())
    }

    /// Unmaps whole pieces, all or none. Returns an error while queued work uses one of them.
    pub(super) fn unmap(&mut self, offset: usize, size_bytes: usize) -> Done<()> {
        let within = self.whole(offset, size_bytes);
        let mut mapped = self.mapped.range_mut(within.clone());
        let used = mapped.find_map(|(at, own)| Arc::get_mut(own).is_none().then_some(*at));
        if let Some(used) = used {
            let at = self.address() + used as u64;
            return Err(invalid(format!("unfinished work still uses the piece at {at:#x}")));
        }
        let start = self.range.at(offset).cast();
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: `whole` has checked that mappings fill the range exactly. Only `mapped`, which is borrowed
        // here, references them, so nothing can access their bytes. They are dropped if this call succeeds.
        unsafe { mmap_anonymous(start, size_bytes, ProtFlags::empty(), flags) }?;
        self.mapped.extract_if(within, |_, _| true).for_each(drop);
        Ok(())
    }

    /// Returns the bytes of a range that mapped and accessible pieces cover.
    pub(super) fn span(&self, offset: usize, size_bytes: usize) -> Span {
        let end = offset + size_bytes;
        let mut parts = Vec::new();
        let mut at = offset;
        while at < end {
            let below = self.mapped.range(..=at).next_back();
            let (_, mapping) = below.filter(|(_, own)| own.end() > at).expect("mapped memory");
            let mapping = Arc::clone(mapping);
            let stop = end.min(mapping.end());
            parts.push(Part { offset: at - mapping.offset, count: stop - at, mapping });
            at = stop;
        }
        Span(parts)
    }

    /// Returns the offsets of a range. Panics unless whole mapped pieces fill it.
    fn whole(&self, offset: usize, size_bytes: usize) -> Range<usize> {
        let within = offset..offset + size_bytes;
        let mut mapped = self.mapped.range(within.clone());
        let end = mapped.try_fold(offset, |at, (start, own)| (*start == at).then(|| own.end()));
        assert_eq!(end, Some(within.end), "whole pieces fill the range");
        within
    }
}
