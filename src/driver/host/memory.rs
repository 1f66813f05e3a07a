//! Address ranges of this process, and memory as bytes that anybody may touch at any time.
//!
//! Device memory is shared by streams without locks: who writes what when is the device program's
//! matter. So every byte is atomic here, which makes a program's race visible as wrong bytes and
//! never undefined. `unsafe` is only here and in `space`, which puts physical pieces into ranges.
#![expect(unsafe_code, reason = "mapping memory, and seeing it as bytes")]

use std::io;
use std::ptr;
use std::sync::atomic::AtomicU8;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use super::budget::Hold;

/// Where ranges start is a multiple of this, as on a device.
pub(super) const ALIGNMENT_BYTES: usize = 2 << 20;

/// Address space of one mapping. It goes when this is dropped, with whatever is mapped inside.
#[derive(Debug)]
pub(super) struct AddressRange {
    start: *mut u8,
    size_bytes: usize,
    mapped: *mut u8,
    mapped_bytes: usize,
}

// SAFETY: the range belongs to this value alone; it hands out addresses and touches no byte. Those
// who see bytes in it (`Region`, `space::Mapping`) see atomics.
unsafe impl Send for AddressRange {}
// SAFETY: as above: nothing is changed through a shared reference.
unsafe impl Sync for AddressRange {}

impl AddressRange {
    /// Takes at least 1 byte of address space with this access. No memory is taken before a touch.
    fn take(size_bytes: usize, access: ProtFlags) -> io::Result<Self> {
        let mapped_bytes = size_bytes
            .checked_add(ALIGNMENT_BYTES)
            .ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let kind = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: an anonymous mapping at an address the system chooses replaces nothing.
        let mapped = unsafe { mmap_anonymous(ptr::null_mut(), mapped_bytes, access, kind) }?;
        let mapped = mapped.cast::<u8>();
        // Below the alignment, by which the mapping is larger than what was asked for.
        let start = mapped.wrapping_add(mapped.align_offset(ALIGNMENT_BYTES));
        Ok(Self { start, size_bytes, mapped, mapped_bytes })
    }

    /// Address space that nobody can touch.
    pub(super) fn closed(size_bytes: usize) -> io::Result<Self> {
        Self::take(size_bytes, ProtFlags::empty())
    }

    pub(super) fn address(&self) -> u64 {
        self.start.expose_provenance() as u64
    }

    pub(super) fn size_bytes(&self) -> usize {
        self.size_bytes
    }

    /// Where `offset` lies. Not beyond the end.
    pub(super) fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset <= self.size_bytes, "{offset} is in a range of {}", self.size_bytes);
        self.start.wrapping_add(offset)
    }
}

impl Drop for AddressRange {
    fn drop(&mut self) {
        // SAFETY: this very range was mapped by `take`; whoever sees bytes in it holds it, so nobody
        // does any more; it is unmapped once. A failure would leave it mapped, which harms nobody.
        let _ = unsafe { munmap(self.mapped.cast(), self.mapped_bytes) };
    }
}

/// Memory of its own. It goes when its last holder does: queued work holds what it touches.
#[derive(Debug)]
pub(super) struct Region {
    range: AddressRange,
    _hold: Hold,
}

impl Region {
    /// Maps `size_bytes` (at least 1) of zeroes. Pages take memory when they are first touched.
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
        // SAFETY: `map` took the range readable and writable and zeroed, nobody else has it, so it
        // stays so as long as `self` lives; atomics of one byte need no alignment.
        unsafe { std::slice::from_raw_parts(self.range.at(0).cast(), self.size_bytes()) }
    }
}
