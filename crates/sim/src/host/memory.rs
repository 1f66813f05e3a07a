//! Address ranges of this process.
//!
//! Streams share device memory without locks, and the program that uses the device orders their accesses. If
//! it fails to, the result must be wrong bytes and never undefined behaviour, so every byte is accessed as an
//! atomic. Outside of tests, only this file and `space` (which maps physical pieces into ranges) contain
//! `unsafe` code.
#![expect(unsafe_code, reason = "mapping memory")]

use std::{io, ptr};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// Alignment of the start of a range, as on a device.
pub(super) const ALIGNMENT_BYTES: usize = 2 << 20;

/// A range of addresses from one `mmap`. Dropping it unmaps everything inside.
#[derive(Debug)]
pub(super) struct AddressRange {
    start: *mut u8,
    size_bytes: usize,
    mapped: *mut u8,
    mapped_bytes: usize,
}

// SAFETY: this value owns the range and accesses no byte of it. `space::Mapping` accesses the bytes, as
// atomics.
unsafe impl Send for AddressRange {}
// SAFETY: as above. No method changes a field through a shared reference.
unsafe impl Sync for AddressRange {}

impl AddressRange {
    /// Maps a range of addresses: zeroed memory if `open`, otherwise without access. The system provides the
    /// memory when a page is first accessed.
    pub(super) fn take(size_bytes: usize, open: bool) -> io::Result<Self> {
        let mapped_bytes = size_bytes
            .checked_add(ALIGNMENT_BYTES)
            .ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let access = if open { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::empty() };
        let kind = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: an anonymous mapping at an address of the system's choice replaces no other mapping.
        let mapped = unsafe { mmap_anonymous(ptr::null_mut(), mapped_bytes, access, kind) }?;
        let mapped = mapped.cast::<u8>();
        // The offset is below the alignment, by which the mapping is larger than `size_bytes`. So the range
        // ends inside the mapping.
        let start = mapped.wrapping_add(mapped.align_offset(ALIGNMENT_BYTES));
        Ok(Self { start, size_bytes, mapped, mapped_bytes })
    }

    pub(super) fn address(&self) -> u64 {
        self.start.expose_provenance() as u64
    }

    pub(super) fn size_bytes(&self) -> usize {
        self.size_bytes
    }

    /// Returns the address at `offset`, which must not exceed the size.
    pub(super) fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset <= self.size_bytes, "{offset} is in a range of {}", self.size_bytes);
        self.start.wrapping_add(offset)
    }

    /// Releases the memory of whole pages of an open range. Their bytes are then zero, unless the call fails.
    pub(super) fn discard(&self, offset: usize, size_bytes: usize) {
        assert!(self.at(offset).wrapping_add(size_bytes) <= self.at(self.size_bytes), "inside");
        let start = self.at(offset).cast();
        // SAFETY: the pages belong to this range and stay mapped. For threads that still access their bytes,
        // which are atomic, this is a store of zeroes. If the call fails, nothing changes.
        let _ = unsafe { madvise(start, size_bytes, Advice::LinuxDontNeed) };
    }
}

impl Drop for AddressRange {
    fn drop(&mut self) {
        // SAFETY: `take` mapped this range, and it is unmapped once. Values that access its bytes keep it
        // alive, so none are left. If the call fails, the range stays mapped, which is harmless.
        let _ = unsafe { munmap(self.mapped.cast(), self.mapped_bytes) };
    }
}
