//! Logs of requests in the format of RMM (RAPIDS Memory Manager). RMM writes them, and so does this library
//! with `layers:[log:"PATH"]`.
//!
//! The first line is `Thread,Time,Action,Pointer,Size,Stream`; actions are `allocate`, `allocate
//! failure` and `free`. The thread and the time are not read. Such a log contains requests and no
//! decisions of an allocator, so it can be replayed but not verified.
//!
//! To limit memory, a row becomes an operation of 16 bytes at once, and no events are stored.
//!
//! Source of the format: `rmm::mr::logging_resource_adaptor`.

use std::sync::Arc;

use super::error::{Failure, Mismatch};
use super::fields::SHOWN_CHARS;
use super::input::Input;
use crate::Trace;
use crate::log::LogBuilder;
use stratalloc::ids::StreamId;
use stratalloc::size::EIB;

/// The first line of every log.
const HEADER: &str = "Thread,Time,Action,Pointer,Size,Stream";
/// The longest line that is accepted. Rows of real logs have about 50 bytes.
const LINE_MAX_BYTES: usize = 256;
/// The length of the shortest row that is accepted, `1,00:00:00.0,free,1,1,0`. Operations and addresses of
/// shorter rows could take more than [`MEMORY_FACTOR`](super::MEMORY_FACTOR) times their bytes.
const ROW_MIN_BYTES: usize = 23;

#[derive(Clone, Copy, PartialEq, Eq)]
enum RowAction {
    Allocate,
    Failure,
    Free,
}

/// A row.
struct LogRow {
    action: RowAction,
    address: u64,
    size_bytes: u64,
    stream: StreamId,
}

impl LogRow {
    fn add_to(&self, log: &mut LogBuilder) -> Result<(), Mismatch> {
        let Self { action, address, size_bytes, stream } = *self;
        match action {
            RowAction::Allocate => {
                if !log.allocate(address, size_bytes, stream) {
                    let found = format!("{address:#x}, which is live since an earlier row");
                    return Err(Mismatch::new("the pointer of a new block", found));
                }
            }
            RowAction::Failure => log.fail(size_bytes, stream),
            RowAction::Free => log.free(address, size_bytes, stream),
        }
        Ok(())
    }
}

/// Reads a log to its end. Drops the decompressor before the log is built, to use less memory.
pub(super) fn parse(mut input: Input<'_>) -> Result<Trace, Failure> {
    let mut line = Vec::with_capacity(LINE_MAX_BYTES);
    let mut log = LogBuilder::default();
    let mut number = 1u64;
    let at_line =
        |number: u64| move |m| Failure::Content { path: format!("line {number}"), mismatch: m };
    if !next_line(&mut input, &mut line, number)? || text(&line).map_err(at_line(1))? != HEADER {
        let found = String::from_utf8_lossy(&line);
        return Err(at_line(1)(wrong(HEADER, &found)));
    }
    loop {
        number += 1;
        if !next_line(&mut input, &mut line, number)? {
            break;
        }
        // Concatenated files may have a blank line between them.
        if !line.is_empty() {
            let row = text(&line).and_then(row).map_err(at_line(number))?;
            row.add_to(&mut log).map_err(at_line(number))?;
        }
    }
    drop(input);
    let log = Some(Arc::new(log.build()));
    Ok(Trace { log, requests_only: true, ..Trace::default() })
}

/// Reads the next line, without its line end. Returns false at the end of the file.
fn next_line(input: &mut Input<'_>, line: &mut Vec<u8>, number: u64) -> Result<bool, Failure> {
    line.clear();
    let mut any = false;
    while let Some(byte) = input.next_byte()? {
        any = true;
        if byte == b'\n' {
            break;
        }
        if line.len() == LINE_MAX_BYTES {
            let mismatch = Mismatch::new("a line of at most 256 bytes", "a longer one");
            return Err(Failure::Content { path: format!("line {number}"), mismatch });
        }
        line.push(byte);
    }
    if line.last() == Some(&b'\r') {
        line.pop();
    }
    Ok(any)
}

fn text(line: &[u8]) -> Result<&str, Mismatch> {
    std::str::from_utf8(line).map_err(|_| Mismatch::new("text in UTF-8", "other bytes"))
}

/// Returns a mismatch with the found text quoted and escaped, because it may contain control characters.
fn wrong(expected: &'static str, found: &str) -> Mismatch {
    let shown: String = found.chars().take(SHOWN_CHARS).collect();
    Mismatch::new(expected, format!("{shown:?}"))
}

fn row(line: &str) -> Result<LogRow, Mismatch> {
    if line.len() < ROW_MIN_BYTES {
        return Err(wrong("a row of at least 23 bytes", line));
    }
    let fields: Vec<&str> = line.split(',').map(str::trim).collect();
    let &[_thread, _time, action, pointer, size, stream] = fields.as_slice() else {
        let shown: String = line.chars().take(SHOWN_CHARS).collect();
        return Err(Mismatch::new("six fields", format!("{} in {shown:?}", fields.len())));
    };
    let action = match action {
        "allocate" => RowAction::Allocate,
        "allocate failure" => RowAction::Failure,
        "free" => RowAction::Free,
        other => return Err(wrong("allocate, allocate failure or free", other)),
    };
    // RMM prints the null pointer of a failure as printf or as fmt does.
    let address = match pointer {
        "(nil)" => 0,
        some => number(some).ok_or_else(|| wrong("a pointer", some))?,
    };
    if address == 0 && action != RowAction::Failure {
        return Err(wrong("a pointer that is not null", pointer));
    }
    let size_bytes: u64 = size.parse().map_err(|_| wrong("a size in bytes", size))?;
    // A request that failed, or a free, may have any size. An allocated block has at least one byte.
    let legal = match action {
        RowAction::Allocate => (1..=EIB).contains(&size_bytes),
        RowAction::Failure | RowAction::Free => size_bytes <= EIB,
    };
    if !legal {
        return Err(wrong("a size of at most 1 EiB, not 0 for a new block", size));
    }
    let stream = number(stream).ok_or_else(|| wrong("a stream's handle", stream))?;
    Ok(LogRow { action, address, size_bytes, stream: StreamId(stream) })
}

/// Parses a number without a sign: hexadecimal with `0x` in front, or decimal.
fn number(text: &str) -> Option<u64> {
    let hex = text.strip_prefix("0x");
    let (digits, radix) = (hex.unwrap_or(text), if hex.is_some() { 16 } else { 10 });
    u64::from_str_radix(digits, radix).ok().filter(|_| !digits.starts_with('+'))
}
