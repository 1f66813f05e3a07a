//! `log:"PATH"`: every request, its failure and every free, as RMM's logging adaptor writes them.
//!
//! Rows are `Thread,Time,Action,Pointer,Size,Stream`; actions are `allocate`, `allocate failure` and
//! `free`; times are UTC. A `free` is written before the allocator below hears of it and an `allocate`
//! afterwards, so rows about one address are in order whatever threads do; a free that was refused is
//! followed by an `allocate` of the same block. `replay` reads such files.
//!
//! Rows are buffered (64 KiB). When the file cannot be written any more, logging ends, the allocator
//! goes on, and [`Watching::error`] and the standard error stream say so.
//!
//! Source of the format: `rmm::mr::logging_resource_adaptor`.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;

use super::layered::Layered;
use super::watch::{Block, Watch, Watching};
use crate::allocator::{DeviceAllocator, Request};
use crate::error::AllocError;
use crate::ids::StreamId;

/// See the [module](self).
pub type Logged<A> = Layered<Watching<A, Log>>;

/// The first line of a file.
pub const HEADER: &str = "Thread,Time,Action,Pointer,Size,Stream";

const BUFFER_BYTES: usize = 64 * 1024;

/// The file.
#[derive(Debug)]
pub struct Log {
    path: PathBuf,
    sink: Mutex<Sink>,
}

#[derive(Debug)]
enum Sink {
    Open(BufWriter<File>),
    Broken(io::Error),
}

/// `inner` with a log in a new file at `path`; an older one is replaced. Opens the file now.
///
/// # Errors
///
/// The system's, when the file cannot be made or written.
pub fn log<A: DeviceAllocator>(inner: A, path: &Path) -> io::Result<Logged<A>> {
    let mut file = BufWriter::with_capacity(BUFFER_BYTES, File::create(path)?);
    writeln!(file, "{HEADER}")?;
    file.flush()?;
    let sink = Mutex::new(Sink::Open(file));
    Ok(Layered::new(Watching::new(inner, Log { path: path.to_owned(), sink })))
}

impl<A: DeviceAllocator> Watching<A, Log> {
    /// Writes what is buffered. Waits for the file.
    ///
    /// # Errors
    ///
    /// Why the file could not be written, now or earlier.
    pub fn flush(&self) -> Result<(), String> {
        self.watch().with_file(BufWriter::flush);
        self.error().map_or(Ok(()), Err)
    }

    /// Why logging has ended, if it has.
    pub fn error(&self) -> Option<String> {
        match &*self.watch().sink.lock() {
            Sink::Open(_) => None,
            Sink::Broken(error) => Some(error.to_string()),
        }
    }
}

/// A small number of the calling thread.
fn thread_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local! {
        static OWN: Cell<u64> = const { Cell::new(0) };
    }
    OWN.with(|own| {
        if own.get() == 0 {
            own.set(NEXT.fetch_add(1, Ordering::Relaxed));
        }
        own.get()
    })
}

impl Log {
    /// Does something with the file. Its first failure ends the log.
    fn with_file(&self, write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) {
        let mut sink = self.sink.lock();
        let Sink::Open(file) = &mut *sink else {
            return;
        };
        if let Err(error) = write(file) {
            super::say(format_args!("{}: logging ends: {error}", self.path.display()));
            *sink = Sink::Broken(error);
        }
    }

    fn row(&self, action: &str, address: u64, size_bytes: u64, stream: StreamId) {
        let thread = thread_number();
        self.with_file(|file| {
            // Under the lock, so that times never go back in the file unless the clock does.
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            let (seconds, micros) = (now.as_secs() % 86_400, now.subsec_micros());
            let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
            writeln!(
                file,
                "{thread},{hour:02}:{minute:02}:{second:02}.{micros:06},{action},{address:#x},\
                 {size_bytes},{:#x}",
                stream.0
            )
        });
    }

    fn block(&self, action: &str, block: &Block) {
        self.row(action, block.address, block.size_bytes, block.stream);
    }
}

impl Watch for Log {
    fn failed(&self, request: Request, _: &AllocError) {
        self.row("allocate failure", 0, request.bytes, request.stream);
    }

    fn took(&self, block: &Block) {
        self.block("allocate", block);
    }

    fn giving(&self, block: &Block) {
        self.block("free", block);
    }

    fn kept(&self, block: &Block) {
        self.block("allocate", block);
    }

    fn ends(&self) {
        self.with_file(BufWriter::flush);
    }
}
