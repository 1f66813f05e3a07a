//! The cases of one thread by name: what is built for each, and what is timed.

use crate::handle::Handle;
use crate::size::{KIB, MIB};

use super::cases::{Effort, Raw, Steps, Typed};
use super::loops::Loops;
use super::{Bench, Built, Shown, What};

/// One case.
#[derive(Clone, Copy, Debug)]
pub(super) enum Cell {
    /// By the allocation's handle.
    Typed(Steps),
    /// By bare address.
    Raw(Steps),
    /// Through the switchable handle.
    Handle(Steps),
    RecordStream,
}

use Cell::RecordStream;
use Steps::{Holes, Mix, Pair, Serve, Streams};

impl Cell {
    /// How many streams it uses besides the default one.
    fn streams(self) -> usize {
        match self {
            Self::Typed(steps) | Self::Raw(steps) | Self::Handle(steps) => steps.streams(),
            RecordStream => 1,
        }
    }
}

/// Those before the cases of several threads, by handle.
pub(super) const FIRST: [(&str, Cell); 14] = [
    ("pair:512B", Cell::Typed(Pair(512))),
    ("pair:64KiB", Cell::Typed(Pair(64 * KIB))),
    ("pair:2MiB", Cell::Typed(Pair(2 * MIB))),
    ("pair:64MiB", Cell::Typed(Pair(64 * MIB))),
    ("handle:512B", Cell::Handle(Pair(512))),
    ("streams:2", Cell::Typed(Streams(2))),
    ("streams:8", Cell::Typed(Streams(8))),
    ("streams:128", Cell::Typed(Streams(128))),
    ("serve:1", Cell::Typed(Serve(1))),
    ("serve:8", Cell::Typed(Serve(8))),
    ("serve:128", Cell::Typed(Serve(128))),
    ("mix:4096live", Cell::Typed(Mix)),
    ("holes:4096", Cell::Typed(Holes(4096))),
    ("holes:65536", Cell::Typed(Holes(65_536))),
];

/// The one behind them.
pub(super) const LAST: [(&str, Cell); 1] = [("record_stream:64KiB", RecordStream)];

/// Those by bare address.
pub(super) const RAW: [(&str, Cell); 11] = [
    ("pair_raw:512B", Cell::Raw(Pair(512))),
    ("pair_raw:64KiB", Cell::Raw(Pair(64 * KIB))),
    ("pair_raw:2MiB", Cell::Raw(Pair(2 * MIB))),
    ("pair_raw:64MiB", Cell::Raw(Pair(64 * MIB))),
    ("streams_raw:2", Cell::Raw(Streams(2))),
    ("streams_raw:8", Cell::Raw(Streams(8))),
    ("streams_raw:128", Cell::Raw(Streams(128))),
    ("serve_raw:1", Cell::Raw(Serve(1))),
    ("serve_raw:8", Cell::Raw(Serve(8))),
    ("serve_raw:128", Cell::Raw(Serve(128))),
    ("mix_raw:4096live", Cell::Raw(Mix)),
];

/// All of them.
pub(super) fn all() -> impl Iterator<Item = (&'static str, Cell)> {
    FIRST.into_iter().chain(LAST).chain(RAW)
}

/// Nanoseconds a step on an allocator, or a driver's pool, that is built for it. `None` where that has no such
/// calls.
pub(super) fn time(
    cell: Cell,
    what: What<'_>,
    args: &Bench,
    loops: &Loops,
    effort: Effort,
) -> Shown<f64> {
    let config = match (what, cell) {
        (What::Allocator(config), _) => config,
        (What::DriverPool, Cell::Typed(steps)) if !matches!(steps, Holes(_)) => {
            let (pool, streams) = args.open_pool(steps.streams())?;
            return Ok(Some(steps.time(&pool, &streams, effort)));
        }
        (What::DriverPool, _) => return Ok(None),
    };
    let is_raw = matches!(cell, Cell::Raw(_));
    let Built { strategy, driver, streams } = args.build(config, is_raw, cell.streams())?;
    Ok(match cell {
        Cell::Typed(steps) => Some((loops.typed)(&Typed(&strategy), steps, &streams, effort)),
        Cell::Raw(steps) => {
            Raw::of(&strategy).map(|raw| (loops.raw)(&raw, steps, &streams, effort))
        }
        Cell::Handle(steps) => {
            let handle = Handle::new(strategy, driver);
            Some((loops.handle)(&Typed(&handle), steps, &streams, effort))
        }
        RecordStream => (loops.record_stream)(&strategy, streams[0], effort),
    })
}
