//! Checks that a file is a shared library for this machine, before the system's loader opens it.
//!
//! The loader runs code of the file that it loads, and its error messages are terse. The first bytes of
//! a file suffice to identify it. Only regular files are opened: opening a pipe could block.
//!
//! Source: the ELF specification, "ELF Header", and `elf.h`.

use std::fs::{self, File};
use std::io::Read as _;
use std::path::{Path, PathBuf};

use super::LibraryError;

/// The ELF machine number of this build, and the description of a suitable file. On other machines only
/// the loader checks the number.
const MACHINE: (Option<u16>, &str) = if cfg!(target_arch = "x86_64") {
    (Some(62), "a 64-bit shared library for x86-64")
} else if cfg!(target_arch = "aarch64") {
    (Some(183), "a 64-bit shared library for AArch64")
} else {
    (None, "a 64-bit shared library for this machine")
};

/// The first bytes of a 64-bit file with this machine's byte order.
const START: [u8; 6] =
    [0x7f, b'E', b'L', b'F', 2, if cfg!(target_endian = "little") { 1 } else { 2 }];
const TYPE_SHARED: u16 = 3;
/// The bytes of the header up to the end of the machine number.
const HEADER_BYTES: usize = 20;

/// Returns the canonical path if the file is a library that this machine can load.
pub(super) fn check(path: &Path) -> Result<PathBuf, LibraryError> {
    let unreadable = |error: std::io::Error| LibraryError::Unreadable {
        path: path.to_owned(),
        message: error.to_string(),
    };
    let unfit = |expected| LibraryError::Unfit { path: path.to_owned(), expected };
    if !fs::metadata(path).map_err(unreadable)?.is_file() {
        return Err(unfit("a file"));
    }
    let mut header = Vec::new();
    let file = File::open(path).map_err(unreadable)?;
    file.take(HEADER_BYTES as u64).read_to_end(&mut header).map_err(unreadable)?;
    if !is_fit(&header) {
        return Err(unfit(MACHINE.1));
    }
    fs::canonicalize(path).map_err(unreadable)
}

/// Returns true if a file with this header is a shared library for this machine.
fn is_fit(header: &[u8]) -> bool {
    let number = |at: usize| u16::from_ne_bytes([header[at], header[at + 1]]);
    header.len() == HEADER_BYTES
        && header.starts_with(&START)
        && number(16) == TYPE_SHARED
        && MACHINE.0.is_none_or(|machine| machine == number(18))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(class: u8, order: u8, kind: u16, machine: u16) -> Vec<u8> {
        let mut bytes = START[..4].to_vec();
        bytes.extend([class, order, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(machine.to_ne_bytes());
        bytes
    }

    #[test]
    fn only_shared_libraries_of_this_machine_fit() {
        let (Some(own), order) = (MACHINE.0, START[5]) else { return };
        assert!(is_fit(&header(2, order, 3, own)));
        for bytes in [
            Vec::new(),
            b"#!/bin/sh\n".to_vec(),
            header(2, order, 3, own)[..19].to_vec(),
            header(1, order, 3, own),
            header(2, 3 - order, 3, own),
            header(2, order, 3, own + 1),
            header(2, order, 1, own),
        ] {
            assert!(!is_fit(&bytes), "{bytes:x?}");
        }
    }
}
