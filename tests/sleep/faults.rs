//! Makes each driver call of a pause, a free and a resume fail once, or from there on. A pause that
//! fails leaves the tag awake with its contents, a resume that fails leaves it asleep with its backup, and
//! nothing leaks.

use super::*;
use crate::common::folder::Folder;

const KINDS: [DriverErrorKind; 3] =
    [DriverErrorKind::OutOfMemory, DriverErrorKind::Other, DriverErrorKind::DeviceLost];

type Device = Faulty<Arc<Host>>;

struct Bench {
    device: Arc<Device>,
    allocator: Strategy,
    blocks: Vec<Allocation>,
    keeps_contents: bool,
}

impl Bench {
    fn new(conf: &str, tag: TagOptions, sizes: &[u64]) -> Self {
        let device = Arc::new(Faulty::new(Arc::new(Host::with_bytes(256 * MIB))));
        let allocator = built(conf, device.clone());
        let keeps_contents = tag.backup == Backup::Host;
        create(&allocator, tag);
        let blocks: Vec<_> = sizes.iter().map(|b| allocator.take_in(TAG, *b, HOME)).collect();
        blocks.iter().for_each(|block| write_ends(&*device, block, 1, HOME));
        allocator.record(&blocks[0], SIDE);
        // A free segment or free pages, which the pause releases.
        allocator.give(allocator.take_in(TAG, 50 * MIB, SIDE));
        Self { device, allocator, blocks, keeps_contents }
    }

    fn state(&self) -> TagState {
        info(&self.allocator).state
    }

    fn pause(&self) -> Checked {
        let paused = sleeping(&self.allocator).pause(TAG, &PauseOptions::default());
        let (state, failed) = (self.state(), self.device.failed_calls());
        match paused {
            Ok(_) => ensure_eq!(state, TagState::Asleep, "a pause that worked"),
            Err(error) => {
                ensure!(failed > 0, "a pause failed without a cause: {error}");
                ensure_eq!(state, TagState::Awake, "a pause that failed: {error}");
                self.check_contents()?;
            }
        }
        Ok(())
    }

    fn resume(&self) -> Checked {
        let resumed = sleeping(&self.allocator).resume(TAG);
        let (state, failed) = (self.state(), self.device.failed_calls());
        match resumed {
            Ok(_) => {
                ensure_eq!(state, TagState::Awake, "a resume that worked");
                self.check_contents()?;
            }
            Err(error) => {
                ensure!(failed > 0, "a resume failed without a cause: {error}");
                ensure_eq!(state, TagState::Asleep, "a resume that failed: {error}");
            }
        }
        Ok(())
    }

    fn check_contents(&self) -> Checked {
        for block in self.blocks.iter().filter(|_| self.keeps_contents) {
            let same = holds_ends(&**self.device.inner(), block, 1, HOME);
            ensure!(same, "the block at {:#x} has other bytes", block.address());
        }
        Ok(())
    }

    /// Frees a block, which must work whatever the driver does while the tag sleeps.
    fn free_one(&mut self) -> Checked {
        let block = self.blocks.pop().expect("there are some");
        match self.allocator.free(block) {
            Ok(()) => Ok(()),
            Err(error) if self.device.failed_calls() > 0 => {
                self.blocks.push(error.allocation);
                Ok(())
            }
            Err(error) => Err(format!("a free failed: {error}")),
        }
    }

    fn run(&mut self) -> Checked {
        self.pause()?;
        self.free_one()?;
        self.resume()?;
        if let Ok(block) = self.allocator.allocate(Request::new(3 * MIB, SIDE).in_pool(TAG)) {
            self.free(block)?;
        }
        self.pause()?;
        self.resume()
    }

    fn free(&self, block: Allocation) -> Checked {
        match self.allocator.free(block) {
            Err(error) if self.device.failed_calls() == 0 => Err(error.to_string()),
            _ => Ok(()),
        }
    }

    /// Ends without failures: the tag wakes with its contents, and nothing is left.
    fn end(self) -> Checked {
        self.device.disarm();
        sleeping(&self.allocator).resume(TAG).map_err(|error| format!("at the end: {error}"))?;
        self.check_contents()?;
        sleeping(&self.allocator)
            .pause(TAG, &PauseOptions::default())
            .and_then(|_| sleeping(&self.allocator).resume(TAG))
            .map_err(|error| format!("after the end: {error}"))?;
        self.check_contents()?;
        let Self { device, allocator, blocks, .. } = self;
        blocks.into_iter().for_each(|block| allocator.give(block));
        allocator.caching().empty_cache().map_err(|error| error.to_string())?;
        ensure_eq!(allocator.engine().expect("native").unreleased_bytes(), 0, "leftovers");
        drop(allocator);
        let held = device.inner().held();
        ensure!(held.is_nothing(), "it leaks {held:?}");
        Ok(())
    }
}

/// Fails every `step`-th call with one of the `KINDS` in turn; in long runs each call with each kind.
fn fail_each(conf: &str, tag: &TagOptions, sizes: &[u64], step: usize) {
    let long = runs(1) > 1;
    let step = if long { 1 } else { step };
    let mut counted = Bench::new(conf, tag.clone(), sizes);
    counted.device.disarm();
    counted.run().expect("nothing fails");
    let count = counted.device.counted_calls();
    counted.end().expect("nothing fails");
    assert!(count > 20, "{count} calls");
    let ways = (0..count).step_by(step).flat_map(|at| [(at, false), (at, true)]);
    for ((at, repeat), turn) in ways.zip(KINDS.iter().cycle()) {
        for kind in KINDS.iter().filter(|kind| long || *kind == turn) {
            let mut bench = Bench::new(conf, tag.clone(), sizes);
            bench.device.arm(FaultPlan { at, kind: *kind, repeat, only: None });
            let done = bench.run().and_then(|()| bench.end());
            if let Err(error) = done {
                panic!("{conf} {tag:?}, call {at} of {count}, {kind:?}, repeat {repeat}: {error}");
            }
        }
    }
}

#[test]
fn every_call_may_fail_in_both_kinds_of_segments() {
    let tags = kinds_of_backup().into_iter().chain([TagOptions::dropped("cache")]);
    for tag in tags.collect::<Vec<_>>() {
        for conf in BOTH {
            fail_each(conf, &tag, &[512, 100 * KIB, 1200 * KIB, 700], 1);
        }
    }
}

#[test]
fn every_call_may_fail_while_the_ring_is_in_flight() {
    let sizes = [19 * MIB, 512, 512];
    fail_each("", &TagOptions::host("weights"), &sizes, 12);
}

#[test]
fn every_call_may_fail_beside_files() {
    let folder = Folder::new("tag-faults");
    let directory = Some(folder.0.clone());
    let tag = TagOptions { directory, keep_free: true, ..TagOptions::host("weights") };
    for conf in BOTH {
        fail_each(conf, &tag, &[9 * MIB, 100 * KIB, 700], 9);
        assert_eq!(folder.names().len(), 0);
    }
}

/// A resume under memory pressure must not fail because only one buffer can be pinned.
#[test]
fn one_pinned_buffer_is_enough() -> Checked {
    let bench = Bench::new("", TagOptions::host("weights"), &[19 * MIB, 512]);
    let kind = DriverErrorKind::OutOfMemory;
    bench.device.arm(FaultPlan { at: 1, kind, repeat: true, only: Some("pin") });
    bench.pause()?;
    ensure_eq!(bench.state(), TagState::Asleep, "after the pause");
    bench.resume()?;
    ensure_eq!(bench.state(), TagState::Awake, "after the resume");
    ensure!(bench.device.failed_calls() > 0, "no call was refused");
    bench.end()
}
