//! Files with the saved contents of a tag.
//!
//! A *position* is an offset in the whole backup, and a *run* is a range of addresses that is saved at
//! adjacent positions (see `backup`). A file has the bytes of one run, or of several neighbouring ones if
//! there are many. It is read and written at offsets, so that a full disk or a failed device is an error of
//! that call, and no signal. Its name is visible while the tag sleeps, and is random, because several
//! processes may use one directory. The files are removed with this value; a process that is killed leaves
//! them.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process;

use super::backup::Run;
use crate::allocator::SleepError;
use crate::error::{DriverError, DriverErrorKind};
use crate::files::create_unique;

/// The most files of a backup. Threads write to different files at once, because the system serializes the
/// writes to one file.
const FILES_MAX: usize = 16;

/// The files of a backup.
#[derive(Debug)]
pub(super) struct Files {
    directory: PathBuf,
    /// In the order of their positions, which are adjacent.
    files: Vec<PositionsFile>,
    /// The process that created the files. A forked child does not remove them.
    process: u32,
}

/// A file, which begins with the first of its positions.
#[derive(Debug)]
struct PositionsFile {
    positions: Range<u64>,
    file: File,
    path: PathBuf,
}

impl Files {
    /// Creates the files that hold `runs`, which must be in ascending order of position. Allocates the
    /// files' disk space, if the file system supports that. May wait for the disk.
    ///
    /// # Errors
    ///
    /// [`SleepError::Disk`]. No file is left then.
    pub(super) fn create(directory: &Path, runs: &[Run]) -> Result<Self, SleepError> {
        let (directory, process) = (directory.to_owned(), process::id());
        let mut made = Self { directory, files: Vec::new(), process };
        let size_bytes = runs.last().map_or(0, Run::end);
        // A file system may use up all its space before it refuses.
        if free_bytes(&made.directory).is_some_and(|free| free < size_bytes) {
            return Err(made.failed(size_bytes, "statvfs", &io::ErrorKind::StorageFull.into()));
        }
        for runs in runs.chunks(runs.len().div_ceil(FILES_MAX).max(1)) {
            let (Some(first), Some(last)) = (runs.first(), runs.last()) else { continue };
            made.add(first.position..last.end())
                .map_err(|(call, error)| made.failed(size_bytes, call, &error))?;
        }
        Ok(made)
    }

    fn add(&mut self, positions: Range<u64>) -> Result<(), (&'static str, io::Error)> {
        // Only this user can open it.
        let (file, path) = create_unique(&self.directory, "stratalloc-", "", 0o600)
            .map_err(|error| ("open", error))?;
        let size_bytes = positions.end - positions.start;
        self.files.push(PositionsFile { positions, file, path });
        let file = &self.files[self.files.len() - 1].file;
        provide(file, size_bytes).map_err(|error| ("fallocate", error))
    }

    /// Writes bytes from a position of the backup on. They must lie inside one [`Run`](super::backup::Run),
    /// so that one file contains them.
    pub(super) fn write(&self, position: u64, bytes: &[u8]) -> Result<(), SleepError> {
        let (file, offset) = self.place_of(position);
        write_all_at(file, bytes, offset)
            .map_err(|error| self.failed(self.bytes(), "write", &error))
    }

    /// Reads bytes from a position on. They must lie inside one run, as for [`write`](Self::write).
    pub(super) fn read(&self, position: u64, into: &mut [u8]) -> Result<(), SleepError> {
        let (file, offset) = self.place_of(position);
        read_exact_at(file, into, offset).map_err(|error| self.failed(self.bytes(), "read", &error))
    }

    /// Waits until all bytes are on the disk. Afterwards the system can drop its copies of them in memory.
    pub(super) fn finish(&self) -> Result<(), SleepError> {
        let mut files = self.files.iter();
        let done = files.try_for_each(|one| one.file.sync_data());
        done.map_err(|error| self.failed(self.bytes(), "fdatasync", &error))
    }

    /// Releases the disk space of a range of positions, if the file system supports that. The range must lie
    /// inside one run, as for [`write`](Self::write). Does nothing in a forked child, which shares the files.
    pub(super) fn discard(&self, positions: &Range<u64>) {
        if self.process != process::id() {
            return;
        }
        let (file, offset) = self.place_of(positions.start);
        punch(file, offset, positions.end - positions.start);
    }

    fn bytes(&self) -> u64 {
        self.files.last().map_or(0, |last| last.positions.end)
    }

    fn place_of(&self, position: u64) -> (&File, u64) {
        let at = self.files.partition_point(|one| one.positions.end <= position);
        let one = &self.files[at];
        (&one.file, position - one.positions.start)
    }

    fn failed(&self, size_bytes: u64, call: &'static str, error: &io::Error) -> SleepError {
        let is_full = matches!(
            error.kind(),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge
        );
        let kind = if is_full { DriverErrorKind::OutOfMemory } else { DriverErrorKind::Other };
        let code = error.raw_os_error().map_or(0, i64::from);
        // The driver's error adds its code itself.
        let text = error.to_string();
        let message = text.strip_suffix(&format!(" (os error {code})")).unwrap_or(&text);
        SleepError::Disk {
            directory: self.directory.clone(),
            size_bytes,
            available_bytes: if is_full { free_bytes(&self.directory) } else { None },
            source: DriverError::new(kind, call, code, message.to_owned()),
        }
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        if self.process == process::id() {
            for one in &self.files {
                // A file that cannot be removed stays.
                let _ = fs::remove_file(&one.path);
            }
        }
    }
}

/// Gives a new file its size, and allocates its disk space if the file system supports that.
fn provide(file: &File, size_bytes: u64) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        use rustix::fs::{FallocateFlags, fallocate};
        use rustix::io::Errno;
        match fallocate(file, FallocateFlags::empty(), 0, size_bytes) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => {}
            done => return Ok(done?),
        }
    }
    file.set_len(size_bytes)
}

fn punch(file: &File, offset: u64, size_bytes: u64) {
    #[cfg(target_os = "linux")]
    {
        use rustix::fs::{FallocateFlags, fallocate};
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // A failure keeps the space until the files are removed.
        let _ = fallocate(file, flags, offset, size_bytes);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (file, offset, size_bytes);
}

fn free_bytes(directory: &Path) -> Option<u64> {
    #[cfg(target_os = "linux")]
    return rustix::fs::statvfs(directory).ok().map(|of| of.f_bavail.saturating_mul(of.f_frsize));
    #[cfg(not(target_os = "linux"))]
    return {
        let _ = directory;
        None
    };
}

#[cfg(unix)]
fn write_all_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, bytes, offset)
}

#[cfg(unix)]
fn read_exact_at(file: &File, into: &mut [u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, into, offset)
}

#[cfg(not(unix))]
fn write_all_at(_: &File, _: &[u8], _: u64) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(not(unix))]
fn read_exact_at(_: &File, _: &mut [u8], _: u64) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(size_bytes: u64, position: u64) -> Run {
        Run { address: 1 << 40, size_bytes, position }
    }

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("stratalloc-{name}-{}", process::id()));
        fs::create_dir(&folder).unwrap();
        folder
    }

    fn sizes_in(folder: &Path) -> Vec<u64> {
        let entries = fs::read_dir(folder).unwrap();
        entries.map(|entry| entry.unwrap().metadata().unwrap().len()).collect()
    }

    #[test]
    fn runs_are_read_where_they_were_written() {
        let folder = folder("files");
        let runs: Vec<_> = (0..40).map(|at| run(100, at * 100)).collect();
        let files = Files::create(&folder, &runs).unwrap();
        for run in &runs {
            files.write(run.position, &[u8::try_from(run.position / 100).unwrap(); 100]).unwrap();
        }
        files.finish().unwrap();
        let mut bytes = [0; 10];
        for run in &runs {
            files.read(run.position + 90, &mut bytes).unwrap();
            assert_eq!(u64::from(bytes[9]), run.position / 100);
        }
        let sizes = sizes_in(&folder);
        assert!(sizes.len() <= FILES_MAX && sizes.iter().sum::<u64>() == 4000, "{sizes:?}");
        files.discard(&(100..200));
        files.read(200, &mut bytes).unwrap();
        assert_eq!(bytes, [2; 10]);
        drop(files);
        assert!(sizes_in(&folder).is_empty());
        fs::remove_dir(&folder).unwrap();
    }

    #[test]
    fn a_full_disk_and_a_missing_directory_leave_no_file() {
        let folder = folder("full");
        let full = Files::create(&folder, &[run(4096, 0), run(1 << 60, 4096)]).unwrap_err();
        let text = full.to_string();
        assert!(matches!(full, SleepError::Disk { available_bytes: Some(_), .. }), "{text}");
        assert!(text.contains(&((1u64 << 60) + 4096).to_string()), "{text}");
        assert!(sizes_in(&folder).is_empty());
        fs::remove_dir(&folder).unwrap();
        let missing = Files::create(&folder, &[run(1, 0)]).unwrap_err();
        assert!(missing.to_string().contains("No such file"), "{missing}");
    }
}
