//! What physical pieces are made of: ranges of memory files.
//!
//! Pieces that stay in the process share one sparse file, so that many pieces cost one descriptor;
//! a piece that may leave it has a file of its own, so that a forged offset reaches nothing else.
//! No file here can shrink: ours are sealed against it, and a descriptor from elsewhere is taken
//! only if it is sealed too. A mapping of a file that shrank would fault.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::fs::{
    FallocateFlags, FileType, MemfdFlags, OFlags, SealFlags, fallocate, fcntl_add_seals,
    fcntl_get_seals, fcntl_getfl, fstat, fstatfs, ftruncate, memfd_create,
};

use super::budget::Hold;
use crate::driver::free_ranges::FreeRanges;
use crate::driver::refusal::{Done, invalid};

/// The file system of memory files with ordinary pages. Huge pages may fault when they run out.
///
/// Source: `linux/magic.h`, `TMPFS_MAGIC`.
const MEMORY_FILE_SYSTEM: u64 = 0x0102_1994;

/// One physical piece. Its memory goes when its last holder does: the table, mappings, work.
#[derive(Debug)]
pub(super) struct Piece {
    backing: Backing,
    size_bytes: usize,
    /// Imported memory is counted where it was made.
    _hold: Option<Hold>,
}

#[derive(Debug)]
enum Backing {
    Shared { store: Arc<Store>, offset: u64 },
    Own(OwnedFd),
}

impl Piece {
    /// A piece that stays in this process.
    pub(super) fn shared(store: &Arc<Store>, size_bytes: usize, hold: Hold) -> io::Result<Self> {
        let offset = store.take(size_bytes as u64)?;
        let backing = Backing::Shared { store: Arc::clone(store), offset };
        Ok(Self { backing, size_bytes, _hold: Some(hold) })
    }

    /// A piece that may leave this process.
    pub(super) fn exportable(size_bytes: usize, hold: Hold) -> io::Result<Self> {
        let file = memory_file("stratalloc-piece")?;
        ftruncate(&file, size_bytes as u64)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(Self { backing: Backing::Own(file), size_bytes, _hold: Some(hold) })
    }

    /// A piece of another driver, after its descriptor was found fit for mapping.
    pub(super) fn imported(file: OwnedFd, size_bytes: usize) -> Done<Self> {
        check_foreign(&file, size_bytes as u64)?;
        Ok(Self { backing: Backing::Own(file), size_bytes, _hold: None })
    }

    pub(super) fn size_bytes(&self) -> usize {
        self.size_bytes
    }

    pub(super) fn file(&self) -> BorrowedFd<'_> {
        match &self.backing {
            Backing::Shared { store, .. } => store.file.as_fd(),
            Backing::Own(file) => file.as_fd(),
        }
    }

    /// Where it begins in its file.
    pub(super) fn file_offset(&self) -> u64 {
        match &self.backing {
            Backing::Shared { offset, .. } => *offset,
            Backing::Own(_) => 0,
        }
    }

    /// A further descriptor of its file, closed on exec; `None` if it must stay in this process.
    pub(super) fn export(&self) -> Option<io::Result<OwnedFd>> {
        match &self.backing {
            Backing::Shared { .. } => None,
            Backing::Own(file) => Some(file.try_clone()),
        }
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        if let Backing::Shared { store, offset } = &self.backing {
            store.give(*offset, self.size_bytes as u64);
        }
    }
}

/// The file that pieces share.
#[derive(Debug)]
pub(super) struct Store {
    file: OwnedFd,
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
        Ok(Arc::new(Self { file, ranges: Mutex::default() }))
    }

    /// The lowest free range that is large enough, or a new one at the end.
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

    /// Gives a range's memory back to the system and keeps the range for another piece.
    fn give(&self, start: u64, size_bytes: u64) {
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // If the system keeps the memory the range is as good as before; its bytes mean nothing.
        let _ = fallocate(&self.file, hole, start, size_bytes);
        self.ranges.lock().free.give(start, size_bytes);
    }

    /// Memory that the file takes now, and how long it is.
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

/// Refuses a descriptor that could not be mapped, or whose mapping could fault later.
fn check_foreign(file: &OwnedFd, size_bytes: u64) -> Done<()> {
    let refuse = |message: String| Err(invalid(message));
    let stat = fstat(file)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return refuse("the descriptor is not of a memory file".to_owned());
    }
    if u64::try_from(stat.st_size) != Ok(size_bytes) {
        return refuse(format!("the file has {} bytes, not {size_bytes}", stat.st_size));
    }
    if fstatfs(file)?.f_type as u64 != MEMORY_FILE_SYSTEM {
        return refuse("the file is not in memory with ordinary pages".to_owned());
    }
    if fcntl_getfl(file)? & OFlags::ACCMODE != OFlags::RDWR {
        return refuse("the descriptor does not allow both reading and writing".to_owned());
    }
    // Files of memory that cannot be sealed at all answer with an error: not sealed either.
    let seals = fcntl_get_seals(file).unwrap_or(SealFlags::empty());
    if !seals.contains(SealFlags::SHRINK) {
        return refuse("the file is not sealed against shrinking".to_owned());
    }
    if seals.intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE) {
        return refuse("the file is sealed against writing".to_owned());
    }
    Ok(())
}
