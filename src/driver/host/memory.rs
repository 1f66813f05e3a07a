//! Real memory: one mapping of this process, as bytes that anybody may touch at any time.
//!
//! Device memory is shared by streams without locks: who writes what when is the device program's
//! matter. So every byte is atomic here, which makes a program's race visible as wrong bytes and
//! never undefined. This is the only file of the driver with `unsafe`.
#![expect(unsafe_code, reason = "mapping memory, and seeing it as bytes")]

use std::io;
use std::ptr;
use std::sync::atomic::{AtomicU8, Ordering};

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

/// Where regions start is a multiple of this, as on a device.
pub(super) const ALIGNMENT_BYTES: usize = 2 << 20;

/// A mapping. It goes when its last holder does: queued work holds what it touches.
#[derive(Debug)]
pub(super) struct Region {
    start: *mut u8,
    size_bytes: usize,
    mapped: *mut u8,
    mapped_bytes: usize,
}

// SAFETY: the mapping belongs to this value alone and is reached only through `bytes`, whose
// elements are atomic.
unsafe impl Send for Region {}
// SAFETY: as above: shared access is access to atomics.
unsafe impl Sync for Region {}

impl Region {
    /// Maps `size_bytes` (at least 1) of zeroes. Pages take memory when they are first touched.
    pub(super) fn map(size_bytes: usize) -> io::Result<Self> {
        let mapped_bytes = size_bytes
            .checked_add(ALIGNMENT_BYTES)
            .ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let kind = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: an anonymous mapping at an address the system chooses replaces nothing.
        let mapped = unsafe { mmap_anonymous(ptr::null_mut(), mapped_bytes, access, kind) }?;
        let mapped = mapped.cast::<u8>();
        let skip = mapped.align_offset(ALIGNMENT_BYTES);
        // SAFETY: `skip` is below the alignment, and the mapping is that much larger than asked.
        let start = unsafe { mapped.add(skip) };
        Ok(Self { start, size_bytes, mapped, mapped_bytes })
    }

    pub(super) fn address(&self) -> u64 {
        self.start.expose_provenance() as u64
    }

    pub(super) fn size_bytes(&self) -> usize {
        self.size_bytes
    }

    fn bytes(&self) -> &[AtomicU8] {
        // SAFETY: the mapping is readable and writable, zeroed by the system, at least
        // `size_bytes` long from `start`, and lives as long as `self`; atomics of one byte need no
        // alignment, and nobody reaches it otherwise.
        unsafe { std::slice::from_raw_parts(self.start.cast(), self.size_bytes) }
    }

    /// Writes one value to `count` bytes from `offset`. The range lies inside.
    pub(super) fn fill(&self, offset: usize, byte: u8, count: usize) {
        self.bytes()[offset..][..count].iter().for_each(|b| b.store(byte, Ordering::Relaxed));
    }

    /// Writes `from` from `offset` on. The range lies inside.
    pub(super) fn write(&self, offset: usize, from: &[u8]) {
        let to = &self.bytes()[offset..][..from.len()];
        to.iter().zip(from).for_each(|(to, from)| to.store(*from, Ordering::Relaxed));
    }

    /// Reads from `offset` on. The range lies inside.
    pub(super) fn read(&self, offset: usize, to: &mut [u8]) {
        let from = &self.bytes()[offset..][..to.len()];
        to.iter_mut().zip(from).for_each(|(to, from)| *to = from.load(Ordering::Relaxed));
    }

    /// Copies `count` bytes. Both ranges lie inside and do not overlap.
    pub(super) fn copy(&self, offset: usize, from: &Self, from_offset: usize, count: usize) {
        let to = &self.bytes()[offset..][..count];
        let from = &from.bytes()[from_offset..][..count];
        for (to, from) in to.iter().zip(from) {
            to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: this very range was mapped by `map`, nothing borrows it any more, and it is
        // unmapped once. A failure would leave it mapped, which harms nobody.
        let _ = unsafe { munmap(self.mapped.cast(), self.mapped_bytes) };
    }
}
