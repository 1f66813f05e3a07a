//! `log:"PATH"`: logs every request, failure and free in the format of RMM's logging adaptor.
//!
//! Rows are `Thread,Time,Action,Pointer,Size,Stream`. Actions are `allocate`, `allocate failure` and
//! `free`. Times are UTC. A `free` is written before the allocator below receives it, and an `allocate`
//! after the allocator below has returned. So the rows of one address are in order, even with several
//! threads. A refused free is followed by an `allocate` of the same block. The command `replay` of
//! `stratalloc-recording` reads such files.
//!
//! A table of live blocks provides size and stream of a block that is freed by address. A free removes
//! the block first, because the address may be allocated again at once. If the free is refused, the
//! block is inserted again. No lock is held while the allocator below runs.
//!
//! Rows are buffered (64 KiB). If the file can no longer be written, logging ends and the allocator
//! continues. [`Log::error`] returns the error, which is also written to the standard error stream.
//!
//! Source of the format: `rmm::mr::logging_resource_adaptor`.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;

use super::shift::Block;
use super::watch::{Freeing, Watch, Watched};
use crate::allocator::{Allocation, DeviceAllocator, PoolCheckpoint, Request, Restored, Token};
use crate::error::{AllocResult, PoolError};
use crate::ids::{OwnerId, StreamId, ThreadNumber};
use crate::live_blocks::{Live, Sharded};

/// See the [module](self).
pub(crate) type Logged<A> = Watched<A, Log>;

/// The first line of a file.
pub const HEADER: &str = "Thread,Time,Action,Pointer,Size,Stream";

const BUFFER_BYTES: usize = 64 * 1024;

/// A live block.
#[derive(Debug)]
struct Record {
    block: Block,
    /// The owner and token of its handle.
    handle: (OwnerId, Token),
    /// The number of blocks inserted before this one.
    number: u64,
}

/// The table of live blocks, and the file that rows are written to.
#[derive(Debug)]
pub struct Log {
    live: Sharded<Record>,
    /// The number of blocks inserted so far.
    entered: AtomicU64,
    path: PathBuf,
    sink: Mutex<Sink>,
}

#[derive(Debug)]
enum Sink {
    Open(BufWriter<File>),
    Broken(io::Error),
}

/// Returns `inner` with a log in a new file at `path`, replacing an older file. Opens the file at once.
///
/// # Errors
///
/// The system's error, when the file cannot be created or written.
pub fn log<A: DeviceAllocator>(inner: A, path: &Path) -> io::Result<Logged<A>> {
    let mut file = BufWriter::with_capacity(BUFFER_BYTES, File::create(path)?);
    writeln!(file, "{HEADER}")?;
    file.flush()?;
    let sink = Mutex::new(Sink::Open(file));
    let (live, entered) = (Sharded::default(), AtomicU64::new(0));
    Ok(Watched::new(inner, Log { live, entered, path: path.to_owned(), sink }))
}

impl Log {
    /// Writes buffered rows to the file. Waits for the file.
    ///
    /// # Errors
    ///
    /// The reason why the file could not be written, now or earlier.
    pub fn flush(&self) -> Result<(), String> {
        self.with_file(BufWriter::flush);
        self.error().map_or(Ok(()), Err)
    }

    /// Returns the error that ended logging, if any.
    pub fn error(&self) -> Option<String> {
        match &*self.sink.lock() {
            Sink::Open(_) => None,
            Sink::Broken(error) => Some(error.to_string()),
        }
    }

    /// Runs `write` on the file. Its first failure ends the log.
    fn with_file(&self, write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) {
        let mut sink = self.sink.lock();
        let Sink::Open(file) = &mut *sink else {
            return;
        };
        if let Err(error) = write(file) {
            super::write_stderr(format_args!("{}: logging ends: {error}", self.path.display()));
            *sink = Sink::Broken(error);
        }
    }

    fn row(&self, action: &str, address: u64, size_bytes: u64, stream: StreamId) {
        let thread = ThreadNumber::current();
        self.with_file(|file| {
            // The clock is read under the lock, so that times in the file ascend unless the clock is
            // set back.
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

    fn record_live(&self, block: Block, made: &Allocation) {
        self.block("allocate", &block);
        let number = self.entered.fetch_add(1, Ordering::Relaxed);
        let record = Record { block, handle: (made.owner(), made.token()), number };
        // If the table has a block at this address already, the allocator below has freed that block by
        // itself.
        let _ = self.live.lock(block.address).enter(block.address, record);
    }

    /// Removes the block at `address` if `is_block` returns true for it, and writes its `free` row.
    fn remove(&self, address: u64, is_block: impl FnOnce(&Record) -> bool) -> Option<Live<Record>> {
        let removed = self.live.lock(address).take_if(address, |live| is_block(live));
        removed.inspect(|removed| self.block("free", &removed.block))
    }
}

impl Watch for Log {
    fn allocate<A: DeviceAllocator>(&self, request: Request, below: &A) -> AllocResult {
        let answer = below.allocate(request);
        let Request { bytes: size_bytes, stream, .. } = request;
        match &answer {
            Ok(made) => {
                self.record_live(Block { address: made.address(), size_bytes, stream }, made)
            }
            Err(_) => self.row("allocate failure", 0, size_bytes, stream),
        }
        answer
    }

    fn free<T, E>(&self, block: Freeing, free: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        // The caller's handle may be stale or another allocator's, while the table has a live block at
        // the same address. That block stays in the table.
        let is_block = |record: &Record| block.handle.is_none_or(|handle| record.handle == handle);
        let Some(record) = self.remove(block.address, is_block) else { return free() };
        free().inspect_err(|_| {
            self.block("allocate", &record.block);
            self.live.lock(block.address).put_back(record);
        })
    }

    fn restore(
        &self,
        checkpoint: &PoolCheckpoint,
        restore: impl FnOnce() -> Result<Restored, PoolError>,
    ) -> Result<Restored, PoolError> {
        let before = self.entered.load(Ordering::Relaxed);
        let restored = restore()?;
        for freed in &restored.freed {
            // A block that was allocated after the restore began is a different one, and stays.
            let _ = self.remove(freed.address, |record| record.number < before);
        }
        for made in &restored.live {
            let (address, size_bytes) = (made.address(), made.size_bytes());
            let inside =
                |start: u64, size: u64| (start..start.saturating_add(size)).contains(&address);
            let segment = checkpoint.segments.iter().find(|s| inside(s.address, s.size_bytes));
            let stream = segment.map(|segment| segment.stream).unwrap_or_default();
            self.record_live(Block { address, size_bytes, stream }, made);
        }
        Ok(restored)
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        self.with_file(BufWriter::flush);
    }
}
