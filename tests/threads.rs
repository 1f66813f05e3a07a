//! Several threads at once, under the shadow's eyes: no address is ever in two hands, and at rest
//! every counter is a recount.
//!
//! Peaks under overlapping calls are never below a sum that was seen at rest, and at rest never below
//! what is held. Callbacks and observers may allocate and free, and may panic.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};

use stratalloc::allocator::{Allocation, Caching, DeviceAllocator, Request};
use stratalloc::cache::Engine;
use stratalloc::config::{Config, Settings};
use stratalloc::driver::sim::{EventMode, SimOptions};
use stratalloc::driver::{Driver, Sim};
use stratalloc::error::AllocError;
use stratalloc::ids::StreamId;
use stratalloc::registry::{self, BuildOptions};
use stratalloc::size::MIB;
use stratalloc::strategies::Strategy;

use crate::common::law;

struct Bed {
    sim: Arc<Sim>,
    strategy: Strategy,
    /// End of each block in somebody's hands, by start.
    held: Mutex<BTreeMap<u64, u64>>,
}

impl Bed {
    fn new(settings: Settings) -> Self {
        let options = SimOptions {
            total_bytes: 1 << 30,
            event_mode: EventMode::Manual,
            ..SimOptions::default()
        };
        let sim = Arc::new(Sim::new(options));
        let driver = Arc::clone(&sim) as Arc<dyn Driver>;
        let config = Config::from_settings(settings);
        let strategy = registry::build(&config, driver, BuildOptions { raw_addresses: true })
            .expect("sim can do everything");
        Self { sim, strategy, held: Mutex::default() }
    }

    fn engine(&self) -> &Engine {
        self.strategy.engine().expect("built on the engine")
    }

    fn take(&self, bytes: u64, stream: u64) -> Option<Allocation> {
        match self.strategy.allocate(Request::new(bytes, StreamId(stream))) {
            Ok(block) => {
                let (start, end) = (block.address(), block.address() + block.size_bytes());
                let mut held = self.held.lock().expect("no thread panics");
                let before = held.range(..end).next_back();
                assert!(before.is_none_or(|(_, e)| *e <= start), "{start:#x} is in two hands");
                held.insert(start, end);
                Some(block)
            }
            Err(AllocError::OutOfMemory(_)) => None,
            Err(other) => panic!("{other}"),
        }
    }

    fn give(&self, block: Allocation) {
        self.held.lock().expect("no thread panics").remove(&block.address());
        self.strategy.free(block).expect("it is live");
    }

    fn check_at_rest(&self) {
        let info = self.sim.memory_info().expect("sim answers");
        let used = info.total_bytes - info.free_bytes - self.engine().unreleased_bytes();
        law::check_all(self.engine(), used).expect("every law holds at rest");
        let statistics = self.engine().statistics();
        for (name, family) in law::families(&statistics) {
            for counter in [family.all, family.large, family.small] {
                assert!(counter.peak >= counter.current, "{name}: {counter:?}");
                assert_eq!(counter.current, counter.allocated - counter.freed, "{name}");
            }
        }
    }
}

/// A small generator of numbers, one for each thread.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

const STEPS: u64 = if cfg!(debug_assertions) { 6_000 } else { 40_000 };
const SIZES: [u64; 8] = [1, 512, 4096, 700 << 10, MIB + 512, 3 * MIB, 11 * MIB, 33 * MIB];

/// One thread's random work. Every fourth block goes to the next thread, which frees it.
fn hammer(
    bed: &Bed,
    thread: u64,
    shared_stream: bool,
    next: &mpsc::Sender<Allocation>,
    mine: &mpsc::Receiver<Allocation>,
) {
    let mut numbers = Numbers(thread + 1);
    let stream = if shared_stream { 64 } else { 64 * (thread + 1) };
    let mut blocks = Vec::new();
    for _ in 0..STEPS {
        mine.try_iter().for_each(|block| bed.give(block));
        match numbers.below(8) {
            0..4 => {
                let size = SIZES[usize::try_from(numbers.below(8)).expect("an index")];
                blocks.extend(bed.take(size, stream));
            }
            4 if !blocks.is_empty() => {
                let at = usize::try_from(numbers.below(blocks.len() as u64)).expect("an index");
                next.send(blocks.swap_remove(at)).expect("the next thread listens");
            }
            5 if !blocks.is_empty() => {
                let at = usize::try_from(numbers.below(blocks.len() as u64)).expect("an index");
                let block = blocks.swap_remove(at);
                bed.engine().record_stream(&block, StreamId(7)).expect("it is live");
                bed.give(block);
            }
            _ if !blocks.is_empty() => {
                let at = usize::try_from(numbers.below(blocks.len() as u64)).expect("an index");
                bed.give(blocks.swap_remove(at));
            }
            _ => {}
        }
        if blocks.len() > 40 {
            blocks.drain(20..).for_each(|block| bed.give(block));
        }
    }
    blocks.into_iter().for_each(|block| bed.give(block));
}

/// Runs the threads, and one that finishes work, empties, reads and changes settings meanwhile.
fn hammer_together(threads: u64, shared_stream: bool, settings: &Settings) {
    let bed = Bed::new(settings.clone());
    let running = AtomicBool::new(true);
    std::thread::scope(|scope| {
        let meddler = scope.spawn(|| {
            let mut numbers = Numbers(99);
            while running.load(Ordering::Acquire) {
                match numbers.below(6) {
                    0 => bed.engine().empty_cache().expect("sim works"),
                    1 => drop(bed.engine().statistics()),
                    2 => bed.engine().set_limit_bytes(
                        (numbers.below(2) == 0).then(|| (200 + numbers.below(800)) * MIB),
                    ),
                    3 => {
                        let settings = Settings {
                            max_split_bytes: (numbers.below(2) == 0).then_some(32 * MIB),
                            expandable_segments: numbers.below(2) == 0,
                            ..settings.clone()
                        };
                        let config = Config::from_settings(settings);
                        bed.engine().apply(&config).expect("sim can do everything");
                    }
                    4 => bed.engine().reset_peaks(),
                    _ => bed.sim.complete_all(),
                }
            }
        });
        let (senders, receivers): (Vec<_>, Vec<_>) = (0..threads).map(|_| mpsc::channel()).unzip();
        let workers: Vec<_> = receivers
            .into_iter()
            .zip(0..threads)
            .map(|(mine, thread)| {
                let at = usize::try_from((thread + 1) % threads).expect("an index");
                let (next, bed) = (senders[at].clone(), &bed);
                scope.spawn(move || {
                    hammer(bed, thread, shared_stream, &next, &mine);
                    drop(next);
                    mine
                })
            })
            .collect();
        drop(senders);
        let inboxes: Vec<_> =
            workers.into_iter().map(|w| w.join().expect("it ends well")).collect();
        running.store(false, Ordering::Release);
        meddler.join().expect("it ends well");
        inboxes.iter().flat_map(mpsc::Receiver::try_iter).for_each(|block| bed.give(block));
    });
    bed.check_at_rest();
    bed.sim.complete_all();
    bed.engine().set_limit_bytes(None);
    bed.engine().empty_cache().expect("sim works");
    bed.check_at_rest();
    let statistics = bed.engine().statistics();
    assert_eq!((statistics.memory_allocated(), statistics.memory_reserved()), (0, 0));
}

#[test]
fn two_threads_on_one_stream_never_hold_the_same_bytes() {
    hammer_together(2, true, &Settings::default());
}

#[test]
fn two_threads_on_their_own_streams_never_hold_the_same_bytes() {
    hammer_together(2, false, &Settings::default());
}

#[test]
fn four_threads_with_every_option_never_hold_the_same_bytes() {
    let settings = Settings {
        garbage_collection_threshold: Some(0.7),
        release_lock_on_device_allocate: true,
        ..Settings::default()
    };
    hammer_together(4, false, &settings);
    hammer_together(4, true, &Settings { expandable_segments: true, ..settings });
}

#[test]
fn peaks_are_never_below_what_was_held_at_rest() {
    let bed = Bed::new(Settings::default());
    let mut most = 0;
    for round in 1..=20u64 {
        let blocks: Vec<Allocation> = std::thread::scope(|scope| {
            let take = |thread: u64| {
                let bed = &bed;
                scope.spawn(move || {
                    let sizes = (0..30).map(|n| 512 * (1 + (n * round + thread) % 97));
                    sizes.filter_map(|size| bed.take(size, 64 * thread)).collect::<Vec<_>>()
                })
            };
            let threads: Vec<_> = (1..=3).map(take).collect();
            threads.into_iter().flat_map(|t| t.join().expect("it ends well")).collect()
        });
        let statistics = bed.engine().statistics();
        most = most.max(statistics.memory_allocated());
        assert!(statistics.max_memory_allocated() >= most);
        blocks.into_iter().for_each(|block| bed.give(block));
    }
    bed.check_at_rest();
}

#[test]
fn a_callback_may_free_and_an_observer_may_allocate() {
    let bed = Arc::new(Bed::new(Settings::default()));
    let hoard = Arc::new(Mutex::new(vec![bed.take(600 * MIB, 0).expect("it fits")]));
    let (of_callback, hoarded) = (Arc::downgrade(&bed), Arc::clone(&hoard));
    bed.engine().hooks().unwrap().add_free_memory_callback(Arc::new(move || {
        let bed = of_callback.upgrade().expect("it lives");
        let hoarded = hoarded.lock().expect("no thread panics").pop();
        let freed = hoarded.is_some();
        hoarded.into_iter().for_each(|block| bed.give(block));
        freed
    }));
    let seen = Arc::new(Mutex::new(Vec::new()));
    let (of_observer, reports) = (Arc::downgrade(&bed), Arc::clone(&seen));
    bed.engine().hooks().unwrap().add_oom_observer(Arc::new(move |report| {
        let bed = of_observer.upgrade().expect("it lives");
        let inside = bed.take(512, 0).expect("a small block fits");
        bed.give(inside);
        assert!(bed.take(2 << 30, 0).is_none(), "fails again, and nobody is asked again");
        reports.lock().expect("no thread panics").push(report.clone());
    }));
    let second = bed.take(600 * MIB, 0).expect("the callback made room");
    assert!(bed.take(800 * MIB, 0).is_none());
    assert_eq!(seen.lock().expect("no thread panics").len(), 1);
    bed.give(second);
    bed.check_at_rest();
}

#[test]
fn a_callback_that_panics_leaves_a_working_allocator() {
    let bed = Bed::new(Settings::default());
    bed.engine().hooks().unwrap().add_free_memory_callback(Arc::new(|| panic!("a user's mistake")));
    let taken = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| bed.take(512, 0)));
    assert!(taken.is_err());
    bed.check_at_rest();
    let again = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| bed.take(512, 0)));
    assert!(again.is_err(), "the callback is asked again: it was not left behind as running");
    bed.check_at_rest();
}
