//! `track`: what was never given back, each with the place that asked for it.
//!
//! Every request takes a backtrace (some microseconds, unresolved) that lives as long as its block.
//! When the allocator goes, blocks that are still live are reported: from the string on the standard
//! error stream, from code to a callback. An allocator from the string that is still there when the process
//! ends reports them then: a typed buffer keeps its allocator, and PyTorch's stay. Names and lines are
//! looked up for the report only.

use std::backtrace::Backtrace;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use super::layered::Layered;
use super::watch::{Block, Book, Watch, Watching};
use crate::allocator::DeviceAllocator;
use crate::size::human_bytes;
use crate::sync::{Global, at_exit};

/// See the [module](self).
pub type Tracked<A> = Layered<Watching<A, Track>>;

/// A block that was never given back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leak {
    /// The block.
    pub block: Block,
    /// Who asked for it: frames from the request outwards, as [`Backtrace`] writes them.
    pub backtrace: String,
}

/// Every leak of an allocator, the largest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeakReport {
    /// All of them.
    pub leaks: Vec<Leak>,
}

/// How many leaks `Display` tells in full.
const TOLD_MAX: usize = 16;

impl fmt::Display for LeakReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes: u64 = self.leaks.iter().map(|leak| leak.block.size_bytes).sum();
        let count = self.leaks.len();
        writeln!(f, "{count} blocks were never given back, {} in all", human_bytes(bytes))?;
        for Leak { block: Block { address, size_bytes, stream }, backtrace } in
            self.leaks.iter().take(TOLD_MAX)
        {
            writeln!(f, "{size_bytes} bytes at {address:#x} on stream {stream}, asked for by")?;
            writeln!(f, "{}", backtrace.trim_end())?;
        }
        let untold = count.saturating_sub(TOLD_MAX);
        if untold > 0 {
            writeln!(f, "and {untold} smaller ones")?;
        }
        Ok(())
    }
}

/// Told the report when the allocator goes, if there are leaks.
pub type LeakReporter = Box<dyn Fn(&LeakReport) + Send + Sync>;

/// Who is told.
pub struct Track {
    report: LeakReporter,
}

impl fmt::Debug for Track {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Track").finish_non_exhaustive()
    }
}

/// `inner` with its leaks told to `report` when it goes.
pub fn track_to<A: DeviceAllocator>(inner: A, report: LeakReporter) -> Tracked<A> {
    Layered::new(Watching::new(inner, Track { report }))
}

type TrackBook = Book<Box<Backtrace>>;

/// Books of allocators that write their leaks themselves, with the process that each was made in.
static BOOKS: Global<Vec<(u32, Weak<TrackBook>)>> = Global::new(Vec::new());

/// Keeps the list as it is, for a fork.
#[cfg(feature = "ffi")]
pub(crate) fn hold() -> impl Sized + 'static {
    BOOKS.lock()
}

/// `inner` with its leaks written to the standard error stream when it goes, or when the process ends
/// before.
pub fn track<A: DeviceAllocator>(inner: A) -> Tracked<A> {
    static IS_HOOKED: AtomicBool = AtomicBool::new(false);
    let watching = Watching::new(inner, Track { report: Box::new(|report| super::say(report)) });
    let own = (std::process::id(), Arc::downgrade(watching.book()));
    let mut books = BOOKS.lock();
    books.retain(|(_, book)| book.strong_count() > 0);
    books.push(own);
    drop(books);
    if !IS_HOOKED.swap(true, Ordering::Relaxed) {
        at_exit(report_at_exit);
    }
    Layered::new(watching)
}

extern "C" fn report_at_exit() {
    // Nothing may unwind out of here, and nobody is left to be told.
    let _ = std::panic::catch_unwind(|| {
        let own = std::process::id();
        let books: Vec<_> = {
            let books = BOOKS.read();
            let made_here = books.iter().filter(|(process, _)| *process == own);
            made_here.filter_map(|(_, book)| book.upgrade()).collect()
        };
        for book in books {
            let report = sorted(book.all(|block, trace| leak(block, trace)));
            if !report.leaks.is_empty() {
                super::say(report);
            }
        }
    });
}

fn leak(block: &Block, trace: &Backtrace) -> Leak {
    Leak { block: *block, backtrace: trace.to_string() }
}

fn sorted(mut leaks: Vec<Leak>) -> LeakReport {
    leaks.sort_by_key(|leak| (std::cmp::Reverse(leak.block.size_bytes), leak.block.address));
    LeakReport { leaks }
}

impl<A: DeviceAllocator> Watching<A, Track> {
    /// What is live now. Looks up names and lines, which takes milliseconds a block.
    pub fn live_blocks(&self) -> LeakReport {
        sorted(self.live(|block, trace| leak(block, trace)))
    }
}

impl Watch for Track {
    type Note = Box<Backtrace>;

    fn took(&self, _: &Block) -> Box<Backtrace> {
        Box::new(Backtrace::force_capture())
    }

    fn ends(&self, live: Vec<(Block, Self::Note)>) {
        if live.is_empty() {
            return;
        }
        let leaks = live.iter().map(|(block, trace)| leak(block, trace));
        (self.report)(&sorted(leaks.collect()));
    }
}
