//! The check of a library's file before the system's loader opens it.
//!
//! Writes at most 63 bytes of the input to the file. They suffice for the check, but no loader can load
//! such a file. So if an input passes the check, the result is the loader's error.

use std::path::PathBuf;

use stratalloc::config::PluggableSettings;
use stratalloc::strategies::plugin::{LibraryError, load};

/// One byte less than the header of a 64-bit ELF file, so that no loader accepts the file.
const FILE_MAX_BYTES: usize = 63;
/// The bytes that the check reads: up to the end of the machine number.
const LOOKED_AT_BYTES: usize = 20;

/// Checks one input.
pub(crate) fn check(bytes: &[u8]) {
    let content = &bytes[..bytes.len().min(FILE_MAX_BYTES)];
    let path = Temporary::holding(content);
    let functions = PluggableSettings {
        library: path.0.to_str().map(str::to_owned),
        alloc_fn: Some("allocate".to_owned()),
        free_fn: Some("free".to_owned()),
        ..PluggableSettings::default()
    };
    let Err(error) = load(&functions) else { panic!("nothing can be loaded from {content:x?}") };
    let message = error.to_string();
    assert!(message.len() < 1000 && !message.contains(char::is_control), "{message:?}");
    match error {
        LibraryError::Unfit { .. } => assert!(!looks_fit(content), "{content:x?}"),
        LibraryError::NotLoaded { .. } => assert!(looks_fit(content), "{content:x?}: {message}"),
        other => panic!("{content:x?}: {other}"),
    }
}

/// Returns true if the header is that of a 64-bit shared library for this machine and byte order.
fn looks_fit(content: &[u8]) -> bool {
    let head = [0x7f, b'E', b'L', b'F', 2, if cfg!(target_endian = "little") { 1 } else { 2 }];
    let machine: Option<u16> = match std::env::consts::ARCH {
        "x86_64" => Some(62),
        "aarch64" => Some(183),
        _ => None,
    };
    let number = |at: usize| u16::from_ne_bytes([content[at], content[at + 1]]);
    content.len() >= LOOKED_AT_BYTES
        && content.starts_with(&head)
        && number(16) == 3
        && machine.is_none_or(|machine| number(18) == machine)
}

/// A file that is deleted on drop.
struct Temporary(PathBuf);

impl Temporary {
    fn holding(content: &[u8]) -> Self {
        let name = format!("stratalloc-fuzz-{}.so", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::write(&path, content).expect("there is room for a small file");
        Self(path)
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        // If the file cannot be deleted, the next input overwrites it.
        let _ = std::fs::remove_file(&self.0);
    }
}
