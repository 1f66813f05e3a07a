//! Prevents commands from overwriting the recordings that they read.

use std::path::{Path, PathBuf};

use stratalloc::config::{Config, LayerSetting};

use super::outcome::BadArguments;
use super::show::shown_path;

/// Returns the identity of a file, independent of its name. `None` if the file does not exist.
#[cfg(unix)]
fn identity(path: &Path) -> Option<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    let metadata = std::fs::metadata(path).ok()?;
    Some((metadata.dev(), metadata.ino()))
}

/// Returns the canonical path of a file, as its identity.
#[cfg(not(unix))]
fn identity(path: &Path) -> Option<PathBuf> {
    std::fs::canonicalize(path).ok()
}

/// Returns true if two paths name the same file. It may be a file that does not exist yet.
pub(crate) fn is_same(a: &Path, b: &Path) -> bool {
    match [identity(a), identity(b)] {
        [None, None] => matches!(
            (std::path::absolute(a), std::path::absolute(b)),
            (Ok(a), Ok(b)) if a == b
        ),
        [a, b] => a == b,
    }
}

/// Returns an error if the file to be written is one of the recordings.
pub(crate) fn spare(recordings: &[PathBuf], written: &Path) -> Result<(), BadArguments> {
    let is_it = |recording: &&PathBuf| is_same(recording, written);
    recordings.iter().find(is_it).map_or(Ok(()), |recording| {
        let (written, recording) = (shown_path(written), shown_path(recording));
        Err(BadArguments(format!("{written} would be written over the recording {recording}")))
    })
}

/// Returns an error if a layer of the configuration would write a file that is one of the recordings.
pub(crate) fn spare_from(config: &Config, recordings: &[PathBuf]) -> Result<(), BadArguments> {
    let mut written = config.settings().layers.iter().filter_map(LayerSetting::written_file);
    written.try_for_each(|file| spare(recordings, file))
}
