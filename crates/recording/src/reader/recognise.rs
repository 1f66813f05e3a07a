//! Recognises a file by the first bytes of its decoded content, and states what it is.
//!
//! A file that is read has a [`Format`]. A file of another kind that people confuse with a recording, such
//! as a checkpoint or a table of counters, is named in the error, with what to record instead. The name of
//! a file counts only for kinds whose first bytes say nothing.

use super::error::{Failure, Foreign};
use super::input::Input;

/// The number of decoded bytes that are looked at.
const HEAD_BYTES: usize = 4096;

/// The syntax and the meaning of the decoded bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    /// A snapshot as a pickle.
    Pickle,
    /// A snapshot as JSON.
    Json,
    /// A log of requests in RMM's CSV format.
    Rmm,
    /// A trace of PyTorch's profiler, in the format of Chrome's traces.
    Profile,
    /// The output of `torch.cuda.memory_stats()` as JSON.
    MemoryStats,
    /// The output of `export_memory_timeline` as JSON: times, and bytes by category at these times.
    MemoryTimeline,
    /// The output of `export_memory_timeline` for a name that ends in `.raw.json.gz`: a list of changes.
    RawMemoryTimeline,
    /// A page with a snapshot, as `torch.cuda._memory_viz` writes.
    Page,
}

/// Files that are not read. The first one with a pattern in its place is named. A pattern is compared
/// without regard to the case of letters.
const FOREIGN: &[(Foreign, Place, &[u8])] = &[
    (Foreign::Checkpoint, Place::Zip, b"data.pkl"),
    (Foreign::Archive, Place::Begin, b"PK\x03\x04"),
    (Foreign::Checkpoint, Place::Begin, b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."),
    (Foreign::Checkpoint, Place::After(8), b"{\"__metadata__\""),
    (Foreign::Checkpoint, Place::Begin, b"\x89HDF\r\n"),
    (Foreign::Array, Place::Begin, b"\x93NUMPY"),
    (Foreign::Compressed, Place::Begin, b"BZh"),
    (Foreign::Compressed, Place::Begin, b"\x04\x22\x4d\x18"),
    (Foreign::Compressed, Place::Begin, b"7z\xbc\xaf\x27\x1c"),
    (Foreign::Archive, Place::After(257), b"ustar"),
    (Foreign::Nsight, Place::Begin, b"SQLite format 3"),
    (Foreign::Python, Place::Begin, b"{'"),
    (Foreign::Python, Place::Begin, b"[{'"),
    (Foreign::MemorySummary, Place::Anywhere, b"memory summary, device ID"),
    (Foreign::OutOfMemoryMessage, Place::Anywhere, b"CUDA out of memory"),
    (Foreign::NvidiaSmi, Place::Anywhere, b"NVIDIA-SMI"),
    (Foreign::NvidiaSmi, Place::Anywhere, b"NVSMI LOG"),
    (Foreign::NvidiaSmi, Place::Anywhere, b"memory.used ["),
    (Foreign::NvidiaSmi, Place::Anywhere, b"<nvidia_smi_log>"),
    (Foreign::NvidiaSmi, Place::Begin, b"# gpu "),
    (Foreign::Picture, Place::Begin, b"<svg"),
    (Foreign::Picture, Place::Begin, b"<?xml"),
    (Foreign::Picture, Place::Begin, b"\x89PNG"),
    (Foreign::Utf16, Place::Begin, b"\xff\xfe"),
    (Foreign::Utf16, Place::Begin, b"\xfe\xff"),
];

/// Ends of names of files whose first bytes say nothing.
const NAMED: &[(Foreign, &str)] = &[
    (Foreign::Nsight, ".nsys-rep"),
    (Foreign::Nsight, ".qdrep"),
    (Foreign::Nsight, ".ncu-rep"),
    (Foreign::Perfetto, ".pftrace"),
    (Foreign::Perfetto, ".perfetto-trace"),
];

/// The place of a pattern in the first bytes.
#[derive(Clone, Copy, Debug)]
enum Place {
    Begin,
    After(usize),
    Anywhere,
    /// Anywhere in a file that begins as a zip archive.
    Zip,
}

impl Place {
    fn has(self, head: &[u8], pattern: &[u8]) -> bool {
        match self {
            Self::Begin => begins(head, pattern),
            Self::After(count) => head.get(count..).is_some_and(|rest| begins(rest, pattern)),
            Self::Anywhere => contains(head, pattern),
            Self::Zip => head.starts_with(b"PK\x03\x04") && contains(head, pattern),
        }
    }
}

fn begins(text: &[u8], pattern: &[u8]) -> bool {
    text.get(..pattern.len()).is_some_and(|begin| begin.eq_ignore_ascii_case(pattern))
}

fn contains(text: &[u8], pattern: &[u8]) -> bool {
    text.windows(pattern.len()).any(|part| part.eq_ignore_ascii_case(pattern))
}

/// Recognises the decoded bytes. Skips leading white space and a byte order mark. `name` is that of the file.
pub(super) fn format(input: &mut Input<'_>, name: &str) -> Result<Format, Failure> {
    loop {
        let at = input.offset();
        match input.peek()? {
            [b' ' | b'\t' | b'\r' | b'\n', ..] => input.consume(1),
            [0xef, 0xbb, 0xbf, ..] if at == 0 => input.consume(3),
            _ => break,
        }
    }
    let head = input.look_ahead(HEAD_BYTES)?;
    let foreign = FOREIGN.iter().find(|(_, place, pattern)| place.has(&head, pattern));
    let foreign = foreign.map(|(foreign, ..)| *foreign);
    let format = match head.as_slice() {
        _ if begins(&head, b"<!doctype html") || begins(&head, b"<html") => Some(Format::Page),
        _ if foreign == Some(Foreign::Checkpoint) => None,
        [0x80, ..] => Some(Format::Pickle),
        [b'T', b'h', b'r', b'e', b'a', b'd', ..] => Some(Format::Rmm),
        // The message of an error may be in a text of a snapshot.
        [b'{', b'\'', ..] | [b'[', b'{', b'\'', ..] => None,
        [b'{', ..] => Some(object(&head)),
        [b'[', ..] => Some(list(&head)),
        _ => None,
    };
    let named = || {
        let ends = |(_, end): &&(Foreign, &str)| {
            name.len()
                .checked_sub(end.len())
                .and_then(|at| name.get(at..))
                .is_some_and(|tail| tail.eq_ignore_ascii_case(end))
        };
        NAMED.iter().find(ends).map(|(foreign, _)| *foreign)
    };
    match (format, foreign.or_else(named)) {
        (Some(format), _) => Ok(format),
        (None, Some(foreign)) => Err(Failure::Foreign { foreign }),
        (None, None) => Err(Failure::Unknown { found: describe(&head) }),
    }
}

/// Keys with which a trace of a profiler begins, or that it has near its beginning.
const PROFILE_KEYS: &[&[u8]] = &[
    b"\"traceEvents\"",
    b"\"schemaVersion\"",
    b"\"deviceProperties\"",
    b"\"baseTimeNanoseconds\"",
];
/// Keys of `memory_stats()`, flat or nested.
const STATS_KEYS: &[&[u8]] = &[
    b"\"allocated_bytes.all.",
    b"\"active.all.",
    b"\"allocated_bytes\"",
    b"\"num_alloc_retries\"",
];
/// Keys of a snapshot. One that comes first decides, because texts of a snapshot may contain any other key.
const SNAPSHOT_KEYS: &[&[u8]] = &[
    b"\"segments\"",
    b"\"device_traces\"",
    b"\"allocator_settings\"",
    b"\"external_annotations\"",
    b"\"host_segments\"",
    b"\"host_traces\"",
    b"\"stratalloc\"",
];

/// Recognises a JSON object by the key that comes first.
fn object(head: &[u8]) -> Format {
    let first = |keys: &[&[u8]]| {
        let place = |key: &&[u8]| head.windows(key.len()).position(|part| part == *key);
        keys.iter().filter_map(place).min()
    };
    let kinds = [
        (first(SNAPSHOT_KEYS), Format::Json),
        (first(PROFILE_KEYS), Format::Profile),
        (first(STATS_KEYS), Format::MemoryStats),
    ];
    let found = kinds.into_iter().filter_map(|(at, format)| Some((at?, format)));
    found.min_by_key(|(at, _)| *at).map_or(Format::Json, |(_, format)| format)
}

/// Recognises a JSON list: a list of segments, of a profiler's events or of counters, or a timeline.
fn list(head: &[u8]) -> Format {
    let signs: Vec<u8> = head.iter().copied().filter(|sign| !sign.is_ascii_whitespace()).collect();
    match signs.as_slice() {
        [b'[', b'[', rest @ ..] => {
            // A timeline begins with the list of all times, and goes on with a list of lists. A list of
            // changes has four numbers in each item.
            let end = rest.iter().position(|sign| *sign == b']');
            let Some(end) = end else { return Format::MemoryTimeline };
            let (first, rest) = rest.split_at(end);
            match rest {
                [b']', b',', b'[', b'[' | b']', ..] => Format::MemoryTimeline,
                _ if first.iter().filter(|sign| **sign == b',').count() == 3 => {
                    Format::RawMemoryTimeline
                }
                _ => Format::Json,
            }
        }
        [b'[', b'{', ..]
            if contains(&signs, b"\"ph\":") && !contains(&signs, b"\"total_size\"") =>
        {
            Format::Profile
        }
        [b'[', b'{', ..] => object(&signs),
        _ => Format::Json,
    }
}

fn describe(first: &[u8]) -> String {
    if first.is_empty() {
        return "it is empty".to_owned();
    }
    let bytes: Vec<String> = first.iter().take(8).map(|b| format!("{b:02x}")).collect();
    format!("it starts with the bytes {}", bytes.join(" "))
}
