//! A recording in any encoding, read into a [`Trace`].
//!
//! Files come from anybody, so every byte is hostile: nothing is executed, nothing recurses,
//! nothing is allocated because a header claims it, and memory stays below
//! [`MEMORY_FACTOR`] times the decoded bytes. Layers, from the file inwards: `encoding` unpacks,
//! `input` counts and limits, `pickle` and `json` parse the values of a file into a `heap`, and
//! `interpret` reads the snapshot out of it, the entries as `fields` lists them.
//! Read next: `heap`, where the memory is decided.

mod budget;
mod encoding;
mod error;
mod fields;
mod heap;
mod input;
mod interpret;
mod json;
mod parts;
mod path;
mod pickle;
mod rmm;
mod stack_reader;
mod words;

use std::fs::File;
use std::io::Read;
use std::path::Path;

pub use error::{Mismatch, PickleProblem, TraceError};

use self::encoding::Format;
use self::input::Input;
use super::Trace;
use crate::size::GIB;

/// A reader holds at most this many times the decoded bytes of a file, and a fixed part below
/// 1 MiB.
pub const MEMORY_FACTOR: u64 = 6;

/// What a reader accepts before it gives up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The largest file, in bytes after decompression: 4 GiB.
    pub decoded_bytes: u64,
    /// How many marks of a pickle may be open at once: 1,000. For JSON the limit is 128 levels,
    /// whatever is said here.
    pub nesting: usize,
    /// How many values a pickle may push: 2^32.
    pub values: u64,
    /// The device whose events are wanted; without it, the device with the most events.
    pub device: Option<u32>,
}

impl Default for Limits {
    fn default() -> Self {
        Self { decoded_bytes: 4 * GIB, nesting: 1000, values: 1 << 32, device: None }
    }
}

/// Reads the recording at `path`: a PyTorch snapshot as pickle (protocol 2 to 5) or JSON, plain or
/// compressed with xz, gzip or zstd.
///
/// A log of requests in RMM's CSV format is read too; it says nothing of what an allocator decided.
///
/// The first bytes decide what the file is, not its name. A bare list is a snapshot of segments
/// only, without events.
///
/// # Errors
///
/// [`TraceError`] when the file cannot be read, is none of these, is damaged, passes a limit, or
/// does not say what a snapshot must say.
pub fn read(path: &Path, limits: &Limits) -> Result<Trace, TraceError> {
    let name = path.display().to_string();
    match File::open(path) {
        Ok(file) => read_bytes(&name, file, limits, None),
        Err(source) => Err(TraceError::Open { file: name, source }),
    }
}

/// Reads a recording from `bytes`; `name` stands in errors.
///
/// `progress` is called now and then with the number of bytes taken from `bytes`, before
/// decompression, so it can be set against the size of the file.
///
/// # Errors
///
/// As [`read`].
pub fn read_bytes(
    name: &str,
    bytes: impl Read,
    limits: &Limits,
    progress: Option<&dyn Fn(u64)>,
) -> Result<Trace, TraceError> {
    let in_file = |e: error::Failure| e.in_file(name);
    let source = encoding::decoder(bytes, progress, limits.decoded_bytes).map_err(in_file)?;
    let mut input = Input::new(source, limits.decoded_bytes);
    let format = encoding::format(&mut input).map_err(in_file)?;
    let heap = match format {
        Format::Pickle => pickle::parse(&mut input, limits),
        Format::Json => json::parse(&mut input),
        Format::Rmm => return rmm::parse(input).map_err(in_file),
    };
    let heap = heap.map_err(in_file)?;
    // The decompressor's window is freed before the trace is made.
    drop(input);
    interpret::interpret(heap, &format, limits).map_err(in_file)
}

#[cfg(test)]
mod tests;
