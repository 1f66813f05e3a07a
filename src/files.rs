//! Files that appear under their name only when they are complete.
//!
//! A [`NewFile`] is written under a temporary name in the folder of its target, and is then synced and
//! renamed. The temporary name is random, and the system creates the file only if the name is free:
//! processes in containers often have equal ids and share folders. Only the process that created a
//! temporary file removes it. A process that is killed leaves its file, and no later call reads, replaces
//! or removes it.

use std::collections::hash_map::RandomState;
use std::fs::{self, File, OpenOptions};
use std::hash::BuildHasher;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// The most names that are tried. Names have 64 random bits, so a second one is rarely needed.
const NAMES_MAX: usize = 100;

/// A file that is being written. Dropping it removes it, and the target stays as it was.
#[derive(Debug)]
pub struct NewFile {
    out: File,
    /// `None` after the file was renamed, and for a device or a pipe, which is written in place.
    renamed: Option<Renamed>,
}

#[derive(Debug)]
struct Renamed {
    temporary: PathBuf,
    target: PathBuf,
}

impl NewFile {
    /// Creates a file that [`finish`](Self::finish) moves to `target`. It gets the permissions of the file
    /// that it replaces. If `target` is a link, the file that the link names is replaced. A device or a
    /// pipe is opened and written in place; opening a pipe waits for its reader.
    ///
    /// # Errors
    ///
    /// Any error of the file system; [`io::ErrorKind::IsADirectory`] if `target` is a folder.
    pub fn create(target: &Path) -> io::Result<Self> {
        let Ok(known) = fs::metadata(target) else { return Self::beside(target) };
        if known.is_dir() {
            return Err(io::Error::new(io::ErrorKind::IsADirectory, "it is a folder"));
        }
        if !known.is_file() {
            let out = OpenOptions::new().write(true).open(target)?;
            return Ok(Self { out, renamed: None });
        }
        let new = Self::beside(&fs::canonicalize(target)?)?;
        // Some file systems have no permissions.
        let _ = new.out.set_permissions(known.permissions());
        Ok(new)
    }

    /// Creates a file in the folder of `target`, for `target` itself or for another name in this folder.
    fn beside(target: &Path) -> io::Result<Self> {
        if target.file_name().is_none() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the path names no file"));
        }
        let folder = folder_of(target);
        let (out, temporary) =
            create_unique(folder, ".stratalloc-", ".part", 0o666).map_err(|error| {
                let folder = folder.display();
                let text = format!("no file can be created in {folder}: {error}");
                io::Error::new(error.kind(), text)
            })?;
        let renamed = Some(Renamed { temporary, target: target.to_owned() });
        Ok(Self { out, renamed })
    }

    /// Returns true for a device or a pipe, which is written in place.
    #[must_use]
    pub fn is_in_place(&self) -> bool {
        self.renamed.is_none()
    }

    /// Moves the complete file to its target, and replaces the file there. Waits for the disk.
    ///
    /// # Errors
    ///
    /// Any error of the file system. The new file is removed, and the target keeps its content.
    pub fn finish(mut self) -> io::Result<()> {
        let Some(Renamed { temporary, target }) = &self.renamed else { return self.out.flush() };
        self.out.sync_all()?;
        fs::rename(temporary, target)?;
        sync_folder(target);
        self.renamed = None;
        Ok(())
    }

    /// Moves the complete file to the first of `targets` where no file is, and returns this path. All must be
    /// in one folder. Waits for the disk. A device or a pipe keeps its name.
    fn finish_first_free(self, targets: impl Iterator<Item = PathBuf>) -> io::Result<PathBuf> {
        let mut targets = targets.peekable();
        let Some(Renamed { temporary, .. }) = &self.renamed else {
            return targets.next().ok_or_else(no_free_name);
        };
        self.out.sync_all()?;
        for target in targets {
            match link(temporary, &target) {
                // Dropping the file removes its temporary name.
                Ok(()) => {
                    sync_folder(&target);
                    return Ok(target);
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
        Err(no_free_name())
    }
}

impl Write for NewFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.out.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if let Some(Renamed { temporary, .. }) = &self.renamed {
            // A file that cannot be removed stays.
            let _ = fs::remove_file(temporary);
        }
    }
}

/// Writes a file that replaces the one at `path`. Waits for the disk.
///
/// # Errors
///
/// Those of [`NewFile::create`] and of writing. The file at `path` keeps its content then.
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = NewFile::create(path)?;
    file.write_all(bytes)?;
    file.finish()
}

/// Creates a file at the first of `targets` where no file is, and returns this path. All must be in one
/// folder.
/// `write` writes the content. Waits for the disk.
pub(crate) fn write_first_free(
    targets: impl Iterator<Item = PathBuf>,
    write: impl FnOnce(&mut NewFile) -> io::Result<()>,
) -> io::Result<PathBuf> {
    let mut targets = targets.peekable();
    let first = targets.peek().ok_or_else(no_free_name)?;
    let mut file = match fs::metadata(first) {
        // A device or a pipe, or a folder.
        Ok(known) if !known.is_file() => NewFile::create(first)?,
        _ => NewFile::beside(first)?,
    };
    write(&mut file)?;
    file.finish_first_free(targets)
}

/// Creates a file with a random name that no file has, and opens it for reading and writing. `mode` is its
/// permissions in Unix, without those that the process's mask removes.
pub(crate) fn create_unique(
    folder: &Path,
    prefix: &str,
    suffix: &str,
    mode: u32,
) -> io::Result<(File, PathBuf)> {
    let bits = || RandomState::new().hash_one(std::process::id());
    let name = || folder.join(format!("{prefix}{:016x}{suffix}", bits()));
    create_first_free(std::iter::repeat_with(name), mode)
}

fn create_first_free(
    paths: impl Iterator<Item = PathBuf>,
    mode: u32,
) -> io::Result<(File, PathBuf)> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, mode);
    #[cfg(not(unix))]
    let _ = mode;
    for path in paths.take(NAMES_MAX) {
        match options.open(&path) {
            Ok(file) => return Ok((file, path)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Err(no_free_name())
}

fn no_free_name() -> io::Error {
    io::Error::new(io::ErrorKind::AlreadyExists, "all names are taken by other files")
}

/// Gives a file a second name, if no file has this name. Where the file system has no links, renames the
/// file.
fn link(from: &Path, to: &Path) -> io::Result<()> {
    match fs::hard_link(from, to) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            if fs::symlink_metadata(to).is_ok() {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            fs::rename(from, to)
        }
        done => done,
    }
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Waits until a new name is on the disk. Where a folder cannot be synced, the name may be lost when the
/// machine loses power.
fn sync_folder(path: &Path) {
    if cfg!(unix) {
        let _ = File::open(folder_of(path)).and_then(|folder| folder.sync_all());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> PathBuf {
        let (_, path) = create_unique(&std::env::temp_dir(), name, ".folder", 0o600).unwrap();
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        path
    }

    fn names_in(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn two_writers_that_draw_equal_names_get_different_files() {
        let folder = folder("equal");
        let names = || (0..NAMES_MAX).map(|number| folder.join(number.to_string()));
        let (_first, first) = create_first_free(names(), 0o600).unwrap();
        let (_second, second) = create_first_free(names(), 0o600).unwrap();
        assert_eq!((first, second), (folder.join("0"), folder.join("1")));
        names().skip(2).for_each(|path| fs::write(path, "other").unwrap());
        let error = create_first_free(names(), 0o600).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn files_that_were_left_over_disturb_no_writer_and_stay() {
        let folder = folder("left");
        let target = folder.join("run.pickle");
        let process = std::process::id();
        let mut left =
            vec![format!(".run.pickle.{process}.0"), format!(".run.pickle.{process}.part")];
        left.extend([
            ".stratalloc-0000000000000000.part".to_owned(),
            "run.pickle.1.part".to_owned(),
        ]);
        left.iter().for_each(|name| fs::write(folder.join(name), "left").unwrap());
        for content in ["first", "second"] {
            write(&target, content.as_bytes()).unwrap();
            assert_eq!(fs::read_to_string(&target).unwrap(), content);
        }
        left.push("run.pickle".to_owned());
        left.sort();
        assert_eq!(names_in(&folder), left);
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn many_writers_of_one_file_leave_one_complete_file() {
        let folder = folder("many");
        let target = folder.join("page.html");
        std::thread::scope(|scope| {
            for writer in 0..8_u8 {
                let target = &target;
                scope.spawn(move || write(target, &[writer; 100_000]).unwrap());
            }
        });
        let content = fs::read(&target).unwrap();
        assert!(content.len() == 100_000 && content.iter().all(|byte| *byte == content[0]));
        assert_eq!(names_in(&folder), ["page.html"]);
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_file_that_is_dropped_or_fails_leaves_the_old_content() {
        let folder = folder("dropped");
        let target = folder.join("page.html");
        write(&target, b"old").unwrap();
        let mut file = NewFile::create(&target).unwrap();
        file.write_all(b"new").unwrap();
        drop(file);
        assert_eq!(fs::read(&target).unwrap(), b"old");
        assert_eq!(names_in(&folder), ["page.html"]);
        let missing = write(&folder.join("missing/page.html"), b"new").unwrap_err();
        let text = missing.to_string();
        assert!(text.contains("missing: No such file"), "{text}");
        assert_eq!(write(&folder, b"new").unwrap_err().kind(), io::ErrorKind::IsADirectory);
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn the_first_free_name_is_taken_and_no_file_is_replaced() {
        let folder = folder("numbered");
        let names = || (1..=3).map(|number| folder.join(format!("run.{number}")));
        for number in 1..=3 {
            let path = write_first_free(names(), |file| write!(file, "{number}")).unwrap();
            assert_eq!(path, folder.join(format!("run.{number}")));
        }
        let error = write_first_free(names(), |file| file.write_all(b"4")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(names_in(&folder), ["run.1", "run.2", "run.3"]);
        assert_eq!(fs::read(folder.join("run.2")).unwrap(), b"2");
        fs::remove_dir_all(folder).unwrap();
    }

    #[cfg(unix)]
    #[test]
    fn permissions_links_and_devices_are_kept() {
        use std::os::unix::fs::PermissionsExt;
        let folder = folder("kept");
        let (target, link) = (folder.join("private"), folder.join("link"));
        write(&target, b"old").unwrap();
        fs::set_permissions(&target, fs::Permissions::from_mode(0o600)).unwrap();
        std::os::unix::fs::symlink(&target, &link).unwrap();
        write(&link, b"new").unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"new");
        assert_eq!(fs::metadata(&target).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        write(Path::new("/dev/null"), b"new").unwrap();
        assert!(!fs::metadata("/dev/null").unwrap().is_file());
        fs::remove_dir_all(folder).unwrap();
    }
}
