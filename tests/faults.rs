//! Makes each driver call of a mixed workload fail once. Nothing may be lost, leaked or left incomplete.
//!
//! A run without failures counts the workload's driver calls. Then, for each call and each kind of
//! error, the workload runs once with only that call failing, and once with every call from there on
//! failing. After each step with a failure the invariants of `common::invariants` must hold, and every
//! live block must still be live. After the workload everything must be freeable, and the allocator must
//! work as before.

use crate::common::prelude::*;

const A: StreamId = StreamId(0);
const B: StreamId = StreamId(7);
const C: StreamId = StreamId(3);
const DEVICE_BYTES: u64 = 128 * MIB;

/// One step of the workload. The first number of `Allocate`, `Free` and `Record` identifies the block.
#[derive(Clone, Copy, Debug)]
enum Step {
    Allocate(usize, u64, StreamId),
    Free(usize),
    Record(usize, StreamId),
    Finish(StreamId),
    Process,
    Empty,
    Limit(Option<u64>),
    /// A request that runs out of memory even if no driver call is made to fail.
    TooMuch(u64, StreamId),
}

const WORKLOAD: &[Step] = {
    use Step::*;
    &[
        Allocate(0, 512, A),
        Allocate(1, 3 * MIB, A),
        Allocate(2, 700 * KIB, B),
        Allocate(3, 11 * MIB, B),
        Allocate(4, 5 * MIB, C),
        // Blocks that wait for one or two other streams, and become free in another order than they were
        // freed.
        Record(1, B),
        Record(1, C),
        Record(3, A),
        Record(0, C),
        Free(1),
        Free(3),
        Free(0),
        Allocate(5, 2 * MIB, A),
        Finish(C),
        Process,
        Allocate(6, 512, A),
        Finish(B),
        Finish(A),
        Allocate(7, 3 * MIB, A),
        Empty,
        // Oversize blocks, and garbage collection near the limit.
        Limit(Some(110 * MIB)),
        Allocate(8, 26 * MIB, A),
        Allocate(9, 24 * MIB, B),
        Free(8),
        Allocate(10, 25 * MIB, A),
        Free(9),
        Free(10),
        Allocate(11, 40 * MIB, A),
        Record(11, B),
        Free(11),
        // This request fits only after waiting for the work of stream `B` on block 11.
        Allocate(12, 60 * MIB, C),
        TooMuch(100 * MIB, A),
        Record(12, A),
        Record(4, A),
        Free(12),
        Free(4),
        TooMuch(120 * MIB, B),
        Limit(None),
        Record(2, A),
        Free(2),
        Allocate(13, 90 * MIB, B),
        TooMuch(64 * MIB, C),
        Free(13),
        Allocate(14, 15 * MIB, C),
        Record(14, A),
        Record(14, B),
        Free(14),
        Empty,
        Allocate(15, MIB, A),
        // Leaves live, draining and cached blocks, which are freed when the allocator is dropped.
        Record(15, B),
        Free(15),
    ]
};

/// An allocator over a driver that fails on demand, and the live blocks.
#[derive(Debug)]
struct Bench {
    fixture: FixtureOn<Faulty<Arc<Sim>>>,
    held: Vec<Option<Allocation>>,
}

impl Bench {
    fn new(settings: &Settings) -> Self {
        let held = (0..WORKLOAD.len()).map(|_| None).collect();
        Self { fixture: FixtureOn::with(DEVICE_BYTES, settings.clone()), held }
    }

    fn driver(&self) -> &Faulty<Arc<Sim>> {
        &self.fixture.device
    }

    /// Performs a step and returns true if it failed. A failure is an error if no driver call failed in this
    /// step, unless an earlier failure explains it.
    fn perform(&mut self, step: Step) -> Result<bool, String> {
        let failures = self.driver().failed_calls();
        let failed = match step {
            Step::Allocate(name, bytes, stream) => {
                let made = self.fixture.try_allocate(bytes, stream);
                made.map(|allocation| self.held[name] = Some(allocation)).map_err(|e| e.to_string())
            }
            Step::TooMuch(bytes, stream) => {
                match self.fixture.try_allocate(bytes, stream) {
                    // An earlier allocation may have failed and left room, so this request may succeed.
                    Ok(made) if self.driver().failed_calls() > 0 => {
                        self.fixture.free(made).map_err(|error| error.to_string())
                    }
                    Ok(made) => return Err(format!("{made:?} cannot be")),
                    Err(AllocError::OutOfMemory(_)) => Ok(()),
                    Err(other) => Err(other.to_string()),
                }
            }
            Step::Free(name) => self.free(name)?,
            Step::Record(name, stream) => {
                let Some(allocation) = &self.held[name] else {
                    return Ok(false);
                };
                // `record_stream` calls no driver, so a failing driver must not affect it.
                self.fixture
                    .cross_stream()
                    .record_stream(allocation, stream)
                    .map_err(|e| e.to_string())?;
                Ok(())
            }
            Step::Finish(stream) => {
                self.driver().inner().complete_stream(stream);
                Ok(())
            }
            Step::Process => {
                self.fixture.cross_stream().process_events().map_err(|e| e.to_string())
            }
            Step::Empty => self.fixture.caching().empty_cache().map_err(|e| e.to_string()),
            Step::Limit(limit) => {
                self.fixture.caching().set_limit_bytes(limit);
                Ok(())
            }
        };
        let at_fault = self.driver().failed_calls() > failures;
        match failed {
            Err(wrong) if !at_fault && !self.starved(step) => Err(format!("fails alone: {wrong}")),
            failed => Ok(failed.is_err()),
        }
    }

    /// Returns true if a request may run out of memory without a driver failure, because an earlier
    /// failure left less room.
    fn starved(&self, step: Step) -> bool {
        matches!(step, Step::Allocate(..)) && self.driver().failed_calls() > 0
    }

    /// Frees a block, by its address if its number is odd. If the free fails, the block stays held.
    fn free(&mut self, name: usize) -> Result<Checked, String> {
        let Some(allocation) = self.held[name].take() else {
            return Ok(Ok(()));
        };
        if name % 2 == 1 {
            let freed = self.fixture.free_raw(allocation.address());
            return match freed {
                Ok(_) => Ok(Ok(())),
                Err(HandleError::Driver(error)) => {
                    self.held[name] = Some(allocation);
                    Ok(Err(error.to_string()))
                }
                Err(other) => Err(other.to_string()),
            };
        }
        match self.fixture.free(allocation) {
            Ok(()) => Ok(Ok(())),
            Err(refused) => {
                ensure!(matches!(refused.reason, HandleError::Driver(_)), "{}", refused.reason);
                self.held[name] = Some(refused.allocation);
                Ok(Err(refused.reason.to_string()))
            }
        }
    }

    /// Checks the invariants, and that exactly the held blocks are live.
    fn check(&self) -> Result<Vec<SegmentLayout>, String> {
        let layout = self.fixture.checked()?;
        let held = self.held.iter().flatten().map(|a| (a.address(), a.size_bytes()));
        let mut held: Vec<_> = held.collect();
        held.sort_unstable();
        ensure_eq!(invariants::live_blocks(&layout), held, "live blocks");
        Ok(layout)
    }

    fn run_workload(&mut self) -> Checked {
        for (at, &step) in WORKLOAD.iter().enumerate() {
            let before = self.driver().failed_calls();
            let wrong = |wrong| format!("step {at}, {step:?}: {wrong}");
            self.perform(step).map_err(wrong)?;
            if self.driver().failed_calls() > before {
                self.check().map_err(wrong)?;
            }
        }
        self.check().map(drop)
    }

    /// Ends the faults, frees everything, and runs the same workload again.
    fn recover(&mut self) -> Checked {
        self.driver().disarm();
        self.fixture.caching().set_limit_bytes(None);
        self.driver().inner().complete_all();
        for name in 0..self.held.len() {
            self.free(name)??;
        }
        self.check()?;
        self.driver().inner().complete_all();
        self.fixture.caching().empty_cache().map_err(|error| error.to_string())?;
        self.check()?;
        ensure_eq!(self.fixture.reserved_bytes(), 0, "reserved after everything was freed");
        self.run_workload()?;
        let statistics = self.fixture.stats();
        ensure!(statistics.allocation.all.current > 0, "the workload leaves blocks");
        Ok(())
    }
}

/// Returns settings with names, each of which exercises another part of the allocator.
fn ways() -> Vec<(&'static str, Settings)> {
    let plain = Settings::default();
    let tight = Settings {
        max_split_bytes: Some(24 * MIB),
        garbage_collection_threshold: Some(0.4),
        ..plain.clone()
    };
    let pytorch = Settings { compat: Compat::PyTorch, ..tight.clone() };
    let unlocked = Settings { release_lock_on_device_allocate: true, ..tight.clone() };
    let expandable = Settings { expandable_segments: true, ..plain.clone() };
    vec![
        ("plain", plain),
        ("tight", tight),
        ("pytorch", pytorch),
        ("unlocked", unlocked),
        ("expandable", expandable),
    ]
}

/// The only kind that means lack of memory, and one that stands for all others.
const KINDS: [DriverErrorKind; 2] = [DriverErrorKind::OutOfMemory, DriverErrorKind::DeviceLost];

fn calls_of_the_workload(settings: &Settings) -> u64 {
    let mut bench = Bench::new(settings);
    bench.driver().disarm();
    bench.run_workload().expect("nothing fails");
    bench.driver().counted_calls()
}

/// Runs the workload once for each driver call and kind of error, with that call failing, and all later
/// calls too if `repeat` is true.
fn fail_each_call(repeat: bool) {
    for (way, settings) in ways() {
        let calls = calls_of_the_workload(&settings);
        assert!(calls > 40, "{way}: the workload calls the driver only {calls} times");
        for (kind, at) in KINDS.into_iter().flat_map(|kind| (0..calls).map(move |at| (kind, at))) {
            let mut bench = Bench::new(&settings);
            bench.driver().arm(FaultPlan { at, kind, repeat, only: None });
            let output = bench.run_workload().and_then(|()| {
                ensure!(bench.driver().failed_calls() > 0, "the call never came");
                bench.recover()
            });
            if let Err(wrong) = output {
                panic!("{way}, {kind:?} at call {at}, repeat {repeat}: {wrong}");
            }
            let driver = Arc::clone(&bench.fixture.device);
            drop(bench);
            assert_eq!(all_returned(&driver), (0, 0), "{way}, {kind:?} at call {at}");
        }
    }
}

/// Returns the bytes and events that are still allocated on the device.
fn all_returned(driver: &Faulty<Arc<Sim>>) -> (u64, u64) {
    (driver.used_bytes(), driver.held().events)
}

#[test]
fn any_call_may_fail_once_and_nothing_is_lost_or_half_done() {
    fail_each_call(false);
}

#[test]
fn all_calls_may_fail_from_some_point_on_and_nothing_is_lost_or_half_done() {
    fail_each_call(true);
}

#[test]
fn an_allocator_that_goes_keeps_only_what_the_driver_refuses_to_take() {
    for (way, settings) in ways().into_iter().filter(|(_, s)| !s.expandable_segments) {
        let mut bench = Bench::new(&settings);
        bench.run_workload().expect("nothing fails");
        let layout = bench.check().expect("the invariants hold");
        let segments = layout.len() as u64;
        let total = invariants::reserved_bytes(&layout);
        for at in 0..segments {
            let mut bench = Bench::new(&settings);
            bench.run_workload().expect("nothing fails");
            let driver = Arc::clone(&bench.fixture.device);
            driver.fail_call(at, Some("free"));
            drop(bench);
            let kept = layout[usize::try_from(at).expect("few segments")].size_bytes;
            assert_eq!(all_returned(&driver), (kept, 0), "{way}: free {at} refused");
        }
        let driver = Arc::clone(&bench.fixture.device);
        let kind = DriverErrorKind::DeviceLost;
        driver.arm(FaultPlan { at: 0, kind, repeat: true, only: None });
        drop(bench);
        assert_eq!(all_returned(&driver).0, total, "{way}: a lost device keeps everything");
    }
}

#[test]
fn an_allocator_that_goes_keeps_only_the_pages_the_driver_refuses_to_take() {
    let settings = Settings { expandable_segments: true, ..Settings::default() };
    for (only, kept_most) in [("unmap", 20 * MIB), ("release", 20 * MIB), ("unreserve", 0)] {
        for at in 0..2 {
            let mut bench = Bench::new(&settings);
            bench.run_workload().expect("nothing fails");
            let driver = Arc::clone(&bench.fixture.device);
            driver.fail_call(at, Some(only));
            drop(bench);
            assert_eq!(driver.failed_calls(), 1, "{only} {at} is called");
            let (bytes, events) = all_returned(&driver);
            assert!(bytes <= kept_most && events == 0, "{only} {at}: {bytes} bytes are kept");
            assert_eq!(bytes > 0, kept_most > 0, "{only} {at}");
        }
    }
}

#[test]
fn an_event_that_cannot_be_recorded_leaves_the_block_with_its_caller() {
    for only in ["create_event", "record_event"] {
        for at in 0..2 {
            let mut bench = Bench::new(&Settings::default());
            for step in [Step::Allocate(0, 3 * MIB, A), Step::Record(0, B), Step::Record(0, C)] {
                bench.perform(step).expect("nothing fails yet");
            }
            bench.driver().fail_call(at, Some(only));
            assert_eq!(bench.perform(Step::Free(0)), Ok(true), "{only} {at}");
            bench.check().expect("the block is still live");
            assert_eq!(bench.perform(Step::Free(0)), Ok(false), "the second free is served");
            bench.check().expect("the block drains");
            let pending = bench.driver().inner().pending_events();
            let mut streams: Vec<_> = pending.into_iter().map(|(_, stream)| stream).collect();
            streams.sort_unstable();
            assert_eq!(streams, [C, B], "it waits for both streams, each once");
        }
    }
}

#[test]
fn an_event_that_cannot_be_queried_keeps_its_block_waiting() {
    let mut bench = Bench::new(&Settings::default());
    for step in [Step::Allocate(0, 3 * MIB, A), Step::Record(0, B), Step::Free(0), Step::Finish(B)]
    {
        bench.perform(step).expect("nothing fails yet");
    }
    bench.driver().fail_call(0, Some("query_event"));
    assert_eq!(bench.perform(Step::Allocate(1, 512, A)), Ok(true), "the request is refused");
    bench.check().expect("the block drains");
    assert_eq!(bench.perform(Step::Allocate(1, 3 * MIB, A)), Ok(false));
    let layout = bench.check().expect("the invariants hold");
    assert_eq!(layout.len(), 1, "the block came back and was used again");
}

#[test]
fn a_segment_that_the_driver_refuses_to_take_back_is_used_and_freed_by_address_as_before() {
    let mut bench = Bench::new(&Settings::default());
    bench.perform(Step::Allocate(0, 3 * MIB, A)).expect("nothing fails yet");
    bench.perform(Step::Free(0)).expect("nothing fails yet");
    let before = bench.check().expect("the invariants hold");
    bench.driver().fail_call(0, Some("free"));
    assert_eq!(bench.perform(Step::Empty), Ok(true), "the release is refused");
    assert_eq!(
        bench.check().expect("the invariants hold"),
        before,
        "the segment is back as it was"
    );
    let calls = bench.driver().inner().calls("allocate");
    let address =
        bench.fixture.try_allocate(2 * MIB, A).map(|b| b.address()).expect("a block is cached");
    assert_eq!(bench.driver().inner().calls("allocate"), calls, "no new segment");
    bench.fixture.record_stream_raw(address, B).expect("it is live");
    bench.fixture.free_raw(address).expect("it is found by its address");
    bench.driver().inner().complete_all();
    assert_eq!(bench.perform(Step::Empty), Ok(false), "now it goes");
    assert_eq!(bench.fixture.used_bytes(), 0);
}
