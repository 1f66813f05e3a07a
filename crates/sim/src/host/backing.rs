//! The memory of physical pieces: ranges of memory files.
//!
//! Pieces that stay in the process share one sparse file, so that many pieces need one descriptor
//! (`tests/descriptors.rs`). An exportable piece has a file of its own, so that a process that imports it can
//! map no other piece, whatever offset it maps. No file here can shrink: an access to a mapping beyond the
//! end of its file would fault. Files created here are sealed against shrinking, and imported descriptors are
//! accepted only if they are sealed too.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::fs::{
    FallocateFlags, FileType, MemfdFlags, OFlags, SealFlags, fallocate, fcntl_add_seals,
    fcntl_get_seals, fcntl_getfl, fstat, fstatfs, ftruncate, memfd_create,
};

use crate::free_ranges::FreeRanges;
use crate::refusal::{Done, ensure, invalid};

/// The file system of memory files with ordinary pages. Files with huge pages are refused: an access to them
/// may fault when no huge page is left.
///
/// Source: `linux/magic.h`, `TMPFS_MAGIC`.
const MEMORY_FILE_SYSTEM: u64 = 0x0102_1994;

/// One physical piece. Its memory is freed when the device, all mappings and all work have dropped it.
#[derive(Debug)]
pub(super) struct Piece {
    file: Arc<OwnedFd>,
    /// Offset of the piece in its file.
    pub(super) file_offset: u64,
    pub(super) size_bytes: usize,
    /// The shared file that its range belongs to, or `None` if it has a file of its own.
    store: Option<Arc<Store>>,
}

impl Piece {
    /// Creates a piece that stays in this process, as a range of the shared file.
    pub(super) fn shared(store: &Arc<Store>, size_bytes: usize) -> io::Result<Self> {
        let file_offset = store.take(size_bytes as u64)?;
        let (file, store) = (Arc::clone(&store.file), Some(Arc::clone(store)));
        Ok(Self { file, file_offset, size_bytes, store })
    }

    /// Returns a piece with a file of its own.
    fn own(file: OwnedFd, size_bytes: usize) -> Self {
        Self { file: Arc::new(file), file_offset: 0, size_bytes, store: None }
    }

    /// Creates a piece that can be exported.
    pub(super) fn exportable(size_bytes: usize) -> io::Result<Self> {
        let file = memory_file("stratalloc-piece")?;
        ftruncate(&file, size_bytes as u64)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(Self::own(file, size_bytes))
    }

    /// Imports a piece from another driver's descriptor, after checking that it is safe to map.
    pub(super) fn imported(file: OwnedFd, size_bytes: usize) -> Done<Self> {
        check_foreign(&file, size_bytes as u64)?;
        Ok(Self::own(file, size_bytes))
    }

    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Returns a new descriptor of the piece's file, closed on exec. The piece must have a file of its own.
    pub(super) fn export(&self) -> io::Result<OwnedFd> {
        assert!(self.store.is_none(), "a descriptor gives access to one piece only");
        self.file.try_clone()
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        if let Some(store) = &self.store {
            store.give(self.file_offset, self.size_bytes as u64);
        }
    }
}

/// The file that all pieces share that are not exportable.
#[derive(Debug)]
pub(super) struct Store {
    file: Arc<OwnedFd>,
    ranges: Mutex<Ranges>,
}

#[derive(Debug, Default)]
struct Ranges {
    end: u64,
    free: FreeRanges,
}

impl Store {
    pub(super) fn open() -> io::Result<Arc<Self>> {
        let file = memory_file("stratalloc-pieces")?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::SEAL)?;
        Ok(Arc::new(Self { file: Arc::new(file), ranges: Mutex::default() }))
    }

    /// Returns the lowest free range that is large enough, or else a new one at the end.
    fn take(&self, size_bytes: u64) -> io::Result<u64> {
        let mut ranges = self.ranges.lock();
        if let Some(start) = ranges.free.take(size_bytes) {
            return Ok(start);
        }
        let start = ranges.end;
        let end = start.checked_add(size_bytes);
        let end = end.ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        ftruncate(&self.file, end)?;
        ranges.end = end;
        Ok(start)
    }

    /// Releases a range's memory to the system, and keeps the range for another piece.
    fn give(&self, start: u64, size_bytes: u64) {
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // If the call fails, the range stays usable: the bytes of a new piece are undefined anyway.
        let _ = fallocate(&self.file, hole, start, size_bytes);
        self.ranges.lock().free.give(start, size_bytes);
    }

    /// Returns the bytes of memory that the file uses, and its length.
    #[cfg(test)]
    pub(super) fn taken_and_length_bytes(&self) -> (u64, u64) {
        let stat = fstat(&self.file).expect("an open file can be looked at");
        let bytes = |number: i64| u64::try_from(number).expect("files have no negative sizes");
        (bytes(stat.st_blocks) * 512, bytes(stat.st_size))
    }
}

fn memory_file(name: &str) -> io::Result<OwnedFd> {
    Ok(memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?)
}

/// Refuses a descriptor that cannot be mapped as `size_bytes` bytes, or whose mapping could fault later.
fn check_foreign(file: &OwnedFd, size_bytes: u64) -> Done<()> {
    let stat = fstat(file)?;
    let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    ensure!(is_file, "the descriptor is not of a memory file");
    let is_whole = u64::try_from(stat.st_size) == Ok(size_bytes);
    ensure!(is_whole, "the file has {} bytes, not {size_bytes}", stat.st_size);
    let is_memory = fstatfs(file)?.f_type as u64 == MEMORY_FILE_SYSTEM;
    ensure!(is_memory, "the file is not in memory with ordinary pages");
    let is_open = fcntl_getfl(file)? & OFlags::ACCMODE == OFlags::RDWR;
    ensure!(is_open, "the descriptor does not allow both reading and writing");
    // The call fails for files that do not support seals, so they count as unsealed.
    let seals = fcntl_get_seals(file).unwrap_or(SealFlags::empty());
    let stays_whole = seals.contains(SealFlags::SHRINK);
    ensure!(stays_whole, "the file is not sealed against shrinking");
    let is_closed = seals.intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE);
    ensure!(!is_closed, "the file is sealed against writing");
    Ok(())
}
