//! Address ranges of this process.
//!
//! Streams share device memory without locks. The device program is responsible for the order of
//! accesses. So every byte is atomic: a data race shows as wrong bytes and is never undefined behaviour.
//! `unsafe` code is only here and in `space`, which maps physical pieces into ranges.
#![expect(unsafe_code, reason = "mapping memory")]

use std::{io, ptr};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// Alignment of the start of a range, as on a device.
pub(super) const ALIGNMENT_BYTES: usize = 2 << 20;

/// The address range of one mapping. Dropping it unmaps everything inside.
#[derive(Debug)]
pub(super) struct AddressRange {
    start: *mut u8,
    size_bytes: usize,
    mapped: *mut u8,
    mapped_bytes: usize,
}

// SAFETY: this value owns the range. It provides addresses and accesses no byte. `space::Mapping`
// accesses the bytes, as atomics.
unsafe impl Send for AddressRange {}
// SAFETY: as above: a shared reference changes nothing.
unsafe impl Sync for AddressRange {}

impl AddressRange {
    /// Maps at least 1 byte of address space, zeroed memory if `open` and without access otherwise. It uses
    /// no memory before it is accessed.
    pub(super) fn take(size_bytes: usize, open: bool) -> io::Result<Self> {
        let mapped_bytes = size_bytes
            .checked_add(ALIGNMENT_BYTES)
            .ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let access = if open { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::empty() };
        let kind = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: an anonymous mapping at an address of the system's choice replaces no other mapping.
        let mapped = unsafe { mmap_anonymous(ptr::null_mut(), mapped_bytes, access, kind) }?;
        let mapped = mapped.cast::<u8>();
        // The offset is below the alignment, and the mapping is larger than `size_bytes` by the
        // alignment.
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

    /// Releases the memory of whole pages of an open range. They are zeroes when they are accessed again.
    pub(super) fn discard(&self, offset: usize, size_bytes: usize) {
        assert!(self.at(offset).wrapping_add(size_bytes) <= self.at(self.size_bytes), "inside");
        let start = self.at(offset).cast();
        // SAFETY: the pages belong to this range and stay mapped. For threads that still access their
        // bytes, which are atomic, this is a store of zeroes. If the call fails, the bytes stay.
        let _ = unsafe { madvise(start, size_bytes, Advice::LinuxDontNeed) };
    }
}

impl Drop for AddressRange {
    fn drop(&mut self) {
        // SAFETY: `take` mapped this range, and it is unmapped once. Values that access its bytes own it
        // or keep it alive, so none are left. If the call fails, the range stays mapped, which is
        // harmless.
        let _ = unsafe { munmap(self.mapped.cast(), self.mapped_bytes) };
    }
}
