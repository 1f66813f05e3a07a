//! Reads a recording in any encoding into a [`Trace`].
//!
//! Files come from untrusted sources. So nothing in them is executed, recursion is bounded, no allocation
//! trusts a size in a header, and memory stays below [`MEMORY_FACTOR`] times the decoded bytes plus a fixed
//! part. The layers, beginning at the file: `encoding` decompresses, `input` counts and limits the bytes,
//! `recognise` finds out what they are, `pickle` and `json` parse the values into a `heap`, and `interpret`
//! builds the snapshot from them with the fields that `fields` defines. `page` finds the snapshot in a page
//! of PyTorch's viewer. `rmm` parses logs of requests; `profile`, `timeline` and `counters` parse what else
//! PyTorch writes about memory. Read next: `heap`.

mod budget;
mod counters;
mod encoding;
mod error;
mod fields;
mod heap;
mod ignored;
mod input;
mod interpret;
mod json;
mod page;
mod parts;
mod path;
mod pickle;
mod profile;
mod recognise;
mod rmm;
mod stack_reader;
mod timeline;
mod values;
mod words;

use std::fs::File;
use std::io::Read;
use std::path::Path;

pub use error::{Failure, Foreign, Mismatch, PickleProblem, TraceError};

use self::input::Input;
use self::recognise::Format;
use super::Trace;
use stratalloc::size::GIB;

/// A reader holds at most this many times the decoded bytes of a file, plus a fixed part below 1 MiB.
pub const MEMORY_FACTOR: u64 = 6;

/// Limits of a reader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The size of the largest accepted file, in bytes after decompression. Default: 4 GiB.
    pub decoded_bytes: u64,
    /// The maximum number of marks (opcode `MARK`) that may be open in a pickle. Default: 1,000. For JSON
    /// the limit is always 128 levels of nesting.
    pub nesting: usize,
    /// The device whose events are read. `None` means the first one in the order of
    /// [`DeviceFigures::order`](crate::DeviceFigures::order).
    pub device: Option<u32>,
}

impl Default for Limits {
    fn default() -> Self {
        Self { decoded_bytes: 4 * GIB, nesting: 1000, device: None }
    }
}

/// Reads the recording at `path`: a PyTorch snapshot as pickle (protocol 2 to 5), as JSON or in a page of
/// PyTorch's viewer, plain or compressed with xz, gzip or zstd.
///
/// Also reads logs of requests, which contain no decisions of an allocator: RMM's CSV format, and
/// traces of PyTorch's profiler with events of memory. From files
/// without requests (`torch.cuda.memory_stats()` and `export_memory_timeline`, as JSON) it reads the
/// [`Totals`](crate::Totals).
///
/// The format is detected from the first bytes, not from the name. A snapshot that is a list, not a
/// dictionary, contains only segments and no events.
///
/// # Errors
///
/// [`TraceError`] when the file cannot be read, has none of these formats, is damaged, exceeds a limit,
/// or lacks a required field.
pub fn read(path: &Path, limits: &Limits) -> Result<Trace, TraceError> {
    let name = path.display().to_string();
    match File::open(path) {
        Ok(file) => read_bytes(&name, file, limits, None),
        Err(source) => Err(TraceError { file: name, failure: Failure::Open { source } }),
    }
}

/// Reads a recording from `bytes`. Errors use `name` as the name of the file.
///
/// `progress` is called from time to time with the number of bytes read from `bytes`. These are
/// compressed bytes, so the number can be compared with the size of the file.
///
/// # Errors
///
/// The same as [`read`].
pub fn read_bytes(
    name: &str,
    bytes: impl Read,
    limits: &Limits,
    progress: Option<&dyn Fn(u64)>,
) -> Result<Trace, TraceError> {
    let in_file = |failure| TraceError { file: name.to_owned(), failure };
    let mut input = decoded(bytes, limits, progress).map_err(in_file)?;
    let trace = match recognise::format(&mut input, name).map_err(in_file)? {
        Format::Page => {
            let embedded = page::embedded(input).and_then(|bytes| decoded(bytes, limits, None));
            let mut input = embedded.map_err(in_file)?;
            match recognise::format(&mut input, name).map_err(in_file)? {
                Format::Page => Err(Failure::Foreign { foreign: Foreign::Page }),
                format => trace(input, format, limits),
            }
        }
        format => trace(input, format, limits),
    };
    trace.map_err(in_file)
}

/// Returns the decoded bytes of a file.
fn decoded<'a>(
    bytes: impl Read + 'a,
    limits: &Limits,
    progress: Option<&'a dyn Fn(u64)>,
) -> Result<Input<'a>, Failure> {
    let source = encoding::decoder(bytes, progress, limits.decoded_bytes)?;
    Ok(Input::new(source, limits.decoded_bytes))
}

/// Reads the trace from decoded bytes of a format other than a page.
fn trace(mut input: Input<'_>, format: Format, limits: &Limits) -> Result<Trace, Failure> {
    let heap = match format {
        Format::Pickle => pickle::parse(&mut input, limits)?,
        Format::Json | Format::Page => json::parse(&mut input)?,
        Format::Rmm => return rmm::parse(input),
        Format::Profile => return profile::parse(input, limits),
        Format::MemoryStats => return counters::parse(&mut input),
        Format::MemoryTimeline => return timeline::parse(&mut input),
        Format::RawMemoryTimeline => return timeline::parse_changes(&mut input),
    };
    // The window of the decompressor is freed before the trace is built, to use less memory.
    drop(input);
    interpret::interpret(heap, format, limits)
}

#[cfg(test)]
mod tests;
