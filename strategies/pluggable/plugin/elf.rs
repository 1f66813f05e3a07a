//! Checks that a file is a shared library for this machine, before the system's loader opens it.
//!
//! The loader runs code of the file that it loads, and its error messages are terse. The first bytes of
//! a file suffice to identify it. Only regular files are opened: opening a pipe could block.
//!
//! Source: the ELF specification, "ELF Header", and `elf.h`.

use std::fs::{self, File};
use std::io::{ErrorKind, Read as _};
use std::path::{Path, PathBuf};

use super::LibraryError;

/// The ELF machine number of this build, and the description of a suitable file. On other machines only
/// the loader checks the number.
#[cfg(target_arch = "x86_64")]
const MACHINE: (u16, &str) = (62, "a 64-bit shared library for x86-64");
#[cfg(target_arch = "aarch64")]
const MACHINE: (u16, &str) = (183, "a 64-bit shared library for AArch64");
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
const MACHINE: (u16, &str) = (u16::MAX, "a 64-bit shared library for this machine");

const MAGIC: &[u8] = b"\x7fELF";
const CLASS_64: u8 = 2;
const BYTE_ORDER: u8 = if cfg!(target_endian = "little") { 1 } else { 2 };
const TYPE_SHARED: u16 = 3;
/// The bytes of the header up to the end of the machine number.
const HEADER_BYTES: u64 = 20;

/// Returns the canonical path if the file is a library that this machine can load.
pub(super) fn check(path: &Path) -> Result<PathBuf, LibraryError> {
    let unreadable = |error: std::io::Error| match error.kind() {
        ErrorKind::NotFound => LibraryError::Missing { path: path.to_owned() },
        _ => LibraryError::Unreadable { path: path.to_owned(), message: error.to_string() },
    };
    let metadata = fs::metadata(path).map_err(unreadable)?;
    if !metadata.is_file() {
        let found = if metadata.is_dir() { "a directory" } else { "a device, pipe or socket" };
        return Err(LibraryError::NotAFile { path: path.to_owned(), found });
    }
    let mut header = Vec::new();
    let file = File::open(path).map_err(unreadable)?;
    file.take(HEADER_BYTES).read_to_end(&mut header).map_err(unreadable)?;
    if let Some(found) = misfit(&header) {
        return Err(LibraryError::Unfit { path: path.to_owned(), expected: MACHINE.1, found });
    }
    fs::canonicalize(path).map_err(unreadable)
}

/// Returns a description of the file if it is not a suitable library.
fn misfit(header: &[u8]) -> Option<String> {
    if header.is_empty() {
        return Some("an empty file".to_owned());
    }
    if !header.starts_with(MAGIC) {
        return Some(format!(
            "a file that begins with \"{}\"",
            header[..header.len().min(8)].escape_ascii()
        ));
    }
    if (header.len() as u64) < HEADER_BYTES {
        return Some(format!("a file that ends after {} bytes", header.len()));
    }
    if header[5] != BYTE_ORDER {
        return Some("one with the other order of bytes".to_owned());
    }
    let number = |at: usize| u16::from_ne_bytes([header[at], header[at + 1]]);
    let (kind, machine) = (number(16), number(18));
    if header[4] != CLASS_64 {
        return Some(format!("one of class {} for {}", header[4], machine_name(machine)));
    }
    if machine != MACHINE.0 && MACHINE.0 != u16::MAX {
        return Some(format!("one for {}", machine_name(machine)));
    }
    let name = match kind {
        TYPE_SHARED => return None,
        1 => "an object file",
        2 => "a program",
        4 => "a core dump",
        _ => return Some(format!("a file of type {kind}")),
    };
    Some(name.to_owned())
}

fn machine_name(machine: u16) -> String {
    let name = match machine {
        3 => "x86 (32 bits)",
        21 => "PowerPC (64 bits)",
        22 => "S390",
        40 => "ARM (32 bits)",
        62 => "x86-64",
        183 => "AArch64",
        190 => "CUDA devices",
        224 => "AMD GPUs",
        243 => "RISC-V",
        258 => "LoongArch",
        other => return format!("machine {other}"),
    };
    name.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    fn header(class: u8, order: u8, kind: u16, machine: u16) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend([class, order, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(machine.to_ne_bytes());
        bytes
    }

    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    #[test]
    fn only_shared_libraries_of_this_machine_fit() {
        let (own, other) = (MACHINE.0, if MACHINE.0 == 62 { 183 } else { 62 });
        assert_eq!(misfit(&header(2, BYTE_ORDER, 3, own)), None);
        for (bytes, word) in [
            (Vec::new(), "empty"),
            (b"#!/bin/sh\n".to_vec(), "#!/bin/s"),
            (b"\x7fELF\x02".to_vec(), "ends after 5 bytes"),
            (header(1, BYTE_ORDER, 3, 3), "class 1 for x86 (32 bits)"),
            (header(2, 3 - BYTE_ORDER, 3, own), "order of bytes"),
            (header(2, BYTE_ORDER, 3, other), if other == 62 { "x86-64" } else { "AArch64" }),
            (header(2, BYTE_ORDER, 3, 9999), "machine 9999"),
            (header(2, BYTE_ORDER, 1, own), "an object file"),
            (header(2, BYTE_ORDER, 77, own), "type 77"),
        ] {
            let found = misfit(&bytes).expect("it does not fit");
            assert!(found.contains(word), "{found} and not {word}");
        }
    }
}
