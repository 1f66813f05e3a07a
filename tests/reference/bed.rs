//! A device and an allocator for one test, with the checks that must hold after every step.
//!
//! `check` compares three independent books: the allocator's counters, its layout, and what the
//! simulated device has given out.

use std::sync::Arc;

use stratalloc::allocator::{Allocation, Caching, Counters, CrossStream, DeviceAllocator, Request};
use stratalloc::config::{Compat, Config, Settings};
use stratalloc::driver::sim::{CallCosts, EventMode, SimOptions};
use stratalloc::driver::{Driver, Sim};
use stratalloc::error::{AllocError, OutOfMemory};
use stratalloc::history::{BlockStateName, SegmentLayout};
use stratalloc::ids::StreamId;
use stratalloc::registry::{BuildOptions, build};
use stratalloc::size::PoolKind;
use stratalloc::stats::{PerPool, Statistics};
use stratalloc::strategies::Strategy;

/// The memory of an H200.
pub(crate) const H200_BYTES: u64 = 150_109_880_320;

/// The stream that most tests use, and two others.
pub(crate) const HOME: StreamId = StreamId(0);
pub(crate) const SIDE: StreamId = StreamId(0x40);
pub(crate) const FAR: StreamId = StreamId(0x80);

#[derive(Debug)]
pub(crate) struct Bed {
    pub(crate) sim: Arc<Sim>,
    pub(crate) strategy: Strategy,
}

/// Default settings under one of the two rule books.
pub(crate) fn rules(compat: Compat) -> Settings {
    Settings { compat, ..Settings::default() }
}

impl Bed {
    /// A native allocator with default settings on a device of `total_bytes`, whose events finish
    /// when a test says so or when somebody waits for them.
    pub(crate) fn new(total_bytes: u64) -> Self {
        Self::with(total_bytes, Settings::default())
    }

    pub(crate) fn with(total_bytes: u64, settings: Settings) -> Self {
        let sim = Arc::new(Sim::new(SimOptions {
            total_bytes,
            event_mode: EventMode::Manual,
            costs: CallCosts::NONE,
            ..SimOptions::default()
        }));
        let driver: Arc<dyn Driver> = Arc::<Sim>::clone(&sim);
        let config = Config::from_settings(settings);
        let strategy = build(&config, driver, BuildOptions { raw_addresses: true })
            .expect("native can be built on any driver");
        Self { sim, strategy }
    }

    pub(crate) fn ask(&self, bytes: u64, stream: StreamId) -> Result<Allocation, AllocError> {
        self.strategy.allocate(Request::new(bytes, stream))
    }

    #[track_caller]
    pub(crate) fn take(&self, bytes: u64) -> Allocation {
        self.take_on(bytes, HOME)
    }

    /// Takes a block and keeps it until the bed goes.
    #[track_caller]
    pub(crate) fn hold(&self, bytes: u64) {
        let _kept = self.take(bytes);
    }

    #[track_caller]
    pub(crate) fn take_on(&self, bytes: u64, stream: StreamId) -> Allocation {
        match self.ask(bytes, stream) {
            Ok(allocation) => allocation,
            Err(error) => panic!("{bytes} bytes on {stream}: {error}"),
        }
    }

    /// The report of a request that must fail.
    #[track_caller]
    pub(crate) fn fail(&self, bytes: u64, stream: StreamId) -> OutOfMemory {
        match self.ask(bytes, stream) {
            Err(AllocError::OutOfMemory(report)) => *report,
            other => panic!("{bytes} bytes on {stream}: expected out of memory, got {other:?}"),
        }
    }

    #[track_caller]
    pub(crate) fn give(&self, allocation: Allocation) {
        self.strategy.free(allocation).expect("a live handle is taken back");
    }

    #[track_caller]
    pub(crate) fn record(&self, allocation: &Allocation, stream: StreamId) {
        let recorded = self.cross_stream().record_stream(allocation, stream);
        recorded.expect("a live handle can be recorded");
    }

    pub(crate) fn cross_stream(&self) -> &dyn CrossStream {
        self.strategy.control().cross_stream.expect("native knows other streams")
    }

    pub(crate) fn caching(&self) -> &dyn Caching {
        self.strategy.control().caching.expect("native caches")
    }

    pub(crate) fn counters(&self) -> &dyn Counters {
        self.strategy.control().counters.expect("native counts")
    }

    pub(crate) fn statistics(&self) -> Statistics {
        self.counters().statistics()
    }

    pub(crate) fn layout(&self) -> Vec<SegmentLayout> {
        self.caching().layout()
    }

    /// Sizes of all segments, ascending.
    pub(crate) fn segment_sizes(&self) -> Vec<u64> {
        let mut sizes: Vec<_> = self.layout().iter().map(|segment| segment.size_bytes).collect();
        sizes.sort_unstable();
        sizes
    }

    pub(crate) fn apply(&self, settings: Settings) {
        self.caching().apply(&Config::from_settings(settings)).expect("the device can");
    }

    #[track_caller]
    pub(crate) fn empty_cache(&self) {
        self.caching().empty_cache().expect("the simulated device never fails to take back");
    }

    /// Everything that a refused call must leave alone.
    pub(crate) fn state(&self) -> (Vec<SegmentLayout>, Statistics, u64) {
        (self.layout(), self.statistics(), self.sim.total_calls())
    }

    /// The law that ties counters to the layout and to the device.
    #[track_caller]
    pub(crate) fn check(&self) {
        let engine = self.strategy.engine().expect("native has an engine");
        engine.check().expect("no invariant of a heap is broken");
        let (layout, now) = (self.layout(), self.statistics());
        let kinds = [
            (Some(PoolKind::Small), Sums::of(&layout, |kind| kind == PoolKind::Small)),
            (Some(PoolKind::Large), Sums::of(&layout, |kind| kind == PoolKind::Large)),
            (None, Sums::of(&layout, |_| true)),
        ];
        for (kind, sums) in kinds {
            let pick = |family: &PerPool| match kind {
                Some(PoolKind::Small) => family.small,
                Some(PoolKind::Large) => family.large,
                None => family.all,
            };
            for (name, family, expected) in [
                ("segment", &now.segment, sums.segments),
                ("reserved_bytes", &now.reserved_bytes, sums.reserved_bytes),
                ("allocation", &now.allocation, sums.allocations),
                ("allocated_bytes", &now.allocated_bytes, sums.allocated_bytes),
                ("active", &now.active, sums.active),
                ("active_bytes", &now.active_bytes, sums.active_bytes),
                ("requested_bytes", &now.requested_bytes, sums.requested_bytes),
                ("inactive_split", &now.inactive_split, sums.inactive_split),
                ("inactive_split_bytes", &now.inactive_split_bytes, sums.inactive_split_bytes),
            ] {
                let counter = pick(family);
                assert_eq!(counter.current, signed(expected), "{name} of {kind:?}");
                assert!(counter.peak >= counter.current, "peak of {name} of {kind:?}");
                assert_eq!(counter.allocated - counter.freed, counter.current, "{name}");
            }
        }
        assert_eq!(now.cached_bytes(), now.memory_reserved() - now.active_bytes.all.current);
        let device = self.sim.memory_info().expect("the simulated device always answers");
        let taken = device.total_bytes - device.free_bytes;
        assert!(taken >= now.memory_reserved().unsigned_abs(), "what is reserved was taken");
    }
}

/// What a layout says about the counters.
#[derive(Debug, Default)]
struct Sums {
    segments: u64,
    reserved_bytes: u64,
    allocations: u64,
    allocated_bytes: u64,
    active: u64,
    active_bytes: u64,
    requested_bytes: u64,
    inactive_split: u64,
    inactive_split_bytes: u64,
}

impl Sums {
    fn of(layout: &[SegmentLayout], counts: impl Fn(PoolKind) -> bool) -> Self {
        let mut sums = Self::default();
        for segment in layout.iter().filter(|segment| counts(segment.kind)) {
            sums.segments += 1;
            sums.reserved_bytes += segment.size_bytes;
            for block in &segment.blocks {
                if block.state == BlockStateName::Inactive {
                    if segment.blocks.len() > 1 {
                        sums.inactive_split += 1;
                        sums.inactive_split_bytes += block.size_bytes;
                    }
                    continue;
                }
                sums.active += 1;
                sums.active_bytes += block.size_bytes;
                sums.requested_bytes += block.requested_bytes;
                if block.state == BlockStateName::ActiveAllocated {
                    sums.allocations += 1;
                    sums.allocated_bytes += block.size_bytes;
                }
            }
        }
        sums
    }
}

pub(crate) fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).expect("test sizes are far below 2^63")
}
