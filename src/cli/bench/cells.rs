//! The cases of one thread by name: what is built for each, and what is timed.

use std::error::Error;

use crate::allocator::DeviceAllocator;
use crate::handle::Handle;
use crate::size::{KIB, MIB};

use super::cases::{self, Effort, Pool, Raw, Typed};
use super::loops::Loops;
use super::{Build, Built};

/// One case.
#[derive(Clone, Copy, Debug)]
pub(super) enum Cell {
    /// Take so many bytes, and give them back.
    Pair(u64),
    /// The same by bare address.
    PairRaw(u64),
    /// The same through the switchable handle.
    PairHandle(u64),
    Mix,
    MixRaw,
    Holes(usize),
    RecordStream,
}

/// Those before the cases of several threads, by handle.
pub(super) const FIRST: [(&str, Cell); 8] = [
    ("pair:512B", Cell::Pair(512)),
    ("pair:64KiB", Cell::Pair(64 * KIB)),
    ("pair:2MiB", Cell::Pair(2 * MIB)),
    ("pair:64MiB", Cell::Pair(64 * MIB)),
    ("handle:512B", Cell::PairHandle(512)),
    ("mix:4096live", Cell::Mix),
    ("holes:4096", Cell::Holes(4096)),
    ("holes:65536", Cell::Holes(65_536)),
];

/// The one behind them.
pub(super) const LAST: [(&str, Cell); 1] = [("record_stream:64KiB", Cell::RecordStream)];

/// Those by bare address.
pub(super) const RAW: [(&str, Cell); 5] = [
    ("pair_raw:512B", Cell::PairRaw(512)),
    ("pair_raw:64KiB", Cell::PairRaw(64 * KIB)),
    ("pair_raw:2MiB", Cell::PairRaw(2 * MIB)),
    ("pair_raw:64MiB", Cell::PairRaw(64 * MIB)),
    ("mix_raw:4096live", Cell::MixRaw),
];

/// All of them.
pub(super) fn all() -> impl Iterator<Item = (&'static str, Cell)> {
    FIRST.into_iter().chain(LAST).chain(RAW)
}

/// Nanoseconds a step on an allocator that is built for it. `None` where the allocator has no such calls.
pub(super) fn time(
    cell: Cell,
    build: &Build<'_>,
    loops: &Loops,
    effort: Effort,
) -> Result<Option<f64>, Box<dyn Error>> {
    let by_address = matches!(cell, Cell::PairRaw(_) | Cell::MixRaw);
    let Built { strategy, driver, streams } = build(by_address)?;
    let raw = || strategy.raw_addresses().map(Raw);
    Ok(match cell {
        Cell::Pair(bytes) => Some((loops.pair)(&Typed(&strategy), bytes, effort)),
        Cell::PairRaw(bytes) => raw().map(|raw| (loops.pair_raw)(&raw, bytes, effort)),
        Cell::PairHandle(bytes) => {
            let handle = Handle::new(strategy, driver);
            Some((loops.pair_handle)(&Typed(&handle), bytes, effort))
        }
        Cell::Mix => Some((loops.mix)(&Typed(&strategy), effort)),
        Cell::MixRaw => raw().map(|raw| (loops.mix_raw)(&raw, effort)),
        Cell::Holes(holes) => Some((loops.holes)(&Typed(&strategy), holes, effort)),
        Cell::RecordStream => (loops.record_stream)(&strategy, streams[0], effort),
    })
}

/// The same on a driver's pool with nothing on top, which is opened if it has the case.
pub(super) fn time_pool(
    cell: Cell,
    open: impl FnOnce() -> Result<Pool, Box<dyn Error>>,
    effort: Effort,
) -> Result<Option<f64>, Box<dyn Error>> {
    Ok(match cell {
        Cell::Pair(bytes) => Some(cases::pair(&open()?, bytes, effort)),
        Cell::Mix => Some(cases::mix(&open()?, effort)),
        _ => None,
    })
}
