//! Benchmark cases by name: the allocator that each builds, and the loop that it times.

use stratalloc::allocator::{DeviceAllocator, MemoryKind};
use stratalloc::handle::Handle;
use stratalloc::size::{KIB, MIB};

use super::cases::{self, Effort, Raw, Steps, Together, Typed};
use super::host_memory::{self, TOUCHED};
use super::loops::Loops;
use super::{Bench, Built, Timed, TimedKind, one};

/// A benchmark case.
#[derive(Clone, Copy, Debug)]
pub(super) enum BenchCase {
    /// Allocates and frees by handle.
    Typed(Steps),
    /// Allocates and frees by address.
    Raw(Steps),
    /// Allocates through the switchable `Handle`.
    Handle(Steps),
    RecordStream,
    /// Several threads that free by handle, each on its own stream or all on one.
    Threads {
        own_stream: bool,
    },
    /// Several threads that free by address, each on its own stream.
    ThreadsRaw,
    /// Several threads, each with its own cache of host memory.
    Guards,
    /// Writes to this many bytes of host memory, page by page.
    Touch(u64),
}

use BenchCase::{Guards, RecordStream, Threads, ThreadsRaw, Touch};
use Steps::{Holes, Mix, Pair, Serve, Streams};

impl BenchCase {
    /// Returns true if the case is timed with several numbers of threads.
    pub(super) fn is_crowd(self) -> bool {
        matches!(self, Threads { .. } | ThreadsRaw | Guards)
    }

    /// Returns how many streams the case uses in addition to the default one.
    fn streams(self, threads: usize) -> usize {
        match self {
            Self::Typed(steps) | Self::Raw(steps) | Self::Handle(steps) => steps.streams(),
            Threads { own_stream: true } | ThreadsRaw => threads,
            Threads { own_stream: false } | RecordStream => 1,
            Guards | Touch(_) => 0,
        }
    }
}

/// Cases by handle, printed before the latencies of single steps.
pub(super) const FIRST: [(&str, BenchCase); 14] = [
    ("pair:512B", BenchCase::Typed(Pair(512))),
    ("pair:64KiB", BenchCase::Typed(Pair(64 * KIB))),
    ("pair:2MiB", BenchCase::Typed(Pair(2 * MIB))),
    ("pair:64MiB", BenchCase::Typed(Pair(64 * MIB))),
    ("handle:512B", BenchCase::Handle(Pair(512))),
    ("streams:2", BenchCase::Typed(Streams(2))),
    ("streams:8", BenchCase::Typed(Streams(8))),
    ("streams:128", BenchCase::Typed(Streams(128))),
    ("serve:1", BenchCase::Typed(Serve(1))),
    ("serve:8", BenchCase::Typed(Serve(8))),
    ("serve:128", BenchCase::Typed(Serve(128))),
    ("mix:4096live", BenchCase::Typed(Mix)),
    ("holes:4096", BenchCase::Typed(Holes(4096))),
    ("holes:65536", BenchCase::Typed(Holes(65_536))),
];

/// Cases by handle, printed after the latencies of single steps.
pub(super) const LAST: [(&str, BenchCase); 3] = [
    ("threads:own_stream", Threads { own_stream: true }),
    ("threads:one_stream", Threads { own_stream: false }),
    ("record_stream:64KiB", RecordStream),
];

/// Cases by address.
pub(super) const RAW: [(&str, BenchCase); 12] = [
    ("pair_raw:512B", BenchCase::Raw(Pair(512))),
    ("pair_raw:64KiB", BenchCase::Raw(Pair(64 * KIB))),
    ("pair_raw:2MiB", BenchCase::Raw(Pair(2 * MIB))),
    ("pair_raw:64MiB", BenchCase::Raw(Pair(64 * MIB))),
    ("streams_raw:2", BenchCase::Raw(Streams(2))),
    ("streams_raw:8", BenchCase::Raw(Streams(8))),
    ("streams_raw:128", BenchCase::Raw(Streams(128))),
    ("serve_raw:1", BenchCase::Raw(Serve(1))),
    ("serve_raw:8", BenchCase::Raw(Serve(8))),
    ("serve_raw:128", BenchCase::Raw(Serve(128))),
    ("mix_raw:4096live", BenchCase::Raw(Mix)),
    ("threads_raw:own_stream", ThreadsRaw),
];

/// Cases of host memory only: threads with their own caches, and blocks whose pages are written.
pub(super) fn of_host_memory() -> Vec<(&'static str, BenchCase)> {
    let touched = TOUCHED.into_iter().map(|(case, bytes)| (case, Touch(bytes)));
    [("threads:own_guard", Guards)].into_iter().chain(touched).collect()
}

/// Returns all cases of one thread on a device.
pub(super) fn alone() -> impl Iterator<Item = (&'static str, BenchCase)> {
    FIRST.into_iter().chain(LAST).chain(RAW).filter(|(_, cell)| !cell.is_crowd())
}

/// Builds an allocator, or opens a driver's pool, and returns the time of a step. Returns `None` if it
/// does not support the case.
pub(super) fn time(
    cell: BenchCase,
    threads: usize,
    what: TimedKind<'_>,
    args: &Bench,
    loops: &Loops,
    effort: Effort,
) -> Timed<Together> {
    let config = match (what, cell) {
        (TimedKind::Allocator(config), _) => config,
        (TimedKind::DriverPool, BenchCase::Typed(steps)) if !matches!(steps, Holes(_)) => {
            let (pool, streams) = args.open_pool(steps.streams())?;
            return Ok(Some(one(steps.time(&pool, &streams, effort))));
        }
        (TimedKind::DriverPool, Threads { own_stream: true }) => {
            let (pool, streams) = args.open_pool(threads)?;
            return Ok(Some(cases::threads(&pool, pool.driver(), threads, &streams)));
        }
        (TimedKind::DriverPool, _) => return Ok(None),
    };
    let settings = config.settings();
    let is_raw = matches!(cell, BenchCase::Raw(_) | ThreadsRaw);
    let Built { strategy, driver, streams } = args.build(config, is_raw, cell.streams(threads))?;
    match (cell, strategy.control().memory) {
        (Guards, MemoryKind::Host) => return Ok(Some(host_memory::guards(settings, threads)?)),
        (Touch(bytes), MemoryKind::Host) => {
            return Ok(Some(one(host_memory::touch(&host_memory::own(settings)?, bytes))));
        }
        (Guards | Touch(_), _) => return Ok(None),
        _ => {}
    }
    let raw = || Raw::of(&strategy);
    Ok(match cell {
        BenchCase::Typed(steps) => {
            Some(one((loops.typed)(&Typed(&strategy), steps, &streams, effort)))
        }
        BenchCase::Raw(steps) => raw().map(|raw| one((loops.raw)(&raw, steps, &streams, effort))),
        BenchCase::Handle(steps) => {
            let handle = Handle::new(strategy, driver);
            Some(one((loops.handle)(&Typed(&handle), steps, &streams, effort)))
        }
        RecordStream => (loops.record_stream)(&strategy, streams[0], effort).map(one),
        Threads { .. } => Some((loops.threads)(&Typed(&strategy), &*driver, threads, &streams)),
        ThreadsRaw => raw().map(|raw| (loops.threads_raw)(&raw, &*driver, threads, &streams)),
        Guards | Touch(_) => None,
    })
}
