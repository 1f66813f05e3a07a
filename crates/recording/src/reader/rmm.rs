//! Logs of requests in the format of RMM (RAPIDS Memory Manager). RMM writes them, and so does this library
//! with `layers:[log:"PATH"]`.
//!
//! The first line is `Thread,Time,Action,Pointer,Size,Stream`; actions are `allocate`, `allocate
//! failure` and `free`. The thread and the time are not read. Such a log contains requests and no
//! decisions of an allocator, so it can be replayed but not verified.
//!
//! To limit memory, rows are stored in 24 bytes each until the last one is read. Then the decompressor is
//! dropped, and the rows are replaced by events. The row of a free becomes two events.
//!
//! Source of the format: `rmm::mr::logging_resource_adaptor`.

use hashbrown::HashSet;

use super::error::{Failure, Mismatch};
use super::fields::SHOWN_CHARS;
use super::input::Input;
use crate::{Trace, TraceEvent};
use stratalloc::history::Action;
use stratalloc::ids::StreamId;
use stratalloc::size::EIB;

/// The first line of every log.
const HEADER: &str = "Thread,Time,Action,Pointer,Size,Stream";
/// The longest line that is accepted. Rows of real logs have about 50 bytes.
const LINE_MAX_BYTES: usize = 256;
/// The length of the shortest row that is accepted, `1,00:00:00.0,free,1,1,0`. The events of shorter rows
/// would take more than [`MEMORY_FACTOR`](super::MEMORY_FACTOR) times their bytes.
const ROW_MIN_BYTES: usize = 23;
/// The number of rows in a chunk. Rows are stored in chunks, so that growing the list does not move rows.
const CHUNK_ROWS: usize = 4096;

#[derive(Clone, Copy, PartialEq, Eq)]
enum RowAction {
    Allocate = 0,
    Failure = 1,
    Free = 2,
}

/// A row. The action is in the two highest bits of `size_and_action`.
#[derive(Clone, Copy)]
struct LogRow {
    address: u64,
    size_and_action: u64,
    stream: StreamId,
}

const ACTION_SHIFT: u32 = 62;
const _: () = assert!(EIB < 1 << ACTION_SHIFT);

impl LogRow {
    fn new(action: RowAction, address: u64, size_bytes: u64, stream: StreamId) -> Self {
        let size_and_action = size_bytes | (action as u64) << ACTION_SHIFT;
        Self { address, size_and_action, stream }
    }

    fn action(&self) -> RowAction {
        match self.size_and_action >> ACTION_SHIFT {
            0 => RowAction::Allocate,
            1 => RowAction::Failure,
            _ => RowAction::Free,
        }
    }

    /// Adds the row's events to `events`.
    fn add_events(&self, events: &mut Vec<TraceEvent>) {
        let size_bytes = self.size_and_action & ((1 << ACTION_SHIFT) - 1);
        let Self { address, stream, .. } = *self;
        let mut push = |action, address| {
            events.push(TraceEvent::new(action, address, size_bytes, stream));
        };
        match self.action() {
            RowAction::Allocate => push(Action::Alloc, address),
            // The address of an out-of-memory event is the device's free memory, which the log does not
            // contain.
            RowAction::Failure => push(Action::OutOfMemory, 0),
            RowAction::Free => {
                push(Action::FreeRequested, address);
                push(Action::FreeCompleted, address);
            }
        }
    }
}

/// Rows in the order of the file.
#[derive(Default)]
struct Rows {
    chunks: Vec<Vec<LogRow>>,
    events: usize,
    live: HashSet<u64>,
}

impl Rows {
    fn push(&mut self, row: LogRow) -> Result<(), Mismatch> {
        match row.action() {
            RowAction::Allocate if !self.live.insert(row.address) => {
                let found = format!("{:#x}, which is live since an earlier row", row.address);
                return Err(Mismatch::new("the pointer of a new block", found));
            }
            RowAction::Free => {
                self.live.remove(&row.address);
            }
            RowAction::Allocate | RowAction::Failure => {}
        }
        self.events += if row.action() == RowAction::Free { 2 } else { 1 };
        match self.chunks.last_mut() {
            Some(chunk) if chunk.len() < CHUNK_ROWS => chunk.push(row),
            _ => {
                let mut chunk = Vec::with_capacity(CHUNK_ROWS);
                chunk.push(row);
                self.chunks.push(chunk);
            }
        }
        Ok(())
    }

    fn into_events(self) -> Vec<TraceEvent> {
        drop(self.live);
        let mut events = Vec::with_capacity(self.events);
        for chunk in self.chunks {
            chunk.iter().for_each(|row| row.add_events(&mut events));
        }
        events
    }
}

/// Reads a log to its end. Drops the decompressor before the events are built, to use less memory.
pub(super) fn parse(mut input: Input<'_>) -> Result<Trace, Failure> {
    let mut line = Vec::with_capacity(LINE_MAX_BYTES);
    let mut rows = Rows::default();
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
            rows.push(row).map_err(at_line(number))?;
        }
    }
    drop(input);
    Ok(Trace { events: rows.into_events(), requests_only: true, ..Trace::default() })
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
    Ok(LogRow::new(action, address, size_bytes, StreamId(stream)))
}

/// Parses a number without a sign: hexadecimal with `0x` in front, or decimal.
fn number(text: &str) -> Option<u64> {
    let hex = text.strip_prefix("0x");
    let (digits, radix) = (hex.unwrap_or(text), if hex.is_some() { 16 } else { 10 });
    u64::from_str_radix(digits, radix).ok().filter(|_| !digits.starts_with('+'))
}
