//! Errors of the reader: the file, the position in the file, and what was expected there.
//!
//! Inner layers do not have the file's name. They return a [`Failure`], to which `read_bytes` adds the
//! name.

use std::io;

/// A recording that could not be read.
#[derive(Debug, thiserror::Error)]
#[error("{file}: {failure}")]
pub struct TraceError {
    /// The file.
    pub file: String,
    /// The reason.
    pub failure: Failure,
}

/// The reason why a recording could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// The file could not be opened.
    #[error("cannot be opened: {source}")]
    Open {
        /// The error of the operating system.
        source: io::Error,
    },
    /// The bytes could not be read or decompressed.
    #[error("cannot be read beyond decoded byte {at}: {source}")]
    Read {
        /// Bytes decoded before the error.
        at: u64,
        /// The error of the operating system, or of the decompressor.
        source: io::Error,
    },
    /// The first bytes match no known format.
    #[error(
        "expected a memory snapshot (pickle of protocol 2 to 5, JSON or the viewer's page), a trace or a timeline \
         of PyTorch's profiler, memory_stats() as JSON, or RMM's CSV, plain or in xz, gzip or zstd; {found} (the \
         name does not count)"
    )]
    Unknown {
        /// A description of the first bytes.
        found: String,
    },
    /// The file is of a known kind that holds no recording.
    #[error("it is {foreign}")]
    Foreign {
        /// The kind.
        foreign: Foreign,
    },
    /// The file holds more decoded bytes than [`Limits`](super::Limits) allow.
    #[error("holds more than {limit_bytes} decoded bytes, the limit")]
    TooLarge {
        /// The limit.
        limit_bytes: u64,
    },
    /// The pickle is malformed, exceeds a limit, or contains opcodes that are refused.
    #[error("{problem} (decoded byte {at})")]
    Pickle {
        /// Offset of the opcode in the decoded bytes.
        at: u64,
        /// The problem.
        problem: PickleProblem,
    },
    /// The file is not JSON, is cut off, is nested too deeply, or needs too much memory.
    #[error("{problem} (decoded byte {at}, in {path})")]
    Json {
        /// Offset in the decoded bytes.
        at: u64,
        /// Position in the snapshot, such as `device_traces[0][17].size`.
        path: String,
        /// The problem.
        problem: String,
    },
    /// The file is well formed, but its contents are not a snapshot.
    #[error("{path}: {mismatch}")]
    Content {
        /// Position in the snapshot, such as `device_traces[0][17].size`.
        path: String,
        /// The expected value and the one found.
        mismatch: Mismatch,
    },
}

/// A kind of file that holds no recording, and what to do instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Foreign {
    /// Tensors.
    #[error("a checkpoint with tensors, not a recording; {RECORD}")]
    Checkpoint,
    /// A zip or tar archive.
    #[error("a zip or tar archive; unpack it and pass the recording in it")]
    Archive,
    /// A NumPy array.
    #[error("a NumPy array, not a recording; {RECORD}")]
    Array,
    /// A compression that is not supported.
    #[error("compressed with bzip2, lz4 or 7-Zip; decompress it, or use xz, gzip or zstd")]
    Compressed,
    /// A report of NVIDIA's Nsight tools, or a database made from it.
    #[error(
        "a report of Nsight Systems or Nsight Compute or a database; it does not show PyTorch's requests; {RECORD}"
    )]
    Nsight,
    /// A trace of Perfetto.
    #[error("a binary trace of Perfetto; {RECORD}")]
    Perfetto,
    /// The text of a Python object.
    #[error("the text of a Python object, as print writes; write it with pickle.dump or json.dump")]
    Python,
    /// The text of `torch.cuda.memory_summary()`.
    #[error(
        "the text of torch.cuda.memory_summary(); json.dump(torch.cuda.memory_stats(), file) writes the same \
         counters exactly; for the code that holds the memory {RECORD}"
    )]
    MemorySummary,
    /// The message of an error.
    #[error("the message of an out-of-memory error, not a recording; {RECORD}")]
    OutOfMemoryMessage,
    /// The output of `nvidia-smi`.
    #[error("the output of nvidia-smi, which counts the memory of whole processes; {RECORD}")]
    NvidiaSmi,
    /// A picture.
    #[error("a picture; pass the recording from which it was made")]
    Picture,
    /// Text in UTF-16.
    #[error("text in UTF-16; write it in UTF-8")]
    Utf16,
    /// A page with the picture of a timeline.
    #[error(
        "a page with a picture; export_memory_timeline with a name that ends in .json writes the numbers"
    )]
    TimelinePicture,
    /// A page that `stratalloc report` wrote.
    #[error("a page that stratalloc report wrote; pass the recording from which it was made")]
    Report,
    /// A page without a snapshot.
    #[error("a page of HTML without a snapshot; {RECORD}")]
    Page,
    /// A trace of a profiler without entries of memory.
    #[error(
        "a profiler's trace without requests for a device's memory; \
         torch.profiler.profile(profile_memory=True, with_stack=True) records them, or {RECORD}"
    )]
    ProfileWithoutMemory,
    /// A trace of an old version of PyTorch's profiler.
    #[error(
        "a profiler's trace without the addresses of memory, which PyTorch 1.11 and later record; {RECORD}"
    )]
    ProfileWithoutAddresses,
}

/// How to make a recording.
const RECORD: &str = "call torch.cuda.memory._record_memory_history() before the steps and \
    torch.cuda.memory._dump_snapshot(\"run.pickle\") after them";

/// The text for a dictionary without segments, such as a checkpoint.
pub(super) const NO_SEGMENTS: &str = "no such key: it is no memory snapshot, but perhaps a checkpoint; call \
    torch.cuda.memory._record_memory_history() before the steps and torch.cuda.memory._dump_snapshot(\"run.pickle\") \
    after them";

/// An expected value and the value found instead.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected {expected}, found {found}")]
pub struct Mismatch {
    /// The value that the format requires.
    pub expected: &'static str,
    /// The value in the file.
    pub found: String,
}

impl Mismatch {
    pub(super) fn new(expected: &'static str, found: impl Into<String>) -> Self {
        Self { expected, found: found.into() }
    }
}

/// The error in a pickle.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PickleProblem {
    /// The opcode would name, build or fetch a Python object.
    #[error("opcode {0} would construct an object and is refused")]
    Constructs(&'static str),
    /// No snapshot uses this opcode.
    #[error("opcode {0:#04x} is not used in snapshots and is refused")]
    Unused(u8),
    /// A protocol other than 2 to 5.
    #[error("pickle protocol {0}, expected 2 to 5")]
    Protocol(u8),
    /// The file ends before the pickle ends.
    #[error("the pickle is cut off")]
    Ends,
    /// Bytes follow the end of the pickle.
    #[error("bytes follow the end of the pickle")]
    Trailing,
    /// The values on the stack are not those that the opcode needs.
    #[error("opcode {opcode} expects {expected} on the stack")]
    Stack {
        /// The opcode.
        opcode: &'static str,
        /// The values that the opcode needs.
        expected: &'static str,
    },
    /// The pickle refers to a memo entry that was never stored.
    #[error("memo entry {0} was never stored")]
    Memo(u32),
    /// More `MARK` opcodes are open than [`Limits::nesting`](super::Limits::nesting) allows.
    #[error("more than {0} marks are open at once, the limit")]
    Nesting(usize),
    /// The values need more memory than the decoded bytes allow.
    #[error("{}", super::budget::OverBudget)]
    Memory,
}
