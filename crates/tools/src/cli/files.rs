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

/// Returns an error if the file to be written is one of the recordings.
pub(crate) fn spare(recordings: &[PathBuf], written: &Path) -> Result<(), BadArguments> {
    let Some(file) = identity(written) else {
        return Ok(());
    };
    let is_it = |recording: &&PathBuf| identity(recording).as_ref() == Some(&file);
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
