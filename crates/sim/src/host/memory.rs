//! Address ranges of this process, and memory as bytes that any thread may access at any time.
//!
//! Streams share device memory without locks. The device program is responsible for the order of
//! accesses. So every byte is atomic here: a data race shows as wrong bytes and is never undefined
//! behaviour. `unsafe` code is only here and in `space`, which maps physical pieces into ranges.
#![expect(unsafe_code, reason = "mapping memory, and seeing it as bytes")]

use std::sync::atomic::AtomicU8;
use std::{io, ptr};

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use super::budget::Hold;

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

// SAFETY: this value owns the range. It provides addresses and accesses no byte. `Region` and
// `space::Mapping` access the bytes, as atomics.
unsafe impl Send for AddressRange {}
// SAFETY: as above: a shared reference changes nothing.
unsafe impl Sync for AddressRange {}

impl AddressRange {
    /// Maps at least 1 byte of address space with this access. It uses no memory before it is accessed.
    fn take(size_bytes: usize, access: ProtFlags) -> io::Result<Self> {
        let mapped_bytes = size_bytes
            .checked_add(ALIGNMENT_BYTES)
            .ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let kind = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: an anonymous mapping at an address of the system's choice replaces no other mapping.
        let mapped = unsafe { mmap_anonymous(ptr::null_mut(), mapped_bytes, access, kind) }?;
        let mapped = mapped.cast::<u8>();
        // The offset is below the alignment, and the mapping is larger than `size_bytes` by the
        // alignment.
        let start = mapped.wrapping_add(mapped.align_offset(ALIGNMENT_BYTES));
        Ok(Self { start, size_bytes, mapped, mapped_bytes })
    }

    /// Reserves address space that cannot be accessed.
    pub(super) fn closed(size_bytes: usize) -> io::Result<Self> {
        Self::take(size_bytes, ProtFlags::empty())
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
}

impl Drop for AddressRange {
    fn drop(&mut self) {
        // SAFETY: `take` mapped this range, and it is unmapped once. Values that access its bytes own it
        // or keep it alive, so none are left. If the call fails, the range stays mapped, which is
        // harmless.
        let _ = unsafe { munmap(self.mapped.cast(), self.mapped_bytes) };
    }
}

/// Memory with a mapping of its own. Queued work keeps the regions that it accesses alive.
#[derive(Debug)]
pub(super) struct Region {
    range: AddressRange,
    _hold: Hold,
}

impl Region {
    /// Maps `size_bytes` (at least 1) of zeroes. A page uses memory once it is first accessed.
    pub(super) fn map(size_bytes: usize, hold: Hold) -> io::Result<Self> {
        let range = AddressRange::take(size_bytes, ProtFlags::READ | ProtFlags::WRITE)?;
        Ok(Self { range, _hold: hold })
    }

    pub(super) fn address(&self) -> u64 {
        self.range.address()
    }

    pub(super) fn size_bytes(&self) -> usize {
        self.range.size_bytes()
    }

    pub(super) fn bytes(&self) -> &[AtomicU8] {
        // SAFETY: `map` mapped the range readable, writable and zeroed, for this value alone. It stays
        // so as long as `self` lives. Atomics of one byte need no alignment.
        unsafe { std::slice::from_raw_parts(self.range.at(0).cast(), self.size_bytes()) }
    }
}
