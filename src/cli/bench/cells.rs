//! The cases of one thread by name: what is built for each, and what is timed.

use std::error::Error;

use crate::handle::Handle;
use crate::ids::StreamId;
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
    /// A pair on each of so many streams in turn.
    Streams(usize),
    StreamsRaw(usize),
    /// A request of twenty blocks on each of so many streams in turn.
    Serve(usize),
    ServeRaw(usize),
    Mix,
    MixRaw,
    Holes(usize),
    RecordStream,
}

impl Cell {
    fn is_by_address(self) -> bool {
        matches!(self, Self::PairRaw(_) | Self::StreamsRaw(_) | Self::ServeRaw(_) | Self::MixRaw)
    }

    /// How many streams it uses besides the default one.
    fn streams(self) -> usize {
        match self {
            Self::Streams(n) | Self::StreamsRaw(n) | Self::Serve(n) | Self::ServeRaw(n) => n,
            Self::RecordStream => 1,
            _ => 0,
        }
    }
}

/// Those before the cases of several threads, by handle.
pub(super) const FIRST: [(&str, Cell); 14] = [
    ("pair:512B", Cell::Pair(512)),
    ("pair:64KiB", Cell::Pair(64 * KIB)),
    ("pair:2MiB", Cell::Pair(2 * MIB)),
    ("pair:64MiB", Cell::Pair(64 * MIB)),
    ("handle:512B", Cell::PairHandle(512)),
    ("streams:2", Cell::Streams(2)),
    ("streams:8", Cell::Streams(8)),
    ("streams:128", Cell::Streams(128)),
    ("serve:1", Cell::Serve(1)),
    ("serve:8", Cell::Serve(8)),
    ("serve:128", Cell::Serve(128)),
    ("mix:4096live", Cell::Mix),
    ("holes:4096", Cell::Holes(4096)),
    ("holes:65536", Cell::Holes(65_536)),
];

/// The one behind them.
pub(super) const LAST: [(&str, Cell); 1] = [("record_stream:64KiB", Cell::RecordStream)];

/// Those by bare address.
pub(super) const RAW: [(&str, Cell); 11] = [
    ("pair_raw:512B", Cell::PairRaw(512)),
    ("pair_raw:64KiB", Cell::PairRaw(64 * KIB)),
    ("pair_raw:2MiB", Cell::PairRaw(2 * MIB)),
    ("pair_raw:64MiB", Cell::PairRaw(64 * MIB)),
    ("streams_raw:2", Cell::StreamsRaw(2)),
    ("streams_raw:8", Cell::StreamsRaw(8)),
    ("streams_raw:128", Cell::StreamsRaw(128)),
    ("serve_raw:1", Cell::ServeRaw(1)),
    ("serve_raw:8", Cell::ServeRaw(8)),
    ("serve_raw:128", Cell::ServeRaw(128)),
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
    let Built { strategy, driver, streams } = build(cell.is_by_address(), cell.streams())?;
    let raw = || Raw::of(&strategy);
    Ok(match cell {
        Cell::Pair(bytes) => Some((loops.pair)(&Typed(&strategy), bytes, effort)),
        Cell::PairRaw(bytes) => raw().map(|raw| (loops.pair_raw)(&raw, bytes, effort)),
        Cell::PairHandle(bytes) => {
            let handle = Handle::new(strategy, driver);
            Some((loops.pair_handle)(&Typed(&handle), bytes, effort))
        }
        Cell::Streams(_) => Some((loops.streams)(&Typed(&strategy), &streams, effort)),
        Cell::StreamsRaw(_) => raw().map(|raw| (loops.streams_raw)(&raw, &streams, effort)),
        Cell::Serve(_) => Some((loops.serve)(&Typed(&strategy), &streams, effort)),
        Cell::ServeRaw(_) => raw().map(|raw| (loops.serve_raw)(&raw, &streams, effort)),
        Cell::Mix => Some((loops.mix)(&Typed(&strategy), effort)),
        Cell::MixRaw => raw().map(|raw| (loops.mix_raw)(&raw, effort)),
        Cell::Holes(holes) => Some((loops.holes)(&Typed(&strategy), holes, effort)),
        Cell::RecordStream => (loops.record_stream)(&strategy, streams[0], effort),
    })
}

/// The same on a driver's pool with nothing on top, which is opened if it has the case.
pub(super) fn time_pool(
    cell: Cell,
    open: impl FnOnce(usize) -> Result<(Pool, Vec<StreamId>), Box<dyn Error>>,
    effort: Effort,
) -> Result<Option<f64>, Box<dyn Error>> {
    let on_pool = |time: &dyn Fn(&Pool, &[StreamId]) -> f64| {
        let (pool, streams) = open(cell.streams())?;
        Ok(Some(time(&pool, &streams)))
    };
    match cell {
        Cell::Pair(bytes) => on_pool(&|pool, _| cases::pair(pool, bytes, effort)),
        Cell::Streams(_) => on_pool(&|pool, streams| cases::streams(pool, streams, effort)),
        Cell::Serve(_) => on_pool(&|pool, streams| cases::serve(pool, streams, effort)),
        Cell::Mix => on_pool(&|pool, _| cases::mix(pool, effort)),
        _ => Ok(None),
    }
}
