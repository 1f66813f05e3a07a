//! The look at a library's file before the system's loader sees it.
//!
//! Of each input so little is written to the file that no loader can load it, and more than the look
//! needs: whatever passes the look ends as the loader's refusal.

use std::path::PathBuf;

use stratalloc::config::PluggableSettings;
use stratalloc::strategies::plugin::{LibraryError, load};

/// One less than the header of a 64-bit file: the loader reads no further.
const FILE_MAX_BYTES: usize = 63;
/// Up to and with the machine's number.
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
    let said = error.to_string();
    assert!(said.len() < 1000 && !said.contains(char::is_control), "{said:?}");
    match error {
        LibraryError::Unfit { found, .. } => {
            assert!(!looks_fit(content), "{content:x?}: {found}");
        }
        LibraryError::NotLoaded { .. } => assert!(looks_fit(content), "{content:x?}: {said}"),
        other => panic!("{content:x?}: {other}"),
    }
}

/// A 64-bit shared library of this machine and its order of bytes, as far as the head says.
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

/// A file that goes when this goes.
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
        // A file that stays is written over by the next.
        let _ = std::fs::remove_file(&self.0);
    }
}
