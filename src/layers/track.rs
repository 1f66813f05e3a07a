//! `track`: what was never given back, each with the place that asked for it.
//!
//! Every request takes a backtrace (some microseconds, unresolved) that lives as long as its block.
//! When the allocator goes, blocks that are still live are reported: from the string on the standard
//! error stream, from code to a callback. Names and lines are looked up for the report only.

use std::backtrace::Backtrace;
use std::fmt;

use super::doors::Worn;
use super::watch::{Block, Watch, Watching};
use crate::allocator::DeviceAllocator;
use crate::size::human_bytes;

/// See the [module](self).
pub type Tracked<A> = Worn<Watching<A, Track>>;

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
    Worn::new(Watching::new(inner, Track { report }))
}

/// `inner` with its leaks written to the standard error stream when it goes.
pub fn track<A: DeviceAllocator>(inner: A) -> Tracked<A> {
    track_to(inner, Box::new(|report| super::say(report)))
}

fn sorted(mut leaks: Vec<Leak>) -> LeakReport {
    leaks.sort_by_key(|leak| (std::cmp::Reverse(leak.block.size_bytes), leak.block.address));
    LeakReport { leaks }
}

impl<A: DeviceAllocator> Watching<A, Track> {
    /// What is live now. Looks up names and lines, which takes milliseconds a block.
    pub fn live_blocks(&self) -> LeakReport {
        sorted(self.live(|block, trace| Leak { block: *block, backtrace: trace.to_string() }))
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
        let leaks =
            live.into_iter().map(|(block, trace)| Leak { block, backtrace: trace.to_string() });
        (self.report)(&sorted(leaks.collect()));
    }
}
